"""One launch for each feature of the emulator, with what a GPU gives."""

from __future__ import annotations

from functools import cache

import numpy as np

from cpu.emulator.inline_kernel import (
    Case,
    Map,
    aligned,
    aligned_copy,
    bits_of_bfloat16,
    inline_source,
    rng,
    small_integers,
)
from cpu.emulator.matrix_cases import ldmatrix, mma, stmatrix
from cpu.emulator.tensor_cases import BOXES, LOAD_ONLY, box_case


def threads() -> Case:
    code = """
TCONV_KERNEL(test, 64, 1) {
    int t = threadIdx.x + 64 * blockIdx.x, lane = threadIdx.x % 32;
    double wide = t * 1.5;
    int* out = arguments.out + t * 16;
    out[0] = __shfl_sync(0xffffffffu, t, 5);
    out[1] = __shfl_up_sync(0xffffffffu, t, 3);
    out[2] = __shfl_down_sync(0xffffffffu, t, 4, 16);
    out[3] = __shfl_xor_sync(0xffffffffu, t, 6);
    out[4] = __shfl_sync(0xffffffffu, t, lane + 1, 8);
    out[5] = int(__shfl_xor_sync(0xffffffffu, wide, 1) * 2);
    out[6] = int(__ballot_sync(0xffffffffu, lane % 3 == 0));
    out[7] = __any_sync(0xffffffffu, lane == 40) * 2 + __all_sync(0xffffffffu, lane < 32);
    if (lane < 8) {
        out[8] = __shfl_xor_sync(0x000000ffu, t, 1);
        out[9] = int(__ballot_sync(0x000000ffu, lane & 1));
    } else {
        out[8] = __shfl_xor_sync(0xffffff00u, t, 2);
        out[9] = int(__ballot_sync(0xffffff00u, lane & 2));
        __syncwarp(0xffffff00u);
    }
    __syncwarp();
    // The last half of each warp leaves: shuffles name the others alone.
    if (lane >= 16) { out[10] = -1; return; }
    out[10] = __shfl_down_sync(0x0000ffffu, t, 1, 16);
    out[11] = __popc(t) + 100 * __clz(t) + 10000 * __ffs(t);
    out[12] = int(__umulhi(0x80000001u, unsigned(t)));
    out[13] = max(t, 7) - min(t, 7);
    out[14] = int(__brev(unsigned(t)));
    out[15] = int(__byte_perm(0x33221100u, 0x77665544u, 0x7520u) + blockDim.x + gridDim.x);
}
"""
    t = np.arange(128)
    lane = t % 32
    warp = t - lane
    out = np.zeros((128, 16), np.int64)
    out[:, 0] = warp + 5
    out[:, 1] = np.where(lane >= 3, t - 3, t)
    out[:, 2] = np.where(lane % 16 + 4 < 16, t + 4, t)
    out[:, 3] = t ^ 6
    out[:, 4] = warp + lane // 8 * 8 + (lane + 1) % 8
    out[:, 5] = (t ^ 1) * 3
    out[:, 6] = sum(1 << i for i in range(0, 32, 3))
    out[:, 7] = 1
    out[:, 8] = np.where(lane < 8, t ^ 1, t ^ 2)
    out[:, 9] = np.where(lane < 8, 0xAA, 0xCCCCCC00)
    low = lane < 16
    out[:, 10] = np.where(low, np.where(lane < 15, t + 1, t), -1)
    for i in np.nonzero(low)[0]:
        n = int(i)
        out[i, 11] = bin(n).count("1") + 100 * (32 - n.bit_length())
        out[i, 11] += 10000 * ((n & -n).bit_length())
        out[i, 12] = 0x80000001 * n >> 32
        out[i, 13] = max(n, 7) - min(n, 7)
        out[i, 14] = int(f"{n:032b}"[::-1], 2)
        out[i, 15] = 0x77552200 + 64 + 2
    expected = out.astype(np.uint32).view(np.int32)
    source = inline_source(code, {"out": "int*"}, threads=64)
    return Case("threads", source, {"out": aligned((128, 16), np.int32)}, {"out": expected}, 2)


