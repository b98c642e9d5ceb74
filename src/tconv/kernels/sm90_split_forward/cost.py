"""The modelled time of `sm90_split_forward`."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import costs, family
from tconv.kernels.sm90_split_forward.tiles import Tile
from tconv.kernels.sm90_tf32_forward.layout import CONSUMERS, layout
from tconv.problem import Problem

_COSTS = costs.load(__file__)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel, and of the host."""
    return family.with_host(_device_cost(problem, target, tile))


def _device_cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel: cycles of a tile's parts, and bytes of memory."""
    fit = _COSTS
    laid = layout(problem, tile)
    products = 3 * laid.mean_pairs * tile.rows
    added = -(-laid.mean_pairs // tile.group) * tile.rows
    stage = (fit.product * products + fit.added * added) * tile.columns / 2 + fit.stage
    of_tile = laid.chunks * stage + (0 if tile.resident else fit.streamed)
    waves = -(-laid.tiles // (laid.rings * target.multiprocessors))
    busy = waves * CONSUMERS * of_tile / fit.clock
    moved = problem.bytes / (fit.memory * 1e12)
    return max(busy, moved) + fit.both * min(busy, moved) + fit.launch * 1e-6
