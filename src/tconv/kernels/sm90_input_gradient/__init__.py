"""`sm90_input_gradient`: the input's gradient, on the engine: of 16-bit tensors and of float32."""

from __future__ import annotations

from functools import partial

from tconv.kernels import engine
from tconv.kernels.engine.cost import cost
from tconv.kernels.engine.layout import images_why_not as why_not
from tconv.kernels.engine.layout import tile_why_not
from tconv.kernels.engine.tiles import INPUT_GRADIENT_TILES as TILES
from tconv.problem import Direction

STEM = "sm90_input_gradient"
DIRECTION: Direction = "input_gradient"
GENERAL = False

launches = partial(engine.launches, STEM)
