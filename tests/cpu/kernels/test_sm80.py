"""The kernels for sm_80, of all three directions: in the emulator, and through NVRTC."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulated_plans import HOPPER, allocations, arguments_of, assert_compiled_well, emulated, plans
from layer_cases import Case, by_taps, off_by, operands
from tconv.jit.target import Target
from tconv.kernels import sm80_forward, sm80_input_gradient, sm80_weight_gradient
from tconv.layers import Layer, read_layers
from tconv.memory_format import is_channels_last
from tconv.plan import candidates, plan, usable
from tconv.problem import Axis, Problem
from tconv.reference import Operands, expected
from tiers import quick

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = {
    family.DIRECTION: family for family in (sm80_forward, sm80_input_gradient, sm80_weight_gradient)
}
DIRECTIONS = tuple(FAMILIES)
DTYPES = (torch.bfloat16, torch.float16)
LAYOUTS = ("channels_last", "contiguous", "strided")
AMPERE = Target.named("sm_80")

CASES = (
    Case(2, 16, 24, 1, (5, 9), (3, 3), (1, 1), (1, 1)),
    Case(2, 72, 40, 1, (6, 7), (4, 4), (2, 2), (1, 1), bias=False),
    Case(1, 32, 48, 2, (5, 6), (3, 2), (2, 3), (1, 0)),
    # More channels than a tile has, in and out; several tiles of positions.
    Case(1, 136, 72, 1, (4, 4), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(1, 64, 136, 1, (3, 5), (2, 2), (2, 2)),
    Case(1, 8, 8, 1, (3, 301), (1, 4), (1, 2), (0, 1)),
    Case(3, 40, 16, 1, (14, 16), (3, 3), (1, 1), (1, 1)),
    # Dilated; and with gcd(stride, dilation) > 1, so that some phases have no tap.
    Case(1, 24, 8, 1, (9, 11), (3, 3), (1, 1), (2, 1), (0, 0), (2, 3)),
    Case(1, 16, 16, 1, (4, 5), (3, 3), (2, 2), (1, 1), (0, 0), (2, 2)),
    Case(2, 8, 16, 2, (5, 7), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1)),
    Case(1, 8, 8, 1, (5, 4), (4, 3), (6, 4), (3, 1), (2, 0), (4, 6)),
    # A stride of more than the kernel; fewer outputs than phases; padding beyond the reach.
    Case(2, 16, 8, 1, (3, 4), (2, 2), (3, 3), output_padding=(2, 1)),
    Case(1, 16, 16, 1, (1, 1), (1, 1)),
    Case(2, 16, 8, 1, (2, 2), (2, 3), (6, 7), (4, 5), (3, 5)),
    Case(1, 8, 8, 1, (9, 8), (2, 2), (1, 1), (3, 2)),
    # Many images of few pixels; a kernel larger than the image.
    Case(257, 8, 16, 1, (1, 2), (2, 2), (2, 2)),
    Case(3, 16, 8, 1, (2, 2), (9, 11), (1, 1), (4, 5)),
    # Channels that are no multiple of 8, of either side.
    Case(2, 3, 21, 1, (5, 9), (4, 4), (2, 2), (1, 1)),
    Case(1, 10, 6, 2, (5, 6), (3, 2), (2, 3), (1, 0)),
    Case(2, 8, 5, 3, (4, 3), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(1, 21, 66, 1, (4, 8), (5, 3), (3, 1), (2, 1)),
    Case(2, 1, 1, 9, (4, 8), (3, 3), (1, 1), (1, 1)),
)
EVERY = [(direction, case) for direction in DIRECTIONS for case in CASES]


def made_of(direction: str, t: Operands) -> Tensor:
    """A tensor of the shape and strides of the result, all of it not a number."""
    like = {"forward": t.grad_output, "input_gradient": t.x, "weight_gradient": t.w}[direction]
    if direction == "weight_gradient":
        form = torch.channels_last if is_channels_last(t.w) else torch.contiguous_format
        return torch.full_like(like, math.nan, memory_format=form)
    return torch.full_like(like, math.nan)


def problem_of(direction: str, case: Case, t: Operands, **options) -> Problem:
    read = {"forward": (t.x,), "input_gradient": (t.grad_output,)}.get(direction)
    read = (t.x, t.grad_output) if read is None else read
    options.setdefault("aligned", all(v.data_ptr() % 16 == 0 for v in read))
    options.setdefault("weight_aligned", t.w.data_ptr() % 16 == 0)
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


def served(problem: Problem, target: Target = AMPERE):
    """Plans of all tiles that serve."""
    return plans(problem, FAMILIES[problem.direction].STEM, target)


def run(chosen, t: Operands, schedule="forward", sanitize=False, out=None, workspace=math.nan):
    """The result of all launches of a plan, into `out` where it is given."""
    direction = chosen.problem.direction
    out = made_of(direction, t) if out is None else out
    made = {"forward": "y", "input_gradient": "x", "weight_gradient": "w"}[direction]
    named = {"x": t.x, "w": t.w, "y": t.grad_output, "bias": t.bias, made: out}
    named["packed"] = torch.full((chosen.packed,), workspace)
    launches = chosen.launches
    if chosen.splits:
        partial = torch.empty_strided((chosen.splits, *t.w.shape), chosen.partial_strides)
        named["partial"] = partial.fill_(math.nan)
        launches = (*launches, chosen.addition)
    memory = allocations([tensor for tensor in named.values() if tensor is not None])
    for launch in launches:
        kernel = emulated(launch.source, sanitize)
        arguments = arguments_of(launch, **named)
        kernel.launch(launch.grid, arguments, allocations=memory, schedule=schedule)
    return out


def assert_right(out: Tensor, direction: str, case: Case, t: Operands) -> None:
    wrong = expected(case.layer, t)[DIRECTIONS.index(direction)].why_wrong(out)
    assert wrong is None, f"{direction}: {case}: {wrong}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize(("direction", "case"), quick(EVERY, *range(0, len(EVERY), 2)), ids=str)
def test_some_tiles(direction, case):
    """Of each case one in each layout, in turns; all are below."""
    turn = EVERY.index((direction, case))
    for number, layout in enumerate(LAYOUTS):
        t = operands(case, DTYPES[(turn + number) % 2], layout, "cpu")
        every = served(problem_of(direction, case, t))
        assert_right(run(every[(turn + 2 * number) % len(every)], t), direction, case, t)


FORMS = [(dtype, layout) for dtype in DTYPES for layout in LAYOUTS[:2]]


@pytest.mark.parametrize(("dtype", "layout"), quick(FORMS, 0, 3), ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_tile(direction, dtype, layout):
    case = CASES[3]
    t = operands(case, dtype, layout, "cpu")
    every = served(problem_of(direction, case, t))
    assert {chosen.tile for chosen in every} == set(FAMILIES[direction].TILES)
    for chosen in every:
        assert_right(run(chosen, t), direction, case, t)


@pytest.mark.thorough
@pytest.mark.parametrize(("direction", "case"), EVERY, ids=str)
def test_every_tile_of_every_case(direction, case):
    """Types and layouts by turns."""
    turn = EVERY.index((direction, case))
    forms = [operands(case, DTYPES[i % 2], LAYOUTS[i % 3], "cpu") for i in range(6)]
    for number, tile in enumerate(FAMILIES[direction].TILES):
        t = forms[(turn + number) % 6]
        for chosen in served(problem_of(direction, case, t)):
            if chosen.tile == tile:
                assert_right(run(chosen, t), direction, case, t)


# Ragged tiles of every kind, phases with and without taps, groups, several splits.
SEVERAL = (
    Case(3, 72, 70, 1, (6, 14), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(2, 16, 66, 2, (7, 13), (3, 3), (3, 2), (1, 1), (0, 0), (1, 2)),
)
APART = [(direction, case) for direction in DIRECTIONS for case in SEVERAL]


@pytest.mark.parametrize(("direction", "case"), quick(APART, 0, 3, 5), ids=str)
def test_result_does_not_depend_on_the_order_of_threads(direction, case):
    turn = APART.index((direction, case))
    t = operands(case, DTYPES[turn % 2], LAYOUTS[turn % 3], "cpu")
    for chosen in served(problem_of(direction, case, t))[turn % 2 :: 2]:
        first = run(chosen, t, sanitize=True)
        assert_right(first, direction, case, t)
        for schedule in ("reverse", "random:1"):
            assert same_bits(run(chosen, t, schedule), first), str(chosen)


def test_the_weight_gradient_has_splits():
    """Few and many; a result does not depend on the device but by their number."""
    case = Case(2, 16, 8, 1, (40, 41), (2, 2))
    t = operands(case, torch.float16, "channels_last", "cpu")
    found = {}
    for multiprocessors in (1, 3, 300):
        target = dataclasses.replace(AMPERE, multiprocessors=multiprocessors)
        chosen = served(problem_of("weight_gradient", case, t), target)[0]
        found[chosen.splits] = run(chosen, t)
        assert_right(found[chosen.splits], "weight_gradient", case, t)
    assert len(found) > 1


# Of images and weights that begin anywhere, with gaps between rows or pixels.
SHIFTS = ((0, 0), (1, 0), (4, 4), (8, 8), (0, 3))


@pytest.mark.parametrize("order", ("nchw", "nhwc"))
@pytest.mark.parametrize(("offset", "gap"), SHIFTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_operands_anywhere(direction, offset, gap, order):
    case = Case(2, 16, 24, 1, (6, 8), (3, 3), (1, 1), (1, 1))
    t = operands(case, torch.bfloat16, "contiguous", "cpu")
    x, y = (off_by(values, order, offset, gap) for values in (t.x, t.grad_output))
    t = dataclasses.replace(t, x=x, grad_output=y, w=off_by(t.w, order, offset, 0))
    every = served(problem_of(direction, case, t))
    out = None
    if direction != "weight_gradient":
        made = y if direction == "forward" else x
        out = off_by(torch.full_like(made, math.nan), order, offset, gap)
    for chosen in every[offset % 2 :: 3]:
        assert_right(run(chosen, t, out=out), direction, case, t)


@pytest.mark.parametrize("direction", DIRECTIONS[:2])
def test_weights_that_are_part_of_wider_lines(direction):
    """A line's copies would end beyond its channels: NaN here, and at last no memory."""
    case = Case(1, 16, 3, 1, (4, 5), (3, 3), (1, 1), (1, 1))
    t = operands(case, torch.bfloat16, "contiguous", "cpu")
    wide = torch.full((16, 8, 3, 3), math.nan, dtype=torch.bfloat16)
    wide = wide.contiguous(memory_format=torch.channels_last)
    wide[:, :3] = t.w
    problem = problem_of(direction, case, dataclasses.replace(t, w=wide[:, :3]))
    assert problem.weight_mapped
    for chosen in served(problem)[::3]:
        assert_right(run(chosen, dataclasses.replace(t, w=wide[:, :3])), direction, case, t)


