"""The geometry of a tile of `mma_rows_forward`."""

from __future__ import annotations

import functools
from typing import ClassVar

from tconv.kernels import family, mma_tiles
from tconv.kernels.mma_rows_forward import tiles
from tconv.kernels.mma_tiles import SECTOR, Tile
from tconv.problem import Problem


class Layout(mma_tiles.Layout):
    """A tile laid over a problem: one row of pixels, of which a block computes many in order."""

    row_room: ClassVar[int] = 3 * SECTOR
    whole_groups: ClassVar[bool] = True

    @property
    def ring(self) -> bool:
        """Whether the patch keeps rows from tile to tile."""
        return self.tile_rows == 1 and self.chunks == 1

    @property
    def dynamic_tail(self) -> bool:
        """Whether blocks take the last rows from a counter, one at a time."""
        pattern = self.problem.pattern
        rows = self.rows if pattern is self.problem else layout(pattern, self.tile).rows
        return rows >= tiles.LEAST_DYNAMIC_ROWS

    @property
    def buffers(self) -> int:
        """Buffers for gathered outputs: two if they fit, so that bulk copies read one meanwhile."""
        return self._memory[0]

    @property
    def rows_ahead(self) -> int:
        """Rows that are prefetched at a time; 0 if the patch is not a ring."""
        return self._memory[1]

    @property
    def blank_elements(self) -> int:
        """Values of a blank row that one copy writes; 0 if no row is blank."""
        return self._memory[2]

    @functools.cached_property
    def _memory(self) -> tuple[int, int, int]:
        """Buffers, rows ahead and values of a blank row: the most that fit, in this order.

        If all channels have the same values, one copy writes a whole blank row. A layer of strict
        float32 then took 0.258 ms with one buffer. It took 0.284 ms in pieces of 256 values with
        two.
        """
        blank = len(self.y.used) < self.problem.height.stride
        width = -(-self.problem.pattern.width.output_size // SECTOR) * SECTOR
        pieces = [width] if blank else [0]
        if blank and self.problem.bias:
            pieces += [size for size in tiles.BLANK_ELEMENTS if size < width]
        for buffers in (2, 1):
            for ahead in range(tiles.MOST_AHEAD, 0, -1) if self.ring else (0,):
                for piece in pieces:
                    found = buffers, ahead, piece
                    if self._bytes(*found) <= self.aimed_bytes:
                        return found
        return found

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        return self._bytes(*self._memory)

    def _bytes(self, buffers: int, rows_ahead: int, blank_elements: int) -> int:
        blank = max(SECTOR, blank_elements * (self.tile_channels if self.problem.bias else 1))
        extra = SECTOR * self.tile_channels + blank
        return self.bytes_with(buffers=buffers, rows_ahead=rows_ahead, extra=extra)


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    return mma_tiles.laid_out(Layout, problem, tile)
