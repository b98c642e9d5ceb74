"""The table of tiles of `mma_forward`."""

from tconv.kernels.mma_tiles import Tile

TILES = (
    Tile(warps=4, fragments=17, parts=1, channel_blocks=2, rows=1, rounds=1, sums=72, blocks=3),
    Tile(warps=4, fragments=9, parts=2, channel_blocks=2, rows=2, rounds=1, sums=72, blocks=3),
    Tile(warps=8, fragments=9, parts=2, channel_blocks=2, rows=2, rounds=1, sums=72, blocks=1),
    Tile(warps=4, fragments=5, parts=1, channel_blocks=2, rows=3, rounds=1, sums=64, blocks=3),
    Tile(warps=4, fragments=8, parts=2, channel_blocks=2, rows=1, rounds=1, sums=64, blocks=4),
    Tile(warps=8, fragments=8, parts=2, channel_blocks=2, rows=1, rounds=1, sums=64, blocks=2),
    Tile(warps=8, fragments=8, parts=2, channel_blocks=2, rows=1, rounds=2, sums=96, blocks=1),
    Tile(8, fragments=4, parts=8, channel_blocks=1, rows=1, rounds=1, sums=48, blocks=2, team=True),
    Tile(8, fragments=2, parts=8, channel_blocks=1, rows=1, rounds=1, sums=72, blocks=3, team=True),
    *(
        Tile(warps, 4, parts, 1, 1, rounds, sums=48, blocks=16 // warps, split=True, team=True)
        for warps, parts, rounds in ((8, 8, 1), (8, 4, 1), (4, 4, 1))
    ),
)
