// CUDA's vector types, with CUDA's alignment.
#pragma once

#include <ptx/integers.cuh>

#define EMULATOR_VECTOR_TYPES(base, scalar)                                                     \
    struct base##1 { scalar x; };                                                               \
    struct alignas(2 * sizeof(scalar)) base##2 { scalar x, y; };                                \
    struct base##3 { scalar x, y, z; };                                                         \
    struct alignas(4 * sizeof(scalar) < 16 ? 4 * sizeof(scalar) : 16) base##4 {                 \
        scalar x, y, z, w;                                                                      \
    };                                                                                          \
    inline constexpr base##1 make_##base##1(scalar x) { return {x}; }                           \
    inline constexpr base##2 make_##base##2(scalar x, scalar y) { return {x, y}; }              \
    inline constexpr base##3 make_##base##3(scalar x, scalar y, scalar z) { return {x, y, z}; } \
    inline constexpr base##4 make_##base##4(scalar x, scalar y, scalar z, scalar w) {           \
        return {x, y, z, w};                                                                    \
    }

EMULATOR_VECTOR_TYPES(char, signed char)
EMULATOR_VECTOR_TYPES(uchar, unsigned char)
EMULATOR_VECTOR_TYPES(short, short)
EMULATOR_VECTOR_TYPES(ushort, unsigned short)
EMULATOR_VECTOR_TYPES(int, int)
EMULATOR_VECTOR_TYPES(uint, unsigned)
EMULATOR_VECTOR_TYPES(longlong, long long)
EMULATOR_VECTOR_TYPES(ulonglong, unsigned long long)
EMULATOR_VECTOR_TYPES(float, float)
EMULATOR_VECTOR_TYPES(double, double)

#undef EMULATOR_VECTOR_TYPES

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
