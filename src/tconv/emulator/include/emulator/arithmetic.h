// CUDA's arithmetic built-ins that kernels may use. No <cmath>: it costs more than a small kernel.
#pragma once

#include <ptx/integers.cuh>

namespace emulator {

template <typename To, typename From>
inline To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From), "only the type changes, not the bits");
    To result;
    __builtin_memcpy(&result, &value, sizeof result);
    return result;
}

}  // namespace emulator

inline unsigned __float_as_uint(float value) { return emulator::bits_as<unsigned>(value); }
inline int __float_as_int(float value) { return emulator::bits_as<int>(value); }
inline float __uint_as_float(unsigned value) { return emulator::bits_as<float>(value); }
inline float __int_as_float(int value) { return emulator::bits_as<float>(value); }
inline long long __double_as_longlong(double value) { return emulator::bits_as<long long>(value); }
inline double __longlong_as_double(long long value) { return emulator::bits_as<double>(value); }
inline int __double2hiint(double value) {
    return static_cast<int>(emulator::bits_as<unsigned long long>(value) >> 32);
}
inline int __double2loint(double value) {
    return static_cast<int>(emulator::bits_as<unsigned long long>(value));
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __clz(int value) { return value ? __builtin_clz(static_cast<unsigned>(value)) : 32; }
inline int __clzll(long long value) {
    return value ? __builtin_clzll(static_cast<unsigned long long>(value)) : 64;
}
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline unsigned __brev(unsigned value) {
    unsigned result = 0;
    for (int bit = 0; bit < 32; ++bit) result |= (value >> bit & 1u) << (31 - bit);
    return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>(
        ((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31u)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >>
                                 (shift & 31u));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        unsigned code = selector >> (4 * i) & 15u;
        unsigned byte = static_cast<unsigned>(bytes >> (8 * (code & 7u))) & 255u;
        if (code & 8u) byte = byte & 128u ? 255u : 0u;
        result |= byte << (8 * i);
    }
    return result;
}

inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __double2float_rn(double value) { return static_cast<float>(value); }
inline int __float2int_rn(float value) { return static_cast<int>(__builtin_rintf(value)); }
inline int __float2int_rz(float value) { return static_cast<int>(value); }
inline float __int2float_rn(int value) { return static_cast<float>(value); }

inline float fabsf(float value) { return __builtin_fabsf(value); }
inline double fabs(double value) { return __builtin_fabs(value); }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float floorf(float value) { return __builtin_floorf(value); }
inline float ceilf(float value) { return __builtin_ceilf(value); }
inline float sqrtf(float value) { return __builtin_sqrtf(value); }
inline float copysignf(float a, float b) { return __builtin_copysignf(a, b); }

#define EMULATOR_MIN_MAX(type)                                          \
    inline constexpr type min(type a, type b) { return b < a ? b : a; } \
    inline constexpr type max(type a, type b) { return a < b ? b : a; }
EMULATOR_MIN_MAX(int)
EMULATOR_MIN_MAX(unsigned)
EMULATOR_MIN_MAX(long)
EMULATOR_MIN_MAX(unsigned long)
EMULATOR_MIN_MAX(long long)
EMULATOR_MIN_MAX(unsigned long long)
#undef EMULATOR_MIN_MAX
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }
inline constexpr unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
inline constexpr unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
inline constexpr unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
inline constexpr unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
inline int abs(int value) { return value < 0 ? -value : value; }
