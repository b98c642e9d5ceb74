// redux.sync (sm_80): reductions over a warp.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

// The largest. All lanes must call it.
TCONV_DEVICE uint32_t redux_sync_max_u32(uint32_t value) {
    uint32_t largest;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(value));
    return largest;
}

// The sum. All lanes must call it.
TCONV_DEVICE uint32_t redux_sync_add_u32(uint32_t value) {
    uint32_t sum;
    asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(value));
    return sum;
}

}  // namespace ptx
