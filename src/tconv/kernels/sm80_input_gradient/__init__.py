"""`sm80_input_gradient`: of 16-bit tensors, from sm_80 on."""

from tconv.kernels.sm80 import TILES, cost, launches, tile_why_not, why_not
from tconv.problem import Direction

__all__ = ["DIRECTION", "GENERAL", "STEM", "TILES", "cost", "launches", "tile_why_not", "why_not"]

STEM = "sm80_input_gradient"
DIRECTION: Direction = "input_gradient"
GENERAL = False
