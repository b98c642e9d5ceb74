"""The modelled time of `sm90_tf32_wide_forward`."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.sm90_tf32_wide_forward.layout import LINE_BYTES, UNIT, layout, vector
from tconv.kernels.sm90_tf32_wide_forward.tiles import Tile
from tconv.problem import Problem


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel.

    Cycles of an SM at 1.7 GHz, fitted by least squares of the logarithm to 290 rows of the sweeps
    of 29 layers and 60 random ones, benchmarks/fit_costs.py: off by 20% in the root mean square.
    """
    laid = layout(problem, tile)
    tiles = len(laid.column_class)
    # Of a tile: blocks of weights, slots, and products of both consumers.
    blocks = laid.chunks * laid.block_begin[-1] / tiles
    slots = laid.chunks / tiles
    slots *= sum(len(slots) for class_ in laid.column_class for slots in laid.classes[class_])
    products = 8 * blocks * tile.pixel_tiles
    multiplied = products * (16.7 + 0.24 * laid.part_columns)
    # A slot takes its time whatever its columns: operands are loaded and rounded for each pixel.
    loaded = slots * (93 + 422 * tile.pixel_tiles)
    produced = 206 * laid.chunks * laid.lane_copies
    brought = (blocks * laid.part_columns * LINE_BYTES + laid.chunks * laid.pixel_bytes) / 264
    # Writes of a consumer's four warps, for both halves of a product's rows.
    vectors = problem.width.stride // vector(problem) * (2 // laid.low_phases)
    written = 14.4 * 16 * tile.pixel_tiles * laid.part_columns / UNIT * vectors
    of_tile = max(multiplied, loaded, produced) + brought + written + 1770
    waves = -(-laid.tiles // target.multiprocessors)
    busy, moved = waves * of_tile / 1.7e9, problem.bytes / 6.2e12
    packing = 8.4e-6 + 3.45 * 8 * laid.weight_elements / 4e12
    # Phases that are several parts of few columns took 8% more; many tiles of few stages less: what
    # one takes beside its products overlaps with another's.
    dearer = 1 if laid.parts == 1 or tile.apart else 1.08
    if laid.chunks <= 4 and waves >= 4 and vector(problem) > 1:
        dearer *= 0.86
    if laid.slots == 1:
        dearer *= 0.87  # by hand, since weights are packed in more pieces and consumers in step
    if len(laid.column_class) > 1:
        dearer *= 1.03  # pixels are read again for other columns: 128 to 64 channels, in_step.log
    device = dearer * (max(busy, moved) + 0.4 * min(busy, moved) + packing)
    return family.with_host(device)
