// cp.async on the host: a copy lands at the wait for its group. Until then it reads as NaN.
#pragma once

#include <ptx/shared_address.cuh>

namespace ptx {

inline void cp_async_cg_16(void* destination, const void* source, bool valid = true,
                           emulator::Location at = emulator::Location::here()) {
    emulator::copy_async(destination, source, 16, valid ? 16 : 0, at);
}

template <int bytes>
inline void cp_async_ca(void* destination, const void* source, bool valid = true,
                        emulator::Location at = emulator::Location::here()) {
    static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
    emulator::copy_async(destination, source, bytes, valid ? bytes : 0, at);
}

inline void cp_async_commit_group() { emulator::copy_async_commit(); }

template <int groups>
inline void cp_async_wait_group() {
    emulator::copy_async_wait(groups, false);
}

inline void cp_async_wait_all() { emulator::copy_async_wait(0, true); }

inline void cp_async_mbarrier_arrive_noinc(uint64_t* barrier,
                                           emulator::Location at = emulator::Location::here()) {
    emulator::copy_async_mbarrier_arrive(barrier, at);
}

}  // namespace ptx
