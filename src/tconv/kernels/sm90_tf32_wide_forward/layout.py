"""The geometry of a tile of `sm90_tf32_wide_forward` over a problem."""

from __future__ import annotations

import functools
from dataclasses import dataclass

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
"""A word has a bit for each phase, which says whether its outputs exist."""

MOST_LANE_COPIES = 24
"""Copies of a lane for one channel, at most: their offsets are in registers."""

LAUNCHED_REGISTERS = 168
"""Registers of a thread of each of the three warpgroups at launch, before setmaxnreg."""

MOST_PIXEL_STAGES = 6
MOST_WEIGHT_STAGES = 8

SHARED_BESIDE_L1 = 195 << 10
"""Bytes of shared memory beside which an SM has 60 KiB of L1, through which outputs leave, and not
28: unet_shallow with three stages of each 0.124 ms so, 0.127 with more."""

AIMED_PIXEL_STAGES = (4, 3)

AIMED_WEIGHT_STAGES = (3, 4)
"""Within that, the first that fit: of weights as many as a chunk has slots, or the nearest. More
take longer: unet_shallow, with one slot, 0.119 ms with (4, 3), 0.123 with (3, 3), 0.125 with
(3, 4), 0.127 with (3, 5). random39, with four, 0.015 with (4, 4), 0.017 with (4, 3) or the most
that fit.
"""

PACK_WEIGHTS = 320
"""Weights of one input channel that the packing takes at a time, if a channel's taps are fewer."""

LEAST_PACK_ITEMS = 64
"""Pieces that the packing is divided into, if there are as many units of columns: sam_up1 takes
0.0260 ms with 64 and 0.0284 with 8.
"""

