"""`sm90_tf32_overlap_forward`: few outputs, many taps, on Hopper's tensor cores.

Tensors are float32, products TF32. Nothing is packed.
"""

from __future__ import annotations

from tconv.kernels.sm90_tf32_overlap_forward.cost import cost
from tconv.kernels.sm90_tf32_overlap_forward.launch import STEM, launches
from tconv.kernels.sm90_tf32_overlap_forward.layout import (
    MOST_AHEAD_BYTES,
    Layout,
    layout,
    share_out,
    tile_why_not,
    why_not,
)
from tconv.kernels.sm90_tf32_overlap_forward.tiles import TILES, Tile
from tconv.problem import Direction

DIRECTION: Direction = "forward"
GENERAL = False
