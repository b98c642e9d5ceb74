"""`general_forward`: the output of any layer, on fused multiply-adds (`general_forward.cu`)."""

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.general_forward.cost import cost
from tconv.kernels.general_forward.launch import STEM, launches
from tconv.kernels.implicit_gemm import TILES, Tile
from tconv.problem import Direction, Problem

DIRECTION: Direction = "forward"
GENERAL = True


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    return family.coordinates_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """None: every tile serves every problem."""
    return None
