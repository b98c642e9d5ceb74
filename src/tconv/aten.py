"""The three maps by PyTorch's own operators."""

from __future__ import annotations

import torch
from torch import Tensor

from tconv.memory_format import empty, is_channels_last, memory_format
from tconv.problem import Geometry, Pair, dense_strides

# It has no faster name in Python, as `torch.convolution` has.
_convolution_backward = torch.ops.aten.convolution_backward.default


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """The output, by `aten::convolution`."""
    stride, padding, output_padding, dilation, groups = geometry
    output = torch.convolution(
        input, weight, bias, stride, padding, dilation, True, output_padding, groups
    )
    return _with_format(output, is_channels_last(input) or is_channels_last(weight))


def input_gradient(
    grad_output: Tensor, weight: Tensor, input_size: Pair, geometry: Geometry
) -> Tensor:
    """The gradient of the input, by `aten::convolution_backward`."""
    channels_last = is_channels_last(grad_output) or is_channels_last(weight)
    shape = (grad_output.shape[0], weight.shape[0], *input_size)
    # Only the size and the memory format of this input are read.
    input = empty(grad_output, shape, channels_last)
    gradient = backward(grad_output, input, weight, geometry, (True, False))[0]
    assert gradient is not None
    return _with_format(gradient, channels_last)


def weight_gradient(
    input: Tensor, grad_output: Tensor, kernel_size: Pair, geometry: Geometry, channels_last: bool
) -> Tensor:
    """The gradient of the weight, by `aten::convolution_backward`."""
    shape = (input.shape[1], grad_output.shape[1] // geometry[4], *kernel_size)
    # Only the size and the memory format of this weight are read.
    weight = empty(input, shape, channels_last)
    gradient = backward(grad_output, input, weight, geometry, (False, True))[1]
    assert gradient is not None
    return _with_format(gradient, channels_last)


def gradients(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    geometry: Geometry,
    channels_last: bool,
) -> tuple[Tensor, Tensor]:
    """Both gradients by one `aten::convolution_backward`.

    Their memory formats are those of `input_gradient` and `weight_gradient`; `channels_last` is of
    the weight's.
    """
    grad_input, grad_weight = backward(grad_output, input, weight, geometry, (True, True))
    assert grad_input is not None and grad_weight is not None
    input_format = is_channels_last(grad_output) or is_channels_last(weight)
    return (
        _with_format(grad_input, input_format),
        _with_format(grad_weight, channels_last),
    )


def backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    geometry: Geometry,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the input and the weight; None where it is not wanted."""
    stride, padding, output_padding, dilation, groups = geometry
    grad_input, grad_weight, _ = _convolution_backward(
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
        (*wanted, False),
    )
    return grad_input, grad_weight


def _with_format(tensor: Tensor, channels_last: bool) -> Tensor:
    """A dense result with the strides promised of it, copied only where they are not so.

    NOTE: where a size of 1 makes both formats fit, what PyTorch's CPU operators pick differs from
    dtype to dtype, and from what its own fake tensors say.
    """
    shape = tuple(max(size, 1) for size in tensor.shape)
    if tensor.stride() == dense_strides(shape, channels_last):
        return tensor
    return tensor.clone(memory_format=memory_format(channels_last))
