"""The three maps below autograd: our kernels for the tensors that they serve, else PyTorch's."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from tconv import aten, settings
from tconv.memory_format import sizes_of
from tconv.ops import fake
from tconv.problem import Geometry, Pair

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""The dtypes that our kernels compute in."""


@functools.cache
def runner() -> ModuleType:
    """`tconv.run`, imported with its libraries by the first call that needs it."""
    from tconv import run

    return run


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """The output, which has pixels."""
    if not _runs_our_kernels(input):
        return aten.forward(input, weight, bias, geometry)
    if input.numel() == 0:
        return fake.forward(input, weight, bias, geometry)
    return runner().forward(input, weight, bias, geometry)


def forward_of_any_size(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    """As `forward`, also of an output without pixels.

    A compiled graph may ask for one; `functional` never does.
    """
    if _runs_our_kernels(input):
        spatial = fake.output_size(input.shape[2:], weight.shape[2:], geometry)
        if 0 in spatial:
            return fake.forward(input, weight, bias, geometry)
    return forward(input, weight, bias, geometry)


def input_gradient(
    grad_output: Tensor, weight: Tensor, input_size: Pair, geometry: Geometry
) -> Tensor:
    """The gradient of the input."""
    if not _runs_our_kernels(grad_output):
        return aten.input_gradient(grad_output, weight, input_size, geometry)
    if grad_output.numel() == 0:
        return fake.input_gradient(grad_output, weight, input_size, geometry).zero_()
    return runner().input_gradient(grad_output, weight, input_size, geometry)


def weight_gradient(
    input: Tensor, grad_output: Tensor, kernel_size: Pair, geometry: Geometry, channels_last: bool
) -> Tensor:
    """The gradient of the weight."""
    arguments = (input, grad_output, kernel_size, geometry, channels_last)
    if not _runs_our_kernels(input):
        return aten.weight_gradient(*arguments)
    if input.numel() == 0 or grad_output.numel() == 0:
        return fake.weight_gradient(*arguments).zero_()
    return runner().weight_gradient(*arguments)


def gradients(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    geometry: Geometry,
    channels_last: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of the input and the weight.

    Args:
        grad_output, input, weight, geometry: of the layer.
        channels_last: the memory format of the weight's gradient.
    """
    arguments = (grad_output, input, weight, geometry, channels_last)
    if not _runs_our_kernels(input):
        return aten.gradients(*arguments)
    if input.numel() == 0 or grad_output.numel() == 0:
        image, kernel = sizes_of(input), sizes_of(weight)
        return (
            input_gradient(grad_output, weight, image, geometry),
            weight_gradient(input, grad_output, kernel, geometry, channels_last),
        )
    return runner().gradients(*arguments)


def _runs_our_kernels(tensor: Tensor) -> bool:
    # `device.type` builds a string each time, which is slower than the rest of this function.
    ours = tensor.is_cuda or (tensor.is_cpu and settings.emulate())
    return ours and tensor.dtype in DTYPES
