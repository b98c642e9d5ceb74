// cp.async.bulk (sm_90): one thread copies a contiguous piece. Addresses and sizes are multiples
// of 16 bytes.
#pragma once

#include <ptx/shared_address.cuh>

namespace ptx {

// Orders ordinary accesses to shared memory before those of bulk copies, tensor copies and wgmma to
// the same bytes. The threads that made the former execute it before the barrier, or the thread of
// the same block that makes the latter executes it after the barrier (Lustig et al., Mixed-Proxy
// Extensions for the NVIDIA PTX Memory Consistency Model, 2022, section 5.4).
TCONV_DEVICE void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders ordinary stores to device memory before copies from it in the same kernel. Threads that
// store execute it before they signal the end of their stores. Threads that issue the copies
// execute it too.
TCONV_DEVICE void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Its bytes count towards the barrier's phase, which must expect them.
TCONV_DEVICE void cp_async_bulk_global_to_shared(void* destination, const void* source,
                                                 uint32_t bytes, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(cvta_to_shared(destination)),
        "l"(source), "r"(bytes), "r"(cvta_to_shared(barrier))
        : "memory");
}

TCONV_DEVICE void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most the `groups` newest groups of the thread's stores are in flight.
template <int groups>
TCONV_DEVICE void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(groups) : "memory");
}

// As above, but waits only until the shared memory has been read and may be overwritten.
template <int groups>
TCONV_DEVICE void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(groups) : "memory");
}

}  // namespace ptx
