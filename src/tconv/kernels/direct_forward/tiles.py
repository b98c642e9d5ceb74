"""The table of tiles of `direct_forward`."""

from __future__ import annotations

from dataclasses import dataclass

THREADS = 128
WARPS = THREADS // 32


@dataclass(frozen=True)
class Tile:
    """How a block of 128 threads divides its outputs.

    Attributes:
        threads_x: threads along the pixels of a row.
        threads_o: most threads along the output channels. The others are along y.
        pixels: adjacent pixels of a thread.
        channels: most output channels of a thread.
        rows: rows of pixels that a thread computes one after another, if one step holds all input
            channels.
        depth: input channels of a step.
        sums: most accumulators of a thread.
        blocks: blocks that an SM must hold. This bounds the registers.
    """

    threads_x: int
    threads_o: int
    pixels: int
    channels: int
    rows: int
    depth: int
    sums: int
    blocks: int

    @property
    def registers(self) -> int:
        """Registers of a thread that let an SM hold the blocks."""
        return (64 << 10) // (THREADS * self.blocks) // 8 * 8

    def __str__(self) -> str:
        """Output channels x rows x columns of a block, where the layer has that many channels."""
        threads_y = THREADS // (self.threads_x * self.threads_o)
        return (
            f"{self.threads_o * self.channels}x{threads_y * self.rows}x"
            f"{self.threads_x * self.pixels}/{self.channels}x{self.pixels}"
        )


TILES = (
    Tile(threads_x=8, threads_o=4, pixels=8, channels=4, rows=1, depth=8, sums=96, blocks=3),
    Tile(threads_x=8, threads_o=8, pixels=8, channels=4, rows=1, depth=8, sums=96, blocks=3),
    Tile(threads_x=32, threads_o=4, pixels=8, channels=4, rows=1, depth=8, sums=64, blocks=3),
    Tile(threads_x=8, threads_o=4, pixels=4, channels=4, rows=1, depth=8, sums=64, blocks=4),
    Tile(threads_x=8, threads_o=8, pixels=4, channels=4, rows=1, depth=8, sums=64, blocks=4),
    Tile(threads_x=32, threads_o=4, pixels=4, channels=4, rows=1, depth=8, sums=64, blocks=4),
    Tile(threads_x=32, threads_o=1, pixels=4, channels=1, rows=8, depth=4, sums=32, blocks=5),
    Tile(threads_x=16, threads_o=1, pixels=4, channels=1, rows=8, depth=4, sums=32, blocks=5),
    Tile(threads_x=8, threads_o=1, pixels=4, channels=1, rows=2, depth=4, sums=32, blocks=5),
    Tile(threads_x=128, threads_o=1, pixels=8, channels=1, rows=1, depth=4, sums=32, blocks=5),
)
