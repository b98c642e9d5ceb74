from __future__ import annotations

import ctypes
import hashlib
import locale
import re
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tconv.errors import CompileError
from tconv.jit import compile as compile_module
from tconv.jit.cache import default_cache
from tconv.jit.compile import KERNELS, compile_cuda, parse_log, supported_architectures
from tconv.jit.target import Target
from tconv.kernels.source import KernelSource

pytestmark = pytest.mark.usefixtures("nvrtc")

SPILLS = """
    float values[64];
    #pragma unroll
    for (int i = 0; i < 64; ++i) values[i] = arguments.output[i * 32 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 64; ++i)
        arguments.output[i * 32 + threadIdx.x] = values[i] * values[(i * 5 + 1) % 64];
"""


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: nothing is in memory, the disk keeps what it has."""
    monkeypatch.setattr("tconv.jit.cache._caches", {})


@pytest.mark.parametrize("arch", Target.names())
def test_a_kernel_source_compiles_for_every_architecture(tmp_path: Path, arch: str) -> None:
    if arch not in supported_architectures():
        pytest.skip(f"this NVRTC does not know {arch}")
    (tmp_path / "tiny.cu").write_text(
        """#include <ptx/cuda.cuh>
        constexpr int twice(int value) { return 2 * value; }  // unmarked: for host and device
        TCONV_KERNEL(tiny, Layer::threads, 2) {
            TCONV_SHARED float tile[Layer::threads];
            tile[threadIdx.x] = arguments.input[threadIdx.x];
            __syncthreads();
            arguments.output[threadIdx.x] = tile[twice(threadIdx.x) % Layer::threads];
        }"""
    )
    source = KernelSource(
        stem="tiny",
        constants=(("channels", 4),),
        arguments=(("input", "const float*"), ("output", "float*")),
        shared_bytes=0,
        threads=96,
    )
    compiled = compile_cuda(source, arch, include_dirs=(tmp_path, KERNELS))
    assert (compiled.stem, compiled.arch, compiled.cached) == ("tiny", arch, False)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.key.startswith(f"tiny-{arch}-")
    assert compiled.resources.static_shared == 96 * 4
    assert 4 <= compiled.resources.registers <= 64
    assert not compiled.resources.spills and compiled.resources.warnings == ()
    assert f"--gpu-architecture={arch}" in compiled.options
    assert compiled.seconds > 0


def test_spills_are_seen(text_source: type[Any]) -> None:
    few = compile_cuda(text_source(body=SPILLS, bounds="1024, 2"), "sm_80")
    assert few.resources.spills
    assert few.resources.spill_stores > 0 and few.resources.spill_loads > 0
    assert few.resources.stack_frame > 0
    assert few.resources.registers == 32
    assert f"spills (stores {few.resources.spill_stores}, " in str(few.resources)
    enough = compile_cuda(text_source(body=SPILLS), "sm_80")
    assert not enough.resources.spills and enough.resources.stack_frame == 0
    assert enough.resources.registers > 64
    assert enough.key != few.key


def test_warnings_are_kept(text_source: type[Any]) -> None:
    compiled = compile_cuda(text_source(body="int unused = 3;"), "sm_80")
    (warning,) = compiled.resources.warnings
    assert "unused" in warning and warning.startswith("tiny.generated.cu(")


def test_parse_log() -> None:
    older = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'f' for 'sm_80'
ptxas info    : Function properties for f
    96 bytes stack frame, 100 bytes spill stores, 120 bytes spill loads
ptxas info    : Used 40 registers, 4224 bytes smem, 368 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Function properties for called
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
"""
    resources = parse_log(older)
    assert (resources.registers, resources.static_shared, resources.constant) == (40, 4224, 376)
    assert (resources.spill_stores, resources.spill_loads, resources.stack_frame) == (104, 128, 96)
    serialised = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to insufficient register resources in function 'f'"
    )
    newer = f"""{serialised}
ptxas info    : Function properties for f
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers
ptxas warning : something
ptxas info    : Compile time = 13.299 ms
"""
    resources = parse_log(newer)
    assert (resources.registers, resources.static_shared, resources.constant) == (168, 0, 0)
    assert resources.warnings == (serialised, "ptxas warning : something")
    assert str(resources).endswith("2 warnings")


def test_a_compile_error_says_where_and_with_what(
    cache_folder: Path, text_source: type[Any]
) -> None:
    source = text_source(body="no_such_function();\nanother_one();")
    with pytest.raises(CompileError) as raised:
        compile_cuda(source, "sm_80")
    error = raised.value
    assert error.message.startswith("tiny did not compile for sm_80: NVRTC_ERROR_COMPILATION")
    assert "no_such_function" in error.log and "another_one" in error.log
    assert "--gpu-architecture=sm_80" in error.options
    assert error.source_text == source.text()
    assert error.source_path is not None and error.source_path.read_text() == source.text()
    assert error.source_path.parent == cache_folder / "sources"
    shown = str(error)
    for part in (error.message, 'identifier "no_such_function"', str(error.source_path)):
        assert part in shown
    assert default_cache().entries() == []
    error.plan = "the plan"
    assert str(error).endswith("plan: the plan")


