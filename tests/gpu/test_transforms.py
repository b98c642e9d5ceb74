"""torch.func and forward-mode AD down to the kernels on the device, which read memory alone."""

from __future__ import annotations

import pytest

from transform_cases import CASES, assert_case_is_pytorchs


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch.func.linearize
@pytest.mark.parametrize("name", CASES)
def test_transforms_are_pytorchs(name: str) -> None:
    for _ in range(2):  # the second time of a call that is known
        assert_case_is_pytorchs(name, "cuda")
