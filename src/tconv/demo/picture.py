"""The photograph that goes in, and the pictures that come out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor


def photograph(path: Path | None, size: int) -> Tensor:
    """A picture as `[1, 3, size, size]`, float32 in 0..1.

    Args:
        path: a picture file, cut to its central square; None for the photograph of the astronaut
            Eileen Collins (NASA, public domain) that scikit-image carries.
        size: the height and width to scale it to.

    Raises:
        OSError: the file cannot be read as a picture.
    """
    if path is None:
        from skimage import data

        image = Image.fromarray(data.astronaut())
    else:
        image = Image.open(path).convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    image = image.crop((left, top, left + side, top + side))
    if side != size:
        image = image.resize((size, size), Image.Resampling.LANCZOS)
    pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 255)
    return pixels.permute(2, 0, 1)[None].contiguous()


def to_image(picture: Tensor) -> Image.Image:
    """`[1, 3, H, W]` in 0..1 (clipped) as an 8-bit image."""
    pixels = picture.detach()[0].permute(1, 2, 0).clamp(0, 1).mul(255).round()
    return Image.fromarray(pixels.to(torch.uint8).cpu().numpy())


def amplified_difference(one: Tensor, other: Tensor) -> tuple[Tensor, float]:
    """|one - other| times a round factor that takes it nearly to 1, and the factor (1 if equal)."""
    difference = (one.detach().double() - other.detach().double()).abs()
    largest = float(difference.max())
    if largest == 0:
        return difference.float(), 1.0
    power = 10.0 ** math.floor(-math.log10(largest))
    factor = power * math.floor(1 / (largest * power))
    return (difference * factor).float(), factor


def contact_sheet(rows: Sequence[Sequence[tuple[str, Tensor]]]) -> Image.Image:
    """All pictures `[1, 3, H, W]` on one sheet, each under its caption."""
    edge = max(picture.shape[-1] for row in rows for _, picture in row)
    gap, caption = 12, 28
    columns = max(len(row) for row in rows)
    width = columns * (edge + gap) + gap
    sheet = Image.new("RGB", (width, len(rows) * (edge + caption + gap) + gap), "white")
    draw = ImageDraw.Draw(sheet)
    for i, row in enumerate(rows):
        for j, (text, picture) in enumerate(row):
            left, top = gap + j * (edge + gap), gap + i * (edge + caption + gap)
            draw.text((left, top + 4), text, fill="black", font_size=max(12, min(18, edge // 14)))
            sheet.paste(
                to_image(picture).resize((edge, edge), Image.Resampling.NEAREST),
                (left, top + caption),
            )
    return sheet
