"""The tiles of the engine's forward and input gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CONSUMERS = 2
GROUP_ROWS = 64

Reach = Literal["image", "row", "column", "tap"]


@dataclass(frozen=True)
class Tile:
    """What one block computes at a time.

    Attributes:
        columns: positions of a consumer.
        reach: which taps share a stage of a source: all ("image"), those of one shift in y ("row")
            or in x ("column"), or each has its own ("tap"). A stage holds the tile's positions and
            those that its taps reach. Between rows there are none with "column" and "tap".
        positions_are_rows: whether positions are the wgmma's rows, 64 at a time, and channels its
            columns. Consumers then have the same channels and half of the positions each, and a
            tile all results for which there are registers: with fewer channels, if it takes that
            to have all phases of a contiguous result's row. Otherwise 64 channels are the rows,
            other ones for each consumer, and positions the columns.
        alike: whether consumers have the same channels, as above, though these are the rows.
        paired: whether such a tile has two results, whose pixels follow each other in turn in a
            contiguous y.
        folded: whether phases of y are channels (`fold.py`). For forward, positions are rows.
        turned: whether a block reads a contiguous x itself, and turns it. Otherwise it is packed
            first.
        raw: whether a block reads a contiguous source as it lies, and a contiguous result's
            positions are rows, whose operand comes from registers.
        depth: channels of a stage of a raw tile.
        shared: whether several blocks share the channels that a tile is summed over, and a second
            kernel adds what they have: for layers of few tiles.
    """

    columns: int
    reach: Reach = "image"
    positions_are_rows: bool = False
    alike: bool = False
    paired: bool = False
    folded: bool = False
    turned: bool = False
    raw: bool = False
    depth: int = 64
    shared: bool = False

    @property
    def row_groups(self) -> int:
        """Blocks of channels: of each consumer, or one if they have other positions."""
        return 1 if self.positions_are_rows or self.alike else CONSUMERS

    @property
    def positions(self) -> int:
        """Of a block."""
        return self.columns * CONSUMERS // self.row_groups

    def __str__(self) -> str:
        """Positions of a block, where channels are the columns; else rows x positions."""
        rows = "" if self.positions_are_rows else f"{self.row_groups * GROUP_ROWS}x"
        way = "/folded" * self.folded + "/turned" * self.turned + "/shared" * self.shared
        paired = "/paired" if self.paired else ""
        depth = f"/{self.depth}" if self.raw else ""
        reach = "raw" if self.raw else self.reach
        return f"{rows}{self.positions}/{reach}{paired}{way}{depth}"


TILES = (
    *(Tile(columns, "image") for columns in (224, 200, 176, 128, 64)),
    *(Tile(columns, "tap") for columns in (256, 192, 128, 64)),
    *(Tile(columns, "row") for columns in (200, 128)),
    Tile(256, "column"),
    *(Tile(columns, "image", positions_are_rows=True) for columns in (256, 128, 64)),
    *(Tile(columns, "tap", positions_are_rows=True) for columns in (256, 128, 64)),
    *(Tile(256, reach, alike=True) for reach in ("image", "column")),
    Tile(128, "image", alike=True),
    Tile(128, "row", positions_are_rows=True),
    *(Tile(columns, "column", positions_are_rows=True) for columns in (256, 128)),
    *(Tile(columns, "image", positions_are_rows=True, folded=True) for columns in (256, 128, 64)),
    *(Tile(columns, "tap", positions_are_rows=True, folded=True) for columns in (256, 64)),
)

FLOAT32_TILES = (
    Tile(64, "column", positions_are_rows=True),
    *(Tile(columns, "tap", positions_are_rows=True, shared=True) for columns in (128, 64)),
    Tile(64, positions_are_rows=True, raw=True, depth=16),
)
"""Of float32 alone.

NOTE: a raw tile in 16 bits alternates between two sets of registers, so that it has two products of
64 positions and 16 channels or more in a stage. The last one would have one.
"""

RAW = Tile(64, positions_are_rows=True, raw=True, depth=32)

INPUT_GRADIENT_TILES = (
    *TILES,
    RAW,
    Tile(128, positions_are_rows=True, raw=True, depth=32),
    *(Tile(columns, positions_are_rows=True, raw=True, depth=16) for columns in (256, 128)),
    *(Tile(columns, "tap", shared=True) for columns in (128, 64)),
    *FLOAT32_TILES,
)

FORWARD_TILES = (
    *TILES,
    *(Tile(128, reach, turned=True) for reach in ("image", "tap")),
    Tile(128, "image", alike=True, turned=True),
    *(Tile(columns, "image", positions_are_rows=True, turned=True) for columns in (256, 128, 64)),
    *(Tile(columns, "tap", positions_are_rows=True, turned=True) for columns in (256, 128)),
    RAW,
    Tile(224, "image", turned=True),
    *(Tile(128, reach, alike=True, paired=True) for reach in ("image", "column")),
    *(Tile(128, reach, alike=True, paired=True, turned=True) for reach in ("image", "tap")),
    *(
        Tile(columns, "image", positions_are_rows=True, folded=True, turned=True)
        for columns in (256, 128)
    ),
    *(tile for tile in FLOAT32_TILES if not tile.raw),
)
