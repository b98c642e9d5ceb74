"""A wide image and a padded wide kernel: the layer of KernelBench's level 1 problem 78."""

import torch
import torch.nn as nn

batch = 8
height, width = 512, 1024
in_channels = 32
out_channels = 32
kernel_size = (3, 7)
padding = (1, 3)


class Model(nn.Module):
    """One transposed convolution without a bias."""

    def __init__(self, in_channels, out_channels, kernel_size, padding):
        super().__init__()
        self.conv_transpose2d = nn.ConvTranspose2d(
            in_channels,
            out_channels,
            kernel_size,
            padding=padding,
            bias=False,
        )

    def forward(self, x):
        """[batch, in_channels, height, width] to [batch, out_channels, ...]."""
        return self.conv_transpose2d(x)


def get_inputs():
    return [torch.rand(batch, in_channels, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, padding]
