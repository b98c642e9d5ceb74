// A float's upper half, exponent and 7 bits, is enough to see whether it is large, small or not
// finite, and two of them fit a register.
#pragma once

#include <ptx/bf16x2.cuh>

// The upper halves of two magnitudes, `first` in the lower half.
// NOTE: by abs, not by a mask: the floating-point pipe has time where integer instructions bind.
TCONV_DEVICE uint32_t upper_magnitudes(float first, float second) {
    return ptx::abs_bf16x2(__byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632));
}
