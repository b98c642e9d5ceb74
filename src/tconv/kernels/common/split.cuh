// Strict float32 on the tensor cores: a value as the sum of three bfloat16 numbers, which have
// float32's exponents and hold its 24 bits between them. Of a * b six products count; the others
// are 2^-24 of it together, at most:
//
//   low * high + middle * middle + high * low + middle * high + high * middle + high * high
#pragma once

#include <ptx/convert.cuh>
#include <ptx/cuda.cuh>

// Of two values, the first one's parts in the lower halves. What is not finite, or is rounded to
// infinity, has a part that is not a number: so have the sums that read it, which are computed
// again (<common/not_finite.cuh>).
struct Split {
    uint32_t high, middle, low;

    TCONV_DEVICE Split(float first, float second) {
        high = take(first, second);
        middle = take(first, second);
        low = take(first, second);
    }

private:
    // Takes both, rounded to nearest, off the values.
    TCONV_DEVICE static uint32_t take(float& first, float& second) {
        uint32_t part = ptx::cvt_rn_bf16x2_f32(first, second);
        first -= __uint_as_float(part << 16);
        second -= __uint_as_float(part & 0xffff0000u);
        return part;
    }
};
