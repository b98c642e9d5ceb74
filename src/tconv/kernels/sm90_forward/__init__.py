"""`sm90_forward`: the output, on the engine: of 16-bit tensors, and of float32 in channels_last."""

from __future__ import annotations

from functools import partial

from tconv.kernels import engine
from tconv.kernels.engine.cost import cost
from tconv.kernels.engine.layout import images_why_not as why_not
from tconv.kernels.engine.layout import tile_why_not
from tconv.kernels.engine.tiles import FORWARD_TILES as TILES
from tconv.problem import Direction

STEM = "sm90_forward"
DIRECTION: Direction = "forward"
GENERAL = False

launches = partial(engine.launches, STEM)
