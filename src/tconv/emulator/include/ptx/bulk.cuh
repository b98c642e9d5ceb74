// Bulk copies on the host: loads land with their mbarrier's phase, stores at the wait for them.
#pragma once

#include <ptx/shared_address.cuh>

namespace ptx {

inline void fence_proxy_async_shared() { emulator::fence_proxy_async(); }

inline void fence_proxy_async_global() {}  // device memory has one view here

inline void cp_async_bulk_global_to_shared(void* destination, const void* source, uint32_t bytes,
                                           uint64_t* barrier,
                                           emulator::Location at = emulator::Location::here()) {
    emulator::bulk_load(destination, source, bytes, barrier, at);
}

inline void cp_async_bulk_commit_group() { emulator::bulk_commit(); }

template <int groups>
inline void cp_async_bulk_wait_group() {
    emulator::bulk_wait(groups, false);
}

template <int groups>
inline void cp_async_bulk_wait_group_read() {
    emulator::bulk_wait(groups, true);
}

}  // namespace ptx
