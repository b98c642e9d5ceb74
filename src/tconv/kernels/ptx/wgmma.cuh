// wgmma (sm_90a): asynchronous d += a * b of a warpgroup. A has 64 rows, B has N columns, both are
// 32 bytes deep. B is in shared memory, A there or in registers.
//
// With w = the warp in its warpgroup, g = lane / 4 and t = lane % 4:
//   d[4j], d[4j+1]:   row 16w + g,     columns 8j + 2t and the next
//   d[4j+2], d[4j+3]: row 16w + g + 8, the same columns
//   a in registers: rows 16w + g, as for mma.sync (<ptx/mma.cuh>) of the same depth
//
// Order: wgmma_fence before the first product and after other accesses to its registers (d or a),
// fence_proxy_async_shared after ordinary stores to an operand, then products, commit, wait.
// NOTE: do not access d, a or the operands in shared memory before the wait.
#pragma once

#include <ptx/matrix_descriptor.cuh>
#include <ptx/wgmma_operands.cuh>

namespace ptx {

TCONV_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

TCONV_DEVICE void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the `groups` newest groups are in flight.
template <int groups>
TCONV_DEVICE void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

// Removes the parentheses that make a list one macro argument.
#define TCONV_LIST(...) __VA_ARGS__

#define TCONV_WGMMA_BEGIN(flag) "{\n.reg .pred keep;\nsetp.ne.b32 keep, " flag ", 0;\n"

// The product of N columns where `chosen`. `type` is its depth and types, `flags` says which
// operands are MN-major.
// NOTE: operand numbers of immediates must not depend on N, hence a branch for each.
#define TCONV_WGMMA_SHARED(chosen, type, flags, n, placeholders, operands, p0, p1, p2, ...)        \
    if constexpr (N == n && (chosen)) {                                                            \
        asm volatile(TCONV_WGMMA_BEGIN(p2) "wgmma.mma_async.sync.aligned.m64n" #n type             \
                                           " {" placeholders "}, " p0 ", " p1 ", keep, 1, 1" flags \
                                           ";\n}"                                                  \
                     : TCONV_LIST operands                                                         \
                     : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                         \
    }
#define TCONV_WGMMA_REGISTERS(chosen, type, flags, n, placeholders, operands, p0, p1, p2, p3, p4, \
                              p5)                                                                 \
    if constexpr (N == n && (chosen)) {                                                           \
        asm volatile(TCONV_WGMMA_BEGIN(p5) "wgmma.mma_async.sync.aligned.m64n" #n type            \
                                           " {" placeholders "}, {" p0 ", " p1 ", " p2 ", " p3    \
                                           "}, " p4 ", keep, 1, 1" flags ";\n}"                   \
                     : TCONV_LIST operands                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                        \
                       "r"(static_cast<int>(accumulate)));                                        \
    }

// Overwrites d if not `accumulate`, as those below.
template <int N>
TCONV_DEVICE void wgmma_m64k8_tf32(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma's N is a multiple of 8 up to 256");
#define TCONV_CASE(...) TCONV_WGMMA_SHARED(true, "k8.f32.tf32.tf32", "", __VA_ARGS__)
    TCONV_FOR_EACH_N(TCONV_CASE)
#undef TCONV_CASE
}

template <int N>
TCONV_DEVICE void wgmma_m64k8_tf32(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                   bool accumulate) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma's N is a multiple of 8 up to 256");
#define TCONV_CASE(...) TCONV_WGMMA_REGISTERS(true, "k8.f32.tf32.tf32", "", __VA_ARGS__)
    TCONV_FOR_EACH_N(TCONV_CASE)
#undef TCONV_CASE
}

#define TCONV_CASE(...)                                     \
    TCONV_OF_TYPE(bfloat, "k16.f32.bf16.bf16", __VA_ARGS__) \
    TCONV_OF_TYPE(!bfloat, "k16.f32.f16.f16", __VA_ARGS__)

// Of bfloat16 if `bfloat`, else of float16. "Transposed" is MN-major.
template <bool bfloat, int N, bool a_transposed = false, bool b_transposed = false>
TCONV_DEVICE void wgmma_m64k16(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma's N is a multiple of 8 up to 256");
#define TCONV_OF_TYPE(chosen, type, ...)                                                        \
    TCONV_WGMMA_SHARED((chosen) && !a_transposed && !b_transposed, type, ", 0, 0", __VA_ARGS__) \
    TCONV_WGMMA_SHARED((chosen) && !a_transposed && b_transposed, type, ", 0, 1", __VA_ARGS__)  \
    TCONV_WGMMA_SHARED((chosen) && a_transposed && !b_transposed, type, ", 1, 0", __VA_ARGS__)  \
    TCONV_WGMMA_SHARED((chosen) && a_transposed && b_transposed, type, ", 1, 1", __VA_ARGS__)
    TCONV_FOR_EACH_N(TCONV_CASE)
#undef TCONV_OF_TYPE
}

template <bool bfloat, int N, bool b_transposed = false>
TCONV_DEVICE void wgmma_m64k16(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                               bool accumulate) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma's N is a multiple of 8 up to 256");
#define TCONV_OF_TYPE(chosen, type, ...)                                       \
    TCONV_WGMMA_REGISTERS((chosen) && !b_transposed, type, ", 0", __VA_ARGS__) \
    TCONV_WGMMA_REGISTERS((chosen) && b_transposed, type, ", 1", __VA_ARGS__)
    TCONV_FOR_EACH_N(TCONV_CASE)
#undef TCONV_OF_TYPE
}

}  // namespace ptx
