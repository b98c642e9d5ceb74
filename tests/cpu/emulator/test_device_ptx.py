"""The device side of ptx/: NVRTC and ptxas accept every function on the architectures it is for."""

from __future__ import annotations

import re
from functools import cache

import pytest

from cpu.emulator.feature_cases import simple_cases
from cpu.emulator.inline_kernel import Case
from cpu.emulator.wgmma_cases import wgmma_cases
from tconv.emulator.compile import EMULATOR_DIRECTORY
from tconv.jit.compile import locale_kept, supported_architectures
from tconv.kernels.source import KERNEL_DIRECTORY

nvrtc = pytest.importorskip("cuda.bindings.nvrtc")

ARCHITECTURES = ("sm_75", "sm_80", "sm_90a", "sm_100", "sm_120")

# What no feature's test calls.
REST = """
#include <ptx/mbarrier.cuh>
#include <ptx/bulk.cuh>
#include <ptx/tensor_map.cuh>
#include <ptx/setmaxnreg.cuh>
#include <ptx/griddepcontrol.cuh>
TCONV_KERNEL(test, 128, 1) {
    TCONV_DYNAMIC_SHARED(memory);
    uint64_t* barrier = reinterpret_cast<uint64_t*>(memory);
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    ptx::mbarrier_init(barrier, 1);
    ptx::mbarrier_arrive_expect_tx(barrier, 16);
    ptx::cp_async_bulk_global_to_shared(memory + 16, arguments.in, 16, barrier);
    ptx::mbarrier_wait_parity(barrier, 0);
    ptx::mbarrier_inval(barrier);
    if (threadIdx.x > 128) {
        ptx::setmaxnreg_inc<168>();
    } else {
        ptx::setmaxnreg_dec<40>();
    }
    TCONV_CHECK(threadIdx.x < 128);
}
"""
WARPGROUP_ONLY = ("setmaxnreg", "wgmma")  # of the "a" architectures: sm_90a


def compiled(text: str, arch: str) -> str:
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), b"test.cu", 0, [], [])
    options = [f"--gpu-architecture={arch}", f"-I{KERNEL_DIRECTORY}", "-std=c++17", "-DDEVICE"]
    encoded = [option.encode() for option in options]
    with locale_kept():
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    return "" if int(status) == 0 else log.decode()


@cache
def sources() -> dict[str, tuple[str, str]]:
    """Name -> text and the least architecture, one for each different text."""
    cases: list[Case] = [*simple_cases().values(), *wgmma_cases().values()]
    found = {case.source.text(): (case.name, case.arch) for case in reversed(cases)}
    return {name: (text, arch) for text, (name, arch) in found.items()}


def number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


@pytest.mark.parametrize("name", sources())
def test_device_side_compiles(name: str) -> None:
    text, least = sources()[name]
    for arch in ARCHITECTURES:
        if arch not in supported_architectures():  # before NVRTC 12.8, sm_100 and sm_120
            continue
        if number(arch) < number(least) or ("wgmma" in text and arch != "sm_90a"):
            continue
        assert compiled(text, arch) == "", arch


def test_rest_of_the_device_side_compiles() -> None:
    prelude = "#include <ptx/cuda.cuh>\nstruct Arguments { const float* in; };\n"
    assert compiled(prelude + REST, "sm_90a") == ""


def test_headers_may_be_included_where_nothing_of_them_runs() -> None:
    names = sorted(path.name for path in (KERNEL_DIRECTORY / "ptx").glob("*.cuh"))
    includes = "".join(f"#include <ptx/{name}>\n" for name in names)
    kernel = "struct Arguments { int* out; };\nTCONV_KERNEL(test, 32, 1) { *arguments.out = 1; }\n"
    assert compiled(includes + kernel, "sm_75") == ""


def functions(directory: str) -> dict[str, set[str]]:
    """File -> names of the functions in namespace ptx, macros' included."""
    root = KERNEL_DIRECTORY if directory == "kernels" else EMULATOR_DIRECTORY / "include"
    found = {}
    for path in sorted((root / "ptx").glob("*.cuh")):
        text = path.read_text()
        inside = "".join(
            re.findall(r"^namespace ptx \{$(.*?)^\}  // namespace ptx$", text, re.S | re.M)
        )
        names = set(re.findall(r"^(?:TCONV_DEVICE|inline) [\w ]+?\b(\w+)\(", inside, re.M))
        names |= set(re.findall(r"^(?:EMULATOR|TCONV)_\w+\((\w{5,})[,)]", inside, re.M))
        found[path.name] = names
    return found


def test_both_sides_have_the_same_functions() -> None:
    device, host = functions("kernels"), functions("emulator")
    shared = {"integers.cuh", "matrix_descriptor.cuh", "wgmma_operands.cuh"}
    assert set(device) - shared == set(host)
    for file, names in host.items():
        assert device[file] == names, file
    assert sum(map(len, host.values())) > 60
