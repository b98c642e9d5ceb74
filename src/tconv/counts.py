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
    """Counts the calls of one row, or of several that go together.

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
_Row = tuple[str, str, str]
"""Direction, kernel and reason."""

_counters: dict[tuple[_Row, ...], Counter] = {}


def counter(direction: str, kernel: str, reason: str, *gradients: _Row) -> Counter:
    """The counter of a row; the same object each time.

    Args:
        direction, kernel, reason: the row.
        gradients: rows that each of these calls counts for too.
    """
    return _counters.setdefault(((direction, kernel, reason), *gradients), Counter())


def statistics(*, reset: bool = False) -> tuple[Served, ...]:
    """What CUDA calls (and emulated ones) ran on since the process began, most calls first.

    Where PyTorch runs a call with its own backward, which is not seen, the gradients that autograd
    records in its forward are counted then, whether a backward runs or not: the input's and the
    weight's, each if it is required. All other rows count what ran. Replays of a CUDA graph do not
    count; its capture does.

    Args:
        reset: start again from zero after this.
    """
    with _lock:
        calls: dict[_Row, int] = {}
        for rows, counted in list(_counters.items()):
            for row in rows:
                calls[row] = calls.get(row, 0) + counted.calls
            if reset:
                counted.reset()
    served = [Served(*row, number) for row, number in calls.items() if number]
    return tuple(sorted(served, key=lambda row: (-row.calls, row)))
