"""No two of the parameters alike: the layer of KernelBench's level 1 problem 75."""

import torch
import torch.nn as nn

batch = 16
height, width = 128, 256
in_channels = 32
out_channels = 64
kernel_size = (3, 5)
stride = (2, 3)
padding = (1, 2)
dilation = (2, 1)
groups = 4


class Model(nn.Module):
    """One transposed convolution without a bias."""

    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, dilation, groups):
        super().__init__()
        self.conv_transpose2d = nn.ConvTranspose2d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=False,
        )

    def forward(self, x):
        """[batch, in_channels, height, width] to [batch, out_channels, ...]."""
        return self.conv_transpose2d(x)


def get_inputs():
    return [torch.rand(batch, in_channels, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, stride, padding, dilation, groups]
