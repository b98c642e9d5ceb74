"""How a tile of `general_weight_gradient` divides the pixels."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.general_weight_gradient.tiles import THREADS, Tile
from tconv.problem import Problem

MOST_SPLITS = 1024
MOST_PARTIAL_BYTES = 64 << 20
"""Beyond this much workspace the splits stop growing, unless the weight itself is larger."""

LEAST_PIXELS = 2
"""Of a thread, where there are several splits."""


def splits(problem: Problem, target: Target, tile: Tile) -> int:
    """Shares of the pixels: enough blocks for four on each SM."""
    weight_bytes = family.accumulator_bytes(problem) * weights(problem)
    shares = min(
        -(-4 * target.multiprocessors // split_tiles(problem, tile)),
        MOST_SPLITS,
        max(1, MOST_PARTIAL_BYTES // weight_bytes),
        max(1, pixels(problem) // (LEAST_PIXELS * THREADS)),
    )
    # Rounding each share up to whole turns of the threads may leave the last ones empty.
    return -(-pixels(problem) // split_pixels(problem, shares))


def pixels(problem: Problem) -> int:
    """Input pixels over the batch."""
    return problem.batch * problem.height.size * problem.width.size


def weights(problem: Problem) -> int:
    """Values of the gradient."""
    return problem.in_channels * problem.out_channels_per_group * problem.taps


def split_tiles(problem: Problem, tile: Tile) -> int:
    """Tiles of one split."""
    row_tiles = -(-problem.in_channels_per_group // tile.rows)
    column_tiles = -(-problem.out_channels_per_group // tile.columns)
    return row_tiles * column_tiles * problem.taps * problem.groups


def split_pixels(problem: Problem, shares: int) -> int:
    """Pixels of a split: whole turns of the threads."""
    return -(-pixels(problem) // (shares * THREADS)) * THREADS


def shared_bytes(problem: Problem, tile: Tile) -> int:
    """Bytes of the kernel's `Shared`: the sums of each warp."""
    return THREADS // 32 * tile.rows * tile.columns * family.accumulator_bytes(problem)
