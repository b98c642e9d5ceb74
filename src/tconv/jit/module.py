"""`Kernel`: a cubin loaded on one device, and its launches."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from ctypes import addressof, c_char_p
from typing import Any

from tconv.errors import LaunchError
from tconv.jit import libraries
from tconv.jit.compile import Compiled, Resources
from tconv.jit.target import Target

MAX_GRID = 2**31 - 1
"""Most blocks along the grid's first dimension. tconv uses no other."""

_DEPENDENT_DRIVER = 12030
"""The first CUDA version that can capture a dependent launch: graphs have programmatic edges.

Older drivers use ordinary launches, captured or not.
"""

_MOST_CONFIGURATIONS = 64


class Kernel:
    """A kernel loaded on one device. Immutable and thread-safe.

    It is loaded into the device's primary context, as torch's kernels are. It is unloaded when
    nothing refers to it any more, which a captured CUDA graph does not do (`runtime.keep`). Loading
    is allowed during the capture of a CUDA graph. Launches are captured.

    Args:
        compiled: the cubin. Its `stem` is the entry point's name.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        device: the device's ordinal.

    Attributes:
        compiled: as given.
        target: the device's target.
        argument_bytes: size of the entry point's one argument. None if the driver (before 12.4)
            cannot tell. The size is then not checked.

    Raises:
        LaunchError: the device refuses the cubin, or the kernel needs more threads or shared
            memory than a block can have.
    """

    __slots__ = (
        "__weakref__",
        "_configurations",
        "_driver",
        "_function",
        "_launch",
        "_launch_dependent",
        "argument_bytes",
        "compiled",
        "device",
        "shared_bytes",
        "target",
        "threads",
    )

    def __init__(self, compiled: Compiled, *, threads: int, shared_bytes: int, device: int) -> None:
        self.compiled = compiled
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.device = device
        self.target = Target.for_device(device)
        self._driver = libraries.driver()
        self._check_shared_memory()
        with current_context(device), relaxed_capture():
            self._function = self._load()
            self.argument_bytes = self._argument_bytes()
        self._launch = self._driver.cuLaunchKernel
        # None if dependent launches are ordinary ones.
        self._launch_dependent = (
            self._driver.cuLaunchKernelEx
            if self.target.major >= 9 and _knows_dependent_launches()
            else None
        )
        self._configurations: dict[tuple[int, int], Any] = {}

    @property
    def stem(self) -> str:
        """The kernel's name."""
        return self.compiled.stem

    @property
    def resources(self) -> Resources:
        """Registers, spills and shared memory, as ptxas reported them."""
        return self.compiled.resources

    def __repr__(self) -> str:
        return (
            f"Kernel({self.stem} for {self.compiled.arch} on device {self.device}: "
            f"{self.threads} threads, {self.shared_bytes} bytes of dynamic shared memory, "
            f"{self.resources})"
        )

    def launch(self, grid: int, arguments: bytes, stream: int = 0, dependent: bool = False) -> None:
        """Starts the kernel on a stream and returns at once: `prepare`, then `start`."""
        self.prepare(grid, arguments).start(stream, dependent)

    def prepare(self, grid: int, arguments: bytes) -> Launch:
        """A launch of the kernel with these arguments. It can be started many times.

        Args:
            grid: number of blocks, 1 to 2**31 - 1.
            arguments: the bytes of the entry point's `Arguments`, as `KernelSource.pack` makes
                them.

        Raises:
            LaunchError: the grid or the number of bytes is wrong.
        """
        if not 0 < grid <= MAX_GRID:
            raise self._refusal(grid, f"the grid must have 1 to {MAX_GRID} blocks")
        if len(arguments) != self.argument_bytes and self.argument_bytes is not None:
            raise self._refusal(
                grid,
                f"its arguments take {self.argument_bytes} bytes, got {len(arguments)}",
            )
        return Launch(self, grid, arguments)

    def blocks_per_multiprocessor(self) -> int:
        """Blocks that an SM holds at once."""
        driver = self._driver
        with current_context(self.device):
            answer = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self._function, self.threads, self.shared_bytes
            )
        return int(libraries.check(driver, answer, f"ask for the occupancy of {self.stem}"))

    def _configure_dependent(self, grid: int, stream: int) -> Any:
        """The launch configuration for `cuLaunchKernelEx`.

        Creating one takes longer than a launch, so it is cached. It is never changed afterwards:
        the driver reads it while other threads launch on their streams.
        """
        driver = self._driver
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value = value
        made = driver.CUlaunchConfig()
        made.gridDimX, made.gridDimY, made.gridDimZ = grid, 1, 1
        made.blockDimX, made.blockDimY, made.blockDimZ = self.threads, 1, 1
        made.sharedMemBytes = self.shared_bytes
        made.hStream = stream
        made.attrs = [attribute]
        made.numAttrs = 1
        if len(self._configurations) >= _MOST_CONFIGURATIONS:
            self._configurations.clear()
        self._configurations[grid, stream] = made
        return made

    def _refusal(self, grid: int, reason: str) -> LaunchError:
        return LaunchError(
            f"failed to launch {self.stem} ({self.compiled.arch}) on device {self.device} with "
            f"{grid=}, block={self.threads}, dynamic shared memory={self.shared_bytes} bytes: "
            f"{reason}"
        )

    def _check_shared_memory(self) -> None:
        static = self.resources.static_shared
        if static + self.shared_bytes > self.target.shared_per_block:
            raise LaunchError(
                f"{self.stem} needs {static + self.shared_bytes} bytes of shared memory a block "
                f"({static} static, {self.shared_bytes} dynamic), device {self.device} "
                f"({self.target.arch}) has {self.target.shared_per_block}"
            )

    def _load(self) -> Any:
        """The entry point's handle; the device's primary context is current."""
        driver = self._driver
        answer = driver.cuModuleLoadData(self.compiled.cubin)
        where = f"{self.stem} ({self.compiled.arch}) on device {self.device} ({self.target.arch})"
        module = libraries.check(driver, answer, f"load {where}")
        answer = driver.cuModuleGetFunction(module, self.stem.encode())
        function = libraries.check(driver, answer, f"find the entry point of {where}")
        weakref.finalize(self, _unload, self.device, module).atexit = False
        attributes = driver.CUfunction_attribute

        which = attributes.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        answer = driver.cuFuncGetAttribute(which, function)
        most = int(libraries.check(driver, answer, f"read the block size of {where}"))
        if self.threads > most:
            raise LaunchError(
                f"{self.stem} wants {self.threads} threads a block, but as compiled "
                f"({self.resources}) device {self.device} runs it with at most {most}"
            )
        # Always, though only sizes above 48 KB need it: that bound includes static memory.
        which = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        answer = driver.cuFuncSetAttribute(function, which, self.shared_bytes)
        libraries.check(
            driver, answer, f"allow {self.shared_bytes} bytes of dynamic shared memory to {where}"
        )
        return function

    def _argument_bytes(self) -> int | None:
        driver = self._driver
        sizes = []
        for index in range(2):
            try:
                result, _, size = driver.cuFuncGetParamInfo(self._function, index)
            except (AttributeError, RuntimeError):
                return None  # the driver is older than 12.4
            if int(result) != 0:
                break
            sizes.append(int(size))
        if len(sizes) != 1:
            raise LaunchError(
                f"the entry point {self.stem} must take one parameter, the struct Arguments, "
                f"got {'none' if not sizes else 'more'}"
            )
        return sizes[0]


