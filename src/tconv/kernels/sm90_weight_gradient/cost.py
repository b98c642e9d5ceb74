"""The modelled time of `sm90_weight_gradient`."""

from __future__ import annotations

import math

from tconv.jit.target import Target
from tconv.kernels import costs, flat
from tconv.kernels.engine.layout import part_products, unread_bytes, value_parts
from tconv.kernels.launch import Operand
from tconv.kernels.sm90_weight_gradient.layout import LINE_BYTES, SHARED_RATE, Layout, layout
from tconv.kernels.sm90_weight_gradient.tiles import Tile
from tconv.problem import Problem

_COSTS = costs.load(__file__)
PAGE_BYTES = 2 << 20


def best_splits(problem: Problem, target: Target, tile: Tile) -> int:
    """Shares of the boxes: one, whose sums are the gradient, or as many as give each SM a block."""
    most = layout(problem, tile).most_splits(target)
    return min((1, most), key=lambda splits: _seconds(problem, target, tile, splits))


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of the kernel, and of adding its partial sums."""
    return _seconds(problem, target, tile, best_splits(problem, target, tile))


def _seconds(problem: Problem, target: Target, tile: Tile, splits: int) -> float:
    fit = _COSTS
    laid = layout(problem, tile)
    # Both consumers: 64 channels of 16 positions with the block's take a quarter cycle each.
    of_tap, taps = laid.out_block / 2 * fit.product, laid.consumer_taps
    if tile.columns:
        # Float32 has a word of each pixel: beyond a stride of 2, no more of them are read.
        stride = laid.problem.width.stride if laid.pixel == 2 else min(laid.problem.width.stride, 2)
        of_tap, taps = laid.in_block * laid.stacked / 2, laid.row_taps
        of_tap += fit.raw_start + fit.raw_stride * (stride - 1)
        if laid.strict:  # of all products of a tap
            of_tap = fit.strict_column * laid.in_block + fit.strict_raw
            of_tap += fit.strict_stride * (stride - 1)
    elif tile.turned:
        of_tap = laid.in_block / 2 + fit.raw_start
    products = tile.consumers * taps * tile.positions / laid.step * of_tap
    products *= 1 if tile.columns else part_products(problem)
    if tile.columns:
        of_box = max(products, _line_cycles(laid)) + fit.raw_box
        if laid.item == 4:
            of_box *= 1 if laid.problem.width.stride > 1 else fit.float32_dense
            few = laid.stages(target) < 3 and laid.item * tile.columns == LINE_BYTES
            of_box *= fit.few_stages if few else 1
    else:
        copies = laid.copied_bytes / fit.rate
        # From one turn of the ring to the next, a stage is copied and multiplied.
        turn = (products + copies + fit.stage) / max(1, laid.stages(target))
        of_box = max(products + fit.box, copies, turn)
        if tile.turned:
            of_box = max(of_box, laid.moved_bytes / SHARED_RATE) * fit.turned
    waves = -(-laid.units * splits // target.multiprocessors)
    cycles = waves * (-(-laid.boxes // splits) * of_box + fit.block)
    memory = (problem.bytes - unread_bytes(problem, columns=not tile.columns)) / (fit.memory * 1e12)
    weights = math.prod(problem.w_shape)
    if laid.writes_gradient(splits):
        sums = 2 * weights / (fit.memory * 1e12)
    else:
        sums = 4 * splits * weights / (fit.partial * 1e12) + fit.addition * 1e-6
    packing = 0.0
    operands: tuple[Operand, Operand] = ("x", "y")
    for operand, at in zip(operands, laid.packed[:2], strict=True):
        rate = fit.folding if operand == "y" and tile.folded else fit.packing
        if at is not None:
            packing += laid.packing_bytes(operand) / (rate * 1e12)
    launches = (2 if packing else 1) * fit.launch * 1e-6
    return max(cycles / fit.clock, memory) + packing + sums + launches


def _line_cycles(laid: Layout) -> float:
    """Cycles of a raw stage's copies: each line of up to 128 bytes takes as long as another.

    Longer, if channels of y are pages of memory apart and the line before is of another channel.
    A flat y has a copy for each row and class.
    """
    fit, problem, (n, y, _) = _COSTS, laid.problem, laid.box
    rows, columns = laid.pitch
    x_lines = value_parts(problem) * laid.in_block * n * (y + laid.stacked - 1)
    patches = n * max(map(len, laid.set_sources))
    y_lines = laid.out_block * patches
    far = 2 * math.prod(problem.y_shape[2:]) >= PAGE_BYTES
    lines = x_lines + rows * y_lines * max(1.0, columns * laid.pixel / LINE_BYTES)
    turns = x_lines + rows * y_lines if far else 0
    copies = rows * patches * flat.classes(problem, "y") if laid.flat else 0
    return max(lines * fit.line + turns * (fit.far_line - fit.line), copies * fit.copy)
