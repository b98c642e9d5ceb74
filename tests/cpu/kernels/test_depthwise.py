"""The depthwise kernels: in the emulator, and through NVRTC."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from emulated_plans import (
    HOPPER,
    allocations,
    arguments_of,
    assert_compiled_well,
    emulated,
    expect_worse_code,
    plans,
)
from layer_cases import LAYOUTS, Case, by_taps, operands
from tconv.jit.target import Target
from tconv.kernels import (
    depthwise_forward,
    depthwise_input_gradient,
    depthwise_weight_gradient,
    sm90_forward,
    sm90_input_gradient,
    sm90_weight_gradient,
)
from tconv.plan import Plan, candidates
from tconv.problem import Axis, Problem
from tconv.reference import UNIT_ROUNDOFF, Operands, expected
from tiers import quick

FAMILIES = {
    family.DIRECTION: family
    for family in (depthwise_forward, depthwise_input_gradient, depthwise_weight_gradient)
}
DIRECTIONS = tuple(FAMILIES)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

CASES = (
    Case(2, 1, 1, 16, (5, 16), (4, 4), (2, 2), (1, 1)),
    Case(2, 1, 1, 8, (6, 7), (4, 4), (2, 2), (1, 1), bias=False),
    # Channels that are no multiple of a vector, and more than a block has.
    Case(1, 1, 1, 3, (5, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(1, 1, 1, 70, (3, 5), (3, 3), (1, 1), (1, 1)),
    Case(1, 1, 1, 264, (2, 3), (2, 2), (2, 2)),
    # Several output channels in a group.
    Case(2, 1, 2, 8, (4, 8), (4, 4), (2, 2), (1, 1)),
    Case(1, 1, 3, 4, (5, 6), (3, 2), (2, 3), (1, 0)),
    Case(1, 1, 8, 2, (4, 4), (2, 2), (2, 2)),
    # Dilated; with gcd(stride, dilation) > 1; an asymmetric kernel and padding.
    Case(1, 1, 1, 8, (9, 11), (3, 3), (1, 1), (2, 1), (0, 0), (2, 3)),
    Case(1, 1, 1, 8, (4, 5), (3, 3), (2, 2), (1, 1), (0, 0), (2, 2)),
    Case(2, 1, 1, 4, (5, 7), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1)),
    Case(1, 1, 1, 8, (3, 40), (1, 4), (1, 2), (0, 1)),
    # Phases without a tap, which hold the bias alone.
    Case(2, 1, 1, 8, (3, 4), (2, 2), (3, 3), output_padding=(2, 1)),
    Case(1, 1, 1, 8, (4, 3), (1, 3), (4, 1), (0, 1), (3, 0)),
    # Single pixels; fewer outputs than phases; padding beyond the kernel's reach.
    Case(1, 1, 1, 8, (1, 1), (1, 1)),
    Case(3, 1, 1, 2, (1, 1), (3, 3), (4, 4), (1, 0), (1, 0)),
    Case(2, 1, 1, 8, (2, 2), (2, 3), (6, 7), (4, 5), (3, 5)),
    Case(1, 1, 1, 8, (9, 8), (2, 2), (1, 1), (3, 2)),
    Case(67, 1, 1, 2, (1, 2), (2, 2), (2, 2)),
    # A kernel larger than the image; bilinear upsampling by 8; rows of strips that no group holds.
    Case(2, 1, 1, 8, (2, 2), (5, 7), (1, 1), (2, 3)),
    Case(1, 1, 1, 4, (3, 4), (16, 16), (8, 8), (4, 4)),
    Case(1, 1, 1, 8, (21, 24), (4, 4), (2, 2), (1, 1)),
)
EVERY = [(direction, case) for direction in DIRECTIONS for case in CASES]
# Of each case three pairs of dtype and layout, all twelve in four cases that follow each other.
LAID = [
    (*one, dtype, layout)
    for turn, one in enumerate(EVERY)
    for place, (dtype, layout) in enumerate(itertools.product(DTYPES, LAYOUTS))
    if (turn + place) % 4 == 0
]


def problem_of(direction, case: Case, t: Operands, **options) -> Problem:
    return Problem.of(
        direction,
        tuple(t.x.shape),
        tuple(t.w.shape),
        case.geometry,
        dtype=str(t.x.dtype).removeprefix("torch."),
        bias=case.bias,
        strides=(t.x.stride(), t.w.stride(), t.grad_output.stride()),
        **options,
    )


def served(problem: Problem, target: Target = HOPPER) -> list[Plan]:
    return plans(problem, FAMILIES[problem.direction].STEM, target)


def few() -> Target:
    """A device on which a thread has several strips."""
    return dataclasses.replace(HOPPER, multiprocessors=1)


def run(chosen: Plan, t: Operands, schedule="forward", sanitize=False, out=None) -> Tensor:
    """The result, into `out` where it is given; a weight's gradient rounded once."""
    direction = chosen.problem.direction
    named = {"x": t.x, "w": t.w, "y": t.grad_output, "bias": t.bias}
    if direction == "weight_gradient":
        made, out = "partial", torch.full((chosen.splits, *t.w.shape), math.nan)
    else:
        made = "y" if direction == "forward" else "x"
        out = torch.full_like(named[made], math.nan) if out is None else out
    named[made] = out
    (launch,) = chosen.launches
    emulated(launch.source, sanitize).launch(
        launch.grid,
        arguments_of(launch, **named),
        allocations=allocations([tensor for tensor in named.values() if tensor is not None]),
        schedule=schedule,
    )
    return out.sum(0).to(t.w.dtype) if made == "partial" else out


