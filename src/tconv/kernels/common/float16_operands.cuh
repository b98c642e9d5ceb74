// Float16 operands in place of TF32. Both have 11 significant bits; float16 has fewer exponents.
//
// Values that belong together are multiplied by a power of two, which brings the largest of a
// sample near float16's largest. Scaled values from 2^-14 on are then the same numbers in both
// types. Strict float32 takes two float16 numbers for a value, a high and a low part. From 2^-2 on
// they lose at most 2^-23 of it.
//
// Smaller values but zero are `slight`. What they lose is small beside the largest value, but an
// output may be made of slight values alone. So they are counted, by octets: 8 channels of a pixel.
// Where there are more than chance brings, another arithmetic takes over.
// NOTE: a bound on the largest value says nothing of slight ones. Nor does a bound on each
// channel's and each pixel's largest: with weights that are zero for most channels, an output is
// made of one channel's values.
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

// High and low parts of two values. The high part is rounded to nearest, ties away; the low part is
// the rest.
//
// The rest has 12 bits where float16 holds 11: rounding loses one, 2^-24 of the value.
struct Parts {
    uint32_t high, low;

    TCONV_DEVICE Parts(float a, float b) {
        high = ptx::cvt_rna_f16x2_f32(a, b);
        low = ptx::cvt_rn_f16x2_f32(a - ptx::cvt_f32_f16(static_cast<unsigned short>(high)),
                                    b - ptx::cvt_f32_f16(static_cast<unsigned short>(high >> 16)));
    }
};

// 2^exponent, a normal number.
TCONV_DEVICE float power_of_two(int exponent) {
    return __uint_as_float(uint32_t(127 + exponent) << 23);
}

// Twice the bits of a magnitude, less one. Its order is that of magnitudes, but zero comes last.
TCONV_DEVICE uint32_t order(float value) { return __float_as_uint(value) * 2 - 1; }

// The power of two that values are multiplied by, and which values float16 then holds.
struct Scale {
    int exponent;

    // Brings the largest of a sample, given by its bits, to at least 2^to and less than twice that.
    // The largest of all values may then be 2^(15 - to) times as large. A sample of zeros tells
    // nothing.
    // NOTE: never scales down, as ptx::cvt_rna_f16x2_f32 only adds to exponents. Values from 2^(to
    // + 1) on stay as they are, up to `most`.
    TCONV_DEVICE static Scale of_sample(uint32_t largest, int to) {
        constexpr int unknown = 8, highest = 60;
        int exponent = 127 + to - int(largest >> 23);
        return {largest == 0 ? unknown : min(max(exponent, 0), highest)};
    }

    TCONV_DEVICE float factor() const { return power_of_two(exponent); }
    TCONV_DEVICE float unit() const { return power_of_two(-exponent); }

    // The least `order` of a value that is not slight.
    TCONV_DEVICE uint32_t least(bool parts) const {
        int of_scaled = parts ? least_exponent_of_parts : least_exponent;
        return order(power_of_two(of_scaled - exponent));
    }

    // Whether float16 holds the largest magnitude; false for NaN.
    TCONV_DEVICE bool holds(float largest) const { return largest <= most * unit(); }
};

// The largest magnitude of these values and of those before them; NaN if one is.
template <int count>
TCONV_DEVICE float largest(float before, const float (&values)[count]) {
#pragma unroll
    for (float value : values) before = ptx::max_nan_f32(before, fabsf(value));
    return before;
}

// The largest bits of magnitudes in a warp, for all of its lanes.
TCONV_DEVICE uint32_t largest_of_warp(uint32_t bits) { return ptx::redux_sync_max_u32(bits); }

// What a thread has seen of values that float16 takes. `parts`: as two parts each. Then an octet
// whose values are all slight or zero, but not all zero, counts `dark` times.
template <bool parts, uint32_t dark = 1>
struct Seen;

// It looks at upper halves (sign, exponent and 7 bits), two values at a time. A magnitude below
// 2^-133 is taken for zero.
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
        // A half's highest bit stays set where the value is not slight.
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
        // By halves, so that an instruction seldom waits for the one before.
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
