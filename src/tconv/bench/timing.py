"""Timings of one call: CUDA events with a cold L2 cache, or the clock of a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]

FLUSH_BYTES = 256 << 20
"""Written before each timing on a GPU: several times its L2 cache."""

LEAST_REPEATS = 30
"""Timings that a figure needs to count (docs/measuring.md)."""

WIDE = 1.5
"""p80 / p20 of a call's timings above which something else disturbed them. 1.2 is rare."""

# Cycles of a GPU (about 0.1 ms) for each timing, which it waits before it starts on some turns,
# while the host queues them: a call that takes the host longer than the flush takes the GPU, by as
# much as that, is then still timed as what the GPU needs.
_HEAD_START = 200_000
_TURNS_AHEAD = 10

# Some 0.2 s of work, after which a GPU's clocks are up.
_WAKING_FLUSHES = 3000


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

    @property
    def spread(self) -> float:
        """p80 / p20."""
        return self.p80 / self.p20


class Timer(Protocol):
    """How calls are timed on one device."""

    def time(self, calls: Sequence[Call], repeats: int) -> list[Times]:
        """The timings of each call, so many, one by one and in turns; the caller has warmed up.

        In turns, so that whatever drifts (clocks, temperature, other programs) is the same for all.
        """

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
        for _ in range(_WAKING_FLUSHES):
            self._flushed.zero_()
        self.synchronize()

    def time(self, calls: Sequence[Call], repeats: int) -> list[Times]:
        """The timings of each call, so many, one by one and in turns; the caller has warmed up."""
        events = [[(_event(), _event()) for _ in range(repeats)] for _ in calls]
        self.synchronize()
        for turn in range(repeats):
            if turn % _TURNS_AHEAD == 0:
                self.synchronize()  # the queue of launches is finite
                torch.cuda._sleep(_HEAD_START * len(calls) * _TURNS_AHEAD)
            for call, of_call in zip(calls, events, strict=True):
                start, end = of_call[turn]
                self._flushed.zero_()
                start.record()
                call()
                end.record()
        self.synchronize()
        return [
            Times(tuple(start.elapsed_time(end) for start, end in of_call)) for of_call in events
        ]

    def synchronize(self) -> None:
        """Wait for what the device has been given to do."""
        torch.cuda.synchronize()

    def empty(self) -> Call:
        """A call that launches a kernel that does nothing."""
        return lambda: torch.cuda._sleep(0)


class CpuTimer:
    """The monotonic clock around each call; nothing is flushed."""

    def time(self, calls: Sequence[Call], repeats: int) -> list[Times]:
        """The timings of each call, so many, one by one and in turns; the caller has warmed up."""
        each: list[list[float]] = [[] for _ in calls]
        for _ in range(repeats):
            for call, of_call in zip(calls, each, strict=True):
                start = time.perf_counter()
                call()
                of_call.append((time.perf_counter() - start) * 1e3)
        return [Times(tuple(of_call)) for of_call in each]

    def synchronize(self) -> None:
        """A CPU's calls are done when they return."""

    def empty(self) -> None:
        """There are no kernels to launch."""


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def timer(device: str) -> Timer:
    """The timer of "cuda" or "cpu"."""
    return CudaTimer() if device == "cuda" else CpuTimer()
