"""`mma_forward`: memory-bound layers, on `mma.sync` with TF32 (`mma_forward.cu`).

Tiles marked `split` compute strict float32. They take six bfloat16 products for each product.
"""

from tconv.kernels.mma_forward.cost import cost
from tconv.kernels.mma_forward.launch import STEM, launches
from tconv.kernels.mma_forward.layout import layout, tile_why_not, why_not
from tconv.kernels.mma_forward.tiles import TILES
from tconv.problem import Direction

DIRECTION: Direction = "forward"
GENERAL = False
