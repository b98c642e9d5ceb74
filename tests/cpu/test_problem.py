"""The geometry against the definition: scatter every input through every tap."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import tconv
from tconv.problem import ITEM_BYTES, Axis, Problem

# Small strides and dilations, so that every gcd and many empty phases come up.
parameters = st.fixed_dictionaries(
    {
        "size": st.integers(1, 9),
        "kernel": st.integers(1, 7),
        "stride": st.integers(1, 6),
        "padding": st.integers(0, 6),
        "output_padding": st.integers(0, 5),
        "dilation": st.integers(1, 6),
    }
)


def make_axis(values: dict[str, int]) -> Axis:
    try:
        return Axis(**values)
    except ValueError as error:
        assert "at least one output" in str(error)
        assume(False)
        raise


def scattered(axis: Axis) -> list[tuple[int, int, int]]:
    """(output, input, tap) of every product whose output is kept, by the definition."""
    products = []
    for i, t in itertools.product(range(axis.size), range(axis.kernel)):
        o = i * axis.stride - axis.padding + t * axis.dilation
        if 0 <= o < axis.output_size:
            products.append((o, i, t))
    return sorted(products)


@given(parameters)
@example(dict(size=5, kernel=3, stride=2, padding=1, output_padding=0, dilation=2))
@example(dict(size=1, kernel=1, stride=5, padding=0, output_padding=4, dilation=1))
@example(dict(size=7, kernel=5, stride=3, padding=2, output_padding=0, dilation=6))
def test_phases_gather_what_the_definition_scatters(values):
    axis = make_axis(values)
    gathered = []
    for o in range(axis.output_size):
        q, phase = divmod(o + axis.padding, axis.stride)
        assert q in axis.q_range
        for tap in axis.phases[phase].taps:
            if 0 <= q - tap.shift < axis.size:
                gathered.append((o, q - tap.shift, tap.index))
    assert sorted(gathered) == scattered(axis)


@given(parameters)
def test_taps_occur_once_and_shifts_are_theirs(values):
    axis = make_axis(values)
    assert len(axis.phases) == axis.stride
    taps = [tap for phase in axis.phases for tap in phase.taps]
    assert sorted(tap.index for tap in taps) == list(range(axis.kernel))
    assert axis.shifts == tuple(sorted({tap.shift for tap in taps}))
    for phase in axis.phases:
        for tap in phase.taps:
            assert tap.shift >= 0
            assert tap.index * axis.dilation == tap.shift * axis.stride + phase.index
        # A kernel walks the taps of a phase, and their shifts, in equal steps.
        common = math.gcd(axis.stride, axis.dilation)
        for one, two in itertools.pairwise(phase.taps):
            assert two.index - one.index == axis.stride // common
            assert two.shift - one.shift == axis.dilation // common


@given(parameters)
def test_q_range_is_exactly_that_of_the_outputs(values):
    axis = make_axis(values)
    q = {(o + axis.padding) // axis.stride for o in range(axis.output_size)}
    assert set(axis.q_range) == q


@given(parameters)
def test_products(values):
    axis = make_axis(values)
    assert axis.products == len(scattered(axis))


@given(parameters, parameters, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_flops_and_bytes(height, width, batch, channels, groups):
    y, x = make_axis(height), make_axis(width)
    problem = Problem("forward", batch, 2 * groups, channels * groups, groups, y, x, bias=True)
    pairs = len(scattered(y)) * len(scattered(x))
    assert problem.flops == 2 * batch * groups * 2 * channels * pairs
    shapes = (problem.x_shape, problem.w_shape, problem.y_shape, (problem.out_channels,))
    for dtype, size in ITEM_BYTES.items():
        typed = dataclasses.replace(problem, dtype=dtype)
        assert typed.bytes == size * sum(math.prod(shape) for shape in shapes)


def test_layer_of_known_size():
    # KernelBench level 1 #57: 618.5 GFLOP, 4304 MB.
    axis = Axis(1024, 3)
    problem = Problem("forward", 8, 64, 64, 1, axis, axis)
    assert problem.y_shape == (8, 64, 1026, 1026)
    assert problem.flops == 618_475_290_624
    assert problem.bytes == 4_303_511_552


def test_immutable_hashable_and_picklable():
    axis = Axis(5, 3, 2, 1)
    problem = Problem("forward", 1, 2, 3, 1, axis, axis)
    assert axis.phases and problem.flops  # computed once and kept, without a change of identity
    same = Problem("forward", 1, 2, 3, 1, Axis(5, 3, 2, 1), Axis(5, 3, 2, 1))
    assert problem == same and hash(problem) == hash(same)
    copied = pickle.loads(pickle.dumps(problem))
    assert copied == problem and hash(copied) == hash(problem)
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.batch = 2  # type: ignore[misc]


def test_another_process_hashes_a_problem_anew():
    """The hash of a str differs between processes, so a remembered one must not be sent."""
    sent = pickle.dumps(_remembering()).hex()
    there = (
        "import pickle, sys; sys.path.insert(0, sys.argv[1])\n"
        f"copied = pickle.loads(bytes.fromhex('{sent}'))\n"
        "import dataclasses; assert hash(copied) == hash(dataclasses.replace(copied))\n"
        "assert hash(copied.like) == hash(dataclasses.replace(copied.like))"
    )
    source = str(Path(tconv.__file__).parents[1])
    environment = {**os.environ, "PYTHONHASHSEED": "5"}
    subprocess.run([sys.executable, "-c", there, source], env=environment, check=True)


def _remembering() -> Problem:
    """One by another's kernel, whose hashes are remembered."""
    axis = Axis(5, 3, 2, 1)
    problem = Problem("forward", 1, 2, 3, 1, axis, axis)
    served = problem.by(problem.resized(2, 7, 9))
    assert served is not None and hash(served) != hash(problem)
    assert served == dataclasses.replace(problem, like=problem.resized(2, 7, 9))
    assert hash(served) == hash(dataclasses.replace(problem, like=problem.resized(2, 7, 9)))
    return served


