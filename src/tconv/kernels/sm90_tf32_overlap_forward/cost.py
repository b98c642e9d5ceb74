"""The modelled time of `sm90_tf32_overlap_forward`."""

from __future__ import annotations

import math

from tconv.jit.target import Target
from tconv.kernels.sm90_tf32_overlap_forward.layout import PRODUCT_DEPTH, Layout, layout
from tconv.kernels.sm90_tf32_overlap_forward.tiles import WARPGROUP, Tile
from tconv.problem import Problem


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: what is busiest and a part of the rest.

    A warpgroup waits for a step's copies before it multiplies, so that little of them is hidden.
    The factors of the last lines are fitted to the 35 rows that benchmarks/fit_costs.py reads.
    """
    laid = layout(problem, tile)
    steps, step = steps_of(laid, target), step_cycles(laid)
    busy = (steps * step + 2500) / 1.7e9
    halo = 1 + 4 / laid.strip + (laid.window - 1) / laid.share(target)
    # Stores of parts of sectors take more of the L2 cache's time.
    parts = 1 if tile.gathers else 2 * problem.width.stride / laid.store_vector
    written = 4 * problem.batch * problem.out_channels * math.prod(problem.y_shape[2:])
    moved = (problem.bytes * halo + written * 0.2 * (parts - 1)) / 4e12
    scalars = 1 if laid.source_vectors else 1.5
    return 0.82 * scalars * (max(busy, moved) + 0.75 * min(busy, moved)) + 4.5e-6


def steps_of(laid: Layout, target: Target) -> int:
    """Input rows of a warpgroup, those above its strips included."""
    share = laid.share(target)
    pieces = 1 + -(-(share - 1) // laid.rows)
    return share + pieces * (laid.window - 1)


def step_cycles(laid: Layout) -> float:
    """Of an SM for an input row of each warpgroup."""
    x = laid.problem.width
    products = laid.chunks * laid.depth // PRODUCT_DEPTH
    multiply = products * laid.product_columns / 2
    channels = laid.chunks * laid.depth
    copies = channels * laid.columns / (4 if laid.source_vectors else 1) / WARPGROUP
    outputs = laid.slots * 2 * x.stride * (1.5 if laid.tile.gathers else 1)
    issue = 11 * products + 4 * copies + laid.product_columns / 2
    issue += outputs * (2 + 2 / laid.store_vector) + laid.slots * 12 + 40 * laid.chunks + 40
    groups = laid.tile.warpgroups
    # A step's own parts follow each other; other warpgroups fill the gaps.
    alone = multiply + 1.2 * issue + 300 * laid.chunks + 200
    return max(groups * multiply, groups * issue / 0.6, alone)
