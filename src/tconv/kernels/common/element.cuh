// The element types of tensors, the wider type their sums are held in, and the way between them.
#pragma once

#include <ptx/convert.cuh>

struct float16 {
    unsigned short bits;
};

struct bfloat16 {
    unsigned short bits;
};

template <typename Element>
struct Accumulator {
    using type = float;
};

template <>
struct Accumulator<double> {
    using type = double;
};

TCONV_DEVICE float widen(float value) { return value; }
TCONV_DEVICE double widen(double value) { return value; }
TCONV_DEVICE float widen(float16 value) { return ptx::cvt_f32_f16(value.bits); }
TCONV_DEVICE float widen(bfloat16 value) { return ptx::cvt_f32_bf16(value.bits); }

// Rounds an accumulator to the element type, to nearest even; the one rounding of an output.
TCONV_DEVICE void narrow(float value, float& element) { element = value; }
TCONV_DEVICE void narrow(double value, double& element) { element = value; }
TCONV_DEVICE void narrow(float value, float16& element) {
    element.bits = ptx::cvt_rn_f16_f32(value);
}
TCONV_DEVICE void narrow(float value, bfloat16& element) {
    element.bits = ptx::cvt_rn_bf16_f32(value);
}

// An operand of a product: widened, and with round_to_tf32 rounded to TF32, to nearest, ties away.
template <bool round_to_tf32, typename Element>
TCONV_DEVICE typename Accumulator<Element>::type operand(Element element) {
    if constexpr (round_to_tf32) {
        static_assert(sizeof(Element) == 4, "only float32 has a TF32 mode");
        return __uint_as_float(ptx::cvt_rna_tf32_f32(widen(element)));
    } else {
        return widen(element);
    }
}

// A TF32 operand's bits for the tensor core, which cuts the low 13 off: rounded as cvt.rna.tf32
// does, but these are left as they come. Two instructions for three. An infinity or NaN stays as it
// is: the addition would carry the NaN 0x7fffffff into the sign.
TCONV_DEVICE uint32_t tf32_bits(float value) {
    uint32_t bits = __float_as_uint(value);
    return fabsf(value) < __uint_as_float(0x7f800000u) ? bits + 0x1000u : bits;
}

// N neighbouring values that move as one access.
template <typename Value, int N>
struct alignas(sizeof(Value) * N) Vector {
    Value values[N];
};
