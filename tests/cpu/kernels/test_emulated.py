"""Every general kernel in the emulator, forward and both gradients, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from emulated_plans import run_general
from layer_cases import (
    CORNERS,
    LAYOUTS,
    Case,
    assert_maps_right,
    operands,
    random_cases,
    reference,
    three_maps,
)
from tconv.jit.target import Target
from tconv.kernels import FAMILIES
from tconv.plan import candidates, make_plan
from tconv.problem import Axis, Layout, Problem
from tiers import quick

GENERAL = tuple(family for family in FAMILIES if family.STEM.startswith("general_"))

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setenv("TCONV_EMULATE", "1")
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("case", CORNERS, ids=str)
def test_corners(case):
    # Each corner in another dtype and layout; the device's tests take them all.
    turn = CORNERS.index(case)
    dtype = (torch.float32, *DTYPES)[turn % 5]
    assert_maps_right(case, operands(case, dtype, LAYOUTS[turn % 4], "cpu"))


@pytest.mark.parametrize("layout", quick(LAYOUTS, 0, -1))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_layers(dtype, layout):
    seed = 100 + DTYPES.index(dtype) * len(LAYOUTS) + LAYOUTS.index(layout)
    for case in random_cases(4, seed):
        assert_maps_right(case, operands(case, dtype, layout, "cpu", seed))


@pytest.mark.parametrize("case", (CORNERS[4], CORNERS[7], CORNERS[8]), ids=str)
def test_under_sanitizers(case, monkeypatch):
    monkeypatch.setenv("TCONV_SANITIZE", "1")
    assert_maps_right(case, operands(case, torch.float32, "mixed", "cpu"))


def test_tf32_rounds_operands_to_nearest():
    torch.backends.cudnn.allow_tf32 = True
    for case in (
        Case(1, 17, 18, 1, (4, 5), (3, 3)),
        Case(1, 8, 20, 1, (4, 3), (3, 3), (2, 2), (1, 1)),  # too few channels: exact
    ):
        assert_maps_right(case, operands(case, torch.float32, "contiguous", "cpu"), tf32=True)


def every_plan(case: Case, dtype: str, wide: bool = False, layout: Layout = "contiguous"):
    """Each kernel with each tile that can serve the case."""
    height, width = (
        Axis(*values)
        for values in zip(
            case.size,
            case.kernel,
            case.stride,
            case.padding,
            case.output_padding,
            case.dilation,
            strict=True,
        )
    )
    target = Target.named("sm_90a")
    for family in GENERAL:
        problem = Problem(
            family.DIRECTION,
            case.batch,
            case.in_channels * case.groups,
            case.out_channels * case.groups,
            case.groups,
            height,
            width,
            dtype=dtype,
            x_layout=layout,
            y_layout=layout,
            wide_offsets=wide,
        )
        for candidate in candidates(problem, target):
            if candidate.refusal is None and candidate.stem == family.STEM:
                yield make_plan(problem, target, candidate)


@pytest.mark.parametrize("wide", (False, True), ids=("int", "long long"))
def test_every_tile(wide):
    """Tails in every dimension of every tile, whichever tile the plan would choose."""
    case = Case(2, 5, 3, 2, (5, 7), (3, 4), (2, 3), (1, 0), bias=False)
    t = operands(case, torch.float32, "contiguous", "cpu")
    exact = reference(case, t.x, t.w, None, t.grad_output)
    tiles = 0
    for plan in every_plan(case, "float32", wide):
        out = run_general(plan, t.x, t.w, t.grad_output, "forward")
        want = exact[("forward", "input_gradient", "weight_gradient").index(plan.problem.direction)]
        error = (out.double() - want).norm() / want.norm()
        assert error < 1e-6, f"{plan}: {error:.2e}"
        tiles += 1
    assert tiles == sum(len(family.TILES) for family in GENERAL)


def test_channels_last_tiles():
    """Two and four neighbouring threads share pixels, with tails of rows and pixels."""
    case = Case(2, 33, 18, 1, (4, 5), (2, 3), (1, 2), (1, 0), bias=False)
    t = operands(case, torch.float32, "channels_last", "cpu")
    exact = reference(case, t.x, t.w, None, t.grad_output)
    threads = set()
    for plan in every_plan(case, "float32", layout="channels_last"):
        out = run_general(plan, t.x, t.w, t.grad_output, "forward")
        want = exact[("forward", "input_gradient", "weight_gradient").index(plan.problem.direction)]
        error = (out.double() - want).norm() / want.norm()
        assert error < 1e-6, f"{plan}: {error:.2e}"
        threads.add(dict(plan.kernel.source.constants).get("row_threads"))
    assert threads == {None, 2, 4}


def test_results_do_not_depend_on_the_order_of_threads():
    """A missing barrier shows as a difference between schedules."""
    case = Case(1, 20, 5, 1, (5, 7), (3, 4), (1, 2), bias=False)
    t = operands(case, torch.float32, "contiguous", "cpu")
    for plan in every_plan(case, "float32"):
        results = [
            run_general(plan, t.x, t.w, t.grad_output, schedule)
            for schedule in ("forward", "reverse", "random:1")
        ]
        assert torch.isfinite(results[0]).all()
        assert all(torch.equal(results[0], other) for other in results[1:]), str(plan)


def test_empty_phases_hold_the_bias_alone():
    case = dataclasses.replace(CORNERS[3], bias=True)
    t = operands(case, torch.float32, "contiguous", "cpu")
    out, _, _ = three_maps(case, t)
    # Rows 2, 3 and 4 of every 5 have no tap: the kernel has two.
    empty = [row for row in range(case.output_size[0]) if row % 5 >= 2]
    assert torch.equal(out[:, :, empty], t.bias[:, None, None].expand_as(out[:, :, empty]))
