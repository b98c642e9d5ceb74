"""The tiles of the engine's forward and input gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CONSUMERS = 2
GROUP_ROWS = 64

Reach = Literal["image", "row", "tap"]


@dataclass(frozen=True)
class Tile:
    """What one block computes at a time.

    Attributes:
        columns: positions of a consumer, the wgmma's N.
        reach: which taps share a stage of a source: all ("image"), those of one shift in y ("row"),
            or each has its own ("tap"). A stage holds the tile's positions and those that its taps
            reach.
        split: whether both consumers have the same 64 rows, and half of the positions each.
            Otherwise they have 128 rows of the same positions.
    """

    columns: int
    reach: Reach = "image"
    split: bool = False

    def __str__(self) -> str:
        """Rows of a block x positions, then the options."""
        rows, columns = GROUP_ROWS * CONSUMERS, self.columns
        if self.split:
            rows, columns = GROUP_ROWS, CONSUMERS * columns
        return f"{rows}x{columns}/{self.reach}"


TILES = (
    *(Tile(columns, "image") for columns in (224, 200, 176, 128, 64)),
    *(Tile(columns, "tap") for columns in (256, 192, 128, 64)),
    *(Tile(columns, "row") for columns in (200, 128)),
    *(Tile(columns, "image", split=True) for columns in (128, 96, 64)),
    *(Tile(columns, "tap", split=True) for columns in (128, 64)),
    Tile(128, "row", split=True),
)
