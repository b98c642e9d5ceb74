"""`direct_forward`: memory-bound layers, with multiply-adds (`direct_forward.cu`)."""

from tconv.jit.target import Target
from tconv.kernels import family, image_tiles
from tconv.kernels.direct_forward.cost import cost
from tconv.kernels.direct_forward.launch import STEM, launches
from tconv.kernels.direct_forward.layout import layout
from tconv.kernels.direct_forward.tiles import TILES, Tile
from tconv.problem import Direction, Problem

DIRECTION: Direction = "forward"
GENERAL = False

MOST_PRODUCTS = 3072
"""Most unrolled multiply-adds of an input channel. The instruction cache holds about twice that."""

OTHER_REGISTERS = 40
"""Registers of a thread for addresses, counters and copies."""


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    if target.capability < (8, 0):
        return f"copies by cp.async, which sm_80 brought, the target is {target.arch}"
    if problem.dtype != "float32":
        return f"computes float32, not {problem.dtype}"
    if problem.y_layout != "contiguous":
        return f"writes contiguous outputs, not {problem.y_layout}"
    return family.phases_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    laid = layout(problem, tile)
    if laid.slot_sums > tile.sums:
        return (
            f"a thread would hold {laid.slot_sums} sums for one phase in y, "
            f"its registers allow {tile.sums}"
        )
    held = laid.slot_sums * laid.group_slots + 4 * laid.window_vectors + laid.row_weights
    if held > tile.registers - OTHER_REGISTERS:
        return (
            f"a thread would hold {held} sums, inputs and weights in registers, "
            f"there are {tile.registers - OTHER_REGISTERS} for them"
        )
    if laid.products > MOST_PRODUCTS:
        return f"{laid.products} unrolled multiply-adds exceed the limit of {MOST_PRODUCTS}"
    return image_tiles.shared_why_not(laid.shared_bytes, target)
