"""What a call of `mma_forward` launches."""

from tconv.jit.target import Target
from tconv.kernels import image_tiles, mma_tiles
from tconv.kernels.launch import Launch
from tconv.kernels.mma_forward.layout import layout
from tconv.kernels.mma_tiles import Tile
from tconv.problem import Problem

STEM = "mma_forward"


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel. Each block computes the tile of its own index, then every grid-size-th tile."""
    laid = layout(problem, tile)
    source = mma_tiles.source(STEM, laid)
    arguments = image_tiles.arguments(problem, laid.tiles, laid.tiles_yx)
    return (Launch("kernel", source, laid.grid(target), arguments, aligned=True),)
