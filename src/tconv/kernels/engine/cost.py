"""The modelled time of the engine's forward and input gradient."""

from __future__ import annotations

import math

from tconv.jit.target import Target
from tconv.kernels import costs, family
from tconv.kernels.engine import fold
from tconv.kernels.engine.layout import Layout, layout, packing_bytes, part_products, unread_bytes
from tconv.kernels.engine.tiles import Tile
from tconv.problem import Problem

_COSTS = costs.load(__file__)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel, and of the host where there are two launches."""
    fit = _COSTS
    laid = layout(problem, tile)
    # Averages over the row sets of a tile's positions.
    chunks = -(-laid.chunks // laid.shares)
    stages = chunks * sum(map(len, laid.kinds)) / len(laid.kinds)
    slots = chunks * laid.slot_count * laid.row_blocks / laid.row_sets
    cycles = float(tile.positions)  # of the consumers that have a slot
    if tile.positions_are_rows:
        # Reading 64 rows takes as long as products with 32 columns.
        cycles *= max(laid.group_rows, 32) / 64
    products = slots * cycles * laid.line_bytes / 128 * fit.product
    products *= part_products(problem)
    weights = 0 if laid.resident else slots * laid.weight_bytes
    stages *= laid.patch_loads(target)
    patch = laid.value_parts * laid.patch_positions * laid.line_bytes
    copied = (weights + stages * patch) / fit.rate
    written = _written(laid, tile)
    if tile.turned:
        rows, octets = laid.piece
        turning = fit.turning * rows * octets * laid.depth / 64 + fit.piece / laid.raw_pieces
        turning *= stages * laid.pieces[2] / laid.turning_warps
        # Most of it is not hidden: few stages fit, and shared memory serves both. But by a long
        # way to memory it is.
        products += max(0.0, turning - written) if laid.unfolds else turning
    patch_stages, weight_stages = (max(1, of_ring) for of_ring in laid.rings(target))
    products += fit.step * slots + fit.turn * stages
    if laid.strict:
        products += fit.strict_block * slots * tile.columns / 64
    # From one turn of the ring to the next, a stage is copied and multiplied.
    turns = (products + copied + fit.stage * stages) / patch_stages
    if not laid.resident:  # a ring of weights, or one for each consumer
        coming = (weights / fit.rate + fit.stage * slots) / tile.row_groups
        turns = max(turns, (products + coming) / weight_stages)
    main = max(products, copied, turns)
    of_tile = main + written + fit.tile
    if tile.raw:
        of_tile = _raw(laid, patch_stages) + (written if laid.forward else 0.0)
    waves = -(-laid.tiles * laid.shares // target.multiprocessors)
    # Neither hides the other in full; and of tiles that memory bounds, the quicker comes first.
    unread = 0 if laid.forward else unread_bytes(problem, columns=True)
    memory = (laid.call.bytes - unread) / (fit.memory * 1e12)
    modelled = math.hypot(waves * of_tile / fit.clock, memory)
    modelled *= _longer(laid, tile)
    modelled += fit.launch * 1e-6
    if tile.shared:
        modelled += fit.add_launch * 1e-6 + 2 * laid.share_bytes / (fit.add_sums * 1e12)
    if laid.maps_weights:
        return modelled
    weights_moved = 2 * laid.weight_pieces * laid.weight_bytes
    packing = weights_moved / (fit.pack_weights * 1e12)
    rate = fit.fold_images if laid.folds else fit.pack_images
    if laid.packs_image:
        packing += packing_bytes(laid.problem, "x" if laid.forward else "y") / (rate * 1e12)
    return family.with_host(modelled + packing + fit.pack_launch * 1e-6)


def _raw(laid: Layout, patch_stages: int) -> float:
    """Cycles of a raw tile; of a gradient its way to memory included."""
    fit = _COSTS
    stages = laid.chunks * len(laid.stages)
    rows = laid.chunks * laid.slot_count / (laid.stage_slots * laid.set_count)
    of_stage = laid.raw_lines(laid.box)
    # `coming`: what the next stages take to come, but for that which is multiplied.
    if laid.strict:
        products = laid.raw_products / 2 * (fit.strict_raw + fit.strict_column * laid.group_rows)
        coming = fit.strict_stage * stages
    else:
        products = laid.raw_products * (fit.raw_product + fit.raw_column * laid.group_rows)
        products += 0 if laid.resident else rows * laid.weight_stage_bytes / fit.raw_weights
        lines = stages * laid.depth * laid.box[0] * of_stage.copied
        coming = fit.raw_stage * stages + fit.raw_line * lines
    multiplied = products + fit.raw_row * rows + coming / (patch_stages - 1)
    if not laid.forward:  # near the tensor cores' rate
        multiplied = (multiplied**4 + laid.raw_cycles**4) ** (1 / 4)
    copies = stages * of_stage.rows * of_stage.segments if laid.flat else 0
    return math.hypot(multiplied, fit.raw_flat_row * copies)


def _written(laid: Layout, tile: Tile) -> float:
    """Cycles of a consumer's way to memory."""
    fit = _COSTS
    if laid.unfolds:
        pieces = tile.columns / 64
        runs = 1 + 64 / laid.pitch_x  # of a piece
        vectors = laid.block_rows * 64 / 4 / 128 + 2 * runs  # of a thread
        lines = laid.block_rows // fold.run(laid.call)
        written = laid.group_rows / 2 * fit.staged + vectors * fit.unfolded
        return pieces * (written + lines * runs * fit.unfolded_line)
    if laid.contiguous:
        vectors = tile.columns * laid.tile_results * laid.group_rows / laid.neighbours
        return vectors * (fit.turned if laid.adjacent else fit.scattered)
    return tile.columns * laid.tile_results * -(-laid.group_rows // laid.vector) * fit.written


def _longer(laid: Layout, tile: Tile) -> float:
    """How much longer kinds of tiles were measured to take than their parts say."""
    fit = _COSTS
    if laid.unfolds and laid.problem.groups > 1:
        return fit.unfolded_groups
    if laid.is_float32 and tile.raw:
        return 1.0 if laid.strict else fit.float32_raw
    if laid.is_float32 and tile.folded and tile.reach != "tap" and not laid.contiguous:
        return fit.float32_folded
    if laid.is_float32 and not tile.folded:
        packed = fit.float32_packed if laid.packs_image else 1.0
        if not tile.positions_are_rows:
            return packed * fit.float32
        return packed * fit.float32_positions * (64 / laid.group_rows) ** fit.float32_rows
    if laid.unfolds or tile.raw or not tile.positions_are_rows or laid.group_rows <= 32:
        return 1.0
    return fit.few_positions if tile.columns < 256 else fit.many_rows
