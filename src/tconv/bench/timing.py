"""Timings of one call: CUDA events with a cold L2 cache, or the clock of a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]

FLUSH_BYTES = 256 << 20
"""Written before each timing on a GPU: several times its L2 cache."""

LEAST_REPEATS = 30
"""Timings that a figure needs to count (docs/measuring.md)."""

# Cycles of a GPU (about 0.1 ms) for each timing of a series, which it waits before the first while
# the host queues calls: one that takes the host longer than the flush takes the GPU, by as much as
# that, is then still timed as what the GPU needs.
_HEAD_START = 200_000


@dataclass(frozen=True)
class Times:
    """The timings of one call, in milliseconds.

    Attributes:
        each: all of them, in order.
    """

    each: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.each:
            raise ValueError("a median needs at least one timing, got none")

    def _quantile(self, share: float) -> float:
        return float(torch.tensor(self.each, dtype=torch.float64).quantile(share))

    @property
    def median(self) -> float:
        """The median."""
        return self._quantile(0.5)

    @property
    def p20(self) -> float:
        """A fifth of the timings are below."""
        return self._quantile(0.2)

    @property
    def p80(self) -> float:
        """A fifth of the timings are above."""
        return self._quantile(0.8)


class Timer(Protocol):
    """How calls are timed on one device."""

    def time(self, call: Call, repeats: int) -> Times:
        """The timings of so many calls, one by one; the caller has warmed up."""

    def synchronize(self) -> None:
        """Wait for what the device has been given to do."""

    def empty(self) -> Call | None:
        """A call that launches a kernel that does nothing; None where there are no kernels."""


class CudaTimer:
    """CUDA events around each call, on the current device and stream, with a cold L2 cache.

    The calls are queued without waiting for one another, so the preparation on the host is hidden,
    behind the flush of the cache, for every contestant alike.
    """

    def __init__(self) -> None:
        self._flushed = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def time(self, call: Call, repeats: int) -> Times:
        """The timings of so many calls, one by one; the caller has warmed up."""
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(repeats)
        ]
        self.synchronize()
        torch.cuda._sleep(_HEAD_START * repeats)
        for start, end in events:
            self._flushed.zero_()
            start.record()
            call()
            end.record()
        self.synchronize()
        return Times(tuple(start.elapsed_time(end) for start, end in events))

    def synchronize(self) -> None:
        """Wait for what the device has been given to do."""
        torch.cuda.synchronize()

    def empty(self) -> Call:
        """A call that launches a kernel that does nothing."""
        return lambda: torch.cuda._sleep(0)


class CpuTimer:
    """The monotonic clock around each call; nothing is flushed."""

    def time(self, call: Call, repeats: int) -> Times:
        """The timings of so many calls, one by one; the caller has warmed up."""
        each = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            each.append((time.perf_counter() - start) * 1e3)
        return Times(tuple(each))

    def synchronize(self) -> None:
        """A CPU's calls are done when they return."""

    def empty(self) -> None:
        """There are no kernels to launch."""


def timer(device: str) -> Timer:
    """The timer of "cuda" or "cpu"."""
    return CudaTimer() if device == "cuda" else CpuTimer()
