"""16-bit tensors on the tensor cores that GPUs have from sm_80 on, by `mma.sync` and `cp.async`."""

from tconv.kernels.sm80.cost import cost
from tconv.kernels.sm80.launch import launches
from tconv.kernels.sm80.layout import TILES, tile_why_not, why_not

__all__ = ["TILES", "cost", "launches", "tile_why_not", "why_not"]
