"""The tiles of the kernels for sm_80, and the geometry of one over a problem."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.engine.layout import of_16_bits_why_not, packs
from tconv.problem import Problem

DEPTH = 64
"""Values that a stage has of each row and column."""

PIXEL_BYTES = 24
"""Shared memory of a position's addresses."""

MOST_PARTIAL_BYTES = 256 << 20


@dataclass(frozen=True)
class Tile:
    """What one block computes, and each of its warps.

    Rows are positions and columns channels; of the weight's gradient rows are input channels and
    columns (tap, output channel).
    """

    tile_rows: int
    tile_columns: int
    warp_rows: int
    warp_columns: int
    stages: int = 3

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.tile_rows * self.tile_columns // (self.warp_rows * self.warp_columns)

    def __str__(self) -> str:
        """Rows x columns."""
        return f"{self.tile_rows}x{self.tile_columns}"


TILES = (
    Tile(256, 128, 64, 64),
    Tile(128, 128, 64, 64),
    Tile(64, 256, 64, 64),
    Tile(128, 64, 64, 32),
    Tile(64, 128, 32, 64),
    Tile(64, 64, 32, 32),
    Tile(128, 32, 32, 32),
    Tile(32, 128, 32, 32),
)


class Layout(NamedTuple):
    """A tile laid over a problem.

    Attributes:
        tiles: of the positions of the largest phase; stages of all splits of the weight's gradient.
        blocks: of the launch.
        stages: of a block; the mean over phases, some of which may have none.
        splits: of the weight's gradient, else 0.
        packed: whether the image that is gathered, and the weight or x, have to be packed.
        table_bytes, shared_bytes: shared memory before the stages, and all.
        resident: blocks of an SM.
    """

    tiles: int
    blocks: int
    stages: float
    splits: int
    packed: tuple[bool, bool]
    table_bytes: int
    shared_bytes: int
    resident: int


def layout(problem: Problem, target: Target, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    y, x, forward = problem.height, problem.width, problem.direction == "forward"
    rows, others = problem.in_channels_per_group, problem.out_channels_per_group
    packed = packs(problem, others, problem.y_layout), packs(problem, rows, problem.x_layout)
    table = PIXEL_BYTES * (tile.tile_rows if problem.direction != "weight_gradient" else 2 * DEPTH)
    shared = table + tile.stages * (tile.tile_rows + tile.tile_columns) * DEPTH * 2
    registers = 1024 // tile.threads // (4 if tile.warp_rows * tile.warp_columns > 2048 else 2)
    resident = max(1, min(registers, target.shared_per_block // (shared + 1024)))
    if problem.direction == "weight_gradient":
        tiles = -(-problem.batch * y.size * x.size // DEPTH)
        columns = problem.taps * -(-others // 8) * 8
        units = problem.groups * -(-rows // tile.tile_rows) * -(-columns // tile.tile_columns)
        most = MOST_PARTIAL_BYTES // (4 * math.prod(problem.w_shape))
        wanted = min(target.multiprocessors * resident // units, most, tiles // tile.stages)
        stages = -(-tiles // max(1, wanted))
        splits = -(-tiles // stages)
        return Layout(tiles, units * splits, stages, splits, packed, table, shared, resident)
    phases, pixels, of_phases = 1, y.size * x.size, {problem.taps: 1}
    if forward:
        rows, others, phases = others, rows, y.stride * x.stride
        pixels = -(-y.output_size // y.stride) * -(-x.output_size // x.stride)
        of_phases = _taps_of_phases(problem)
    tiles = -(-problem.batch * pixels // tile.tile_rows)
    blocks = problem.groups * tiles * phases * -(-rows // tile.tile_columns)
    octets = -(-others // 8)
    mean = sum(n * -(-taps * octets // 8) for taps, n in of_phases.items()) / phases
    # A copy is 16 bytes, also at the end of a line.
    whole = problem.pattern.weight_mapped and problem.out_channels_per_group % 8 == 0
    packed = packed[forward], not whole
    return Layout(tiles, blocks, mean, 0, packed, table, shared, resident)


def _taps_of_phases(problem: Problem) -> Counter[int]:
    """How many phases have so many taps."""
    found: Counter[int] = Counter()
    down, right = (
        Counter(len(phase.taps) for phase in axis.phases)
        for axis in (problem.height, problem.width)
    )
    for (a, m), (b, n) in itertools.product(down.items(), right.items()):
        found[a * b] += m * n
    return found


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    if target.capability < (8, 0):
        return f"needs mma and cp.async of sm_80, the target is {target.arch}"
    return of_16_bits_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    laid = layout(problem, target, tile)
    needed, found = laid.shared_bytes, target.shared_per_block
    if needed > found:
        return f"a block needs {needed} bytes of shared memory, {target.arch} has {found}"
    return f"{laid.blocks} blocks are over 32 bits" if laid.blocks > family.MAX_GRID else None
