// mbarriers on the host: copies land when a thread sees their phase complete.
#pragma once

#include <ptx/shared_address.cuh>

namespace ptx {

inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals,
                          emulator::Location at = emulator::Location::here()) {
    emulator::mbarrier_init(barrier, arrivals, at);
}

inline void mbarrier_inval(uint64_t* barrier, emulator::Location at = emulator::Location::here()) {
    emulator::mbarrier_inval(barrier, at);
}

inline void fence_mbarrier_init() {}

inline void mbarrier_arrive(uint64_t* barrier, emulator::Location at = emulator::Location::here()) {
    emulator::mbarrier_arrive(barrier, 1, at);
}

inline void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes,
                                      emulator::Location at = emulator::Location::here()) {
    emulator::mbarrier_arrive_expect_tx(barrier, bytes, at);
}

inline bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity,
                                     emulator::Location at = emulator::Location::here()) {
    return emulator::mbarrier_try_wait(barrier, parity, at);
}

inline void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity,
                                 emulator::Location at = emulator::Location::here()) {
    emulator::mbarrier_wait(barrier, parity, at);
}

}  // namespace ptx
