"""An infinity or NaN reaches the results that read it and no other: each kernel in the emulator.

Kernels multiply zeros too, for phases without a tap and beside the image. They recompute results
that are not finite, from exactly their products.
"""

from __future__ import annotations

import dataclasses
from math import inf, nan

import pytest
import torch
from torch import Tensor

from emulated_plans import allocations, arguments_of, emulated, plans, problem_of
from layer_cases import LAYOUTS, Case, by_taps, operands, round_to_tf32
from tconv.plan import Plan
from tconv.reference import UNIT_ROUNDOFF
from tiers import quick

STRIDE_2 = Case(2, 16, 20, 1, (5, 9), (3, 3), (2, 2), (1, 1), (1, 1))
EVEN = Case(1, 17, 24, 2, (4, 12), (4, 4), (2, 2), (1, 1))
EMPTY_PHASES = Case(1, 9, 12, 1, (4, 6), (3, 3), (2, 2), (1, 1), (0, 0), (2, 2))
BARE = Case(1, 16, 33, 1, (5, 9), (3, 3), bias=False)
PADDED = Case(2, 20, 8, 1, (6, 7), (3, 3), (1, 1), (2, 1))
UNEVEN = Case(1, 8, 6, 2, (5, 7), (5, 2), (3, 4), (1, 0), (1, 2))
ONE_CHANNEL = Case(1, 24, 1, 1, (7, 9), (9, 9), (3, 3), (4, 4), (2, 2))
STRIDED = (  # whose kernel is the stride
    Case(2, 17, 20, 2, (5, 9), (2, 2), (2, 2), (1, 1)),
    Case(1, 33, 6, 1, (4, 6), (3, 4), (3, 4), (1, 2), (1, 3), bias=False),
)
# Several strips of an image.
LONG_ROWS = Case(1, 17, 3, 1, (4, 150), (4, 4), (2, 2), (1, 1))
FRAMES = Case(1, 17, 2, 1, (2, 9), (1, 50), (1, 20), (0, 15))

POINTWISE = (
    ("pointwise_forward", Case(2, 3, 4, 2, (4, 5), (1, 1), (2, 3), (0, 0), (1, 0))),
    ("pointwise_mma_forward", Case(2, 17, 40, 1, (4, 5), (1, 1), (2, 2))),
    ("pointwise_mma_forward", Case(1, 17, 3, 2, (4, 6), (3, 3), (2, 2), (1, 1), (1, 0), (2, 2))),
    ("pointwise_mma_forward", Case(2, 20, 33, 2, (4, 5), (1, 1))),
    ("pointwise_mma_forward", Case(1, 68, 30, 1, (4, 5), (1, 1), (1, 2))),
)

SCHEDULES = ("forward", "reverse", "random:1", "random:2")
"""A result that depends on the order of threads has a race."""

GENERAL = ("general_forward", "general_input_gradient", "general_weight_gradient")


def spoiled(tensor: Tensor):
    """The tensor [A, B, H, W] with values that are not finite: one, of each sign, several."""
    for values in (
        {(0, 0, 0, 0): inf},
        {(-1, -1, -1, -1): -inf},
        {(0, 1, 1, 1): nan},
        {(0, 2, -1, 0): inf, (-1, -2, 0, 1): -inf, (0, -1, 0, -1): nan},
    ):
        changed = tensor.clone(memory_format=torch.preserve_format)
        for place, value in values.items():
            at = tuple(max(-n, min(i, n - 1)) for i, n in zip(place, tensor.shape, strict=True))
            changed[at] = value
        yield changed


def run_plan(
    plan: Plan, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, schedule: str
) -> Tensor:
    """What the plan computes of these, its threads in the order of the schedule."""
    problem = plan.problem
    out, packed, partial = torch.empty(0), torch.full((plan.packed,), nan), torch.empty(0)
    if problem.direction == "weight_gradient":
        real = torch.float64 if x.dtype == torch.float64 else torch.float32
        shape = (plan.splits, *problem.w_shape)
        partial = torch.empty_strided(shape, plan.partial_strides, dtype=real).fill_(nan)
    elif problem.direction == "forward":
        out = y = torch.full_like(y, nan)
    else:
        out = x = torch.full_like(x, nan)
    used = {"x": x, "w": w, "y": y, "bias": bias, "packed": packed, "partial": partial}
    tensors = [x, w, y, packed, partial, *([] if bias is None else [bias])]
    for launch in plan.launches:
        emulated(launch.source).launch(
            launch.grid,
            arguments_of(launch, **used),
            allocations=allocations(tensors),
            schedule=schedule,
        )
    return partial.sum(0) if problem.direction == "weight_gradient" else out


