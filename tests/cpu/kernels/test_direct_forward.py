"""direct_forward in the emulator, and through NVRTC."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import emulated_plans
from emulated_plans import (
    HOPPER,
    assert_bias_alone,
    assert_compiled_well,
    assert_order_free,
    assert_right,
    assert_wants_vectors,
    run,
)
from layer_cases import Case, operands, random_cases
from tconv.jit.target import Target
from tconv.kernels import direct_forward as family
from tconv.plan import Plan
from tconv.problem import Problem
from tiers import quick

CASES = (
    # The layers that the kernel is for, in little: several tiles along x and y, with tails.
    Case(2, 8, 16, 2, (9, 68), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1)),
    Case(1, 20, 24, 1, (6, 36), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
    Case(2, 1, 1, 5, (37, 33), (4, 4), (2, 2), (1, 1)),
    Case(2, 17, 3, 1, (9, 11), (4, 4), (2, 2), (1, 1), bias=False),
    Case(1, 9, 1, 1, (20, 12), (9, 9), (3, 3), (4, 4), (2, 2)),
    Case(2, 11, 5, 1, (5, 6), (2, 2), (2, 2)),
    Case(1, 9, 20, 1, (1, 132), (1, 4), (1, 2), (0, 1)),
    Case(1, 5, 3, 1, (5, 34), (8, 8), (4, 4), (2, 2)),
    # Signals: each warp of a long row of threads writes a piece of its own.
    Case(2, 1, 1, 3, (1, 1101), (1, 7), (1, 1), (0, 3)),
    Case(1, 1, 2, 2, (2, 530), (1, 5), (1, 3), (0, 2)),
    # Stride 1; single pixels; phases without taps on both axes; padding beyond the kernel's reach.
    Case(1, 4, 6, 1, (7, 9), (3, 3), (1, 1), (1, 1)),
    Case(3, 2, 2, 1, (1, 1), (1, 1)),
    Case(1, 4, 3, 1, (3, 3), (3, 3), (1, 1), (2, 2)),
    Case(2, 3, 2, 1, (3, 4), (2, 2), (5, 4), (0, 0), (4, 3)),
    Case(1, 4, 6, 1, (4, 5), (3, 3), (4, 6), (1, 1), (2, 5), (6, 4)),
    Case(1, 3, 4, 1, (9, 8), (2, 2), (1, 1), (3, 2)),
    Case(1, 2, 7, 3, (6, 7), (3, 4), (1, 1), (2, 1), (0, 0), (2, 3), bias=False),
)


def problem_of(case: Case, **changes) -> Problem:
    math = "tf32" if case.in_channels >= 16 else "ieee"
    return emulated_plans.problem_of(case, **({"math": math} | changes))


def plans(problem: Problem, target: Target = HOPPER) -> list[Plan]:
    return emulated_plans.plans(problem, family.STEM, target)


QUICK = (0, 3, 4, 8, 11, 13, 14)  # together they too serve every tile


@pytest.mark.parametrize("case", quick(CASES, *QUICK), ids=str)
def test_every_tile_that_serves(case):
    """One block computes all tiles, so that steps, weights and patches follow one another."""
    t = operands(case, torch.float32, "contiguous", "cpu")
    served = plans(problem_of(case))
    assert served
    for chosen in served:
        assert_right(run(chosen, t, blocks=1), case, t, chosen.problem.math)


def test_cases_serve_every_tile():
    assert {p.tile for i in QUICK for p in plans(problem_of(CASES[i]))} == set(family.TILES)


def test_random_layers():
    for case in random_cases(6, seed=7):
        t = operands(case, torch.float32, "contiguous", "cpu")
        for turn, chosen in enumerate(
            plans(problem_of(case, math="ieee", source_aligned=False))[:2]
        ):
            assert_right(run(chosen, t, blocks=turn + 1), case, t, "ieee")


@pytest.mark.parametrize("layout", ("channels_last", "mixed", "strided"))
def test_reads_any_strides(layout):
    case = CASES[5]
    t = operands(case, torch.float32, layout, "cpu")
    x_layout = "channels_last" if layout == "channels_last" else "contiguous"
    for chosen in plans(problem_of(case, x_layout=x_layout, source_aligned=False))[:2]:
        assert_right(run(chosen, t), case, t, "ieee")


@pytest.mark.parametrize("wide", (False, True), ids=("int", "long long"))
@pytest.mark.parametrize("case", (CASES[0], CASES[3]), ids=str)
def test_wide_offsets_and_sanitizers(case, wide):
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = plans(problem_of(case, wide_offsets=wide))[0]
    assert_right(run(chosen, t, sanitize=True, blocks=2), case, t, chosen.problem.math)


@pytest.mark.parametrize("case", (CASES[0], CASES[1], CASES[2]), ids=str)
def test_result_does_not_depend_on_the_order_of_threads(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = plans(problem_of(case))[0]
    assert_order_free(chosen, t, blocks=2, others=3)


def test_outputs_without_taps_hold_the_bias_alone():
    case = CASES[11]
    t = operands(case, torch.float32, "contiguous", "cpu")
    for chosen in plans(problem_of(case)):
        # Rows 2, 3 and 4 of every 5 have no tap: the kernel has two.
        assert_bias_alone(chosen, t, [y for y in range(case.output_size[0]) if y % 5 >= 2])


def test_refusals_give_their_reasons():
    problem = problem_of(CASES[0])
    assert "sm_80" in family.why_not(problem, Target.named("sm_75"))
    half = dataclasses.replace(problem, dtype="float16", math="ieee")
    assert "float32" in family.why_not(half, HOPPER)
    last = dataclasses.replace(problem, y_layout="channels_last")
    assert "contiguous" in family.why_not(last, HOPPER)
    deep = problem_of(Case(1, 1024, 64, 1, (8, 8), (4, 4), (2, 2), (1, 1)))
    assert "shared memory" in family.tile_why_not(deep, HOPPER, family.TILES[0])
    steep = problem_of(Case(1, 4, 4, 1, (4, 4), (16, 16), (16, 16)))
    assert "sums" in family.tile_why_not(steep, HOPPER, family.TILES[0])


def test_output_must_start_on_a_vector():
    case = CASES[0]
    assert_wants_vectors(
        plans(problem_of(case))[0], operands(case, torch.float32, "contiguous", "cpu")
    )


# The layers that the kernel is for; sizes do not change the code.
LAYERS = {
    "3x5 s2x3, 4 groups": Case(16, 8, 16, 4, (128, 256), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1)),
    "3x3 s5 d2": Case(16, 32, 64, 1, (64, 128), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
    "4x4 s2, depthwise": Case(8, 1, 1, 256, (128, 128), (4, 4), (2, 2), (1, 1)),
    "4x4 s2, 64 to 3": Case(128, 64, 3, 1, (32, 32), (4, 4), (2, 2), (1, 1), bias=False),
    "9x9 s3, 56 to 1": Case(16, 56, 1, 1, (256, 256), (9, 9), (3, 3), (4, 4), (2, 2)),
    "2x2 s2, 64 to 32": Case(8, 64, 32, 1, (128, 128), (2, 2), (2, 2)),
    "1x4 s1x2, 64 to 32": Case(16, 64, 32, 1, (1, 4096), (1, 4), (1, 2), (0, 1)),
    "3x3": Case(16, 8, 8, 1, (128, 128), (3, 3), (1, 1), (1, 1)),
}


def compiled(problem: Problem, arch: str = "sm_90a", turn: int = 0, step: int = 1) -> int:
    """How many tiles compile: every `step`-th."""
    count = 0
    for chosen in plans(problem, Target.named(arch))[turn % step :: step]:
        assert_compiled_well(chosen, arch)
        count += 1
    return count


@pytest.mark.parametrize("name", quick(LAYERS, 0, 4))
def test_nothing_spills_on_hopper(name):
    assert compiled(problem_of(LAYERS[name]), turn=list(LAYERS).index(name), step=2) > 0


ARCHS = ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a")


@pytest.mark.parametrize("arch", quick(ARCHS, 0))
def test_nothing_spills_elsewhere(arch):
    assert compiled(problem_of(LAYERS["3x5 s2x3, 4 groups"]), arch, ARCHS.index(arch), 3) > 0


@pytest.mark.parametrize(
    "changes",
    quick((dict(wide_offsets=True), dict(source_aligned=False), dict(bias=False)), 0),
    ids=str,
)
def test_nothing_spills_in_any_variant(changes):
    for turn, name in enumerate(("3x5 s2x3, 4 groups", "3x3 s5 d2")):
        assert compiled(problem_of(LAYERS[name], **changes), turn=turn, step=3) > 0
