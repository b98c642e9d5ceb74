"""The geometry of a tile of `sm90_tf32_wide_forward` over a problem."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.sm90_tf32_wide_forward.tiles import Tile
from tconv.problem import Problem

UNIT = 8
"""Columns of a unit in each part."""

CHANNELS = 32
"""Input channels of a stage."""

LINE_BYTES = CHANNELS * 4
MOST_STRIDE = 16

MOST_STRIDE_Y = 32
"""Limit of the stride in y: a word has a bit for each phase, set if its outputs exist."""

MOST_LANE_COPIES = 24
"""Most copies of a lane for one channel. Their offsets are in registers."""

LAUNCHED_REGISTERS = 168
"""Registers of a thread of each of the three warpgroups at launch, before setmaxnreg."""

MOST_PIXEL_STAGES = 6
MOST_WEIGHT_STAGES = 8

SHARED_BESIDE_L1 = 195 << 10
"""Most bytes of shared memory with which an SM has 60 KiB of L1 cache, and not 28.

Outputs are written through L1. unet_shallow took 0.124 ms with three stages of each kind, within
this limit, and 0.127 ms with more.
"""

AIMED_PIXEL_STAGES = (4, 3)

AIMED_WEIGHT_STAGES = (3, 4)
"""Least and most stages of weights within `SHARED_BESIDE_L1`.

There are as many as a chunk has slots, or the nearest of these numbers. Pixels have the first of
`AIMED_PIXEL_STAGES` that fits. More stages take longer. Times with (stages of pixels, of weights):

- unet_shallow, one slot: 0.119 ms with (4, 3), 0.123 with (3, 3), 0.125 with (3, 4), 0.127 with
  (3, 5).
- random39, four slots: 0.015 ms with (4, 4), 0.017 with (4, 3) or the most that fit.
"""

PACK_WEIGHTS = 320
"""Weights of one input channel that the packing takes at a time, if a channel's taps are fewer."""

LEAST_PACK_ITEMS = 64
"""Least number of pieces of the packing, if there are as many units of columns.

sam_up1 takes 0.0260 ms with 64 and 0.0284 ms with 8.
"""

