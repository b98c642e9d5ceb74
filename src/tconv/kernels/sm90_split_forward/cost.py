"""The modelled time of `sm90_split_forward`."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.sm90_split_forward.tiles import Tile
from tconv.kernels.sm90_tf32_forward.layout import CONSUMERS, layout
from tconv.problem import Problem


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel, and of the host."""
    return family.with_host(_device_cost(problem, target, tile))


def _device_cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel.

    A fit to 49 rows of KernelBench's layers, off by 7% in the root mean square: a stage takes 1000
    cycles at 1.75 GHz beside its products, and streamed weights keep a tile waiting.
    """
    laid = layout(problem, tile)
    products = 3 * laid.mean_pairs * tile.rows
    added = -(-laid.mean_pairs // tile.group) * tile.rows
    stage = (0.92 * products + 1.3 * added) * tile.columns / 2 + 1020
    of_tile = laid.chunks * stage + (0 if tile.resident else 800)
    waves = -(-laid.tiles // (laid.rings * target.multiprocessors))
    busy = waves * CONSUMERS * of_tile / 1.75e9
    moved = problem.bytes / 4.2e12
    return max(busy, moved) + 0.18 * min(busy, moved) + 8e-6
