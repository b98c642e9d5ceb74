// cvt: float and the 16-bit types, held as their bits; rounding to TF32.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

// Rounds to nearest, ties away from zero, as cuDNN does with its operands. The error is half that
// of the tensor core, which truncates the low 13 bits.
TCONV_DEVICE uint32_t cvt_rna_tf32_f32(float value) {
#if __CUDA_ARCH__ >= 800
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return bits;
#else
    uint32_t bits = __float_as_uint(value);
    bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    // NOTE: the addition alone would carry the NaN 0x7fffffff into the sign.
    return (finite ? bits + 0x1000u : bits) & 0xffffe000u;
#endif
}

TCONV_DEVICE float cvt_f32_f16(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

TCONV_DEVICE unsigned short cvt_rn_f16_f32(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// A bfloat16 is a float's upper half, on every architecture.
TCONV_DEVICE float cvt_f32_bf16(unsigned short bits) {
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

TCONV_DEVICE unsigned short cvt_rn_bf16_f32(float value) {
#if __CUDA_ARCH__ >= 900
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#elif __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(value));
    return static_cast<unsigned short>(pair);
#else
    uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

// Two values into one register, `low` in the lower half.
TCONV_DEVICE uint32_t cvt_rn_f16x2_f32(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return cvt_rn_f16_f32(low) | static_cast<uint32_t>(cvt_rn_f16_f32(high)) << 16;
#endif
}

TCONV_DEVICE uint32_t cvt_rn_bf16x2_f32(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return cvt_rn_bf16_f32(low) | static_cast<uint32_t>(cvt_rn_bf16_f32(high)) << 16;
#endif
}

// Two values times 2^exponent, rounded as cvt_rna_tf32_f32 rounds, and truncated below float16's
// normal numbers. The exponent costs no instruction: one addition rounds and scales.
// NOTE: a NaN may become a number, and a value that is too large 65504. The exponent is from 0 to
// 100. Zeros become 2^(exponent - 127) on the way, and must end as zeros.
TCONV_DEVICE uint32_t cvt_rna_f16x2_f32(float low, float high, int exponent = 0) {
    uint32_t added = 0x1000u + (uint32_t(exponent) << 23);
    low = __uint_as_float(__float_as_uint(low) + added);
    high = __uint_as_float(__float_as_uint(high) + added);
    uint32_t pair;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

}  // namespace ptx
