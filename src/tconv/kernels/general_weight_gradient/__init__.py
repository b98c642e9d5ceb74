"""`general_weight_gradient`: the gradient of the weight of any layer, on fused multiply-adds.

The pixels are divided into splits; each writes its partial sums to a workspace, which the caller
adds up in order.
"""

from tconv.jit.target import Target
from tconv.kernels import family, image_tiles
from tconv.kernels.general_weight_gradient import layout
from tconv.kernels.general_weight_gradient.cost import cost
from tconv.kernels.general_weight_gradient.launch import STEM, launches
from tconv.kernels.general_weight_gradient.tiles import THREADS, TILES, Tile
from tconv.problem import Direction, Problem

DIRECTION: Direction = "weight_gradient"
GENERAL = True

MOST_THREAD_BYTES = 320
"""Sums and staged values that a thread's registers hold without spilling."""


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    return family.coordinates_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    real = family.accumulator_bytes(problem)
    sums = tile.thread_rows * tile.thread_columns
    staged = tile.depth * (tile.block_rows + tile.block_columns) // THREADS
    if (sums + staged) * real > MOST_THREAD_BYTES:
        return (
            f"a thread would hold {sums} sums and {staged} staged values of {real} bytes, "
            f"its registers allow {MOST_THREAD_BYTES} bytes"
        )
    return image_tiles.shared_why_not(layout.shared_bytes(problem, tile, 8), target)
