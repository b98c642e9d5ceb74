"""What the kernels are held to: the measures see what they should, the simulation is fair."""

from __future__ import annotations

import math

import pytest
import torch

from layer_cases import Case, random_cases
from scale_cases import (
    SCALES,
    Wanted,
    multiply,
    operands,
    readers,
    rounded_to_tf32,
    running_sum,
    simulate,
    wanted,
)
from scale_plans import CASES, DIRECTIONS


def from_bits(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_tf32_rounds_to_nearest_with_ties_away():
    given = from_bits(0x3F800FFF, 0x3F801000, 0x3F803000, 0xBF801000, 0x00001000, 0x00000FFF)
    expected = from_bits(0x3F800000, 0x3F802000, 0x3F804000, 0xBF802000, 0x00002000, 0)
    assert torch.equal(rounded_to_tf32(given), expected)
    special = torch.tensor([math.inf, -math.inf, math.nan])
    assert torch.equal(rounded_to_tf32(special[:2]), special[:2])
    assert rounded_to_tf32(torch.cat([special[2:], from_bits(0x7FFFFFFF, -1)])).isnan().all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_running_sums_are_the_map(direction):
    for case in (*CASES, *random_cases(30, seed=1)):
        first, second = operands(direction, case, "normal", 0)
        exact = multiply(direction, case, first.double(), second.double())
        for backwards in (False, True):
            sums = running_sum(direction, case, first, second, backwards=backwards)
            assert sums.shape == exact.shape
            assert (sums - exact).norm() <= 2e-6 * exact.norm(), f"{direction} of {case}"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_float32_dot_product_errs_no_more_than_is_known_of_it(direction):
    # Each sum is of random products, and rounded once for each: u/sqrt(3) of sqrt(k) after k of n,
    # which together are u*sqrt(n/6) of the sum of n; the products are rounded too, or not.
    case = CASES[0]
    height, width = case.size
    first, second = operands(direction, case, "normal", 0)
    exact = multiply(direction, case, first.double(), second.double())
    terms = {
        "forward": case.in_channels * 9,
        "input_gradient": case.out_channels * 9,
        "weight_gradient": case.batch * height * width,
    }[direction]
    expected = 2.0**-24 * (terms / 6) ** 0.5
    for sums in simulate(direction, case, first, second, "ieee"):
        assert 0.6 <= float((sums - exact).norm() / exact.norm()) / expected <= 1.2


def test_how_tf32_is_summed_hardly_matters():
    for case in CASES:
        given = operands("forward", case, "normal", 0)
        (simulated,) = simulate("forward", case, *given, "tf32")
        rounded = [rounded_to_tf32(values).double() for values in given]
        exact, of_rounded = (
            multiply("forward", case, *values)
            for values in ([values.double() for values in given], rounded)
        )
        summing, rounding = (simulated - of_rounded).norm(), (of_rounded - exact).norm()
        assert summing <= 0.01 * rounding


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_operands_are_finite_float32_and_repeat(direction, name):
    case = CASES[1]
    given, again = (operands.__wrapped__(direction, case, name, 3) for _ in range(2))
    for values, same in zip(given, again, strict=True):
        assert values.dtype == torch.float32 and values.is_contiguous()
        assert values.isfinite().all() and values.any()
        assert torch.equal(values, same)
    assert multiply(direction, case, *given).isfinite().all()


def test_the_simulation_itself_is_right():
    for math_ in ("tf32", "ieee"):
        for name in SCALES:
            held_to = wanted("forward", CASES[3], name, 0, math_)
            for values in held_to.simulated:
                assert held_to.ratios(values, SCALES[name].by).right


def test_what_the_measures_see():
    case = Case(3, 16, 8, 1, (5, 6), (3, 3), (2, 2), (1, 1), (0, 0), (2, 2), bias=False)
    held_to = wanted("forward", case, "normal", 0, "ieee")
    good = held_to.simulated[0]

    def changed(index, value):
        out = good.clone()
        out[index] = value
        return held_to.ratios(out)

    # Where no tap reaches, all but zero is wrong.
    assert held_to.magnitudes[0, 0, 0, 0] == 0
    assert changed((0, 0, 0, 0), 1e-30).element == math.inf
    assert changed((0, 0, 1, 1), math.nan).norm == math.inf
    # A sample that is small beside the others.
    first, second = operands("forward", case, "normal", 0)
    first = first.clone()
    first[1] *= 1e-8
    held_to = Wanted.of("forward", case, first, second, "ieee")
    out = held_to.simulated[0].clone()
    out[1] *= 1.00001
    assert held_to.ratios(out).norm <= 1 < held_to.ratios(out, by=(0,)).norm
    assert held_to.ratios(out).element > 2
    assert held_to.ratios(out, among=torch.arange(3)[:, None, None, None].expand_as(out) != 1).right


def test_results_over_float32s_range():
    case = Case(1, 16, 2, 1, (2, 3), (1, 1), bias=False)
    first, second = operands("forward", case, "normal", 0)
    first = first.clone()
    first[0, :, 0, 0] = 3e38 * second[:, 0, 0, 0].sign()
    held_to = Wanted.of("forward", case, first, second * 4, "ieee")
    out = held_to.simulated[0]
    assert out[0, 0, 0, 0] == math.inf and held_to.ratios(out).right
    assert not held_to.ratios(out.nan_to_num()).right
    assert not held_to.ratios(-out).right


def test_readers_of_a_pixel():
    # One pixel, 3 x 3 outputs of every channel of its group, but for those cut off.
    case = Case(2, 2, 3, 2, (4, 5), (3, 3), (2, 2), (1, 1), (1, 1))
    first, second = (torch.zeros(shape) > 0 for shape in (case.layer.x_shape, case.layer.w_shape))
    first[1, 3, 0, 2] = True
    read = readers("forward", case, first, second)
    assert not read[0].any() and not read[1, :3].any()
    assert torch.equal(
        read[1, 3].nonzero(), torch.tensor([[y, x] for y in (0, 1) for x in (3, 4, 5)])
    )
    assert int(read.sum()) == 3 * 6
