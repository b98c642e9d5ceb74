"""`sm90_input_gradient`: the input's gradient of 16-bit tensors in channels_last, on the engine."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import engine
from tconv.kernels.engine.cost import cost
from tconv.kernels.engine.layout import tile_why_not, why_not
from tconv.kernels.engine.tiles import INPUT_GRADIENT_TILES as TILES
from tconv.kernels.engine.tiles import Tile
from tconv.kernels.launch import Launch
from tconv.problem import Direction, Problem

__all__ = ["DIRECTION", "GENERAL", "STEM", "TILES", "cost", "launches", "tile_why_not", "why_not"]

STEM = "sm90_input_gradient"
DIRECTION: Direction = "input_gradient"
GENERAL = False


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The packing, and the kernel."""
    return engine.launches(STEM, problem, target, tile)
