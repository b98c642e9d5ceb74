// Two bfloat16 numbers in a register.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

TCONV_DEVICE uint32_t abs_bf16x2(uint32_t values) {
#if __CUDA_ARCH__ >= 900
    uint32_t magnitudes;
    asm("abs.bf16x2 %0, %1;" : "=r"(magnitudes) : "r"(values));
    return magnitudes;
#else
    return values & 0x7fff7fffu;
#endif
}

}  // namespace ptx