def named_barriers() -> Case:
    # Two warps fill the buffers, two others read them: a barrier says full, another empty.
    code = """
#include <ptx/barrier.cuh>
TCONV_KERNEL(test, 128, 1) {
    TCONV_SHARED int buffer[64];
    int t = threadIdx.x;
    for (int round = 0; round < 5; ++round) {
        if (t < 64) {
            ptx::bar_sync(2, 128);
            buffer[t] = arguments.in[round * 64 + t];
            ptx::bar_sync(1, 128);
        } else {
            ptx::bar_sync(2, 128);
            ptx::bar_sync(1, 128);
            arguments.out[round * 64 + t - 64] = buffer[127 - t];
        }
    }
    // The two halves meet among themselves.
    ptx::bar_sync(3 + t / 64, 64);
}
"""
    given = small_integers(5, 64, dtype=np.int32)
    source = inline_source(code, {"in": "const int*", "out": "int*"}, threads=128)
    values = {"in": given, "out": aligned((5, 64), np.int32)}
    return Case("named_barriers", source, values, {"out": given[:, ::-1]})


def vector_memory() -> Case:
    code = """
#include <ptx/memory.cuh>
TCONV_KERNEL(test, 32, 1) {
    TCONV_SHARED __align__(16) uint32_t tile[128];
    int t = threadIdx.x;
    const float* in = arguments.in + 4 * t;
    float* out = arguments.out;
    const uint32_t* bits = reinterpret_cast<const uint32_t*>(in);
    ptx::st_shared_v4(tile + 4 * t, ptx::ld_global_nc_v4_if(bits, true));
    __syncwarp();
    uint4 w = ptx::ld_shared_v4(tile + 4 * (31 - t));
    __syncwarp();
    ptx::st_global_cs_v4(reinterpret_cast<uint32_t*>(out) + 4 * t, w);
    uint2 p = ptx::ld_global_nc_v2_if(bits + 2, t != 7);
    ptx::st_global_cs_v2(reinterpret_cast<uint32_t*>(out + 128) + 2 * t, make_uint2(p.y, p.x));
    ptx::st_global_cs(out + 192 + t, ptx::ld_global_nc(in) + 1.0f);
    float4 v = make_float4(float(t), 1.0f, 2.0f, 3.0f);
    ptx::st_shared_v4(reinterpret_cast<float*>(tile) + 4 * t, v);
    ptx::st_global_cs_v4(out + 224 + 4 * t, v);
    ptx::st_global_cs(reinterpret_cast<uint16_t*>(out + 352) + t,
                      ptx::ld_global_nc_if(reinterpret_cast<const uint16_t*>(bits), true));
    ptx::st_global_v2(out + 368 + 2 * t, make_float2(in[2], in[3]));
    ptx::st_global_v4(out + 432 + 4 * t, make_float4(in[3], in[2], in[1], in[0]));
}
"""
    given = small_integers(32, 4)
    out = np.zeros(560, np.float32)
    out[:128] = given[::-1].ravel()
    out[128:192] = given[:, :1:-1].ravel()
    out[142:144] = 0
    out[192:224] = given[:, 0] + 1
    out[224:352] = np.stack([np.arange(32), *(np.full(32, i) for i in (1, 2, 3))], 1).ravel()
    out[352:368] = given.view(np.uint16)[:, 0].copy().view(np.float32)
    out[368:432] = given[:, 2:].ravel()
    out[432:] = given[:, ::-1].ravel()
    source = inline_source(code, {"in": "const float*", "out": "float*"}, threads=32)
    return Case("vector_memory", source, {"in": given, "out": aligned(560)}, {"out": out})


