// mbarrier (sm_90): a barrier in shared memory that counts arrivals, and bytes of bulk copies.
//
// A phase ends when all arrivals and all expected bytes are there. The first phase has parity 0. A
// wait for a parity returns once the phase of that parity has ended. So a wait for parity 1 on a
// new barrier returns at once.
#pragma once

#include <ptx/shared_address.cuh>

namespace ptx {

TCONV_DEVICE void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(cvta_to_shared(barrier)),
                 "r"(arrivals)
                 : "memory");
}

TCONV_DEVICE void mbarrier_inval(uint64_t* barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(cvta_to_shared(barrier)) : "memory");
}

// Call it after the initialisations, before the barrier that publishes them to the block. The
// hardware that counts bytes must see them too.
TCONV_DEVICE void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

TCONV_DEVICE void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(cvta_to_shared(barrier))
                 : "memory");
}

// Arrives, and adds `bytes` to what the phase expects.
TCONV_DEVICE void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(cvta_to_shared(barrier)),
        "r"(bytes)
        : "memory");
}

// Whether the phase of this parity has ended. May wait a while before it returns false.
TCONV_DEVICE bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity) {
    uint32_t over;
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
        "selp.u32 %0, 1, 0, over;\n"
        "}"
        : "=r"(over)
        : "r"(cvta_to_shared(barrier)), "r"(parity)
        : "memory");
    return over != 0;
}

TCONV_DEVICE void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {
    }
}

}  // namespace ptx
