"""`mma_frames_forward`: a long kernel and stride along x, on `mma.sync` with TF32.

An inverse STFT as a transposed convolution is such a layer: each input column is a frame, which is
added into the output `stride` further on (`mma_frames_forward.cu`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import costs, family, image_tiles
from tconv.kernels.launch import Launch, fields
from tconv.kernels.source import KernelSource
from tconv.problem import Direction, Problem

__all__ = [
    "DIRECTION",
    "GENERAL",
    "STEM",
    "TILES",
    "cost",
    "launches",
    "layout",
    "tile_why_not",
    "why_not",
]

STEM = "mma_frames_forward"
DIRECTION: Direction = "forward"
GENERAL = False

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

COSTS = costs.load(__file__)


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


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    return Layout(problem, tile)


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


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: instructions of the busiest SM, or the bytes moved."""
    laid = layout(problem, tile)
    fragments = tile.pixels // 16
    # A step of 8 channels at one slot: products of two fragments of phases, and operands, each
    # loaded and rounded.
    step = 2 * fragments + COSTS.operand * (8 + 2 * fragments)
    copied = DEPTH * (laid.slots * PHASES + laid.source_pitch) / THREADS
    # Warps of 8 channels each: an SM's four schedulers have two of a block.
    stage = 2 * (laid.slots * step + COSTS.copy * copied + COSTS.stage)
    stages = -(-problem.in_channels_per_group // DEPTH)
    of_tile = stages * stage + COSTS.tile * fragments
    tiles = -(-laid.tiles // target.multiprocessors)
    # With few blocks, issue slots stay empty.
    used = min(COSTS.issue_most, COSTS.issue_block * min(tiles, laid.blocks(target)))
    busy = tiles * of_tile / used / COSTS.clock
    return max(busy, problem.bytes / COSTS.memory_rate) + COSTS.launch


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel: a block for each tile."""
    laid = layout(problem, tile)
    index = family.index_type(problem, laid.tiles)
    tiles_yx = (problem.height.size, laid.tiles_x)
    arguments = image_tiles.arguments(problem, laid.tiles, tiles_yx)
    source = KernelSource(
        stem=STEM,
        constants=(
            ("Index", index),
            ("groups", problem.groups),
            ("in_channels", problem.in_channels_per_group),
            ("out_channels", problem.out_channels_per_group),
            ("bias", problem.bias),
            ("pixels", tile.pixels),
            ("phases", PHASES),
            ("depth", DEPTH),
            ("stages", STAGES),
            ("slots", laid.slots),
            ("source_pitch", laid.source_pitch),
            ("shared_bytes", laid.shared_bytes),
            ("first_q", problem.width.q_range.start),
            *family.axis_constants(problem),
        ),
        arguments=fields(arguments, index, ("tiles",)),
        shared_bytes=laid.shared_bytes,
        threads=THREADS,
    )
    return (Launch("kernel", source, min(laid.tiles, family.MAX_GRID), arguments),)
