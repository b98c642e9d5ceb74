"""The cost model of `general_weight_gradient`."""

from tconv.jit.target import Target
from tconv.kernels import costs, family
from tconv.kernels.general_weight_gradient import layout
from tconv.kernels.general_weight_gradient.tiles import THREADS, Tile
from tconv.problem import ITEM_BYTES, Problem

COSTS = costs.load(__file__)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: issued instructions of the busiest SM, or the bytes moved."""
    real = family.accumulator_bytes(problem)
    sums, loaded = tile.rows * tile.columns, tile.rows + tile.columns
    count, tiles = layout.splits(problem, target, tile), layout.split_tiles(problem, tile)
    turns = layout.split_pixels(problem, count) / THREADS
    instructions = turns * (sums + COSTS.loaded * loaded + COSTS.pixel) + COSTS.added * sums
    if real == 8:
        instructions *= 2
    waves = -(-tiles * count // target.multiprocessors)
    issue = waves * (instructions + COSTS.block) * (THREADS / 32) / 4 / COSTS.clock
    read = tiles * layout.pixels(problem) * loaded * ITEM_BYTES[problem.dtype] / COSTS.l2_rate
    partial = 2 * count * real * layout.weights(problem)
    moved = problem.bytes / COSTS.memory_rate
    return COSTS.scale * (max(issue, read, moved) + partial / COSTS.memory_rate)
