"""Compiles a kernel's source to a cubin with NVRTC, without a GPU.

NVRTC compiles for a real architecture, so it runs ptxas too. The cubin loads without a further
compilation, and `--ptxas-options=-v` reports the kernel's resources.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import re
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tconv import settings
from tconv.errors import CompileError
from tconv.jit import libraries
from tconv.jit.cache import Stored, default_cache, source_digest
from tconv.jit.nvrtc_process import NvrtcProcess
from tconv.jit.target import parse_arch

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
"""The folder of the device sources, the only one on NVRTC's include path."""


class CudaSource(Protocol):
    """The interface of `compile_cuda` to a source, such as `tconv.kernels.source.KernelSource`."""

    @property
    def stem(self) -> str:
        """Name of the kernel's file and of its entry point."""

    def text(self) -> str:
        """The whole translation unit."""


@dataclass(frozen=True)
class Resources:
    """Resources of a kernel, as ptxas reports them.

    Attributes:
        registers: registers of a thread.
        spill_stores: bytes that a thread stores to spill registers, in all functions together.
        spill_loads: bytes that it loads back.
        stack_frame: bytes of a thread's largest stack frame.
        static_shared: bytes of statically allocated shared memory of a block.
        constant: bytes of the constant banks that ptxas lists. From sm_90 on it lists none for the
            arguments.
        warnings: warnings in the log, among them ptxas's remarks that it serialised `wgmma` (C7510,
            C7512).
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack_frame: int
    static_shared: int
    constant: int
    warnings: tuple[str, ...] = ()

    @property
    def spills(self) -> bool:
        """Whether registers spill to local memory."""
        return self.spill_stores > 0 or self.spill_loads > 0

    def __str__(self) -> str:
        text = f"{self.registers} registers, {self.static_shared} bytes of static shared memory"
        if self.stack_frame:
            text += f", {self.stack_frame} bytes of stack"
        if self.spills:
            text += f", spills (stores {self.spill_stores}, loads {self.spill_loads} bytes)"
        if self.warnings:
            text += f", {len(self.warnings)} warning{'s' if len(self.warnings) > 1 else ''}"
        return text


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Attributes:
        stem: the name of the kernel and of its entry point.
        arch: the real architecture, "sm_90a".
        cubin: an ELF image for `cuModuleLoadData`.
        log: the output of NVRTC and ptxas.
        resources: parsed from `log`.
        options: as given to NVRTC.
        seconds: duration of the compilation.
        key: its key in the cache.
        cached: whether this call found it in the cache.
    """

    stem: str
    arch: str
    cubin: bytes = field(repr=False)
    log: str = field(repr=False)
    resources: Resources
    options: tuple[str, ...]
    seconds: float
    key: str
    cached: bool