def conversions() -> Case:
    code = """
#include <ptx/convert.cuh>
TCONV_KERNEL(test, 256, 1) {
    for (int i = threadIdx.x; i < 65536; i += 256) {
        arguments.wide[i] = ptx::cvt_f32_f16(static_cast<unsigned short>(i));
    }
    for (int i = threadIdx.x; i < arguments.count; i += 256) {
        float value = arguments.in[i];
        arguments.half[i] = ptx::cvt_rn_f16_f32(value);
        arguments.brain[i] = ptx::cvt_rn_bf16_f32(value);
        arguments.tf32[i] = ptx::cvt_rna_tf32_f32(value);
        arguments.pair[i] = ptx::cvt_rn_f16x2_f32(value, 1.0f);
        arguments.brain_pair[i] = ptx::cvt_rn_bf16x2_f32(1.0f, value);
    }
}
"""
    special = np.array(
        [
            *(0, 1, 0x1000, 0x7F800000, 0x7F7FFFFF, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001),
            *(0x33800000, 0x38800000, 0x387FFFFF, 0x387FE000, 0x387FF000, 0x3F801000, 0x3F800FFF),
            *(0x3F808000, 0x3F818000, 0x3F802000, 0x3F803000, 0x7FFFFFFF, 0x7F800001, 0x7FC00000),
        ],
        np.uint32,
    )
    special = np.concatenate([special, special | 0x80000000])
    random = rng.integers(0, 2**32, 4000, dtype=np.uint32)
    near = (rng.standard_normal(4000) * 2.0 ** rng.integers(-26, 18, 4000)).astype(np.float32)
    bits = np.concatenate([special, random, near.view(np.uint32)])
    given = bits.view(np.float32)
    nan = np.isnan(given)
    with np.errstate(over="ignore"):
        half = np.where(nan, 0x7FFF, given.astype(np.float16).view(np.uint16)).astype(np.uint16)
    brain = bits_of_bfloat16(given)
    infinite = np.isinf(given)
    # A NaN is cut short, as an H200 does.
    rounded = np.where(nan | infinite, bits, bits.astype(np.uint64) + 0x1000)
    tf32 = (rounded & 0xFFFFE000).astype(np.uint32)
    count = len(bits)
    fields = {
        "in": "const float*",
        "wide": "float*",
        "half": "unsigned short*",
        "brain": "unsigned short*",
        "tf32": "unsigned*",
        "pair": "unsigned*",
        "brain_pair": "unsigned*",
        "count": "int",
    }
    values = {
        "in": aligned_copy(given),
        "wide": aligned(65536),
        "half": aligned(count, np.uint16),
        "brain": aligned(count, np.uint16),
        "tf32": aligned(count, np.uint32),
        "pair": aligned(count, np.uint32),
        "brain_pair": aligned(count, np.uint32),
        "count": count,
    }
    expected = {
        "wide": np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32),
        "half": half,
        "brain": brain,
        "tf32": tf32,
        "pair": half | np.uint32(0x3C00 << 16),
        "brain_pair": brain.astype(np.uint32) << 16 | 0x3F80,
    }
    return Case(
        "conversions", inline_source(code, fields, threads=256), values, expected, arch="sm_80"
    )


def maximum() -> Case:
    code = """
#include <ptx/max.cuh>
TCONV_KERNEL(test, 64, 1) {
    int i = threadIdx.x;
    arguments.out[i] = ptx::max_nan_f32(arguments.in[i % 8], arguments.in[i / 8]);
}
"""
    given = np.array([0, 1, -2, 3.5, np.inf, -np.inf, np.nan, 1e-40], np.float32)
    fields = {"in": "const float*", "out": "float*"}
    values = {"in": aligned_copy(given), "out": aligned(64)}
    expected = np.maximum(given[None], given[:, None]).reshape(64)  # a NaN's too
    source = inline_source(code, fields, threads=64)
    return Case("maximum", source, values, {"out": expected}, arch="sm_80")


