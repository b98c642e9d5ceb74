"""`sm90_weight_gradient`: the weight's gradient of 16-bit tensors and of float32."""

from __future__ import annotations

from tconv.kernels.engine.layout import images_why_not as why_not
from tconv.kernels.sm90_weight_gradient.cost import cost
from tconv.kernels.sm90_weight_gradient.launch import STEM, launches
from tconv.kernels.sm90_weight_gradient.layout import tile_why_not
from tconv.kernels.sm90_weight_gradient.tiles import TILES, Tile
from tconv.problem import Direction

__all__ = ["DIRECTION", "GENERAL", "STEM", "TILES", "Tile", "cost", "launches", "tile_why_not"]
__all__ += ["why_not"]

DIRECTION: Direction = "weight_gradient"
GENERAL = False
