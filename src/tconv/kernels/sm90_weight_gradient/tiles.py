"""The tiles of `sm90_weight_gradient`."""

from __future__ import annotations

from dataclasses import dataclass

CONSUMERS = 2
"""Of a tile that is not raw."""


@dataclass(frozen=True)
class Tile:
    """What one block computes.

    Attributes:
        positions: of a box, a multiple of 16: the depth of a stage's products.
        sums: most sums of a thread, which bound the taps of a consumer.
        folded: whether phases of y are channels (`engine/fold.py`).
        columns: of a box, where contiguous images are read as they lie (`raw.cuh`); else 0.
        stacked: whether rows of x are columns of one product, for all taps of a kernel's column.
        consumers: warpgroups that multiply.
        turned: whether float32 in channels_last is turned in shared memory (`turned.cuh`).
    """

    positions: int
    sums: int
    folded: bool = False
    columns: int = 0
    stacked: bool = False
    consumers: int = CONSUMERS
    turned: bool = False

    @property
    def y_in_registers(self) -> bool:
        """Whether y goes to registers, so that rows of products are output channels."""
        return self.columns > 0 or self.turned

    def __str__(self) -> str:
        """Positions of a box, and sums of a thread."""
        kind = "/folded" if self.folded else ""
        kind += f"/raw{self.columns}" if self.columns else ""
        kind += "/stacked" if self.stacked else "/turned" if self.turned else ""
        of = f"/of {self.consumers}" if self.consumers != CONSUMERS else ""
        return f"{self.positions}/{self.sums}{kind}{of}"


FLOAT32_TILES = (
    Tile(64, 128, columns=8),
    Tile(32, 128, columns=32),
    Tile(64, 128, columns=32, stacked=True),
    Tile(64, 128, folded=True, columns=8),
    Tile(32, 128, folded=True, columns=32),
    Tile(64, 128, turned=True),
    Tile(32, 128, turned=True),
)
"""Of float32 alone, whose lines have half as many pixels."""

TILES = (
    Tile(128, 128),
    Tile(64, 160),
    Tile(64, 96),
    Tile(128, 128, folded=True),
    Tile(128, 128, columns=16),
    Tile(64, 128, columns=32),
    Tile(128, 128, columns=64, stacked=True),
    Tile(128, 96, columns=64, stacked=True, consumers=3),
    *FLOAT32_TILES,
)
