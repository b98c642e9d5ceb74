"""The table of tiles of `general_weight_gradient`."""

from __future__ import annotations

from dataclasses import dataclass

THREADS = 128


@dataclass(frozen=True)
class Tile:
    """How a block of 128 threads divides its products; rows are input channels, columns (tap,
    output channel), and what threads are left divide the pixels of a step.

    Attributes:
        row_threads, column_threads: threads along rows and columns.
        thread_rows, thread_columns: rows and columns of one thread.
        depth: pixels staged in one step.
        blocks: blocks that an SM must hold, which bounds the registers.
    """

    row_threads: int
    column_threads: int
    thread_rows: int
    thread_columns: int
    depth: int
    blocks: int

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return self.row_threads * self.thread_rows

    @property
    def block_columns(self) -> int:
        """Columns of a block."""
        return self.column_threads * self.thread_columns

    def __str__(self) -> str:
        """Rows x columns of a block."""
        return f"{self.block_rows}x{self.block_columns}"


TILES = (
    Tile(8, 8, 8, 8, depth=16, blocks=3),
    Tile(8, 8, 4, 4, depth=32, blocks=4),
    Tile(4, 8, 4, 8, depth=16, blocks=4),
    Tile(8, 4, 8, 4, depth=16, blocks=4),
    Tile(1, 8, 4, 8, depth=16, blocks=4),
    Tile(1, 8, 1, 4, depth=32, blocks=4),
    Tile(1, 4, 1, 4, depth=32, blocks=4),
)
