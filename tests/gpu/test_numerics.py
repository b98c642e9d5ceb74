"""The contract of docs/numerics.md on the device, through the plan's own picks.

`python tests/scale_layers.py` prints the worst ratios, with cuDNN's beside them.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scale_cases import (
    INF,
    NAMES,
    NAN,
    OTHERS,
    SCALES,
    SEEDS,
    SPOTS,
    Spot,
    assert_read_by_readers_alone,
    assert_sample_alone,
    few,
)
from scale_layers import calls, gradients

FORWARD = calls("forward")
GRADIENTS = gradients()
# Whose results have the samples of an operand, of which there are several.
BY_SAMPLE = [
    call
    for call in (*FORWARD, *GRADIENTS)
    if call.direction != "weight_gradient" and call.case.batch > 1
]


@pytest.fixture(autouse=True)
def ours_alone(monkeypatch):
    monkeypatch.setenv("TCONV_STRICT", "1")


@pytest.mark.parametrize("call", (*FORWARD, *GRADIENTS), ids=str)
def test_every_scale(call):
    found = {name: call.ratios(name, 0) for name in SCALES}
    wrong = [f"{name}, seed 0: {ratios}" for name, ratios in found.items() if not ratios.right]
    assert not wrong, f"{call}: times what it may err as much as:\n  " + "\n  ".join(wrong)


@pytest.mark.parametrize("call", FORWARD, ids=str)
@given(name=NAMES, seed=SEEDS)
@few(4)
def test_random_operands(call, name, seed):
    ratios = call.ratios(name, seed)
    assert ratios.right, f"{call}: {name}, seed {seed}: {ratios}"


@pytest.mark.parametrize("call", BY_SAMPLE, ids=str)
@given(name=NAMES, seed=SEEDS, kept=SEEDS, others=OTHERS)
@few(4)
def test_a_sample_does_not_depend_on_the_others(call, name, seed, kept, others):
    assert_sample_alone(call.run, call.operands(name, seed), kept, others)


@pytest.mark.parametrize("call", (*FORWARD, *GRADIENTS), ids=str)
@given(spots=SPOTS, of_second=st.booleans(), seed=SEEDS)
@example(spots=[Spot(row=3, column=3, value=NAN)], of_second=False, seed=0)
@example(spots=[Spot(row=-1, column=-1, value=INF)], of_second=True, seed=0)
@few(4)
def test_values_reach_what_reads_them(call, spots, of_second, seed):
    pair = call.operands("normal", seed)
    of_second = of_second and call.direction == "weight_gradient"  # else images come first
    assert_read_by_readers_alone(
        call.run, call.direction, call.case, call.math, pair, spots, of_second
    )
