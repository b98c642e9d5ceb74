// ldmatrix (sm_75) and stmatrix (sm_90): 8x8 matrices of 16-bit elements between shared memory and
// a warp's registers.
//
// Lanes 8i to 8i+7 give the addresses of the rows of matrix i, 16 bytes each and aligned to 16. A
// lane's register i holds two neighbours of matrix i: row lane/4, columns 2*(lane%4) and the next.
// `trans` transposes the matrix. A row of 32-bit elements has four, one in a register.
#pragma once

#include <ptx/shared_address.cuh>

namespace ptx {

#define TCONV_LDMATRIX(name, trans)                                                              \
    TCONV_DEVICE void name(uint32_t (&d)[4], const void* row) {                                  \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" trans ".shared.b16 {%0, %1, %2, %3}, [%4];" \
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                            \
                     : "r"(cvta_to_shared(row))                                                  \
                     : "memory");                                                                \
    }
#define TCONV_STMATRIX(name, trans)                                                    \
    TCONV_DEVICE void name(void* row, const uint32_t (&s)[4]) {                        \
        asm volatile("stmatrix.sync.aligned.m8n8.x4" trans                             \
                     ".shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(cvta_to_shared(row)), \
                     "r"(s[0]), "r"(s[1]), "r"(s[2]), "r"(s[3])                        \
                     : "memory");                                                      \
    }

TCONV_LDMATRIX(ldmatrix_x4, "")
TCONV_LDMATRIX(ldmatrix_x4_trans, ".trans")
TCONV_STMATRIX(stmatrix_x4, "")
TCONV_STMATRIX(stmatrix_x4_trans, ".trans")

#undef TCONV_LDMATRIX
#undef TCONV_STMATRIX

}  // namespace ptx
