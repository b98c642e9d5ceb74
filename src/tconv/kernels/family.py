"""What every kernel family offers to the plan: its module is a `Family`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tconv.jit import tensor_map
from tconv.jit.target import Target
from tconv.kernels.source import KernelSource
from tconv.problem import Direction, Problem


class TensorView(NamedTuple):
    """A tensor as a kernel sees it: its first element's address, and strides in elements."""

    address: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Operands:
    """The tensors of one launch, named as in `Problem`.

    Attributes:
        x, w, y: the layer's input, weight and output, or their gradients.
        bias: address of the contiguous bias [Cout], or 0.
        packed: address of the workspace of the plan's `Packing`, or 0.
        partial: address of the workspace [splits, Cin, Cout/groups, kH, kW] of float32 (float64
            for float64 tensors), or 0.
        encode_tensor_map: of `jit.tensor_map`, or of the emulator.
    """

    x: TensorView
    w: TensorView
    y: TensorView
    bias: int = 0
    packed: int = 0
    partial: int = 0
    encode_tensor_map: Callable[..., bytes] = tensor_map.encode


@dataclass(frozen=True)
class Packing:
    """A launch before the kernel's own, which writes a workspace that the kernel begins with.

    Attributes:
        source: its kernel.
        grid: blocks of its launch.
        elements: float32 values of the workspace.
        does: what it does, to stand behind its name.
    """

    source: KernelSource
    grid: int
    elements: int
    does: str = "lays the weights out"


@dataclass(frozen=True)
class Repair:
    """A launch after the kernel's own, which computes again what that could not.

    Attributes:
        source: its kernel.
        grid: blocks of its launch.
    """

    source: KernelSource
    grid: int


class Family(Protocol):
    """One kernel: `<STEM>.py` beside `<STEM>.cu`."""

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

    def source(self, problem: Problem, tile: Any) -> KernelSource:
        """The kernel specialised for the problem's layer; sizes that vary by call are left out."""

    def grid(self, problem: Problem, target: Target, tile: Any) -> int:
        """Blocks to launch."""

    def splits(self, problem: Problem, target: Target, tile: Any) -> int:
        """Partial results that the kernel writes to a workspace; 0: it writes the result."""

    def arguments(
        self, problem: Problem, target: Target, tile: Any, operands: Operands
    ) -> dict[str, int | float | bytes]:
        """The fields of `struct Arguments`."""


class PackingFamily(Family, Protocol):
    """A family whose kernel begins with a workspace that a launch before it writes: packed weights,
    or cleared counts.
    """

    def packing(self, problem: Problem, tile: Any) -> Packing | None:
        """That launch; None for tiles that need none."""

    def packing_arguments(
        self, problem: Problem, tile: Any, operands: Operands
    ) -> dict[str, int | float | bytes]:
        """The fields of that launch's `struct Arguments`."""


class RepairingFamily(PackingFamily, Protocol):
    """A family whose kernel does not serve all values; other launches do what it left."""

    def repairs(self, problem: Problem, target: Target, tile: Any) -> tuple[Repair, ...]:
        """Those launches, in order; none for tiles that need none."""

    def repair_arguments(
        self, problem: Problem, target: Target, tile: Any, operands: Operands, index: int
    ) -> dict[str, int | float | bytes]:
        """The fields of `struct Arguments` of one of them."""


ELEMENT_TYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "float16",
    "bfloat16": "bfloat16",
}

MAX_GRID = 2**31 - 1

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
    """Fields of `struct Arguments` for a tensor's strides."""
    return tuple((f"{prefix}_stride_{name}", index) for name in names.split())


def strides(prefix: str, names: str, view: TensorView) -> dict[str, int | float | bytes]:
    """Values of the fields of `stride_fields`."""
    return {
        f"{prefix}_stride_{name}": stride
        for name, stride in zip(names.split(), view.strides, strict=True)
    }


def output_rows(problem: Problem, operands: Operands) -> dict[str, int | float | bytes]:
    """Values of the fields of an output that is written in rows: the bias, address and size, and
    all strides but that of columns, which is 1.
    """
    y = operands.y
    return {
        "bias": operands.bias,
        "destination": y.address,
        "destination_height": problem.height.output_size,
        "destination_width": problem.width.output_size,
        **strides("destination", "n c h", y._replace(strides=y.strides[:3])),
    }


def phases_why_not(problem: Problem) -> str | None:
    """`coordinates_why_not`, and for forward kernels that compute all phases a reason if some have
    no output: with long strides these are nearly all, and too many to list.
    """
    for name, axis in (("height", problem.height), ("width", problem.width)):
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
