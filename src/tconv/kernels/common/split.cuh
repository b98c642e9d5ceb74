// Strict float32 on the tensor cores: a value is the sum of three bfloat16 numbers. They have
// float32's exponents, and hold its 24 bits between them. Six products of a * b count; the others
// are together at most 2^-24 of it:
//
//   low * high + middle * middle + high * low + middle * high + high * middle + high * high
#pragma once

#include <ptx/convert.cuh>
#include <ptx/cuda.cuh>

// The parts of two values, the first value's in the lower halves. A value that is not finite, or is
// rounded to infinity, has a part that is not a number. So have the sums that read it, which are
// recomputed (<common/not_finite.cuh>).
struct Split {
    uint32_t high, middle, low;

    TCONV_DEVICE Split(float first, float second) {
        high = take(first, second);
        middle = take(first, second);
        low = take(first, second);
    }

    // The parts of both values times 2^16. The last bit of float32's least number is then
    // bfloat16's least number, so that no part is lost below it. Values from 2^112 on become
    // infinite.
    TCONV_DEVICE static Split scaled(float first, float second) {
        return Split(first * 0x1p16f, second * 0x1p16f);
    }

    // Takes a sum of products of scaled values back.
    static constexpr float rescale = 0x1p-32f;

    // In this order small products come first. The parts of a, and of b, by numbers: 0 high,
    // 1 middle, 2 low. A digit of each product, the first one's last: tables would be memory.
    static constexpr int products = 6;

    TCONV_DEVICE static constexpr int part_of_a(int product) {
        return 0x001012 >> product * 4 & 0xf;
    }
    TCONV_DEVICE static constexpr int part_of_b(int product) {
        return 0x010210 >> product * 4 & 0xf;
    }

private:
    // Rounds both values to nearest and subtracts that from them.
    TCONV_DEVICE static uint32_t take(float& first, float& second) {
        uint32_t part = ptx::cvt_rn_bf16x2_f32(first, second);
        first -= __uint_as_float(part << 16);
        second -= __uint_as_float(part & 0xffff0000u);
        return part;
    }
};
