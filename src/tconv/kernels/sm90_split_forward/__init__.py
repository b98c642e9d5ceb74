"""`sm90_split_forward`: strict float32 on Hopper's tensor cores, as products of parts.

Tiles, patches and packed weights are those of `sm90_tf32_forward`. Tiles multiply two parts of
float16; at its end a block computes those in three parts of bfloat16 whose values two of float16
cannot hold.
See `sm90_split_forward.cu`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels import sm90_tf32_forward as patches
from tconv.kernels.launch import Launch
from tconv.kernels.sm90_tf32_forward import CONSUMERS, Layout, Pair, layout
from tconv.kernels.source import KernelSource
from tconv.problem import TF32_LEAST_CHANNELS, Direction, Problem

STEM = "sm90_split_forward"
DIRECTION: Direction = "forward"

MOST_PRODUCTS = 128
"""Products of a stage, each of them three: a bound on the code."""

MOST_LOADED_COLUMNS = 64
"""Of a tile whose producers load pixels themselves: with 88, they spill (NVRTC 13.5)."""

MOST_UNROLLED = {1: 1700, 2: 2000}
"""Columns of unrolled products, by temporaries: above, a loop goes through equal parts of a stage
where there are some, since ptxas takes seconds. kb65's 21 products of four rows and 48 columns took
it 8 s. With two temporaries it takes less, and a part's end waits for what a group's does not.
"""


@dataclass(frozen=True)
class Tile(patches.Tile):
    """What one warpgroup computes at a time, and how its sums leave the tensor cores.

    Attributes:
        temporaries: rows whose products are under way: 2, or 1 where registers allow no more.
        group: slots, at most, whose products are added up on the tensor cores.
    """

    temporaries: int = 2
    group: int = 2


TILES = (
    Tile(columns=48, rows=4, m_tiles=1, half=True, temporaries=1, group=4),
    Tile(columns=88, rows=2, m_tiles=1, half=True, temporaries=1, group=3),
    Tile(columns=64, rows=2, m_tiles=1, half=True, group=3),
    Tile(columns=24, rows=4, m_tiles=1, half=True, group=3),
    Tile(columns=48, rows=3, m_tiles=1, resident=True, half=True, group=3),
    Tile(columns=40, rows=4, m_tiles=1, resident=True, half=True, group=3),
    Tile(columns=40, rows=3, m_tiles=1, resident=True, half=True, group=4),
)


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    if target.arch != "sm_90a":
        return f"needs the tensor cores of sm_90a, the target is {target.arch}"
    if problem.dtype != "float32" or problem.math != "ieee":
        return f"computes strict float32, not {problem.dtype}/{problem.math}"
    if problem.in_channels_per_group < TF32_LEAST_CHANNELS:
        found = problem.in_channels_per_group
        return f"pays from {TF32_LEAST_CHANNELS} input channels of a group on, there are {found}"
    return patches.shape_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    laid = layout(problem, tile)
    if tile.columns > MOST_LOADED_COLUMNS and not problem.x_aligned:
        return (
            f"without a tensor map its producers have registers for {MOST_LOADED_COLUMNS} columns, "
            f"not for {tile.columns}"
        )
    refusal = patches.laid_why_not(laid.repairing, target, MOST_PRODUCTS)
    if refusal is not None:
        return f"what repairs it: {refusal}"
    return patches.laid_why_not(laid, target, MOST_PRODUCTS)


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


def source(problem: Problem, tile: Tile) -> KernelSource:
    """The kernel specialised for the problem's layer.

    Of a tile that is not `half`, which tests ask for, what would repair it alone.
    """
    laid = layout(problem, tile)
    if not tile.half:
        return _source(laid.repairing, repairs=None)
    return patches.ending_with(_source(laid, None), _source(laid.repairing, repairs=laid))


def _source(laid: Layout, repairs: Layout | None) -> KernelSource:
    tile = laid.tile
    assert isinstance(tile, Tile)
    each = (
        (1, len(pairs), 1) if laid.rolled else _schedule(pairs, tile, laid.chunks)
        for pairs in laid.classes
    )
    parts, groups, unroll = zip(*each, strict=True)
    schedule = (
        ("class_parts", parts),
        ("class_groups", groups),
        ("class_unroll", unroll),
        ("temporaries", tile.temporaries),
    )
    return patches.kernel_source(STEM, laid, schedule, repairs)


def _schedule(pairs: tuple[Pair, ...], tile: Tile, chunks: int) -> tuple[int, int, int]:
    """(parts of a stage in a loop, groups of a part's slots, stages unrolled together).

    Groups hold their weights in two sets of registers by turns, so there is an even number of them,
    or a part's end moves the next one's. One slot has two stages unrolled, if they are even.
    """
    most = MOST_UNROLLED[tile.temporaries]
    if len(pairs) * tile.rows * tile.columns > most:
        slot_rows = len({pair.slot_y for pair in pairs})
        for parts in range(2, slot_rows + 1):
            if slot_rows % parts == 0 and patches.are_alike(pairs, parts):
                count = len(pairs) // parts
                groups = -(-count // tile.group)
                if count * tile.rows * tile.columns <= most:
                    return parts, groups, 1
    groups = -(-len(pairs) // tile.group)
    if groups % 2 and groups < len(pairs):
        groups += 1
    return 1, groups, 2 if groups % 2 and chunks % 2 == 0 else 1


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The packing, and the kernel: one block for each SM, whose warpgroups walk the tiles."""
    return patches.packed_launches(problem, target, tile, source(problem, tile))