class Launch:
    """A kernel's launch on any stream, from `Kernel.prepare`. Immutable and thread-safe.

    The parameters of the driver's call are prepared once, so a start is only that call.

    Attributes:
        kernel: what is launched.

    Args:
        kernel: what to launch.
        grid: number of blocks.
        arguments: the bytes of the entry point's `Arguments`.
    """

    __slots__ = ("_address", "_grid", "_parameter", "kernel")

    def __init__(self, kernel: Kernel, grid: int, arguments: bytes) -> None:
        self.kernel = kernel
        self._grid = grid
        # The kernel has one parameter, so the driver takes the address of one pointer to it. It
        # copies the parameter before it returns, so the pointer may point into the bytes object.
        self._parameter = c_char_p(arguments)
        self._address = addressof(self._parameter)

    def start(self, stream: int = 0, dependent: bool = False) -> None:
        """Starts the kernel on a stream and returns at once.

        A dependent launch may start while the launch in front of it in the stream still runs. It
        starts once all blocks of that launch have called `griddepcontrol_launch_dependents` or have
        ended. Its kernel calls `griddepcontrol_wait` before it accesses what that launch writes.

        NOTE: the launch in front must be an ordinary one, which starts after all before it have
        ended. Some thread of the dependent launch must wait, so that it does not end first. An
        ordinary launch behind both then starts after both. So memory can be reused in the stream's
        order, as the caching allocator does: the packing of the next call is an ordinary launch.

        Args:
            stream: the stream's handle (`torch.cuda.Stream.cuda_stream`), of the kernel's device.
            dependent: as above. It has no effect on a device before 9.0, or with a driver before
                12.3.

        Raises:
            LaunchError: with the launch's shape and the CUDA error. It may be the error of an
                earlier kernel.
        """
        kernel = self.kernel
        if dependent and kernel._launch_dependent is not None:
            configuration = kernel._configurations.get((self._grid, stream))
            if configuration is None:
                configuration = kernel._configure_dependent(self._grid, stream)
            (result,) = kernel._launch_dependent(configuration, kernel._function, self._address, 0)
        else:
            result = self._start_plain(stream)
        if result:
            self._start_again(result, stream, dependent)

    def _start_plain(self, stream: int) -> Any:
        kernel = self.kernel
        (result,) = kernel._launch(
            kernel._function,
            self._grid,
            1,
            1,
            kernel.threads,
            1,
            1,
            kernel.shared_bytes,
            stream,
            self._address,
            0,
        )
        return result

    def _start_again(self, result: Any, stream: int, dependent: bool) -> None:
        """Handles a launch that failed. Repeats it if only the context was missing or wrong.

        A thread without earlier CUDA calls, such as one of autograd's, has no context. It gets ours
        permanently, as from the CUDA runtime. A thread that works on another device has another
        context, and keeps it. A check before each launch would slow all launches down. The second
        launch is an ordinary one, which is correct for a dependent launch too.
        """
        kernel = self.kernel
        codes = kernel._driver.CUresult
        context_errors = (
            codes.CUDA_ERROR_INVALID_CONTEXT,
            codes.CUDA_ERROR_INVALID_HANDLE,
            codes.CUDA_ERROR_CONTEXT_IS_DESTROYED,
        )
        # A driver's answer if it does not support the attribute of a dependent launch.
        refusals = (codes.CUDA_ERROR_NOT_SUPPORTED,) if dependent else ()
        if result in (*context_errors, *refusals):
            adopted = _adopt(kernel.device)
            with contextlib.nullcontext() if adopted else current_context(kernel.device):
                result = self._start_plain(stream)
            if not result:
                return
        reason = libraries.error_text(kernel._driver, result)
        # The errors that an earlier kernel's fault leaves in the context: illegal address, launch
        # timeout, assert, and the hardware exceptions from 714 to 719.
        if int(result) in (700, 702, 710, *range(714, 720)):
            reason += (
                ". An earlier kernel on this device may have failed: CUDA reports that at the "
                "next call. Run again with CUDA_LAUNCH_BLOCKING=1 to see which"
            )
        raise kernel._refusal(self._grid, reason)


