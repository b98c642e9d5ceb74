"""What every kernel family offers to the plan: its module is a `Family`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar, overload

from tconv.jit.target import Target
from tconv.kernels.launch import Launch
from tconv.problem import Direction, Problem


class Family(Protocol):
    """One kernel: the folder `<STEM>`.

    It holds `<STEM>.cu`, `tiles.py` (the table), `layout.py` (geometry of a tile over a problem,
    and what cannot be served), `cost.py` with `costs.json` (the modelled time) and `launch.py`. The
    engine's kernels have these in common, in `engine`.
    """

    STEM: str
    DIRECTION: Direction
    GENERAL: bool
    """Whether it serves every layer, and so is the last choice."""
    TILES: tuple[Any, ...]
    """The kernel's only table of tiles, best first where costs tie."""

    def why_not(self, problem: Problem, target: Target) -> str | None:
        """One sentence if no tile can serve, else None."""

    def tile_why_not(self, problem: Problem, target: Target, tile: Any) -> str | None:
        """One sentence if this tile cannot serve, else None."""

    def cost(self, problem: Problem, target: Target, tile: Any) -> float:
        """Modelled time in seconds."""

    def launches(self, problem: Problem, target: Target, tile: Any) -> tuple[Launch, ...]:
        """What a call launches, in order: one of them of the role "kernel", named STEM.

        Kernels are specialised for the problem's layer; sizes that vary by call are arguments.
        """


ELEMENT_TYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "float16",
    "bfloat16": "bfloat16",
}

MAX_GRID = 2**31 - 1

MOST_LISTED_PHASES = 1024
"""Phases of an axis that a kernel lists. A stride of 2**28 on two pixels took 24 GB to plan."""

TILES_REMEMBERED = 64
"""Entries of a family's cache of layouts (a tile laid over a problem).

A layout is needed again only while its problem is planned. Plans have a cache of their own.
With 1024 entries, Python's garbage collector visited 19 000 objects after the benchmark's 29
layers; with 64 entries, 3 700.
"""

T = TypeVar("T")


class Remembering(Protocol):
    """A layout that shares what it remembers with those of all sizes of a kernel.

    `layout` makes that of a problem with a `like` from that of its `like`.
    """

    @property
    def remembered(self) -> dict[Hashable, Any]:
        """Values by their names."""


def once(laid: Remembering, key: Hashable, make: Callable[[], T]) -> T:
    """What `make` makes, which must be the same for all sizes that the kernel serves."""
    remembered = laid.remembered
    if key not in remembered:
        remembered[key] = make()
    found: T = remembered[key]
    return found


class of_kernel(Generic[T]):
    """A property of a layout that is the same for all sizes that its kernel serves."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, laid: None, owner: type) -> of_kernel[T]: ...

    @overload
    def __get__(self, laid: Remembering, owner: type) -> T: ...

    def __get__(self, laid: Remembering | None, owner: type) -> of_kernel[T] | T:
        """The value, which is made at the first size."""
        if laid is None:
            return self
        try:
            found: T = laid.remembered[self._name]
        except KeyError:
            found = laid.remembered[self._name] = self._make(laid)
        return found


def over(laid: T, problem: Problem) -> T:
    """A layout over another size, by the same kernel. `replace` takes five times as long."""
    other: T = object.__new__(type(laid))
    fields = laid.__dataclass_fields__  # type: ignore[attr-defined]
    vars(other).update({name: getattr(laid, name) for name in fields}, problem=problem)
    return other


_INDEX_LIMIT = 2**31 - 2**20  # the last tile may reach beyond the tensor


_HOST_SECONDS = 16.5e-6
"""Host time of a call of two launches with a workspace, in seconds, times three quarters.

Measured on a host where a call of a single launch takes 16 us.
"""


def with_host(modelled: float) -> float:
    """The cost in seconds of a call of several launches.

    Small layers in a row wait for the host. A kernel of one launch is then faster, even if it takes
    the device some microseconds more.

    Args:
        modelled: device time in seconds.
    """
    return max(modelled, 0.8 * _HOST_SECONDS + 0.2 * modelled)


def accumulator_bytes(problem: Problem) -> int:
    """Bytes of one partial sum."""
    return 8 if problem.dtype == "float64" else 4


def index_type(problem: Problem, *counts: int) -> str:
    """The C type that holds every element offset and every one of `counts`."""
    wide = problem.wide_offsets or any(count >= _INDEX_LIMIT for count in counts)
    return "long long" if wide else "int"


def blocks(problem: Problem, index: str, most: int) -> int:
    """Blocks that an SM must hold, which bounds the registers of a thread.

    Three things need more registers: float64, 64-bit offsets, and the scattered staging of
    channels_last. Each takes one block off `most`, so that nothing spills. The result is at
    least 2.
    """
    channels_last = "channels_last" in (problem.x_layout, problem.y_layout)
    return max(2, most - (problem.dtype == "float64") - (index != "int") - channels_last)


def layer_constants(problem: Problem, index: str) -> tuple[tuple[str, int | str], ...]:
    """What kernels ask of a forward layer besides its axes; `index`: the type of offsets."""
    return (
        ("Index", index),
        ("groups", problem.groups),
        ("in_channels", problem.in_channels_per_group),
        ("out_channels", problem.out_channels_per_group),
        ("bias", problem.bias),
    )


def axis_constants(problem: Problem) -> tuple[tuple[str, int], ...]:
    """kernel, stride, padding, dilation of both axes, as members of `struct Layer`."""
    return tuple(
        (f"{name}_{suffix}", getattr(axis, name))
        for suffix, axis in (("y", problem.height), ("x", problem.width))
        for name in ("kernel", "stride", "padding", "dilation")
    )


def phases_why_not(problem: Problem) -> str | None:
    """A reason if a forward kernel that computes all phases cannot serve, else None.

    An axis may have at most `MOST_LISTED_PHASES` phases, and each needs an output. The limits of
    `coordinates_why_not` hold too.
    """
    for name, axis in (("height", problem.height), ("width", problem.width)):
        if axis.stride > MOST_LISTED_PHASES:
            return f"lists {MOST_LISTED_PHASES} phases along {name} at most, not {axis.stride}"
        if axis.used_phases < axis.stride:
            found = f"{axis.used_phases} have outputs"
            return f"computes all {axis.stride} phases along {name}, of which {found}"
    return coordinates_why_not(problem)


def coordinates_why_not(problem: Problem) -> str | None:
    """A reason if a coordinate along an axis could exceed 32 bits, else None."""
    for name, axis in (("height", problem.height), ("width", problem.width)):
        reach = axis.output_size + 2 * axis.padding + axis.dilation * axis.kernel
        if reach > MAX_GRID:
            return f"coordinates along {name} need 32 bits, they reach {reach}"
    return None
