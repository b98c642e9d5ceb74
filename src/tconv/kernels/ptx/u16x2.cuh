// Two unsigned 16-bit numbers in a register. One instruction from sm_90 on, several before, and for
// the compilers of CUDA 11, which know sm_90 but not these.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

TCONV_DEVICE uint32_t add_u16x2(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 12
    uint32_t sum;
    asm("add.u16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
#else
    return __vadd2(a, b);
#endif
}

TCONV_DEVICE uint32_t min_u16x2(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 12
    uint32_t smaller;
    asm("min.u16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b));
    return smaller;
#else
    return __vminu2(a, b);
#endif
}

TCONV_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 12
    uint32_t larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
#else
    return __vmaxu2(a, b);
#endif
}

}  // namespace ptx
