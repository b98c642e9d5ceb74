"""Host side that several kernels for Hopper's tensor cores share."""

from __future__ import annotations

import math

from tconv.jit.target import Target
from tconv.kernels.source import Constant
from tconv.problem import Axis, Problem

TARGET = Target.named("sm_90a")
"""The GPU that the kernels' text is generated for."""


def tf32_why_not(problem: Problem, target: Target) -> str | None:
    """One sentence where a kernel with TF32 products and contiguous outputs cannot serve."""
    if target.arch != "sm_90a":
        return f"needs the tensor cores of sm_90a, the target is {target.arch}"
    if problem.dtype != "float32" or problem.math != "tf32":
        return f"computes float32 with TF32 products, not {problem.dtype}/{problem.math}"
    if problem.y_layout != "contiguous":
        return f"writes contiguous outputs, not {problem.y_layout}"
    return None


def pitch(axis: Axis, most_slot: int) -> int:
    """Positions from one row to the next in a line of positions; of y, rows from image to image.

    Zeros follow the inputs of a row. There are as many as the taps reach beyond the row's end or
    before the next row's start, whichever is more.
    """
    before = max(0, most_slot - axis.q_range.start)
    behind = max(0, axis.q_range.stop - axis.size)
    return max(axis.size + max(before, behind), len(axis.q_range))


MOST_APART = 8
"""Positions from one image to the next, for each pixel of input and output."""


def apart_in_line_why_not(problem: Problem, image_positions: int) -> str | None:
    """One sentence where a line of positions would have hardly any pixels, else None."""
    pixels = math.prod(problem.x_shape[2:]) + math.prod(problem.y_shape[2:])
    if image_positions <= MOST_APART * pixels:
        return None
    return f"taps reach so far that images are {image_positions} positions apart"


def layer_constants(problem: Problem, index: str) -> tuple[tuple[str, Constant], ...]:
    """Constants of the layer that a kernel and its packing share; `index`: the type of offsets."""
    return (
        ("Index", index),
        ("groups", problem.groups),
        ("in_channels", problem.in_channels_per_group),
        ("out_channels", problem.out_channels_per_group),
        ("stride_y", problem.height.stride),
        ("stride_x", problem.width.stride),
    )


def apart_why_not(problem: Problem) -> str | None:
    """One sentence if a tile that computes the two phases in x separately cannot serve, else None.

    Separate phases have their own slots. That gains nothing where all phases share their slots.
    """
    if problem.width.stride != 2:
        return f"takes two phases in x apart, the stride is {problem.width.stride}"
    if problem.pattern.width.phases_share_shifts:  # which the pattern remembers
        return "all phases in x have the same slots: nothing is gained by taking them apart"
    return None


def tap_constants(problem: Problem) -> tuple[tuple[str, int], ...]:
    """Kernel size and dilation of both axes, from which a packing computes a weight's address."""
    return (
        ("kernel_y", problem.height.kernel),
        ("kernel_x", problem.width.kernel),
        ("dilation_y", problem.height.dilation),
        ("dilation_x", problem.width.dilation),
    )


def division(divisor: int) -> tuple[int, int]:
    """(multiplier, shift) of a division by a constant, as common/division.cuh takes them.

    The division is exact for values below 2**30: the multiplier is at most one above
    2**(30 + shift) / divisor, and values have 30 bits (Granlund and Montgomery, Division by
    Invariant Integers using Multiplication, 1994).
    """
    shift = (divisor - 1).bit_length()
    return -(-(1 << 30 + shift) // divisor), shift
