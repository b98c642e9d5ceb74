"""The modelled time of the kernels for sm_80: a roofline with a few constants."""

from __future__ import annotations

import math

from tconv.jit.target import Target
from tconv.kernels import costs
from tconv.kernels.sm80.layout import DEPTH, Tile, layout
from tconv.problem import Problem

_COSTS = costs.load(__file__)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: of an SM's blocks, or of memory, and of launches."""
    fit = _COSTS
    laid = layout(problem, target, tile)
    rows, columns = tile.tile_rows, tile.tile_columns
    copied = (rows + columns) * DEPTH * 2 / fit.rate
    latency = fit.latency / (laid.resident * (tile.stages - 1))
    stage = max(rows * columns * DEPTH / fit.product, copied, latency)
    block = laid.stages * stage + rows * columns * fit.written + fit.block / laid.resident
    waves = -(-laid.blocks // target.multiprocessors)
    gathered = problem.x_shape if problem.direction == "forward" else problem.y_shape
    read = (gathered, problem.x_shape if laid.splits else problem.w_shape)
    packed = sum(4 * math.prod(s) for s, p in zip(read, laid.packed, strict=True) if p)
    moved = problem.bytes + 8 * laid.splits * math.prod(problem.w_shape)
    seconds = math.hypot(waves * block / fit.clock, moved / (fit.memory * 1e12))
    seconds += packed / (fit.packing * 1e12)
    return seconds + fit.launch * 1e-6 * (1 + any(laid.packed) + (laid.splits > 0))
