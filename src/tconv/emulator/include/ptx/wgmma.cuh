// wgmma on the host: nothing is computed before wgmma_wait_group.
#pragma once

#include <ptx/matrix_descriptor.cuh>

namespace ptx {

inline void wgmma_fence() { emulator::wgmma_fence(); }
inline void wgmma_commit_group() { emulator::wgmma_commit(); }

template <int groups>
inline void wgmma_wait_group(emulator::Location at = emulator::Location::here()) {
    emulator::wgmma_wait(groups, at);
}

template <int N>
inline void wgmma_m64k8_tf32(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate,
                             emulator::Location at = emulator::Location::here()) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma's N is a multiple of 8 up to 256");
    emulator::wgmma_issue({emulator::MatrixType::tf32, N, false, false, nullptr, a, b, accumulate},
                          d, at);
}

template <int N>
inline void wgmma_m64k8_tf32(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                             emulator::Location at = emulator::Location::here()) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma's N is a multiple of 8 up to 256");
    emulator::wgmma_issue({emulator::MatrixType::tf32, N, false, false, a, 0, b, accumulate}, d,
                          at);
}

template <bool bfloat, int N, bool a_transposed = false, bool b_transposed = false>
inline void wgmma_m64k16(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate,
                         emulator::Location at = emulator::Location::here()) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma's N is a multiple of 8 up to 256");
    constexpr auto type = bfloat ? emulator::MatrixType::bf16 : emulator::MatrixType::f16;
    emulator::wgmma_issue({type, N, a_transposed, b_transposed, nullptr, a, b, accumulate}, d, at);
}

template <bool bfloat, int N, bool b_transposed = false>
inline void wgmma_m64k16(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                         emulator::Location at = emulator::Location::here()) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma's N is a multiple of 8 up to 256");
    constexpr auto type = bfloat ? emulator::MatrixType::bf16 : emulator::MatrixType::f16;
    emulator::wgmma_issue({type, N, false, b_transposed, a, 0, b, accumulate}, d, at);
}

}  // namespace ptx
