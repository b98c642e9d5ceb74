// Two unsigned 16-bit numbers in a register. One instruction from sm_90 on, several before, and for
// the compilers of CUDA 11, which know sm_90 but not these.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 12
#define TCONV_U16X2(name, instruction, before_sm_90)                    \
    TCONV_DEVICE uint32_t name(uint32_t a, uint32_t b) {                \
        uint32_t found;                                                 \
        asm(instruction " %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b)); \
        return found;                                                   \
    }
#else
#define TCONV_U16X2(name, instruction, before_sm_90) \
    TCONV_DEVICE uint32_t name(uint32_t a, uint32_t b) { return before_sm_90(a, b); }
#endif

TCONV_U16X2(add_u16x2, "add.u16x2", __vadd2)
TCONV_U16X2(min_u16x2, "min.u16x2", __vminu2)
TCONV_U16X2(max_u16x2, "max.u16x2", __vmaxu2)

#undef TCONV_U16X2

}  // namespace ptx
