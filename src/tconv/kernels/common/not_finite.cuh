// Whether values are infinite or not a number, for where outputs that are so are computed again.
#pragma once

#include <ptx/cuda.cuh>

template <typename Real>
TCONV_DEVICE bool is_finite(Real value) {
    return value - value == 0;
}

// Whether a sum of split products is so small that low parts of its operands may have been lost below float32's
// least exponent. Zeros are taken to have lost none (docs/numerics.md has when they have).
TCONV_DEVICE bool is_tiny(float value) {
    return __float_as_uint(value) * 2 - 1 < __float_as_uint(0x1p-96f) * 2 - 1;
}

// Whether an output is computed again by its definition, once a neighbour is wrong; `split`: a sum of split products,
// where zero may be what is left of one that is tiny.
template <bool split = false, typename Real>
TCONV_DEVICE bool is_wrong(Real value) {
    if constexpr (split) {
        return !(fabsf(value) >= 0x1p-96f) || !is_finite(value);
    } else {
        return !is_finite(value);
    }
}

// Whether some of the values noted are, at one multiply-add for each.
template <typename Real, bool split = false>
struct NotFinite {
    Real zeros = 0;  // NaN from such a value on

    TCONV_DEVICE void note(Real value) {
        zeros += value * 0;
        if constexpr (split) {
            if (is_tiny(value)) zeros = __uint_as_float(0x7fffffffu);
        }
    }

    TCONV_DEVICE bool any() const { return !(zeros == 0); }
};
