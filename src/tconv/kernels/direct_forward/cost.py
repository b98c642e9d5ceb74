"""The cost model of `direct_forward`."""

import math

from tconv.jit.target import Target
from tconv.kernels import costs
from tconv.kernels.direct_forward.layout import Layout, layout
from tconv.kernels.direct_forward.tiles import THREADS, WARPS, Tile
from tconv.problem import Problem

COSTS = costs.load(__file__, "channels")

SHORT_COLUMNS = 64
"""Most pixels of a row that count as a short piece."""

SECTOR = 8
"""Outputs in a sector of device memory."""


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of the busiest SM's work and of memory traffic.

    An SM's work is the instructions that it issues, or the cycles of its shared memory. Work and
    traffic overlap, but never wholly: a part of the shorter time is added to the longer.

    Factors are fitted by least squares of the logarithm, to the rows of this kernel that
    benchmarks/fit_costs.py reads and those of random150. The error is 11% in the root mean square
    of the former, 16% of the latter.
    """
    laid = layout(problem, tile)
    issue, shared = thread_work(laid)
    tiles = -(-laid.tiles // target.multiprocessors)
    resident = min(tiles, laid.blocks(target))
    # The used part of the issue slots. With few warps, more slots stay empty.
    efficiency = min(COSTS.issue_most, COSTS.issue_least + COSTS.issue_per_block * resident)
    busy = COSTS.scale * tiles * max(issue / efficiency, WARPS * shared) / COSTS.clock
    # A block first loads its weights. Threads copy them, and round them for TF32, one by one.
    passes = 2 if problem.math == "tf32" else 1
    busy += COSTS.weight * passes * laid.weights / THREADS / COSTS.clock
    # Less memory traffic is under way while some blocks compute one tile more than others.
    rounds = laid.tiles / laid.grid(target)
    uneven = 1 + COSTS.uneven_rounds * (math.ceil(rounds) / rounds - 1)
    kind = "channels" if tile.channels > 1 else "single"
    # Pieces of a narrow image are short whatever the tile.
    columns = min(laid.tile_columns, laid.pixel_columns)
    of_rows = costs.load(__file__, f"{kind}_long" if columns > SHORT_COLUMNS else kind)
    in_pieces = laid.tiles_yx[1] > 1
    if problem.pattern.width.output_size % 4:
        uneven *= of_rows.unaligned
    elif problem.width.output_size % SECTOR and in_pieces:
        uneven *= of_rows.half_sectors
    if in_pieces:
        uneven *= COSTS.pieces
    moved = problem.bytes / COSTS.memory_rate * uneven
    # A block asks for a tile's patch one tile ahead. So after the first, whose patch is part of the
    # launch, no tile takes less than memory to answer.
    busy = max(busy, (math.ceil(rounds) - 1) * COSTS.answer)
    return max(busy, moved) + COSTS.overlap * min(busy, moved) + COSTS.launch


def thread_work(laid: Layout) -> tuple[float, float]:
    """Instructions of a warp for one tile, and the cycles of shared memory that they take.

    Both are means over the warps, some of which may have no row in the image. A shared access of
    16 bytes a lane takes 4 cycles, or 2 if several lanes read the same.
    """
    problem, tile = laid.problem, laid.tile
    channels = problem.in_channels_per_group
    rows = laid.thread_rows * laid.rows_in_image
    inputs = laid.window_vectors * (laid.y.span + 1) * laid.groups_y
    weights = problem.height.kernel * laid.row_weights / 4
    issue = rows * channels * (laid.products + laid.groups_y * 4 + inputs + weights)
    shared = rows * channels * (4.0 * inputs + 2.0 * weights)

    vector = 4 if laid.source_vectors else 1
    places = -(-laid.patch_rows * laid.patch_vectors[0] * 4 // vector // 32) / WARPS
    each = (11 + 4.5 * vector) if problem.math == "tf32" else 11
    steps = laid.chunks * (laid.groups_y if laid.chunks > 1 else 1)
    issue += steps * (places * (40 + laid.depth * each) + 60) + 150
    shared += steps * places * laid.depth * vector * (3 if problem.math == "tf32" else 1)

    full = len(laid.y.used) * rows
    empty = problem.height.stride * rows - full
    outputs = laid.channels * tile.pixels * problem.width.stride
    stores = outputs / laid.store_vector + 6 * laid.channels * 32 / min(tile.threads_x, 32)
    issue += full * (outputs / 2 + outputs / laid.store_vector + stores) + empty * stores
    return issue, shared + full * 2 * outputs
