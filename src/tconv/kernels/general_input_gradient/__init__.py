"""`general_input_gradient`: the gradient of the input of any layer, on fused multiply-adds."""

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.general_input_gradient.cost import cost
from tconv.kernels.general_input_gradient.launch import STEM, launches
from tconv.kernels.implicit_gemm import TILES, Tile
from tconv.problem import Direction, Problem

DIRECTION: Direction = "input_gradient"
GENERAL = True


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    return family.coordinates_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """None: every tile serves every problem."""
    return None
