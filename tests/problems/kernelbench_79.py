"""One dimension, half of the phases empty: the layer of KernelBench's level 1 problem 79."""

import torch
import torch.nn as nn

batch = 16
length = 131072
in_channels = 32
out_channels = 64
kernel_size = 3
stride = 2
padding = 1
dilation = 2


class Model(nn.Module):
    """One transposed convolution without a bias."""

    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, dilation):
        super().__init__()
        self.conv_transpose1d = nn.ConvTranspose1d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            bias=False,
        )

    def forward(self, x):
        """[batch, in_channels, length] to [batch, out_channels, ...]."""
        return self.conv_transpose1d(x)


def get_inputs():
    return [torch.rand(batch, in_channels, length)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, stride, padding, dilation]
