"""The table of tiles of `general_weight_gradient`."""

from __future__ import annotations

from dataclasses import dataclass

THREADS = 128


@dataclass(frozen=True)
class Tile:
    """What each thread sums up: so many input channels times output channels, of one tap."""

    rows: int
    columns: int

    def __str__(self) -> str:
        """Input channels x output channels."""
        return f"{self.rows}x{self.columns}"


TILES = (Tile(8, 8), Tile(4, 4), Tile(8, 1), Tile(1, 8), Tile(1, 1))
