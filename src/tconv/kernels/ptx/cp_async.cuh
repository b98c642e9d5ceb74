// cp.async (sm_80): copies of a thread from global to shared memory. It waits for them in groups.
//
// NOTE: a thread waits only for its own copies. Other threads may read them after a barrier.
#pragma once

#include <ptx/shared_address.cuh>

namespace ptx {

// 16 bytes, bypassing L1. If not `valid`, zeros, and `source` is not read. L2 fetches the whole
// line of 128 bytes, whose rest neighbours request (2% of fsrcnn_x3).
TCONV_DEVICE void cp_async_cg_16(void* destination, const void* source, bool valid = true) {
    asm volatile(
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(cvta_to_shared(destination)),
        "l"(source), "r"(valid ? 16 : 0)
        : "memory");
}

// 4, 8 or 16 bytes through L1.
template <int bytes>
TCONV_DEVICE void cp_async_ca(void* destination, const void* source, bool valid = true) {
    static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(cvta_to_shared(destination)),
                 "l"(source), "n"(bytes), "r"(valid ? bytes : 0)
                 : "memory");
}

TCONV_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the `groups` newest groups of the thread are in flight.
template <int groups>
TCONV_DEVICE void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

TCONV_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Arrives once all copies that the thread has issued so far have landed. The barrier is one of
// <ptx/mbarrier.cuh> (sm_90). Its count includes this arrival.
TCONV_DEVICE void cp_async_mbarrier_arrive_noinc(uint64_t* barrier) {
    asm volatile(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(cvta_to_shared(barrier))
        : "memory");
}

}  // namespace ptx
