"""`sm90_forward`: the output of 16-bit tensors in channels_last, on the engine."""

from __future__ import annotations

from functools import partial

from tconv.kernels import engine
from tconv.kernels.engine.cost import cost
from tconv.kernels.engine.layout import tile_why_not, why_not
from tconv.kernels.engine.tiles import FORWARD_TILES as TILES
from tconv.problem import Direction

STEM = "sm90_forward"
DIRECTION: Direction = "forward"
GENERAL = False

launches = partial(engine.launches, STEM)
