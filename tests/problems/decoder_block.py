"""A layer among other operators, as in a decoder: they stay as they are."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class Scale(nn.Module):
    """Multiplies by one learned number."""

    def __init__(self, value):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, x):
        return x * self.value


class Model(nn.Module):
    """Normalise, double the size, scale, add; the second convolution is a function's call."""

    def __init__(self, in_channels: int, out_channels: int, gain: float = math.sqrt(2)):
        super().__init__()
        self.norm = nn.GroupNorm(2, in_channels)
        self.up = nn.ConvTranspose2d(in_channels, out_channels, 4, stride=2, padding=1)
        self.scale = Scale(gain)
        self.mixing = nn.Parameter(torch.randn(out_channels, 1, 3, 3) * 0.1)
        self.groups = out_channels

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.scale(self.up(self.norm(x))))  # the layer stands in the middle
        return y + F.conv_transpose2d(skip, self.mixing, padding=1, groups=self.groups)


def get_inputs():
    return [torch.randn(2, 6, 5, 4), torch.randn(2, 4, 10, 8)]


def get_init_inputs():
    return [6, 4]
