"""The tiles of `sm90_split_forward`."""

from __future__ import annotations

from dataclasses import dataclass

from tconv.kernels.sm90_tf32_forward import tiles as patches


@dataclass(frozen=True)
class Tile(patches.Tile):
    """What one warpgroup computes at a time, and how the tensor cores' sums are added up.

    Attributes:
        temporaries: rows whose products are in flight: 2, or 1 if registers allow no more.
        group: most slots whose products the tensor cores add up.
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
