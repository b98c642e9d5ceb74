"""mma_frames_forward in the emulator, and through NVRTC."""

from __future__ import annotations

import pytest
import torch

import emulated_plans
from emulated_plans import HOPPER, assert_compiled_well, assert_order_free, assert_right, run
from layer_cases import LAYOUTS, Case, operands
from tconv.kernels import mma_frames_forward as family
from tconv.plan import Plan, plan

CASES = (
    Case(2, 24, 1, 1, (1, 40), (1, 50), (1, 20), (0, 15)),
    Case(1, 17, 3, 2, (3, 70), (1, 70), (1, 33), (0, 0), (0, 7)),
    Case(2, 40, 1, 1, (1, 9), (1, 512), (1, 128)),
    # Phases without a tap.
    Case(1, 16, 2, 1, (2, 33), (1, 20), (1, 90), (0, 11), bias=False),
    Case(1, 33, 1, 1, (1, 50), (1, 136), (1, 17), (0, 60)),
)
STFT = Case(16, 514, 1, 1, (1, 256), (1, 512), (1, 128), bias=False)


def plans(case: Case, **changes) -> list[Plan]:
    problem = emulated_plans.problem_of(
        case, **({"math": "tf32", "source_aligned": False} | changes)
    )
    return emulated_plans.plans(problem, family.STEM)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tile(case, layout):
    t = operands(case, torch.float32, layout, "cpu")
    last = t.x.is_contiguous(memory_format=torch.channels_last)
    served = plans(case, x_layout="channels_last" if last else "contiguous")
    assert {chosen.tile for chosen in served} == set(family.TILES)
    for chosen in served:
        assert_right(run(chosen, t), case, t, "tf32")


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_result_does_not_depend_on_the_order_of_threads(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    for chosen in plans(case):
        assert_order_free(chosen, t, blocks=2, others=3)


@pytest.mark.parametrize("wide", (False, True), ids=("int", "long long"))
def test_wide_offsets_and_sanitizers(wide):
    t = operands(CASES[1], torch.float32, "contiguous", "cpu")
    for chosen in plans(CASES[1], wide_offsets=wide):
        assert_right(run(chosen, t, sanitize=True, blocks=2), CASES[1], t, "tf32")


def test_compiles_without_spills():
    for case in (STFT, CASES[1], CASES[4]):
        for chosen in plans(case):
            assert_compiled_well(chosen)


def test_the_plan_takes_it_for_an_inverse_stft():
    problem = STFT.layer.problem("forward")
    assert plan(problem, HOPPER).stem == family.STEM
