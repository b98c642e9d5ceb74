// cvt on the host.
#pragma once

#include <emulator/arithmetic.h>
#include <emulator/formats.h>
#include <ptx/cuda.cuh>

namespace ptx {

inline uint32_t cvt_rna_tf32_f32(float value) { return emulator::tf32_of(value); }

inline float cvt_f32_f16(unsigned short bits) { return emulator::float_of_f16(bits); }
inline unsigned short cvt_rn_f16_f32(float value) { return emulator::f16_of(value); }
inline float cvt_f32_bf16(unsigned short bits) { return emulator::float_of_bf16(bits); }
inline unsigned short cvt_rn_bf16_f32(float value) { return emulator::bf16_of(value); }

inline uint32_t cvt_rn_f16x2_f32(float low, float high) {
    return emulator::f16_of(low) | static_cast<uint32_t>(emulator::f16_of(high)) << 16;
}

inline uint32_t cvt_rn_bf16x2_f32(float low, float high) {
    return emulator::bf16_of(low) | static_cast<uint32_t>(emulator::bf16_of(high)) << 16;
}

inline uint32_t cvt_rna_f16x2_f32(float low, float high, int exponent = 0) {
    auto cut = [&](float value) -> uint32_t {
        uint32_t added = 0x1000u + (uint32_t(exponent) << 23);
        float rounded = __uint_as_float(__float_as_uint(value) + added);
        unsigned short bits = emulator::f16_of(rounded);
        float nearest = emulator::float_of_f16(bits);
        bool away = rounded < 0 ? nearest < rounded : nearest > rounded;
        return away ? bits - 1u : bits;
    };
    return cut(low) | cut(high) << 16;
}

}  // namespace ptx
