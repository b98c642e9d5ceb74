"""The cost model of `mma_forward`."""

from tconv.jit.target import Target
from tconv.kernels import mma_cost
from tconv.kernels.mma_forward.layout import layout
from tconv.kernels.mma_tiles import Layout, Tile
from tconv.problem import Problem

COSTS = mma_cost.COSTS


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of the busiest SM's work and of memory traffic.

    The two overlap, but never wholly: a part of the shorter time is added to the longer.
    """
    laid = layout(problem, tile)
    if tile.team:
        return mma_cost.team_cost(laid, target)
    busy, uneven = mma_cost.busy_and_uneven(laid, target, tile_work(laid))
    moved = problem.bytes / COSTS.memory_rate * uneven
    measured = COSTS.few_channels
    measured *= max(1.0, problem.in_channels_per_group / 64) ** COSTS.few_channels_depth
    if problem.out_channels_per_group > 8:
        channel_tiles = -(-problem.out_channels_per_group // laid.tile_channels)
        measured = COSTS.many_channels
        measured *= problem.in_channels_per_group**COSTS.many_channels_depth
        measured *= channel_tiles**COSTS.channel_tiles
        # Two rounds pay if there is work for many.
        few = laid.tiles < 8 * target.multiprocessors
        many = COSTS.few_rounds if few else COSTS.many_rounds
        measured *= COSTS.one_round if tile.rounds == 1 else many
        if laid.tiles < 2 * target.multiprocessors and problem.in_channels_per_group > 64:
            measured *= COSTS.deep  # many sequential steps, and few concurrent tiles
    aligned = problem.pattern.width.output_size % 4 == 0
    launch = COSTS.launch if aligned and problem.taps > 1 else COSTS.launch_unaligned
    work = max(busy, moved) + min(busy, moved) * COSTS.overlap
    time = COSTS.scale * measured * work + launch
    # `launch` has the weights of an ordinary layer. With many, loading them can be most of a call.
    return max(time, mma_cost.weights_cost(laid, target) + COSTS.team_launch)


def tile_work(laid: Layout) -> tuple[float, float, float]:
    """Work of one tile: instructions, cycles of shared memory, and cycles of the tensor cores."""
    problem = laid.problem
    stride_y, stride_x = problem.height.stride, problem.width.stride
    products = laid.units * laid.steps_8 * laid.products
    reads = laid.units * laid.steps_8 * 2 * laid.loads * laid.fragments
    weights = laid.units * laid.steps_8 * laid.slot_products * laid.warp_rows
    issue = products + reads * (2 if laid.round_on_load else 1) + weights
    issue += 12 * laid.units * laid.steps_8
    shared = reads + 4 * weights

    vector = 4 if laid.source_vectors else 1
    copies = laid.steps_8 * 8 * laid.patch_rows * laid.patch_vectors * 4 / vector / 32
    issue += 5 * copies + laid.chunks * laid.tile.warps * 80
    shared += copies * vector
    if not laid.round_on_load:
        issue += copies * (4 + vector)
        shared += 2 * copies * vector

    # Outputs go from registers to shared memory, from there to vectors, then to device memory.
    rows = laid.tile_rows * laid.tile_channels
    elements = rows * laid.tile_columns * stride_x / 32
    gathered = elements * len(laid.y.used)
    passes = laid.units * laid.warp_rows * laid.unit_phases * (laid.unit_channels // 16 + 1)
    pieces = rows * laid.parts * len(laid.y.used)
    issue += 1.5 * gathered + gathered / laid.store_vector * 3 + 12 * pieces + 60 * passes
    shared += 3 * gathered
    empty = stride_y - len(laid.y.used)
    issue += empty * (elements / laid.store_vector * 3 + 12 * rows)
    return issue, shared, products * 1024 / (0.6 * 1024)