Slot = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """A tile laid over a problem.

    Attributes:
        masks: the sets of parts that share slots, as bit masks.
        classes: for each mask, the distinct lists of slots (shift in y, shift in x) of column
            tiles.
        column_class: the class of each column tile.
        remembered: what all sizes of a kernel share (`family.of_kernel`, `family.once`).
    """

    problem: Problem
    tile: Tile
    masks: tuple[int, ...]
    classes: tuple[tuple[tuple[Slot, ...], ...], ...]
    column_class: tuple[int, ...]
    remembered: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @family.of_kernel
    def low_phases(self) -> int:
        """Phases in x that are adjacent columns."""
        return _low_phases(self.problem, self.tile)

    @family.of_kernel
    def parts(self) -> int:
        """Parts: groups of phases in x, each with its own columns."""
        return self.problem.width.stride // self.low_phases

    @family.of_kernel
    def part_columns(self) -> int:
        """Columns of a part, the wgmma's N."""
        return _part_columns(self.problem, self.tile)

    @family.of_kernel
    def chunks(self) -> int:
        """Stages of pixels of a tile."""
        return -(-self.problem.in_channels_per_group // CHANNELS)

    @family.of_kernel
    def slots(self) -> int:
        """Stages of weights of a chunk, at most."""
        return max(sum(len(mask) for mask in class_) for class_ in self.classes)

    @family.of_kernel
    def most_slot(self) -> Slot:
        """The largest shift along each axis."""
        slots = [slot for class_ in self.classes for mask in class_ for slot in mask]
        return max((y for y, _ in slots), default=0), max((x for _, x in slots), default=0)

    @functools.cached_property
    def model(self) -> Layout:
        """The tile over the problem that the kernel's constants are for."""
        pattern = self.problem.pattern
        return self if pattern is self.problem else layout(pattern, self.tile)

    @functools.cached_property
    def pitch(self) -> int:
        """Positions from one row to the next, in the line of all positions."""
        return hopper.pitch(self.problem.width, self.most_slot[1])

    @functools.cached_property
    def image_positions(self) -> int:
        """Positions from one image to the next, in the line of all positions."""
        return self.pitch * hopper.pitch(self.problem.height, self.most_slot[0])

    @family.of_kernel
    def tile_columns(self) -> int:
        """Pixels of a row of the tile; all its pixels if it is a piece of the line."""
        return self.tile.pixels // self.tile.rows if self.tile.rows else self.tile.pixels

    @family.of_kernel
    def copied(self) -> int:
        """Adjacent positions that a lane copies at a time."""
        return self.model.most_copied

    @property
    def most_copied(self) -> int:
        """`copied`, if the kernel is for this problem."""
        on_vectors = self.problem.rows_aligned and self.problem.width.size % 4 == 0
        return 4 if on_vectors and (self.tile.rows or self.pitch % 4 == 0) else 1

    @family.of_kernel
    def skew(self) -> int:
        """Positions copied before the first used one, so that copies are aligned to their size."""
        return (self.problem.width.q_range.start - self.most_slot[1]) % self.copied

    @family.of_kernel
    def patch_columns(self) -> int:
        """Positions of a row of a stage, if the tile has rows."""
        columns = self.tile_columns + self.most_slot[1] + self.skew
        return -(-columns // self.copied) * self.copied

    @family.of_kernel
    def patch_positions(self) -> int:
        """Positions of a stage: the tile's, and those that its slots reach back to."""
        y, x = self.most_slot
        if self.tile.rows:
            return (self.tile.rows + y) * self.patch_columns
        # Rounded up, so that close widths share a kernel.
        return -(-(self.tile.pixels + y * self.model.pitch + x + self.skew) // 32) * 32

    @family.of_kernel
    def lane_copies(self) -> int:
        """Copies of a lane for one channel of a stage."""
        return -(-self.patch_positions // (32 * self.copied))

    @family.of_kernel
    def pixel_bytes(self) -> int:
        """Bytes of a stage of pixels."""
        return CHANNELS * ((self.patch_positions + 23) // 32 * 32 + 8) * 4

    @family.of_kernel
    def weight_bytes(self) -> int:
        """Bytes of a stage of weights, which is one slot."""
        return self.parts * self.part_columns * LINE_BYTES

    @family.of_kernel
    def stages(self) -> tuple[int, int]:
        """Stages of pixels and of weights; (0, 0) where they do not fit."""
        least, most = AIMED_WEIGHT_STAGES
        weights = max(least, min(self.slots, most))
        for pixels in AIMED_PIXEL_STAGES:
            if pixels * self.pixel_bytes + weights * self.weight_bytes <= SHARED_BESIDE_L1 - 2048:
                return pixels, weights
        free = hopper.TARGET.shared_per_block - 2048
        for weights in (4, 3, 2):
            pixels = (free - weights * self.weight_bytes) // self.pixel_bytes
            if pixels >= 2:
                # Pixels get a fourth stage only if weights have six.
                pixels = min(pixels, 3)
                weights = min(6, (free - pixels * self.pixel_bytes) // self.weight_bytes)
                pixels = min(
                    MOST_PIXEL_STAGES, (free - weights * self.weight_bytes) // self.pixel_bytes
                )
                return pixels, min(
                    MOST_WEIGHT_STAGES, (free - pixels * self.pixel_bytes) // self.weight_bytes
                )
        return 0, 0

    @family.of_kernel
    def lead(self) -> int:
        """Slots by which the first consumer is ahead of the second.

        The lead is 0 where a chunk has one slot: unet_shallow then takes 1% less time, sam_up1 2%.
        Without a lead, random39, whose chunks have four slots, takes 11% more.
        """
        # A chunk without slots counts as one slot.
        return 0 if self.slots == 1 else min(self.stages) - 1

    def registers(self, index: str) -> tuple[int, int]:
        """Registers of a producer's and of a consumer's thread.

        A producer holds an offset for each position that it copies.
        """
        offsets = self.lane_copies * (1 if index == "int" else 2)
        producer = next(count for count in (72, 88, 104) if count >= min(104, 67 + 2 * offsets))
        return producer, (LAUNCHED_REGISTERS * 3 - producer) // 2

    @family.of_kernel
    def block_begin(self) -> tuple[int, ...]:
        """Index of the first block of weights of each column tile, within a group and a chunk."""
        begins = [0]
        for class_ in self.column_class:
            begins.append(begins[-1] + self.class_blocks[class_])
        return tuple(begins)

    @family.of_kernel
    def class_blocks(self) -> tuple[int, ...]:
        """Blocks of weights of each class: one for each slot and part."""
        return tuple(
            sum(
                len(slots) * mask.bit_count()
                for mask, slots in zip(self.masks, class_, strict=True)
            )
            for class_ in self.classes
        )

    @functools.cached_property
    def pixel_tile_counts(self) -> tuple[int, int, int]:
        """Tiles of pixels: of an image along x and y, and of all; in the line, (1, 1, all)."""
        y, x = self.problem.height.q_range, self.problem.width.q_range
        if self.tile.rows:
            tiles_x, tiles_y = -(-len(x) // self.tile_columns), -(-len(y) // self.tile.rows)
            return tiles_x, tiles_y, tiles_x * tiles_y * self.problem.batch
        # Behind the last image's last output there is nothing to compute.
        unused = self.image_positions - (len(y) - 1) * self.pitch - len(x)
        positions = self.problem.batch * self.image_positions - unused
        return 1, 1, -(-positions // self.tile.pixels)

    @property
    def tiles(self) -> int:
        """Tiles of the launch."""
        return self.pixel_tile_counts[2] * self.problem.groups * len(self.column_class)

    @family.of_kernel
    def weight_elements(self) -> int:
        """Number of packed weights."""
        blocks = self.problem.groups * self.block_begin[-1] * self.chunks
        return blocks * self.part_columns * CHANNELS

    @family.of_kernel
    def pack_channels(self) -> int:
        """Output channels that the packing takes at a time."""
        unit = UNIT // self.low_phases
        channels = max(1, min(PACK_WEIGHTS // self.problem.taps, 64))
        while channels > unit and self._pack_items(channels) < LEAST_PACK_ITEMS:
            channels //= 2
        return channels - channels % min(channels, unit)

    @family.of_kernel
    def pack_items(self) -> int:
        """Pieces that the packing's blocks take."""
        return self._pack_items(self.pack_channels)

    def _pack_items(self, channels: int) -> int:
        parts = -(-self.problem.out_channels_per_group // channels)
        return self.problem.groups * self.chunks * parts

    @family.of_kernel
    def pack_bytes(self) -> int:
        """Shared memory of the packing."""
        return CHANNELS * (self.pack_channels * self.problem.taps | 1) * 4


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    if problem.like is not None:
        return family.over(layout(problem.like, tile), problem)
    y, x = problem.height, problem.width
    low = _low_phases(problem, tile)
    in_y = [{tap.shift for tap in phase.taps} for phase in y.phases]
    in_x = [{tap.shift for tap in phase.taps} for phase in x.phases]
    in_part = [set().union(*in_x[first : first + low]) for first in range(0, x.stride, low)]
    # Which parts have a tap at each shift in x.
    part_mask = {
        shift: sum(1 << part for part, shifts in enumerate(in_part) if shift in shifts)
        for shift in set().union(*in_part)
    }
    masks = tuple(sorted(set(part_mask.values()))) or (1,)
    phase_units = -(-problem.out_channels_per_group // (UNIT // low))
    part_units = _part_columns(problem, tile) // UNIT
    units = y.stride * phase_units
    classes: dict[tuple[tuple[Slot, ...], ...], int] = {}
    column_class = []
    for first in range(0, units, part_units):
        last = min(first + part_units, units)
        phases = {unit // phase_units for unit in range(first, last)}
        slots_y = set().union(*(in_y[phase] for phase in phases))
        slots = tuple(
            tuple(
                (slot_y, slot_x)
                for slot_y in sorted(slots_y)
                for slot_x in sorted(part_mask)
                if part_mask[slot_x] == mask
            )
            for mask in masks
        )
        column_class.append(classes.setdefault(slots, len(classes)))
    return Layout(problem, tile, masks, tuple(classes), tuple(column_class))


def _low_phases(problem: Problem, tile: Tile) -> int:
    return 2 if problem.width.stride % 2 == 0 and not tile.apart else 1


def _part_columns(problem: Problem, tile: Tile) -> int:
    return tile.columns // (problem.width.stride // _low_phases(problem, tile)) // UNIT * UNIT


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    refusal = hopper.tf32_why_not(problem, target)
    if refusal is not None:
        return refusal
    if problem.width.stride > MOST_STRIDE:
        return f"a thread writes {MOST_STRIDE} phases in x, the stride is {problem.width.stride}"
    if problem.height.stride > MOST_STRIDE_Y:
        return f"tells {MOST_STRIDE_Y} phases in y apart, the stride is {problem.height.stride}"
    return family.phases_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    x = problem.width
    if tile.apart and (refusal := hopper.apart_why_not(problem)):
        return refusal
    if _part_columns(problem, tile) == 0:
        return f"{tile.columns} columns are too few for {x.stride} phases in x"
    laid = layout(problem, tile)
    if not tile.rows and (laid.pitch > laid.model.pitch or laid.most_copied % laid.copied):
        return f"stages are for rows of {laid.model.pitch} positions, the image has {laid.pitch}"
    if laid.pack_bytes > target.shared_per_block:
        return f"the packing has no room for {problem.taps} taps"
    if laid.lane_copies > MOST_LANE_COPIES:
        return (
            f"a lane makes {MOST_LANE_COPIES} copies of a channel, "
            f"{laid.patch_positions} positions need {laid.lane_copies}"
        )
    if laid.stages == (0, 0):
        return f"two stages of {laid.pixel_bytes} bytes do not fit {target.arch} beside the weights"
    if laid.tiles > family.MAX_GRID or problem.batch * laid.image_positions >= 2**31 - 2**12:
        return f"{problem.batch * laid.image_positions} positions are over 32 bits"
    return hopper.apart_in_line_why_not(problem, laid.image_positions)


def vector(problem: Problem) -> int:
    """Outputs of one pixel that a thread writes at a time, aligned to their size."""
    x, outputs = problem.width, problem.pattern.width.output_size
    for width in (4, 2):
        if x.stride % width == x.padding % width == outputs % width == 0:
            return width
    return 1
