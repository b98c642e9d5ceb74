"""How many calls ran on which kernel, and why: `tconv.statistics()`. Needs no torch."""

from __future__ import annotations

import itertools
import threading
from typing import NamedTuple


class Served(NamedTuple):
    """Calls of one direction that ran on one kernel for one reason.

    Attributes:
        direction: "forward", "input_gradient" or "weight_gradient".
        kernel: the stem of our kernel, or "pytorch".
        reason: one of `tconv.choice.SENTENCES`, or what no kernel of ours serves.
        calls: how many.
    """

    direction: str
    kernel: str
    reason: str
    calls: int


class Counter:
    """Counts the calls of one row.

    `add` is a C function that no thread can interrupt, since every call counts.
    """

    __slots__ = ("_counted", "_start", "add")

    def __init__(self) -> None:
        self._counted = itertools.count()
        self._start = 0
        self.add = self._counted.__next__

    @property
    def calls(self) -> int:
        """How many since the last reset."""
        return self._value() - self._start

    def reset(self) -> None:
        """Start from zero."""
        self._start = self._value()

    def _value(self) -> int:
        # "count(3)": what a count holds can be printed, and read no other way.
        return int(repr(self._counted)[len("count(") : -1])


_lock = threading.Lock()
_counters: dict[tuple[str, str, str], Counter] = {}


def counter(direction: str, kernel: str, reason: str) -> Counter:
    """The counter of a row; the same object each time."""
    return _counters.setdefault((direction, kernel, reason), Counter())


def statistics(*, reset: bool = False) -> tuple[Served, ...]:
    """What CUDA calls (and emulated ones) ran on since the process began, most calls first.

    Calls that PyTorch runs with its own backward count as one forward call. Replays of a CUDA
    graph do not count; its capture does.

    Args:
        reset: start again from zero after this.
    """
    with _lock:
        rows = [Served(*key, counted.calls) for key, counted in _counters.items() if counted.calls]
        if reset:
            for counted in _counters.values():
                counted.reset()
    return tuple(sorted(rows, key=lambda row: (-row.calls, row)))
