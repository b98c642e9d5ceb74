"""The tiles of `sm90_tf32_overlap_forward`."""

from __future__ import annotations

from dataclasses import dataclass

WARPGROUP = 128


@dataclass(frozen=True)
class Tile:
    """How an SM divides its work.

    Attributes:
        warpgroups: warpgroups of a block, each with its own strip.
        channels: most input channels of a stage.
    """

    warpgroups: int
    channels: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARPGROUP * self.warpgroups

    @property
    def registers(self) -> int:
        """Registers that a thread may have."""
        return min(255, (64 << 10) // self.threads // 8 * 8)

    def __str__(self) -> str:
        """Warpgroups x input channels of a stage, as rows of measurements name them."""
        return f"{self.warpgroups}x{self.channels}/direct"


TILES = (
    Tile(3, 64),
    # For many taps, and for rows that are not aligned to 16 bytes, whose copies take more
    # registers.
    Tile(2, 64),
)
