"""The launches of `sm90_split_forward`: those of `sm90_tf32_forward`, with another kernel."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.launch import Launch
from tconv.kernels.sm90_split_forward.tiles import Tile
from tconv.kernels.sm90_tf32_forward.launch import (
    ending_with,
    indices,
    kernel_source,
    packed_launches,
)
from tconv.kernels.sm90_tf32_forward.layout import Layout, layout
from tconv.kernels.sm90_tf32_forward.schedule import Pair, are_alike
from tconv.kernels.source import KernelSource
from tconv.problem import Problem

STEM = "sm90_split_forward"

MOST_UNROLLED = {1: 1700, 2: 2000}
"""Most columns of unrolled products, by the number of temporaries.

Beyond the limit, a loop runs over equal parts of a stage, if it has any, since ptxas takes seconds:
8 s for kb65's 21 products of four rows and 48 columns. With two temporaries ptxas takes less, and
the end of a part waits where the end of a group does not.
"""


def source(problem: Problem, tile: Tile) -> KernelSource:
    """The kernel specialised for the problem's layer.

    For a tile that is not `half`, which only tests use, it is the repair kernel alone.
    """
    laid = layout(problem, tile)
    return family.once(laid, ("source", indices(laid)), lambda: _whole_source(laid))


def _whole_source(laid: Layout) -> KernelSource:
    if not laid.tile.half:
        return _source(laid.repairing, repairs=None)
    return ending_with(_source(laid, None), _source(laid.repairing, repairs=laid))


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
    return kernel_source(STEM, laid, schedule, repairs)


def _schedule(pairs: tuple[Pair, ...], tile: Tile, chunks: int) -> tuple[int, int, int]:
    """(parts of a stage in a loop, groups of a part's slots, stages unrolled together).

    Groups hold their weights in two sets of registers in turn. So their number is even, or the end
    of a part moves the next part's weights. A single slot has two stages unrolled, if the number of
    stages is even.
    """
    most = MOST_UNROLLED[tile.temporaries]
    if len(pairs) * tile.rows * tile.columns > most:
        slot_rows = len({pair.slot_y for pair in pairs})
        for parts in range(2, slot_rows + 1):
            if slot_rows % parts == 0 and are_alike(pairs, parts):
                count = len(pairs) // parts
                groups = -(-count // tile.group)
                if count * tile.rows * tile.columns <= most:
                    return parts, groups, 1
    groups = -(-len(pairs) // tile.group)
    if groups % 2 and groups < len(pairs):
        groups += 1
    return 1, groups, 2 if groups % 2 and chunks % 2 == 0 else 1


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The packing, and the kernel: one block for each SM, whose warpgroups loop over the tiles."""
    return packed_launches(problem, target, tile, source(problem, tile))
