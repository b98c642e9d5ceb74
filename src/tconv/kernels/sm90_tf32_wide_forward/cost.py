"""The modelled time of `sm90_tf32_wide_forward`."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import costs, family
from tconv.kernels.sm90_tf32_wide_forward.layout import LINE_BYTES, UNIT, layout, vector
from tconv.kernels.sm90_tf32_wide_forward.tiles import Tile
from tconv.problem import Problem

_COSTS = costs.load(__file__)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel, and of the host."""
    fit = _COSTS
    laid = layout(problem, tile)
    # Blocks of weights of a tile. Each serves eight products, of both consumers.
    blocks = laid.chunks * laid.parts
    multiplied = 8 * blocks * (fit.product + fit.column * laid.part_columns)
    # A chunk has a cost that does not depend on its columns: operands are loaded and rounded for
    # each pixel.
    loaded = laid.chunks * (fit.slot + fit.pixel_tile)
    produced = fit.lane_copy * laid.chunks * laid.lane_copies
    brought = (blocks * laid.part_columns * LINE_BYTES + laid.chunks * laid.pixel_bytes) / fit.rate
    # Writes of a consumer's four warps, for both halves of a product's rows.
    vectors = problem.width.stride // vector(problem) * (2 // laid.low_phases)
    written = fit.store * 16 * laid.part_columns / UNIT * vectors
    of_tile = max(multiplied, loaded, produced) + brought + written + fit.tile
    waves = -(-laid.tiles // target.multiprocessors)
    busy, moved = waves * of_tile / fit.clock, problem.bytes / (fit.memory * 1e12)
    packing = fit.pack_launch * 1e-6 + fit.pack_weights * 8 * laid.weight_elements / 4e12
    dearer = 1 if laid.parts == 1 else fit.parts
    if laid.chunks <= 4 and waves >= 4 and vector(problem) > 1:
        dearer *= fit.overlapping
    # Consumers in step win nothing where they wait for producers.
    if produced <= max(multiplied, loaded):
        dearer *= fit.one_slot
        if laid.chunks == problem.taps == 1:
            dearer *= fit.one_chunk
    if laid.column_tiles > 1:
        dearer *= fit.column_tiles
    device = dearer * (max(busy, moved) + fit.both * min(busy, moved) + packing)
    return family.with_host(device)
