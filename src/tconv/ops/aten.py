"""The three maps by PyTorch's own operators, for tensors that our kernels do not serve."""

from __future__ import annotations

import torch
from torch import Tensor

from tconv.memory_format import is_channels_last
from tconv.ops import fake
from tconv.problem import Geometry, Pair, dense_strides

_aten = torch.ops.aten


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """The output, by `aten::convolution`."""
    stride, padding, output_padding, dilation, groups = geometry
    output = _aten.convolution.default(
        input, weight, bias, stride, padding, dilation, True, output_padding, groups
    )
    return _with_format(output, is_channels_last(input) or is_channels_last(weight))


def input_gradient(
    grad_output: Tensor, weight: Tensor, input_size: Pair, geometry: Geometry
) -> Tensor:
    """The gradient of the input, by `aten::convolution_backward`."""
    # Only the size and the memory format of this input are read.
    input = fake.input_gradient(grad_output, weight, input_size, geometry)
    channels_last = is_channels_last(grad_output) or is_channels_last(weight)
    return _with_format(_backward(grad_output, input, weight, geometry, 0), channels_last)


def weight_gradient(
    input: Tensor, grad_output: Tensor, kernel_size: Pair, geometry: Geometry, channels_last: bool
) -> Tensor:
    """The gradient of the weight, by `aten::convolution_backward`."""
    # Only the size and the memory format of this weight are read.
    weight = fake.weight_gradient(input, grad_output, kernel_size, geometry, channels_last)
    return _with_format(_backward(grad_output, input, weight, geometry, 1), channels_last)


def _backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, geometry: Geometry, which: int
) -> Tensor:
    """The gradient of the input (0) or of the weight (1)."""
    stride, padding, output_padding, dilation, groups = geometry
    wanted = [which == 0, which == 1, False]
    return _aten.convolution_backward.default(
        grad_output,
        input,
        weight,
        None,
        stride,
        padding,
        dilation,
        True,
        output_padding,
        groups,
        wanted,
    )[which]


def _with_format(tensor: Tensor, channels_last: bool) -> Tensor:
    """A dense result with the strides promised of it, copied only where they are not so.

    NOTE: where a size of 1 makes both formats fit, what PyTorch's CPU operators pick differs from
    dtype to dtype, and from what its own fake tensors say.
    """
    shape = tuple(max(size, 1) for size in tensor.shape)
    if tensor.stride() == dense_strides(shape, channels_last):
        return tensor
    return fake.empty(tensor, tensor.shape, channels_last).copy_(tensor)
