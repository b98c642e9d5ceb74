"""The geometry of a tile of `mma_forward`, and what cannot be served.

`tiles.cuh` explains the words of this module.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from tconv.jit.target import Target
from tconv.kernels import family, image_tiles
from tconv.kernels.image_tiles import AIMED_SHARED, POSITIONS_BYTES, RESERVED_SHARED
from tconv.kernels.mma_forward.tiles import Tile
from tconv.problem import Axis, Problem

MOST_PRODUCTS = 640
"""Limit of unrolled `mma` instructions for 8 input channels."""

MOST_TAPS = 128
"""Limit of taps. The code that tells them apart is unrolled over them."""

OTHER_REGISTERS = 48
"""Registers of a thread for operands, addresses, counters and copies."""

MOST_DEPTH = 64
"""Limit of input channels of a step where each warp of a block has one unit."""

SECTOR = 8
"""Floats in a sector, the unit in which memory is written."""

OTHER_BYTES = 64
"""Bytes of shared memory for small values and for gaps of alignment."""

LATE_LOADS = 4
"""Values that products read at most this often are rounded at each read, others once in place."""


@dataclass(frozen=True)
class Taps:
    """The taps of one axis, for pixels whose outputs start at `pixel*stride - padding`.

    Attributes:
        phases: for each tap, the output of a pixel that it reaches.
        shifts: for each tap, its shift: output pixel q reads input `q - shift`.
    """

    phases: tuple[int, ...]
    shifts: tuple[int, ...]

    @functools.cached_property
    def used(self) -> tuple[int, ...]:
        """The phases that some tap reaches, ascending."""
        return tuple(sorted(set(self.phases)))

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """The distinct inputs read, ascending, relative to the first."""
        most = max(self.shifts)
        return tuple(sorted({most - shift for shift in self.shifts}))

    @property
    def span(self) -> int:
        """The last of the offsets."""
        return self.offsets[-1]

    @functools.cached_property
    def slots(self) -> tuple[int, ...]:
        """Of each tap: the index of its offset."""
        return tuple(self.offsets.index(max(self.shifts) - shift) for shift in self.shifts)


def taps_of(axis: Axis) -> Taps:
    """The taps of an axis."""
    taps = sorted(
        (tap.index, phase.index, tap.shift) for phase in axis.phases for tap in phase.taps
    )
    return Taps(tuple(phase for _, phase, _ in taps), tuple(shift for *_, shift in taps))


@dataclass(frozen=True)
class Layout(image_tiles.Layout):
    """A tile laid over a problem.

    Attributes:
        y, x: the taps of both axes.
        depth: input channels of a step.
        row_groups: units of a tile along y, each a row of pixels.
        remembered: what all sizes of a kernel share (`family.of_kernel`, `family.once`).
    """

    problem: Problem
    tile: Tile
    y: Taps
    x: Taps
    depth: int
    row_groups: int
    remembered: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @family.of_kernel
    def unit_channels(self) -> int:
        """Output channels of a unit: 16, or all of them if there are at most 8."""
        channels = self.problem.out_channels_per_group
        return channels if channels <= 8 else 16

    @family.of_kernel
    def unit_phases(self) -> int:
        """Phases in y of a unit: all if its rows are few and the accumulators suffice, else one."""
        rows = len(self.y.used) * len(self.x.used) * self.unit_channels
        few = self.unit_channels <= 8 and rows <= 32
        sums = 4 * -(-rows // 16) * min(4, self.tile.fragments)
        return len(self.y.used) if few and sums <= self.tile.sums else 1

    @family.of_kernel
    def phase_groups(self) -> int:
        """Units among which the phases in y are divided."""
        return len(self.y.used) // self.unit_phases

    @family.of_kernel
    def row_fragments(self) -> int:
        """Fragments of 16 rows of a unit."""
        return -(-self.unit_phases * len(self.x.used) * self.unit_channels // 16)

    @family.of_kernel
    def columns_of(self) -> tuple[int, int]:
        """Fragments along x of a unit, and units along x of a tile."""
        most = self.tile.sums // (4 * self.row_fragments)
        most = max(1, min(most, self.tile.fragments))
        needed = -(-len(self.problem.pattern.width.q_range) // 8)
        parts = -(-needed // most)
        tile_parts = min(parts, self.tile.parts)
        # The same warps must write a row together in each round.
        while self.tile.team and self.tile.warps % tile_parts:
            tile_parts += 1
        tiles = -(-parts // tile_parts)
        return -(-needed // (tiles * tile_parts)), tile_parts

    @family.of_kernel
    def fragments(self) -> int:
        """Fragments of 8 pixels of a unit."""
        return self.columns_of[0]

    @family.of_kernel
    def parts(self) -> int:
        """Units of a tile along x."""
        return self.columns_of[1]

    @family.of_kernel
    def channel_blocks(self) -> int:
        """Units of a tile along the output channels."""
        blocks = -(-self.problem.out_channels_per_group // self.unit_channels)
        return min(self.tile.channel_blocks, blocks)

    @family.of_kernel
    def kinds(self) -> int:
        """Units of a tile with distinct weights."""
        return self.channel_blocks * self.phase_groups

    @family.of_kernel
    def units(self) -> int:
        """Units of a tile."""
        return self.parts * self.kinds * self.row_groups

    @family.of_kernel
    def steps_8(self) -> int:
        """Fragments of 8 channels among all input channels of a group."""
        return -(-self.problem.in_channels_per_group // 8)

    @family.of_kernel
    def tile_columns(self) -> int:
        """Pixels of a block along x."""
        return 8 * self.fragments * self.parts

    @family.of_kernel
    def tile_channels(self) -> int:
        """Output channels of a block."""
        return self.channel_blocks * self.unit_channels

    @family.of_kernel
    def sums(self) -> int:
        """Accumulators of a thread."""
        return 4 * self.row_fragments * self.fragments

    @family.of_kernel
    def slot_products(self) -> int:
        """Pairs of a slot and a fragment of rows with a tap: `mma` for a row of 8 pixels."""
        phases_x, channels = len(self.x.used), self.unit_channels
        taps = set(zip(self.x.phases, self.x.slots, strict=True))
        found = set()
        for y, slot_y in zip(self.y.phases, self.y.slots, strict=True):
            index_y = self.y.used.index(y)
            for x, slot_x in taps:
                phase = index_y % self.unit_phases * phases_x + self.x.used.index(x)
                for row in range(phase * channels, (phase + 1) * channels):
                    found.add((index_y // self.unit_phases, row // 16, slot_y, slot_x))
        return -(-len(found) // self.phase_groups)

    @family.of_kernel
    def meets_zeros(self) -> bool:
        """Whether a product has a row without a tap, whose weight is zero."""
        y = set(zip(self.y.phases, self.y.slots, strict=True))
        x = set(zip(self.x.phases, self.x.slots, strict=True))
        channels, phases_x = self.unit_channels, len(self.x.used)
        rows = self.unit_phases * phases_x * channels

        def has_tap(first_phase: int, row: int, slot_y: int, slot_x: int) -> bool:
            index = row // channels
            phase_y = self.y.used[first_phase + index // phases_x]
            return (phase_y, slot_y) in y and (self.x.used[index % phases_x], slot_x) in x

        return any(
            len({has_tap(first, row, *slots) for row in range(m, min(m + 16, rows))}) > 1
            for first in range(0, len(self.y.used), self.unit_phases)
            for m in range(0, rows, 16)
            for slots in itertools.product(set(self.y.slots), set(self.x.slots))
        )

    @family.of_kernel
    def slot_fragments(self) -> tuple[int, ...]:
        """For each slot in x, a bit mask of the fragments of rows.

        A bit is set if a phase in x of that fragment has a tap at the slot.
        """
        x, channels, phases = self.x, self.unit_channels, len(self.x.used)
        found = [0] * len(x.offsets)
        for phase, slot in zip(x.phases, x.slots, strict=True):
            first = x.used.index(phase) * channels
            for row in range(first, self.unit_phases * phases * channels, phases * channels):
                for fragment in range(row // 16, (row + channels - 1) // 16 + 1):
                    found[slot] |= 1 << fragment
        return tuple(found)

    @family.of_kernel
    def products(self) -> int:
        """Products of a unit for 8 input channels. A product of split operands has four `mma`."""
        return self.slot_products * self.fragments

    @family.of_kernel
    def loads(self) -> float:
        """Fragments of pixels that a unit reads for 8 input channels, divided by `fragments`."""
        if self.phase_groups > 1:
            pairs = set(zip(self.y.phases, self.y.slots, strict=True))
            return len(self.x.offsets) * len(pairs) / self.phase_groups
        return len(self.x.offsets) * len(self.y.offsets)

    @family.of_kernel
    def round_on_load(self) -> bool:
        """Whether products round the pixels as they read them. Else a step rounds its patch."""
        if self.tile.split:
            return True
        reads = self.loads * self.fragments * self.units
        patch = self.patch_rows * self.patch_vectors / 2
        return reads <= LATE_LOADS * patch

    @family.of_kernel
    def skew(self) -> int:
        """Columns between the start of a sector and the first column that a tile reads."""
        return self.first_column % (SECTOR if self.source_vectors else 4)

    @family.of_kernel
    def first_column(self) -> int:
        """The first input column that the first tile reads."""
        return self.problem.width.q_range[0] - max(self.x.shifts)

    @family.of_kernel
    def first_row(self) -> int:
        """The first input row that the first tile reads."""
        return self.problem.height.q_range[0] - max(self.y.shifts)

    @family.of_kernel
    def patch_vectors(self) -> int:
        """Vectors of 4 columns in a row of the patch."""
        return -(-(self.skew + self.tile_columns + self.x.span) // 8) * 2

    @family.of_kernel
    def patch_rows(self) -> int:
        """Input rows of a tile, its halo included."""
        return self.row_groups + self.y.span

    @family.of_kernel
    def head(self) -> int:
        """Elements of an output row from a multiple of 4 to a tile's first."""
        return -(self.problem.width.padding % self.problem.width.stride) % 4

    @family.of_kernel
    def team_warps(self) -> int:
        """Warps that gather their outputs together."""
        return self.parts if self.tile.team else 1

    @family.of_kernel
    def team_columns(self) -> int:
        """Pixels of a row that `team_warps` gather."""
        return 8 * self.fragments * self.team_warps

    @family.of_kernel
    def output_pitch(self) -> int:
        """Pitch of the gathered output rows, in elements."""
        return image_tiles.output_pitch(
            self.head + self.team_columns * self.problem.width.stride,
            self.problem.width.stride,
            self.unit_channels % 8 == 0,
        )

    @family.of_kernel
    def weights(self) -> int:
        """Floats of a tile's weights and bias."""
        slots = len(self.y.offsets) * len(self.x.offsets)
        fragment = 192 if self.tile.split else 128
        weights = self.kinds * self.steps_8 * slots * (self.row_fragments * fragment + 4)
        return weights + -(-self.tile_channels // 4) * 4

    @family.of_kernel
    def aimed_bytes(self) -> int:
        """Most bytes of shared memory with which an SM holds the tile's blocks."""
        return AIMED_SHARED // self.tile.blocks - RESERVED_SHARED

    @family.of_kernel
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        used = self.patch_rows * self.patch_vectors * 4
        patch_channel = used + (24 - used % 16) % 16  # 8 more than a multiple of 16
        teams = self.tile.warps // self.team_warps
        floats = teams * min(8, self.unit_channels) * self.output_pitch
        floats += 2 * self.depth * patch_channel + self.weights + 2 * SECTOR
        return 4 * floats + POSITIONS_BYTES + OTHER_BYTES

    @functools.cached_property
    def tiles_yx(self) -> tuple[int, int]:
        """Tiles along y and x."""
        return (
            -(-len(self.problem.height.q_range) // self.row_groups),
            -(-len(self.problem.width.q_range) // self.tile_columns),
        )

    @property
    def index(self) -> str:
        """The C type of offsets."""
        return family.index_type(self.problem, self.tiles)

    @family.of_kernel
    def bound_blocks(self) -> int:
        """The launch bound, in blocks of an SM.

        64-bit offsets take the registers of one block. So do split products that are unrolled
        over slots.
        """
        unrolled = self.tile.split and self.unit_phases > 1
        return max(1, self.tile.blocks - self.problem.wide_offsets - unrolled)


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    if problem.like is not None:
        return family.over(layout(problem.like, tile), problem)
    y, x = taps_of(problem.height), taps_of(problem.width)
    whole = -(-problem.in_channels_per_group // 8) * 8
    depth = min(whole, MOST_DEPTH)
    laid = Layout(problem, tile, y, x, depth, 1)
    row_groups = max(1, min(len(problem.pattern.height.q_range), tile.warps // laid.units))
    while True:
        laid = Layout(problem, tile, y, x, depth, row_groups)
        if laid.shared_bytes <= laid.aimed_bytes or depth == 8:
            return laid
        depth = -(-depth // 16) * 8


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    refusal = image_tiles.mma_why_not(problem, target, strict=True)
    if refusal is not None:
        return refusal
    if problem.taps > MOST_TAPS:
        return f"unrolls over {MOST_TAPS} taps at most, the kernel has {problem.taps}"
    return family.phases_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    laid = layout(problem, tile)
    return family.once(laid, ("why_not", target), lambda: _why_not(laid, target))


def _why_not(laid: Layout, target: Target) -> str | None:
    """The same of a layout."""
    problem, tile = laid.problem, laid.tile
    if tile.split != (problem.math == "ieee"):
        served = "strict float32" if tile.split else "TF32"
        return f"multiplies {served}, the layer's math is {problem.math}"
    if tile.split and laid.meets_zeros:
        return (
            "phases with and without a tap share a product, "
            "where strict float32 keeps infinities from those without"
        )
    most = tile.registers - OTHER_REGISTERS
    if laid.sums > min(tile.sums, most):
        return f"a thread would hold {laid.sums} sums, its registers allow {tile.sums}"
    if laid.products > MOST_PRODUCTS:
        return f"{laid.products} unrolled products exceed the limit of {MOST_PRODUCTS}"
    if laid.chunks > 1 and laid.units > tile.warps:
        return (
            f"a step holds {laid.depth} of {problem.in_channels_per_group} input channels, "
            f"so {tile.warps} warps cannot compute {laid.units} units"
        )
    return image_tiles.shared_why_not(laid.shared_bytes, target)
