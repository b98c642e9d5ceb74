"""The cost model of `general_weight_gradient`."""

from tconv.jit.target import Target
from tconv.kernels import costs, family
from tconv.kernels.general_weight_gradient import layout
from tconv.kernels.general_weight_gradient.tiles import THREADS, Tile
from tconv.problem import Problem

COSTS = costs.load(__file__)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: issued instructions of the busiest SM, or the bytes moved."""
    real = family.accumulator_bytes(problem)
    own = tile.thread_rows * tile.thread_columns
    slices = THREADS // (tile.row_threads * tile.column_threads)
    per_pixel = (own + (tile.thread_rows + tile.thread_columns) / 2) / slices
    per_pixel += COSTS.staged * (tile.block_rows + tile.block_columns) / THREADS
    if real == 8:
        per_pixel *= 2
    count = layout.splits(problem, target, tile)
    pixels = -(-layout.pixels(problem) // count)
    instructions = pixels * per_pixel + COSTS.slice * slices + COSTS.block
    waves = -(-layout.split_tiles(problem, tile) * count // target.multiprocessors)
    issue = waves * instructions * (THREADS / 32) / 4 / COSTS.clock
    partial = 2 * count * real * problem.in_channels * layout.columns(problem)
    return max(issue, problem.bytes / COSTS.memory_rate) + partial / COSTS.memory_rate