def cp_async() -> Case:
    # Three stages in flight; every fourth element of the tail is filled with zeros.
    code = """
#include <ptx/cp_async.cuh>
TCONV_KERNEL(test, 64, 1) {
    TCONV_SHARED __align__(16) float stages[3][64 * 4];
    TCONV_SHARED __align__(16) float small[64];
    int t = threadIdx.x;
    auto fetch = [&](int i) {
        if (i < arguments.count) {
            const float* source = arguments.in + (i * 64 + t) * 4;
            bool valid = t % 4 != 3;
            ptx::cp_async_cg_16(&stages[i % 3][4 * t], valid ? source : nullptr, valid);
        }
        ptx::cp_async_commit_group();
    };
    fetch(0);
    fetch(1);
    for (int i = 0; i < arguments.count; ++i) {
        fetch(i + 2);
        ptx::cp_async_wait_group<2>();
        __syncthreads();
        for (int j = 0; j < 4; ++j) {
            arguments.out[(i * 4 + j) * 64 + t] = stages[i % 3][j * 64 + (t + 7) % 64];
        }
        __syncthreads();
    }
    if (t < 32) {
        ptx::cp_async_ca<4>(&small[t], arguments.in + 31 - t);
    } else if (t < 48) {
        ptx::cp_async_ca<8>(&small[2 * t - 32], arguments.in + 2 * t);
    }
    ptx::cp_async_wait_all();
    __syncthreads();
    arguments.out[arguments.count * 256 + t] = small[t];
}
"""
    given = small_integers(5, 64, 4)
    filled = given.copy()
    filled[:, 3::4] = 0
    out = np.roll(filled.reshape(5, 4, 64), -7, axis=2).ravel()
    small = np.concatenate([given.ravel()[31::-1], given.ravel()[64:96]])
    fields = {"in": "const float*", "out": "float*", "count": "int"}
    values = {"in": given, "out": aligned(5 * 256 + 64), "count": 5}
    expected = {"out": np.concatenate([out, small])}
    return Case("cp_async", inline_source(code, fields, threads=64), values, expected, arch="sm_80")


def cp_async_mbarrier() -> Case:
    # A producer warp fills two stages, every fifth element with zero. Its 32 arrivals come with the
    # copies, which consumers read.
    code = """
#include <ptx/cp_async.cuh>
#include <ptx/mbarrier.cuh>
TCONV_KERNEL(test, 96, 1) {
    TCONV_SHARED uint64_t full[2];
    TCONV_SHARED uint64_t empty[2];
    TCONV_SHARED float stages[2][128];
    int t = threadIdx.x;
    if (t == 0) {
        for (int i = 0; i < 2; ++i) {
            ptx::mbarrier_init(&full[i], 32);
            ptx::mbarrier_init(&empty[i], 64);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (t >= 64) {
        for (int i = 0; i < arguments.count; ++i) {
            ptx::mbarrier_wait_parity(&empty[i % 2], (i / 2 & 1) ^ 1);
            for (int place = t - 64; place < 128; place += 32) {
                ptx::cp_async_ca<4>(&stages[i % 2][place], arguments.in + i * 128 + place,
                                    place % 5 != 4);
            }
            ptx::cp_async_mbarrier_arrive_noinc(&full[i % 2]);
        }
        ptx::cp_async_wait_all();
        return;
    }
    for (int i = 0; i < arguments.count; ++i) {
        ptx::mbarrier_wait_parity(&full[i % 2], i / 2 & 1);
        for (int place = t; place < 128; place += 64) {
            arguments.out[i * 128 + place] = stages[i % 2][127 - place];
        }
        ptx::mbarrier_arrive(&empty[i % 2]);
    }
}
"""
    given = small_integers(7, 128)
    filled = given.copy()
    filled[:, 4::5] = 0
    fields = {"in": "const float*", "out": "float*", "count": "int"}
    source = inline_source(code, fields, threads=96)
    values = {"in": given, "out": aligned((7, 128)), "count": 7}
    return Case("cp_async_mbarrier", source, values, {"out": filled[:, ::-1]}, arch="sm_90a")