FAR = {
    "forward": (Case(1, 8, 8, 1, (2, 3), (2, 1), (1, 1), dilation=(1023, 1)), "x"),
    **dict.fromkeys(
        DIRECTIONS[1:],
        (Case(1, 8, 8, 1, (1026, 1), (2, 1), (1, 1), (1024, 0), (0, 0), (1024, 1)), "grad_output"),
    ),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_first_taps_pixel_may_lie_far_outside(direction):
    """At 2**31 elements from the image and more, where offsets of 32 bits wrap around."""
    case, name = FAR[direction]
    t = operands(case, torch.bfloat16, "channels_last", "cpu")
    values, row = getattr(t, name), 1 << 21
    n, c, h, w = values.shape
    far = torch.empty((h - 1) * row + w * c, dtype=values.dtype)
    far = far.as_strided((n, c, h, w), (8, 1, row, c)).copy_(values)
    t = dataclasses.replace(t, **{name: far})
    problem = problem_of(direction, case, t)
    assert not problem.wide_offsets
    assert_right(run(served(problem)[-1], t), direction, case, t)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_64_bit_offsets(direction):
    for turn, case in enumerate(SEVERAL):
        t = operands(case, DTYPES[turn], LAYOUTS[turn], "cpu")
        problem = dataclasses.replace(problem_of(direction, case, t), wide_offsets=True)
        for chosen in served(problem)[turn::4]:
            assert dict(chosen.kernel.source.constants)["Index"] == "long long"
            assert_right(run(chosen, t), direction, case, t)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_workspace_may_hold_anything(direction):
    case = SEVERAL[1]
    t = operands(case, torch.bfloat16, "contiguous", "cpu")
    for chosen in served(problem_of(direction, case, t))[::3]:
        assert chosen.packed
        first = run(chosen, t, workspace=0.0)
        assert same_bits(first, run(chosen, t, workspace=math.inf))


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_operands_of_every_scale(direction, layout):
    """Each channel, image and weight has a scale of its own, as far as the type holds."""
    case = SEVERAL[0]
    generator = torch.Generator().manual_seed(7)
    for dtype, reach in ((torch.bfloat16, 20), (torch.float16, 4)):
        t = operands(case, dtype, layout, "cpu")
        x, w, y = (
            values
            * 2.0 ** torch.randint(-reach, reach, (*values.shape[:2], 1, 1), generator=generator)
            for values in (t.x.float(), t.w.float(), t.grad_output.float())
        )
        form = torch.channels_last if layout == "channels_last" else torch.contiguous_format
        x, w, y = (v.to(dtype).contiguous(memory_format=form) for v in (x, w, y))
        t = dataclasses.replace(t, x=x, w=w, grad_output=y)
        for chosen in served(problem_of(direction, case, t))[1::3]:
            assert_right(run(chosen, t), direction, case, t)


EDGES = (
    Case(1, 16, 16, 1, (4, 5), (3, 3), (2, 2), (1, 1)),
    Case(2, 12, 8, 2, (5, 7), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1)),
)


