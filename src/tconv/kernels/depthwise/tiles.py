"""The tiles of the depthwise kernels."""

from __future__ import annotations

from dataclasses import dataclass

THREADS = 256


@dataclass(frozen=True)
class Tile:
    """What a thread computes at a time.

    Attributes:
        vector: neighbouring channels. More than one only where y is channels_last.
        strip: neighbouring pixels of x in a row.
    """

    vector: int
    strip: int

    def __str__(self) -> str:
        """Channels x pixels of a thread."""
        return f"{self.vector}x{self.strip}"


TILES = (
    *(Tile(2, strip) for strip in (4, 2, 1)),
    *(Tile(4, strip) for strip in (2, 1)),
    Tile(8, 1),
    *(Tile(1, strip) for strip in (8, 4, 2, 1)),
)
