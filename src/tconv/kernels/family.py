"""What every kernel family offers to the plan: its module is a `Family`."""

from __future__ import annotations

from typing import Any, Protocol

from tconv.jit.target import Target
from tconv.kernels.launch import Launch
from tconv.problem import Direction, Problem


class Family(Protocol):
    """One kernel: the folder `<STEM>`.

    It holds `<STEM>.cu`, `tiles.py` (the table), `layout.py` (geometry of a tile over a problem,
    and what cannot be served), `cost.py` with `costs.json` (the modelled time) and `launch.py`.
    """

    STEM: str
    DIRECTION: Direction
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
"""Tiles laid over problems that a family keeps: while a problem is planned, one after the other.

Plans are kept elsewhere. With 1024 the benchmark's 29 layers left Python's collector 19 000 objects
to visit, so 3 700.
"""

_INDEX_LIMIT = 2**31 - 2**20  # room for the last tile's overhang


_HOST_SECONDS = 16.5e-6
"""Three quarters of what a call of two launches and their workspace takes a host on which one of a
single launch takes 16 us.
"""


def with_host(modelled: float) -> float:
    """The cost of a call of several launches that takes the device `modelled` seconds.

    Small layers in a row wait for the host, so that kernels of one launch are faster there, even if
    they take the device some microseconds more.
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
    """Blocks an SM must hold: what takes more registers (64-bit values or offsets, the scattered
    staging of channels_last) gets them from one block less each, so that nothing spills.
    """
    channels_last = "channels_last" in (problem.x_layout, problem.y_layout)
    return max(2, most - (problem.dtype == "float64") - (index != "int") - channels_last)


def axis_constants(problem: Problem) -> tuple[tuple[str, int], ...]:
    """kernel, stride, padding, dilation of both axes, as members of `struct Layer`."""
    return tuple(
        (f"{name}_{suffix}", getattr(axis, name))
        for suffix, axis in (("y", problem.height), ("x", problem.width))
        for name in ("kernel", "stride", "padding", "dilation")
    )


def stride_fields(prefix: str, names: str, index: str) -> tuple[tuple[str, str], ...]:
    """Fields of `struct Arguments` for a tensor's strides; `launch.strides` has their values."""
    return tuple((f"{prefix}_stride_{name}", index) for name in names.split())


SIZE_FIELDS = tuple(
    (f"{image}_{axis}", "int")
    for image in ("source", "destination")
    for axis in ("height", "width")
)
"""Fields of `struct Arguments` for the sizes of input and output."""


def phases_why_not(problem: Problem) -> str | None:
    """`coordinates_why_not`, and for forward kernels that compute all phases a reason if these are
    more than `MOST_LISTED_PHASES`, or some have no output.
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
