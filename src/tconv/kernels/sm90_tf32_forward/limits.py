"""The problems that `sm90_tf32_forward` and its tiles cannot serve."""

from __future__ import annotations

from collections.abc import Callable

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.sm90_tf32_forward.layout import (
    CHANNELS,
    MOST_SUMS,
    SECTOR,
    WARP_ROWS,
    Layout,
    layout,
)
from tconv.kernels.sm90_tf32_forward.schedule import Pair, schedule
from tconv.kernels.sm90_tf32_forward.tiles import WARPGROUP_ROWS, Tile
from tconv.problem import Problem

MOST_PRODUCTS = 160
"""Most unrolled products of a stage, or of a part of it. This bounds the size of the code."""

LEAST_CHANNELS = 4
"""Least input channels of a group. Products have 8 or 16; others are zero.

With fewer, a ReLU often leaves a pixel one value, which sm90_split_forward would repair.
"""

MOST_SUMS_OF_CLASSES = 128
"""Most accumulators of a thread if row groups have different sequences of slots."""


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    return hopper.tf32_why_not(problem, target) or shape_why_not(problem)


def shape_why_not(problem: Problem) -> str | None:
    """One sentence if the layer's shape or layout cannot be served, else None."""
    if problem.y_layout != "contiguous":
        return f"writes contiguous outputs, not {problem.y_layout}"
    if problem.in_channels_per_group < LEAST_CHANNELS:
        found = problem.in_channels_per_group
        return f"pays from {LEAST_CHANNELS} input channels of a group on, there are {found}"
    if problem.width.stride > WARP_ROWS:
        return f"a warp holds {WARP_ROWS} phases in x, the stride is {problem.width.stride}"
    rows, columns = (-(-axis.kernel // axis.stride) for axis in (problem.height, problem.width))
    if 2 * rows * (columns + 7) * CHANNELS * 4 > hopper.TARGET.shared_per_block:
        # Said before tiles of 8 columns and more are laid over so many slots, which takes minutes.
        return f"an output reads {rows} x {columns} pixels, two patches of them do not fit"
    return family.phases_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    laid = layout(problem, tile)
    if tile.sectors:
        x = problem.width
        if laid.tiles_yx[1] == 1:
            return "tiles would overlap in x, and there is one"
        if x.output_size % SECTOR == (x.q_range.start * x.stride - x.padding) % SECTOR == 0:
            return "pieces of rows are whole sectors without an overlap of tiles"
    return family.once(laid, ("why_not", target), lambda: _why_not(laid, target))


def _why_not(laid: Layout, target: Target) -> str | None:
    """The same of a layout, whatever the size."""
    tile = laid.tile
    if tile.sums > MOST_SUMS and not laid.tensor_map:
        # Beyond it, registers spilled, or ptxas serialised the products.
        return f"{tile.sums} sums of a thread leave producers that load through registers too few"
    if tile.sums > MOST_SUMS_OF_CLASSES and len(laid.classes) > 1:
        # Registers spilled beside the code of further classes.
        return f"{tile.sums} sums of a thread want row groups that all have the same slots"
    if tile.common and tile.resident and tile.rows == 4 and laid.row_step > 1:
        # 4 bytes by NVRTC 13.0, none by 13.5; kb78 takes 0.408 ms, 0.402 with three rows.
        return "spills where a row of pixels stands for several output rows"
    through_registers = tile.half and tile.resident and tile.columns == 88 and not laid.tensor_map
    if through_registers and max(map(len, laid.classes)) == 1:
        # 388 bytes by NVRTC 13.5, none by 13.0.
        return "spills where pixels come through registers for one product of each row"
    if tile.half:
        refusal = laid_why_not(laid.repairing, target, MOST_PRODUCTS, len)
        if refusal is not None:
            return f"what repairs it: {refusal}"

    def unrolled(pairs: tuple[Pair, ...]) -> int:
        return len(pairs) // schedule(pairs, tile, laid.chunks)[0]

    return laid_why_not(laid, target, MOST_PRODUCTS, unrolled)


def laid_why_not(
    laid: Layout, target: Target, most_products: int, unrolled: Callable[[tuple[Pair, ...]], int]
) -> str | None:
    """`tile_why_not` of a tile laid over a problem.

    Args:
        laid: it.
        target: the GPU.
        most_products: a bound on the unrolled products.
        unrolled: how many of a sequence of pairs are unrolled. Others are further turns of a loop.
    """
    tile = laid.tile
    if laid.stages(target) == (0, 0):
        beside = f" beside {laid.resident_bytes} bytes of weights" if tile.resident else ""
        return (
            f"two stages of {laid.stage_bytes} bytes for each warpgroup do not fit "
            f"{target.arch}{beside}"
        )
    if laid.tensor_map and max(laid.patch_columns, laid.patch_rows) > 256:
        return f"a patch of {laid.patch_rows} x {laid.patch_columns} is over a tensor map's 256"
    products = 0 if laid.rolled else max(map(unrolled, laid.classes)) * tile.rows
    if products > most_products:
        return f"a stage has {products} unrolled products, {most_products} is the limit"
    if not all(laid.classes):
        return "some row groups have no slot at all, which would serialise the others' products"
    if len(laid.classes) > 4:
        return f"row groups have {len(laid.classes)} different sequences of slots, 4 is the limit"
    if tile.m_tiles > 1 and any(
        pair.m_tile == 0 and len({p.m_tile for p in pairs}) < tile.m_tiles
        for pairs in laid.classes
        for pair in pairs[:1]
    ):
        return f"the matrix has fewer rows than {tile.m_tiles} times {WARPGROUP_ROWS}"
    return None