@functools.cache
def _primary_context(device: int) -> Any:
    """The device's primary context, created if there is none yet, and never released."""
    driver = libraries.driver()
    handle = libraries.check(driver, driver.cuDeviceGet(device), f"open device {device}")
    answer = driver.cuDevicePrimaryCtxRetain(handle)
    return libraries.check(driver, answer, f"retain the primary context of device {device}")


def _adopt(device: int) -> bool:
    """Makes the device's primary context current in a thread that has none, permanently."""
    driver = libraries.driver()
    result, current = driver.cuCtxGetCurrent()
    if result or int(current):
        return False
    (result,) = driver.cuCtxSetCurrent(_primary_context(device))
    return not result


def _unload(device: int, module: Any) -> None:
    """Unloads a module. The driver waits until none of its kernels runs."""
    with current_context(device), relaxed_capture():
        libraries.driver().cuModuleUnload(module)


@functools.cache
def _knows_dependent_launches() -> bool:
    driver = libraries.driver()
    version = libraries.check(driver, driver.cuDriverGetVersion(), "read the driver's version")
    return int(version) >= _DEPENDENT_DRIVER and hasattr(driver, "cuLaunchKernelEx")


@contextlib.contextmanager
def current_context(device: int) -> Iterator[None]:
    """Inside, the device's primary context is this thread's current one."""
    driver = libraries.driver()
    context = _primary_context(device)
    answer = driver.cuCtxPushCurrent(context)
    libraries.check(driver, answer, f"enter the context of device {device}")
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Inside, loading a module does not break the capture of a CUDA graph on this thread."""
    driver = libraries.driver()
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    answer = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    before = libraries.check(driver, answer, "relax the stream capture mode")
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)
