"""A layer given by options instead of a file: its parameters, and its text as a problem file."""

from __future__ import annotations

from dataclasses import dataclass

Pair = tuple[int, int]


@dataclass(frozen=True)
class Layer:
    """The arguments of one `ConvTranspose2d`, and the input to plan for.

    With `dimensions` of 1 it is a `ConvTranspose1d`, and all heights are what changes nothing: 1,
    or a padding of 0.

    Attributes:
        in_channels, out_channels, groups, bias: as in `ConvTranspose2d`.
        kernel_size, stride, padding, output_padding, dilation: (height, width).
        batch: images in the input.
        size: (height, width) of the input.
    """

    in_channels: int
    out_channels: int
    kernel_size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    output_padding: Pair = (0, 0)
    groups: int = 1
    bias: bool = True
    dilation: Pair = (1, 1)
    batch: int = 16
    size: Pair = (64, 64)
    dimensions: int = 2

    def problem_text(self) -> str:
        """The layer as a file with `Model`, `get_inputs` and `get_init_inputs`."""

        def sizes(pair: Pair) -> tuple[int, ...]:
            return pair[2 - self.dimensions :]

        input_sizes = (self.batch, self.in_channels, *sizes(self.size))
        return f'''\
import torch
import torch.nn as nn


class Model(nn.Module):
    """One transposed convolution."""

    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        output_padding=0,
        groups=1,
        bias=True,
        dilation=1,
    ):
        super().__init__()
        self.conv_transpose{self.dimensions}d = nn.ConvTranspose{self.dimensions}d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            bias=bias,
            dilation=dilation,
        )

    def forward(self, x):
        return self.conv_transpose{self.dimensions}d(x)


def get_inputs():
    return [torch.rand({", ".join(map(str, input_sizes))})]


def get_init_inputs():
    return [
        {self.in_channels},  # in_channels
        {self.out_channels},  # out_channels
        {sizes(self.kernel_size)},  # kernel_size
        {sizes(self.stride)},  # stride
        {sizes(self.padding)},  # padding
        {sizes(self.output_padding)},  # output_padding
        {self.groups},  # groups
        {self.bias},  # bias
        {sizes(self.dilation)},  # dilation
    ]
'''
