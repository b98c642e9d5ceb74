"""The tiles of `sm90_tf32_wide_forward`."""

from __future__ import annotations

from dataclasses import dataclass

CONSUMERS = 2
WGMMA_ROWS = 64


@dataclass(frozen=True)
class Tile:
    """What one block computes at a time.

    Attributes:
        pixel_tiles: pixels of each of the two consumers, in units of 64.
        columns: most columns (phase in y, output channel, phase in x).
        apart: whether the two phases of a stride of 2 in x are separate parts, each with its own
            slots. Otherwise they are adjacent columns and share their slots.
        rows: rows of pixels of one image; 0 for a piece of the line of all positions.
    """

    pixel_tiles: int
    columns: int
    apart: bool = False
    rows: int = 0

    @property
    def pixels(self) -> int:
        """Pixels of a block."""
        return CONSUMERS * WGMMA_ROWS * self.pixel_tiles

    def __str__(self) -> str:
        """Pixels (rows and columns, if of one image) x columns, then the options."""
        pixels = f"{self.rows}x{self.pixels // self.rows}" if self.rows else f"{self.pixels}"
        return f"{pixels}x{self.columns}" + ("/apart" if self.apart else "")


TILES = (
    *(Tile(1, columns) for columns in (256, 224, 192, 160, 128)),
    *(Tile(1, columns, apart=True) for columns in (256, 128)),
    # Each weight serves twice the pixels. For layers with few columns. Rows of one image first: the
    # model ties, and sam_up2 takes 0.0315 ms for 0.0329 (sweep_picks.csv).
    Tile(2, 128, rows=4),
    Tile(2, 128),
    Tile(2, 64),
    # For wide images. In the line, a slot that reaches back some rows loads them whole.
    Tile(1, 256, rows=2),
)
