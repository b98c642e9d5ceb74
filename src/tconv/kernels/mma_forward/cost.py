"""The cost model of `mma_forward`."""

from tconv.jit.target import Target
from tconv.kernels import mma_cost
from tconv.kernels.mma_forward.layout import layout
from tconv.kernels.mma_tiles import Layout, Tile
from tconv.problem import Problem


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: what the busiest SM issues, multiplies or waits for, and the bytes.

    They overlap, but never wholly: a fifth of the lesser is added.
    """
    laid = layout(problem, tile)
    if tile.team:
        return mma_cost.team_cost(laid, target)
    busy, uneven = mma_cost.busy_and_uneven(laid, target, tile_work(laid))
    moved = problem.bytes / 4e12 * uneven
    # What the sweeps of 89 layers took beside that, benchmarks/fit_costs.py: inputs are read once
    # for each tile of output channels.
    measured = 0.85 * max(1.0, problem.in_channels_per_group / 64) ** 0.25
    if problem.out_channels_per_group > 8:
        channel_tiles = -(-problem.out_channels_per_group // laid.tile_channels)
        measured = 0.62 * problem.in_channels_per_group**0.18 * channel_tiles**0.35
        # Two rounds pay where there is work for many.
        few = laid.tiles < 8 * target.multiprocessors
        measured *= 1.1 if tile.rounds == 1 else 1.3 if few else 0.85
        if laid.tiles < 2 * target.multiprocessors and problem.in_channels_per_group > 64:
            measured *= 1.5  # many steps one after another, and few tiles beside each other
    launch = 10e-6 if problem.width.output_size % 4 == 0 else 7e-6
    return 0.95 * measured * (max(busy, moved) + min(busy, moved) / 5) + launch


def tile_work(laid: Layout) -> tuple[float, float, float]:
    """Of one tile: instructions, cycles of shared memory, and of the tensor cores, of an SM."""
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

    # Registers to shared memory, from there to vectors, and those to the output.
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
