// The short floating-point formats, by integer arithmetic; for kernels and for the runtime.
#pragma once

#include <ptx/integers.cuh>

namespace emulator {

inline uint32_t bits_of(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

inline bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

// To nearest, ties away from zero.
// NOTE: a GPU cuts NaNs short; one whose payload is in the low 13 bits alone becomes infinite.
inline uint32_t tf32_of(float value) {
    uint32_t bits = bits_of(value);
    bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    return (finite ? bits + 0x1000u : bits) & 0xffffe000u;
}

// To nearest, ties to even, as a tensor map of type tfloat32 does.
inline uint32_t tf32_even_of(float value) {
    uint32_t bits = bits_of(value);
    if (is_nan(bits)) return 0x7fffe000u;
    return (bits + 0xfffu + (bits >> 13 & 1u)) & 0xffffe000u;
}

inline float float_of_f16(uint16_t bits) {
    uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    uint32_t exponent = bits >> 10 & 31u, fraction = bits & 0x3ffu;
    if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact
        return float_of(bits_of(static_cast<float>(fraction) * 0x1p-24f) | sign);
    }
    uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
    return float_of(sign | wide << 23 | fraction << 13);
}

// To nearest, ties to even; so the next two.
inline uint16_t f16_of(float value) {
    uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    uint32_t sign = bits >> 16 & 0x8000u;
    if (is_nan(bits)) return 0x7fff;
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        // Below the least normal number: adding 0.5 leaves the rounded fraction in the low bits.
        uint32_t rounded = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
        return static_cast<uint16_t>(sign | rounded);
    }
    uint32_t rounded = magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u);
    return static_cast<uint16_t>(sign | rounded >> 13);
}

inline float float_of_bf16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

inline uint16_t bf16_of(float value) {
    uint32_t bits = bits_of(value);
    if (is_nan(bits)) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace emulator