def test_a_compile_error_of_ptxas(text_source: type[Any]) -> None:
    with pytest.raises(CompileError) as raised:
        compile_cuda(text_source(body='asm volatile("no.such.instruction;");'), "sm_80")
    assert "ptxas" in str(raised.value)


@pytest.mark.parametrize(
    ("arch", "way_out"), [("sm_70", "sm_75 and newer"), ("sm_990a", "Install a newer NVRTC")]
)
def test_an_architecture_that_nvrtc_does_not_know(
    monkeypatch: pytest.MonkeyPatch, text_source: type[Any], arch: str, way_out: str
) -> None:
    known = ("sm_75", "sm_80", "sm_90", "sm_90a")
    monkeypatch.setattr(compile_module, "supported_architectures", lambda: known)
    with pytest.raises(CompileError) as raised:
        compile_cuda(text_source(), arch)
    message = str(raised.value)
    assert f"tiny cannot be compiled for {arch}: NVRTC " in message
    assert "compiles for sm_75, sm_80, sm_90, sm_90a" in message and way_out in message


def test_no_architecture(text_source: type[Any]) -> None:
    with pytest.raises(ValueError, match="got 'hopper'"):
        compile_cuda(text_source(), "hopper")


def test_supported_architectures() -> None:
    known = supported_architectures()
    assert {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a"} <= set(known)
    assert "sm_80a" not in known


def test_found_in_memory_and_on_disk(
    monkeypatch: pytest.MonkeyPatch, text_source: type[Any]
) -> None:
    first = compile_cuda(text_source(), "sm_80")
    started = time.perf_counter()
    second = compile_cuda(text_source(), "sm_80")
    in_memory = time.perf_counter() - started
    forget(monkeypatch)
    third = compile_cuda(text_source(), "sm_80")
    assert [first.cached, second.cached, third.cached] == [False, True, True]
    for other in (second, third):
        assert (other.cubin, other.log, other.key) == (first.cubin, first.log, first.key)
        assert (other.resources, other.options) == (first.resources, first.options)
        assert other.seconds == pytest.approx(first.seconds, abs=1e-4)
    assert in_memory < first.seconds  # of NVRTC alone
    (entry,) = default_cache().entries()
    assert entry.key == first.key
    assert (entry.metadata["kind"], entry.metadata["stem"]) == ("cubin", "tiny")
    assert entry.metadata["arch"] == "sm_80"
    assert entry.metadata["resources"]["registers"] == first.resources.registers
    assert entry.metadata["compiler"].startswith("NVRTC ")


def test_what_decides_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text_source: type[Any]
) -> None:
    header = tmp_path / "value.cuh"
    header.write_text("#define VALUE 1.0f")
    source = text_source(head="#include <value.cuh>", body="arguments.output[0] = VALUE;")

    def key(**changed: Any) -> str:
        usual = {"source": source, "arch": "sm_80", "include_dirs": (tmp_path,)}
        return compile_cuda(**{**usual, **changed}).key

    keys = [key(), key(arch="sm_86"), key(options=["--use_fast_math"])]
    keys.append(key(source=text_source(head="#include <value.cuh>")))
    header.write_text("#define VALUE 2.0f")
    keys.append(key())
    monkeypatch.setattr(compile_module, "nvrtc_version", lambda: (99, 0))
    keys.append(key())
    monkeypatch.setattr(compile_module, "nvrtc_build", lambda: "another")
    keys.append(key())
    monkeypatch.setenv("TCONV_DEBUG", "2")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_the_build_of_nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = compile_module.nvrtc_build()
    assert re.fullmatch(r"[0-9a-f]{16,}(, [0-9a-f]{16,})*|[0-9]+ bytes", build), build
    library = tmp_path / "libnvrtc.so.13"
    library.write_bytes(elf_with_note(build_id=bytes(range(20))))
    assert compile_module._build_id(library) == bytes(range(20)).hex()
    library.write_bytes(elf_with_note(build_id=bytes(8)))
    assert compile_module._build_id(library) == bytes(8).hex()
    library.write_bytes(elf_with_note(build_id=None))
    assert compile_module._build_id(library) == f"{library.stat().st_size} bytes"
    compile_module.nvrtc_build.cache_clear()
    monkeypatch.setattr(compile_module, "_build_id", lambda path: path.open().close() or "known")
    try:
        assert compile_module.nvrtc_build() == "known"
        compile_module.nvrtc_build.cache_clear()
        library.unlink()
        monkeypatch.setattr(compile_module, "_build_id", lambda _: library.read_text())
        assert compile_module.nvrtc_build().startswith("unknown ("), "replaced since it was loaded"
    finally:
        compile_module.nvrtc_build.cache_clear()


def elf_with_note(build_id: bytes | None) -> bytes:
    """A 64-bit ELF file's header, a loaded segment, and one of notes, the build ID the second."""
    header = struct.pack("<32xQ14xHH6x", 64, 56, 2)
    notes = struct.pack("<III8s8s", 7, 8, 5, b"another\0", bytes(8))
    if build_id is not None:
        notes += struct.pack("<III4s", 4, len(build_id), 3, b"GNU\0") + build_id
    loaded = struct.pack("<IIQQQQ16x", 1, 0, 0, 0, 0, 64)
    noted = struct.pack("<IIQQQQ16x", 4, 0, 64 + 2 * 56, 0, 0, len(notes))
    return header + loaded + noted + notes


