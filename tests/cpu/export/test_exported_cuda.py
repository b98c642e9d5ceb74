"""The CUDA text of exported files, compiled by NVRTC 11.8, 12.1 and 13, and by nvcc if present."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from exported import KERNELBENCH, export_half, load, planned_launches, problem
from nvrtc_releases import RELEASES, nvrtc
from tconv.export import export_file
from tconv.jit.target import Target
from tiers import quick

ARCHITECTURES = tuple(
    f"sm_{number}" for number in (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
)
ALL_TYPES = ("sm_75", "sm_80", "sm_90")


def float32_alone(module) -> str:
    """The text without the general kernels of the other types."""
    return re.sub(
        r"^TCONV_(CORRELATIONS|REDUCTION)\((?!float32,)\w+, \w+\)\n",
        "",
        module.CUDA_SOURCE,
        flags=re.MULTILINE,
    )


@pytest.mark.parametrize(
    ("release", "architecture"),
    [
        pair
        for release in RELEASES
        for pair in quick(((release, name) for name in ARCHITECTURES), 2, 6, -1)
        # The text is the same from sm_80 to sm_89, so releases before the last take one between.
        if release == RELEASES[-1] or pair.values[1] not in ("sm_87", "sm_88", "sm_89")
    ],
)
def test_compiles(release, architecture, exported_files):
    compiler = nvrtc(release)
    if architecture not in compiler.architectures:
        pytest.skip(f"NVRTC {compiler.version} does not know {architecture}")
    module = load(exported_files[75])
    every_type = architecture in ALL_TYPES
    log = compiler.compile(
        module.CUDA_SOURCE if every_type else float32_alone(module), architecture
    )
    entries = re.findall(r"Compiling entry function '(\w+)'", log)
    planned = len({launch.name for launch in planned_launches(module)})
    assert len(entries) == (20 if every_type else 5) + planned
    for report in re.split(r"Compiling entry function ", log)[1:]:
        if re.match(r"'any_\w+_float32'", report):
            assert not re.search(r"[1-9]\d* bytes spill", report), report


@pytest.mark.parametrize("release", quick(RELEASES, -1))
def test_instructions_of_one_architecture_are_guarded(release, exported_files):
    module = load(exported_files[57])
    specific = next(call for call in module.PLANNED_CALLS if call.specific)  # forward
    compiler = nvrtc(release)
    assert specific.capabilities == (Target.named("sm_90a").capability,)
    name = specific.launches[-1].name
    for architecture in ("sm_80", "sm_90", "sm_90a"):
        if architecture not in compiler.architectures:
            continue
        log = compiler.compile(float32_alone(module), architecture)
        report = log[log.index(f"'{name}'") :]
        registers = int(re.findall(r"Used (\d+) registers", report)[0])
        assert (registers > 32) == (architecture == "sm_90a")


@pytest.mark.parametrize("name", ("streamed", "flat"))
@pytest.mark.parametrize("release", quick(RELEASES, -1))
def test_kernels_that_repair_compile_beside_what_they_repair(release, name, tmp_path, monkeypatch):
    compiler = nvrtc(release)
    if "sm_90a" not in compiler.architectures:
        pytest.skip(f"NVRTC {compiler.version} does not know sm_90a")
    export_half(name, tmp_path / "model_new.py", monkeypatch)
    module = load(tmp_path / "model_new.py")
    log = compiler.compile(float32_alone(module), "sm_90a")
    entries = re.findall(r"Compiling entry function '(sm90\w+)'", log)
    launches = {launch.name for launch in planned_launches(module)}
    assert set(entries) == {name for name in launches if name.startswith("sm90")}
    assert entries.count(entries[0]) == 1
    assert {launch.name for launch in module.PLANNED_CALLS[0].launches} <= set(entries)


NVCC_FLAGS = (
    # What torch.utils.cpp_extension adds.
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
    "-std=c++17",
    "-arch=sm_90a",
)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("number", quick(KERNELBENCH, KERNELBENCH.index(64)))
def test_nvcc_compiles(number, exported_files, tmp_path):
    """What NVRTC takes for device code may be host code to nvcc, which users compile with."""
    assert_nvcc_compiles(exported_files[number], tmp_path)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_nvcc_compiles_kernels_of_16_bits(tmp_path):
    export_file(problem(64), None, tmp_path / "model_new.py", dtype="bfloat16")
    assert_nvcc_compiles(tmp_path / "model_new.py", tmp_path)


def assert_nvcc_compiles(path, tmp_path):
    source = tmp_path / "cuda.cu"
    source.write_text(load(path).CUDA_SOURCE)
    command = ["nvcc", *NVCC_FLAGS, "-c", source, "-o", tmp_path / "cuda.o"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, "\n".join(
        line for line in (done.stdout + done.stderr).splitlines() if "error" in line
    )
