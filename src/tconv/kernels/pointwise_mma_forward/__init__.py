"""`pointwise_mma_forward`: a kernel of 1x1, on `mma.sync` (`pointwise_mma_forward.cu`)."""

from tconv.kernels.pointwise_mma_forward.cost import cost
from tconv.kernels.pointwise_mma_forward.launch import STEM, launches
from tconv.kernels.pointwise_mma_forward.layout import TILES, tile_why_not, why_not
from tconv.problem import Direction

DIRECTION: Direction = "forward"
GENERAL = False
