"""SASS, the machine code of a compiled kernel, by NVIDIA's disassemblers."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tconv.errors import MissingDependencyError, TconvError

TOOLS: dict[str, tuple[str, ...]] = {"nvdisasm": ("--print-code",), "cuobjdump": ("-sass",)}
"""The disassemblers, and the options that make each print a cubin's code."""

INSTALL = (
    "pip install nvidia-cuda-nvdisasm (conda: cuda-nvdisasm; Debian, Ubuntu: nvidia-cuda-toolkit)"
)


def find() -> Path | None:
    """A disassembler: on PATH, else from the wheels nvidia-cuda-nvdisasm or triton, else None."""
    for name in TOOLS:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    for folder in _wheel_folders():
        for name in TOOLS:
            if (folder / name).is_file():
                return folder / name
    return None


def sass(cubin: bytes) -> str:
    """The code of a cubin.

    Raises:
        MissingDependencyError: there is no disassembler on this machine.
        TconvError: it does not take the cubin.
    """
    tool = find()
    if tool is None:
        raise MissingDependencyError(
            f"disassembling needs {' or '.join(TOOLS)}, and neither was found: {INSTALL}"
        )
    with tempfile.TemporaryDirectory(prefix="tconv-sass-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [tool, *TOOLS[tool.name], path], capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip().splitlines()[:1]
        raise TconvError(
            f"{tool} could not read the kernel: {''.join(reason)}. It may be older than the "
            f"compiler; a newer one: {INSTALL}"
        )
    return done.stdout


def _wheel_folders() -> Iterator[Path]:
    """Where wheels put their programs: beside their libraries, not on PATH."""
    nvidia = importlib.util.find_spec("nvidia")
    for base in (nvidia.submodule_search_locations or []) if nvidia else []:
        yield from sorted(Path(base).glob("*/bin"))
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        yield Path(triton.origin).parent / "backends" / "nvidia" / "bin"
