// Whether values are infinite or not a number, for where outputs that are so are computed again.
#pragma once

#include <ptx/cuda.cuh>

template <typename Real>
TCONV_DEVICE bool is_finite(Real value) {
    return value - value == 0;
}

// Whether some of the values noted are not finite, at one multiply-add for each.
template <typename Real>
struct NotFinite {
    Real zeros = 0;  // NaN from such a value on

    TCONV_DEVICE void note(Real value) { zeros += value * 0; }
    TCONV_DEVICE bool any() const { return !(zeros == 0); }
};
