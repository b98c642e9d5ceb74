"""The geometry of a tile of `mma_forward`."""

import functools

from tconv.kernels import family, mma_tiles
from tconv.kernels.mma_tiles import Layout, Tile
from tconv.problem import Problem


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    return mma_tiles.laid_out(problem, tile)
