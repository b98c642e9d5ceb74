"""The modelled time of `pointwise_mma_forward`."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import costs
from tconv.kernels.pointwise_mma_forward.layout import Tile, layout
from tconv.problem import Problem

COSTS = costs.load(__file__)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: the busiest SM's work or the bytes, and a part of the shorter of the two."""
    laid = layout(problem, tile)
    multiply = laid.depth * tile.channels * tile.pixels / COSTS.products
    copied = laid.depth * tile.pixels / laid.source_vector
    cells = problem.height.stride * problem.width.stride
    written = tile.channels * laid.tile_pixels * cells / 4
    sums = tile.splits * tile.channels * tile.pixels
    block = multiply + COSTS.copy * copied + COSTS.weight * laid.depth * tile.channels
    block += COSTS.store * written + COSTS.sum * sums
    # Blocks of an SM overlap. One alone waits for its pixels, its weights and its sums.
    blocks = -(-laid.grid // target.multiprocessors)
    waves = -(-blocks // laid.blocks(target))
    busy = (blocks * block + COSTS.wait * waves) / COSTS.clock
    # Each block reads its weights, each tile of channels the pixels: from L2 but for the first.
    again = laid.grid * laid.depth * (tile.channels + laid.tile_pixels) * 4
    moved = problem.bytes / COSTS.memory_rate + again / COSTS.l2_rate
    return max(busy, moved) + COSTS.overlap * min(busy, moved) + COSTS.launch
