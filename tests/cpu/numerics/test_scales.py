"""Every kind of tile of every kernel on operands of every scale, in the emulator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given

from scale_cases import NAMES, SCALES, SEEDS, few, operands
from scale_plans import DIRECTIONS, Pick, kind, kinds_of_tables, picks
from tiers import quick

ALL = [pick for direction in DIRECTIONS for pick in picks(direction)]
FORWARD = picks("forward")
PARTS = 8


def assert_right(pick: Pick, names, seed: int) -> None:
    found = {name: pick.ratios(name, seed) for name in names}
    wrong = [f"{name}, seed {seed}: {r}" for name, r in found.items() if not r.right]
    assert not wrong, f"{pick.plan}: times what it may err as much as:\n  " + "\n  ".join(wrong)


def test_every_kind_of_tile_is_picked():
    assert {(pick.stem, kind(pick.stem, pick.plan.tile)) for pick in ALL} == kinds_of_tables()


@pytest.mark.parametrize("part", quick(range(PARTS), 0))
@pytest.mark.parametrize("pick", ALL, ids=str)
def test_every_scale(pick, part):
    """A share of them for each part; the first parts of eight tiles together take them all."""
    assert_right(pick, list(SCALES)[(ALL.index(pick) + part) % PARTS :: PARTS], seed=0)


@pytest.mark.parametrize("pick", quick(ALL, *range(0, len(ALL), 3)), ids=str)
@given(name=NAMES, seed=SEEDS)
@few(6)
def test_random_operands(pick, name, seed):
    assert_right(pick, [name], seed)


@pytest.mark.parametrize("pick", picks("weight_gradient"), ids=str)
@given(name=NAMES)
@example(name="samples")
@few(6)
def test_weight_gradient_of_scaled_gradients(pick, name):
    assert_right(pick, [name], seed=1)  # an odd one


ORDINARY = [pick for pick in FORWARD if pick.repairs and pick.sees_its_pixels]


def test_every_kernel_that_repairs_is_asked_for_ordinary_operands():
    assert {pick.stem for pick in ORDINARY} == {pick.stem for pick in FORWARD if pick.repairs}


@pytest.mark.parametrize("pick", ORDINARY, ids=str)
@pytest.mark.parametrize("name", [name for name, scale in SCALES.items() if scale.ordinary])
def test_ordinary_operands_are_not_computed_again(pick, name):
    pair = operands("forward", pick.case, name, 0)
    out, without = pick.run(*pair), pick.without_repairs.run(*pair)
    assert torch.equal(out.view(torch.int32), without.view(torch.int32))
