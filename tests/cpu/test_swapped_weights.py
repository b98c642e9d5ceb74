"""A layer's tensors may be swapped for others after a call: no call leaves a reference to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tconv


@pytest.fixture(params=["sm90_tf32_flat_forward", "general_forward"])
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tconv.ConvTranspose2d:
    """One that the emulator has run, forward and backward."""
    monkeypatch.setenv("TCONV_EMULATE", "1")
    monkeypatch.setenv("TCONV_KERNEL", request.param)
    torch.manual_seed(0)
    layer = tconv.ConvTranspose2d(40, 64, 4, 2, 1)
    for _ in range(3):
        output = layer(torch.randn(1, 40, 3, 5))
    output.sum().backward()
    layer.zero_grad()
    return layer


@pytest.fixture
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def assert_right(layer: tconv.ConvTranspose2d) -> None:
    x = torch.randn(1, 40, 3, 5, dtype=layer.weight.dtype)
    want = F.conv_transpose2d(x, layer.weight, layer.bias, 2, 1)
    assert (layer(x) - want).norm() <= 4e-4 * want.norm()


def test_swap_tensors(layer: tconv.ConvTranspose2d) -> None:
    other = torch.nn.Parameter(torch.randn_like(layer.weight))
    values = other.detach().clone()
    torch.utils.swap_tensors(layer.weight, other)
    assert torch.equal(layer.weight, values)
    assert_right(layer)


CHANGES: dict[str, Callable[[tconv.ConvTranspose2d, dict[str, Tensor]], object]] = {
    "double": lambda layer, state: layer.double(),
    "load_state_dict": lambda layer, state: layer.load_state_dict(state),
    "load_state_dict, assigned": lambda layer, state: layer.load_state_dict(state, assign=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_swapping_on_conversion(
    layer: tconv.ConvTranspose2d, swapping: None, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = layer.weight
    state = {name: torch.randn_like(value) for name, value in layer.state_dict().items()}
    if change == "double":  # the kernel that was asked for is for float32
        monkeypatch.delenv("TCONV_KERNEL")
    CHANGES[change](layer, state)
    assert layer.weight is weight
    assert layer.weight.dtype == (torch.float64 if change == "double" else torch.float32)
    assert change == "double" or torch.equal(layer.weight, state["weight"])
    assert_right(layer)
