"""The tiles of `sm90_tf32_forward`."""

from __future__ import annotations

from dataclasses import dataclass

WARPGROUP_ROWS = 64


@dataclass(frozen=True)
class Tile:
    """What one warpgroup computes at a time.

    Attributes:
        columns: pixels along x, the wgmma's N.
        rows: rows of pixels.
        m_tiles: row groups, of 64 rows (phase, output channel) each.
        resident: whether a block keeps all weights in shared memory. Otherwise it copies them there
            from L2 when it uses them.
        half: whether it multiplies in float16, at twice the rate of TF32. The significand has as
            many bits. At its end, a block recomputes the tiles that float16 cannot hold.
        sectors: whether tiles overlap in x. Each then writes whole sectors of device memory, even
            if rows do not begin on a sector.
        common: whether both consumers multiply one patch. The second has the rows below the
            first's. Less halo is loaded, and neither consumer runs ahead.
    """

    columns: int
    rows: int
    m_tiles: int
    resident: bool = False
    half: bool = False
    sectors: bool = False
    common: bool = False

    @property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return self.m_tiles * self.rows * self.columns // 2

    def __str__(self) -> str:
        """Matrix rows x image rows x columns."""
        size = f"{self.m_tiles * WARPGROUP_ROWS}x{self.rows}x{self.columns}"
        marks = ("half", "resident", "sectors", "common")
        return " ".join([size, *(mark for mark in marks if getattr(self, mark))])


TILES = (
    Tile(columns=64, rows=4, m_tiles=1, resident=True, half=True, common=True),
    Tile(columns=64, rows=3, m_tiles=1, resident=True, half=True, common=True),
    Tile(columns=104, rows=2, m_tiles=1, resident=True, half=True, sectors=True, common=True),
    Tile(columns=88, rows=3, m_tiles=1, half=True, common=True),
    Tile(columns=64, rows=4, m_tiles=1, resident=True, half=True),
    Tile(columns=88, rows=2, m_tiles=1, resident=True, half=True),
    Tile(columns=40, rows=4, m_tiles=1, resident=True, half=True),
    Tile(columns=64, rows=2, m_tiles=2, resident=True, half=True),
    Tile(columns=104, rows=2, m_tiles=1, resident=True, half=True, sectors=True),
    Tile(columns=64, rows=2, m_tiles=2, resident=True, half=True, sectors=True),
    Tile(columns=88, rows=2, m_tiles=1, half=True, sectors=True),
    Tile(columns=64, rows=2, m_tiles=2, half=True, sectors=True),
    # For signals: images of one row.
    Tile(columns=128, rows=1, m_tiles=1, resident=True, half=True),
    Tile(columns=88, rows=3, m_tiles=1, half=True),
    Tile(columns=64, rows=4, m_tiles=1, half=True),
    Tile(columns=40, rows=6, m_tiles=1, half=True),
    Tile(columns=88, rows=2, m_tiles=1, half=True),
    Tile(columns=64, rows=2, m_tiles=2, half=True),
    Tile(columns=40, rows=4, m_tiles=1, resident=True),
    Tile(columns=88, rows=3, m_tiles=1),
    Tile(columns=88, rows=2, m_tiles=1),
)
