// Division by what is known on the host alone, which would be twenty instructions: see
// kernels/hopper.py, division().
#pragma once

#include <ptx/cuda.cuh>

namespace {

// value / divisor, for values below 2^30: the upper half of a product, shifted.
TCONV_DEVICE unsigned divide(unsigned value, int multiplier, int shift) {
    return unsigned(uint64_t(4 * value) * unsigned(multiplier) >> 32) >> shift;
}

}  // namespace
