"""What several kernels for Hopper's tensor cores share on the host."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.problem import Axis, Problem


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
    """Of a line of positions: those of one row (or rows of one image), which are the inputs, and
    zeros that serve the reach beyond this one's end and before the next one's start.
    """
    before = max(0, most_slot - axis.q_range.start)
    behind = max(0, axis.q_range.stop - axis.size)
    return max(axis.size + max(before, behind), len(axis.q_range))


def tap_constants(problem: Problem) -> tuple[tuple[str, int], ...]:
    """What a packing needs to find the weight of a reach."""
    return (
        ("kernel_y", problem.height.kernel),
        ("kernel_x", problem.width.kernel),
        ("dilation_y", problem.height.dilation),
        ("dilation_x", problem.width.dilation),
    )


def division(divisor: int) -> tuple[int, int]:
    """What common/division.cuh multiplies by and shifts, for values below 2**30.

    Exact, since the multiplier is at most one above 2**(30 + shift) / divisor, and values have 30
    bits (Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994).
    """
    shift = (divisor - 1).bit_length()
    return -(-(1 << 30 + shift) // divisor), shift
