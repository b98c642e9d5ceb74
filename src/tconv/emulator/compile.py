"""Compiles a kernel's `.cu` text with the host's C++ compiler, and caches the result.

There are two kinds of build. A shared library is loaded into this process. With sanitizers it is an
executable, because a sanitizer must be in a process from its start. Both are entries of the disk
cache. An entry's file is never loaded or started itself. A copy of the verified bytes is, in a
folder of this process.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tconv.errors import CompileError, MissingDependencyError
from tconv.jit import files
from tconv.jit.cache import default_cache, source_digest
from tconv.kernels.source import KERNEL_DIRECTORY, TENSOR_MAP, KernelSource

EMULATOR_DIRECTORY = Path(__file__).resolve().parent
RUNTIME_DIRECTORY = EMULATOR_DIRECTORY / "runtime"
# The emulator's headers come first: <ptx/mma.cuh> is then the host's implementation.
INCLUDE_DIRECTORIES = (EMULATOR_DIRECTORY / "include", KERNEL_DIRECTORY)

# NOTE: no -ffast-math, and no contraction: a kernel calls fmaf for a fused product.
# -fno-strict-aliasing: kernels access shared memory through several types, as CUDA allows.
COMMON_OPTIONS = (
    "-std=c++17",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-w",
)
# -Og compiles in two thirds of the time of -O1, and the kernels are as fast.
KERNEL_OPTIONS = ("-Og", "-g1")
# -O3 vectorises the loops of a matrix product. The order of sums stays the same.
RUNTIME_OPTIONS = ("-O3", "-g1")
SANITIZE_OPTIONS = (
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,alignment,bounds,integer-divide-by-zero,return,shift,"
    "signed-integer-overflow,unreachable",
    "-fno-sanitize-recover=all",
)


def build(source: KernelSource, *, sanitize: bool = False) -> Path:
    """Compile a kernel, or find it in the cache.

    Args:
        source: the kernel, whose `text()` is compiled unchanged.
        sanitize: build an executable with AddressSanitizer and UndefinedBehaviorSanitizer
            instead of a shared library.

    Returns:
        The path of the library or executable. It exists as long as this process.

    Raises:
        CompileError: the text does not compile. It holds the compiler's messages.
        MissingDependencyError: there is no C++ compiler.
    """
    text = _translation_unit(source)
    options = (*COMMON_OPTIONS, *KERNEL_OPTIONS, *_machine_options())
    if sanitize:
        options = (*options, *SANITIZE_OPTIONS, *_compiler_options())
    # The runtime is part of a sanitized executable. A library finds it in the process.
    of_runtime = [_runtime(sanitize=True)[0]] if sanitize else []
    key = _key(source.stem, text, INCLUDE_DIRECTORIES, (*options, *of_runtime))

    def compile_into(target: Path) -> None:
        # Reports and debuggers name the file by its lasting path.
        kept = default_cache().write_source(f"{key}.cpp", text, elsewhere=target.parent.parent)
        generated = target.with_suffix(".cpp")
        generated.write_text(f'#line 1 "{kept or generated}"\n{text}')
        inputs = ["-shared"] if not sanitize else [str(build_runtime(sanitize=True))]
        includes = [f"-I{directory}" for directory in INCLUDE_DIRECTORIES]
        arguments = [*options, *includes, str(generated), *inputs, "-o", str(target)]
        _compile(source.stem, arguments, kept)

    return _copy(key, "" if sanitize else ".so", source.stem, compile_into)


def build_runtime(*, sanitize: bool = False) -> Path:
    """Compile the fibers, barriers and memory that all kernels share, or find them in the cache.

    Returns:
        A shared library, to be loaded before any kernel's. With sanitizers, an object file.
    """
    key, arguments = _runtime(sanitize=sanitize)

    def compile_into(target: Path) -> None:
        _compile("the emulator's runtime", [*arguments, "-o", str(target)], RUNTIME_DIRECTORY)

    return _copy(key, ".o" if sanitize else ".so", "runtime", compile_into)


def _runtime(*, sanitize: bool) -> tuple[str, list[str]]:
    """The runtime's key, and the arguments of its compiler."""
    sources = sorted(RUNTIME_DIRECTORY.glob("*.cpp"))
    if not sanitize:
        sources = [path for path in sources if path.name != "runner.cpp"]
    options = (*COMMON_OPTIONS, *RUNTIME_OPTIONS, *_machine_options())
    if sanitize:
        # Its own code is not instrumented. It fills memory across red zones, and is faster so.
        options = (*options, "-DTCONV_SANITIZE", "-r", "-nostdlib")
    else:
        options = (*options, "-shared")
    text = "\n".join(path.read_text() for path in sources)
    directories = (RUNTIME_DIRECTORY, RUNTIME_DIRECTORY.parent / "include", KERNEL_DIRECTORY)
    includes = [f"-I{directory}" for directory in directories]
    key = _key("runtime", text, directories, options)
    return key, [*options, *includes, *map(str, sources)]


