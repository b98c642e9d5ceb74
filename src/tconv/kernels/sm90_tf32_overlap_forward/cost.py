"""The modelled time of `sm90_tf32_overlap_forward`."""

from __future__ import annotations

import math

from tconv.jit.target import Target
from tconv.kernels import costs
from tconv.kernels.sm90_tf32_overlap_forward.layout import PRODUCT_DEPTH, Layout, layout
from tconv.kernels.sm90_tf32_overlap_forward.tiles import WARPGROUP, Tile
from tconv.problem import Problem

_COSTS = costs.load(__file__)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: the busiest resource's, and a part of the others'."""
    fit = _COSTS
    laid = layout(problem, tile)
    steps, step = steps_of(laid, target), step_cycles(laid)
    busy = (steps * step + fit.block) / fit.clock
    halo = 1 + fit.halo / laid.strip + (laid.window - 1) / laid.share(target)
    # Stores of partial sectors cost the L2 cache more.
    parts = 2 * problem.width.stride / laid.store_vector
    written = 4 * problem.batch * problem.out_channels * math.prod(problem.y_shape[2:])
    moved = (problem.bytes * halo + written * fit.partial_sector * (parts - 1)) / (
        fit.memory * 1e12
    )
    scalars = 1 if laid.source_vectors else fit.single_copies
    device = max(busy, moved) + fit.both * min(busy, moved)
    return fit.whole * scalars * device + fit.launch * 1e-6


def steps_of(laid: Layout, target: Target) -> int:
    """Input rows that a warpgroup reads, including those above its strips."""
    share = laid.share(target)
    pieces = 1 + -(-(share - 1) // laid.rows)
    return share + pieces * (laid.window - 1)


def step_cycles(laid: Layout) -> float:
    """Cycles of an SM for one input row of each warpgroup."""
    x, fit = laid.problem.width, _COSTS
    products = laid.chunks * laid.depth // PRODUCT_DEPTH
    multiply = products * laid.product_columns / 2
    channels = laid.chunks * laid.depth
    copies = channels * laid.columns / (4 if laid.source_vectors else 1) / WARPGROUP
    outputs = laid.slots * 2 * x.stride
    issue = fit.issue_product * products + fit.issue_copy * copies + laid.product_columns / 2
    issue += outputs * fit.issue_output * (1 + 1 / laid.store_vector) + laid.slots * fit.issue_slot
    issue += fit.issue_stage * (laid.chunks + 1)
    groups = laid.tile.warpgroups
    # The parts of a step are sequential. Other warpgroups fill the gaps.
    alone = multiply + fit.alone_issue * issue + fit.alone_stage * laid.chunks + fit.alone_row
    return max(groups * multiply, groups * issue / fit.issue_rate, alone)
