"""A wide image and a wide kernel: the layer of KernelBench's level 1 problem 69."""

import torch
import torch.nn as nn

batch = 64
height, width = 128, 256
in_channels = 64
out_channels = 128
kernel_size = (3, 5)


class Model(nn.Module):
    """One transposed convolution without a bias."""

    def __init__(self, in_channels, out_channels, kernel_size):
        super().__init__()
        self.conv_transpose2d = nn.ConvTranspose2d(
            in_channels,
            out_channels,
            kernel_size,
            bias=False,
        )

    def forward(self, x):
        """[batch, in_channels, height, width] to [batch, out_channels, ...]."""
        return self.conv_transpose2d(x)


def get_inputs():
    return [torch.rand(batch, in_channels, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size]