def assert_reaches_readers_alone(plan: Plan, case: Case, t) -> None:
    """With values that are not finite in each of the two operands."""
    number = ("forward", "input_gradient", "weight_gradient").index(plan.problem.direction)
    given = {"x": t.x, "w": t.w, "y": t.grad_output}
    if plan.problem.math == "tf32":
        given = {name: round_to_tf32(tensor) for name, tensor in given.items()}
    bias = t.bias if number == 0 else None
    sizes = by_taps(
        case,
        *(given[name].abs() for name in "xw"),
        None if bias is None else bias.abs(),
        given["y"].abs(),
    )[number]
    taps = case.kernel[0] * case.kernel[1]
    terms = (
        case.in_channels * taps + 1,
        case.out_channels * taps,
        case.batch * case.size[0] * case.size[1],
    )[number]
    # Of the sums, and of a result in fewer bits.
    roundoff = min(UNIT_ROUNDOFF[t.x.dtype], UNIT_ROUNDOFF[torch.float32])
    bound = (4 * terms**0.5 * roundoff + UNIT_ROUNDOFF[t.x.dtype]) * sizes
    reached = 0
    for name in ("xw", "yw", "xy")[number]:
        for changed, schedule in zip(spoiled(given[name]), SCHEDULES, strict=True):
            values = given | {name: changed}
            want = by_taps(case, values["x"], values["w"], bias, values["y"])[number]
            out = run_plan(plan, values["x"], values["w"], bias, values["y"], schedule).double()
            finite = want.isfinite()
            reached += (~finite).sum()
            assert torch.equal(out.isfinite(), finite), f"{plan}: {name}"
            # NaN for NaN, and infinities of the same sign.
            assert torch.equal(out[~finite].nan_to_num(0), want[~finite].nan_to_num(0)), str(plan)
            error = (out - want).abs()[finite]
            assert (error <= bound[finite]).all(), f"{plan}: {name}"
    assert reached > 0


@pytest.mark.parametrize(
    "case", quick((STRIDE_2, EVEN, EMPTY_PHASES, PADDED, UNEVEN), 0, 2, 4), ids=str
)
@pytest.mark.parametrize("stem", GENERAL)
def test_general(stem, case):
    """Every tile in one of the layouts and types."""
    turn = (STRIDE_2, EVEN, EMPTY_PHASES, PADDED, UNEVEN).index(case)
    dtype = (torch.float32, torch.float16, torch.float64, torch.bfloat16, torch.float32)[turn]
    layout = LAYOUTS[turn % len(LAYOUTS)]
    t = operands(case, dtype, layout, "cpu")
    direction = stem.removeprefix("general_")
    formats = ("contiguous", "channels_last")
    problem = dataclasses.replace(
        problem_of(case),
        direction=direction,
        dtype=str(dtype).removeprefix("torch."),
        math="tf32" if turn == 0 else "ieee",
        bias=case.bias and direction == "forward",
        source_aligned=False,
        x_layout=formats[t.x.is_contiguous(memory_format=torch.channels_last)],
        y_layout=formats[t.grad_output.is_contiguous(memory_format=torch.channels_last)],
    )
    found = plans(problem, stem)
    assert found
    for plan in found:
        assert_reaches_readers_alone(plan, case, t)


def test_splits_of_the_pixels():
    case = Case(3, 4, 5, 1, (14, 13), (3, 3), (2, 2), (1, 1), bias=False)
    t = operands(case, torch.float32, "mixed", "cpu")
    problem = dataclasses.replace(
        problem_of(case), direction="weight_gradient", math="ieee", y_layout="channels_last"
    )
    found = [plan for plan in plans(problem, "general_weight_gradient") if plan.splits > 1]
    assert found
    for plan in found[::2]:
        assert_reaches_readers_alone(plan, case, t)


CASES = (STRIDE_2, EVEN, EMPTY_PHASES, BARE, PADDED, UNEVEN, ONE_CHANNEL, LONG_ROWS)
FORWARD = {
    "direct_forward": CASES[:-1],
    "mma_forward": CASES[:-1],
    "sm90_tf32_wide_forward": STRIDED,
    "sm90_tf32_overlap_forward": (PADDED, UNEVEN, ONE_CHANNEL, LONG_ROWS),
}


PAIRS = [(stem, case) for stem, cases in FORWARD.items() for case in cases]
# Of each kernel one case for each turn below.
QUICK = [
    place
    for place, (stem, case) in enumerate(PAIRS)
    if case in CASES[:4] or stem.startswith("sm90")
]


@pytest.mark.parametrize(("stem", "case"), quick(PAIRS, *QUICK), ids=str)
def test_forward(stem, case):
    """Other tiles for each case, in turn."""
    t = operands(case, torch.float32, "contiguous", "cpu")
    turn = FORWARD[stem].index(case) % 4
    found = [plan for math in ("tf32", "ieee") for plan in plans(problem_of(case, math=math), stem)]
    for plan in found[turn % len(found) :: 4]:
        assert_reaches_readers_alone(plan, case, t)


def test_frames():
    t = operands(FRAMES, torch.float32, "contiguous", "cpu")
    found = plans(problem_of(FRAMES, math="tf32"), "mma_frames_forward")
    assert found
    for plan in found:
        assert_reaches_readers_alone(plan, FRAMES, t)


@pytest.mark.parametrize(("stem", "case"), POINTWISE, ids=str)
def test_pointwise(stem, case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    found = plans(problem_of(case, math="ieee" if stem == "pointwise_forward" else "tf32"), stem)
    assert found
    for plan in found:
        assert_reaches_readers_alone(plan, case, t)
