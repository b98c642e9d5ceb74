"""The cost model of `mma_rows_forward`."""

from tconv.jit.target import Target
from tconv.kernels import costs, mma_cost
from tconv.kernels.mma_rows_forward.layout import layout
from tconv.kernels.mma_tiles import Tile
from tconv.problem import Problem

COSTS = costs.load(__file__)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled time in seconds."""
    return mma_cost.team_cost(layout(problem, tile), target, COSTS.uneven)
