// cp.async (sm_80): a thread's own copies from global to shared memory, waited for in groups.
//
// NOTE: a thread's wait covers its own copies alone; others may read them after a barrier.
#pragma once

#include <ptx/shared_address.cuh>

namespace ptx {

// 16 bytes past L1; all zero where not `valid`, and then `source` is not read. L2 fetches the whole
// line of 128 bytes, of which neighbours ask for the rest (2% of fsrcnn_x3).
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

// Until at most `groups` of the thread's newest groups are under way.
template <int groups>
TCONV_DEVICE void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

TCONV_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// One arrival once all copies that the thread has asked for so far are there (sm_90: the barrier is
// one of <ptx/mbarrier.cuh>); it is among those that the barrier was initialised with.
TCONV_DEVICE void cp_async_mbarrier_arrive_noinc(uint64_t* barrier) {
    asm volatile(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(cvta_to_shared(barrier))
        : "memory");
}

}  // namespace ptx
