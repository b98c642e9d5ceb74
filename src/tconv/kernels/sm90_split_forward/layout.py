"""The problems that `sm90_split_forward` and its tiles cannot serve.

The geometry of its tiles is that of `sm90_tf32_forward`.
"""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.sm90_split_forward.tiles import Tile
from tconv.kernels.sm90_tf32_forward.layout import Layout, layout
from tconv.kernels.sm90_tf32_forward.limits import laid_why_not, shape_why_not
from tconv.problem import Problem

MOST_PRODUCTS = 128
"""Most products of a stage, each of which takes three. This bounds the size of the code."""

MOST_LOADED_COLUMNS = 64
"""Most columns of a tile whose producers load pixels through registers.

With 88 columns they spill (NVRTC 13.5).
"""


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    if target.arch != "sm_90a":
        return f"needs the tensor cores of sm_90a, the target is {target.arch}"
    if problem.dtype != "float32" or problem.math != "ieee":
        return f"computes strict float32, not {problem.dtype}/{problem.math}"
    return shape_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    laid = layout(problem, tile)
    return family.once(laid, ("why_not", target), lambda: _why_not(laid, target))


def _why_not(laid: Layout, target: Target) -> str | None:
    """The same of a layout."""
    tile = laid.tile
    if tile.columns > MOST_LOADED_COLUMNS and not laid.tensor_map:
        return (
            f"without a tensor map its producers have registers for {MOST_LOADED_COLUMNS} columns, "
            f"not for {tile.columns}"
        )
    refusal = laid_why_not(laid.repairing, target, MOST_PRODUCTS, len)
    if refusal is not None:
        return f"what repairs it: {refusal}"
    return laid_why_not(laid, target, MOST_PRODUCTS, len)
