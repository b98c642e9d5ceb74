"""The modelled time of `sm90_tf32_forward`."""

from __future__ import annotations

import dataclasses
from typing import Any

from tconv.jit.target import Target
from tconv.kernels import costs, family
from tconv.kernels.sm90_tf32_forward.layout import CONSUMERS, Layout, layout
from tconv.kernels.sm90_tf32_forward.tiles import Tile
from tconv.problem import Problem

VARIANTS = {
    (False, False): "streamed",
    (False, True): "resident",
    (True, False): "half streamed",
    (True, True): "half resident",
}
"""Variants of the constants, by `half` and `resident` of a tile."""


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel, and of the host."""
    return family.with_host(_device_cost(problem, target, tile))


def _device_cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel: cycles of a tile's parts, and bytes of memory."""
    laid = layout(problem, tile)
    fit = costs.load(__file__, VARIANTS[tile.half, tile.resident])
    of_tile = family.once(laid, ("tile", target), lambda: _tile_cycles(laid, fit, target))
    waves = -(-laid.tiles // (laid.rings * target.multiprocessors))
    cycles = waves * laid.rings * of_tile + laid.resident_bytes / fit.l2_bytes
    busy = cycles / fit.clock
    # Sectors are whole: they have no partial ends.
    ends = 1 if tile.sectors else 1 + fit.edge / (tile.columns * problem.width.stride)
    moved = problem.bytes * ends / (fit.bytes * 1e12)
    modelled = max(busy, moved) + fit.both * min(busy, moved) + fit.launch * 1e-6
    # With many products, power limits the clock.
    intensity = problem.flops / problem.bytes
    many = min(1, max(0, (intensity - fit.power_from) / fit.power_over))
    if tile.half:
        of_rows = {3: fit.power_rows_3, 4: fit.power_rows_4}
        power = fit.power_sectors if tile.sectors else of_rows.get(tile.rows, 0)
        modelled *= 1 + power * many
    if tile.common:
        alone = _device_cost(problem, target, dataclasses.replace(tile, common=False))
        modelled = fit.common * modelled + (1 - fit.common) * alone
        if tile.resident and not tile.sectors:
            modelled *= 1 + fit.power_common * many
    return modelled * (fit.one_row if tile.rows == 1 else 1)


def _tile_cycles(laid: Layout, fit: Any, target: Target) -> float:
    """Cycles of a tile, whatever the size."""
    tile = laid.tile
    pixels = laid.tile_rows * tile.columns  # that a patch serves
    products = laid.mean_pairs * pixels / 2
    patch = (fit.mapped if laid.tensor_map else fit.loaded) * laid.patch_rows * laid.patch_columns
    consumers = CONSUMERS // laid.rings
    consumed = consumers * laid.mean_pairs * fit.pair + fit.product * products
    stage = fit.stage + max(consumed, patch + fit.beside * products)
    if laid.tensor_map and laid.stages(target)[1] == 1:
        stage *= 1 + fit.single
    output = fit.output if laid.problem.width.stride == 1 else fit.phased
    output *= fit.sectors_output if tile.sectors else 1
    return laid.chunks * stage + tile.m_tiles * (output * pixels + fit.row * laid.tile_rows)
