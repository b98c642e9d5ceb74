"""The modelled time of `pointwise_mma_forward`."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import costs
from tconv.kernels.pointwise_mma_forward.layout import Tile, layout
from tconv.problem import Problem

COSTS = costs.load(__file__)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: the longest of work, memory's and L2's, and a part of the others."""
    laid = layout(problem, target, tile)
    multiply = laid.depth * tile.rows * tile.pixels / COSTS.products
    copied = laid.depth * (tile.pixels / laid.source_vector + laid.weight_copies)
    outputs = laid.channels * problem.height.output_size * problem.width.output_size
    written = outputs / laid.tiles / 4
    sums = tile.splits * tile.rows * tile.pixels
    # Taps that an output looks for, most of which are of another phase or beside the image.
    looked = 0 if laid.pointwise else outputs * problem.taps
    block = multiply + COSTS.copy * copied + COSTS.sum * sums + COSTS.tap * looked
    # A block waits for its chunks, while others of the SM work.
    blocks = -(-laid.grid // target.multiprocessors)
    held = laid.blocks()
    waits = 1 + (-(-blocks // held) - 1) / held
    # Vectors of which some outputs have no pixel: a thread makes one after the other.
    sparse = 0 if laid.dense else written / tile.threads
    wait = COSTS.turn * laid.chunks + COSTS.sparse * sparse
    busy = (blocks * block + wait * waits) / COSTS.clock
    # Each block reads its weights, each tile of channels the pixels: from L2 but for the first.
    again = laid.grid * laid.depth * (tile.rows + laid.tile_pixels) * 4
    parts = (busy, problem.bytes / COSTS.memory_rate, again / COSTS.l2_rate)
    modelled = max(parts) + COSTS.overlap * (sum(parts) - max(parts)) + COSTS.launch
    return modelled * (COSTS.two_blocks if tile.blocks == 2 else 1)
