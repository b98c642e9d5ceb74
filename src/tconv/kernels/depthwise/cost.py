"""The modelled time of the depthwise kernels."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import costs
from tconv.kernels.depthwise.layout import layout
from tconv.kernels.depthwise.tiles import Tile
from tconv.problem import ITEM_BYTES, Problem

COSTS = costs.load(__file__)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: bytes or issued instructions, and a part of the shorter of the two."""
    fit = COSTS
    laid = layout(problem, tile)
    item = ITEM_BYTES[problem.dtype]
    sets = laid.tap_sets if problem.direction == "weight_gradient" else 1
    multiple = laid.multiple if problem.direction == "input_gradient" else 1
    rows = problem.height.kernel
    if problem.direction == "weight_gradient":
        rows = laid.tap_rows
    elif laid.forward:
        rows = laid.source_rows
    read = laid.columns * rows * multiple * tile.vector
    written = {
        "forward": laid.outputs,
        "input_gradient": tile.strip,
        "weight_gradient": tile.strip,  # read as well
    }[problem.direction] * tile.vector
    # Values of an access: channels, or the columns that move as one.
    width = tile.vector
    if not laid.channels_last:
        width = min(tile.strip * (problem.width.stride if laid.forward else 1), 16 // item)
    values = read * fit.read + written * fit.written
    accesses = fit.access * (read + written) / max(1, width)
    products = laid.products * multiple * (1 + fit.weight / tile.strip)
    instructions = values + accesses + products + fit.strip
    threads = -(-laid.positions // laid.threads_p) * laid.threads_p * laid.threads_c * laid.units
    full = min(1.0, laid.blocks * fit.filled)
    issued = threads / 32 * instructions / (4 * fit.clock * target.multiprocessors * full)
    partial = 8 * laid.shares(target) * problem.out_channels * problem.taps
    moved = problem.bytes * (1 + fit.again * (sets - 1))
    if problem.direction == "weight_gradient":
        moved += partial
    moved /= fit.memory * 1e12
    longer, shorter = max(moved, issued), min(moved, issued)
    return longer + fit.both * shorter + fit.launch * 1e-6
