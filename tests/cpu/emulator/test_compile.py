"""Builds, their cache, and what is said where there is no compiler."""

from __future__ import annotations

import ctypes
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from cpu.emulator.inline_kernel import InlineSource, aligned, inline_source, launch
from tconv.emulator import EmulatedKernel, compile
from tconv.errors import CompileError, EmulatorError, MissingDependencyError


def source(body: str = "arguments.out[threadIdx.x] = 1;", **options) -> InlineSource:
    code = f"TCONV_KERNEL(test, 32, 1) {{ {body} }}"
    return inline_source(code, {"out": "int*"}, threads=32, **options)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh cache folder. The runtime, whose build takes longest, stays where it was built."""
    runtime = compile.build_runtime()
    monkeypatch.setattr(compile, "build_runtime", lambda *, sanitize=False: runtime)
    monkeypatch.setenv("TCONV_CACHE_DIR", str(tmp_path))
    return tmp_path / "emulator"


def test_build_is_kept_and_found_again(cache: Path) -> None:
    first = compile.build(source())
    assert first.parent == cache
    before = first.stat().st_mtime_ns
    assert compile.build(source()) == first
    assert first.stat().st_mtime_ns == before
    assert "arguments.out[threadIdx.x] = 1;" in first.with_suffix(".cpp").read_text()
    assert not list(cache.glob("building-*"))


def test_key_covers_text_options_compiler_and_headers(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "headers" / "mine.cuh"
    header.parent.mkdir()
    header.write_text("constexpr int mine = 1;\n")
    directories = (*compile.INCLUDE_DIRECTORIES, header.parent)
    monkeypatch.setattr(compile, "INCLUDE_DIRECTORIES", directories)
    kernel = inline_source(
        "#include <mine.cuh>\nTCONV_KERNEL(test, 32, 1) { arguments.out[threadIdx.x] = mine; }",
        {"out": "int*"},
        threads=32,
    )
    paths = [compile.build(kernel)]
    header.write_text("constexpr int mine = 2;\n")
    paths.append(compile.build(kernel))
    monkeypatch.setattr(compile, "KERNEL_OPTIONS", ("-O0",))
    paths.append(compile.build(kernel))
    monkeypatch.setattr(compile, "_version", lambda command: "another 1.0")
    paths.append(compile.build(kernel))
    paths.append(compile.build(source()))
    assert len(set(paths)) == 5


def test_runtime_is_part_of_what_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCONV_CACHE_DIR", str(tmp_path))
    runtime = compile.build_runtime()
    assert runtime.parent == tmp_path / "emulator"
    assert compile.build_runtime() == runtime


def test_without_cache_nothing_is_left_in_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCONV_CACHE", "0")
    path = compile.build(source())
    assert path.is_file()
    assert not cache.exists()


def test_unwritable_cache_is_worked_around(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TCONV_CACHE_DIR", str(blocked))
    assert compile.build(source()).is_file()
    assert "cannot write" in caplog.text


def test_text_that_does_not_compile(cache: Path) -> None:
    with pytest.raises(CompileError) as raised:
        compile.build(source("arguments.out[0] = nowhere;"))
    message = str(raised.value)
    assert "could not compile test for the emulator" in message
    assert "nowhere" in message and "-std=c++17" in message
    assert raised.value.source_path is not None
    assert "nowhere" in raised.value.source_path.read_text()


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MissingDependencyError, match="apt-get install g\\+\\+"):
        compile.build(source())
    monkeypatch.setenv("CXX", "no-such-compiler -pipe")
    with pytest.raises(MissingDependencyError, match="looked for no-such-compiler"):
        compile.build(source())


def test_arguments_of_another_size_are_refused() -> None:
    kernel = EmulatedKernel(source())
    with pytest.raises(EmulatorError, match="take 8 bytes, the launcher brought 12"):
        kernel.launch(1, bytes(12))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": 0}, "a grid has 1 to"),
        ({"grid": (1, 1)}, "a grid has 1 to"),
        ({"grid": 1, "schedule": "backward"}, 'must be "forward", "reverse" or "random:<seed>"'),
    ],
)
def test_launch_that_makes_no_sense(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmulatedKernel(source()).launch(arguments=bytes(8), **options)


def test_too_many_threads_and_too_much_shared_memory() -> None:
    code = "TCONV_KERNEL(test, 2048, 1) {}"
    with pytest.raises(ValueError, match="1 to 1024 threads, got 2048"):
        EmulatedKernel(inline_source(code, {"out": "int*"}, threads=2048))
    with pytest.raises(EmulatorError, match="are more than any GPU's 232448"):
        launch(source(shared_bytes=228 * 1024), out=aligned(32, np.int32))


def test_grid_of_three_dimensions() -> None:
    kernel = source(
        "if (threadIdx.x == 0) arguments.out[(blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x"
        " + blockIdx.x] = 100 * blockIdx.z + 10 * blockIdx.y + blockIdx.x;"
    )
    out = aligned(24, np.int32)
    EmulatedKernel(kernel).launch((2, 3, 4), kernel.pack(out=out.ctypes.data))
    expected = [100 * z + 10 * y + x for z in range(4) for y in range(3) for x in range(2)]
    assert np.array_equal(out, expected)


def test_threads_take_turns_quickly() -> None:
    kernel = inline_source(
        """
TCONV_KERNEL(test, 256, 1) {
    TCONV_SHARED int tile[256];
    int t = threadIdx.x, value = t;
    for (int i = 0; i < 200; ++i) {
        tile[t] = value;
        __syncthreads();
        value = tile[(t + 1) % 256];
        __syncthreads();
    }
    arguments.out[blockIdx.x * 256 + t] = value;
}
""",
        {"out": "int*"},
        threads=256,
    )
    out = aligned((16, 256), np.int32)
    launch(kernel, 16, out=out)
    start = time.perf_counter()
    launch(kernel, 16, out=out)
    assert time.perf_counter() - start < 1.0  # 1.6 million waits; a tenth of it here
    assert np.array_equal(out, [np.roll(np.arange(256), -200)] * 16)


def test_printf_goes_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    body = 'if (threadIdx.x == 3) printf("lane %d\\n", threadIdx.x);'
    launch(source(body), out=aligned(32, np.int32))
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == "lane 3\n"


def test_clang_compiles_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["clang++", *(f"clang++-{version}" for version in range(14, 24))]
    found = [name for name in names if shutil.which(name)]
    if not found:
        pytest.skip("no clang++ on this machine")
    monkeypatch.setenv("CXX", found[0])
    monkeypatch.setenv("TCONV_CACHE_DIR", str(tmp_path))
    kernel = source("TCONV_SHARED int tile[32]; arguments.out[threadIdx.x] = tile[threadIdx.x];")
    assert compile.build(kernel).is_file()
    try:
        compile.build(kernel, sanitize=True)
    except CompileError as error:
        pytest.skip(f"clang++ without its sanitizers: {error.first_errors()[0]}")
    out = aligned(32, np.int32)
    launch(kernel, sanitize=True, out=out)
    assert (out == -1).all()
    kernel = source("TCONV_SHARED int tile[32]; tile[threadIdx.x + 1] = 0;")
    with pytest.raises(
        EmulatorError, match="thread 31: undefined behaviour: index 32 out of bounds"
    ):
        launch(kernel, sanitize=True, out=out)
