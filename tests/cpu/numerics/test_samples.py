"""The bits of a sample do not depend on the values of the others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from scale_cases import SAMPLES, SCALES, operands
from scale_plans import picks

PICKS = [
    pick
    for direction in ("forward", "input_gradient")
    for pick in picks(direction)
    if pick.case.batch > 1
]


@pytest.mark.parametrize("pick", PICKS, ids=str)
@given(
    name=st.sampled_from(["normal", "normal", *SCALES]),
    seed=st.integers(0, 2**32 - 1),
    kept=st.integers(0, 7),
    others=st.lists(st.sampled_from(list(SAMPLES)), min_size=1, max_size=3),
)
@settings(max_examples=6, print_blob=True, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_a_sample_does_not_depend_on_the_others(pick, name, seed, kept, others):
    images, weights = operands(pick.direction, pick.case, name, seed)
    kept %= len(images)
    replaced = images.clone()
    for index in range(len(images)):
        if index != kept:
            replaced[index] = SAMPLES[others[index % len(others)]](images[index])
    before, after = pick.run(images, weights)[kept], pick.run(replaced, weights)[kept]
    differ = before.view(torch.int32) != after.view(torch.int32)
    worst = float((before - after).abs().max() / before.abs().max())
    assert not differ.any(), (
        f"{pick.plan}: {int(differ.sum())} of {differ.numel()} values of sample {kept} changed, by "
        f"{worst:.1e} of the largest"
    )
