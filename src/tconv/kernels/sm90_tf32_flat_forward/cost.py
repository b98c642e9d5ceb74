"""The modelled time of `sm90_tf32_flat_forward`."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import costs, family
from tconv.kernels.sm90_tf32_flat_forward.layout import LINE_BYTES, WEIGHT_BYTES, Layout, layout
from tconv.kernels.sm90_tf32_flat_forward.tiles import Tile
from tconv.problem import Problem

_COSTS = costs.load(__file__)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing, kernel and repair, and of the host."""
    return family.with_host(_device_cost(problem, target, tile))


def _device_cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel: cycles of a tile's parts, and bytes of memory."""
    fit = _COSTS
    laid = layout(problem, tile)
    # Both consumers of a block together.
    steps = laid.chunks * laid.row_begin[-1] / laid.row_sets
    products = fit.product * steps * 2 * tile.columns
    copied = (
        steps * WEIGHT_BYTES + laid.tile_stages * laid.patch_positions * LINE_BYTES
    ) / fit.rate
    # Copies of a stage have a latency. Stages that are requested ahead hide it.
    pixel_stages, weight_stages = laid.fitting_stages(target)
    ahead = min(pixel_stages, weight_stages * max(steps / laid.tile_stages / 2, 0.5))
    main = max(max(products, copied) + fit.step * steps, fit.stage * laid.tile_stages / ahead)
    if weight_stages == 2:  # of a kernel made for narrower images
        main = max(main, fit.two_weights * steps)
    # Each output takes a division by the number of phases, unless that is a power of two.
    stride = problem.width.stride
    outputs = laid.step * (1 if stride & (stride - 1) == 0 else fit.division)
    if problem.width.output_size < 32 and not tile.paired:
        outputs *= fit.short_rows * (tile.columns / 128) ** 0.5
    if tile.storers:
        left = fit.left_paired if tile.paired else fit.left
        of_tile = max(main, fit.store * outputs) + left * outputs + fit.tile
    else:
        of_tile = main + fit.written * outputs + fit.tile
    waves = -(-laid.tiles // target.multiprocessors)
    packing = packing_cost(laid)
    modelled = max(waves * of_tile / fit.clock, problem.bytes / (fit.memory * 1e12))
    modelled += packing + fit.launch * 1e-6
    if waves == 1 and not tile.apart:
        modelled *= fit.one_wave_storers if tile.storers else fit.one_wave
    modelled *= fit.apart_storers if tile.apart and tile.storers else 1
    modelled *= 1 + fit.stage_rows * (laid.stage_rows - 1)
    modelled *= fit.wide_storers if tile.storers and tile.columns > 160 else 1
    if laid.groups_outermost:
        modelled *= fit.groups_outermost_storers if tile.storers else fit.groups_outermost
    on_vectors = problem.pattern.width.output_size % 4 == 0
    if not problem.pattern.width.phases_share_shifts:
        unaligned = fit.phases_apart if tile.apart else fit.phases_unaligned
        return modelled * (fit.phases_aligned if on_vectors else unaligned)
    return modelled * (fit.aligned if on_vectors else fit.unaligned)


def packing_cost(laid: Layout) -> float:
    """Modelled seconds of a call without the kernel: packing and, in float16, repair."""
    # Bytes that are read and written for each 4 bytes of operands.
    moved = 4 * laid.word_channels + 4
    weights, pixels = _COSTS.pack_weights * 1e12, _COSTS.pack_pixels * 1e12
    packing = moved * (laid.weight_elements / weights + laid.pixel_elements / pixels)
    idle = _COSTS.idle_repair * 1e-6 if laid.tile.half else 0
    return _COSTS.pack_launch * 1e-6 + packing + idle
