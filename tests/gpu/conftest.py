"""Tests on a device are of our kernels, whatever PyTorch's operator would take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tconv


@pytest.fixture(autouse=True)
def _own_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("default_choice"):
        yield
        return
    with tconv.own_kernels():
        yield