def compiler() -> tuple[str, ...]:
    """The C++ compiler's command: $CXX, or g++, or clang++.

    Raises:
        MissingDependencyError: there is none.
    """
    configured = shlex.split(os.environ.get("CXX", ""))
    candidates = [configured] if configured else [["g++"], ["clang++"], ["c++"]]
    for candidate in candidates:
        path = shutil.which(candidate[0])
        if path is not None:
            return (path, *candidate[1:])
    tried = ", ".join(candidate[0] for candidate in candidates)
    raise MissingDependencyError(
        f"the emulator needs a C++17 compiler and found none (looked for {tried}); install one "
        "with `apt-get install g++`, `dnf install gcc-c++` or `conda install gxx`, or name it in "
        "the environment variable CXX"
    )


@cache
def _version(command: tuple[str, ...]) -> str:
    result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return result.stdout.partition("\n")[0]


def _is_clang() -> bool:
    return "clang" in _version(compiler())


def _compiler_options() -> tuple[str, ...]:
    # By default g++ does not instrument named sections, in which static shared memory is.
    return () if _is_clang() else ("-fsanitize-sections=tconv_shared",)


@cache
def _machine_options() -> tuple[str, ...]:
    """Instruction sets of this machine that matter here: a fused product in one instruction."""
    try:
        flags = set(
            re.findall(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)[0].split()
        )
    except (OSError, IndexError):
        return ()
    return tuple(f"-m{name}" for name in ("avx2", "fma", "f16c") if name in flags)


def _translation_unit(source: KernelSource) -> str:
    fields = "".join(
        f"EMULATOR_FIELD({name}, {_kind(type_)})\n" for name, type_ in source.arguments
    )
    return (
        f"{source.text()}\n#include <emulator/entry.h>\n"
        f"EMULATOR_BEGIN({source.stem})\n{fields}EMULATOR_END\n"
    )


def _kind(type_: str) -> str:
    if "*" in type_:
        return "pointer"
    return "tensor_map" if type_ == TENSOR_MAP else "value"


def _key(stem: str, text: str, include_dirs: tuple[Path, ...], options: tuple[str, ...]) -> str:
    command = compiler()
    # The compiled code contains the headers' paths, for reports and debuggers.
    parts = [*options, *map(str, include_dirs), *command, _version(command)]
    return f"{stem}-emulated-{source_digest(text, include_dirs, parts)}"


def _copy(key: str, suffix: str, stem: str, compile_into: Callable[[Path], None]) -> Path:
    """This process's copy of a key's payload, which is compiled first if it is not in the cache.

    NOTE: never a path in the cache. Another file could replace it between a check and `dlopen`.
    """
    path = _own_folder(os.getpid()) / f"{key}{suffix}"

    def build() -> tuple[bytes, dict[str, Any]]:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            target = Path(scratch) / path.name
            compile_into(target)
            return target.read_bytes(), {
                "kind": "emulated",
                "stem": stem,
                "compiler": _version(compiler()),
                "seconds": round(time.perf_counter() - started, 4),
            }

    if not path.is_file():
        payload, _ = default_cache().get_or_build(key, build, lambda stored: stored.payload)
        files.write_whole(path, [payload], mode=0o700)
    return path


@cache
def _own_folder(process: int) -> Path:
    """A folder of this process that nobody else can write to, removed when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="tconv-emulator-"))
    # NOTE: a fork inherits this, and must not remove the folder of its parent.
    atexit.register(lambda: process == os.getpid() and shutil.rmtree(folder, ignore_errors=True))
    return folder


def _compile(what: str, arguments: list[str], source_path: Path | None) -> None:
    command = [*compiler(), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise CompileError(
            f"{command[0]} could not compile {what} for the emulator",
            result.stderr,
            tuple(arguments),
            source_path,
        )
