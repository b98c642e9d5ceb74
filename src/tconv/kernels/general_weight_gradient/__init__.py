"""`general_weight_gradient`: the gradient of the weight of any layer, on fused multiply-adds.

The pixels are divided into splits; each writes its partial sums to a workspace, which the caller
adds up in order.
"""

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.general_weight_gradient.cost import cost
from tconv.kernels.general_weight_gradient.launch import STEM, launches
from tconv.kernels.general_weight_gradient.tiles import TILES, Tile
from tconv.problem import Direction, Problem

DIRECTION: Direction = "weight_gradient"
GENERAL = True

MOST_SUM_BYTES = 256
"""Sums that a thread's registers hold."""


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    return family.coordinates_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    found = tile.rows * tile.columns * family.accumulator_bytes(problem)
    if found > MOST_SUM_BYTES:
        return f"a thread would hold sums of {found} bytes, its registers allow {MOST_SUM_BYTES}"
    return None
