// mma.sync: a warp's d += a * b with float32 sums. With g = lane / 4 and t = lane % 4:
//
//   d[0], d[1]: row g,     columns 2t, 2t+1 of 16x8;  d[2], d[3]: the same of row g + 8
//   k8 of TF32:  a = (g, t), (g+8, t), (g, t+4), (g+8, t+4);  b = (t, g), (t+4, g)
//   k8 of 16-bit pairs:   a = (g, 2t), (g+8, 2t);  b = (2t, g)
//   k16 of 16-bit pairs:  a = (g, 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8);  b = (2t, g), (2t+8, g)
//
// a is indexed (row, k), b (k, column). The lower half of a pair has the lower k.
// NOTE: the hardware truncates the low 13 bits of a TF32 operand. Round it first
// (cvt_rna_tf32_f32).
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

// sm_80
#define TCONV_MMA(name, shape, types)                                                       \
    TCONV_DEVICE void name(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { \
        asm volatile("mma.sync.aligned." shape ".row.col.f32." types                        \
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));   \
    }
TCONV_MMA(mma_m16n8k8_tf32, "m16n8k8", "tf32.tf32")
TCONV_MMA(mma_m16n8k16_bf16, "m16n8k16", "bf16.bf16")
TCONV_MMA(mma_m16n8k16_f16, "m16n8k16", "f16.f16")
#undef TCONV_MMA

// sm_80: d = a * b + c
TCONV_DEVICE void mma_m16n8k8_bf16(float (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[1],
                                   const float (&c)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%7, %8, %9, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

}  // namespace ptx