def assert_right(out: Tensor, direction, case: Case, t: Operands) -> None:
    wrong = expected(case.layer, t)[DIRECTIONS.index(direction)].why_wrong(out)
    assert wrong is None, f"{direction}: {case}: {wrong}"


@pytest.mark.parametrize(("direction", "case"), quick(EVERY, *range(0, len(EVERY), 2)), ids=str)
def test_some_tiles(direction, case):
    """Of each case others, in one dtype and layout; all that serve are below."""
    turn = EVERY.index((direction, case))
    dtype, layout = DTYPES[turn % 3], LAYOUTS[turn % 4]
    if direction == "forward" and dtype is torch.float32:
        layout = "channels_last"  # the contiguous ones are direct_forward's
    t = operands(case, dtype, layout, "cpu")
    every = served(problem_of(direction, case, t), few() if turn % 2 else HOPPER)
    for place in {turn % len(every), (5 * turn + 3) % len(every)}:
        assert_right(run(every[place], t), direction, case, t)


@pytest.mark.thorough
@pytest.mark.parametrize(("direction", "case", "dtype", "layout"), LAID, ids=str)
def test_every_tile_that_serves(direction, case, dtype, layout):
    t = operands(case, dtype, layout, "cpu")
    for chosen in served(problem_of(direction, case, t), few()):
        assert_right(run(chosen, t), direction, case, t)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_tile(direction, dtype, layout):
    case = CASES[0]
    t = operands(case, dtype, layout, "cpu")
    family = FAMILIES[direction]
    found = served(problem_of(direction, case, t), few())
    alone = {tile for tile in family.TILES if layout == "channels_last" or tile.vector == 1}
    assert {chosen.tile for chosen in found} == alone
    for chosen in found:
        assert_right(run(chosen, t), direction, case, t)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_some_tile_serves_each_case_in_each_layout(direction, case):
    for layout in LAYOUTS:
        t = operands(case, torch.bfloat16, layout, "cpu")
        assert served(problem_of(direction, case, t)), layout


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_result_does_not_depend_on_the_order_of_threads(direction, layout):
    case = CASES[1]
    t = operands(case, torch.bfloat16, layout, "cpu")
    for chosen in served(problem_of(direction, case, t), few())[::2]:
        first = run(chosen, t, sanitize=True)
        assert_right(first, direction, case, t)
        for schedule in ("reverse", "random:1"):
            assert torch.equal(run(chosen, t, schedule), first)


def off_vectors(values: Tensor, channels_last: bool) -> Tensor:
    """The values in rows with NaN on both sides, none of which begins on a vector."""
    if channels_last:
        inner = off_vectors(values.permute(0, 2, 3, 1).contiguous(), False)
        return inner.permute(0, 3, 1, 2)
    *outer, width = values.shape
    room = torch.full((*outer, width + 2 + width % 2 + 1), math.nan, dtype=values.dtype)
    room[..., 1 : 1 + width] = values
    return room[..., 1 : 1 + width]


