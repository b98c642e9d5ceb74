"""How a stage's products are unrolled, and how far ahead their weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from tconv.kernels.sm90_tf32_forward.tiles import Tile

MOST_UNROLLED = 4000
"""Most columns of unrolled products. Unrolled code compiles slowly.

Beyond the limit, a loop runs over equal parts of a stage, if it has any.
"""


@dataclass(frozen=True)
class Pair:
    """One product of a stage: row group `m_tile` of the tile with the pixels at a slot."""

    m_tile: int
    slot_y: int
    slot_x: int


def schedule(pairs: tuple[Pair, ...], tile: Tile, chunks: int) -> tuple[int, int, int]:
    """(parts of a stage in a loop, stages unrolled together, pairs whose weights a thread holds).

    The first that divides is taken, since shared memory answers in less time than a pair's products
    take. A part's first weights are loaded while the last of the previous part are in use. So they
    need registers of their own.
    """
    columns = tile.rows * tile.columns
    if tile.m_tiles == 1 and len(pairs) * columns > MOST_UNROLLED:
        for parts in range(2, len({pair.slot_y for pair in pairs}) + 1):
            count = len(pairs) // parts
            if count * columns <= MOST_UNROLLED and are_alike(pairs, parts):
                for ahead in (3, 4, 2):
                    if ahead <= count and count % ahead != 1:
                        return parts, 1, ahead
    for ahead in (3, 4, 2):
        for unroll in (1, 2, 4):
            held = len(pairs) * unroll
            if chunks % unroll == 0 and held % ahead == 0 and held <= 64:
                return 1, unroll, ahead
    return 1, 1, 1


def are_alike(pairs: tuple[Pair, ...], parts: int) -> bool:
    """Whether a stage divides into so many parts with the same slots, each shifted in y."""
    count = len(pairs) // parts
    if len(pairs) % parts:
        return False
    step = pairs[count].slot_y - pairs[0].slot_y
    return all(
        (pair.m_tile, pair.slot_y, pair.slot_x)
        == (first.m_tile, first.slot_y + part * step, first.slot_x)
        for part in range(parts)
        for first, pair in zip(pairs[:count], pairs[part * count : (part + 1) * count], strict=True)
    )
