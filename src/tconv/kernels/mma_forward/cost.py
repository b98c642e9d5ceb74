"""The cost model of `mma_forward`."""

import math

from tconv.jit.target import Target
from tconv.kernels import costs, family
from tconv.kernels.mma_forward.layout import Layout, layout
from tconv.kernels.mma_forward.tiles import Tile
from tconv.problem import Problem

COSTS = costs.load(__file__)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of the busiest SM's work and of memory traffic.

    The two overlap, but never wholly: a part of the shorter time is added to the longer.
    """
    laid = layout(problem, tile)
    if tile.team:
        return team_cost(laid, target)
    busy, uneven = busy_and_uneven(laid, target, family.once(laid, "work", lambda: tile_work(laid)))
    moved = problem.bytes / COSTS.memory_rate * uneven * pieces(laid)
    measured = COSTS.few_channels
    measured *= max(1.0, problem.in_channels_per_group / 64) ** COSTS.few_channels_depth
    if problem.out_channels_per_group > 8:
        channel_tiles = -(-problem.out_channels_per_group // laid.tile_channels)
        measured = COSTS.many_channels
        measured *= problem.in_channels_per_group**COSTS.many_channels_depth
        measured *= channel_tiles**COSTS.channel_tiles
        measured *= COSTS.one_unit
        if laid.tiles < 2 * target.multiprocessors and problem.in_channels_per_group > 64:
            measured *= COSTS.deep  # many sequential steps, and few concurrent tiles
    aligned = problem.pattern.width.output_size % 4 == 0
    launch = COSTS.launch if aligned and problem.taps > 1 else COSTS.launch_unaligned
    work = max(busy, moved) + min(busy, moved) * COSTS.overlap
    time = COSTS.scale * measured * work + launch
    # `launch` has the weights of an ordinary layer. With many, loading them can be most of a call.
    return max(time, weights_cost(laid, target) + COSTS.team_launch)


def tile_work(laid: Layout) -> tuple[float, float, float]:
    """Work of one tile: instructions, cycles of shared memory, and cycles of the tensor cores."""
    problem = laid.problem
    stride_y, stride_x = problem.height.stride, problem.width.stride
    products = laid.units * laid.steps_8 * laid.products
    reads = laid.units * laid.steps_8 * 2 * laid.loads * laid.fragments
    weights = laid.units * laid.steps_8 * laid.slot_products
    issue = products + reads * (2 if laid.round_on_load else 1) + weights
    issue += 12 * laid.units * laid.steps_8
    shared = reads + 4 * weights

    vector = 4 if laid.source_vectors else 1
    copies = laid.steps_8 * 8 * laid.patch_rows * laid.patch_vectors * 4 / vector / 32
    # A copy of 4 bytes takes the slots of four of 16 bytes.
    issue += (5 if laid.source_vectors else 20) * copies + laid.chunks * laid.tile.warps * 80
    shared += copies * vector
    if not laid.round_on_load:
        issue += copies * (4 + vector)
        shared += 2 * copies * vector

    # Outputs go from registers to shared memory, from there to vectors, then to device memory.
    rows = laid.row_groups * laid.tile_channels
    elements = rows * laid.tile_columns * stride_x / 32
    gathered = elements * len(laid.y.used)
    passes = laid.units * laid.unit_phases * (laid.unit_channels // 16 + 1)
    pieces = rows * laid.parts * len(laid.y.used)
    issue += 1.5 * gathered + gathered / laid.store_vector * 3 + 12 * pieces + 60 * passes
    shared += 3 * gathered
    empty = stride_y - len(laid.y.used)
    issue += empty * (elements / laid.store_vector * 3 + 12 * rows)
    return issue, shared, products * 1024 / (0.6 * 1024)


def busy_and_uneven(
    laid: Layout, target: Target, work: tuple[float, float, float]
) -> tuple[float, float]:
    """Seconds that the busiest SM computes, and a factor on the time of memory traffic.

    Args:
        laid: the tile.
        target: the GPU.
        work: for one tile: instructions, cycles of shared memory, and cycles of an SM's tensor
            cores.
    """
    issue, shared, multiply = work
    blocks = laid.blocks(target)
    rounds = laid.tiles / laid.grid(target)
    tiles = min(-(-laid.tiles // target.multiprocessors), math.ceil(rounds) * blocks)
    resident = min(tiles, blocks) * laid.tile.warps
    # The used part of the issue slots. With few warps, more slots stay empty.
    efficiency = min(COSTS.issue_most, COSTS.issue_least + COSTS.issue_per_warp * resident)
    busiest = max(issue / 4, shared, multiply)
    rest = issue / 4 + shared + multiply - busiest
    busy = tiles * (busiest / efficiency + COSTS.rest_overlap * rest) / COSTS.clock
    # Less memory traffic is under way while some blocks compute one tile more than others, or
    # while all blocks of an SM wait.
    uneven = COSTS.uneven_rounds * (math.ceil(rounds) / rounds - 1)
    return busy, 1 + uneven + COSTS.uneven_waits * 4 / resident


def pieces(laid: Layout) -> float:
    """A factor on the time of memory traffic where output rows are written in pieces."""
    return 1 + COSTS.piece / laid.tile_columns if laid.tiles_yx[1] > 1 else 1.0


def team_cost(laid: Layout, target: Target) -> float:
    """Modelled seconds of a tile whose warps write rows together, from counted instructions.

    The error is 11% in the root mean square of 88 rows of 39 layers.
    """
    problem = laid.problem
    issue, shared, products = family.once(laid, "work", lambda: team_work(laid))
    # Multiply-adds of an SM in a cycle, from data sheets. On Hopper, mma.sync reaches 60% of that.
    rate = 512 if target.capability == (8, 0) else 614 if target.major in (9, 10) else 128
    busy, uneven = busy_and_uneven(laid, target, (issue, shared, products * 1024 / rate))
    if problem.pattern.width.output_size % 4:
        uneven *= COSTS.team_unaligned
    moved = problem.bytes / COSTS.memory_rate * uneven * pieces(laid)
    busy *= COSTS.team_scale
    time = max(busy, moved) + COSTS.team_overlap * min(busy, moved)
    return time + weights_cost(laid, target) + COSTS.team_launch


def weights_cost(laid: Layout, target: Target) -> float:
    """Seconds until an SM's blocks have their weights, which they load in words of 4 bytes."""
    problem = laid.problem
    blocks = min(laid.blocks(target), -(-laid.tiles // target.multiprocessors))
    weights = blocks * problem.taps * problem.in_channels_per_group * laid.tile_channels
    return COSTS.team_weights * weights


def team_work(laid: Layout) -> tuple[float, float, float]:
    """Instructions, cycles of shared memory, and `mma` instructions of one tile.

    The tile's warps write rows together. Instructions were counted in the code for sm_90:

    - A split takes 5 instructions.
    - A product of 8 channels takes 3 `mma` and 4 additions.
    - A vector of an output row takes 4 instructions, or 5 where no tap reaches it.

    NOTE: The code has changed since the sweep that this was fitted to. A product now has two `mma`
    of the old length and two of half that, a split half an instruction more, and a fragment of
    weights three loads in place of two.
    """
    problem, tile = laid.problem, laid.tile
    steps = laid.units * laid.steps_8
    products = steps * laid.products
    reads = steps * laid.loads * laid.fragments * 2
    weights = steps * laid.slot_products * (2 if tile.split else 1)
    if tile.split:
        issue = 7 * products + 6 * reads + weights + 20 * steps * laid.loads + 70 * laid.units
    else:
        issue = products + (2 if laid.round_on_load else 1) * reads + weights
        issue += 12 * steps + 70 * laid.units

    vector = 4 if laid.source_vectors else 1
    copies = laid.steps_8 * 8 * laid.patch_rows * laid.patch_vectors * 4 / vector / 32
    issue += 5 * copies + laid.chunks * tile.warps * 180

    rows = laid.row_groups * laid.tile_channels
    elements = rows * laid.tile_columns * problem.width.stride / 32
    used = len(laid.y.used)
    passes = laid.units * laid.unit_phases * (laid.unit_channels // 16 + 1)
    issue += 1.2 * elements * used + 45 * passes
    issue += used * (4 * elements / laid.store_vector + 20 * rows)
    issue += (problem.height.stride - used) * (5 * elements / laid.store_vector + 20 * rows)
    shared = reads + 4 * weights + copies * vector + 2 * elements * used
    return issue, shared, (3 if tile.split else 1) * products
