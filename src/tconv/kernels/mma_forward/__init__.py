"""`mma_forward`: layers bound by what they move, on `mma.sync` with TF32 (`mma_forward.cu`).

Tiles marked `split` compute strict float32: six products of bfloat16 for one.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import family, image_tiles
from tconv.kernels.image_tiles import AIMED_SHARED, POSITIONS_BYTES, RESERVED_SHARED
from tconv.kernels.launch import Address, Argument, Launch
from tconv.kernels.source import Constant, KernelSource
from tconv.problem import Axis, Direction, Problem

STEM = "mma_forward"
CLEAR_STEM = "clear_counts"
DIRECTION: Direction = "forward"

MOST_PRODUCTS = 640
"""Instructions `mma` of 8 input channels that are unrolled."""

MOST_TAPS = 128
"""Taps that the weights' copies are unrolled over."""

OTHER_REGISTERS = 48
"""Registers of a thread for operands, addresses, counters and copies."""

MOST_DEPTH = 64
"""Input channels of a step, at most, where a block has one unit for each warp."""

SECTOR = 8
"""Floats that memory is written in."""

MOST_WALKING = 8
"""Tiles that share their pixels, at most, where blocks walk down the rows and are a multiple."""

WALK_BYTES = 64
"""Shared memory for where a block's walk begins and ends, and for what alignment leaves."""

LEAST_HANDED_OUT = 1024
"""Rows of a group tile from which on the last are handed out. With fewer, an H200's walks have less
than about 15, and a tenth of them is hardly a row, not worth the launch that clears the counts."""

SHARE_TENTHS = 9
"""Tenths of the rows that walks share evenly where the others are handed out. Even shares of all
took kb75's blocks 0.85 to 1.11 times their mean: in that mean the slowest do nine tenths."""

ASKED_ROWS, BYTES_PER_NANOSECOND = 2, 3400
"""Blocks ask for rows ahead in halves of the time in which they need so many, at that rate of all
bytes, at which kb75 and kb81 move theirs."""

MOST_AHEAD = 4
"""Rows that blocks which walk down ask for at a time, at most."""

BLANK_ELEMENTS = (256, 128)
"""Values of a blank row that are copied at a time, where each channel has its own and few fit."""

LATE_LOADS = 4
"""Values that products read this often or less are rounded each time, else once in place."""


