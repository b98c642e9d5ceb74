"""The modelled time of `pointwise_forward`."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import costs
from tconv.kernels.pointwise_forward.layout import Tile, vectors
from tconv.problem import Problem

COSTS = costs.load(__file__)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: bytes or issued accesses, and a part of the shorter of the two."""
    read = problem.batch * problem.height.size * problem.width.size
    # A pixel is read by each output channel. Lanes are a vector of y apart.
    lines = read * problem.out_channels * problem.in_channels_per_group / 32
    lines *= max(1.0, 4 / problem.width.stride)
    issued = COSTS.load * lines + COSTS.vector * vectors(problem) / 32
    busy = issued / target.multiprocessors / COSTS.clock
    moved = problem.bytes / COSTS.memory_rate
    # One vector of a thread keeps less in flight; two leave small layers with few warps.
    warps = vectors(problem) / tile.vectors / 32 / target.multiprocessors
    few = COSTS.few if (tile.vectors > 1) == (warps < COSTS.warps) else 0
    return max(busy, moved) + COSTS.overlap * min(busy, moved) + few + COSTS.launch
