"""torch.func and forward-mode AD down to the kernels, which read memory alone; in the emulator."""

from __future__ import annotations

from typing import Any

import pytest
from torch.func import vmap

import tconv
from tconv.run import execution
from transform_cases import CASES, assert_case_is_pytorchs, leaked, operands


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The emulator serves CPU tensors; the directions of what it launches."""
    monkeypatch.setenv("TCONV_EMULATE", "1")
    noted: list[str] = []
    launch = execution._launch

    def note(call: Any, *tensors: Any) -> Any:
        noted.append(call.problem.direction)
        return launch(call, *tensors)

    monkeypatch.setattr(execution, "_launch", note)
    return noted


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch.func.linearize
@pytest.mark.parametrize("name", CASES)
def test_transforms_are_pytorchs(launches: list[str], name: str) -> None:
    for _ in range(2):  # the second time of a call that is known
        launches.clear()
        assert_case_is_pytorchs(name, "cpu")
        assert "forward" in launches


@pytest.mark.parametrize("index", range(3))
def test_what_a_vmap_left_behind_is_refused_in_pytorchs_words(
    launches: list[str], index: int
) -> None:
    tensors = list(operands("cpu"))
    tensors[index] = leaked(vmap, tensors[index][None])[0]
    with pytest.raises(RuntimeError, match="escaped from inside a function being vmapped"):
        tconv.conv_transpose2d(*tensors, 2, 1, 1, 2)
    assert not launches
