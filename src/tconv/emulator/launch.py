"""Runs an emulated kernel: in this process, or with sanitizers in a child process."""

from __future__ import annotations

import ctypes
import re
import shutil
import threading
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path

from tconv import settings
from tconv.emulator import child
from tconv.emulator.compile import build, build_runtime
from tconv.emulator.records import Launch, Report, allocation_array
from tconv.errors import EmulatorError
from tconv.kernels.source import KernelSource

MAX_THREADS = 1024
MAX_GRID = 2**31 - 1

# The runtime holds one launch at a time.
_launch_lock = threading.Lock()

Allocation = tuple[int, int]


class EmulatedKernel:
    """A kernel compiled for the CPU. Each launch runs its blocks one after another.

    Args:
        source: the kernel.
        sanitize: build with AddressSanitizer and UndefinedBehaviorSanitizer, and run in a child
            process. None takes `TCONV_SANITIZE`.
        schedule: the order of the threads of a block: "forward" (by index), "reverse", or
            "random:<seed>". A kernel whose result depends on it has a data race.
    """

    def __init__(
        self, source: KernelSource, *, sanitize: bool | None = None, schedule: str = "forward"
    ) -> None:
        if not 0 < source.threads <= MAX_THREADS:
            raise ValueError(
                f"{source.stem}: a block has 1 to {MAX_THREADS} threads, got {source.threads}"
            )
        self.source = source
        self.sanitize = settings.sanitize() if sanitize is None else sanitize
        self.schedule = schedule
        parse_schedule(schedule)

    def __repr__(self) -> str:
        return (
            f"EmulatedKernel({self.source.stem}, threads={self.source.threads}, "
            f"shared_bytes={self.source.shared_bytes}, sanitize={self.sanitize}, "
            f"schedule={self.schedule!r})"
        )

    @cached_property
    def path(self) -> Path:
        """This process's copy of the compiled library, or of the executable if `sanitize`.

        Compiles at the first use.
        """
        return build(self.source, sanitize=self.sanitize)

    def launch(
        self,
        grid: int | tuple[int, int, int],
        arguments: bytes,
        stream: int = 0,
        *,
        allocations: Sequence[Allocation] | None = None,
        schedule: str | None = None,
        keep: Path | None = None,
    ) -> None:
        """Run the kernel to its end.

        Args:
            grid: number of blocks, or of blocks along x, y and z.
            arguments: the bytes of `struct Arguments`, from `KernelSource.pack`.
            stream: ignored. Calls then look like those on a device.
            allocations: address and size in bytes of the memory that the arguments' pointers
                point into. Accesses through `ptx/` are checked against them; with sanitizers,
                where they are required, every access is.
            schedule: overrides the kernel's own.
            keep: with sanitizers, path at which the launch remains. `<keep>.program` runs it, as in
                `gdb --args <keep>.program <keep>`.

        Raises:
            EmulatorError: a check failed. The message names the kernel, the block, the thread, the
                source line and the mistake.
            CompileError, MissingDependencyError: see `tconv.emulator.compile.build`.
        """
        blocks = (grid, 1, 1) if isinstance(grid, int) else tuple(grid)
        if len(blocks) != 3 or any(not 0 < count <= MAX_GRID for count in blocks):
            raise ValueError(f"{self.source.stem}: a grid has 1 to {MAX_GRID} blocks, got {grid}")
        order, seed = parse_schedule(self.schedule if schedule is None else schedule)
        record = Launch(
            grid=blocks,
            threads=self.source.threads,
            shared_bytes=self.source.shared_bytes,
            schedule=order,
            seed=seed,
        )
        if self.sanitize:
            if allocations is None:
                raise ValueError(
                    f"{self.source.stem}: a sanitized launch needs the allocations that its "
                    "pointers point into, got None"
                )
            if keep is not None:
                shutil.copy(self.path, f"{keep}.program")
            child.run(self.source, self.path, record, arguments, allocations, keep=keep)
        else:
            self._launch_here(record, arguments, allocations or ())

    def _launch_here(
        self, record: Launch, arguments: bytes, allocations: Sequence[Allocation]
    ) -> None:
        library = self._library
        array = allocation_array(allocations)
        # The alignment that a tensor map among the arguments needs.
        storage = ctypes.create_string_buffer(len(arguments) + 128)
        aligned = -(-ctypes.addressof(storage) // 128) * 128
        ctypes.memmove(aligned, arguments, len(arguments))
        record.arguments = aligned
        record.argument_bytes = len(arguments)
        record.allocations = ctypes.cast(array, ctypes.c_void_p).value
        record.allocation_count = len(allocations)
        report = Report()
        with _launch_lock:
            _runtime().tconv_emulator_launch(
                ctypes.byref(library), ctypes.byref(record), ctypes.byref(report)
            )
        if report.failed:
            raise EmulatorError(report.describe(self.source.stem))

    @cached_property
    def _library(self) -> ctypes.c_char:
        """The kernel's description of itself, in its library."""
        path = self.path
        _runtime()
        return ctypes.c_char.in_dll(ctypes.CDLL(str(path)), "tconv_emulator_kernel")


@cache
def _runtime() -> ctypes.CDLL:
    # The kernels' libraries need its symbols.
    return ctypes.CDLL(str(build_runtime()), mode=ctypes.RTLD_GLOBAL)


def parse_schedule(schedule: str) -> tuple[int, int]:
    """The runtime's number of a schedule, and its seed."""
    if schedule in ("forward", "reverse"):
        return ("forward", "reverse").index(schedule), 0
    match = re.fullmatch(r"random:(\d+)", schedule)
    if match is None:
        raise ValueError(
            f'schedule must be "forward", "reverse" or "random:<seed>", got {schedule!r}'
        )
    return 2, int(match[1]) % 2**32