def assert_reaches_readers_alone(direction: str, case: Case, t: Operands) -> None:
    want = by_taps(case, t.x, t.w, t.bias, t.grad_output)[DIRECTIONS.index(direction)]
    assert not want.isfinite().all()
    for chosen in served(problem_of(direction, case, t))[::3]:
        out = run(chosen, t)
        assert torch.equal(out.isfinite(), want.isfinite()), str(chosen)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("case", EDGES, ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS[:2])
def test_a_pixel_that_is_not_finite_reaches_its_readers_alone(direction, case, layout):
    t = operands(case, torch.bfloat16, layout, "cpu")
    image = t.x if direction == "forward" else t.grad_output
    image[-1, -1, -1, -1] = -math.inf
    image[0, 3, 1, 0] = math.nan
    assert_reaches_readers_alone(direction, case, t)


@pytest.mark.xfail(strict=True, reason="it is multiplied with the zeros beside the image too")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_meets_zeros_beside_an_image_reaches_its_readers_alone(direction):
    t = operands(EDGES[1], torch.bfloat16, "channels_last", "cpu")
    values = t.x if direction == "weight_gradient" else t.w
    values[0, 0, 0, 0] = values[-1, -1, -1, -1] = math.inf
    assert_reaches_readers_alone(direction, EDGES[1], t)


