"""`load`: from a kernel's source to the kernel on a device, cached in memory while it is in use."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from tconv.jit.compile import CudaSource, compile_cuda
from tconv.jit.module import Kernel
from tconv.jit.target import Target


class LaunchableSource(CudaSource, Protocol):
    """A hashable source that also says how its kernel is launched."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory of a block."""

    def __hash__(self) -> int: ...


_Key = tuple[LaunchableSource, int, str | None]
_kernels: weakref.WeakValueDictionary[_Key, Kernel] = weakref.WeakValueDictionary()
_kept: set[Kernel] = set()
_loading: dict[_Key, threading.Lock] = {}
_lock = threading.Lock()


def load(source: LaunchableSource, device: int, *, arch: str | None = None) -> Kernel:
    """The kernel of `source` on a device: compiled, or found in the cache, and loaded.

    A call with an equal source returns the same object, as long as anything refers to it. Hashing a
    source takes a few microseconds, so a caller with its own plan should keep the kernel with it.

    Args:
        source: the kernel's source.
        device: the device's ordinal.
        arch: the architecture to compile for, the device's own by default.

    Raises:
        CompileError: the source does not compile.
        LaunchError: the device refuses it.
        MissingDependencyError: a library, the driver or a device is missing.
    """
    key = (source, device, arch)
    kernel = _kernels.get(key)
    if kernel is not None:
        return kernel
    with _lock:
        loading = _loading.setdefault(key, threading.Lock())
    try:
        with loading:
            kernel = _kernels.get(key)
            if kernel is None:
                compiled = compile_cuda(source, arch or Target.for_device(device).arch)
                kernel = Kernel(
                    compiled,
                    threads=source.threads,
                    shared_bytes=source.shared_bytes,
                    device=device,
                )
                _kernels[key] = kernel
    finally:
        with _lock:
            _loading.pop(key, None)
    return kernel


def keep(kernel: Kernel) -> None:
    """Keeps a kernel loaded for the life of the process: a CUDA graph launches it."""
    _kept.add(kernel)
