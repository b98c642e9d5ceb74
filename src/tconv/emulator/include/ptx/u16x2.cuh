// Two unsigned 16-bit numbers on the host.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

template <typename Half>
inline uint32_t of_u16x2(uint32_t a, uint32_t b, Half half) {
    return uint32_t(uint16_t(half(a & 0xffff, b & 0xffff))) |
           uint32_t(uint16_t(half(a >> 16, b >> 16))) << 16;
}

inline uint32_t add_u16x2(uint32_t a, uint32_t b) {
    return of_u16x2(a, b, [](uint32_t x, uint32_t y) { return x + y; });
}

inline uint32_t min_u16x2(uint32_t a, uint32_t b) {
    return of_u16x2(a, b, [](uint32_t x, uint32_t y) { return x < y ? x : y; });
}

inline uint32_t max_u16x2(uint32_t a, uint32_t b) {
    return of_u16x2(a, b, [](uint32_t x, uint32_t y) { return x < y ? y : x; });
}

}  // namespace ptx
