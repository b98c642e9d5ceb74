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
        gathers: whether a warp gathers a row of outputs in shared memory before it writes them.
    """

    warpgroups: int
    channels: int
    gathers: bool = True

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARPGROUP * self.warpgroups

    @property
    def registers(self) -> int:
        """Registers that a thread may have."""
        return min(255, (64 << 10) // self.threads // 8 * 8)

    def __str__(self) -> str:
        """Warpgroups x input channels of a stage, and how outputs are written."""
        return f"{self.warpgroups}x{self.channels}" + ("" if self.gathers else "/direct")


TILES = (
    Tile(3, 64, gathers=True),
    Tile(3, 32, gathers=True),
    Tile(3, 64, gathers=False),
    # For many taps, and for rows that are not aligned to 16 bytes, whose copies take more
    # registers.
    Tile(2, 64, gathers=True),
)
