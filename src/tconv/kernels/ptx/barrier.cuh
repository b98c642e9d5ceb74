// bar: the block's named barriers. Number 0 is __syncthreads()' own.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

// Waits until `threads` threads wait. A multiple of 32.
TCONV_DEVICE void bar_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace ptx
