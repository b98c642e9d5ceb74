"""sm90_weight_gradient: in the emulator, and through NVRTC."""

from __future__ import annotations

import dataclasses
import math
import random
import re

import pytest
import torch

from emulated_plans import HOPPER, allocations, arguments_of, assert_compiled_well, emulated, plans
from layer_cases import Case, by_taps, operands
from tconv.jit.target import Target
from tconv.kernels import sm90_weight_gradient as family
from tconv.kernels.engine.layout import MOST_SOURCES, packed_size, packed_values
from tconv.kernels.sm90_weight_gradient import launch
from tconv.kernels.sm90_weight_gradient.layout import Layout, layout
from tconv.kernels.sm90_weight_gradient.tiles import FLOAT32_TILES, Tile
from tconv.memory_format import is_channels_last
from tconv.problem import Axis, Problem
from tconv.reference import expected
from tiers import quick

# Rows of x that are whole vectors: if x is contiguous, boxes of 8 to 64 columns, and parts of them.
MAPPED = (
    Case(3, 72, 24, 1, (5, 8), (4, 4), (2, 2), (1, 1)),
    Case(2, 10, 16, 2, (3, 16), (3, 3), (1, 1), (1, 1)),
    Case(2, 16, 8, 1, (3, 40), (2, 2), (2, 2)),
    Case(1, 70, 13, 1, (1, 136), (1, 4), (1, 2), (0, 1)),
    Case(1, 24, 5, 2, (3, 72), (4, 3), (2, 1), (1, 2), (1, 0)),
)
# Rows of both images that are whole vectors: raw tiles serve, if they are contiguous.
RAW = (
    Case(2, 70, 72, 1, (5, 16), (4, 4), (2, 2), (1, 1)),
    Case(5, 10, 16, 2, (3, 24), (3, 3), (1, 1), (1, 1)),
    Case(3, 24, 33, 1, (2, 40), (2, 2), (2, 2)),
    Case(9, 8, 17, 1, (1, 72), (1, 4), (1, 2), (0, 1)),
    Case(1, 40, 24, 1, (7, 8), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(1, 32, 32, 1, (9, 32), (3, 7), (1, 1), (1, 3)),
    Case(2, 72, 5, 2, (3, 48), (2, 5), (3, 1), (0, 2), (1, 0)),
    Case(1, 16, 64, 1, (4, 16), (3, 2), (2, 2), (1, 1), (0, 0), (2, 3)),
    Case(1, 8, 65, 1, (5, 24), (4, 3), (1, 2), (2, 1), (0, 1), (3, 1)),
    Case(257, 8, 16, 1, (1, 8), (2, 2), (2, 2)),
    # Taps in x that meet no output: their gradient is zero.
    Case(1, 8, 8, 1, (3, 8), (1, 17), (1, 1), (0, 8)),
    # Three taps of a row for two takers each; phases of two rows of the kernel and of one.
    Case(1, 72, 64, 1, (5, 64), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(1, 24, 64, 1, (4, 128), (5, 2), (3, 2), (1, 0), (1, 0)),
    # Boxes that are wider than an image, or end behind it; swizzled lines of y.
    Case(2, 136, 64, 1, (17, 24), (4, 4), (2, 2), (1, 1)),
    Case(1, 16, 40, 2, (33, 8), (2, 3), (1, 1), (1, 1)),
    Case(1, 24, 72, 2, (7, 24), (3, 2), (2, 2)),
    Case(2, 136, 64, 1, (5, 32), (2, 2), (2, 2)),
    Case(1, 16, 24, 1, (3, 64), (3, 1)),
)
# Rows of y off 16 bytes, x on them: raw tiles read planes together, 4, 1, 2, 1, 4 and so on.
FLAT = (
    Case(2, 16, 24, 1, (5, 16), (3, 3)),
    Case(1, 70, 72, 1, (6, 32), (3, 3)),
    Case(2, 40, 32, 1, (4, 32), (3, 3)),
    Case(3, 24, 16, 2, (4, 64), (3, 5)),
    Case(1, 24, 40, 1, (3, 16), (4, 4), (2, 2)),
    Case(2, 8, 20, 1, (4, 64), (4, 4), (2, 2)),
    Case(1, 16, 24, 1, (3, 16), (2, 3), (1, 1), (0, 0), (0, 0), (2, 3)),
    Case(1, 16, 68, 1, (5, 64), (3, 7), (1, 1), (1, 0)),
    Case(5, 8, 48, 2, (2, 32), (2, 3), (3, 1)),
    Case(1, 8, 24, 1, (1, 16), (1, 3)),
    Case(1, 8, 32, 1, (3, 128), (3, 2), (2, 2), (1, 0), (1, 0), (1, 3)),
    # Of odd numbers of pixels; the first of 8 planes together.
    Case(1, 16, 64, 1, (5, 16), (1, 2)),
    Case(2, 24, 32, 1, (4, 32), (3, 2)),
    Case(1, 24, 64, 1, (4, 64), (3, 3), (2, 2)),
)
CASES = (
    Case(2, 16, 24, 1, (5, 9), (3, 3), (1, 1), (1, 1)),
    Case(2, 72, 40, 1, (6, 7), (4, 4), (2, 2), (1, 1)),
    Case(1, 32, 48, 2, (5, 6), (3, 2), (2, 3), (1, 0)),
    Case(1, 136, 64, 1, (4, 4), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(1, 64, 136, 1, (3, 5), (2, 2), (2, 2)),
    Case(1, 24, 8, 1, (9, 11), (3, 3), (1, 1), (2, 1), (0, 0), (2, 3)),
    Case(1, 16, 16, 1, (4, 5), (3, 3), (2, 2), (1, 1), (0, 0), (2, 2)),
    Case(2, 16, 8, 1, (3, 4), (2, 2), (3, 3), output_padding=(2, 1)),
    Case(1, 16, 16, 1, (1, 1), (1, 1)),
    Case(257, 8, 16, 1, (1, 2), (2, 2), (2, 2)),
    Case(3, 16, 8, 1, (2, 2), (9, 11), (1, 1), (4, 5)),
    Case(1, 8, 8, 1, (3, 301), (1, 4), (1, 2), (0, 1)),
    Case(1, 64, 64, 1, (20, 21), (3, 3)),
    # Channels that no tensor map describes.
    Case(2, 3, 21, 1, (5, 9), (4, 4), (2, 2), (1, 1)),
    Case(1, 10, 6, 2, (5, 6), (3, 2), (2, 3), (1, 0)),
    Case(1, 70, 13, 1, (9, 9), (3, 3)),
    # Of rows and columns that no tap reads.
    Case(2, 16, 24, 1, (5, 9), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
    Case(1, 8, 13, 2, (3, 4), (1, 2), (3, 4), (0, 1), (2, 3)),
    Case(2, 8, 8, 1, (4, 8), (3, 2), (2, 4), (2, 3), (1, 2), (2, 2)),
    # Of few channels and a stride, so that phases are folded; several blocks of folded channels.
    Case(2, 16, 1, 1, (5, 7), (9, 9), (3, 3), (4, 4), (2, 2)),
    Case(1, 21, 21, 1, (4, 5), (16, 16), (8, 8), (4, 4)),
    Case(2, 24, 5, 2, (3, 9), (4, 3), (2, 1), (1, 2), (1, 0)),
    *MAPPED,
    *RAW,
    *FLAT,
)
DTYPES = (torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "channels_last", "strided")
OF_16_BITS = [tile for tile in family.TILES if tile not in FLOAT32_TILES]
RAW_TILES = {tile for tile in OF_16_BITS if tile.columns}


def problem_of(case: Case, t, **options) -> Problem:
    options.setdefault("aligned", all(v.data_ptr() % 16 == 0 for v in (t.x, t.grad_output)))
    return Problem.of(
        "weight_gradient",
        tuple(t.x.shape),
        tuple(t.w.shape),
        case.geometry,
        dtype=str(t.x.dtype).removeprefix("torch."),
        strides=(t.x.stride(), t.w.stride(), t.grad_output.stride()),
        **options,
    )


def few() -> Target:
    """A device of two multiprocessors, on which a block has several boxes."""
    return dataclasses.replace(HOPPER, multiprocessors=2)


@pytest.fixture(params=("one split", "most splits"))
def of_splits(request, monkeypatch):
    """Plans have so many, whatever the model says."""

    def splits(problem, target, tile):
        return 1 if request.param == "one split" else layout(problem, tile).most_splits(target)

    monkeypatch.setattr(launch, "best_splits", splits)
    return request.param


def run(chosen, t, schedule="forward", sanitize=False):
    """The gradient, dense as t.w: what the kernel writes, or its partial results' sum."""
    form = torch.channels_last if is_channels_last(t.w) else torch.contiguous_format
    gradient = torch.full_like(t.w, math.nan, memory_format=form)
    partial = torch.empty_strided((chosen.splits, *t.w.shape), chosen.partial_strides)
    partial.fill_(math.nan)
    named = {"x": t.x, "w": gradient, "y": t.grad_output, "partial": partial}
    if chosen.packed:
        named["packed"] = torch.full((chosen.packed,), math.nan)
    memory = allocations(list(named.values()))
    for step in chosen.launches:
        arguments = arguments_of(step, **named)
        emulated(step.source, sanitize).launch(
            step.grid, arguments, allocations=memory, schedule=schedule
        )
    return partial.sum(0).to(t.w.dtype) if chosen.splits else gradient


def assert_right(out, case: Case, t, tf32=True) -> None:
    wrong = expected(case.layer, t, tf32=tf32)[2].why_wrong(out)
    assert wrong is None, f"{case}: {wrong}"


def assert_fully_right(out, case: Case, t) -> None:
    """As full float32."""
    assert_right(out, case, t, tf32=False)


def layout_of(chosen) -> Layout:
    return layout(chosen.problem, chosen.tile)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", quick(CASES, *range(0, len(CASES), 3)), ids=str)
def test_every_tile_that_serves(case, layout, of_splits):
    """Of one of the types, in turn: a type is the operands' rounding and a product's name."""
    t = operands(case, DTYPES[(CASES.index(case) + LAYOUTS.index(layout)) % 2], layout, "cpu")
    chosen = plans(problem_of(case, t), family.STEM)
    assert chosen
    for plan_ in chosen:
        assert_right(run(plan_, t), case, t)


# float32 for TF32. Contiguous: rows of x of whole vectors, of y such rows or flat ones, which are
# read as they lie.
FLOAT32_LINES = (
    Case(2, 40, 24, 1, (6, 12), (4, 4), (2, 2), (1, 1)),
    Case(1, 16, 20, 2, (5, 4), (3, 3), (1, 1), (1, 1)),
    Case(3, 20, 36, 1, (3, 20), (2, 2), (2, 2)),
    Case(1, 24, 40, 1, (9, 36), (3, 3), (1, 1), (1, 1), (0, 0), (2, 1)),
    Case(1, 72, 64, 1, (4, 16), (3, 5), (1, 2), (1, 2), (0, 1), (1, 3)),
    Case(70, 16, 16, 1, (3, 64), (3, 3), (1, 1), (1, 1)),
    *(case for case in (*RAW, *FLAT) if max(case.in_channels, case.out_channels) >= 16),
)
# What is packed as lines, or comes as channels_last in several blocks of channels and taps.
FLOAT32_MORE = (
    Case(2, 130, 70, 1, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(2, 20, 17, 2, (5, 7), (3, 3), (2, 2), (1, 1)),
    Case(1, 24, 40, 1, (9, 14), (4, 4), (4, 4)),
    Case(2, 17, 21, 1, (5, 6), (9, 9), (3, 3), (4, 4), (2, 2)),
    Case(1, 20, 24, 1, (5, 6), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
    Case(2, 16, 16, 1, (3, 4), (16, 16), (8, 8), (4, 4)),
    Case(5, 16, 20, 1, (3, 3), (2, 2)),
    Case(9, 40, 136, 1, (4, 4), (4, 4), (2, 2), (1, 1)),
    Case(2, 64, 3, 1, (6, 8), (4, 4), (2, 2), (1, 1)),
    Case(2, 24, 1, 2, (5, 9), (9, 9), (3, 3), (4, 4), (2, 2)),
    Case(1, 3, 32, 1, (7, 21), (3, 4), (1, 2), (1, 1)),
    Case(257, 8, 16, 1, (1, 2), (2, 2), (2, 2)),
    Case(1, 16, 8, 1, (20, 37), (2, 3), (1, 1), (1, 1)),
)
FLOAT32 = [
    *((case, "contiguous") for case in FLOAT32_LINES),
    *((case, "channels_last") for case in (*FLOAT32_LINES[:6], *FLOAT32_MORE)),
    *((case, "contiguous") for case in FLOAT32_MORE),
    *((case, "strided") for case in (*FLOAT32_LINES[:3], *FLOAT32_MORE[:3], FLOAT32_MORE[8])),
]
TURNED = [tile for tile in FLOAT32_TILES if tile.turned]


def of_float32(case: Case, layout: str = "contiguous"):
    return operands(case, torch.float32, layout, "cpu")


@pytest.mark.parametrize(("case", "layout"), quick(FLOAT32, *range(0, len(FLOAT32), 2)), ids=str)
def test_every_tile_of_float32(case, layout):
    t = of_float32(case, layout)
    problem = problem_of(case, t)
    assert problem.math == "tf32"
    chosen = plans(problem, family.STEM)
    by_phases = set(TURNED) <= {plan_.tile for plan_ in chosen}
    assert by_phases == (math.prod(case.stride) <= MOST_SOURCES or case.kernel == (3, 3))
    for plan_ in chosen:
        assert_right(run(plan_, t), case, t)


def test_the_cases_serve_every_tile_of_float32():
    served = {
        plan_.tile
        for case, layout in FLOAT32
        for plan_ in plans(problem_of(case, of_float32(case, layout)), family.STEM)
    }
    lines = (32, 64, 128)
    of_lines = {t for t in family.TILES if 4 * t.columns in lines and t.consumers == 2}
    assert served == of_lines | set(TURNED)
    assert set(FLOAT32_TILES) <= served


ORDERS = [
    *((FLOAT32_LINES[at], "contiguous") for at in (0, 3, -2)),
    *((FLOAT32_MORE[at], "channels_last") for at in (0, 2, 7)),
    (FLOAT32_MORE[1], "contiguous"),
]


@pytest.mark.parametrize(("case", "layout"), ORDERS, ids=str)
def test_float32_does_not_depend_on_the_order_of_threads(case, layout):
    t = of_float32(case, layout)
    for plan_ in plans(problem_of(case, t), family.STEM, few()):
        first = run(plan_, t, sanitize=True)
        assert_right(first, case, t)
        for schedule in ("reverse", "random:1"):
            assert torch.equal(run(plan_, t, schedule), first)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_float32_sums_of_several_parts(layout, monkeypatch):
    """A block adds each to what it wrote before."""
    monkeypatch.setattr("tconv.kernels.sm90_weight_gradient.layout.PART_POSITIONS", 256)
    case = FLOAT32_LINES[5]
    t = of_float32(case, layout)
    for chosen in plans(problem_of(case, t), family.STEM, few()):
        laid = layout_of(chosen)
        assert laid.boxes // chosen.splits > 2 * laid.part_boxes
        assert_right(run(chosen, t), case, t)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_float32_kernels_for_another_size_are_right(layout):
    """Turned, packed as lines, and folded ones, by the constants of one size."""
    case = FLOAT32_MORE[0] if layout == "contiguous" else FLOAT32_LINES[0]
    like = problem_of(case, of_float32(case, layout))
    sources = {c.tile: c.kernel.source for c in plans(like, family.STEM)}
    for batch, size in ((1, (3, 4)), (3, (7, 21)), (2, (1, 6))):
        other = dataclasses.replace(case, batch=batch, size=size)
        t = of_float32(other, layout)
        problem = problem_of(other, t).by(like)
        if problem is None:
            continue
        chosen = plans(problem, family.STEM)
        assert set(TURNED) <= {c.tile for c in chosen}
        for one in chosen:
            assert one.kernel.source == sources[one.tile]
            assert_right(run(one, t), other, t)


def test_random_layers_of_float32():
    """In any layout of each image, with gaps or off vectors, by a tile or two of each."""
    draw = random.Random(29)
    forms = torch.contiguous_format, torch.channels_last
    for _ in range(30):
        kernel = draw.randint(1, 7), draw.randint(1, 7)
        case = Case(
            draw.choice((1, 2, 5)),
            draw.choice((16, 17, 20, 64, 70)),
            draw.choice((1, 3, 8, 20, 64, 72)),
            draw.choice((1, 1, 2)),
            (draw.randint(1, 9), draw.choice((1, 3, 4, 8, 14, 32, 37))),
            kernel,
            (draw.choice((1, 2, 3)), draw.choice((1, 2, 3, 4))),
            tuple(draw.choice((0, 0, min(2, k - 1))) for k in kernel),
            (0, 0),
            (draw.choice((1, 1, 2)), draw.choice((1, 1, 3))),
        )
        if min(case.output_size) < 1:
            continue
        t = of_float32(case)
        x, y = (v.to(memory_format=draw.choice(forms)) for v in (t.x, t.grad_output))
        if draw.random() < 0.3:
            x = torch.nn.functional.pad(x, (1, 0))[..., 1:]
        t = dataclasses.replace(t, x=x, grad_output=y)
        chosen = plans(problem_of(case, t), family.STEM, draw.choice((HOPPER, few())))
        for plan_ in draw.sample(chosen, min(2, len(chosen))):
            assert_right(run(plan_, t), case, t)


# Full float32: by 16-bit tiles of packed images, of few channels too.
FULL = [
    (case, layout)
    for layout in LAYOUTS
    for case in (*CASES[:22], *FLOAT32_MORE)
    # Stages of the first two do not fit; 64 phases of the last two are too many.
    if case not in (CASES[10], FLOAT32_MORE[9], CASES[20], FLOAT32_MORE[5])
]
FULL_TILES = {tile for tile in OF_16_BITS if not (tile.columns or tile.folded)}
FULL_TILES |= {Tile(128, 128, columns=16), Tile(64, 128, columns=32), Tile(32, 128, columns=32)}


def full_plans(case: Case, t, target: Target = HOPPER):
    return plans(dataclasses.replace(problem_of(case, t), math="ieee"), family.STEM, target)


@pytest.mark.parametrize(("case", "layout"), quick(FULL, *range(0, len(FULL), 4)), ids=str)
def test_every_tile_of_full_float32(case, layout, of_splits):
    t = of_float32(case, layout)
    chosen = full_plans(case, t, few())
    assert chosen
    assert {plan_.tile for plan_ in chosen} <= FULL_TILES
    for plan_ in chosen:
        assert_fully_right(run(plan_, t), case, t)


def test_the_cases_serve_every_tile_of_full_float32():
    chosen = [each for case, layout in FULL for each in full_plans(case, of_float32(case, layout))]
    assert {each.tile for each in chosen} == FULL_TILES


@pytest.mark.parametrize("case", (FLOAT32_LINES[0], FLOAT32_MORE[0], FLOAT32_MORE[7]), ids=str)
def test_full_float32_does_not_depend_on_the_order_of_threads(case):
    t = of_float32(case)
    chosen = full_plans(case, t, few())
    assert chosen
    for plan_ in chosen:
        first = run(plan_, t, sanitize=True)
        assert_fully_right(first, case, t)
        for schedule in ("reverse", "random:1"):
            assert torch.equal(run(plan_, t, schedule), first)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_full_float32_for_another_size_is_right(layout):
    case = FLOAT32_MORE[0]
    like = dataclasses.replace(problem_of(case, of_float32(case, layout)), math="ieee")
    sources = {c.tile: c.kernel.source for c in plans(like, family.STEM)}
    for batch, size in ((1, (3, 4)), (3, (7, 20)), (2, (1, 6))):
        other = dataclasses.replace(case, batch=batch, size=size)
        t = of_float32(other, layout)
        problem = dataclasses.replace(problem_of(other, t), math="ieee").by(like)
        assert problem is not None
        chosen = plans(problem, family.STEM)
        assert chosen
        for one in chosen:
            assert one.kernel.source == sources[one.tile]
            assert_fully_right(run(one, t), other, t)


@pytest.mark.parametrize("spoiled", ("x", "grad_output"))
def test_what_is_not_finite_in_full_float32_reaches_its_readers_alone(spoiled, of_splits):
    """Unlike in 16 bits and TF32: infinities meet the zeros beside the images too."""
    for case in (FLOAT32_LINES[0], FLOAT32_MORE[1], FLOAT32_LINES[3]):
        t = of_float32(case)
        values = getattr(t, spoiled).clone()
        values[0, 0, 0, 0], values[-1, -1, -1, -1] = math.inf, -math.inf
        values[0, 3, 1, 2], values[0, 1, 2, 2] = math.nan, torch.finfo(torch.float32).max
        t = dataclasses.replace(t, **{spoiled: values})
        want = by_taps(case, t.x, t.w, None, t.grad_output)[2].float()
        assert 0 < int(want.isfinite().sum()) < want.numel()
        chosen = full_plans(case, t, few())
        assert chosen
        for plan_ in chosen:
            out = run(plan_, t)
            assert torch.equal(out.isnan(), want.isnan())
            assert torch.equal(out[want.isinf()], want[want.isinf()])
            assert torch.equal(out.isinf(), want.isinf())


def test_the_cases_serve_every_tile():
    of_contiguous = (RAW, "contiguous"), (FLAT, "contiguous")
    for cases, of_layout in ((CASES[:2], "channels_last"), *of_contiguous):
        found = set()
        for case in cases:
            t = operands(case, torch.bfloat16, of_layout, "cpu")
            of_case = {p.tile for p in plans(problem_of(case, t), family.STEM)}
            assert bool(of_case & RAW_TILES) == (of_layout == "contiguous"), case
            found |= of_case
        raw = RAW_TILES if of_layout == "contiguous" else set()
        assert found & RAW_TILES == raw
        assert of_layout == "contiguous" or found == set(OF_16_BITS) - RAW_TILES


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize(
    "case",
    (CASES[1], CASES[2], CASES[9], MAPPED[0], MAPPED[4], *RAW[:4], *RAW[11:14], FLAT[2], FLAT[5]),
    ids=str,
)
def test_result_does_not_depend_on_the_order_of_threads(case, layout, of_splits):
    t = operands(case, torch.bfloat16, layout, "cpu")
    for plan_ in plans(problem_of(case, t), family.STEM, few()):
        first = run(plan_, t, sanitize=True)
        assert_right(first, case, t)
        for schedule in ("reverse", "random:1"):
            assert torch.equal(run(plan_, t, schedule), first)


@pytest.mark.parametrize("of_splits", ("most splits",), indirect=True)
def test_splits_take_turns(of_splits):
    case = CASES[12]
    t = operands(case, torch.float16, "channels_last", "cpu")
    shares = {p.splits for p in plans(problem_of(case, t), family.STEM)}
    assert max(shares) > 1
    assert {p.splits for p in plans(problem_of(case, t), family.STEM, few())} <= {0, 1, 2}


@pytest.mark.parametrize("of_splits", ("one split",), indirect=True)
def test_of_one_split_nothing_is_added(of_splits):
    for case in (CASES[1], MAPPED[0]):
        t = operands(case, torch.float16, "channels_last", "cpu")
        found = plans(problem_of(case, t), family.STEM)
        assert {p.tile for p in found} == set(OF_16_BITS) - RAW_TILES
        for chosen in found:
            assert chosen.splits == chosen.tile.folded
            assert (chosen.addition is None) == (not chosen.tile.folded)


@pytest.mark.parametrize(
    ("name", "one"),
    (("2048 to 256, 4x4 s2", True), ("512 to 256, 16 s8", True), ("64 to 64, 3x3", False)),
)
def test_few_pixels_of_many_weights_have_one_split(name, one):
    case = LAYERS[name]
    problem = Problem.of(
        "weight_gradient", case.layer.x_shape, case.layer.w_shape, case.geometry, dtype="bfloat16"
    )
    assert (plans(problem, family.STEM)[0].splits == 0) == one


def test_images_are_packed_where_no_tensor_map_describes_them():
    for case, of_layout, packed in (
        (CASES[0], "channels_last", (False, False)),
        (CASES[0], "contiguous", (True, True)),
        (Case(1, 3, 8, 1, (1, 24)), "contiguous", (False, True)),
        (Case(1, 8, 3), "channels_last", (False, True)),
    ):
        t = operands(case, torch.bfloat16, of_layout, "cpu")
        laid = layout(problem_of(case, t), family.TILES[0])
        assert tuple(at is not None for at in laid.packed[:2]) == packed


def test_rows_and_columns_that_no_tap_reads_are_not_packed():
    # y has 3 images of 43 x 48 pixels; 25 rows and 28 columns are of the phases 0, 2 and 4 of 5.
    size = Axis(9, 3, 5, 1, 0, 2), Axis(10, 3, 5, 1, 0, 2)
    for direction in ("weight_gradient", "input_gradient"):
        problem = Problem(direction, 3, 32, 64, 1, *size, "bfloat16")
        assert packed_size(problem, "y") == (25, 28)
        assert packed_values(problem, "y") == 3 * 64 * 25 * 28


@pytest.mark.parametrize("layout", ("contiguous", "strided"))
def test_a_contiguous_x_off_16_bytes_is_packed(layout):
    case = MAPPED[0]
    t = operands(case, torch.float16, layout, "cpu")
    memory = torch.zeros(t.x.untyped_storage().nbytes() // 2 + 1, dtype=t.x.dtype)
    off = memory[1:].as_strided(t.x.shape, t.x.stride())
    t = dataclasses.replace(t, x=off.copy_(t.x))
    problem = problem_of(case, t)
    assert not problem.x_mapped
    assert_right(run(plans(problem, family.STEM)[0], t), case, t)


@pytest.mark.parametrize(
    ("case", "reason"),
    (
        (Case(1, 8, 8, 1, (4, 12), (1, 2), (1, 2)), "reads a contiguous x of rows on multiples"),
        (Case(1, 8, 8, 1, (4, 8), (1, 3), (1, 3)), "every second one, the stride along x is 3"),
        (Case(1, 8, 8, 1, (2, 32), (1, 2), dilation=(1, 256)), "lines of 256 pixels"),
        (Case(1, 8, 12, 1, (3, 16), (1, 2)), "reads channels by 8, a group has 12"),
        (Case(1, 8, 8, 1, (4, 24), (1, 3)), "no zeros beside flat rows: x is 24, its padding 0"),
        (Case(1, 8, 8, 1, (4, 16), (1, 5), (1, 1), (0, 1)), "x is 16, its padding 1"),
        (Case(1, 8, 8, 1, (3, 16), (1, 3)), "8 channels of a class or more, 16 have fewer"),
        (Case(1, 8, 9, 1, (2, 16), (1, 3)), "reads channels by 2, a group has 9"),
        (Case(1, 8, 8, 1, (4, 64), (1, 3)), "rows of x at once, each tap has a row of its own"),
    ),
)
def test_refusals_of_raw_tiles(case, reason):
    problem = problem_of(case, operands(case, torch.bfloat16, "contiguous", "cpu"))
    found = [family.tile_why_not(problem, HOPPER, tile) for tile in RAW_TILES]
    assert any(refusal is not None and re.search(reason, refusal) for refusal in found), found


@pytest.mark.parametrize("operand", ("x", "grad_output"))
def test_raw_tiles_refuse_images_off_16_bytes(operand):
    t = operands(RAW[0], torch.float16, "contiguous", "cpu")
    values = getattr(t, operand)
    off = torch.zeros(values.numel() + 1, dtype=values.dtype)[1:].view_as(values)
    for gap in (0, 8, 4):  # between rows; without, an address off 16 bytes
        wide = torch.zeros(*values.shape[:3], values.shape[3] + gap, dtype=values.dtype)
        moved = off if gap == 0 else wide[..., : values.shape[3]]
        found = dataclasses.replace(t, **{operand: moved.copy_(values)})
        served = {p.tile for p in plans(problem_of(RAW[0], found), family.STEM)}
        assert bool(served & RAW_TILES) == (gap == 8)
        if gap == 8:
            for chosen in plans(problem_of(RAW[0], found), family.STEM):
                assert_right(run(chosen, found), RAW[0], found)


NOT_FINITE = [
    *((case, torch.bfloat16) for case in (RAW[0], RAW[1], RAW[7], RAW[11], *FLAT[1:6])),
    *((case, torch.float32) for case in (*FLOAT32_LINES[0:4:3], RAW[11], *FLAT[1:4])),
]


@pytest.mark.parametrize(("case", "dtype"), NOT_FINITE, ids=str)
def test_what_is_not_finite_reaches_its_channel_alone(case, dtype):
    t = operands(case, dtype, "contiguous", "cpu")
    x, y = t.x.clone(), t.grad_output.clone()
    x[0, 3, 1, 2], y[-1, 4, 2, 5] = math.nan, math.inf
    spoiled = by_taps(case, x, t.w, None, y)[2].isfinite().logical_not()
    channels = spoiled.any(3).any(2).any(1), spoiled.any(3).any(2).any(0)
    may = channels[0][:, None] | channels[1][None]
    for chosen in plans(problem_of(case, t), family.STEM):
        if chosen.tile.columns:
            found = run(chosen, dataclasses.replace(t, x=x, grad_output=y)).isfinite()
            assert not (found & spoiled).any()
            rest = found.logical_not() & may.logical_not()[:, :, None, None]
            assert not rest.any()


@pytest.mark.parametrize("case", FLAT, ids=str)
def test_flat_rows_have_nothing_of_their_neighbours(case):
    """All channels but one are not finite."""
    t = operands(case, torch.float16, "contiguous", "cpu")
    of_group = case.out_channels // case.groups
    for channel in {0, of_group - 1, of_group // 2}:
        y = torch.full_like(t.grad_output, math.nan)
        y[:, channel::of_group] = t.grad_output[:, channel::of_group]
        for chosen in plans(problem_of(case, t), family.STEM):
            if chosen.tile in RAW_TILES:
                found = run(chosen, dataclasses.replace(t, grad_output=y))
                want = run(chosen, t)
                assert torch.equal(found[:, channel], want[:, channel])


def test_random_layers_by_raw_tiles():
    draw = random.Random(28)
    served = {True: 0, False: 0}
    while min(served.values()) < 12:
        stride, kernel = draw.choice((1, 2)), draw.randint(1, 7)
        padding = draw.choice((0, 0, min(2, kernel - 1)))
        size = draw.randint(1, 9), 8 * draw.choice((1, 2, 2, 4, 5, 8, 8, 16))
        case = Case(
            draw.choice((1, 2, 5)),
            draw.choice((3, 8, 40, 64, 70)) * 2,
            draw.choice((1, 8, 20, 32, 64, 72)) * 2,
            draw.choice((1, 1, 2)),
            size,
            (draw.randint(1, 4), kernel),
            (draw.choice((1, 2, 3)), stride),
            (draw.choice((0, 1)), padding),
            (0, draw.choice((0, stride - 1))),
            (draw.choice((1, 1, 2)), draw.choice((1, 1, 3))),
        )
        if min(case.output_size) < 1:
            continue
        t = operands(case, draw.choice(DTYPES), "contiguous", "cpu", draw.randint(0, 99))
        for chosen in plans(problem_of(case, t), family.STEM, draw.choice((HOPPER, few()))):
            if chosen.tile in RAW_TILES:
                served[case.output_size[1] % 8 == 0] += 1
                assert_right(run(chosen, t), case, t)


def test_raw_tiles_do_not_read_pixels_of_phases_without_taps():
    case = Case(2, 16, 16, 1, (4, 16), (3, 3), (2, 2), (2, 2), (1, 1), (2, 2))
    t = operands(case, torch.float16, "contiguous", "cpu")
    y = t.grad_output.clone()
    y[..., 1::2] = y[..., 1::2, :] = math.nan
    served = [p for p in plans(problem_of(case, t), family.STEM) if p.tile in RAW_TILES]
    assert served
    for chosen in served:
        assert_right(run(chosen, dataclasses.replace(t, grad_output=y)), case, t)


@pytest.mark.parametrize(
    ("changes", "target", "reason"),
    (
        ({}, "sm_80", "needs the tensor cores of sm_90a, the target is sm_80"),
        (dict(height=Axis(2, 3, 257)), "sm_90a", "lists 256 phases, the stride is 257x1"),
    ),
)
def test_refusals(changes, target, reason):
    t = operands(CASES[0], torch.bfloat16, "channels_last", "cpu")
    problem = dataclasses.replace(problem_of(CASES[0], t), **changes)
    refusal = family.why_not(problem, Target.named(target))
    assert refusal is not None and reason in refusal


@pytest.mark.parametrize(
    ("case", "reason"),
    (
        (Case(1, 16, 16, 1, (4, 4), (5, 5), (5, 5)), f"has {MOST_SOURCES} tensor maps"),
        (Case(1, 16, 16, 1, (9, 9), (1, 300)), "do not fit a tensor copy"),
        (Case(1, 16, 16, 1, (9, 9), (60, 60)), "two stages of"),
        (Case(1, 8, 8, 1, (1, 1), (3, 3), (4, 4), (1, 0), (1, 0)), "some taps meet no output"),
        (Case(1, 8, 8), "there is one phase, nothing to fold"),
        (Case(1, 8, 8, 1, (4, 4), (3, 4), (2, 2)), "not 3 with stride 2 and dilation 1"),
    ),
)
def test_refusals_of_tiles(case, reason):
    t = operands(case, torch.bfloat16, "channels_last", "cpu")
    problem = problem_of(case, t)
    found = [family.tile_why_not(problem, HOPPER, tile) for tile in family.TILES]
    assert any(refusal is not None and reason in refusal for refusal in found), found


@pytest.mark.xfail(strict=True, reason="it is multiplied with the zeros beside the other image too")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("spoiled", ("x", "grad_output"))
def test_what_is_not_finite_reaches_its_readers_alone(spoiled, dtype):
    halves = dtype == torch.bfloat16
    case = CASES[1] if halves else FLOAT32_LINES[0]
    t = operands(case, dtype, "channels_last" if halves else "contiguous", "cpu")
    values = getattr(t, spoiled).clone(memory_format=torch.preserve_format)
    values[0, 0, 0, 0] = values[-1, -1, -1, -1] = math.inf
    t = dataclasses.replace(t, **{spoiled: values})
    want = by_taps(case, t.x, t.w, None, t.grad_output)[2]
    assert not want.isfinite().all()
    chosen = plans(problem_of(case, t), family.STEM)[0]
    assert torch.equal(run(chosen, t).isfinite(), want.isfinite())


@pytest.mark.parametrize("y_layout", ("channels_last", "contiguous"))
def test_the_packing_counts_its_units_without_wrapping(y_layout):
    """Of rows of one pixel with gaps, a run of 16 units is counted for each pixel's octet."""
    for height in (2**22 // 10, 2**22 // 3, 4_192_220):  # the last wrapped once
        size, one = Axis(height, 1), Axis(1, 1)
        for batch in (32, 64):
            problem = Problem("weight_gradient", batch, 8, 8, 1, size, one, "bfloat16")
            problem = dataclasses.replace(problem, y_layout=y_layout, source_aligned=True)
            packing, _ = family.launches(problem, HOPPER, family.TILES[0])
            index = dict(packing.source.constants)["Index"]
            units = 16 * batch * height
            beyond = packing.grid * packing.source.threads * 4  # where a thread looks next
            assert index == "long long" or units + beyond < 2**32
            assert index == "int" or units > 2**30, "64 bits take longer"


def test_two_gigabytes_are_packed_with_offsets_of_32_bits():
    """So that such a size needs no packing of its own beside the layer's."""
    height, width = Axis(405, 4, 2, 1), Axis(168, 4, 2, 1)
    problem = Problem("weight_gradient", 15, 128, 64, 1, height, width, "float32", "ieee")
    tile = next(tile for tile in family.TILES if str(tile) == "64/160")
    packing = family.launches(problem, HOPPER, tile)[0]
    assert 4 * packing.packed > 2**31
    assert dict(packing.source.constants)["Index"] == "int"


def test_folded_tiles_serve_layers_each_of_whose_taps_meets_an_output():
    # Of the taps of phase 0 none does, but those of phase 1 at the same distance.
    case = Case(1, 8, 8, 1, (2, 2), (4, 4), (2, 2), (3, 0), (1, 0))
    problem = problem_of(case, operands(case, torch.bfloat16, "channels_last", "cpu"))
    for tile in set(OF_16_BITS) - RAW_TILES:
        assert "some taps meet no output" in family.tile_why_not(problem, HOPPER, tile)


LAYERS = {
    "64 to 64, 3x3": Case(8, 64, 64, 1, (200, 200), (3, 3)),
    "2048 to 256, 4x4 s2": Case(64, 2048, 256, 1, (8, 6), (4, 4), (2, 2), (1, 1)),
    "512 to 256, 16 s8": Case(16, 512, 256, 1, (1, 32), (1, 16), (1, 8), (0, 4)),
    "21 to 21, 4x4 s4": Case(4, 21, 21, 1, (64, 64), (4, 4), (4, 4)),
    "32 to 32, 3x7": Case(8, 32, 32, 1, (200, 200), (3, 7), (1, 1), (1, 3)),
    "56 to 1, 9x9 s3": Case(4, 56, 1, 1, (64, 64), (9, 9), (3, 3), (4, 4), (2, 2)),
    "32 to 64, 3x3 s5": Case(16, 32, 64, 1, (64, 128), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
    "256 to 256, 2x2 s2": Case(200, 256, 256, 1, (14, 14), (2, 2), (2, 2)),
    "256 to 256, 4x4 s2": Case(64, 256, 256, 1, (32, 24), (4, 4), (2, 2), (1, 1)),
    "256 to 128, 3x3 s2": Case(16, 256, 128, 1, (64, 64), (3, 3), (2, 2), (1, 1), (1, 1)),
    "48 to 24, 5x5": Case(8, 48, 24, 1, (64, 64), (5, 5), (1, 1), (2, 2)),
    "64 to 64, 1x8": Case(8, 64, 64, 1, (64, 64), (1, 8), (1, 2), (0, 3)),
    "8 to 8, 1x17": Case(8, 8, 8, 1, (64, 64), (1, 17), (1, 1), (0, 8)),
    "64 to 64, 3x7 off 16 bytes": Case(8, 64, 64, 1, (64, 128), (3, 7)),
    "32 to 32, 3x3 off 16 bytes": Case(8, 32, 32, 1, (64, 128), (3, 3)),
    "256 to 128, 4x4 s2 off 16 bytes": Case(16, 256, 128, 1, (64, 64), (4, 4), (2, 2)),
    "512 to 256, 3x3 s2 off 16 bytes": Case(1, 512, 256, 2, (64, 64), (3, 3), (2, 2)),
}


@pytest.mark.parametrize("name", quick(LAYERS, 1))
@pytest.mark.parametrize("of_layout", ("channels_last", "contiguous"))
def test_compiles_without_spills_or_serialised_products(name, of_layout):
    """In 16 bits; of every second layer in float32; of the others in full float32."""
    case, turn = LAYERS[name], list(LAYERS).index(name)
    for dtype in ("bfloat16", "float32"):
        problem = Problem.of(
            "weight_gradient",
            case.layer.x_shape,
            case.layer.w_shape,
            case.geometry,
            dtype=dtype,
            tf32=turn % 2 == 1,
        )
        problem = dataclasses.replace(
            problem,
            x_layout=of_layout,
            y_layout=of_layout,
            source_aligned=True,
            source_dense=of_layout == "contiguous",
        )
        chosen = plans(problem, family.STEM)
        assert chosen
        for plan_ in chosen:
            assert_compiled_well(plan_)
