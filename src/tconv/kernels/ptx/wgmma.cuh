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

// Overwrites d if not `accumulate`.
template <int N>
TCONV_DEVICE void wgmma_m64k8_tf32(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma's N is a multiple of 8 up to 256");
#define TCONV_CASE(n, placeholders, operands, p0, p1, p2, p3, p4, p5)                         \
    if constexpr (N == n) {                                                                   \
        asm volatile(TCONV_WGMMA_BEGIN(p2) "wgmma.mma_async.sync.aligned.m64n" #n             \
                                           "k8.f32.tf32.tf32 {" placeholders "}, " p0 ", " p1 \
                                           ", keep, 1, 1;\n}"                                 \
                     : TCONV_LIST operands                                                    \
                     : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                    \
    }
    TCONV_FOR_EACH_N(TCONV_CASE)
#undef TCONV_CASE
}

template <int N>
TCONV_DEVICE void wgmma_m64k8_tf32(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                   bool accumulate) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma's N is a multiple of 8 up to 256");
#define TCONV_CASE(n, placeholders, operands, p0, p1, p2, p3, p4, p5)                          \
    if constexpr (N == n) {                                                                    \
        asm volatile(TCONV_WGMMA_BEGIN(p5) "wgmma.mma_async.sync.aligned.m64n" #n              \
                                           "k8.f32.tf32.tf32 {" placeholders "}, {" p0 ", " p1 \
                                           ", " p2 ", " p3 "}, " p4 ", keep, 1, 1;\n}"         \
                     : TCONV_LIST operands                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                     \
                       "r"(static_cast<int>(accumulate)));                                     \
    }
    TCONV_FOR_EACH_N(TCONV_CASE)
#undef TCONV_CASE
}

// The 16-bit types differ only in names. "Transposed" is MN-major.
#define TCONV_WGMMA_16(name, type)                                                         \
    template <int N, bool a_transposed = false, bool b_transposed = false>                 \
    TCONV_DEVICE void name(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {   \
        static_assert(N % 8 == 0 && N >= 8 && N <= 256, "N is a multiple of 8 up to 256"); \
        TCONV_FOR_EACH_N(TCONV_CASE_SHARED_##type)                                         \
    }                                                                                      \
    template <int N, bool b_transposed = false>                                            \
    TCONV_DEVICE void name(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,          \
                           bool accumulate) {                                              \
        static_assert(N % 8 == 0 && N >= 8 && N <= 256, "N is a multiple of 8 up to 256"); \
        TCONV_FOR_EACH_N(TCONV_CASE_REGISTERS_##type)                                      \
    }

// NOTE: operand numbers of immediates must not depend on N, hence a branch for each.
#define TCONV_SHARED_FORM(n, type, placeholders, operands, p0, p1, p2, flags)                 \
    asm volatile(TCONV_WGMMA_BEGIN(p2) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type \
                                       "." type " {" placeholders "}, " p0 ", " p1            \
                                       ", keep, 1, 1, " flags ";\n}"                          \
                 : TCONV_LIST operands                                                        \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))

#define TCONV_SHARED_CASE(n, type, placeholders, operands, p0, p1, p2)          \
    if constexpr (N == n && !a_transposed && !b_transposed) {                   \
        TCONV_SHARED_FORM(n, type, placeholders, operands, p0, p1, p2, "0, 0"); \
    } else if constexpr (N == n && !a_transposed) {                             \
        TCONV_SHARED_FORM(n, type, placeholders, operands, p0, p1, p2, "0, 1"); \
    } else if constexpr (N == n && !b_transposed) {                             \
        TCONV_SHARED_FORM(n, type, placeholders, operands, p0, p1, p2, "1, 0"); \
    } else if constexpr (N == n) {                                              \
        TCONV_SHARED_FORM(n, type, placeholders, operands, p0, p1, p2, "1, 1"); \
    }

#define TCONV_REGISTERS_FORM(n, type, placeholders, operands, p0, p1, p2, p3, p4, p5, flag)   \
    asm volatile(TCONV_WGMMA_BEGIN(p5) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type \
                                       "." type " {" placeholders "}, {" p0 ", " p1 ", " p2   \
                                       ", " p3 "}, " p4 ", keep, 1, 1, " flag ";\n}"          \
                 : TCONV_LIST operands                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                        \
                   "r"(static_cast<int>(accumulate)))

#define TCONV_REGISTERS_CASE(n, type, placeholders, operands, p0, p1, p2, p3, p4, p5)       \
    if constexpr (N == n && !b_transposed) {                                                \
        TCONV_REGISTERS_FORM(n, type, placeholders, operands, p0, p1, p2, p3, p4, p5, "0"); \
    } else if constexpr (N == n) {                                                          \
        TCONV_REGISTERS_FORM(n, type, placeholders, operands, p0, p1, p2, p3, p4, p5, "1"); \
    }

#define TCONV_CASE_SHARED_f16(n, placeholders, operands, p0, p1, p2, p3, p4, p5) \
    TCONV_SHARED_CASE(n, "f16", placeholders, operands, p0, p1, p2)
#define TCONV_CASE_SHARED_bf16(n, placeholders, operands, p0, p1, p2, p3, p4, p5) \
    TCONV_SHARED_CASE(n, "bf16", placeholders, operands, p0, p1, p2)
#define TCONV_CASE_REGISTERS_f16(n, placeholders, operands, p0, p1, p2, p3, p4, p5) \
    TCONV_REGISTERS_CASE(n, "f16", placeholders, operands, p0, p1, p2, p3, p4, p5)
#define TCONV_CASE_REGISTERS_bf16(n, placeholders, operands, p0, p1, p2, p3, p4, p5) \
    TCONV_REGISTERS_CASE(n, "bf16", placeholders, operands, p0, p1, p2, p3, p4, p5)

TCONV_WGMMA_16(wgmma_m64k16_f16, f16)
TCONV_WGMMA_16(wgmma_m64k16_bf16, bf16)

}  // namespace ptx
