"""Wide strides, dilated kernel, empty phases: KernelBench's level 1 problem 81."""

import torch
import torch.nn as nn

batch = 16
height, width = 64, 128
in_channels = 32
out_channels = 64
kernel_size = 3
stride = 5
padding = 1
dilation = 2


class Model(nn.Module):
    """One transposed convolution without a bias."""

    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, dilation):
        super().__init__()
        self.conv_transpose2d = nn.ConvTranspose2d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            bias=False,
        )

    def forward(self, x):
        """[batch, in_channels, height, width] to [batch, out_channels, ...]."""
        return self.conv_transpose2d(x)


def get_inputs():
    return [torch.rand(batch, in_channels, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, stride, padding, dilation]
