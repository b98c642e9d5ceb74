"""What the tests of the layer share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tconv import functional
from tconv.ops import compute
from tconv.run import signature

# The machine's cores belong to the test runner's processes.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TCONV_") and name != "TCONV_CACHE_DIR":  # the tests' own
            monkeypatch.delenv(name)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _pytorch_is_left_as_it_was() -> Iterator[None]:
    before = torch.nn.functional.conv_transpose2d, torch.conv_transpose2d
    yield
    assert (torch.nn.functional.conv_transpose2d, torch.conv_transpose2d) == before


def has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


class RecordingRun(SimpleNamespace):
    """Stands in for tconv.run: the same functions on PyTorch's operators, and a record.

    Results have the memory formats that tconv promises for a device of its own; what the tests
    below learn from it is which calls come this far, with which arguments.
    """

    def __init__(self) -> None:
        super().__init__(calls=[], remembered=set())

    @staticmethod
    def format(*tensors: Tensor) -> torch.memory_format:
        suggest = torch._prims_common.suggest_memory_format
        if any(suggest(tensor) == torch.channels_last for tensor in tensors):
            return torch.channels_last
        return torch.contiguous_format

    def note(self, name: str, tensors: tuple[Tensor | None, ...], *arguments: object) -> None:
        for tensor in tensors:
            # A kernel reads memory: nothing may be pending on a tensor, nor be lost with it.
            assert tensor is None or not tensor.is_neg()
            assert tensor is None or forward_ad._current_level < 0 or not has_tangent(tensor)
        for argument in arguments:
            assert isinstance(argument, (int, tuple)), arguments
        self.calls.append(name)

    @staticmethod
    def laid_out(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
        result = torch.empty_like(tensor, memory_format=memory_format)
        return result.copy_(tensor)

    def known(self, *call):
        *arguments, cast = call
        if (signature(*arguments), cast) not in self.remembered:
            return None
        return RecordedForward(self)

    signature = staticmethod(signature)

    def remember(self, key, *call) -> None:
        self.remembered.add(key)

    def forward(self, input, weight, bias, geometry) -> Tensor:
        self.note("forward", (input, weight, bias), *geometry)
        stride, padding, output_padding, dilation, groups = geometry
        output = torch.ops.aten.convolution(
            input, weight, bias, stride, padding, dilation, True, output_padding, groups
        )
        assert output.numel() and input.numel()
        return self.laid_out(output, self.format(input, weight))

    @staticmethod
    def backward(grad_output, input, weight, geometry) -> tuple[Tensor, Tensor, Tensor]:
        stride, padding, output_padding, dilation, groups = geometry
        rest = (stride, padding, dilation, True, output_padding, groups, [True, True, False])
        return torch.ops.aten.convolution_backward(grad_output, input, weight, None, *rest)

    def input_gradient(self, grad_output, weight, input_size, geometry) -> Tensor:
        self.note("input_gradient", (grad_output, weight), input_size, *geometry)
        input = grad_output.new_zeros((len(grad_output), len(weight), *input_size))
        gradient = self.backward(grad_output, input, weight, geometry)[0]
        return self.laid_out(gradient, self.format(grad_output, weight))

    def weight_gradient(
        self, input, grad_output, kernel_size, geometry, like_channels_last
    ) -> Tensor:
        self.note("weight_gradient", (input, grad_output), kernel_size, *geometry)
        shape = (input.shape[1], grad_output.shape[1] // geometry[4], *kernel_size)
        gradient = self.backward(grad_output, input, input.new_zeros(shape), geometry)[1]
        return self.laid_out(
            gradient, torch.channels_last if like_channels_last else torch.contiguous_format
        )

    def gradients(
        self, grad_output, input, weight, geometry, channels_last
    ) -> tuple[Tensor, Tensor]:
        image, kernel = tuple(input.shape[2:]), tuple(weight.shape[2:])
        return (
            self.input_gradient(grad_output, weight, image, geometry),
            self.weight_gradient(input, grad_output, kernel, geometry, channels_last),
        )


class RecordedForward:
    """Stands in for `tconv.run.Known`."""

    def __init__(self, run: RecordingRun) -> None:
        self.run = run

    def __call__(self, *call) -> Tensor:
        return self.run.forward(*call)

    @staticmethod
    def ready(axes: int) -> None:
        return None

    @staticmethod
    def see(grad_output: Tensor) -> None:
        pass

    @staticmethod
    def is_settled(differentiable: bool, wanted: tuple[bool, bool]) -> bool:
        return False

    @staticmethod
    def pytorchs(differentiable: bool, wanted: tuple[bool, bool]) -> None:
        return None


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> RecordingRun:
    """CPU tensors go where CUDA tensors go, and the way is recorded."""
    monkeypatch.setenv("TCONV_EMULATE", "1")
    monkeypatch.setattr(functional, "_own_calls", ({}, {}))
    recording = RecordingRun()
    monkeypatch.setattr(compute, "runner", lambda: recording)
    return recording
