"""Each feature against numpy."""

from __future__ import annotations

import pytest

from cpu.emulator.feature_cases import simple_cases
from cpu.emulator.inline_kernel import Case, launch
from tconv.emulator import tensor_map


def run(case: Case, **options) -> None:
    values = {name: case.values[name] for name, _ in case.source.arguments}
    for name in case.expected:
        if name in values:
            values[name][...] = 0
    launch(case.source, case.grid, **values, **options)
    case.check()


@pytest.mark.parametrize("name", simple_cases())
def test_feature(name: str) -> None:
    run(simple_cases()[name])


@pytest.mark.parametrize("schedule", ["reverse", "random:1", "random:2"])
@pytest.mark.parametrize(
    "name", ["threads", "named_barriers", "cp_async", "cp_async_mbarrier", "bulk", "load_2d_128B"]
)
def test_result_is_the_same_in_any_order(name: str, schedule: str) -> None:
    run(simple_cases()[name], schedule=schedule)


@pytest.mark.parametrize(
    "name",
    ["threads", "vector_memory", "cp_async", "cp_async_mbarrier", "bulk", "load_4d_steps", "mma",
     "ldmatrix"],
)  # fmt: skip
def test_feature_with_sanitizers(name: str) -> None:
    run(simple_cases()[name], sanitize=True)


def test_results_are_compared_with_something() -> None:
    assert all((e != 0).any() for case in simple_cases().values() for e in case.expected.values())


def test_tensor_map_that_the_emulator_cannot_follow_is_refused() -> None:
    with pytest.raises(ValueError, match="does not flush subnormal numbers"):
        tensor_map.encode(256, "float32_ftz", (8,), (), (8,))
    with pytest.raises(ValueError, match="address must be a multiple of 16"):
        tensor_map.encode(257, "float32", (8,), (), (8,))
    assert len(tensor_map.encode(256, "float32", (8,), (), (8,))) == 128
