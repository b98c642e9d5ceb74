"""Two up-sampling networks as people write them, with nothing of tconv in them.

Both use smooth activations only (no ReLU, no max-pooling): where a unit sits on its kink, rounding
alone decides which side it falls, and the gradients of two right computations differ by far more
than rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def bilinear_kernel(size: int) -> Tensor:
    """The weights of bilinear up-sampling by `size // 2`, `[size, size]`, float32."""
    factor = (size + 1) // 2
    centre = factor - 1 if size % 2 == 1 else factor - 0.5
    axis = 1 - (torch.arange(size, dtype=torch.float32) - centre).abs() / factor
    return axis[:, None] * axis[None, :]


def bilinear_layer(channels: int, factor: int, groups: int) -> nn.ConvTranspose2d:
    """A transposed convolution that starts as bilinear up-sampling of each channel by `factor`."""
    layer = nn.ConvTranspose2d(
        channels,
        channels,
        kernel_size=2 * factor,
        stride=factor,
        padding=factor // 2,
        groups=groups,
        bias=False,
    )
    with torch.no_grad():
        layer.weight.zero_()
        per_group = channels // groups
        for channel in range(channels):
            layer.weight[channel, channel % per_group] = bilinear_kernel(2 * factor)
    return layer


class FcnHead(nn.Module):
    """The head of FCN-8s: x2, add a skip, x2, add a skip, x8, all bilinear at the start.

    `forward(coarse [N, C, H/32, W/32], skip16 [N, C, H/16, W/16], skip8 [N, C, H/8, W/8])` gives
    `[N, C, H, W]`. In FCN-8s the inputs are class scores; here they are the bands of a picture,
    so that what comes out can be looked at.
    """

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.up2a = bilinear_layer(channels, 2, groups=1)
        self.up2b = bilinear_layer(channels, 2, groups=1)
        self.up8 = bilinear_layer(channels, 8, groups=channels)

    def forward(self, coarse: Tensor, skip16: Tensor, skip8: Tensor) -> Tensor:
        """Up-sample to the full size; see the class for the shapes."""
        at_16: Tensor = self.up2a(coarse) + skip16
        at_8: Tensor = self.up2b(at_16) + skip8
        upsampled: Tensor = self.up8(at_8)
        return upsampled


def picture_bands(picture: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split a picture `[N, C, H, W]` into what `FcnHead` adds up again, at an 8th of its size."""
    coarse, at_16, at_8 = (F.avg_pool2d(picture, factor) for factor in (32, 16, 8))

    def upsample(bands: Tensor) -> Tensor:
        return F.interpolate(bands, scale_factor=2, mode="bilinear", align_corners=False)

    return coarse, at_16 - upsample(coarse), at_8 - upsample(at_16)


class UNet(nn.Module):
    """A small U-Net: four strided convolutions down, four transposed ones up, skips between.

    `forward(picture [N, 3, H, W])` gives `[N, 3, H, W]`, with H and W multiples of 16. The way up
    uses the two usual layers in turn: kernel 2 stride 2, and kernel 4 stride 2 padding 1.
    """

    WIDTHS = (16, 32, 48, 64)

    def __init__(self) -> None:
        super().__init__()
        at_2, at_4, at_8, at_16 = self.WIDTHS
        self.down = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2, padding=1)
            for before, after in zip((3, at_2, at_4, at_8), self.WIDTHS, strict=True)
        )
        self.up8 = nn.ConvTranspose2d(at_16, at_8, 2, stride=2)
        self.mix8 = nn.Conv2d(2 * at_8, at_8, 3, padding=1)
        self.up4 = nn.ConvTranspose2d(at_8, at_4, 4, stride=2, padding=1)
        self.mix4 = nn.Conv2d(2 * at_4, at_4, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(at_4, at_2, 2, stride=2)
        self.mix2 = nn.Conv2d(2 * at_2, at_2, 3, padding=1)
        self.up1 = nn.ConvTranspose2d(at_2, 3, 4, stride=2, padding=1)

    def forward(self, picture: Tensor) -> Tensor:
        """Down to a 16th of the size and up again; see the class for the shapes."""
        skips = []
        features = picture
        for down in self.down:
            features = F.silu(down(features))
            skips.append(features)
        at_2, at_4, at_8, features = skips
        features = F.silu(self.mix8(torch.cat((self.up8(features), at_8), 1)))
        features = F.silu(self.mix4(torch.cat((self.up4(features), at_4), 1)))
        features = F.silu(self.mix2(torch.cat((self.up2(features), at_2), 1)))
        painted: Tensor = self.up1(features)
        return painted
