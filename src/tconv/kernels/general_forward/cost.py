"""The cost model of `general_forward`."""

from tconv.jit.target import Target
from tconv.kernels import costs
from tconv.kernels.general_forward.layout import layout
from tconv.kernels.implicit_gemm import Tile
from tconv.problem import Problem

COSTS = costs.load(__file__)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: those of the shared model, of depthwise layers more, and a start."""
    depthwise = COSTS.depthwise if problem.in_channels_per_group == 1 else 1.0
    return depthwise * layout(problem, tile).cost(problem, target) + COSTS.start