@pytest.mark.parametrize("lost", ["resources", "log"])
def test_an_entry_of_another_version_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    text_source: type[Any],
    lost: str,
) -> None:
    """Its checksum is right, its description is not what this version writes."""
    first = compile_cuda(text_source(), "sm_80")
    stored = default_cache().lookup(first.key)
    assert stored is not None
    other = {name: value for name, value in stored.metadata.items() if name != lost}
    for description in (other, {**stored.metadata, "resources": {"registers": 3}}):
        default_cache().put(first.key, stored.payload, description)
        forget(monkeypatch)
        caplog.clear()
        again = compile_cuda(text_source(), "sm_80")
        assert not again.cached and again.resources == first.resources
        assert "will be made again: its description" in caplog.text
        assert compile_cuda(text_source(), "sm_80").cached


def test_without_disk(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch, text_source: type[Any]
) -> None:
    monkeypatch.setenv("TCONV_CACHE", "0")
    assert not compile_cuda(text_source(), "sm_80").cached
    assert compile_cuda(text_source(), "sm_80").cached
    assert not cache_folder.exists()


def test_debug_levels(
    cache_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text_source: type[Any],
) -> None:
    monkeypatch.setenv("TCONV_DEBUG", "1")
    compile_cuda(text_source(), "sm_80")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TCONV_DEBUG", "3")
    compiled = compile_cuda(text_source(), "sm_80")
    assert "--generate-line-info" in compiled.options
    printed = capsys.readouterr().err
    assert "tconv: tiny for sm_80 compiled in" in printed and "registers" in printed
    (dumped,) = (cache_folder / "sources").iterdir()
    assert str(dumped) in printed and dumped.read_text() == text_source().text()


def test_threads_compile_once(monkeypatch: pytest.MonkeyPatch, text_source: type[Any]) -> None:
    runs: list[str] = []
    run_nvrtc = compile_module.run_nvrtc

    def counted(*arguments: Any) -> tuple[bytes, str]:
        runs.append(arguments[0])
        return run_nvrtc(*arguments)

    monkeypatch.setattr(compile_module, "run_nvrtc", counted)
    threads = [
        threading.Thread(target=compile_cuda, args=(text_source(), "sm_80")) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs == ["tiny"]


def test_a_thread_keeps_its_locale(text_source: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC 12.4 and older leave it in C's, where Python reads files as ASCII."""
    libc = ctypes.CDLL(None)
    for function in (libc.uselocale, libc.newlocale):
        function.restype = ctypes.c_void_p
    libc.newlocale.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p]
    libc.uselocale.argtypes = [ctypes.c_void_p]
    real = compile_module.libraries.nvrtc()
    of_c = libc.newlocale(1 << locale.LC_CTYPE, b"C", None)

    def compile_as_12_4(*arguments: Any) -> Any:
        result = real.nvrtcCompileProgram(*arguments)
        libc.uselocale(of_c)
        return result

    stand_in = SimpleNamespace(**{**vars(real), "nvrtcCompileProgram": compile_as_12_4})
    monkeypatch.setattr(compile_module.libraries, "nvrtc", lambda: stand_in)
    before = libc.uselocale(None)
    assert before != of_c
    try:
        assert not compile_cuda(text_source(), "sm_80").cached
        assert libc.uselocale(None) == before
    finally:
        libc.uselocale(before)


def test_processes_compile_the_same_key_at_once(
    cache_folder: Path,
    tmp_path: Path,
    text_source: type[Any],
    monkeypatch: pytest.MonkeyPatch,
    run_many_alone: Callable[[str, int], list[str]],
) -> None:
    source, count = text_source(), 8
    ready = tmp_path / "ready"
    ready.mkdir()
    # Each loads NVRTC, then waits for all the others.
    code = f"""
import hashlib, os, pathlib, time, types
from tconv.jit.compile import compile_cuda, supported_architectures
source = types.SimpleNamespace(stem={source.stem!r}, text=lambda: {source.text()!r})
supported_architectures()
ready = pathlib.Path({str(ready)!r})
(ready / str(os.getpid())).touch()
while len(list(ready.iterdir())) < {count}:
    time.sleep(0.001)
compiled = compile_cuda(source, "sm_80")
print(compiled.key, hashlib.sha256(compiled.cubin).hexdigest(), compiled.resources.registers)
"""
    printed = run_many_alone(code, count)
    assert len({(line.split()[0], line.split()[2]) for line in printed}) == 1
    key = printed[0].split()[0]
    assert [path.name for path in cache_folder.iterdir()] == [f"{key}.tconv"]
    forget(monkeypatch)
    compiled = compile_cuda(source, "sm_80")
    assert compiled.cached and compiled.key == key
    assert hashlib.sha256(compiled.cubin).hexdigest() in {line.split()[1] for line in printed}