def compile_cuda(
    source: CudaSource,
    arch: str,
    *,
    options: Sequence[str] = (),
    include_dirs: Sequence[Path] = (KERNELS,),
    process: NvrtcProcess | None = None,
) -> Compiled:
    """Compiles a kernel for a real architecture, or finds it in the cache.

    Args:
        source: the kernel's source.
        arch: "sm_90a".
        options: further options for NVRTC.
        include_dirs: the include path.
        process: where NVRTC runs; by default in this process.

    Raises:
        CompileError: the source does not compile, or this NVRTC does not know `arch`.
        MissingDependencyError: cuda-bindings or NVRTC is not installed.
        ValueError: `arch` does not name an architecture.
    """
    check_arch(arch, source.stem)
    line_info = settings.debug() >= 2
    # `deciding` options change the code, `locating` options only say where files are. Functions
    # without an execution space are __device__: helpers that the emulator shares then need none.
    deciding = [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--device-as-default-execution-space",
        "--ptxas-options=-v",
        *(["--generate-line-info"] if line_info else []),
        *options,
    ]
    locating = [f"--include-path={folder}" for folder in include_dirs]
    all_options = (*deciding, *locating)

    text = source.text()
    version = "NVRTC {}.{}".format(*nvrtc_version())
    parts = [*deciding, source.stem, version, nvrtc_build()]
    if line_info:
        parts += locating  # line information contains the files' paths
    digest = source_digest(text, include_dirs, parts)
    key = f"{source.stem}-{arch}-{digest}"

    if settings.debug() >= 3:
        path = default_cache().write_source(f"{key}.cu", text)
        print(f"tconv: source of {source.stem}: {path}", file=sys.stderr)

    def build() -> tuple[bytes, dict[str, Any]]:
        started = time.perf_counter()
        cubin, log = run_nvrtc(source.stem, text, arch, all_options, key, process)
        seconds = time.perf_counter() - started
        return cubin, {
            "kind": "cubin",
            "stem": source.stem,
            "arch": arch,
            "compiler": version,
            "compiler_build": nvrtc_build(),
            "seconds": round(seconds, 4),
            "resources": dataclasses.asdict(parse_log(log)),
            "log": log,
        }

    compiled, built = default_cache().get_or_build(
        key, build, lambda stored: _compiled(stored, all_options)
    )
    compiled = dataclasses.replace(compiled, cached=not built)
    if settings.debug() >= 2:
        did = "found" if compiled.cached else f"compiled in {compiled.seconds:.2f} s"
        print(
            f"tconv: {compiled.stem} for {arch} {did}: {compiled.resources}; "
            f"options: {' '.join(all_options)}",
            file=sys.stderr,
        )
    return compiled


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of NVRTC.

    Raises:
        MissingDependencyError: cuda-bindings or NVRTC is not installed.
    """
    result, major, minor = libraries.nvrtc().nvrtcVersion()
    assert int(result) == 0, result
    return int(major), int(minor)


@functools.cache
def nvrtc_build() -> str:
    """Identifies a build of NVRTC: the build ID of its library, or its size.

    NOTE: NVRTC's API reports only major and minor. Its whole version ("V13.0.88") is in the PTX
    that it writes, but an empty compilation takes 40 ms, ten times a kernel's load. So this is the
    build ID that the linker put into the library. A process may have several libraries of that name
    and major version, for example PyTorch's. The result then lists all of them.

    Raises:
        MissingDependencyError: cuda-bindings or NVRTC is not installed.
    """
    libraries.nvrtc()
    try:
        maps = Path("/proc/self/maps").read_text()
        found = sorted(set(re.findall(r"/.*/libnvrtc[.-](?!builtins)[^/\n]*$", maps, re.MULTILINE)))
        of_version = [library for library in found if f".so.{nvrtc_version()[0]}" in library]
        return ", ".join(_build_id(Path(library)) for library in of_version or found)
    except OSError as error:  # no /proc, or replaced on disk since it was loaded
        return f"unknown ({error})"


def _build_id(library: Path) -> str:
    """GNU build ID of a 64-bit ELF file in hexadecimal, else "<bytes> bytes"."""
    with library.open("rb") as file:
        header = file.read(64)
        (headers_at,) = struct.unpack_from("<Q", header, 32)
        header_bytes, count = struct.unpack_from("<HH", header, 54)
        for index in range(count):
            file.seek(headers_at + index * header_bytes)
            kind, _, offset, _, _, nbytes = struct.unpack("<IIQQQQ", file.read(40))
            if kind == 4:  # PT_NOTE: of each note, bytes of name and of content, type, name
                file.seek(offset)
                notes = file.read(nbytes)
                found = re.search(rb"\x04\0\0\0(.)\0\0\0\x03\0\0\0GNU\0", notes, re.DOTALL)
                if found is not None:
                    return notes[found.end() :][: found[1][0]].hex()
    return f"{library.stat().st_size} bytes"


@functools.cache
def supported_architectures() -> tuple[str, ...]:
    """The real architectures that this NVRTC compiles for, oldest first.

    From 9.0 on each has two entries, plain and with its own instructions ("sm_90", "sm_90a").
    Family variants ("sm_100f") are not listed.

    Raises:
        MissingDependencyError: cuda-bindings or NVRTC is not installed.
    """
    result, numbers = libraries.nvrtc().nvrtcGetSupportedArchs()
    assert int(result) == 0, result
    names = []
    for number in sorted(numbers):
        names.append(f"sm_{number}")
        if number >= 90:
            names.append(f"sm_{number}a")
    return tuple(names)


def parse_log(log: str) -> Resources:
    """The resources of one entry point, from a log of NVRTC with `--ptxas-options=-v`."""

    def numbers(pattern: str) -> list[int]:
        return [int(value) for value in re.findall(pattern, log)]

    return Resources(
        registers=max(numbers(r"Used (\d+) registers"), default=0),
        spill_stores=sum(numbers(r"(\d+) bytes spill stores")),
        spill_loads=sum(numbers(r"(\d+) bytes spill loads")),
        stack_frame=max(numbers(r"(\d+) bytes stack frame"), default=0),
        static_shared=max(numbers(r"(\d+) bytes smem"), default=0),
        constant=sum(numbers(r"(\d+) bytes cmem\[\d+\]")),
        warnings=tuple(line.strip() for line in log.splitlines() if _WARNING.search(line)),
    )


# Warnings of the front end and of ptxas, and ptxas's numbered remarks, whose level is "info".
_WARNING = re.compile(r"\bwarning( #|\s*:)|\(C\d{4}\)|Potential Performance Loss", re.IGNORECASE)


def _compiled(stored: Stored, options: tuple[str, ...]) -> Compiled:
    metadata = stored.metadata
    resources = dict(metadata["resources"])
    resources["warnings"] = tuple(resources["warnings"])
    return Compiled(
        stem=metadata["stem"],
        arch=metadata["arch"],
        cubin=stored.payload,
        log=metadata["log"],
        resources=Resources(**resources),
        options=options,
        seconds=metadata["seconds"],
        key=metadata["key"],
        cached=True,
    )


def check_arch(arch: str, what: str) -> None:
    """Refuses an architecture that this NVRTC does not compile for.

    Args:
        arch: "sm_90a".
        what: would be compiled; the first words of the message.

    Raises:
        CompileError: with the architectures that it does compile for.
        MissingDependencyError: cuda-bindings or NVRTC is not installed.
        ValueError: `arch` is no architecture's name.
    """
    major, minor, _ = parse_arch(arch)
    known = supported_architectures()
    if f"sm_{major}{minor}" in known:
        return
    version = "{}.{}".format(*nvrtc_version())
    newest = parse_arch(known[-1])[:2]
    if (major, minor) > newest:
        way_out = (
            "Install a newer NVRTC: pip install --upgrade nvidia-cuda-nvrtc "
            "(CUDA 12: nvidia-cuda-nvrtc-cu12)"
        )
    else:
        way_out = "tconv's kernels are made for sm_75 and newer, each by its real architecture"
    raise CompileError(
        f"{what} cannot be compiled for {arch}: NVRTC {version} compiles for "
        f"{', '.join(known)}. {way_out}"
    )


@contextlib.contextmanager
def locale_kept() -> Iterator[None]:
    """Give this thread its locale back: NVRTC 12.4 and older leave it in C's.

    There Python opens text files as ASCII.
    """
    uselocale = ctypes.CDLL(None).uselocale
    uselocale.argtypes = [ctypes.c_void_p]
    uselocale.restype = ctypes.c_void_p
    before = uselocale(None)
    try:
        yield
    finally:
        uselocale(before)


def run_nvrtc(
    stem: str,
    text: str,
    arch: str,
    options: tuple[str, ...],
    key: str,
    process: NvrtcProcess | None = None,
) -> tuple[bytes, str]:
    """Cubin and log.

    Raises:
        CompileError: with the log, and the path of the source.
    """
    if process is not None:
        found = process.run((stem, text, arch, options, key))
        if found is not None:
            return found
    nvrtc = libraries.nvrtc()

    def fetch(get_size: Any, get: Any) -> bytes:
        result, size = get_size(program)
        assert int(result) == 0, result
        data = bytearray(size)
        (result,) = get(program, data)
        assert int(result) == 0, result
        return bytes(data)

    name = f"{stem}.generated.cu"
    result, program = nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, None, None)
    if int(result) != 0:
        raise CompileError(f"NVRTC did not take the source of {stem}: {result.name}")
    try:
        encoded = [option.encode() for option in options]
        with locale_kept():
            (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        log_text = log.rstrip(b"\0").decode(errors="replace").strip()
        if int(result) != 0:
            raise CompileError(
                f"{stem} did not compile for {arch}: {result.name} "
                f"(NVRTC {'.'.join(map(str, nvrtc_version()))})",
                log_text,
                options,
                default_cache().write_source(f"{key}.cu", text),
                source_text=text,
            )
        return fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log_text
    finally:
        nvrtc.nvrtcDestroyProgram(program)
