"""Fake implementations: size, strides, dtype and device of a result, for symbolic sizes too."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tconv import private
from tconv.memory_format import empty, is_channels_last
from tconv.problem import Geometry, Pair


def output_size(input_size: Sequence[int], kernel_size: Sequence[int], geometry: Geometry) -> Pair:
    """Height and width of the output, in pixels; two sizes are given, (height, width) each."""
    stride, padding, output_padding, dilation, _ = geometry
    height = (input_size[0] - 1) * stride[0] - 2 * padding[0] + dilation[0] * (kernel_size[0] - 1)
    width = (input_size[1] - 1) * stride[1] - 2 * padding[1] + dilation[1] * (kernel_size[1] - 1)
    return height + output_padding[0] + 1, width + output_padding[1] + 1


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """An empty output."""
    image = input.shape[2:]
    spatial = output_size(image, weight.shape[2:], geometry)
    for size in spatial:
        private.check(
            size >= 0,
            lambda: (
                f"Given input size per channel: {list(image)}. "
                f"Calculated output size per channel: {list(spatial)}. Output size is too small"
            ),
        )
    return empty(
        input,
        (input.shape[0], weight.shape[1] * geometry[4], *spatial),
        is_channels_last(input) or is_channels_last(weight),
    )


def input_gradient(
    grad_output: Tensor, weight: Tensor, input_size: Pair, geometry: Geometry
) -> Tensor:
    """An empty gradient of the input."""
    return empty(
        grad_output,
        (grad_output.shape[0], weight.shape[0], *input_size),
        is_channels_last(grad_output) or is_channels_last(weight),
    )


def weight_gradient(
    input: Tensor, grad_output: Tensor, kernel_size: Pair, geometry: Geometry, channels_last: bool
) -> Tensor:
    """An empty gradient of the weight."""
    shape = (input.shape[1], grad_output.shape[1] // geometry[4], *kernel_size)
    return empty(input, shape, channels_last)
