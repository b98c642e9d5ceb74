"""The table of tiles of `mma_rows_forward`, and the constants of their layout and schedule."""

from tconv.kernels.mma_tiles import Tile

TILES = tuple(
    Tile(warps, 4, warps, 1, 1, 1, sums=48, blocks=2, split=split, team=True)
    for warps, split in ((4, False), (4, True), (8, True))
)

MOST_GROUP_TILES = 8
"""Most tiles that share their pixels. The number of blocks is a multiple of them."""

MOST_AHEAD = 4
"""Most rows that blocks prefetch at a time."""

BLANK_ELEMENTS = (256, 128)
"""Values of a blank row that one copy writes, if each channel has its own and few fit."""

LEAST_DYNAMIC_ROWS = 1024
"""Least rows of a group tile with a dynamic tail.

With fewer, an H200's blocks have at most about 15 rows each. A tenth of them is hardly a row, and
not worth the launch that clears the counters.
"""

STATIC_TENTHS = 9
"""Tenths of the rows that are in static shares if there is a dynamic tail.

With static shares of all rows, blocks took 0.85 to 1.11 times their mean time. In that mean time,
the slowest blocks do nine tenths of their rows.
"""

ASKED_ROWS, BYTES_PER_NANOSECOND = 2, 3400
"""Prefetch windows: a block prefetches during half of every period. A period is the time to consume
ASKED_ROWS rows at BYTES_PER_NANOSECOND, the rate at which two measured layers move all their bytes.
"""
