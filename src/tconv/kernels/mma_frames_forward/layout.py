"""The tiles of `mma_frames_forward`, and how a tile lies over a problem."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import family, image_tiles
from tconv.problem import Problem

THREADS = 256
PHASES = 64
"""Phases of a tile."""

DEPTH = 16
"""Input channels of a stage."""

STAGES = 3

LEAST_STRIDE = 17
"""Least stride in x. Other kernels interleave up to 16 phases in a warp."""

MOST_SLOTS = 8
"""Most shifts, over which products are unrolled."""


@dataclass(frozen=True)
class Tile:
    """What a block computes: 64 phases of one output channel.

    Attributes:
        pixels: input columns (frames) that the phases are of, a multiple of 16.
    """

    pixels: int

    def __str__(self) -> str:
        """Phases x pixels."""
        return f"{PHASES}x{self.pixels}"


TILES = (Tile(pixels=64), Tile(pixels=32))


@dataclass(frozen=True)
class Layout:
    """A tile laid over a problem."""

    problem: Problem
    tile: Tile

    @property
    def slots(self) -> int:
        """Input columns that an output reads: shifts 0 and on."""
        return len(self.problem.width.shifts)

    @property
    def source_pitch(self) -> int:
        """Floats from a staged channel's columns to the next's: 8 more than a multiple of 16."""
        columns = self.tile.pixels + self.slots - 1
        return columns + (24 - columns % 16) % 16

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return STAGES * DEPTH * 4 * (self.slots * (PHASES + 8) + self.source_pitch)

    @property
    def row_tiles(self) -> int:
        """Tiles that share their pixels."""
        channels = self.problem.out_channels_per_group
        return self.problem.groups * channels * -(-self.problem.width.stride // PHASES)

    @property
    def tiles_x(self) -> int:
        """Tiles along x."""
        return -(-len(self.problem.width.q_range) // self.tile.pixels)

    @property
    def tiles(self) -> int:
        """Tiles of the launch."""
        return self.row_tiles * self.problem.batch * self.problem.height.size * self.tiles_x

    def blocks(self, target: Target) -> int:
        """Blocks that an SM holds."""
        return max(1, image_tiles.blocks_held(self.shared_bytes, 2, target))


layout = functools.lru_cache(maxsize=family.TILES_REMEMBERED)(Layout)


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    refusal = image_tiles.mma_why_not(problem, target)
    if refusal is not None:
        return refusal
    y, x = problem.height, problem.width
    if (y.kernel, y.stride, y.output_size) != (1, 1, y.size):
        return f"takes rows one by one, the kernel's height is {y.kernel}, its stride {y.stride}"
    if x.stride < LEAST_STRIDE:
        return f"is for strides in x from {LEAST_STRIDE} on, the stride is {x.stride}"
    if x.dilation > 1:
        return f"takes neighbouring taps, the dilation in x is {x.dilation}"
    if len(x.shifts) > MOST_SLOTS:
        return f"unrolls over {MOST_SLOTS} shifts at most, there are {len(x.shifts)}"
    return family.phases_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    return image_tiles.shared_why_not(layout(problem, tile).shared_bytes, target)
