"""Flat maps: contiguous images whose rows are off 16 bytes, as a tensor map has them.

Its strides are multiples of 16 bytes, so it cannot step over rows, nor over planes of any number of
pixels. But `classes` planes together are such a multiple: they are the innermost dimension, the
channels of a class the next. A copy starts on 16 bytes at or before the pixel that it is for, so
that all lines of a copy are off by the same number of pixels (`common/flat_planes.cuh`).
"""

from __future__ import annotations

import math

from tconv.kernels.launch import Address, Argument, Operand, Stride, TensorMap, read_type
from tconv.problem import ITEM_BYTES, Problem

OCTET = 8
"""Elements of 16 bits in 16 bytes."""

MOST_PIXELS = (1 << 31) - 1024
"""Of neighbouring planes: with a line behind them, they have 32 bits."""


def classes(problem: Problem, operand: Operand) -> int:
    """Planes that together take a multiple of 16 bytes: 1, 2, 4 or 8."""
    octet = 16 // ITEM_BYTES[problem.dtype]
    return octet // math.gcd(octet, math.prod(_shape(problem, operand)[2:]))


def why_not(problem: Problem, operand: Operand, *, odd: bool = False) -> str | None:
    """One sentence if an image has no flat map, or lines off by odd numbers of pixels, else None.

    Words of 4 bytes then have a pixel of each side, which some kernels (`odd`) make good. Those of
    float32 have one pixel.
    """
    _, channels, height, width = _shape(problem, operand)
    planes = classes(problem, operand)
    if not problem.source_dense:
        return "reads dense images that start on 16 bytes, these have gaps or do not"
    if width % 2 and not odd and ITEM_BYTES[problem.dtype] == 2:
        return f"reads rows of an even number of pixels, these have {width}"
    if channels // problem.groups % planes:
        return f"reads channels by {planes}, a group has {channels // problem.groups}"
    if planes * height * width > MOST_PIXELS:
        return f"counts pixels of {planes} planes of {height}x{width} in 32 bits"
    return None


def flat_map(problem: Problem, operand: Operand, line: int, channels: int, n: int) -> TensorMap:
    """A dense image: pixels of `classes` planes, channels of a class, images, groups.

    Args:
        problem: the call's.
        operand: "x" or "y".
        line, channels, n: pixels, channels of a class and images of one copy, without a swizzle.
    """
    batch, of_all, height, width = _shape(problem, operand)
    planes, of_group = classes(problem, operand), of_all // problem.groups
    return TensorMap(
        Address(operand),
        (planes * height * width, of_group // planes, batch, problem.groups),
        (Stride(operand, 1, planes), Stride(operand, 0), Stride(operand, 1, of_group)),
        (line, channels, n, 1),
        0,
        read_type(problem),
    )


def arguments(problem: Problem, operand: Operand) -> dict[str, Argument]:
    """Fields of a flat image, as `FlatPlanes` takes them."""
    _, _, height, width = _shape(problem, operand)
    return {
        "flat_classes": classes(problem, operand),
        "flat_plane": height * width,
        "flat_width": width,
        "flat_height": height,
    }


def line_pixels(pixels: int, planes: int, grain: int) -> int:
    """Pixels of a line that has these behind any octet, and spreads channels over all banks.

    Lines of even channels follow each other every second line, or where they are a class, every
    line: in steps of an odd multiple of 8 words, so that 8 words of each of 4 channels meet all
    banks. With 4 classes they meet half of them.

    Args:
        pixels: those that are read of it.
        planes: `classes`.
        grain: pixels that what a line is off by is a multiple of, up to 8.
    """
    step = OCTET * min(planes, 2)
    return (-(-(pixels + OCTET - grain) // step) | 1) * step


def _shape(problem: Problem, operand: Operand) -> tuple[int, int, int, int]:
    return problem.x_shape if operand == "x" else problem.y_shape
