"""Calls like ones before them give the bits that they give from a cold start, on the device."""

from __future__ import annotations

from hypothesis import given, settings

from known_calls import Call, assert_as_from_a_cold_start, calls


@settings(max_examples=100)
@given(calls("cuda"))
def test_no_call_depends_on_those_before_it(sequence: list[Call]) -> None:
    assert_as_from_a_cold_start(sequence)
