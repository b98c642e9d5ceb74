"""The tiles of `pointwise_mma_forward`, and how a tile lies over a problem."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import gcd

from tconv.jit.target import Target
from tconv.kernels import family, image_tiles
from tconv.problem import Problem


@dataclass(frozen=True)
class Tile:
    """What a block computes.

    Attributes:
        channels: output channels, a multiple of 32.
        pixels: most pixels of x, a multiple of 8.
        splits: warps that share the input channels of 32 output channels.
        blocks: blocks that an SM must hold. This bounds the registers.
    """

    channels: int
    pixels: int
    splits: int
    blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.channels * self.splits

    def __str__(self) -> str:
        """Channels x pixels, and the splits."""
        return f"{self.channels}x{self.pixels}/{self.splits}"


TILES = (
    Tile(channels=64, pixels=64, splits=4, blocks=2),
    Tile(channels=64, pixels=80, splits=4, blocks=2),
    Tile(channels=64, pixels=40, splits=4, blocks=2),
    Tile(channels=128, pixels=64, splits=4, blocks=1),
    Tile(channels=32, pixels=64, splits=2, blocks=8),
    Tile(channels=32, pixels=64, splits=4, blocks=4),
)


@dataclass(frozen=True)
class Layout:
    """A tile laid over a problem."""

    problem: Problem
    tile: Tile

    @property
    def dense(self) -> bool:
        """Whether each output has a pixel, so that a plane is one row."""
        return self.problem.height.stride == self.problem.width.stride == 1

    @property
    def tile_pixels(self) -> int:
        """Pixels of a block: whole rows, but where a plane is one."""
        height, width = self.problem.height.size, self.problem.width.size
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
        return -(-self.problem.out_channels_per_group // self.tile.channels)

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
    def shared_bytes(self) -> int:
        """Shared memory of a block: pixels, then sums."""
        return 4 * self.pitch * max(self.depth, self.tile.splits * self.tile.channels)

    @property
    def source_vector(self) -> int:
        """Pixels of a copy, where a dense x begins on 16 bytes."""
        return gcd(4, self.problem.height.size * self.problem.width.size, self.tile_pixels)

    def blocks(self, target: Target) -> int:
        """Blocks that an SM holds."""
        return image_tiles.blocks_held(self.shared_bytes, self.tile.blocks, target)


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    return Layout(problem, tile)


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    refusal = image_tiles.mma_why_not(problem, target)
    return refusal or image_tiles.pointwise_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    laid = layout(problem, tile)
    if laid.tile_pixels == 0:
        width = problem.width.size
        return f"a block has whole rows of {tile.pixels} pixels at most, not of {width}"
    if laid.grid > family.MAX_GRID:
        return f"counts {family.MAX_GRID} blocks at most, there are {laid.grid}"
    return image_tiles.shared_why_not(laid.shared_bytes, target)
