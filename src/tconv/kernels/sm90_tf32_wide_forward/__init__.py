"""`sm90_tf32_wide_forward`: the output of layers whose kernel is their stride, on Hopper.

Tensors are float32. The tensor cores multiply in TF32.
"""

from __future__ import annotations

from tconv.kernels.sm90_tf32_wide_forward.cost import cost
from tconv.kernels.sm90_tf32_wide_forward.launch import PACK_STEM, STEM, launches, source
from tconv.kernels.sm90_tf32_wide_forward.layout import (
    Layout,
    layout,
    tile_why_not,
    vector,
    why_not,
)
from tconv.kernels.sm90_tf32_wide_forward.tiles import TILES, Tile
from tconv.problem import Direction

DIRECTION: Direction = "forward"
GENERAL = False
