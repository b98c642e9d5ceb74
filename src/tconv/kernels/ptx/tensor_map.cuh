// cp.async.bulk.tensor (sm_90): one thread copies a box of a tensor that a tensor map describes.
//
// Coordinates are in elements, innermost first, and may lie outside the tensor. Such elements read
// as zero and are not written. The box in shared memory is aligned to 128 bytes (to 1024 for a
// swizzle of 128 bytes, if the pattern must start with the box). With a swizzle, each row of the
// box takes the swizzle's whole span, even if it is shorter. An mbarrier counts only the row's own
// bytes.
// NOTE: an H200 stops with an illegal instruction if the innermost coordinate is no multiple of 16
// bytes, or if a coordinate of a store is negative.
#pragma once

#include <ptx/bulk.cuh>

namespace ptx {

// 128 bytes that the driver wrote. A kernel takes it by value in a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

TCONV_DEVICE void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads. All bytes of the box count towards the barrier's phase, also those outside the tensor.

TCONV_DEVICE void cp_async_bulk_tensor_3d_global_to_shared(void* destination, const TensorMap* map,
                                                           int c0, int c1, int c2,
                                                           uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(cvta_to_shared(destination)),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(cvta_to_shared(barrier))
        : "memory");
}

TCONV_DEVICE void cp_async_bulk_tensor_4d_global_to_shared(void* destination, const TensorMap* map,
                                                           int c0, int c1, int c2, int c3,
                                                           uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(cvta_to_shared(destination)),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(cvta_to_shared(barrier))
        : "memory");
}

TCONV_DEVICE void cp_async_bulk_tensor_5d_global_to_shared(void* destination, const TensorMap* map,
                                                           int c0, int c1, int c2, int c3, int c4,
                                                           uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(cvta_to_shared(destination)),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(cvta_to_shared(barrier))
        : "memory");
}

// A store. The thread waits for it in groups: see <ptx/bulk.cuh>.

TCONV_DEVICE void cp_async_bulk_tensor_5d_shared_to_global(const TensorMap* map, int c0, int c1,
                                                           int c2, int c3, int c4,
                                                           const void* source) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], "
        "[%6];" ::"l"(map),
        "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(cvta_to_shared(source))
        : "memory");
}

}  // namespace ptx
