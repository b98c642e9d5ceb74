"""The cost model of `direct_forward`."""

import math

from tconv.jit.target import Target
from tconv.kernels.direct_forward.layout import Layout, layout
from tconv.kernels.direct_forward.tiles import THREADS, WARPS, Tile
from tconv.problem import Problem


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: what the busiest SM issues, or waits for of shared memory, and the bytes.

    The two overlap, but never wholly: a part of the lesser is added. Factors are fitted by least
    squares of the logarithm to the 184 rows that benchmarks/fit_costs.py reads of it: off by
    13% in the root mean square.
    """
    laid = layout(problem, tile)
    issue, shared = thread_work(laid)
    tiles = -(-laid.tiles // target.multiprocessors)
    resident = min(tiles, laid.blocks(target))
    # Of the issue slots: few warps leave more of them empty.
    efficiency = min(0.85, 0.45 + 0.12 * resident)
    busy = 0.97 * tiles * max(issue / efficiency, WARPS * shared) / 1.7e9
    # A block begins with its weights, which a thread copies, and for TF32 rounds, one by one.
    passes = 2 if problem.math == "tf32" else 1
    busy += 200 * passes * laid.weights / THREADS / 1.7e9
    # While some blocks walk one tile more than others, or all of an SM's wait, less is moved.
    rounds = laid.tiles / laid.grid(target)
    uneven = 1 + 0.3 * (math.ceil(rounds) / rounds - 1) + 0.1 / resident
    if problem.width.output_size % 4:  # rows that begin between two vectors; least in long pieces
        if tile.channels > 1:
            uneven *= 1.25 if tile.threads_x == 32 else 1.48
        else:
            uneven *= 1.48 if tile.threads_x == 32 else 1.75
    if laid.tiles_yx[1] > 1:
        uneven *= 1.04  # set by hand: several pieces of each output row
    moved = problem.bytes / 4e12 * uneven
    return max(busy, moved) + 0.2 * min(busy, moved) + 5.5e-6


def thread_work(laid: Layout) -> tuple[float, float]:
    """Instructions of a warp for one tile, and the cycles that shared memory is busy with them.

    Means of the warps, of which some may have no row in the image. A shared access of 16 bytes a
    lane takes 4 cycles, 2 where several lanes read the same.
    """
    problem, tile = laid.problem, laid.tile
    channels = problem.in_channels_per_group
    rows = laid.thread_rows * laid.rows_in_image
    inputs = laid.window_vectors * (laid.y.span + 1) * laid.groups_y
    weights = problem.height.kernel * laid.row_weights / 4
    issue = rows * channels * (laid.products + laid.groups_y * 4 + inputs + weights)
    shared = rows * channels * (4.0 * inputs + 2.0 * weights)

    # What whole sectors add to a row was not found to cost anything.
    used = -(-(laid.skew + laid.tile_columns + laid.x.span) // 4)
    vector = 4 if laid.source_vectors else 1
    places = -(-laid.patch_rows * used * 4 // vector // 32) / WARPS
    each = (11 + 4.5 * vector) if problem.math == "tf32" else 11
    steps = laid.chunks * (laid.groups_y if laid.chunks > 1 else 1)
    issue += steps * (places * (40 + laid.depth * each) + 60) + 150
    shared += steps * places * laid.depth * vector * (3 if problem.math == "tf32" else 1)

    full = len(laid.y.used) * rows
    empty = problem.height.stride * rows - full
    outputs = laid.channels * tile.pixels * problem.width.stride
    stores = outputs / laid.store_vector + 6 * laid.channels * 32 / tile.threads_x
    issue += full * (outputs / 2 + outputs / laid.store_vector + stores) + empty * stores
    return issue, shared + full * 2 * outputs