def test_outputs_without_a_tap_hold_the_bias():
    case = Case(2, 16, 10, 1, (3, 4), (2, 2), (5, 4), output_padding=(4, 3))
    t = operands(case, torch.bfloat16, "channels_last", "cpu")
    for chosen in served(problem_of("forward", case, t))[::3]:
        out = run(chosen, t)
        for rows in (2, 3, 4, 7, 14):
            assert torch.equal(out[:, :, rows], t.bias[:, None].expand_as(out[:, :, rows]))


ARCHITECTURES = ("sm_80", "sm_90a", "sm_86", "sm_89", "sm_120a")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("arch", quick(ARCHITECTURES, 0, 1))
def test_compiled_well(arch, direction):
    """No spills; a tile in each of the layouts, in turns, and of 64-bit offsets."""
    target = Target.named(arch)
    for turn, case in enumerate((CASES[3], CASES[7], CASES[17])):
        for layout in LAYOUTS[:2]:
            dtype = ("bfloat16", "float16")[turn % 2]
            problem = case.layer.problem(direction, dtype, layout)
            problem = dataclasses.replace(problem, wide_offsets=turn == 1)
            every = served(problem, target)
            assert {chosen.tile for chosen in every} >= set(FAMILIES[direction].TILES[3:])
            for chosen in every[turn::3]:
                assert_compiled_well(chosen, arch)


