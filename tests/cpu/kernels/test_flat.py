"""Flat maps: what their dimensions hold, and what has none."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from layer_cases import Case
from tconv.kernels import flat
from tconv.kernels.launch import Stride
from tconv.problem import Problem, dense_strides

DIRECTIONS = ("forward", "input_gradient", "weight_gradient")


def problem(direction: str, case: Case, dtype: str = "bfloat16") -> Problem:
    return case.layer.problem(direction, dtype, "contiguous")


def test_a_flat_map_has_each_pixel_behind_the_octet_that_a_copy_starts_at():
    draw = random.Random(1)
    found = set()
    for _ in range(200):
        channels = tuple(draw.choice((4, 8, 12)) for _ in range(2))
        size = (draw.randint(1, 9), 2 * draw.randint(1, 9))
        case = Case(draw.randint(1, 3), *channels, draw.randint(1, 3), size, (1, 1))
        of = problem("forward", case)
        assert flat.why_not(of, "x") is None
        planes = flat.classes(of, "x")
        found.add(planes)
        made = flat.flat_map(of, "x", 16, 1, 1)
        x = torch.arange(math.prod(of.x_shape)).reshape(of.x_shape)
        steps = []
        for stride in made.strides:
            assert isinstance(stride, Stride)
            steps.append(stride.times * dense_strides(of.x_shape)[stride.axis])
        assert all(step % 8 == 0 for step in steps)
        view = torch.as_strided(x, made.dims[::-1], (*steps[::-1], 1))
        of_group = of.in_channels_per_group
        plane = math.prod(size)
        for _ in range(20):
            n, c, row, column = (draw.randrange(i) for i in of.x_shape)
            group, channel = divmod(c, of_group)
            element = channel % planes * plane + row * size[1] + column
            assert view[group, n, channel // planes, element] == x[n, c, row, column]
    assert found == {1, 2, 4}


def test_lines_of_four_channels_meet_all_banks():
    for planes in (1, 2):
        for pixels in range(1, 240):
            line = flat.line_pixels(pixels, planes, 2)
            assert pixels + 6 <= line < pixels + 6 + 16 * planes
            step = line // 2 * (2 if planes == 1 else 1)  # words from an even channel to the next
            banks = {(step * channel + word) % 32 for channel in range(4) for word in range(8)}
            assert len(banks) == 32
    assert all(flat.line_pixels(n, 4, 2) % 16 == 0 for n in range(1, 240))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_dense_images_are_known(direction):
    case = Case(2, 8, 8, 1, (5, 6), (2, 2), (2, 2))
    of = problem(direction, case)
    assert of.source_dense and of.resized(1, 3, 7).source_dense
    assert problem(direction, case, "float32").source_dense
    assert not problem(direction, case, "float64").source_dense
    assert not case.layer.problem(direction, "bfloat16", "channels_last").source_dense
    shapes = (of.x_shape, of.w_shape, of.y_shape)
    for gap in range(3):
        # An image's rows have a gap; of a weight it does not matter.
        strides = [dense_strides(shape) for shape in shapes]
        _, c, h, w = shapes[gap]
        strides[gap] = (c * h * (w + 2), h * (w + 2), w + 2, 1)
        made = Problem.of(
            of.direction, *shapes[:2], case.geometry, dtype="bfloat16", strides=tuple(strides)
        )
        read = {"forward": (0,), "input_gradient": (2,), "weight_gradient": (0, 2)}[direction]
        assert made.source_dense == (gap not in read)
    args = (of.direction, *shapes[:2], case.geometry)
    assert not Problem.of(*args, dtype="bfloat16", aligned=False).source_dense


def test_refusals():
    case = Case(1, 8, 8, 1, (5, 6), (2, 2), (2, 2))
    of = problem("forward", case)
    assert flat.why_not(of, "x") is None
    assert flat.why_not(of.resized(1, 8, 7), "x", odd=True) is None
    for changed, reason in (
        (dataclasses.replace(of, source_dense=False), "reads dense images"),
        (of.resized(1, 5, 7), "an even number of pixels, these have 7"),
        (dataclasses.replace(of, in_channels=6), "reads channels by 4, a group has 6"),
        (of.resized(1, (1 << 15) + 2, 1 << 16), "in 32 bits"),
    ):
        assert reason in str(flat.why_not(changed, "x"))
