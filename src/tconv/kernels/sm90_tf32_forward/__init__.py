"""`sm90_tf32_forward`: the output on Hopper's tensor cores, float32 tensors with TF32 products.

Tiles marked `half` multiply in float16, whose significand has as many bits as TF32's. At its end, a
block recomputes in TF32 the tiles whose values float16 cannot hold.
"""

from __future__ import annotations

from tconv.kernels.sm90_tf32_forward.cost import cost
from tconv.kernels.sm90_tf32_forward.launch import PACK_STEM, STEM, launches, source
from tconv.kernels.sm90_tf32_forward.layout import MOST_SUMS, Layout, layout
from tconv.kernels.sm90_tf32_forward.limits import tile_why_not, why_not
from tconv.kernels.sm90_tf32_forward.tiles import TILES, Tile
from tconv.problem import Direction

DIRECTION: Direction = "forward"
GENERAL = False