def test_prints_on_one_line():
    y, x = Axis(5, 3, 2, 1), Axis(7, 5, 3, 2)
    text = str(Problem("forward", 1, 4, 6, 2, y, x, bias=True))
    assert "\n" not in text
    for part in ("forward", "1x4x5x7", "1x6x9x19", "kernel=3x5", "stride=2x3", "groups=2", "bias"):
        assert part in text


@pytest.mark.parametrize(
    ("values", "message"),
    (
        (dict(size=0, kernel=1), "size >= 1, got size=0"),
        (dict(size=1, kernel=0), "kernel >= 1, got kernel=0"),
        (dict(size=1, kernel=1, stride=0), "stride >= 1, got stride=0"),
        (dict(size=1, kernel=1, padding=-1), "padding >= 0, got padding=-1"),
        (dict(size=1, kernel=3, padding=2), "at least one output, got -1"),
    ),
)
def test_bad_axis(values, message):
    with pytest.raises(ValueError, match=message):
        Axis(**values)


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        (dict(groups=2), "in_channels divisible by groups, got in_channels=3, groups=2"),
        (dict(batch=0), "batch >= 1, got batch=0"),
        (dict(dtype="int8"), "dtype must be one of"),
        (dict(direction="backward"), "direction must be one of"),
        (dict(dtype="float16", math="tf32"), "math='tf32' is for dtype='float32'"),
    ),
)
def test_bad_problem(changes, message):
    good = dict(direction="forward", batch=1, in_channels=3, out_channels=4, groups=1)
    good |= dict(height=Axis(4, 3), width=Axis(4, 3))
    with pytest.raises(ValueError, match=message):
        Problem(**(good | changes))
