// mma.sync on the host: exact products, whose sum is rounded to float32 once.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             emulator::Location at = emulator::Location::here()) {
    emulator::multiply(emulator::MatrixType::tf32, 8, d, a, b, at);
}

inline void mma_m16n8k8_bf16(float (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[1],
                             const float (&c)[4],
                             emulator::Location at = emulator::Location::here()) {
    for (int v = 0; v < 4; ++v) d[v] = c[v];
    emulator::multiply(emulator::MatrixType::bf16, 8, d, a, b, at);
}

inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              emulator::Location at = emulator::Location::here()) {
    emulator::multiply(emulator::MatrixType::bf16, 16, d, a, b, at);
}

inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             emulator::Location at = emulator::Location::here()) {
    emulator::multiply(emulator::MatrixType::f16, 16, d, a, b, at);
}

}  // namespace ptx
