"""`mma_rows_forward`: layers bound by the writing of output rows (`mma_rows_forward.cu`).

Products are those of `mma_forward`. Blocks compute rows of an image in order. Bulk copies write the
whole sectors of output rows. Tiles marked `split` compute strict float32.
"""

from tconv.jit.target import Target
from tconv.kernels import mma_tiles
from tconv.kernels.mma_rows_forward import tiles
from tconv.kernels.mma_rows_forward.cost import cost
from tconv.kernels.mma_rows_forward.launch import STEM, launches
from tconv.kernels.mma_rows_forward.layout import Layout, layout
from tconv.kernels.mma_rows_forward.tiles import TILES
from tconv.kernels.mma_tiles import SECTOR, Tile, why_not
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
    laid = layout(problem, tile)
    return _rows_why_not(laid, target) or mma_tiles.tile_why_not(laid, target)


def _rows_why_not(laid: Layout, target: Target) -> str | None:
    """One sentence if blocks cannot write whole rows by bulk copies, else None."""
    if target.capability < (9, 0):
        return f"writes by bulk copies, which sm_90 brought, the target is {target.arch}"
    if laid.tile.warps != laid.team_warps or laid.row_groups > 1 or laid.tiles_yx[1] > 1:
        return (
            f"all warps of a block write each row: {laid.team_warps} of {laid.tile.warps} do, "
            f"of {laid.row_groups} rows at a time and {laid.tiles_yx[1]} tiles a row"
        )
    width = laid.problem.width.output_size
    if width < 2 * SECTOR:  # of another image than the kernel is made for
        return f"rows are two sectors of {SECTOR} outputs or more, these have {width}"
    if laid.group_tiles > tiles.MOST_GROUP_TILES:
        return (
            f"blocks are a multiple of the tiles that share their pixels, "
            f"{tiles.MOST_GROUP_TILES} at most, not {laid.group_tiles}"
        )
    return None
