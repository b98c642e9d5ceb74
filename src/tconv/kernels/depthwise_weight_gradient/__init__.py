"""`depthwise_weight_gradient`: the weight's gradient where a group has one input channel."""

from tconv.kernels.depthwise import launches
from tconv.kernels.depthwise.cost import cost
from tconv.kernels.depthwise.layout import tile_why_not, why_not
from tconv.kernels.depthwise.tiles import TILES
from tconv.problem import Direction

STEM = "depthwise_weight_gradient"
DIRECTION: Direction = "weight_gradient"
GENERAL = False
