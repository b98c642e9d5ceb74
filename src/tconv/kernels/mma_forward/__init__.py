"""`mma_forward`: memory-bound layers, on `mma.sync` with TF32 (`mma_forward.cu`).

Tiles marked `split` compute strict float32. They take six bfloat16 products for each product.
"""

from tconv.jit.target import Target
from tconv.kernels import mma_tiles
from tconv.kernels.mma_forward.cost import cost
from tconv.kernels.mma_forward.launch import STEM, launches
from tconv.kernels.mma_forward.layout import layout
from tconv.kernels.mma_forward.tiles import TILES
from tconv.kernels.mma_tiles import Tile, why_not
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

DIRECTION: Direction = "forward"
GENERAL = False


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    return mma_tiles.tile_why_not(layout(problem, tile), target)
