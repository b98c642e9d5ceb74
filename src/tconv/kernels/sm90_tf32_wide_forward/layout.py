"""The geometry of a tile of `sm90_tf32_wide_forward` over a problem."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.sm90_tf32_wide_forward.tiles import PIXELS, Tile
from tconv.problem import Problem

UNIT = 8
"""Columns of a unit in each part."""

CHANNELS = 32
"""Input channels of a stage."""

LINE_BYTES = CHANNELS * 4
MOST_STRIDE = 16

MOST_STRIDE_Y = 32
"""Limit of the stride in y: a word has a bit for each phase, set if its outputs exist."""

LAUNCHED_REGISTERS = 168
"""Registers of a thread of each of the three warpgroups at launch, before setmaxnreg."""

PIXEL_STAGES, WEIGHT_STAGES = 4, 3
"""More stages take longer. Outputs are written through L1.

An SM has 60 KiB of L1 beside at most 195 KiB of shared memory, and 28 beside more. unet_shallow
took 0.119 ms with these, 0.123 with (3, 3), 0.125 with (3, 4), and 0.127 with (3, 5).
"""

PACK_WEIGHTS = 320
"""Weights of one input channel that the packing takes at a time, if a channel's taps are fewer."""

LEAST_PACK_ITEMS = 64
"""Least number of pieces of the packing, if there are as many units of columns.

sam_up1 takes 0.0260 ms with 64 and 0.0284 ms with 8.
"""


@dataclass(frozen=True)
class Layout:
    """A tile laid over a problem.

    Attributes:
        problem: the call's.
        tile: the tile.
        remembered: what all sizes of a kernel share (`family.of_kernel`, `family.once`).
    """

    problem: Problem
    tile: Tile
    remembered: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @family.of_kernel
    def low_phases(self) -> int:
        """Phases in x that are adjacent columns."""
        return 2 if self.problem.width.stride % 2 == 0 else 1

    @family.of_kernel
    def parts(self) -> int:
        """Parts: groups of phases in x, each with its own columns."""
        return self.problem.width.stride // self.low_phases

    @family.of_kernel
    def part_columns(self) -> int:
        """Columns of a part, the wgmma's N."""
        return self.tile.columns // self.parts // UNIT * UNIT

    @family.of_kernel
    def chunks(self) -> int:
        """Stages of a tile."""
        return -(-self.problem.in_channels_per_group // CHANNELS)

    @family.of_kernel
    def column_tiles(self) -> int:
        """Tiles along the columns."""
        phase_units = -(-self.problem.out_channels_per_group // (UNIT // self.low_phases))
        return -(-self.problem.height.stride * phase_units // (self.part_columns // UNIT))

    @family.of_kernel
    def copied(self) -> int:
        """Adjacent pixels that a lane copies at a time, in the kernel for this problem."""
        return _most_copied(self.problem.pattern)

    @family.of_kernel
    def lane_copies(self) -> int:
        """Copies of a lane for one channel of a stage."""
        return PIXELS // (32 * self.copied)

    @family.of_kernel
    def pixel_bytes(self) -> int:
        """Bytes of a stage of pixels. Channels lie 8 banks apart."""
        return CHANNELS * (PIXELS + 8) * 4

    @family.of_kernel
    def weight_bytes(self) -> int:
        """Bytes of a stage of weights."""
        return self.parts * self.part_columns * LINE_BYTES

    def registers(self, index: str) -> tuple[int, int]:
        """Registers of a producer's and of a consumer's thread.

        A producer holds an offset for each position that it copies.
        """
        offsets = self.lane_copies * (1 if index == "int" else 2)
        producer = next(count for count in (72, 88, 104) if count >= min(104, 67 + 2 * offsets))
        return producer, (LAUNCHED_REGISTERS * 3 - producer) // 2

    @functools.cached_property
    def row_pixels(self) -> int:
        """Pixels of a row that have outputs. The line of pixels has these rows one by one."""
        return len(self.problem.width.q_range)

    @functools.cached_property
    def image_pixels(self) -> int:
        """Pixels of an image that have outputs."""
        return len(self.problem.height.q_range) * self.row_pixels

    @property
    def tiles(self) -> int:
        """Tiles of the launch."""
        pixel_tiles = -(-self.problem.batch * self.image_pixels // PIXELS)
        return pixel_tiles * self.problem.groups * self.column_tiles

    @family.of_kernel
    def weight_elements(self) -> int:
        """Number of packed weights."""
        stages = self.problem.groups * self.column_tiles * self.chunks
        return stages * self.weight_bytes // 4

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
    return Layout(problem, tile)


def _most_copied(problem: Problem) -> int:
    """Pixels of a row that start on 16 bytes, and are all inside the image or all beyond it."""
    x = problem.width
    on_vectors = x.size % 4 == x.q_range.start % 4 == len(x.q_range) % 4 == 0
    return 4 if problem.rows_aligned and on_vectors else 1


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    refusal = hopper.tf32_why_not(problem, target)
    if refusal is not None:
        return refusal
    for name, axis in (("height", problem.height), ("width", problem.width)):
        if axis.kernel != axis.stride or (axis.kernel > 1 and axis.dilation > 1):
            return (
                f"is for kernels that are the stride, without dilation; along {name} "
                f"the kernel is {axis.kernel}, the stride {axis.stride}, "
                f"the dilation {axis.dilation}"
            )
    if problem.width.stride > MOST_STRIDE:
        return f"a thread writes {MOST_STRIDE} phases in x, the stride is {problem.width.stride}"
    if problem.height.stride > MOST_STRIDE_Y:
        return f"tells {MOST_STRIDE_Y} phases in y apart, the stride is {problem.height.stride}"
    return family.phases_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    laid = layout(problem, tile)
    if laid.part_columns == 0:
        return f"{tile.columns} columns are too few for {problem.width.stride} phases in x"
    if _most_copied(problem) % laid.copied:
        return f"copies {laid.copied} pixels at a time, rows allow {_most_copied(problem)}"
    pixels = problem.batch * laid.image_pixels
    if laid.tiles > family.MAX_GRID or pixels > family.MAX_GRID - PIXELS:
        return f"{laid.tiles} tiles of {pixels} pixels are over 32 bits"
    return None


def vector(problem: Problem) -> int:
    """Outputs of one pixel that a thread writes at a time, aligned to their size."""
    x, outputs = problem.width, problem.pattern.width.output_size
    for width in (4, 2):
        if x.stride % width == x.padding % width == outputs % width == 0:
            return width
    return 1
