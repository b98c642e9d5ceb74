// What float16 holds as TF32 would: both have 11 significant bits, float16 fewer exponents.
//
// Values that belong together are multiplied by a power of two, so that the largest of a sample of
// them comes near float16's largest. Those from 2^-14 on are then the same numbers in both. Strict
// float32 takes two of float16 for a value, a high and a low part: from 2^-2 on they lose at most
// 2^-23 of it.
//
// Smaller ones but zero are `slight`: what they lose is small beside the largest, but may be all
// that an output is made of. So they are counted, 8 channels of a pixel at a time, and where there
// are more than chance brings, another arithmetic takes over.
// NOTE: a bound on the largest value says nothing of them, nor does one on each channel's and each
// pixel's largest: with weights that are zero for most channels an output is made of one channel's.
#pragma once

#include <common/upper_halves.cuh>
#include <ptx/convert.cuh>
#include <ptx/cuda.cuh>
#include <ptx/max.cuh>
#include <ptx/redux.cuh>
#include <ptx/u16x2.cuh>

namespace float16_operands {

constexpr float most = 65504.0f;
constexpr int least_exponent = -14;
[[maybe_unused]] constexpr int least_exponent_of_parts = -2;

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

// 2^exponent, of a normal number.
TCONV_DEVICE float power_of_two(int exponent) {
    return __uint_as_float(uint32_t(127 + exponent) << 23);
}

// Twice the bits of a magnitude, less one: ordered as magnitudes are, but zero comes last.
TCONV_DEVICE uint32_t order(float value) { return __float_as_uint(value) * 2 - 1; }

// The power of two that values are multiplied by, and which of them float16 then holds.
struct Scale {
    int exponent;

    // Brings the largest of a sample, by its bits, to at least 2^to and less than twice that; the
    // largest of all may then be 2^(15 - to) times as large. A sample of zeros tells nothing.
    // NOTE: never downwards: ptx::cvt_rna_f16x2_f32 only adds to exponents. Values from 2^(to + 1)
    // on stay as they are, up to `most`.
    TCONV_DEVICE static Scale of_sample(uint32_t largest, int to) {
        constexpr int unknown = 8, highest = 60;
        int exponent = 127 + to - int(largest >> 23);
        return {largest == 0 ? unknown : min(max(exponent, 0), highest)};
    }

    TCONV_DEVICE float factor() const { return power_of_two(exponent); }
    TCONV_DEVICE float unit() const { return power_of_two(-exponent); }

    // Of `order`, from which on a value is not slight.
    TCONV_DEVICE uint32_t least(bool parts) const {
        int of_scaled = parts ? least_exponent_of_parts : least_exponent;
        return order(power_of_two(of_scaled - exponent));
    }

    // Of the largest magnitude; not of NaN.
    TCONV_DEVICE bool holds(float largest) const { return largest <= most * unit(); }
};

// The largest magnitude of these and of others before them; NaN if one is.
template <int count>
TCONV_DEVICE float largest(float before, const float (&values)[count]) {
#pragma unroll
    for (float value : values) before = ptx::max_nan_f32(before, fabsf(value));
    return before;
}

// For all lanes of a warp: of bits of magnitudes.
TCONV_DEVICE uint32_t largest_of_warp(uint32_t bits) { return ptx::redux_sync_max_u32(bits); }

// What a thread has seen of values that float16 takes; `parts`: in two. Of parts, an octet all of
// whose values are slight or zero, but not all zero, counts `dark` times.
template <bool parts, uint32_t dark = 1>
struct Seen;

// It looks at upper halves, sign, exponent and 7 bits, two values at a time. What has a magnitude
// below 2^-133 is taken for zero.
template <>
struct Seen<false> {
    uint32_t most = 0;  // the largest halves, of even and of odd values
    uint32_t slight = 0;  // octets with a slight value
    static constexpr int lone = 0;  // is counted of parts alone

    // 8 channels of a pixel.
    template <int count>
    TCONV_DEVICE void add(const float (&values)[count], Scale scale) {
        constexpr uint32_t signs = 0x80008000u;
        uint32_t least = ~signs;  // of those but zero, less one: a zero's would be larger
#pragma unroll
        for (int i = 0; i < count; i += 2) {
            uint32_t both = upper_magnitudes(values[i], values[i + 1]);
            least = ptx::min_u16x2(least, ptx::add_u16x2(both, ~0u));
            most = ptx::max_u16x2(most, both);
        }
        // A half's highest bit stays where it is not slight.
        uint32_t enough = scale.least(false) >> 17;
        uint32_t compared = least + (0x8000u - enough) * 0x00010001u;
        slight += (~compared & signs) != 0;
    }

    // At least as large as the largest magnitude; NaN if one is.
    TCONV_DEVICE float largest() const {
        uint32_t half = max(most >> 16, most & 0xffffu);
        return __uint_as_float(half == 0 ? 0 : half << 16 | 0xffffu);
    }
};

template <uint32_t dark>
struct Seen<true, dark> {
    float most = 0.0f;  // magnitude; NaN if one is
    uint32_t slight = 0;  // octets with a slight value
    int lone = 0;  // octets with one value that is not zero, less those with more

    // 8 channels of a pixel.
    // NOTE: where the sum of the magnitudes is the largest, all others are zero, or as good as
    // that.
    template <int count>
    TCONV_DEVICE void add(const float (&values)[count], Scale scale) {
        // By halves, so that the next instruction seldom waits for the last.
        uint32_t smallest[count / 2];
        float largest[count / 2], sums[count / 2];
#pragma unroll
        for (int i = 0; i < count / 2; ++i) {
            smallest[i] = min(order(values[i]), order(values[i + count / 2]));
            largest[i] = ptx::max_nan_f32(fabsf(values[i]), fabsf(values[i + count / 2]));
            sums[i] = fabsf(values[i]) + fabsf(values[i + count / 2]);
        }
#pragma unroll
        for (int n = count / 4; n > 0; n /= 2) {
#pragma unroll
            for (int i = 0; i < n; ++i) {
                smallest[i] = min(smallest[i], smallest[i + n]);
                largest[i] = ptx::max_nan_f32(largest[i], largest[i + n]);
                sums[i] += sums[i + n];
            }
        }
        uint32_t least = scale.least(true);
        if (smallest[0] < least) slight += order(largest[0]) < least ? dark : 1;
        if (sums[0] != 0) lone += sums[0] == largest[0] ? 1 : -1;
        most = ptx::max_nan_f32(most, largest[0]);
    }

    TCONV_DEVICE float largest() const { return most; }
};

}  // namespace float16_operands
