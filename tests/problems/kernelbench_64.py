"""One dimension, stride 1: the layer of KernelBench's level 1 problem 64."""

import torch
import torch.nn as nn

batch = 64
length = 65536
in_channels = 128
out_channels = 128
kernel_size = 3


class Model(nn.Module):
    """One transposed convolution without a bias."""

    def __init__(self, in_channels, out_channels, kernel_size):
        super().__init__()
        self.conv_transpose1d = nn.ConvTranspose1d(
            in_channels, out_channels, kernel_size, bias=False
        )

    def forward(self, x):
        """[batch, in_channels, length] to [batch, out_channels, ...]."""
        return self.conv_transpose1d(x)


def get_inputs():
    return [torch.rand(batch, in_channels, length)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size]
