"""The cost model of `general_input_gradient`."""

from tconv.jit.target import Target
from tconv.kernels.general_input_gradient.layout import layout
from tconv.kernels.implicit_gemm import Tile
from tconv.problem import Problem


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: those of the model that it shares with `general_forward`."""
    return layout(problem, tile).cost(problem, target)
