"""`load`: from a kernel's source to the kernel on a device, cached in memory while it is in use.

`hold` bounds how many are: calls hold their kernels, and the one that has not been used for longest
lets go of them first.
"""

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


class Holder(Protocol):
    """What holds kernels, so that they stay loaded."""

    def uses(self) -> int:
        """How often it has launched them."""

    def release(self) -> None:
        """Let go of them. It may load them again."""


MOST_LOADED = 512
"""Kernels that stay loaded for later calls. Those that a CUDA graph launches are not counted."""

_Key = tuple[LaunchableSource, int, str | None]
_kernels: weakref.WeakValueDictionary[_Key, Kernel] = weakref.WeakValueDictionary()
_kept: set[Kernel] = set()
_loading: dict[_Key, threading.Lock] = {}
_lock = threading.Lock()
_holders: dict[int, _Reference] = {}  # by identity, the one that is looked at next first
_holding = threading.Lock()


class _Reference(weakref.ref[Holder]):
    """To a holder.

    Attributes:
        key: its identity.
        before: its uses when it was last looked at. The first is what the kernels were loaded for.
    """

    __slots__ = ("before", "key")
    key: int
    before: int


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


def find(source: LaunchableSource, device: int) -> Kernel | None:
    """The kernel that `load` gives, if it is loaded."""
    return _kernels.get((source, device, None))


def loaded() -> int:
    """Kernels that are loaded, but for those that are kept."""
    return len(_kernels) - len(_kept)


def hold(holder: Holder) -> None:
    """Notes who holds kernels, and lets others go of theirs where `MOST_LOADED` are exceeded.

    Nothing is noted when a holder is used: of those that are looked at, one that has been used
    since the last look stays for another round.

    Args:
        holder: has just loaded its kernels. It is not kept alive.
    """
    with _holding:
        for _ in range(2 * len(_holders)):
            if loaded() <= MOST_LOADED:
                break
            _look_at_the_next()
        reference = _Reference(holder, _forget)
        reference.key, reference.before = id(holder), 1
        _holders[reference.key] = reference


def _forget(reference: _Reference) -> None:
    _holders.pop(reference.key, None)


def _look_at_the_next() -> None:
    try:
        key = next(iter(_holders))
        reference = _holders.pop(key)
    except (StopIteration, KeyError):
        return  # it has gone meanwhile
    holder = reference()
    if holder is None:
        return
    uses = holder.uses()
    if uses > reference.before:
        reference.before = uses
        _holders[key] = reference
    else:
        holder.release()


def keep(kernel: Kernel) -> None:
    """Keeps a kernel loaded for the life of the process: a CUDA graph launches it."""
    _kept.add(kernel)
