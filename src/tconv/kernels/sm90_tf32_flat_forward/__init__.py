"""`sm90_tf32_flat_forward`: the output of layers with many channels on Hopper's tensor cores.

Tensors are float32, products TF32. Tiles marked `half` multiply in float16, whose significand has
as many bits as TF32's. A repair launch then recomputes in TF32 the images whose values float16
cannot hold.
"""

from __future__ import annotations

from tconv.kernels.sm90_tf32_flat_forward.cost import cost
from tconv.kernels.sm90_tf32_flat_forward.launch import PACK_STEM, STEM, launches
from tconv.kernels.sm90_tf32_flat_forward.layout import (
    MOST_SLIGHT,
    Layout,
    layout,
    tile_why_not,
    why_not,
)
from tconv.kernels.sm90_tf32_flat_forward.tiles import TILES, Tile
from tconv.problem import Direction

DIRECTION: Direction = "forward"
GENERAL = False
