"""Calls like ones before them give the bits that they give from a cold start; in the emulator."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

import tconv
from known_calls import Call, assert_as_from_a_cold_start, calls, forget
from tconv import run


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCONV_EMULATE", "1")


PLAIN = Call()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls("cuda" if torch.cuda.is_available() else "cpu"))
@example([PLAIN] * 3)
@example([PLAIN, dataclasses.replace(PLAIN, input="negative"), PLAIN])
@example([PLAIN, dataclasses.replace(PLAIN, input="misaligned"), PLAIN])
@example([PLAIN, dataclasses.replace(PLAIN, weight="leaked"), PLAIN])
@example([PLAIN, dataclasses.replace(PLAIN, weight="transposed"), PLAIN])
@example([PLAIN, dataclasses.replace(PLAIN, weight_dtype=torch.float64), PLAIN])
@example([PLAIN, dataclasses.replace(PLAIN, bias="negative"), PLAIN])
@example([PLAIN, dataclasses.replace(PLAIN, input="zero"), PLAIN])
@example([PLAIN, dataclasses.replace(PLAIN, allow_tf32=False), PLAIN])
@example([PLAIN, dataclasses.replace(PLAIN, cudnn=False), PLAIN])
@example([PLAIN, dataclasses.replace(PLAIN, autocast=True), PLAIN])
def test_no_call_depends_on_those_before_it(sequence: list[Call]) -> None:
    assert_as_from_a_cold_start(sequence)


def test_these_calls_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above compares cold starts."""
    forget()
    found = []
    known = run.known

    def note(*call):  # type: ignore[no-untyped-def]
        found.append(known(*call))
        return found[-1]

    monkeypatch.setattr(run, "known", note)
    for _ in range(3):
        PLAIN(tconv.conv_transpose2d)
    # The first call asks again once it is remembered.
    assert [forward is not None for forward in found] == [False, True, True, True]
