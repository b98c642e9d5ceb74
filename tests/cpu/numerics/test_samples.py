"""The bits of a sample do not depend on the values of the others."""

from __future__ import annotations

import pytest
from hypothesis import example, given

from scale_cases import NAMES, OTHERS, SEEDS, assert_sample_alone, few, operands
from scale_plans import picks

PICKS = [
    pick
    for direction in ("forward", "input_gradient")
    for pick in picks(direction)
    if pick.case.batch > 1
]


@pytest.mark.parametrize("pick", PICKS, ids=str)
# A zero among tiny results, which are another sample's.
@example("heat maps, diagonal weights", 2205, 0, ["small", "zeros", "other values"])
@given(name=NAMES, seed=SEEDS, kept=SEEDS, others=OTHERS)
@few(6)
def test_a_sample_does_not_depend_on_the_others(pick, name, seed, kept, others):
    pair = operands(pick.direction, pick.case, name, seed)
    assert_sample_alone(pick.run, pair, kept, others)
