"""Modelled time of `mma_frames_forward`."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import costs
from tconv.kernels.mma_frames_forward.layout import DEPTH, PHASES, THREADS, Tile, layout
from tconv.problem import Problem

COSTS = costs.load(__file__)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: instructions of the busiest SM, or the bytes moved."""
    laid = layout(problem, tile)
    fragments = tile.pixels // 16
    # A step of 8 channels at one slot: products of two fragments of phases, and operands, each
    # loaded and rounded.
    step = 2 * fragments + COSTS.operand * (8 + 2 * fragments)
    copied = DEPTH * (laid.slots * PHASES + laid.source_pitch) / THREADS
    # Warps of 8 channels each: an SM's four schedulers have two of a block.
    stage = 2 * (laid.slots * step + COSTS.copy * copied + COSTS.stage)
    stages = -(-problem.in_channels_per_group // DEPTH)
    of_tile = stages * stage + COSTS.tile * fragments
    tiles = -(-laid.tiles // target.multiprocessors)
    # With few blocks, issue slots stay empty.
    used = min(COSTS.issue_most, COSTS.issue_block * min(tiles, laid.blocks(target)))
    busy = tiles * of_tile / used / COSTS.clock
    return max(busy, problem.bytes / COSTS.memory_rate) + COSTS.launch
