"""The tiles of `pointwise_mma_forward`, and how a tile lies over a problem."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import gcd

from tconv.jit.target import Target
from tconv.kernels import family, image_tiles
from tconv.problem import Problem

MOST_CHANNELS = 8
"""Most output channels of a group with a kernel beyond 1x1. Rows of other kernels' products, which
are of output channels, are then mostly padding."""


@dataclass(frozen=True)
class Tile:
    """What a block computes.

    Attributes:
        rows: rows of products, a multiple of 32: taps of output channels.
        pixels: most pixels of x.
        splits: warps that share the input channels of 32 rows.
        blocks: blocks that an SM must hold. This bounds the registers.
        pixel_warps: warps that share the pixels, each a multiple of 8.
        chunk: most input channels that arrive together, a multiple of 8 for each split.
    """

    rows: int
    pixels: int
    splits: int
    blocks: int
    pixel_warps: int
    chunk: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.rows * self.splits * self.pixel_warps

    def __str__(self) -> str:
        """Rows x pixels, and the splits."""
        return f"{self.rows}x{self.pixels}/{self.splits}"


TILES = (
    Tile(rows=64, pixels=80, splits=2, blocks=2, pixel_warps=2, chunk=64),
    Tile(rows=32, pixels=80, splits=2, blocks=5, pixel_warps=2, chunk=48),
    Tile(rows=64, pixels=128, splits=1, blocks=3, pixel_warps=4, chunk=32),
    Tile(rows=32, pixels=128, splits=1, blocks=6, pixel_warps=4, chunk=32),
    Tile(rows=96, pixels=144, splits=2, blocks=1, pixel_warps=2, chunk=32),
    Tile(rows=128, pixels=56, splits=2, blocks=1, pixel_warps=1, chunk=80),
)


@dataclass(frozen=True)
class Layout:
    """A tile laid over a problem."""

    problem: Problem
    target: Target
    tile: Tile

    @property
    def pointwise(self) -> bool:
        """Whether an output has one pixel at most, that of its own place."""
        axes = (self.problem.height, self.problem.width)
        return all(axis.kernel == 1 and not axis.padding for axis in axes)

    @property
    def channels(self) -> int:
        """Output channels of a block."""
        return self.tile.rows // self.problem.taps

    @property
    def dense(self) -> bool:
        """Whether each output has its own pixel, so that a plane is one row."""
        return self.pointwise and self.problem.height.stride == self.problem.width.stride == 1

    @property
    def tile_pixels(self) -> int:
        """Pixels of a block: whole rows, but where a plane is one. 0 where too few are held."""
        height, width = self.problem.height.size, self.problem.width.size
        if not self.pointwise:
            return height * width if height * width <= self.tile.pixels else 0
        most = self.tile.pixels // width
        if self.dense or most == 0:
            return self.tile.pixels if self.dense else 0
        return -(-height // -(-height // most)) * width  # about as many rows in each tile

    @property
    def tiles(self) -> int:
        """Tiles of an image."""
        return -(-self.problem.height.size * self.problem.width.size // self.tile_pixels)

    @property
    def channel_tiles(self) -> int:
        """Tiles of a group's output channels."""
        return -(-self.problem.out_channels_per_group // self.channels)

    @property
    def grid(self) -> int:
        """Blocks of the launch."""
        return self.problem.batch * self.problem.groups * self.tiles * self.channel_tiles

    @property
    def depth(self) -> int:
        """Input channels, with those that fill the last product."""
        return -(-self.problem.in_channels_per_group // 8) * 8

    @property
    def pitch(self) -> int:
        """Floats from a channel's pixels to the next one's."""
        return self.tile.pixels + (8 - self.tile.pixels) % 16

    @property
    def chunk(self) -> int:
        """Input channels that arrive together: at least 8 for each split."""
        unit = 8 * self.tile.splits
        return min(self.tile.chunk, -(-self.depth // unit) * unit)

    @property
    def chunks(self) -> int:
        """Chunks of all input channels."""
        return -(-self.depth // self.chunk)

    @property
    def lies(self) -> bool:
        """Whether weights are in shared memory as in w: as all channels of whole vectors.

        With a multiple of 4 channels, each channel's are vectors anyway.
        """
        depth, channels = self.problem.in_channels_per_group, self.problem.out_channels_per_group
        few = channels <= self.tile.rows and self.problem.taps == 1
        return few and depth % 4 == 0 and channels % 4 != 0

    @property
    def slot_bytes(self) -> int:
        """Shared memory of a chunk's pixels and weights."""
        rows = self.problem.out_channels_per_group if self.lies else self.tile.rows + 8
        return 4 * self.chunk * (self.pitch + rows)

    @property
    def weight_copies(self) -> float:
        """Copies of a channel's weights, from a w that is contiguous and begins on 16 bytes."""
        channels = self.problem.out_channels_per_group
        if self.lies:
            return channels / 4
        vectors = self.problem.taps == 1 and channels % 4 == 0
        return self.tile.rows / 4 if vectors else self.tile.rows

    @property
    def slots(self) -> int:
        """Chunks that shared memory holds: all, or as many as let an SM hold the tile's blocks."""
        of_sm = self.target.shared_per_block + image_tiles.RESERVED_SHARED
        room = of_sm // self.tile.blocks - image_tiles.RESERVED_SHARED
        return min(self.chunks, max(2, room // self.slot_bytes))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: chunks, then sums."""
        sums = 4 * self.pitch * self.tile.splits * self.tile.rows
        return max(self.slots * self.slot_bytes, sums)

    @property
    def source_vector(self) -> int:
        """Pixels of a copy, where a dense x begins on 16 bytes."""
        return gcd(4, self.problem.height.size * self.problem.width.size, self.tile_pixels)

    def blocks(self) -> int:
        """Blocks that an SM holds."""
        return image_tiles.blocks_held(self.shared_bytes, self.tile.blocks, self.target)


layout = functools.lru_cache(maxsize=family.TILES_REMEMBERED)(Layout)


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    refusal = image_tiles.mma_why_not(problem, target)
    if refusal is not None:
        return refusal
    if problem.wide_offsets:
        return "offsets of 64 bits would take registers that sums need"
    if problem.taps == 1 and problem.height.padding == problem.width.padding == 0:
        return image_tiles.pointwise_why_not(problem)
    channels = problem.out_channels_per_group
    if channels > MOST_CHANNELS:
        return f"is for {MOST_CHANNELS} output channels in a group at most, not {channels}"
    return family.coordinates_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    laid = layout(problem, target, tile)
    height, width = problem.height.size, problem.width.size
    if problem.taps > tile.rows:
        return f"a block has all taps of a channel, {tile.rows} at most, not {problem.taps}"
    if laid.tile_pixels == 0:
        whole = f"rows, not of {width}" if laid.pointwise else f"images, not of {height}x{width}"
        return f"a block has {tile.pixels} pixels at most, in whole {whole}"
    if laid.grid > family.MAX_GRID:
        return f"counts {family.MAX_GRID} blocks at most, there are {laid.grid}"
    return image_tiles.shared_why_not(laid.shared_bytes, target)