def test_first_choice_before_hopper_alone():
    layers = read_layers(ROOT / "benchmarks" / "results" / "h200" / "layers.json")
    for layer in layers:
        # Depthwise; one output channel; rows of y that no tap reads, but the packing does.
        if layer.groups > 1 or layer.name in ("fsrcnn_x3", "kb81"):
            continue
        for direction in DIRECTIONS:
            for layout in LAYOUTS[:2]:
                problem = layer.problem(direction, "bfloat16", layout)
                assert plan(problem, AMPERE).stem == f"sm80_{direction}", layer
                assert plan(problem, HOPPER).stem == f"sm90_{direction}", layer


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_where_the_engine_serves_they_run_by_name_alone(direction, monkeypatch):
    """Nor are they timed there: all choose from `usable`, and from what `candidates` lets serve."""
    problem = Layer.parse("64,64,3", "8x64x64").problem(direction, "bfloat16")
    stem = f"sm80_{direction}"
    (refused,) = (c for c in candidates(problem, HOPPER) if c.stem == stem)
    assert f"left out for sm90_{direction}" in refused.refusal and f"={stem}" in refused.refusal
    assert stem not in {c.stem for c in usable(problem, HOPPER)}
    monkeypatch.setenv("TCONV_KERNEL", stem)
    assert plan(problem, HOPPER).stem == stem


@pytest.mark.parametrize("direction", DIRECTIONS[1:])
def test_on_hopper_they_serve_what_the_engine_refuses(direction):
    """Too many phases to read; too many taps for one copy."""
    text = "64,64,16,stride=5" if direction == "input_gradient" else "64,64,31"
    problem = Layer.parse(text, "2x40x40").problem(direction, "bfloat16")
    assert plan(problem, HOPPER).stem == f"sm80_{direction}"


def test_refusals():
    problem = problem_of("forward", CASES[0], operands(CASES[0], DTYPES[0], "contiguous", "cpu"))

    def reason(problem: Problem, target: Target = AMPERE) -> str | None:
        return FAMILIES["forward"].why_not(problem, target)

    assert reason(problem) is None
    assert "sm_75" in reason(problem, Target.named("sm_75"))
    assert "float32" in reason(dataclasses.replace(problem, dtype="float32"))
    assert "17x16" in reason(
        dataclasses.replace(problem, height=Axis(4, 3, 17), width=Axis(4, 3, 16))
    )
    refused = candidates(problem, Target.named("sm_89"), (FAMILIES["forward"],))
    assert "shared memory" in next(c.refusal for c in refused if c.refusal)
