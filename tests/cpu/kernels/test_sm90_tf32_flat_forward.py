"""sm90_tf32_flat_forward and its packing: in the emulator, and through NVRTC."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from emulated_plans import (
    HOPPER,
    assert_compiled_well,
    assert_order_free,
    assert_right,
    plans,
    problem_of,
    run,
)
from layer_cases import Case, operands
from tconv.jit.target import Target
from tconv.kernels import sm90_tf32_flat_forward as family
from tconv.plan import candidates, plan
from tconv.problem import Axis

CASES = (
    Case(3, 40, 70, 1, (4, 4), (4, 4), (2, 2), (1, 1)),
    Case(2, 32, 64, 2, (5, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(5, 70, 40, 1, (6, 7), (2, 2), (2, 2), bias=False),
    Case(3, 36, 40, 1, (5, 8), (2, 2), (2, 2)),
    Case(2, 32, 21, 1, (3, 7), (4, 4), (4, 4), (0, 4)),
    Case(1, 16, 3, 1, (3, 9), (12, 12), (12, 12), (5, 8)),
    Case(2, 17, 33, 2, (6, 12), (3, 5), (1, 1), (0, 3)),
    Case(1, 16, 24, 1, (9, 11), (3, 3), (1, 1), (2, 1), (0, 0), (2, 3)),
    Case(2, 33, 6, 1, (1, 19), (1, 16), (1, 8), (0, 4)),
    Case(1, 32, 140, 1, (1, 1), (3, 3), (3, 3), (1, 0)),
    Case(2, 16, 20, 1, (5, 6), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
    Case(2, 20, 130, 1, (3, 4), (2, 3), (3, 2), (0, 1), (2, 1)),
)


def served(problem):
    return plans(problem, family.STEM)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tile_that_serves(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = served(problem_of(case))
    assert chosen
    for plan_ in chosen:
        assert_right(run(plan_, t), case, t)


def test_cases_serve_every_tile():
    assert {p.tile for case in CASES for p in served(problem_of(case))} == set(family.TILES)


@pytest.mark.parametrize("layout", ("channels_last", "strided"))
def test_reads_any_strides(layout):
    case = CASES[3]
    t = operands(case, torch.float32, layout, "cpu")
    x_layout = "channels_last" if layout == "channels_last" else "contiguous"
    chosen = served(problem_of(case, x_layout=x_layout, x_aligned=False))[0]
    assert_right(run(chosen, t), case, t)


@pytest.mark.parametrize("wide", (False, True), ids=("int", "long long"))
def test_wide_offsets_and_sanitizers(wide):
    case = CASES[0]
    t = operands(case, torch.float32, "contiguous", "cpu")
    for chosen in served(problem_of(case, wide_offsets=wide))[:2]:
        assert_right(run(chosen, t, sanitize=True), case, t)


def test_result_does_not_depend_on_the_order_of_threads():
    case = CASES[0]
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = served(problem_of(case))[0]
    assert_order_free(chosen, t)


# The shapes that the kernel is for; sizes do not change the code but for the reach of a slot.
LAYERS = {
    "512 to 256, 4x4 s2": Case(128, 512, 256, 1, (4, 4), (4, 4), (2, 2), (1, 1)),
    "256 to 128, 3x3 s2": Case(16, 256, 128, 1, (64, 64), (3, 3), (2, 2), (1, 1), (1, 1)),
    "256 to 256, 2x2 s2": Case(200, 256, 256, 1, (14, 14), (2, 2), (2, 2)),
    "512 to 256, 16 s8": Case(16, 512, 256, 1, (1, 32), (1, 16), (1, 8), (0, 4)),
    "256 to 256, 3x3": Case(4, 256, 256, 1, (32, 32), (3, 3), (1, 1), (1, 1)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_compiles_without_spills_or_serialised_products(name):
    chosen = served(problem_of(LAYERS[name]))
    assert chosen
    for plan_ in chosen:
        assert_compiled_well(plan_)


@pytest.mark.parametrize(
    ("changes", "target", "reason"),
    (
        ({}, "sm_80", "needs the tensor cores of sm_90a, the target is sm_80"),
        ({}, "sm_100a", "the target is sm_100a"),
        (dict(math="ieee"), "sm_90a", "not float32/ieee"),
        (dict(dtype="float16", math="ieee"), "sm_90a", "not float16/ieee"),
        (dict(y_layout="channels_last"), "sm_90a", "writes contiguous outputs"),
        (dict(width=Axis(9, 33, 17)), "sm_90a", "16 phases in x, the stride is 17"),
    ),
)
def test_refusals(changes, target, reason):
    problem = problem_of(Case(1, 16, 64, 1, (9, 70), (3, 3)), **changes)
    refusal = family.why_not(problem, Target.named(target))
    assert refusal is not None and reason in refusal


@pytest.mark.parametrize(
    ("case", "reason"),
    (
        (Case(1, 64, 64, 1, (9, 4000), (3, 3)), "do not fit sm_90a"),
        (Case(1, 16, 64, 1, (9, 9), (2000, 1)), "no room for 2000 taps"),
        (Case(1, 16, 64, 1, (9, 9), (4, 4), (2, 2)), "nothing is gained by taking them apart"),
        (
            Case(1, 16, 64, 1, (9, 9), (4, 4), (3, 3)),
            "takes two phases in x apart, the stride is 3",
        ),
    ),
)
def test_refusals_of_tiles(case, reason):
    found = [c for c in candidates(problem_of(case), HOPPER) if c.stem == family.STEM]
    assert any(c.refusal is not None and reason in c.refusal for c in found)


def test_the_plan_prefers_it_for_small_images_of_many_channels():
    assert plan(problem_of(LAYERS["512 to 256, 4x4 s2"]), HOPPER).stem == family.STEM


def test_nearby_widths_share_a_kernel():
    case = LAYERS["256 to 256, 3x3"]
    tile = family.Tile(128)
    texts = {
        family.source(problem_of(dataclasses.replace(case, size=(32, width))), tile).text()
        for width in (31, 32)
    }
    assert len(texts) == 1
