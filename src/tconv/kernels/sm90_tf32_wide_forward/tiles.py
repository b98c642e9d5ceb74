"""The tiles of `sm90_tf32_wide_forward`."""

from __future__ import annotations

from dataclasses import dataclass

CONSUMERS = 2
WGMMA_ROWS = 64
PIXELS = CONSUMERS * WGMMA_ROWS


@dataclass(frozen=True)
class Tile:
    """What one block computes at a time: `PIXELS` pixels.

    Attributes:
        columns: most columns (phase in y, output channel, phase in x).
    """

    columns: int

    def __str__(self) -> str:
        """Pixels x columns."""
        return f"{PIXELS}x{self.columns}"


TILES = (Tile(256), Tile(128))