@dataclass(frozen=True)
class Tile:
    """How a block divides its outputs.

    Attributes:
        warps: of a block.
        fragments: of 8 neighbouring pixels along x that a warp accumulates, at most.
        parts: warps along x, at most.
        channel_blocks: of 16 output channels, at most.
        rows: rows of pixels that a warp accumulates together.
        rounds: units that a warp computes one after another for a step, which then holds all input
            channels.
        sums: accumulators of a thread, at most.
        blocks: blocks that an SM must hold, which bounds the registers.
        split: operands are three parts each.
        team: the warps of a row gather its outputs together, and each writes whole rows.
        bulk: blocks walk down the rows of an image, which leave by bulk copies.
    """

    warps: int
    fragments: int
    parts: int
    channel_blocks: int
    rows: int
    rounds: int
    sums: int
    blocks: int
    split: bool = False
    team: bool = False
    bulk: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def registers(self) -> int:
        """Registers of a thread that let an SM hold the blocks."""
        return min(255, (64 << 10) // (self.threads * self.blocks) // 8 * 8)

    def __str__(self) -> str:
        """Output channels x rows x columns at most; warps and rounds."""
        split = "/split" if self.split else "/team" if self.team else ""
        bulk = "/bulk" if self.bulk else ""
        return (
            f"{16 * self.channel_blocks}x{self.rows}x{8 * self.fragments * self.parts}"
            f"/{self.warps}x{self.rounds}{split}{bulk}"
        )


TILES = (
    Tile(warps=4, fragments=17, parts=1, channel_blocks=2, rows=1, rounds=1, sums=72, blocks=3),
    Tile(warps=4, fragments=9, parts=2, channel_blocks=2, rows=2, rounds=1, sums=72, blocks=3),
    Tile(warps=8, fragments=9, parts=2, channel_blocks=2, rows=2, rounds=1, sums=72, blocks=1),
    Tile(warps=4, fragments=5, parts=1, channel_blocks=2, rows=3, rounds=1, sums=64, blocks=3),
    Tile(warps=4, fragments=8, parts=2, channel_blocks=2, rows=1, rounds=1, sums=64, blocks=4),
    Tile(warps=8, fragments=8, parts=2, channel_blocks=2, rows=1, rounds=1, sums=64, blocks=2),
    Tile(warps=8, fragments=8, parts=2, channel_blocks=2, rows=1, rounds=2, sums=96, blocks=1),
    Tile(8, fragments=4, parts=8, channel_blocks=1, rows=1, rounds=1, sums=48, blocks=2, team=True),
    Tile(8, fragments=2, parts=8, channel_blocks=1, rows=1, rounds=1, sums=72, blocks=3, team=True),
    *(
        Tile(warps, 4, parts, 1, 1, rounds, sums=48, blocks=16 // warps, split=True, team=True)
        for warps, parts, rounds in ((8, 8, 1), (8, 4, 1), (4, 4, 1))
    ),
    *(
        Tile(warps, 4, warps, 1, 1, 1, sums=48, blocks=2, split=split, team=True, bulk=True)
        for warps, split in ((4, False), (4, True), (8, True))
    ),
)


@dataclass(frozen=True)
class Taps:
    """The taps of one axis, for pixels whose outputs start at `pixel*stride - padding`.

    Attributes:
        phases: of each tap: the output of a pixel that it reaches.
        shifts: of each tap: output pixel q reads input `q - shift`.
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

    @property
    def pairs(self) -> int:
        """Pairs of a phase and an offset that have a tap: the taps."""
        return len(self.phases)


def taps_of(axis: Axis) -> Taps:
    """The taps of an axis."""
    taps = sorted(
        (tap.index, phase.index, tap.shift) for phase in axis.phases for tap in phase.taps
    )
    return Taps(tuple(phase for _, phase, _ in taps), tuple(shift for *_, shift in taps))


@dataclass(frozen=True)
class Layout:
    """A tile laid over a problem.

    Attributes:
        y, x: the taps of both axes.
        depth: input channels of a step.
        row_groups: units of a tile along y.
    """

    problem: Problem
    tile: Tile
    y: Taps
    x: Taps
    depth: int
    row_groups: int

    @property
    def unit_channels(self) -> int:
        """Output channels of a unit: 16, or all where they are 8 or fewer."""
        channels = self.problem.out_channels_per_group
        return channels if channels <= 8 else 16

    @functools.cached_property
    def unit_phases(self) -> int:
        """Phases in y of a unit: all where its rows are few and the sums hold them, else one."""
        rows = len(self.y.used) * len(self.x.used) * self.unit_channels
        few = self.unit_channels <= 8 and rows <= 32
        sums = 4 * self.tile.rows * -(-rows // 16) * min(4, self.tile.fragments)
        return len(self.y.used) if few and sums <= self.tile.sums else 1

    @property
    def phase_groups(self) -> int:
        """Units that the phases in y take."""
        return len(self.y.used) // self.unit_phases

    @property
    def warp_rows(self) -> int:
        """Rows of pixels of a unit."""
        return self.tile.rows if self.phase_groups == 1 else 1

    @functools.cached_property
    def row_fragments(self) -> int:
        """Fragments of 16 rows of a unit."""
        return -(-self.unit_phases * len(self.x.used) * self.unit_channels // 16)

    @functools.cached_property
    def columns_of(self) -> tuple[int, int]:
        """Fragments along x of a unit, and units along x of a tile."""
        most = self.tile.sums // (4 * self.warp_rows * self.row_fragments)
        most = max(1, min(most, self.tile.fragments))
        needed = -(-len(self.problem.width.q_range) // 8)
        parts = -(-needed // most)
        tile_parts = min(parts, self.tile.parts)
        # The warps that write a row together are so in each round.
        while self.tile.team and self.tile.warps % tile_parts:
            tile_parts += 1
        tiles = -(-parts // tile_parts)
        return -(-needed // (tiles * tile_parts)), tile_parts

    @property
    def fragments(self) -> int:
        """Fragments of 8 pixels of a unit."""
        return self.columns_of[0]

    @property
    def parts(self) -> int:
        """Units of a tile along x."""
        return self.columns_of[1]

    @property
    def channel_blocks(self) -> int:
        """Units of a tile along the output channels."""
        blocks = -(-self.problem.out_channels_per_group // self.unit_channels)
        return min(self.tile.channel_blocks, blocks)

    @property
    def kinds(self) -> int:
        """Units of a tile that have weights of their own."""
        return self.channel_blocks * self.phase_groups

    @property
    def units(self) -> int:
        """Units of a tile."""
        return self.parts * self.kinds * self.row_groups

    @property
    def chunks(self) -> int:
        """Steps that hold all input channels."""
        return -(-self.problem.in_channels_per_group // self.depth)

    @property
    def steps_8(self) -> int:
        """Fragments of 8 that the input channels take."""
        return -(-self.problem.in_channels_per_group // 8)

    @property
    def tile_columns(self) -> int:
        """Pixels of a block along x."""
        return 8 * self.fragments * self.parts

    @property
    def tile_rows(self) -> int:
        """Pixels of a block along y."""
        return self.row_groups * self.warp_rows

    @property
    def tile_channels(self) -> int:
        """Output channels of a block."""
        return self.channel_blocks * self.unit_channels

    @property
    def group_tiles(self) -> int:
        """Tiles that share their pixels, each with weights of its own."""
        tiles = -(-self.problem.out_channels_per_group // self.tile_channels)
        return self.problem.groups * tiles

    @property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return 4 * self.warp_rows * self.row_fragments * self.fragments

    @functools.cached_property
    def slot_products(self) -> int:
        """Pairs of a slot and a fragment of rows that have a tap: `mma` of a row of 8 pixels."""
        phases_x, channels = len(self.x.used), self.unit_channels
        taps = {
            (phase, slot)
            for phase, slot in zip(self.x.phases, self.x.slots, strict=True)
        }  # fmt: skip
        found = set()
        for y, slot_y in zip(self.y.phases, self.y.slots, strict=True):
            index_y = self.y.used.index(y)
            for x, slot_x in taps:
                phase = index_y % self.unit_phases * phases_x + self.x.used.index(x)
                for row in range(phase * channels, (phase + 1) * channels):
                    found.add((index_y // self.unit_phases, row // 16, slot_y, slot_x))
        return -(-len(found) // self.phase_groups)

    @property
    def meets_zeros(self) -> bool:
        """Whether a row of some product has no tap there, and so a weight of zero."""
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

    @property
    def slot_fragments(self) -> tuple[int, ...]:
        """Of each slot in x: a bit for each fragment of rows whose phases in x have a tap there."""
        x, channels, phases = self.x, self.unit_channels, len(self.x.used)
        found = [0] * len(x.offsets)
        for phase, slot in zip(x.phases, x.slots, strict=True):
            first = x.used.index(phase) * channels
            for row in range(first, self.unit_phases * phases * channels, phases * channels):
                for fragment in range(row // 16, (row + channels - 1) // 16 + 1):
                    found[slot] |= 1 << fragment
        return tuple(found)

    @functools.cached_property
    def products(self) -> int:
        """Products of a unit for 8 input channels, each of four `mma` where operands are split."""
        return self.slot_products * self.fragments * self.warp_rows

    @property
    def loads(self) -> float:
        """Fragments of pixels that a unit reads for 8 input channels, over `fragments`."""
        rows = {offset + i for offset in self.y.offsets for i in range(self.warp_rows)}
        slots = len(rows)
        if self.phase_groups > 1:
            pairs = set(zip(self.y.phases, self.y.slots, strict=True))
            return len(self.x.offsets) * len(pairs) / self.phase_groups
        return len(self.x.offsets) * slots

    @property
    def round_on_load(self) -> bool:
        """Whether products round the pixels that they read, or each step all of its patch."""
        if self.tile.split:
            return True
        reads = self.loads * self.fragments * self.units
        patch = self.patch_rows * self.patch_vectors / 2
        return reads <= LATE_LOADS * patch

    @property
    def skew(self) -> int:
        """Columns between the start of a sector and the first that a tile reads."""
        return self.first_column % (SECTOR if self.source_vectors else 4)

    @property
    def first_column(self) -> int:
        """The first input column that the first tile reads."""
        return self.problem.width.q_range[0] - max(self.x.shifts)

    @property
    def first_row(self) -> int:
        """The first input row that the first tile reads."""
        return self.problem.height.q_range[0] - max(self.y.shifts)

    @property
    def patch_vectors(self) -> int:
        """Vectors of 4 columns in a row of the patch."""
        return -(-(self.skew + self.tile_columns + self.x.span) // 8) * 2

    @property
    def patch_rows(self) -> int:
        """Input rows of a tile, its halo included."""
        return self.tile_rows + self.y.span

    @property
    def patch_channel(self) -> int:
        """Floats of a channel of the patch: 8 more than a multiple of 16."""
        return self._patch_channel(self.rows_ahead)

    def _patch_channel(self, rows_ahead: int) -> int:
        used = (self.patch_rows + rows_ahead) * self.patch_vectors * 4
        return used + (24 - used % 16) % 16

    @property
    def roll(self) -> bool:
        """Whether the patch keeps rows from tile to tile."""
        return self.tile.bulk and self.tile_rows == 1 and self.chunks == 1

    @property
    def head(self) -> int:
        """Elements between a multiple of 4 of an output row and a tile's first."""
        return -(self.problem.width.padding % self.problem.width.stride) % 4

    @property
    def team_warps(self) -> int:
        """Warps that gather their outputs together."""
        return self.parts if self.tile.team else 1

    @property
    def team_columns(self) -> int:
        """Pixels of a row that they gather."""
        return 8 * self.fragments * self.team_warps

    @property
    def output_pitch(self) -> int:
        """Elements between the output rows that they gather."""
        return output_pitch(
            (3 * SECTOR if self.tile.bulk else 0)
            + self.head
            + self.team_columns * self.problem.width.stride,
            self.problem.width.stride,
            self.unit_channels % 8 == 0,
        )

    @property
    def weights(self) -> int:
        """Floats of a tile's weights and bias."""
        slots = len(self.y.offsets) * len(self.x.offsets)
        fragment = 192 if self.tile.split else 128
        weights = self.kinds * self.steps_8 * slots * self.row_fragments * fragment
        return weights + -(-self.tile_channels // 4) * 4

    @property
    def buffers(self) -> int:
        """Buffers for gathered outputs: two where bulk copies read one meanwhile, and they fit."""
        return self._memory[0]

    @property
    def rows_ahead(self) -> int:
        """Rows of the patch that are asked for at a time where they stay."""
        return self._memory[1]

    @property
    def blank_elements(self) -> int:
        """Values of a blank row that are copied at a time, 0 where no row is blank."""
        return self._memory[2]

    @functools.cached_property
    def _memory(self) -> tuple[int, int, int]:
        """Buffers, rows ahead and values of a blank row: the most that fit, in this order.

        Where all channels have the same values, a blank row is copied as a whole: kb81 in strict
        float32 took 0.258 ms so, with one buffer, and 0.284 in pieces of 256 values with two.
        """
        if not self.tile.bulk:
            return 1, 0, 0
        blank = len(self.y.used) < self.problem.height.stride
        width = -(-self.problem.width.output_size // SECTOR) * SECTOR
        pieces = [width] if blank else [0]
        if blank and self.problem.bias:
            pieces += [size for size in BLANK_ELEMENTS if size < width]
        for buffers in (2, 1):
            for ahead in range(MOST_AHEAD, 0, -1) if self.roll else (0,):
                for piece in pieces:
                    found = buffers, ahead, piece
                    if self._bytes(*found) <= self.aimed_bytes:
                        return found
        return found

    @property
    def aimed_bytes(self) -> int:
        """Shared memory of which an SM has enough for the tile's blocks."""
        return AIMED_SHARED // self.tile.blocks - RESERVED_SHARED

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self._bytes(*self._memory)

    def _bytes(self, buffers: int, rows_ahead: int, blank_elements: int) -> int:
        teams = self.tile.warps // self.team_warps
        floats = buffers * teams * min(8, self.unit_channels) * self.output_pitch
        stages = 1 if self.roll else 2
        floats += stages * self.depth * self._patch_channel(rows_ahead) + self.weights
        floats += SECTOR * (self.tile_channels if self.tile.bulk else 1)
        floats += max(SECTOR, blank_elements * (self.tile_channels if self.problem.bias else 1))
        return 4 * floats + POSITIONS_BYTES + WALK_BYTES

    @property
    def tiles_yx(self) -> tuple[int, int]:
        """Tiles along y and x."""
        return (
            -(-len(self.problem.height.q_range) // self.tile_rows),
            -(-len(self.problem.width.q_range) // self.tile_columns),
        )

    @property
    def tiles(self) -> int:
        """Tiles of the launch."""
        tiles_y, tiles_x = self.tiles_yx
        return self.group_tiles * self.problem.batch * tiles_y * tiles_x

    @property
    def rows(self) -> int:
        """Rows of tiles in all images, each of all group tiles."""
        return self.tiles // self.group_tiles

    @property
    def hands_out(self) -> bool:
        """Whether walks take the last rows from a count, as they get there."""
        return self.tile.bulk and self.rows >= LEAST_HANDED_OUT

    def blocks(self, target: Target) -> int:
        """Blocks that an SM holds."""
        bound = bound_blocks(self.problem, self.tile)
        return max(1, image_tiles.blocks_held(self.shared_bytes, bound, target))

    @property
    def source_vectors(self) -> bool:
        """Whether the input is copied by 16 bytes."""
        return image_tiles.source_vectors(self.problem)

    @property
    def store_vector(self) -> int:
        """Floats of the widest store that every output row is aligned for."""
        return image_tiles.store_vector(self.problem)


@functools.lru_cache(maxsize=1024)
def output_pitch(used: int, stride: int, is_channel: bool) -> int:
    """The pitch, from `used` elements on, whose stores meet in the fewest banks.

    Where lanes of a fragment hold 8 channels (`is_channel`), lane 4*c + p writes element p*stride
    of row c.
    """
    first = -(-used // 4) * 4
    if not is_channel:
        return first

    def conflicts(pitch: int) -> int:
        banks = [(c * pitch + p * stride) % 32 for c in range(8) for p in range(4)]
        return max(map(banks.count, banks))

    return min(range(first, first + 32, 4), key=lambda pitch: (conflicts(pitch), pitch))


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    y, x = taps_of(problem.height), taps_of(problem.width)
    whole = -(-problem.in_channels_per_group // 8) * 8
    depth = whole if tile.rounds > 1 else min(whole, MOST_DEPTH)
    laid = Layout(problem, tile, y, x, depth, 1)
    rows = -(-len(problem.height.q_range) // laid.warp_rows)
    row_groups = max(1, min(rows, tile.warps * tile.rounds // laid.units))
    while True:
        laid = Layout(problem, tile, y, x, depth, row_groups)
        if laid.shared_bytes <= laid.aimed_bytes or depth == 8:
            return laid
        depth = -(-depth // 16) * 8


def bound_blocks(problem: Problem, tile: Tile) -> int:
    """The launch bound: 64-bit offsets take registers of one block, and so do split products that
    are unrolled over slots.
    """
    unrolled = tile.split and layout(problem, tile).unit_phases > 1
    return max(1, tile.blocks - problem.wide_offsets - unrolled)


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
    if tile.split != (problem.math == "ieee"):
        served = "strict float32" if tile.split else "TF32"
        return f"multiplies {served}, the layer's math is {problem.math}"
    laid = layout(problem, tile)
    if tile.split and laid.meets_zeros:
        return (
            "phases with and without a tap share a product, "
            "where strict float32 keeps infinities from those without"
        )
    refusal = bulk_why_not(laid, target) if tile.bulk else None
    if refusal is not None:
        return refusal
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


def bulk_why_not(laid: Layout, target: Target) -> str | None:
    """One sentence if blocks cannot walk down the rows, else None."""
    if target.capability < (9, 0):
        return f"writes by bulk copies, which sm_90 brought, the target is {target.arch}"
    if laid.tile.warps != laid.team_warps or laid.row_groups > 1 or laid.tiles_yx[1] > 1:
        return (
            f"all warps of a block write each row: {laid.team_warps} of {laid.tile.warps} do, "
            f"of {laid.row_groups} rows at a time and {laid.tiles_yx[1]} tiles a row"
        )
    if laid.group_tiles > MOST_WALKING:
        return (
            f"blocks are a multiple of the tiles that share their pixels, "
            f"{MOST_WALKING} at most, not {laid.group_tiles}"
        )
    return None


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: what the busiest SM issues, multiplies or waits for, and the bytes.

    They overlap, but never wholly: a fifth of the lesser is added.
    """
    if tile.team:
        return team_cost(problem, target, tile)
    laid = layout(problem, tile)
    busy, uneven = busy_and_uneven(laid, target, tile_work(laid))
    moved = problem.bytes / 4e12 * uneven
    # What the sweeps of 89 layers took beside that, benchmarks/fit_costs.py: inputs are read once
    # for each tile of output channels.
    measured = 0.85 * max(1.0, problem.in_channels_per_group / 64) ** 0.25
    if problem.out_channels_per_group > 8:
        channel_tiles = -(-problem.out_channels_per_group // laid.tile_channels)
        measured = 0.62 * problem.in_channels_per_group**0.18 * channel_tiles**0.35
        # Two rounds pay where there is work for many.
        few = laid.tiles < 8 * target.multiprocessors
        measured *= 1.1 if tile.rounds == 1 else 1.3 if few else 0.85
        if laid.tiles < 2 * target.multiprocessors and problem.in_channels_per_group > 64:
            measured *= 1.5  # many steps one after another, and few tiles beside each other
    launch = 10e-6 if problem.width.output_size % 4 == 0 else 7e-6
    return 0.95 * measured * (max(busy, moved) + min(busy, moved) / 5) + launch


def busy_and_uneven(
    laid: Layout, target: Target, work: tuple[float, float, float]
) -> tuple[float, float]:
    """Seconds that the busiest SM works on its tiles, and how much longer bytes take to move.

    Args:
        laid: the tile.
        target: the GPU.
        work: of a tile: instructions, cycles of shared memory, and of the tensor cores, of an SM.
    """
    issue, shared, multiply = work
    blocks = laid.blocks(target)
    rounds = laid.tiles / grid(laid.problem, target, laid.tile)
    tiles = min(-(-laid.tiles // target.multiprocessors), math.ceil(rounds) * blocks)
    resident = min(tiles, blocks) * laid.tile.warps
    # Of the issue slots: few warps leave more of them empty.
    efficiency = min(0.8, 0.35 + 0.03 * resident)
    busiest = max(issue / 4, shared, multiply)
    rest = issue / 4 + shared + multiply - busiest
    busy = tiles * (busiest / efficiency + 0.15 * rest) / 1.7e9
    # While some blocks walk one tile more than others, or all of an SM's wait, less is moved.
    return busy, 1 + 0.3 * (math.ceil(rounds) / rounds - 1) + 0.1 * 4 / resident


def team_cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of a tile whose warps write together: as above, from counted instructions.

    The figure of tiles that write by bulk copies is fitted to two layers, those of the last line to
    the sweeps: off by 11% in the root mean square of 88 rows of 39 layers. Whole rows that begin
    between sectors took 1.2 to 1.6 times what as many bytes on whole sectors do, where they were
    all that a kernel wrote.
    """
    laid = layout(problem, tile)
    issue, shared, products = team_work(laid)
    # Multiply-adds of an SM in a cycle: by data sheets, but on Hopper, where mma.sync has 60%.
    rate = 512 if target.capability == (8, 0) else 614 if target.major in (9, 10) else 128
    busy, uneven = busy_and_uneven(laid, target, (issue, shared, products * 1024 / rate))
    if tile.bulk:
        uneven *= 1.08  # kb75 and kb81: device memory reads inputs between its writes
    elif problem.width.output_size % 4:
        uneven *= 1.15 if laid.tiles_yx[1] == 1 else 1.3
    moved = problem.bytes / 4e12 * uneven
    # Weights of blocks that begin at the same time, 4 bytes at a time.
    blocks = min(laid.blocks(target), -(-laid.tiles // target.multiprocessors))
    weights = blocks * problem.taps * problem.in_channels_per_group * laid.tile_channels
    busy *= 1.05
    return max(busy, moved) + 0.15 * min(busy, moved) + 0.45e-9 * weights + 4.9e-6


def team_work(laid: Layout) -> tuple[float, float, float]:
    """Of one tile whose warps write together: instructions, cycles of shared memory, and `mma`.

    Counted in the code for sm_90: a split takes 5 instructions, a product of 8 channels 3 `mma` and
    4 additions, a vector of an output row 4, or 5 where no tap reaches it. Since the rows that this
    was fitted to a product has two `mma` as long as those and two half as long, a split half an
    instruction more, and a fragment of weights three loads for two.
    """
    problem, tile = laid.problem, laid.tile
    steps = laid.units * laid.steps_8
    products = steps * laid.products
    reads = steps * laid.loads * laid.fragments * 2
    weights = steps * laid.slot_products * (2 if tile.split else 1)
    if tile.split:
        issue = 7 * products + 6 * reads + weights + 20 * steps * laid.loads + 70 * laid.units
    else:
        issue = products + (2 if laid.round_on_load else 1) * reads + weights
        issue += 12 * steps + 70 * laid.units

    vector = 4 if laid.source_vectors else 1
    copies = laid.steps_8 * 8 * laid.patch_rows * laid.patch_vectors * 4 / vector / 32
    issue += 5 * copies + laid.chunks * tile.warps * 180

    rows = laid.tile_rows * laid.tile_channels
    elements = rows * laid.tile_columns * problem.width.stride / 32
    used = len(laid.y.used)
    passes = laid.units * laid.unit_phases * (laid.unit_channels // 16 + 1)
    issue += 1.2 * elements * used + 45 * passes
    issue += used * (4 * elements / laid.store_vector + 20 * rows)
    issue += (problem.height.stride - used) * (5 * elements / laid.store_vector + 20 * rows)
    shared = reads + 4 * weights + copies * vector + 2 * elements * used
    return issue, shared, (3 if tile.split else 1) * products


def tile_work(laid: Layout) -> tuple[float, float, float]:
    """Of one tile: instructions, cycles of shared memory, and of the tensor cores, of an SM."""
    problem = laid.problem
    stride_y, stride_x = problem.height.stride, problem.width.stride
    products = laid.units * laid.steps_8 * laid.products
    reads = laid.units * laid.steps_8 * 2 * laid.loads * laid.fragments
    weights = laid.units * laid.steps_8 * laid.slot_products * laid.warp_rows
    issue = products + reads * (2 if laid.round_on_load else 1) + weights
    issue += 12 * laid.units * laid.steps_8
    shared = reads + 4 * weights

    vector = 4 if laid.source_vectors else 1
    copies = laid.steps_8 * 8 * laid.patch_rows * laid.patch_vectors * 4 / vector / 32
    issue += 5 * copies + laid.chunks * laid.tile.warps * 80
    shared += copies * vector
    if not laid.round_on_load:
        issue += copies * (4 + vector)
        shared += 2 * copies * vector

    # Registers to shared memory, from there to vectors, and those to the output.
    rows = laid.tile_rows * laid.tile_channels
    elements = rows * laid.tile_columns * stride_x / 32
    gathered = elements * len(laid.y.used)
    passes = laid.units * laid.warp_rows * laid.unit_phases * (laid.unit_channels // 16 + 1)
    pieces = rows * laid.parts * len(laid.y.used)
    issue += 1.5 * gathered + gathered / laid.store_vector * 3 + 12 * pieces + 60 * passes
    shared += 3 * gathered
    empty = stride_y - len(laid.y.used)
    issue += empty * (elements / laid.store_vector * 3 + 12 * rows)
    return issue, shared, products * 1024 / (0.6 * 1024)


def source(problem: Problem, tile: Tile) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    laid = layout(problem, tile)
    y, x = laid.y, laid.x
    height, width = problem.height, problem.width
    index = family.index_type(problem, laid.tiles)
    empty_y = tuple(phase for phase in range(height.stride) if phase not in y.used)
    empty_x = tuple(phase for phase in range(width.stride) if phase not in x.used)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Index", index),
        ("blocks", bound_blocks(problem, tile)),
        ("shared_bytes", laid.shared_bytes),
        ("groups", problem.groups),
        ("in_channels", problem.in_channels_per_group),
        ("out_channels", problem.out_channels_per_group),
        ("bias", problem.bias),
        ("unit_channels", laid.unit_channels),
        ("unit_phases", laid.unit_phases),
        ("phase_groups", laid.phase_groups),
        ("warp_rows", laid.warp_rows),
        ("fragments", laid.fragments),
        ("parts", laid.parts),
        ("channel_blocks", laid.channel_blocks),
        ("row_groups", laid.row_groups),
        ("depth", laid.depth),
        ("slot_fragments", laid.slot_fragments),
        ("round_on_load", laid.round_on_load),
        ("split", tile.split),
        ("team", tile.team),
        ("bulk", tile.bulk),
        ("hands_out", laid.hands_out),
        ("buffers", laid.buffers),
        ("roll", laid.roll),
        ("rows_ahead", laid.rows_ahead),
        ("blank_elements", laid.blank_elements),
        ("source_vectors", laid.source_vectors),
        ("store_vector", laid.store_vector),
        ("output_pitch", laid.output_pitch),
        ("head", laid.head),
        *family.axis_constants(problem),
        ("first_row", laid.first_row),
        ("first_column", laid.first_column),
        ("skew", laid.skew),
        ("patch_vectors", laid.patch_vectors),
        ("first_output_y", -(height.padding % height.stride)),
        ("first_output_x", -(width.padding % width.stride)),
        ("span_y", y.span),
        ("span_x", x.span),
        ("slots_y", len(y.offsets)),
        ("slots_x", len(x.offsets)),
        ("offset_y", y.offsets),
        ("offset_x", x.offsets),
        # Phases that have taps are numbered; those that have none are listed apart.
        ("phases_y", len(y.used)),
        ("phases_x", len(x.used)),
        ("phase_y", y.used),
        ("phase_x", x.used),
        ("empty_y", empty_y or (0,)),
        ("empty_x", empty_x or (0,)),
        ("tap_phase_y", tuple(y.used.index(phase) for phase in y.phases)),
        ("tap_phase_x", tuple(x.used.index(phase) for phase in x.phases)),
        ("tap_slot_y", y.slots),
        ("tap_slot_x", x.slots),
    )
    return KernelSource(
        stem=STEM,
        constants=constants,
        arguments=(
            *image_tiles.argument_fields(index),
            *((("share", index), ("period", "int"), ("counts", "void*")) if laid.hands_out else ()),
        ),
        shared_bytes=laid.shared_bytes,
        threads=tile.threads,
    )


def asking_period(moved: int, rows: float) -> int:
    """About the nanoseconds of a walk's `ASKED_ROWS` of `rows`; all walks move `moved` bytes."""
    return max(1000, int(ASKED_ROWS * moved / (BYTES_PER_NANOSECOND * rows)))


def grid(problem: Problem, target: Target, tile: Tile) -> int:
    """As many blocks as the SMs hold; each walks the tiles from its own on in steps of the grid.

    Where rows leave by bulk copies, each walks down neighbouring ones, and blocks are a multiple of
    the tiles that share their pixels.
    """
    laid = layout(problem, tile)
    return image_tiles.grid(
        target, laid.blocks(target), laid.tiles, laid.group_tiles, whole_groups=tile.bulk
    )


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel, whose blocks walk the tiles; before it a launch that clears the counts of rows
    handed out, the same for all layers, where they are.
    """
    laid = layout(problem, tile)
    blocks = grid(problem, target, tile)
    arguments = image_tiles.arguments(problem, laid.tiles, laid.tiles_yx)
    kernel = Launch(
        "kernel",
        source(problem, tile),
        blocks,
        arguments,
        aligned=True,
        whole_rows=tile.bulk,
    )
    if not laid.hands_out:
        return (kernel,)
    # Tiles and blocks are as many times the rows and the walks.
    arguments["share"] = max(1, SHARE_TENTHS * laid.tiles // (10 * blocks))
    arguments["period"] = asking_period(problem.bytes, laid.tiles / blocks)
    arguments["counts"] = Address("packed")
    clearing = KernelSource(
        stem=CLEAR_STEM,
        constants=(("counts", MOST_WALKING),),
        arguments=(("counts", "void*"),),
        shared_bytes=0,
        threads=32,
    )
    does = "clears the counts of rows handed out"
    counts: dict[str, Argument] = {"counts": Address("packed")}
    return Launch("packing", clearing, 1, counts, does, packed=MOST_WALKING), kernel
