"""What an element does not read does not reach it: not finite values, and large ones."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scale_cases import INF, NAN, SEEDS, SPOTS, Spot, assert_read_by_readers_alone, few, operands
from scale_plans import DIRECTIONS, picks

# NOTE: but for sm90_weight_gradient, in which what is not finite meets the zeros beside the other
# image: it reaches its channel alone, as its own tests say (docs/numerics.md).
ALL = [
    pick
    for direction in DIRECTIONS
    for pick in picks(direction)
    if pick.stem != "sm90_weight_gradient"
]


@pytest.mark.parametrize("pick", ALL, ids=str)
@given(spots=SPOTS, of_second=st.booleans(), seed=SEEDS)
@example(spots=[Spot(value=NAN)], of_second=False, seed=0)
@example(spots=[Spot(row=-1, column=-1, value=NAN)], of_second=True, seed=0)
@example(spots=[Spot(row=3, column=3, value=INF)], of_second=False, seed=0)
@few(4)
def test_values_reach_what_reads_them(pick, spots, of_second, seed):
    pair = operands(pick.direction, pick.case, "normal", seed)
    of_second = of_second and pick.direction == "weight_gradient"  # else images come first
    assert_read_by_readers_alone(
        pick.run, pick.direction, pick.case, pick.math, pair, spots, of_second
    )
