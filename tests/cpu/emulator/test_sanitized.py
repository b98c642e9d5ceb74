"""What only the sanitizers find, and that their reports say where."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from cpu.emulator.inline_kernel import InlineSource, aligned, inline_source, launch
from tconv.emulator import EmulatedKernel, child, sanitizer
from tconv.errors import EmulatorError

FAULTS = {
    "none": "result = in[t];",
    "read_after_global": "result = in[257 + t];",
    "read_before_global": "result = in[-1 - t];",
    "write_after_global": "arguments.out[128 + 127 + t] = 1;",
    "static_pointer": "float* p = tile; result = p[arguments.n + 1 + t];",
    "static_index": "result = tile[arguments.n + 1 + t];",
    "inner_index": "result = table[1][arguments.n - 122 + t];",
    "dynamic": "words[t + 126] = 1;",
    "dynamic_from_static": "float* p = tile; result = p[words - tile + arguments.n + t];",
    "not_delivered": "ptx::cp_async_cg_16(words + 4 * (t % 32), in); result = words[t];",
    "misaligned": "result = reinterpret_cast<const float4*>(in + 1)->x;",
    "shift": "result = t << (arguments.n - 90);",
    "overflow": "result = arguments.n * 20000000 + t;",
    "division": "result = 1 / (arguments.n - 127 + t);",
    "divergent": "if (t == 70) return;\n __syncthreads();",
    "wrapper": "result = ptx::ld_global_nc(in + 255 + t);",
    "recursion": "result = deep(arguments.n);",
}

CODE = """
#include <ptx/cp_async.cuh>
#include <ptx/memory.cuh>
__device__ __noinline__ int deep(int n) {
    volatile int here[1000];
    here[n] = n;
    return n < 0 ? 0 : deep(n + (n < 500)) + here[n % 1000];
}
TCONV_KERNEL(test, 128, 1) {
    TCONV_SHARED __align__(16) float tile[128];
    TCONV_SHARED float table[4][5];
    TCONV_DYNAMIC_SHARED(memory);
    float* words = reinterpret_cast<float*>(memory);
    const float* in = arguments.in;
    int t = threadIdx.x;
    float result = 0;
    tile[t] = 0;
    words[t] = 0;
    if (t < 20) table[t / 5][t % 5] = 0;
    switch (arguments.fault) {
CASES
    }
    arguments.out[t + (arguments.fault == 0 ? blockIdx.x * 128 : 0)] = result;
}
"""

REPORTED = {
    "read_after_global": "0: out of bounds: read of 4 bytes, at byte 1028 of the 1024 .* `in`",
    "read_before_global": "0: out of bounds: read of 4 bytes, at byte -4 of the 1024 .* `in`",
    "write_after_global": "1: out of bounds: write of 4 bytes, at byte 1024 of the 1024 .* `out`",
    "static_pointer": "0: out of bounds(: read .*, 0 bytes after `tile` of 512 bytes| of an array)",
    "static_index": "0: undefined behaviour: index 128 out of bounds for type 'float",
    "inner_index": "0: undefined behaviour: index 5 out of bounds for type 'float",
    "dynamic": "2: out of bounds: write of 4 bytes, 0 bytes beside the 512 bytes of dynamic",
    "dynamic_from_static": "[01]: out of bounds(: read of 4 bytes| of an array)",
    "not_delivered": "0: out of bounds of shared memory, or of bytes that a copy has not",
    "misaligned": "0: undefined behaviour: .*misaligned address",
    "shift": "0: undefined behaviour: shift exponent 37 is too large",
    "overflow": "0: undefined behaviour: signed integer overflow",
    "division": "0: undefined behaviour: division by zero",
    "divergent": "0: divergent barrier",
    "wrapper": "1: ld_global_nc out of bounds: 4 bytes at byte 1024 of an allocation",
    "recursion": "0: (a thread's stack overflows|out of bounds: 0x)",
}


def source() -> InlineSource:
    cases = "".join(
        f"        case {i}: {{ {text} break; }}\n" for i, text in enumerate(FAULTS.values())
    )
    fields = {"in": "const float*", "out": "float*", "fault": "int", "n": "int"}
    return inline_source(CODE.replace("CASES", cases), fields, threads=128, shared_bytes=512)


def run(fault: str, **options) -> np.ndarray:
    given, out = aligned(256), aligned(256)
    given[:] = np.arange(256)
    launch(
        source(),
        2,
        sanitize=True,
        **{"in": given, "out": out, "fault": list(FAULTS).index(fault), "n": 127},
        **options,
    )
    return out


def test_results_come_back() -> None:
    assert np.array_equal(run("none").reshape(2, 128), [np.arange(128)] * 2)


@pytest.mark.parametrize("fault", REPORTED)
def test_fault_is_reported(fault: str) -> None:
    with pytest.raises(EmulatorError, match="block 0, thread " + REPORTED[fault]) as raised:
        run(fault)
    if fault != "recursion":
        line = int(re.match(r"\S+\.cpp:(\d+): ", str(raised.value))[1])
        if "of an array" in str(raised.value):  # clang++ shares one trap among many lines
            return
        text = ("\n" + source().text()).split("\n")
        assert FAULTS[fault].split("\n")[-1].strip() in " ".join(text[line - 1 : line + 1])


def test_each_fault_has_a_test() -> None:
    assert {*REPORTED, "none"} == set(FAULTS)


def test_launch_without_allocations_is_refused() -> None:
    kernel = EmulatedKernel(source(), sanitize=True)
    values = {"in": 0, "out": 0, "fault": 0, "n": 0}
    with pytest.raises(ValueError, match="needs the allocations"):
        kernel.launch(1, source().pack(**values))


def test_pointer_outside_the_allocations_is_refused() -> None:
    kernel = EmulatedKernel(source(), sanitize=True)
    values = {"in": 0, "out": 4096, "fault": 0, "n": 0}
    with pytest.raises(EmulatorError, match="argument `out` points into none"):
        kernel.launch(1, source().pack(**values), allocations=[])


def test_kept_request_can_be_run_by_hand(tmp_path: Path) -> None:
    import subprocess

    kernel = EmulatedKernel(source(), sanitize=True)
    given, out = aligned(256), aligned(256)
    values = {"in": given.ctypes.data, "out": out.ctypes.data, "fault": 0, "n": 0}
    allocations = [(array.ctypes.data, array.nbytes) for array in (given, out)]
    request = tmp_path / "request"
    kernel.launch(2, source().pack(**values), allocations=allocations, keep=request)
    program = tmp_path / "request.program"  # kernel.path goes with this process
    assert subprocess.run([program, request], check=False).returncode == 0


def test_views_of_one_tensor_share_its_copy() -> None:
    memory = aligned(512)
    memory[:256] = np.arange(256)
    kernel = EmulatedKernel(source(), sanitize=True)
    address = memory.ctypes.data
    values = {"in": address, "out": address + 1024, "fault": 0, "n": 0}
    allocations = [(address, 2048), (address + 1024, 1024), (address, 1024)]
    kernel.launch(1, source().pack(**values), allocations=allocations)
    assert np.array_equal(memory[256:384], np.arange(128))


def test_overlapping_allocations_are_merged() -> None:
    assert child.merged([(100, 10), (90, 15), (300, 0), (200, 8), (200, 8)]) == [
        (90, 20),
        (200, 8),
        (300, 0),
    ]
    assert child.merged([(100, 10), (110, 10)]) == [(100, 10), (110, 10)]


def test_output_of_no_sanitizer_is_nothing() -> None:
    assert sanitizer.parse("Segmentation fault", []) is None