Slot = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """A tile laid over a problem.

    Attributes:
        masks: the sets of parts, as bits, that share slots.
        classes: the distinct slots, (shift in y, shift in x), of column tiles, for each mask.
        column_class: the class of each column tile.
    """

    problem: Problem
    tile: Tile
    masks: tuple[int, ...]
    classes: tuple[tuple[tuple[Slot, ...], ...], ...]
    column_class: tuple[int, ...]

    @property
    def low_phases(self) -> int:
        """Phases in x that are neighbouring columns."""
        return _low_phases(self.problem, self.tile)

    @property
    def parts(self) -> int:
        """Groups of phases in x, each with columns of its own."""
        return self.problem.width.stride // self.low_phases

    @property
    def part_columns(self) -> int:
        """Columns of a part, the wgmma's N."""
        return _part_columns(self.problem, self.tile)

    @property
    def chunks(self) -> int:
        """Stages of pixels of a tile."""
        return -(-self.problem.in_channels_per_group // CHANNELS)

    @property
    def slots(self) -> int:
        """Stages of weights of a chunk, at most."""
        return max(sum(len(mask) for mask in class_) for class_ in self.classes)

    @functools.cached_property
    def most_slot(self) -> Slot:
        """The largest shift along each axis."""
        slots = [slot for class_ in self.classes for mask in class_ for slot in mask]
        return max((y for y, _ in slots), default=0), max((x for _, x in slots), default=0)

    @property
    def pitch(self) -> int:
        """Positions from one row to the next, in the line of all positions."""
        return hopper.pitch(self.problem.width, self.most_slot[1])

    @property
    def image_positions(self) -> int:
        """Positions from one image to the next, in the line of all positions."""
        return self.pitch * hopper.pitch(self.problem.height, self.most_slot[0])

    @property
    def tile_columns(self) -> int:
        """Pixels of a row of the tile; in the line, all."""
        return self.tile.pixels // self.tile.rows if self.tile.rows else self.tile.pixels

    @property
    def copied(self) -> int:
        """Neighbouring positions that a lane copies at a time."""
        on_vectors = self.problem.x_aligned and self.problem.width.size % 4 == 0
        return 4 if on_vectors and (self.tile.rows or self.pitch % 4 == 0) else 1

    @property
    def skew(self) -> int:
        """Positions ahead of the first that is used, so that copies start on their size."""
        return (self.problem.width.q_range.start - self.most_slot[1]) % self.copied

    @property
    def patch_columns(self) -> int:
        """Positions of a row of a stage, where the tile has rows."""
        columns = self.tile_columns + self.most_slot[1] + self.skew
        return -(-columns // self.copied) * self.copied

    @property
    def patch_positions(self) -> int:
        """Positions of a stage: the tile's, and those that its slots reach back to."""
        y, x = self.most_slot
        if self.tile.rows:
            return (self.tile.rows + y) * self.patch_columns
        # Coarse, so that widths close to each other share a kernel.
        return -(-(self.tile.pixels + y * self.pitch + x + self.skew) // 32) * 32

    @property
    def lane_copies(self) -> int:
        """Copies of a lane for one channel of a stage."""
        return -(-self.patch_positions // (32 * self.copied))

    @property
    def pixel_bytes(self) -> int:
        """Of a stage."""
        return CHANNELS * ((self.patch_positions + 23) // 32 * 32 + 8) * 4

    @property
    def weight_bytes(self) -> int:
        """Of a stage: a slot."""
        return self.parts * self.part_columns * LINE_BYTES

    @functools.cached_property
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
                # More than three stages of pixels only beside six of weights.
                pixels = min(pixels, 3)
                weights = min(6, (free - pixels * self.pixel_bytes) // self.weight_bytes)
                pixels = min(
                    MOST_PIXEL_STAGES, (free - weights * self.weight_bytes) // self.pixel_bytes
                )
                return pixels, min(
                    MOST_WEIGHT_STAGES, (free - pixels * self.pixel_bytes) // self.weight_bytes
                )
        return 0, 0

    @property
    def lead(self) -> int:
        """Slots by which the first consumer is ahead of the second.

        None where a chunk has one slot: unet_shallow takes 1% less so, sam_up1 2%, and random39,
        which has four, 11% more.
        """
        # A chunk has at least a slot, or counts as one.
        return 0 if self.slots == 1 else min(self.stages) - 1

    def registers(self, index: str) -> tuple[int, int]:
        """Of a producer and of a consumer: the first hold an offset for each position."""
        offsets = self.lane_copies * (1 if index == "int" else 2)
        producer = next(count for count in (72, 88, 104) if count >= min(104, 67 + 2 * offsets))
        return producer, (LAUNCHED_REGISTERS * 3 - producer) // 2

    @property
    def block_begin(self) -> tuple[int, ...]:
        """The first block of weights of each column tile among those of a group, for one chunk."""
        begins = [0]
        for class_ in self.column_class:
            begins.append(begins[-1] + self.class_blocks[class_])
        return tuple(begins)

    @functools.cached_property
    def class_blocks(self) -> tuple[int, ...]:
        """Blocks of weights, one for a slot and part, of each class."""
        return tuple(
            sum(
                len(slots) * mask.bit_count()
                for mask, slots in zip(self.masks, class_, strict=True)
            )
            for class_ in self.classes
        )

    @property
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

    @property
    def weight_elements(self) -> int:
        """Packed weights."""
        blocks = self.problem.groups * self.block_begin[-1] * self.chunks
        return blocks * self.part_columns * CHANNELS

    @property
    def pack_channels(self) -> int:
        """Output channels that the packing takes at a time."""
        unit = UNIT // self.low_phases
        channels = max(1, min(PACK_WEIGHTS // self.problem.taps, 64))
        while channels > unit and self._pack_items(channels) < LEAST_PACK_ITEMS:
            channels //= 2
        return channels - channels % min(channels, unit)

    @property
    def pack_items(self) -> int:
        """Pieces that the packing's blocks take."""
        return self._pack_items(self.pack_channels)

    def _pack_items(self, channels: int) -> int:
        parts = -(-self.problem.out_channels_per_group // channels)
        return self.problem.groups * self.chunks * parts

    @property
    def pack_bytes(self) -> int:
        """Shared memory of the packing."""
        return CHANNELS * (self.pack_channels * self.problem.taps | 1) * 4


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
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
    return None


def vector(problem: Problem) -> int:
    """Outputs of one pixel that a thread can write at a time, on a multiple of their size."""
    x = problem.width
    for width in (4, 2):
        if x.stride % width == x.padding % width == x.output_size % width == 0:
            return width
    return 1
