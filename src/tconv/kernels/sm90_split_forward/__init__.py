"""`sm90_split_forward`: strict float32 on Hopper's tensor cores, as products of parts.

The geometry, patches and packed weights are those of `sm90_tf32_forward`. Tiles multiply float32
values as two float16 parts. At its end, a block recomputes the tiles whose values two float16 parts
cannot hold, with three bfloat16 parts.
"""

from __future__ import annotations

from tconv.kernels.sm90_split_forward.cost import cost
from tconv.kernels.sm90_split_forward.launch import STEM, launches, source
from tconv.kernels.sm90_split_forward.layout import MOST_LOADED_COLUMNS, tile_why_not, why_not
from tconv.kernels.sm90_split_forward.tiles import TILES, Tile
from tconv.kernels.sm90_tf32_forward.layout import layout
from tconv.problem import Direction

DIRECTION: Direction = "forward"
GENERAL = False