@pytest.mark.parametrize("wide", (False, True), ids=("int", "long long"))
@pytest.mark.parametrize("channels_last", (False, True))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_reads_and_writes_its_tensors_alone_wherever_they_begin(direction, channels_last, wide):
    case = CASES[0]
    t = operands(case, torch.float16, "contiguous", "cpu")
    x, y = (off_vectors(values, channels_last) for values in (t.x, t.grad_output))
    moved = dataclasses.replace(t, x=x, grad_output=y)
    problem = dataclasses.replace(problem_of(direction, case, moved), wide_offsets=wide)
    made = {"forward": y, "input_gradient": x}.get(direction)
    for chosen in served(problem, few())[:: 3 if wide else 1]:
        if made is None:
            assert_right(run(chosen, moved), direction, case, t)
            continue
        room = torch.tensor([], dtype=made.dtype).set_(made.untyped_storage())
        before = room.isnan()
        made.fill_(math.nan)
        assert_right(run(chosen, moved, out=made), direction, case, t)
        assert torch.equal(room.isnan(), before), f"{chosen} wrote beside its tensor"


NOT_FINITE = (CASES[1], CASES[2], CASES[6], CASES[9], CASES[16], CASES[17])


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize("case", quick(NOT_FINITE, 0, 1), ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_is_not_finite_reaches_its_readers_alone(direction, case, layout):
    """Also a weight that meets the zeros beside the image."""
    t = operands(case, torch.bfloat16, layout, "cpu")
    number = DIRECTIONS.index(direction)
    bias = t.bias if direction == "forward" else None
    reached = 0
    for name in ("xw", "yw", "xy")[number]:
        for at in ((0, 0, 0, 0), (-1, -1, -1, -1)):
            for value in (math.inf, -math.inf, math.nan):
                field = {"x": "x", "w": "w", "y": "grad_output"}[name]
                changed = getattr(t, field).clone(memory_format=torch.preserve_format)
                changed[at] = value
                given = dataclasses.replace(t, **{field: changed})
                want = by_taps(case, given.x, given.w, bias, given.grad_output)[number]
                for chosen in served(problem_of(direction, case, t), few())[::3]:
                    out = run(chosen, given).double()
                    finite = want.isfinite()
                    reached += int((~finite).sum())
                    assert torch.equal(out.isfinite(), finite), f"{chosen}: {name}"
                    same = out[~finite].nan_to_num(0), want[~finite].nan_to_num(0)
                    assert torch.equal(*same), f"{chosen}: {name}"
                    error = (out - want)[finite].abs()
                    roundoff = 2 * UNIT_ROUNDOFF[torch.bfloat16]
                    assert (error <= roundoff * want[finite].abs() + 1e-5).all(), str(chosen)
    assert reached > 0


def test_shares_of_the_positions_are_added_in_order():
    case = CASES[21]
    t = operands(case, torch.float16, "channels_last", "cpu")
    problem = problem_of("weight_gradient", case, t)
    assert max(chosen.splits for chosen in served(problem)) > 1
    for chosen in served(problem)[::4]:
        assert_right(run(chosen, t), "weight_gradient", case, t)


LAYERS = (
    (8, 256, Axis(128, 4, 2, 1)),
    (16, 64, Axis(64, 4, 2, 1)),
    (2, 64, Axis(64, 4, 2, 1)),
    (8, 256, Axis(64, 3, 2, 1, 1)),
    (8, 64, Axis(64, 2, 2)),
    (4, 96, Axis(56, 7, 1, 3)),
    (4, 21, Axis(28, 16, 8, 4)),
    (4, 21, Axis(28, 64, 32, 16)),
    (8, 64, Axis(64, 3, 1, 1)),
    (4, 64, Axis(32, 3, 1, 2, 0, 2)),
)


def problems(batch: int, channels: int, axis: Axis):
    """All directions, both layouts, in each dtype."""
    for direction in DIRECTIONS:
        for turn, layout in enumerate(("channels_last", "contiguous")):
            for dtype in ("float16", "bfloat16", "float32")[turn % 2 :]:
                yield Problem(
                    direction,
                    batch,
                    channels,
                    channels,
                    channels,
                    axis,
                    axis,
                    dtype=dtype,
                    bias=direction == "forward",
                    x_layout=layout,
                    y_layout=layout,
                )


@pytest.mark.parametrize("arch", quick(("sm_90a", "sm_80"), 0))
@pytest.mark.parametrize("layer", quick([(layer,) for layer in LAYERS], 0, 5), ids=str)
def test_compiles_without_spills(layer, arch, request):
    if layer[2].kernel in (4, 16):  # with strides of 2 and 8
        expect_worse_code(request, (12, 4), (12, 8))
    if layer == LAYERS[0] and arch == "sm_90a":  # 4 and 36 bytes of two gradients' tiles
        expect_worse_code(request, (13, 0))
    # Of directions, layouts, dtypes and offsets every third, others of the next layer.
    every = [
        dataclasses.replace(problem, wide_offsets=wide)
        for problem in problems(*layer)
        for wide in (False, True)
        if not wide or problem.dtype == "float16"
    ]
    turn = LAYERS.index(layer) + (arch == "sm_80")
    for problem in every[turn % 3 :: 3]:
        for chosen in served(problem, Target.named(arch)):
            assert_compiled_well(chosen, arch)


def test_is_modelled_faster_than_the_engine_and_the_general_kernels():
    engine = {f.DIRECTION: f for f in (sm90_forward, sm90_input_gradient, sm90_weight_gradient)}
    for layer in LAYERS[:3]:
        for problem in problems(*layer):
            if problem.dtype == "float32":
                continue  # direct_forward is nearly as fast
            ours = served(problem)[0]
            everyone = (engine[problem.direction],)
            others = [c for c in candidates(problem, HOPPER, everyone) if not c.refusal]
            others += [c for c in candidates(problem, HOPPER) if not c.refusal]
            others = [other for other in others if other.stem != FAMILIES[problem.direction].STEM]
            assert others
            assert all(ours.cost < other.cost for other in others), problem


@pytest.mark.parametrize(
    ("changes", "arch", "reason"),
    (
        ({}, "sm_75", "converts pairs as sm_80 does, the target is sm_75"),
        (dict(dtype="float64"), "sm_90a", "adds in float32 without TF32, not float64/ieee"),
        (dict(math="tf32"), "sm_90a", "adds in float32 without TF32, not float32/tf32"),
        (dict(groups=8), "sm_90a", "is for one input channel in a group, not 2"),
        (dict(out_channels=144), "sm_90a", "is for 8 output channels in a group at most, not 9"),
    ),
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_refusals(direction, changes, arch, reason):
    axis = Axis(8, 4, 2, 1)
    problem = Problem(direction, 1, 16, 16, 16, axis, axis)
    problem = dataclasses.replace(problem, **changes)
    assert FAMILIES[direction].why_not(problem, Target.named(arch)) == reason


def test_leaves_contiguous_outputs_in_float32_to_direct_forward():
    axis = Axis(8, 4, 2, 1)
    for direction in DIRECTIONS:
        problem = Problem(direction, 1, 16, 16, 16, axis, axis)
        why = FAMILIES[direction].why_not(problem, HOPPER)
        assert (why is None) == (direction != "forward")
        other = dataclasses.replace(problem, y_layout="channels_last")
        assert FAMILIES[direction].why_not(other, HOPPER) is None


@pytest.mark.parametrize(
    ("direction", "axis", "layout", "reason"),
    (
        ("forward", Axis(8, 4, 2, 1), "contiguous", "are neighbours in channels_last alone"),
        ("forward", Axis(8, 4, 2, 1), "channels_last", "channels, the layer 3"),
        ("forward", Axis(2, 4, 100), "contiguous", "sums, the limit is 64"),
        ("forward", Axis(2, 2, 1, 0, 0, 100), "contiguous", "the limit is 64 along an axis"),
        ("input_gradient", Axis(2, 70), "contiguous", "the limit is 64 along an axis"),
        ("input_gradient", Axis(20, 40), "contiguous", "multiply-adds exceed the limit of 1024"),
        ("weight_gradient", Axis(2, 2, 70), "contiguous", "the limit is 64 along an axis"),
    ),
)
def test_refusals_of_tiles(direction, axis, layout, reason):
    problem = Problem(direction, 1, 3, 3, 3, axis, axis, x_layout=layout, y_layout=layout)
    family = FAMILIES[direction]
    found = [family.tile_why_not(problem, HOPPER, tile) for tile in family.TILES]
    assert any(refusal is not None and reason in refusal for refusal in found), found
