"""The table of tiles of `mma_forward`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """How a block divides its outputs.

    Attributes:
        warps: warps of a block.
        fragments: most fragments that a warp accumulates along x, of 8 neighbouring pixels each.
        parts: most warps along x.
        channel_blocks: most blocks of 16 output channels.
        sums: most accumulators of a thread.
        blocks: blocks that an SM must hold. This bounds the registers.
        split: whether each operand is the sum of three parts.
        team: whether the warps of a row gather its outputs together. Each then writes whole rows.
    """

    warps: int
    fragments: int
    parts: int
    channel_blocks: int
    sums: int
    blocks: int
    split: bool = False
    team: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def registers(self) -> int:
        """Registers of a thread that let an SM hold the blocks."""
        return min(255, (64 << 10) // (self.threads * self.blocks) // 8 * 8)

    def __str__(self) -> str:
        """Output channels x rows x columns at most; warps, as rows of measurements name them."""
        kind = "/split" if self.split else "/team" if self.team else ""
        columns = 8 * self.fragments * self.parts
        return f"{16 * self.channel_blocks}x1x{columns}/{self.warps}x1{kind}"


TILES = (
    Tile(warps=4, fragments=17, parts=1, channel_blocks=2, sums=72, blocks=3),
    Tile(warps=4, fragments=8, parts=2, channel_blocks=2, sums=64, blocks=4),
    Tile(warps=8, fragments=8, parts=2, channel_blocks=2, sums=64, blocks=2),
    Tile(8, fragments=4, parts=8, channel_blocks=1, sums=48, blocks=2, team=True),
    Tile(8, fragments=2, parts=8, channel_blocks=1, sums=72, blocks=3, team=True),
    Tile(8, fragments=4, parts=8, channel_blocks=1, sums=48, blocks=2, split=True, team=True),
    Tile(8, fragments=4, parts=4, channel_blocks=1, sums=48, blocks=2, split=True, team=True),
    Tile(4, fragments=4, parts=4, channel_blocks=1, sums=96, blocks=2, split=True, team=True),
)
