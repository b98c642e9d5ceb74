// Two unsigned 16-bit numbers on the host.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

inline uint32_t add_u16x2(uint32_t a, uint32_t b) {
    return ((a + b) & 0xffffu) | ((a & 0xffff0000u) + (b & 0xffff0000u));
}

inline uint32_t min_u16x2(uint32_t a, uint32_t b) {
    uint32_t low_a = a & 0xffffu, low_b = b & 0xffffu, high_a = a - low_a, high_b = b - low_b;
    return (low_a < low_b ? low_a : low_b) | (high_a < high_b ? high_a : high_b);
}

inline uint32_t max_u16x2(uint32_t a, uint32_t b) {
    uint32_t low_a = a & 0xffffu, low_b = b & 0xffffu, high_a = a - low_a, high_b = b - low_b;
    return (low_a < low_b ? low_b : low_a) | (high_a < high_b ? high_b : high_a);
}

}  // namespace ptx
