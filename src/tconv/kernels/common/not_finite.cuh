// Detects outputs to recompute: values that are infinite, not a number or too small.
#pragma once

#include <common/upper_halves.cuh>
#include <ptx/cuda.cuh>
#include <ptx/u16x2.cuh>

template <typename Real>
TCONV_DEVICE bool is_finite(Real value) {
    return value - value == 0;
}

// Whether an output is recomputed by its definition, once a neighbour is wrong. `split`: the output
// is a sum of split products. If it is tiny or zero, low parts may have been lost below float32's
// least exponent.
template <bool split = false, typename Real>
TCONV_DEVICE bool is_wrong(Real value) {
    if constexpr (split) {
        return !(fabsf(value) >= 0x1p-96f) || !is_finite(value);
    } else {
        return !is_finite(value);
    }
}

// Whether some of the values noted are not finite. Costs one multiply-add for each.
template <typename Real>
struct NotFinite {
    Real zeros = 0;  // NaN from such a value on

    TCONV_DEVICE void note(Real value) { zeros += value * 0; }
    TCONV_DEVICE void note(Real first, Real second) { note(first), note(second); }
    TCONV_DEVICE bool any() const { return !(zeros == 0); }
};

// The same for sums of split products; tiny sums count too. Zeros are taken to have lost nothing
// (docs/numerics.md says when they have), and so is what is below 2^-133.
//
// It looks at upper halves (sign, exponent and 7 bits), two values at a time.
struct Unsound {
    uint32_t most = 0;             // the largest magnitudes, of first and of second values
    uint32_t least = 0x7fff7fffu;  // those but zero, less one: a zero's is larger

    TCONV_DEVICE void note(float first, float second) {
        uint32_t both = upper_magnitudes(first, second);
        most = ptx::max_u16x2(most, both);
        least = ptx::min_u16x2(least, ptx::add_u16x2(both, ~0u));
    }

    TCONV_DEVICE bool any() const {
        constexpr uint32_t each = 0x00010001u, infinite = 0x7f80, enough = (127 - 96) << 7;
        uint32_t too_large = most + (0x8000 - infinite) * each;
        uint32_t large_enough = least + (0x8000 - (enough - 1)) * each;
        return ((too_large | ~large_enough) & 0x80008000u) != 0;
    }
};
