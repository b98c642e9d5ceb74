"""Compiles a kernel's `.cu` text with the host's C++ compiler, and keeps what came of it.

Two kinds of build: a shared library, to be loaded into this process; and, with sanitizers, an
executable, because a sanitizer must be in a process from its start.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tconv import settings
from tconv.errors import CompileError, MissingDependencyError
from tconv.kernels.source import KERNEL_DIRECTORY, TENSOR_MAP, KernelSource

logger = logging.getLogger("tconv")

EMULATOR_DIRECTORY = Path(__file__).resolve().parent
RUNTIME_DIRECTORY = EMULATOR_DIRECTORY / "runtime"
# The emulator's comes first: <ptx/mma.cuh> is then the host's implementation.
INCLUDE_DIRECTORIES = (EMULATOR_DIRECTORY / "include", KERNEL_DIRECTORY)

# Part of every key: to be raised when the files in the cache change their meaning.
CACHE_FORMAT = 3

# NOTE: no -ffast-math, and no contraction: a kernel that wants a fused product says fmaf.
# -fno-strict-aliasing: kernels look at shared memory through several types, as CUDA allows.
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
KERNEL_OPTIONS = ("-O1", "-g1")
RUNTIME_OPTIONS = ("-O2", "-g1")
SANITIZE_OPTIONS = (
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,alignment,bounds,integer-divide-by-zero,return,shift,"
    "signed-integer-overflow,unreachable",
    "-fno-sanitize-recover=all",
)

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)

_lock = threading.Lock()
_own_directory: tempfile.TemporaryDirectory[str] | None = None


def build(source: KernelSource, *, sanitize: bool = False) -> Path:
    """Compile a kernel, or find it in the cache.

    Args:
        source: the kernel; its `text()` is compiled as it stands.
        sanitize: build an executable with AddressSanitizer and UndefinedBehaviorSanitizer
            instead of a shared library.

    Returns:
        The path of the library or executable.

    Raises:
        CompileError: the text does not compile; holds the compiler's messages.
        MissingDependencyError: there is no C++ compiler.
    """
    text = _translation_unit(source)
    options = (*COMMON_OPTIONS, *KERNEL_OPTIONS, *_machine_options())
    if sanitize:
        options = (*options, *SANITIZE_OPTIONS, *_compiler_options())
    key = _key(text, _reached(text, INCLUDE_DIRECTORIES), options)
    suffix = "" if sanitize else ".so"
    runtime = build_runtime(sanitize=sanitize)
    # The runtime is part of a sanitized executable; a library finds it in the process.
    key = _digest([key, runtime.name]) if sanitize else key

    def compile_into(target: Path) -> None:
        generated = target.with_suffix(".cpp")
        # Reports and debuggers are to name the file where it will lie, one folder up.
        kept = target.parent.parent / generated.name
        generated.write_text(f'#line 1 "{kept}"\n{text}')
        inputs = [str(generated), str(runtime)] if sanitize else ["-shared", str(generated)]
        includes = [f"-I{directory}" for directory in INCLUDE_DIRECTORIES]
        arguments = [*options, *includes, *inputs, "-o", str(target)]
        _compile(source.stem, arguments, generated)

    return _cached(f"{source.stem}-{key}{suffix}", compile_into)


def build_runtime(*, sanitize: bool = False) -> Path:
    """Compile the fibers, barriers and memory that all kernels share, or find them in the cache.

    Returns:
        A shared library, to be loaded before any kernel's; or, with sanitizers, an object file.
    """
    files = sorted(RUNTIME_DIRECTORY.glob("*.cpp"))
    if not sanitize:
        files = [file for file in files if file.name != "runner.cpp"]
    options = (*COMMON_OPTIONS, *RUNTIME_OPTIONS, *_machine_options())
    if sanitize:
        # Its own code is not instrumented: it fills memory across red zones, and is quicker so.
        options = (*options, "-DTCONV_SANITIZE")
    texts = "\n".join(file.read_text() for file in files)
    directories = (RUNTIME_DIRECTORY, RUNTIME_DIRECTORY.parent / "include", KERNEL_DIRECTORY)
    key = _key(texts, _reached(texts, directories), options)
    mode = ["-r", "-nostdlib"] if sanitize else ["-shared"]

    def compile_into(target: Path) -> None:
        includes = [f"-I{directory}" for directory in directories]
        inputs = [str(file) for file in files]
        arguments = [*options, *includes, *mode, *inputs, "-o", str(target)]
        _compile("the emulator's runtime", arguments, RUNTIME_DIRECTORY)

    return _cached(f"runtime-{key}{'.o' if sanitize else '.so'}", compile_into)


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
    # By default g++ leaves alone what is in a section of its own, as static shared memory is.
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


def _reached(text: str, directories: tuple[Path, ...]) -> dict[str, str]:
    """Path and text of each of our headers that a text includes, directly or not."""
    reached: dict[str, str] = {}
    pending = _INCLUDE.findall(text)
    while pending:
        name = pending.pop()
        for directory in directories:
            path = directory / name
            if str(path) in reached:
                break
            if path.is_file():
                reached[str(path)] = path.read_text()
                pending += _INCLUDE.findall(reached[str(path)])
                break
    return reached


def _digest(parts: list[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()[:32]


def _key(text: str, headers: dict[str, str], options: tuple[str, ...]) -> str:
    command = compiler()
    parts = [str(CACHE_FORMAT), text, *options, *command, _version(command)]
    for path in sorted(headers):
        parts += [path, headers[path]]
    return _digest(parts)


def _cached(name: str, compile_into: Callable[[Path], None]) -> Path:
    """The file of this name in the cache folder, made first if it is not there."""
    for directory in _directories():
        path = directory / name
        if path.is_file():
            return path
        try:
            directory.mkdir(parents=True, exist_ok=True)
            scratch = tempfile.mkdtemp(prefix="building-", dir=directory)
        except OSError as error:
            logger.warning("tconv cannot write to %s (%s); it compiles anew", directory, error)
            continue
        try:
            target = Path(scratch) / name
            compile_into(target)
            # Its source stays beside it, for debuggers and reports.
            for made in sorted(Path(scratch).iterdir()):
                if made != target:
                    os.replace(made, directory / made.name)
            os.replace(target, path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return path
    raise OSError("no folder can be written to, not even a temporary one")


def _directories() -> list[Path]:
    """Where to keep files, in order of preference; the last is this process's own."""
    global _own_directory
    with _lock:
        if _own_directory is None:
            _own_directory = tempfile.TemporaryDirectory(prefix="tconv-emulator-")
    own = Path(_own_directory.name)
    return [settings.cache_dir() / "emulator", own] if settings.cache_enabled() else [own]


def _compile(what: str, arguments: list[str], source_path: Path) -> None:
    command = [*compiler(), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        kept = _keep_failed(source_path)
        raise CompileError(
            f"{command[0]} could not compile {what} for the emulator",
            result.stderr,
            tuple(arguments),
            kept,
        )


def _keep_failed(source_path: Path) -> Path:
    """A failed kernel's text is left where it can be read after the scratch folder is gone."""
    if not source_path.is_file():
        return source_path
    kept = source_path.parent.parent / source_path.name
    shutil.copyfile(source_path, kept)
    return kept
