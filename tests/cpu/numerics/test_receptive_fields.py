"""What an element does not read does not reach it: not finite values, and large ones."""

from __future__ import annotations

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from scale_cases import INF, NAN, Spot, assert_read_by_readers_alone, operands
from scale_plans import DIRECTIONS, picks

ALL = [pick for direction in DIRECTIONS for pick in picks(direction)]

spots = st.builds(
    Spot,
    where=st.sampled_from(("pixel", "channel", "row", "column")),
    sample=st.integers(0, 3),
    channel=st.integers(0, 71),
    row=st.integers(0, 31),
    column=st.integers(0, 255),
    value=st.sampled_from((NAN, INF, -INF, 1e5, -1e30)),
)


@pytest.mark.parametrize("pick", ALL, ids=str)
@given(
    spots=st.lists(spots, min_size=1, max_size=3),
    of_second=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example(spots=[Spot(value=NAN)], of_second=False, seed=0)
@example(spots=[Spot(row=-1, column=-1, value=NAN)], of_second=True, seed=0)
@example(spots=[Spot(row=3, column=3, value=INF)], of_second=False, seed=0)
@settings(max_examples=5, print_blob=True, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_values_reach_what_reads_them(pick, spots, of_second, seed):
    pair = operands(pick.direction, pick.case, "normal", seed)
    of_second = of_second and pick.direction == "weight_gradient"  # else images come first
    assert_read_by_readers_alone(
        pick.run, pick.direction, pick.case, pick.math, pair, spots, of_second
    )
