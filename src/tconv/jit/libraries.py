"""NVRTC and the CUDA driver through `cuda.bindings`, loaded at first use or by `preload`.

Nothing here fails at import, so a machine without CUDA can import tconv. The first use of a missing
library raises an error, with the command that installs it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from typing import Any

from tconv.errors import LaunchError, MissingDependencyError

INSTALL_CUDA_13 = "pip install 'cuda-bindings==13.*' 'nvidia-cuda-nvrtc==13.*'"
INSTALL_CUDA_12 = "pip install 'cuda-bindings==12.*' nvidia-cuda-nvrtc-cu12"


def _missing_bindings(error: ImportError) -> MissingDependencyError:
    return MissingDependencyError(
        "compiling and launching CUDA kernels needs the package cuda-bindings (12.8 or newer), "
        f"which does not import: {error}. Install it with NVRTC, for CUDA 13: {INSTALL_CUDA_13} "
        f"(for CUDA 12: {INSTALL_CUDA_12})"
    )


def _install_for_bindings() -> str:
    """The command that fits the cuda-bindings installed here."""
    import cuda.bindings

    return INSTALL_CUDA_12 if cuda.bindings.__version__.startswith("12.") else INSTALL_CUDA_13


@functools.cache
def nvrtc() -> Any:
    """The module `cuda.bindings.nvrtc`, its library loaded.

    Raises:
        MissingDependencyError: cuda-bindings or the NVRTC library is not installed.
    """
    try:
        from cuda.bindings import nvrtc as module
    except ImportError as error:
        raise _missing_bindings(error) from error
    try:
        module.nvrtcVersion()
    except (RuntimeError, OSError, ImportError) as error:
        first_line = str(error).strip().splitlines()[:1]
        raise MissingDependencyError(
            "compiling CUDA kernels needs the NVRTC library, which cuda-bindings did not find: "
            f"{''.join(first_line)}. Install it: {_install_for_bindings()}"
        ) from error
    return module


@functools.cache
def driver() -> Any:
    """The module `cuda.bindings.driver`, the driver initialised.

    Raises:
        MissingDependencyError: cuda-bindings, NVIDIA's driver or a device is missing.
    """
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise _missing_bindings(error) from error
    try:
        (result,) = module.cuInit(0)
    except (RuntimeError, OSError) as error:
        first_line = str(error).strip().splitlines()[:1]
        raise MissingDependencyError(
            "launching CUDA kernels needs NVIDIA's driver (libcuda), which was not found: "
            f"{''.join(first_line)}. Install the NVIDIA display driver on this machine; without "
            "a GPU, TCONV_EMULATE=1 runs the kernels on the CPU"
        ) from error
    if result != module.CUresult.CUDA_SUCCESS:
        hint = ""
        if result == module.CUresult.CUDA_ERROR_NO_DEVICE:
            hint = f" (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
        elif result == module.CUresult.CUDA_ERROR_NOT_INITIALIZED:
            hint = " (a forked process cannot use CUDA: start it with 'spawn')"
        raise MissingDependencyError(
            "launching CUDA kernels needs a GPU that the driver can use, but cuInit answered "
            f"{error_text(module, result)}{hint}"
        )
    return module


def preload() -> None:
    """Loads the installed ones of both, without touching a device.

    It halves the time of a process's first call with a warm cache, from 90 milliseconds.
    """
    with contextlib.suppress(MissingDependencyError):
        nvrtc()
    # NOTE: not the driver itself: children of a process that initialised CUDA cannot use it.
    with contextlib.suppress(ImportError):
        importlib.import_module("cuda.bindings.driver")


def error_text(module: Any, result: Any) -> str:
    """A driver result as text: "CUDA_ERROR_INVALID_VALUE (1): invalid argument"."""
    status, name = module.cuGetErrorName(result)
    _, meaning = module.cuGetErrorString(result)
    if status != module.CUresult.CUDA_SUCCESS:
        return f"unknown CUDA error {int(result)}"
    return f"{name.decode()} ({int(result)}): {meaning.decode()}"


def check(module: Any, answer: tuple[Any, ...], doing: str) -> Any:
    """The value (or values) of a driver call's answer.

    Args:
        module: `driver()`.
        answer: what the call returned: its result, then its values.
        doing: the end of a sentence that starts "failed to ".

    Raises:
        LaunchError: the result is not success.
    """
    result, *values = answer
    if result != module.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"failed to {doing}: {error_text(module, result)}")
    return values[0] if len(values) == 1 else tuple(values)
