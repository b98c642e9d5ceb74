// What float16 holds as TF32 would: both have 11 significant bits, float16 fewer exponents.
//
// Values that belong together, the pixels that a warp brings of a tile or all weights, fit if they are
// finite and none loses more below float16's least exponent (2^-24, cut off) than rounding may take from
// the largest of them (2^-12 of it). Zeros alone fit too.
//
// Strict float32 takes two of float16 for a value, a high and a low part. Then a value loses less than
// rounding may take from the largest, 2^-24 of it, where that is at least 1/2.
//
// NOTE: not fewer values than that: where most are zero, behind a ReLU, a few channels of a pixel are
// often one small value and zeros, and almost no tile would fit.
#pragma once

#include <ptx/convert.cuh>
#include <ptx/cuda.cuh>
#include <ptx/max.cuh>
#include <ptx/redux.cuh>

namespace float16_operands {

constexpr float most = 65504.0f;
constexpr float least = 0x1p-12f;
[[maybe_unused]] constexpr float least_of_parts = 0x1p-1f;

// Two values as they are rounded to nearest, ties away, and what that leaves of them.
//
// What is left has 12 bits where float16 holds 11: rounding loses one, 2^-24 of the value.
struct Parts {
    uint32_t high, low;

    TCONV_DEVICE Parts(float a, float b) {
        high = ptx::cvt_rna_f16x2_f32(a, b);
        low = ptx::cvt_rn_f16x2_f32(a - ptx::cvt_f32_f16(static_cast<unsigned short>(high)),
                                    b - ptx::cvt_f32_f16(static_cast<unsigned short>(high >> 16)));
    }
};

// From the bits of the largest magnitude; those of infinity and NaN are larger still.
TCONV_DEVICE bool fit(uint32_t largest, float scale = 1.0f, float least = float16_operands::least) {
    uint32_t from = __float_as_uint(least / scale), to = __float_as_uint(most / scale);
    return largest - from <= to - from || largest == 0;
}

// The largest magnitude of these and of others before them; NaN if one is.
template <int count>
TCONV_DEVICE float largest(float before, const float (&values)[count]) {
#pragma unroll
    for (float value : values) before = ptx::max_nan_f32(before, fabsf(value));
    return before;
}

// For all lanes of a warp: of bits of magnitudes.
TCONV_DEVICE uint32_t largest_of_warp(uint32_t bits) { return ptx::redux_sync_max_u32(bits); }

}  // namespace float16_operands
