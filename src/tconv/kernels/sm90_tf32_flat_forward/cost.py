"""The modelled time of `sm90_tf32_flat_forward`."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.sm90_tf32_flat_forward.layout import LINE_BYTES, WEIGHT_BYTES, Layout, layout
from tconv.kernels.sm90_tf32_flat_forward.tiles import Tile
from tconv.problem import Problem


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing, kernel and repair, and of the host."""
    return family.with_host(_device_cost(problem, target, tile))


def _device_cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel.

    Cycles of an SM at 1.7 GHz, fitted by least squares of the logarithm to 627 rows of the sweeps
    of 29 layers and 60 random ones, benchmarks/fit_costs.py: off by 19% in the root mean square.
    """
    laid = layout(problem, tile)
    # Of the consumers of a block together.
    steps = laid.chunks * laid.row_begin[-1] / laid.row_sets
    products = 1.15 * steps * 2 * tile.columns
    weights = 0 if tile.resident else steps * WEIGHT_BYTES
    copied = (weights + laid.chunks * laid.patch_positions * LINE_BYTES) / 35.9
    # A stage of either ring comes no sooner than this after it was asked for. Fitted when a block
    # had as many as fit.
    pixel_stages, weight_stages = laid.fitting_stages(target)
    ahead: float = pixel_stages
    if not tile.resident:
        ahead = min(ahead, weight_stages * max(steps / laid.chunks / 2, 0.5))
    main = max(max(products, copied) + 75 * steps, 3190 * laid.chunks / ahead)
    # Phases that are no power of two are divided by for each output.
    stride = problem.width.stride
    outputs = laid.step * (1 if stride & (stride - 1) == 0 else 1.6)
    # Rows of less than a line of 128 bytes fill few lanes of a store; more so in long tiles
    # (maskrcnn, the one layer of the sweeps that its stores bind).
    if problem.width.output_size < 32 and not tile.paired:
        outputs *= 1.6 * (tile.columns / 128) ** 0.5
    if tile.storers:
        # 16.2 before the outputs went over in slices; by hand since.
        left = 12 if tile.paired else 13
        of_tile = max(main, 23.3 * outputs) + left * outputs + 288
    else:
        of_tile = main + 26 * outputs + 288
    waves = -(-laid.tiles // target.multiprocessors)
    packing = packing_cost(laid)
    cycles = waves * of_tile
    if tile.resident:
        cycles += steps * WEIGHT_BYTES / 35.9  # once
    modelled = max(cycles / 1.7e9, problem.bytes / 5.6e12) + packing + 3e-6
    # What the sweep with consumers in step where a block has one tile, and fewer stages, showed.
    if waves == 1 and not tile.apart:
        modelled *= 0.87 if tile.storers else 0.8
    # By hand, for stylegan2_mod and fcn8s.
    modelled *= (1.03 if tile.apart and tile.storers else 1) * (0.88 if tile.resident else 1)
    modelled *= 1.03 if tile.storers and tile.columns > 160 else 1
    if laid.groups_outermost:  # for stylegan2_mod too
        modelled *= 0.945 if tile.storers else 1.03
    # What 278 rows with dependent launches showed since: rows on 16 bytes cost less, phases with
    # different slots more.
    on_vectors = problem.width.output_size % 4 == 0
    if len({tuple(tap.shift for tap in phase.taps) for phase in problem.width.phases}) > 1:
        return modelled * (1.15 if on_vectors else 1.0 if tile.apart else 1.06)
    return modelled * (0.92 if on_vectors else 1.06)


def packing_cost(laid: Layout) -> float:
    """Modelled seconds of all but the kernel."""
    # What is read and written for 4 bytes of operands.
    moved = 4 * laid.word_channels + 4
    packing = moved * (laid.weight_elements / 4.18e12 + laid.pixel_elements / 4.44e12)
    # A guess: the launch that repairs, with nothing to do.
    idle = 1.5e-6 if laid.tile.half else 0
    return 7.4e-6 + packing + idle
