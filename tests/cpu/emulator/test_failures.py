"""Each thing that the emulator is there to find, done wrong once. One kernel holds them all."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cpu.emulator.inline_kernel import InlineSource, Map, aligned, inline_source, launch
from tconv.errors import EmulatorError

COUNT = 256

# Name of the fault -> statements; all with 128 threads, `t` the thread's index. What each fault
# reads wrongly it puts in `result`.
FAULTS = {
    "none": "result = in[t];",
    # Barriers.
    "early_exit": "if (t == 70) return;\n __syncthreads();",
    "other_syncthreads": "if (t < 64) {\n __syncthreads(); } else {\n __syncthreads(); }",
    "warp_against_block": "if (t < 32) ptx::bar_sync(1, 64); else if (t >= 64) __syncthreads();",
    "named_threads": "ptx::bar_sync(1, 48);",
    "named_number": "ptx::bar_sync(16, 64);",
    "named_disagree": "ptx::bar_sync(1, t < 32 ? 64 : 128);",
    "named_missing": "if (t < 96) ptx::bar_sync(2, 128);",
    # Warps.
    "shuffle_lane_missing": "if (t % 32 != 9) result = __shfl_sync(0xffffffffu, in[t], 0);"
    " else { __syncwarp(1u << 9); ptx::bar_sync(1, 128); }",
    "shuffle_not_in_mask": "result = __shfl_sync(0x0000ffffu, in[t], 0);",
    "shuffle_against_vote": "if (t % 2) result = __shfl_sync(0xffffffffu, in[t], 0);"
    " else result = __any_sync(0xffffffffu, 1);",
    "shuffle_width": "result = __shfl_sync(0xffffffffu, in[t], 0, 12);",
    "mma_lanes_gone": "if (t == 3) return; float d[4] = {}; uint32_t a[4] = {}, b[2] = {};"
    " ptx::mma_m16n8k8_tf32(d, a, b);",
    # Shared memory.
    "uninitialised_static": "result = tile[t];",
    "uninitialised_dynamic": "result = words[t];",
    "left_from_last_block": "if (blockIdx.x == 0) tile[t] = words[t] = 1; else result = tile[t] +"
    " words[t];",
    "missing_syncthreads": "tile[t] = in[t]; result = tile[(t + 1) % 128];",
    "missing_second_syncthreads": "tile[t] = in[t]; __syncthreads(); result = tile[127 - t];"
    " tile[t] = in[128 + t]; __syncthreads(); result += tile[t];",
    "dynamic_overrun": "if (t == 5) words[256] = 1;",
    "wrapper_out_of_shared": "ptx::st_shared_v4(words + 4 * (t + 1), make_float4(0, 0, 0, 0));",
    "wrapper_shared_misaligned": "ptx::ld_shared_v4(bits(words) + 2);",
    "wrapper_not_shared": "float local[4] = {}; ptx::ld_shared_v4(bits(local));",
    "ldmatrix_misaligned": "uint32_t d[4]; ptx::ldmatrix_x4(d, words + 2);",
    # Global memory.
    "wrapper_out_of_global": "result = ptx::ld_global_nc(in + 129 + t);",
    "wrapper_store_out_of_global": "ptx::st_global_cs(arguments.out - 1, 1.0f);",
    "wrapper_global_misaligned": "result = ptx::ld_global_nc_v4_if(bits(in) + 1 + t % 2, true).x;",
    "wild_pointer": "result = *reinterpret_cast<const float*>(0x10 + 4 * t);",
    # Statements.
    "trap": "if (t == 99) __trap();",
    "check": "TCONV_CHECK(t < 100);",
    # cp.async.
    "cp_async_no_wait": "ptx::cp_async_ca<4>(tile + t, in + t); ptx::cp_async_commit_group();"
    " __syncthreads(); result = tile[t];",
    "cp_async_wait_too_few": "ptx::cp_async_ca<4>(tile + t, in + t); ptx::cp_async_commit_group();"
    " ptx::cp_async_wait_group<1>(); __syncthreads(); result = tile[t];",
    "cp_async_not_committed": "ptx::cp_async_ca<4>(tile + t, in + t);"
    " ptx::cp_async_wait_group<0>(); __syncthreads(); result = tile[t];",
    "cp_async_no_barrier": "ptx::cp_async_ca<4>(tile + t, in + t); ptx::cp_async_commit_group();"
    " ptx::cp_async_wait_group<0>(); result = tile[(t + 1) % 128];",
    "cp_async_out_of_global": "ptx::cp_async_ca<4>(tile + t, in + 129 + t);",
    "cp_async_misaligned": "ptx::cp_async_cg_16(words + 4, in + 1);",
    # mbarriers.
    "mbarrier_uninitialised": "ptx::mbarrier_arrive(&barriers[3]);",
    "mbarrier_overwritten": "if (t == 0) barriers[0] = 5; __syncthreads();"
    " ptx::mbarrier_arrive(&barriers[0]);",
    "mbarrier_initialised_twice": "if (t == 0) ptx::mbarrier_init(&barriers[0], 1);",
    "mbarrier_no_arrival": "if (t == 0) ptx::mbarrier_wait_parity(&barriers[0], 0);",
    "mbarrier_wrong_parity": "if (t == 0) ptx::mbarrier_arrive(&barriers[0]); __syncthreads();"
    " ptx::mbarrier_wait_parity(&barriers[0], 1);",
    "mbarrier_polled_in_vain": "if (t == 0)"
    " while (!ptx::mbarrier_try_wait_parity(&barriers[0], 0));",
    "mbarrier_too_many_arrivals": "if (t == 0) { ptx::mbarrier_arrive_expect_tx(&barriers[0], 16);"
    " ptx::mbarrier_arrive(&barriers[0]); }",
    "mbarrier_too_many_bytes": "if (t == 0) { ptx::mbarrier_arrive_expect_tx(&barriers[0], 80);"
    " ptx::cp_async_bulk_global_to_shared(words, in, 64, &barriers[0]);"
    " ptx::mbarrier_wait_parity(&barriers[0], 0); }",
    "mbarrier_no_wait_for_copies": "if (t == 0) { ptx::cp_async_ca<4>(tile + 5, in + 5);"
    " ptx::cp_async_mbarrier_arrive_noinc(&barriers[0]); } __syncthreads(); result = tile[5];",
    "mbarrier_copies_behind_the_arrival": "if (t == 0) {"
    " ptx::cp_async_mbarrier_arrive_noinc(&barriers[0]); ptx::cp_async_ca<4>(tile + 5, in + 5); }"
    " ptx::mbarrier_wait_parity(&barriers[0], 0); result = tile[5];",
    "mbarrier_too_many_arrivals_of_copies": "if (t < 2) { ptx::cp_async_ca<4>(tile + t, in + t);"
    " ptx::cp_async_mbarrier_arrive_noinc(&barriers[0]); }",
    "mbarrier_arrival_beside_copies": "if (t == 0) { ptx::cp_async_ca<4>(tile + t, in + t);"
    " ptx::cp_async_mbarrier_arrive_noinc(&barriers[0]); ptx::mbarrier_arrive(&barriers[0]); }",
    # Bulk copies.
    "bulk_no_wait": "if (t == 0) { ptx::mbarrier_arrive_expect_tx(&barriers[0], 512);"
    " ptx::cp_async_bulk_global_to_shared(words, in, 512, &barriers[0]); }"
    " __syncthreads(); result = words[t]; ptx::mbarrier_wait_parity(&barriers[0], 0);",
    "bulk_size": "if (t == 0) ptx::cp_async_bulk_global_to_shared(words, in, 24, &barriers[0]);",
    "bulk_misaligned": "if (t == 0) ptx::cp_async_bulk_global_to_shared(words + 1, in, 32,"
    " &barriers[0]);",
    "bulk_out_of_global": "if (t == 0) ptx::cp_async_bulk_global_to_shared(words, in + 252, 32,"
    " &barriers[0]);",
    "tensor_store_not_waited": "if (t == 0) { ptx::fence_proxy_async_shared();"
    " ptx::cp_async_bulk_tensor_5d_shared_to_global(&arguments.of_five, 0, 0, 0, 0, 0, words);"
    " ptx::cp_async_bulk_commit_group(); }",
    "tensor_store_no_fence": "words[t] = in[t]; __syncthreads(); if (t == 0) {"
    " ptx::cp_async_bulk_tensor_5d_shared_to_global(&arguments.of_five, 0, 0, 0, 0, 0, words);"
    " ptx::cp_async_bulk_commit_group(); ptx::cp_async_bulk_wait_group<0>(); }",
    "tensor_store_overwritten": "words[t] = in[t]; ptx::fence_proxy_async_shared();"
    " __syncthreads(); if (t == 0) {"
    " ptx::cp_async_bulk_tensor_5d_shared_to_global(&arguments.of_five, 0, 0, 0, 0, 0, words);"
    " ptx::cp_async_bulk_commit_group(); words[3] = 77; ptx::cp_async_bulk_wait_group<0>(); }",
    # Tensor copies; the maps' tensor is 16 x 16 floats, their box 8 x 4.
    "tensor_coordinate": "if (t == 0) ptx::cp_async_bulk_tensor_3d_global_to_shared(words,"
    " &arguments.map, 2, 0, 0, &barriers[0]);",
    "tensor_store_coordinate": "if (t == 0) ptx::cp_async_bulk_tensor_5d_shared_to_global("
    "&arguments.of_five, 6, 0, 0, 0, 0, words);",
    "tensor_store_negative": "if (t == 0) ptx::cp_async_bulk_tensor_5d_shared_to_global("
    "&arguments.of_five, 0, -1, 0, 0, 0, words);",
    "tensor_rank": "if (t == 0) ptx::cp_async_bulk_tensor_4d_global_to_shared(words,"
    " &arguments.map, 0, 0, 0, 0, &barriers[0]);",
    "tensor_misaligned": "if (t == 0) ptx::cp_async_bulk_tensor_3d_global_to_shared(words + 16,"
    " &arguments.map, 0, 0, 0, &barriers[0]);",
    "tensor_out_of_shared": "if (t == 0) ptx::cp_async_bulk_tensor_3d_global_to_shared(words + 240,"
    " &arguments.map, 0, 0, 0, &barriers[0]);",
    "tensor_no_wait": "if (t == 0) { ptx::mbarrier_arrive_expect_tx(&barriers[0], 128);"
    " ptx::cp_async_bulk_tensor_3d_global_to_shared(words, &arguments.map, 0, 0, 0, &barriers[0]);"
    " } __syncthreads(); result = words[t % 32]; ptx::mbarrier_wait_parity(&barriers[0], 0);",
    # wgmma: A in registers, B of 8 columns, 256 bytes.
    "wgmma_no_fence": "ptx::wgmma_m64k8_tf32<8>(d, a, b, true); ptx::wgmma_commit_group();"
    " ptx::wgmma_wait_group<0>();",
    "wgmma_no_second_fence": "ptx::wgmma_fence(); ptx::wgmma_m64k8_tf32<8>(d, a, b, true);"
    " ptx::wgmma_commit_group(); ptx::wgmma_wait_group<0>(); d[0] = 5;"
    " ptx::wgmma_m64k8_tf32<8>(d, a, b, true);",
    "wgmma_no_wait": "ptx::wgmma_fence(); ptx::wgmma_m64k8_tf32<8>(d, a, b, true);"
    " ptx::wgmma_commit_group(); result = d[0]; ptx::wgmma_wait_group<0>();",
    "wgmma_wait_too_few": "ptx::wgmma_fence(); ptx::wgmma_m64k8_tf32<8>(d, a, b, true);"
    " ptx::wgmma_commit_group(); ptx::wgmma_wait_group<1>(); result = d[0];"
    " ptx::wgmma_wait_group<0>();",
    "wgmma_not_committed": "ptx::wgmma_fence(); ptx::wgmma_m64k8_tf32<8>(d, a, b, true);"
    " ptx::wgmma_wait_group<0>();",
    "wgmma_accumulator_written": "ptx::wgmma_fence(); ptx::wgmma_m64k8_tf32<8>(d, a, b, true);"
    " ptx::wgmma_commit_group(); d[1] = 0; ptx::wgmma_wait_group<0>();",
    "wgmma_operand_overwritten": "ptx::wgmma_fence(); ptx::wgmma_m64k8_tf32<8>(d, a, b, true);"
    " ptx::wgmma_commit_group(); if (t == 0) words[0] = 9; ptx::wgmma_wait_group<0>();",
    "wgmma_operand_not_fenced": "words[t] = 1; __syncthreads(); ptx::wgmma_fence();"
    " ptx::wgmma_m64k8_tf32<8>(d, a, b, true); ptx::wgmma_commit_group();"
    " ptx::wgmma_wait_group<0>();",
    "wgmma_out_of_shared": "ptx::wgmma_fence();"
    " ptx::wgmma_m64k8_tf32<8>(d, a, b + (0x3f00 - 64), true); ptx::wgmma_commit_group();"
    " ptx::wgmma_wait_group<0>();",
    "wgmma_lanes_differ": "ptx::wgmma_fence(); ptx::wgmma_m64k8_tf32<8>(d, a, b + t % 2, true);"
    " ptx::wgmma_commit_group(); ptx::wgmma_wait_group<0>();",
}

CODE = """
#include <ptx/barrier.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/mma.cuh>
#include <ptx/wgmma.cuh>
TCONV_KERNEL(test, 128, 1) {
    TCONV_SHARED __align__(16) float tile[128];
    TCONV_SHARED uint64_t barriers[4];
    TCONV_DYNAMIC_SHARED(memory);
    float* words = reinterpret_cast<float*>(memory);
    const float* in = arguments.in;
    int t = threadIdx.x;
    float result = 0;
    uint32_t a[4] = {};
    float d[4] = {};
    auto bits = [](const float* values) { return reinterpret_cast<const uint32_t*>(values); };
    uint64_t b = ptx::matrix_descriptor(words, 128, 256, ptx::Swizzle::none);
    if (arguments.fault >= FIRST_MBARRIER) {
        if (t == 0) ptx::mbarrier_init(&barriers[0], 1);
        if (t == 0) ptx::fence_mbarrier_init();
        __syncthreads();
    }
    switch (arguments.fault) {
CASES
    }
    arguments.out[blockIdx.x * 128 + t] = result;
}
"""


def fault_number(name: str) -> int:
    return list(FAULTS).index(name)


def source() -> InlineSource:
    cases = "".join(
        f"        case {i}: {{\n{text}\n            break;\n        }}\n"
        for i, text in enumerate(FAULTS.values())
    )
    first = str(fault_number("mbarrier_uninitialised"))
    code = CODE.replace("FIRST_MBARRIER", first).replace("CASES", cases)
    fields = {
        "map": "ptx::TensorMap",
        "of_five": "ptx::TensorMap",
        "in": "const float*",
        "out": "float*",
        "fault": "int",
    }
    return inline_source(code, fields, threads=128, shared_bytes=4 * COUNT)


def run(fault: str, **options) -> np.ndarray:
    given = aligned(COUNT)
    given[:] = np.arange(COUNT)
    maps = [
        Map(
            aligned((16, 16)),
            "float32",
            (16, 16, *more),
            (64, *(1024 for _ in more)),
            (8, 4, *more),
        )
        for more in ((1,), (1, 1, 1))
    ]
    out = aligned(COUNT)
    values = {
        "map": maps[0],
        "of_five": maps[1],
        "in": given,
        "out": out,
        "fault": fault_number(fault),
    }
    launch(source(), 2, **values, **options)
    return out.reshape(2, 128)


def line_of(text: str, occurrence: int = 0) -> int:
    lines = ("\n" + source().text()).split("\n")
    return [number for number, line in enumerate(lines) if text in line][occurrence]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert np.array_equal(run("none"), [np.arange(128)] * 2)


# fault -> what the message says
REPORTED = {
    "early_exit": r"divergent barrier: .* threads 0-69, 71-127 wait for __syncthreads\(\) at \S+"
    r":\d+; threads 70 have exited",
    "other_syncthreads": "divergent barrier: this thread is at another __syncthreads",
    "warp_against_block": r"divergent barrier: .*threads 0-31 wait for bar.sync 1 .*"
    r"threads 32-63 have exited; threads 64-127 wait for __syncthreads",
    "named_threads": "takes whole warps .* got 48 threads",
    "named_number": "a named barrier is 0 to 15, got 16",
    "named_disagree": "bar.sync 1 is for 128 threads here and for 64 at",
    "named_missing": "divergent barrier: .*threads 0-95 wait for bar.sync 2",
    "shuffle_lane_missing": "deadlock: .*wait for __shfl_sync at",
    "shuffle_not_in_mask": "lane 16 is not in its own mask 0x0000ffff",
    "shuffle_against_vote": "__shfl_sync, but other lanes of the warp wait in __any_sync",
    "shuffle_width": "the width is a power of two up to 32, got 12",
    "mma_lanes_gone": r"mma.sync: all lanes of the warp take part, only 0xfffffff7 are left",
    "dynamic_overrun": "block 0: out of bounds: a thread wrote at byte 1024 of 1024 bytes",
    "wrapper_out_of_shared": "thread 63: st_shared_v4 out of bounds: bytes 1024 to 1040 of 1024",
    "wrapper_shared_misaligned": "ld_shared_v4 misaligned: shared address 0x408 is no multiple",
    "wrapper_not_shared": "ld_shared_v4 out of bounds: .* is not in shared memory",
    "ldmatrix_misaligned": "ldmatrix_x4 misaligned",
    "wrapper_out_of_global": "thread 127: ld_global_nc out of bounds: 4 bytes at byte 1024 of an"
    " allocation of 1024 bytes",
    "wrapper_store_out_of_global": "st_global_cs out of bounds",
    "wrapper_global_misaligned": "ld_global_nc_v4_if misaligned: .* is no multiple of 16",
    "wild_pointer": "block 0, thread 0: out of bounds: the address 0x10 is in no memory",
    "trap": r"thread 99: __trap\(\) was called",
    "check": "thread 100: does not hold: t < 100",
    "cp_async_out_of_global": "thread 127: cp.async's source out of bounds",
    "cp_async_misaligned": "cp.async's source misaligned",
    "mbarrier_uninitialised": "the mbarrier at shared address .* is not initialised",
    "mbarrier_overwritten": "something wrote over the mbarrier",
    "mbarrier_initialised_twice": "mbarrier.init: there is one already",
    "mbarrier_no_arrival": r"deadlock: .*threads 0 wait for mbarrier.try_wait at .* lacks 1 of 1"
    " arrivals and 0 bytes",
    "mbarrier_wrong_parity": "deadlock: .*threads 0-127 wait for mbarrier.try_wait",
    "mbarrier_polled_in_vain": "deadlock: .*threads 0 wait for mbarrier.try_wait",
    "mbarrier_too_many_arrivals": "more arrivals than the 1 of a phase",
    "mbarrier_too_many_bytes": r"deadlock: .*lacks 0 of 1 arrivals and 16 bytes",
    "mbarrier_too_many_arrivals_of_copies": r"thread 1: cp.async.mbarrier.arrive: more arrivals"
    " than the 1 of a phase",
    "mbarrier_arrival_beside_copies": "mbarrier.arrive: more arrivals than the 1 of a phase",
    "bulk_size": "a bulk copy's size is a multiple of 16 bytes, got 24",
    "bulk_misaligned": "a bulk copy's destination misaligned",
    "bulk_out_of_global": "a bulk copy's source out of bounds: 32 bytes at byte 1008 of",
    "tensor_store_not_waited": "the thread ended without cp.async.bulk.wait_group",
    "tensor_store_no_fence": "without a fence.proxy.async",
    "tensor_store_overwritten": "a tensor store reads shared address 0x40c, .* thread has written",
    "tensor_coordinate": "a tensor load's innermost coordinate is a multiple of 16 bytes.* got 2",
    "tensor_store_coordinate": "a tensor store's innermost coordinate .* got 6",
    "tensor_store_negative": "a tensor store's coordinates are not negative.* -1 in dimension 1",
    "tensor_rank": "a tensor load of 4 dimensions with a tensor map of 3",
    "tensor_misaligned": "a tensor load's destination misaligned",
    "tensor_out_of_shared": "a tensor load's destination out of bounds",
    "wgmma_no_fence": "no wgmma.fence followed",
    "wgmma_no_second_fence": "no wgmma.fence followed",
    "wgmma_not_committed": "never waited for this wgmma",
    "wgmma_accumulator_written": "accumulator 1 of a wgmma was written while",
    "wgmma_operand_overwritten": "wgmma's B reads shared address 0x400, which a thread has written",
    "wgmma_operand_not_fenced": "wgmma's B reads .* without a fence.proxy.async",
    "wgmma_out_of_shared": "wgmma's B out of bounds: nothing lies at shared address",
    "wgmma_lanes_differ": "different descriptors",
}

# Faults that show in the result, which is NaN.
POISONED = [
    "uninitialised_static",
    "uninitialised_dynamic",
    "left_from_last_block",
    "missing_syncthreads",
    "cp_async_no_wait",
    "cp_async_wait_too_few",
    "cp_async_not_committed",
    "cp_async_no_barrier",
    "mbarrier_no_wait_for_copies",
    "mbarrier_copies_behind_the_arrival",
    "bulk_no_wait",
    "tensor_no_wait",
    "wgmma_no_wait",
    "wgmma_wait_too_few",
]


@pytest.mark.parametrize("fault", REPORTED)
def test_fault_is_reported(fault: str) -> None:
    with pytest.raises(EmulatorError, match=REPORTED[fault]) as raised:
        run(fault)
    message = str(raised.value)
    assert re.search(r"test, block 0(, thread \d+)?: ", message)
    nowhere = ("dynamic_overrun", "wild_pointer")
    if fault not in nowhere and "[&" not in FAULTS[fault]:
        file_line = re.match(r"\S+\.cpp:(\d+): ", message)
        assert file_line is not None
        first = line_of(f"case {fault_number(fault)}: {{")
        assert first <= int(file_line[1]) <= first + 2 + FAULTS[fault].count("\n")


@pytest.mark.parametrize("fault", POISONED)
def test_fault_gives_nan(fault: str) -> None:
    assert np.isnan(run(fault)).any()


def test_every_fault_has_a_test() -> None:
    assert {*REPORTED, *POISONED, "none", "missing_second_syncthreads"} == set(FAULTS)


@pytest.mark.parametrize("fault", ["missing_syncthreads", "missing_second_syncthreads"])
def test_missing_barrier_shows_in_another_order(fault: str) -> None:
    forward = run(fault)
    assert not np.array_equal(forward, run(fault, schedule="reverse"), equal_nan=True)
    assert not np.array_equal(forward, run(fault, schedule="random:5"), equal_nan=True)


def test_same_seed_gives_the_same_order() -> None:
    first, second, third = (
        run("missing_syncthreads", schedule=f"random:{seed}") for seed in (3, 3, 4)
    )
    assert np.array_equal(first, second, equal_nan=True)
    assert not np.array_equal(first, third, equal_nan=True)


def test_kernel_can_be_launched_again_after_each_kind_of_failure() -> None:
    for fault in ("early_exit", "wild_pointer", "trap", "mbarrier_no_arrival"):
        with pytest.raises(EmulatorError):
            run(fault)
        assert np.array_equal(run("none"), [np.arange(128)] * 2)


@pytest.mark.parametrize(("kept", "wanted", "enough"), ((88, 208, True), (80, 216, False)))
def test_a_block_has_no_more_registers_than_at_its_launch(kept, wanted, enough) -> None:
    """384 threads have 168 each. On a GPU the second of these waits for ever."""
    code = f"""
#include <ptx/setmaxnreg.cuh>
TCONV_KERNEL(test, 384, 1) {{
    if (threadIdx.x < 128) {{
        ptx::setmaxnreg_dec<{kept}>();
    }} else {{
        ptx::setmaxnreg_inc<{wanted}>();
    }}
    arguments.out[threadIdx.x] = 1.0f;
}}
"""
    out = aligned(384)
    source = inline_source(code, {"out": "float*"}, threads=384)
    if enough:
        launch(source, 2, out=out)
        assert (out == 1).all()
    else:
        with pytest.raises(EmulatorError, match=r"deadlock: .* wait for setmaxnreg\.inc"):
            launch(source, 2, out=out)
