"""How a tile of `general_weight_gradient` divides the pixels, and its shared memory."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.general_weight_gradient.tiles import Tile
from tconv.problem import Problem

MOST_CHAIN = 1 << 14
"""Pixels of a split: 71 000 of them err by 3.3e-6 where cuDNN errs by 1.6e-6 (kb71, H200)."""

MOST_SPLITS = 1024
MOST_PARTIAL_BYTES = 64 << 20
"""Beyond this much workspace the splits stop growing, unless the weight itself is larger."""


def splits(problem: Problem, target: Target, tile: Tile) -> int:
    """Shares of the pixels: enough blocks for four on each SM, each with eight steps or more, and
    none that adds up so many pixels that its float32 sums lose more than cuDNN's.
    """
    weight_bytes = family.accumulator_bytes(problem) * problem.in_channels * columns(problem)
    wanted = -(-4 * target.multiprocessors // split_tiles(problem, tile))
    wanted = max(wanted, -(-pixels(problem) // MOST_CHAIN))
    most = min(
        MOST_SPLITS,
        max(1, MOST_PARTIAL_BYTES // weight_bytes),
        max(1, pixels(problem) // (8 * tile.depth)),
    )
    shares = min(wanted, most)
    # Rounding each share up to whole steps may leave the last ones empty.
    return -(-pixels(problem) // split_pixels(problem, tile, shares))


def pixels(problem: Problem) -> int:
    """Input pixels over the batch."""
    return problem.batch * problem.height.size * problem.width.size


def columns(problem: Problem) -> int:
    """Taps times output channels of a group."""
    return problem.taps * problem.out_channels_per_group


def split_tiles(problem: Problem, tile: Tile) -> int:
    """Tiles of one split."""
    row_tiles = -(-problem.in_channels_per_group // tile.block_rows)
    return row_tiles * -(-columns(problem) // tile.block_columns) * problem.groups


def split_pixels(problem: Problem, tile: Tile, shares: int) -> int:
    """Pixels of a split: whole steps."""
    return -(-pixels(problem) // (shares * tile.depth)) * tile.depth


def shared_bytes(problem: Problem, tile: Tile, index_bytes: int) -> int:
    """Bytes of the kernel's `Shared`."""
    real = family.accumulator_bytes(problem)
    widths = (tile.block_rows + 4, tile.block_columns + 4)
    stage = sum(-(-tile.depth * width * real // 16) * 16 for width in widths)
    sums = tile.block_rows * (tile.block_columns + 1) * real
    union = -(-max(2 * stage, sums) // 16) * 16
    tables = 2 * tile.depth * (2 * index_bytes + 8) + tile.block_columns * (index_bytes + 8)
    return -(-(union + tables) // 16) * 16
