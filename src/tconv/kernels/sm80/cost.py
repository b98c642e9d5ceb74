"""The modelled time of the kernels for sm_80: a roofline with a few constants."""

from __future__ import annotations

import math

from tconv.jit.target import Target
from tconv.kernels import costs
from tconv.kernels.engine.layout import unread_bytes
from tconv.kernels.sm80.layout import DEPTH, Layout, Tile, layout
from tconv.problem import Problem

VARIANTS = {
    "forward": "gather",
    "input_gradient": "gather",
    "weight_gradient": "weight_gradient",
}
"""Whose products a constant is for."""

_COSTS = {variant: costs.load(__file__, variant) for variant in VARIANTS.values()}


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: of an SM's blocks, or of memory, and of packing and launches."""
    fit = _COSTS[VARIANTS[problem.direction]]
    laid = layout(problem, target, tile)
    at_once = blocks_at_once(laid, target)
    copied = (tile.tile_rows + tile.tile_columns) * DEPTH * 2 / fit.rate
    # Where few warps run, each waits for its own instructions.
    alone = copies(tile) * fit.copy / at_once
    stage = max(tile.tile_rows * tile.tile_columns * DEPTH / fit.product, copied, alone)
    # Meanwhile another block of the SM multiplies.
    beside = (vectors(problem, tile) * fit.written + fit.block) / at_once
    block = laid.stages * stage + beside
    waves = -(-laid.blocks // target.multiprocessors)
    seconds = math.hypot(
        waves * block / fit.clock, bytes_moved(problem, laid) / (fit.memory * 1e12)
    )
    images, weights = bytes_packed(problem, laid)
    seconds += images / (fit.packing * 1e12) + weights / (fit.packing_weights * 1e12)
    return seconds + fit.launch * 1e-6 * launched(laid)


def blocks_at_once(laid: Layout, target: Target) -> int:
    """Blocks that an SM has: no more than there are for it."""
    return min(laid.resident, -(-laid.blocks // target.multiprocessors))


def copies(tile: Tile) -> float:
    """Copies of a stage by one thread."""
    return (tile.tile_rows + tile.tile_columns) * DEPTH / (8 * tile.threads)


def vectors(problem: Problem, tile: Tile) -> float:
    """Vectors of the result that a block writes."""
    if problem.direction == "weight_gradient":
        vector = 2 if problem.out_channels_per_group % 2 == 0 else 1
        return tile.tile_rows * tile.tile_columns / vector
    forward = problem.direction == "forward"
    made = problem.out_channels_per_group if forward else problem.in_channels_per_group
    shape = problem.y_shape if forward else problem.x_shape
    if (problem.y_layout if forward else problem.x_layout) == "channels_last":
        vector = math.gcd(made, 8)
    elif forward and problem.height.stride * problem.width.stride > 1:
        vector = 1  # neighbours are another phase's
    else:
        vector = math.gcd(shape[2] * shape[3], 8)
    return tile.tile_rows * made / -(-made // tile.tile_columns) / vector


def bytes_moved(problem: Problem, laid: Layout) -> float:
    """Bytes that a kernel reads and writes, and what adds its splits."""
    unread = 0 if problem.direction == "forward" else unread_bytes(problem, columns=True)
    return problem.bytes - unread + 8 * laid.splits * math.prod(problem.w_shape)


def bytes_packed(problem: Problem, laid: Layout) -> tuple[float, float]:
    """Bytes that packing reads and writes, of images and of weights."""
    gathered = problem.x_shape if problem.direction == "forward" else problem.y_shape
    other = problem.x_shape if laid.splits else problem.w_shape
    first, second = (
        4 * math.prod(shape) * packs
        for shape, packs in zip((gathered, other), laid.packed, strict=True)
    )
    return (first + second, 0) if laid.splits else (first, second)


def launched(laid: Layout) -> int:
    """Launches of a call."""
    return 1 + any(laid.packed) + (laid.splits > 0)
