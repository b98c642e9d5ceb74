"""ldmatrix, stmatrix and mma.sync."""

from __future__ import annotations

import numpy as np

from cpu.emulator.inline_kernel import (
    Case,
    aligned,
    aligned_copy,
    inline_source,
    rng,
    small_integers,
)


def ldmatrix() -> Case:
    code = """
#include <ptx/ldmatrix.cuh>
TCONV_KERNEL(test, 32, 1) {
    TCONV_SHARED __align__(16) unsigned short tile[32 * 8];
    int t = threadIdx.x;
    for (int i = t; i < 256; i += 32) tile[i] = static_cast<unsigned short>(arguments.in[i]);
    __syncwarp();
    uint32_t four[4];
    unsigned* out = arguments.out + 8 * t;
    // Rows in another order than they lie.
    ptx::ldmatrix_x4(four, tile + (31 - t) * 8);
    for (int i = 0; i < 4; ++i) out[i] = four[i];
    ptx::ldmatrix_x4_trans(four, tile + t * 8);
    for (int i = 0; i < 4; ++i) out[4 + i] = four[i];
}
"""
    given = rng.integers(0, 65536, (32, 8)).astype(np.int32)
    lanes = np.arange(32)

    def fragment(rows: np.ndarray, transposed: bool) -> np.ndarray:
        matrix = rows.T if transposed else rows
        low = matrix[lanes // 4, 2 * (lanes % 4)].astype(np.uint32)
        return low | matrix[lanes // 4, 2 * (lanes % 4) + 1].astype(np.uint32) << 16

    parts = given.reshape(4, 8, 8)
    backward = given[::-1].reshape(4, 8, 8)
    columns = [fragment(backward[i], False) for i in range(4)]
    columns += [fragment(parts[i], True) for i in range(4)]
    source = inline_source(code, {"in": "const int*", "out": "unsigned*"}, threads=32)
    values = {"in": aligned_copy(given), "out": aligned((32, 8), np.uint32)}
    return Case("ldmatrix", source, values, {"out": np.stack(columns, axis=1)})


def stmatrix() -> Case:
    code = """
#include <ptx/ldmatrix.cuh>
TCONV_KERNEL(test, 32, 1) {
    TCONV_SHARED __align__(16) unsigned short tile[2][32 * 8];
    int t = threadIdx.x;
    uint32_t four[4];
    for (int i = 0; i < 4; ++i) four[i] = arguments.in[4 * t + i];
    ptx::stmatrix_x4(&tile[0][t * 8], four);
    ptx::stmatrix_x4_trans(&tile[1][t * 8], four);
    __syncwarp();
    for (int i = t; i < 512; i += 32) arguments.out[i] = tile[i / 256][i % 256];
}
"""
    given = rng.integers(0, 2**32, (32, 4), dtype=np.uint32)
    plain = np.zeros((4, 8, 8), np.int32)
    for lane in range(32):
        plain[:, lane // 4, 2 * (lane % 4)] = given[lane] & 0xFFFF
        plain[:, lane // 4, 2 * (lane % 4) + 1] = given[lane] >> 16
    expected = np.stack([plain, plain.transpose(0, 2, 1)])
    source = inline_source(code, {"in": "const unsigned*", "out": "int*"}, threads=32)
    values = {"in": aligned_copy(given), "out": aligned((2, 4, 8, 8), np.int32)}
    return Case("stmatrix", source, values, {"out": expected}, arch="sm_90a")


def mma() -> Case:
    # c += a*b, each from memory by the fragments' definition; a [16, 16], b [16, 8].
    code = """
#include <ptx/convert.cuh>
#include <ptx/mma.cuh>
template <unsigned short (*convert)(float)>
TCONV_DEVICE uint32_t pair(float low, float high) {
    return convert(low) | static_cast<uint32_t>(convert(high)) << 16;
}
TCONV_KERNEL(test, 32, 1) {
    int t = threadIdx.x, g = t / 4, q = t % 4;
    const float* a = arguments.a;
    const float* b = arguments.b;
    auto A = [&](int row, int k) { return a[row * 16 + k]; };
    auto B = [&](int k, int column) { return b[k * 8 + column]; };
    auto put = [&](int which, const float (&d)[4]) {
        for (int i = 0; i < 4; ++i) {
            arguments.out[which * 128 + (g + i / 2 * 8) * 8 + 2 * q + i % 2] = d[i];
        }
    };
    float d[4];
    auto begin = [&] {
        for (int i = 0; i < 4; ++i) d[i] = arguments.c[(g + i / 2 * 8) * 8 + 2 * q + i % 2];
    };
    begin();
    for (int k = 0; k < 16; k += 8) {
        // Low bits that the hardware must not see.
        uint32_t x[4], y[2];
        for (int i = 0; i < 4; ++i) {
            x[i] = __float_as_uint(A(g + i % 2 * 8, k + q + i / 2 * 4)) | 0x1fffu;
        }
        for (int i = 0; i < 2; ++i) y[i] = __float_as_uint(B(k + q + i * 4, g)) | 0x1fffu;
        ptx::mma_m16n8k8_tf32(d, x, y);
    }
    put(0, d);
    begin();
    uint32_t x[4], y[2];
    for (int i = 0; i < 4; ++i) {
        int row = g + i % 2 * 8, k = 2 * q + i / 2 * 8;
        x[i] = ptx::cvt_rn_bf16x2_f32(A(row, k), A(row, k + 1));
    }
    for (int i = 0; i < 2; ++i) {
        y[i] = ptx::cvt_rn_bf16x2_f32(B(2 * q + i * 8, g), B(2 * q + 1 + i * 8, g));
    }
    ptx::mma_m16n8k16_bf16(d, x, y);
    put(1, d);
    begin();
    for (int half = 0; half < 2; ++half) {
        uint32_t narrow_x[2] = {x[2 * half], x[2 * half + 1]}, narrow_y[1] = {y[half]};
        float before[4] = {d[0], d[1], d[2], d[3]};
        ptx::mma_m16n8k8_bf16(d, narrow_x, narrow_y, before);
    }
    put(2, d);
    begin();
    for (int i = 0; i < 4; ++i) {
        int row = g + i % 2 * 8, k = 2 * q + i / 2 * 8;
        x[i] = ptx::cvt_rn_f16x2_f32(A(row, k), A(row, k + 1));
    }
    for (int i = 0; i < 2; ++i) {
        y[i] = ptx::cvt_rn_f16x2_f32(B(2 * q + i * 8, g), B(2 * q + 1 + i * 8, g));
    }
    ptx::mma_m16n8k16_f16(d, x, y);
    put(3, d);
}
"""
    a, b, c = small_integers(16, 16), small_integers(16, 8), small_integers(16, 8)
    fields = {"a": "const float*", "b": "const float*", "c": "const float*", "out": "float*"}
    values = {"a": a, "b": b, "c": c, "out": aligned((4, 16, 8))}
    expected = np.stack([c + a @ b] * 4)
    source = inline_source(code, fields, threads=32)
    return Case("mma", source, values, {"out": expected}, arch="sm_80")
