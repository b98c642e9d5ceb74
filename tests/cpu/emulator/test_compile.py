"""Builds, their cache, and what is said where there is no compiler."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cpu.emulator.inline_kernel import InlineSource, aligned, inline_source, launch
from cpu.jit.conftest import BARE_PACKAGE
from tconv.emulator import EmulatedKernel, compile
from tconv.emulator import launch as launcher
from tconv.errors import CompileError, EmulatorError, MissingDependencyError
from tconv.jit import cache as disk_cache


def source(body: str = "arguments.out[threadIdx.x] = 1;", **options) -> InlineSource:
    code = f"TCONV_KERNEL(test, 32, 1) {{ {body} }}"
    return inline_source(code, {"out": "int*"}, threads=32, **options)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh cache folder. The runtime, whose build takes longest, stays where it was built."""
    runtime = compile.build_runtime()
    launcher._runtime()
    monkeypatch.setattr(compile, "build_runtime", lambda *, sanitize=False: runtime)
    return fresh(tmp_path / "cache", monkeypatch)


def fresh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache in a folder, as for a new process: neither it nor the emulator holds anything."""
    monkeypatch.setenv("TCONV_CACHE_DIR", str(folder))
    monkeypatch.setattr(disk_cache, "_caches", {})
    monkeypatch.setattr(disk_cache, "_warned", set())
    monkeypatch.setattr(compile, "_own_folder", functools.cache(compile._own_folder.__wrapped__))
    return folder


def count_compilers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled from now on."""
    compiled: list[str] = []
    honest = compile._compile

    def counted(what: str, *arguments) -> None:
        compiled.append(what)
        honest(what, *arguments)

    monkeypatch.setattr(compile, "_compile", counted)
    return compiled


def test_build_is_kept_and_found_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = count_compilers(monkeypatch)
    first = compile.build(source())
    assert cache not in first.parents and compile.build(source()) == first
    (entry,) = disk_cache.default_cache().entries()
    assert entry.metadata["kind"] == "emulated" and entry.metadata["stem"] == "test"
    text = cache / "sources" / f"{first.stem}.cpp"
    assert "arguments.out[threadIdx.x] = 1;" in text.read_text()
    assert list(first.parent.iterdir()) == [first]
    fresh(cache, monkeypatch)
    again = compile.build(source())
    assert again != first and again.read_bytes() == first.read_bytes()
    assert compiled == ["test"]


def bits_flipped(entry: Path) -> None:
    """As a disk does: within the code, where `dlopen` sees nothing."""
    data = bytearray(entry.read_bytes())
    data[len(data) // 3] ^= 0xFF
    entry.write_bytes(data)


def code_replaced(entry: Path) -> None:
    """As an attacker does who can write to the file, but knows nothing of its end."""
    data = entry.read_bytes()
    entry.write_bytes(b"\x7fELF" + bytes(len(data) - 4))


def become_link(entry: Path) -> None:
    theirs = entry.parent.parent / "theirs"
    entry.rename(theirs)
    entry.symlink_to(theirs)


@pytest.mark.parametrize("tamper", [bits_flipped, code_replaced, become_link])
def test_what_was_tampered_with_is_not_loaded(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tamper: Callable[[Path], None],
) -> None:
    bad = compile.build(source()).read_bytes()
    (entry,) = cache.glob("*.tconv")
    tamper(entry)
    if not entry.is_symlink():
        bad = entry.read_bytes()[: len(bad)]
    fresh(cache, monkeypatch)
    compiled = count_compilers(monkeypatch)
    assert compile.build(source()).read_bytes() != bad
    assert compiled == ["test"] and "is damaged and will be made again" in caplog.text
    out = aligned(32, np.int32)
    launch(source(), out=out)
    assert (out == 1).all()
    fresh(cache, monkeypatch)
    compile.build(source())
    assert compiled == ["test"], "it was made again once"


def test_what_others_could_have_written_is_not_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile.build(source())
    cache.chmod(0o777)
    before = sorted(cache.rglob("*"))
    compiled = count_compilers(monkeypatch)
    for _ in range(2):
        fresh(cache, monkeypatch)
        compile.build(source())
        compile.build(source())
    assert compiled == ["test"] * 2
    assert f"run `chmod 700 {cache}`" in caplog.text
    assert sorted(cache.rglob("*")) == before


def test_what_is_loaded_is_this_process_s_own(cache: Path) -> None:
    """Not the entry: between its check and `dlopen`, or the next launch, it could be another."""
    kernel = EmulatedKernel(source())
    path = kernel.path
    for folder in (path, path.parent):
        status = folder.stat()
        assert status.st_uid == os.geteuid() and not status.st_mode & 0o077
    (entry,) = cache.glob("*.tconv")
    entry.write_bytes(b"")
    out = aligned(32, np.int32)
    kernel.launch(1, kernel.source.pack(out=out.ctypes.data))
    assert (out == 1).all()


def test_the_copies_go_with_their_process(tmp_path: Path) -> None:
    """And not with a fork of it."""
    code = """
import os
from tconv.emulator import compile
path = compile.build_runtime()
if os.fork() == 0:
    raise SystemExit
os.wait()
assert path.is_file()
"""
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "TCONV_CACHE": "0",
        "CXX": fake_compiler(tmp_path),
    }
    subprocess.run([sys.executable, "-c", BARE_PACKAGE + code], env=environment, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["c++"]


def fake_compiler(folder: Path) -> str:
    """One that takes no time, and writes what it is asked for."""
    path = folder / "c++"
    path.write_text('#!/bin/sh\nfor last; do :; done\n[ "$last" = --version ] || echo > "$last"\n')
    path.chmod(0o700)
    return str(path)


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
    cache = fresh(tmp_path / "cache", monkeypatch)
    runtime = compile.build_runtime()
    (entry,) = disk_cache.default_cache().entries()
    assert entry.path.parent == cache and entry.metadata["stem"] == "runtime"
    compiled = count_compilers(monkeypatch)
    fresh(cache, monkeypatch)
    assert compile.build_runtime().read_bytes() == runtime.read_bytes()
    assert compiled == []


def test_without_cache_nothing_is_left_in_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCONV_CACHE", "0")
    path = compile.build(source())
    assert path.is_file() and compile.build(source()) == path
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
    path = compile.build(source())
    assert path.is_file() and compile.build(source()) == path
    assert "cannot be written" in caplog.text


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
