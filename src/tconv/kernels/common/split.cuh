// Strict float32 on the tensor cores: a value as two TF32 operands. a * b is then
// low * high + high * low + high * high, but for low * low, 2^-24 of it.
#pragma once

#include <ptx/cuda.cuh>

// A value as the sum of two operands. What is not finite, or would be rounded to infinity, is a low
// part alone: the other operand's low part would bring the opposite infinity, or a zero.
//
// The low part has 12 bits where an operand holds 11: cutting the last one off, as the tensor core
// does, errs as much as rounding it.
struct Split {
    uint32_t high, low;

    TCONV_DEVICE explicit Split(float value) {
        bool rounds = fabsf(value) < __uint_as_float(0x7f7ff000u);
        high = __float_as_uint(value) + 0x1000u & (rounds ? 0xffffe000u : 0);
        low = __float_as_uint(value - __uint_as_float(high));
    }
};