def bulk() -> Case:
    # A producer warp fills two stages; consumers double them and give them back by tensor stores.
    code = """
#include <ptx/mbarrier.cuh>
TCONV_KERNEL(test, 96, 1) {
    TCONV_SHARED uint64_t full[2];
    TCONV_SHARED uint64_t empty[2];
    TCONV_DYNAMIC_SHARED(memory);
    float* stage = reinterpret_cast<float*>(memory);
    float* results = stage + 2 * 256;
    int t = threadIdx.x;
    if (t == 0) {
        for (int i = 0; i < 2; ++i) {
            ptx::mbarrier_init(&full[i], 1);
            ptx::mbarrier_init(&empty[i], 64);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (t >= 64) {
        if (t > 64) return;
        for (int i = 0; i < arguments.count; ++i) {
            ptx::mbarrier_wait_parity(&empty[i % 2], (i / 2 & 1) ^ 1);
            ptx::mbarrier_arrive_expect_tx(&full[i % 2], 1024);
            // Two copies for one phase.
            for (int half = 0; half < 2; ++half) {
                ptx::cp_async_bulk_global_to_shared(stage + i % 2 * 256 + half * 128,
                                                    arguments.in + i * 256 + half * 128, 512,
                                                    &full[i % 2]);
            }
        }
        return;
    }
    for (int i = 0; i < arguments.count; ++i) {
        while (!ptx::mbarrier_try_wait_parity(&full[i % 2], i / 2 & 1)) {
        }
        float sums[4];
        for (int j = 0; j < 4; ++j) sums[j] = 2.0f * stage[i % 2 * 256 + 255 - (j * 64 + t)];
        ptx::mbarrier_arrive(&empty[i % 2]);
        // The store before the last has left its half of the results.
        if (t == 0) ptx::cp_async_bulk_wait_group_read<1>();
        asm volatile("" ::: "memory");
        bar(1, 64);
        for (int j = 0; j < 4; ++j) results[i % 2 * 256 + j * 64 + t] = sums[j];
        ptx::fence_proxy_async_shared();
        bar(1, 64);
        if (t == 0) {
            ptx::cp_async_bulk_tensor_5d_shared_to_global(&arguments.map, 0, i, 0, 0, 0,
                                                          results + i % 2 * 256);
            ptx::cp_async_bulk_commit_group();
        }
    }
    if (t == 0) ptx::cp_async_bulk_wait_group<0>();
}
""".replace("bar(1, 64)", "ptx::bar_sync(1, 64)").replace(
        '        asm volatile("" ::: "memory");\n', ""
    )
    code = "#include <ptx/barrier.cuh>\n" + code
    given = small_integers(7, 256)
    fields = {"in": "const float*", "map": "ptx::TensorMap", "count": "int"}
    source = inline_source(code, fields, threads=96, shared_bytes=4096)
    out = aligned((7, 256))
    spec = Map(out, "float32", (256, 7, 1, 1, 1), (1024, *(7168,) * 3), (256, 1, 1, 1, 1))
    values = {"in": given, "map": spec, "count": 7}
    case = Case("bulk", source, values, {"tensor": 2 * given[:, ::-1]}, arch="sm_90a")
    case.values["tensor"] = out
    return case


@cache
def simple_cases() -> dict[str, Case]:
    made = [
        threads(),
        named_barriers(),
        vector_memory(),
        conversions(),
        maximum(),
        cp_async(),
        cp_async_mbarrier(),
        bulk(),
        ldmatrix(),
        stmatrix(),
        mma(),
    ]
    made += [box_case(name, False) for name in BOXES]
    made += [box_case(name, True) for name in BOXES if name not in LOAD_ONLY]
    return {case.name: case for case in made}
