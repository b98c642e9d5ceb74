"""Draws the 150 layers of results/h200/random150.json, by a fixed seed.

    PYTHONPATH=src python benchmarks/random150.py            # writes the file
    PYTHONPATH=src python benchmarks/random150.py --plans    # and prints the plans
    tconv bench --layers benchmarks/results/h200/random150.json --against eager,best

30 of them belong to classes in which cuDNN was once ahead, and have names. The others are drawn
over the range of layers that are in use. No layer was left out for its result.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
from pathlib import Path

from tconv.bench.floors import H200, floor
from tconv.jit.target import Target
from tconv.layers import Layer
from tconv.plan import plan

SEED = 150
COUNT = 150
MOST_ELEMENTS = 2e8
"""Of input and output together."""
MOST_FLOPS = 1e11
LEAST_ELEMENTS = 1e5
"""Of the output: with fewer, launches are all that there is to time."""

FILE = Path(__file__).parent / "results" / "h200" / "random150.json"


def named(draw: random.Random) -> list[Layer]:
    """Layers of the classes in which cuDNN was once ahead."""
    found: list[Layer] = []

    def add(name: str, text: str, images: str) -> None:
        found.append(dataclasses.replace(Layer.parse(text, images), name=name, bias=False))

    for number in range(8):
        channels, outputs = draw.choice((8, 9, 10, 12)), draw.choice((32, 48, 64, 96, 128, 256))
        kernel, size = draw.choice((5, 6)), draw.choice((48, 64, 100, 128, 200))
        text = f"{channels},{outputs},{kernel},padding={draw.choice((0, kernel // 2))}"
        add(f"few_channels_{number}", text, f"{draw.choice((4, 8))}x{size}x{size}")
    for number, (bins, length, hop) in enumerate(
        ((514, 512, 128), (514, 400, 100), (1026, 1024, 256), (402, 400, 160))
    ):
        frames = draw.choice((200, 256, 400, 1000))
        text = f"{bins},1,1x{length},stride=1x{hop}"
        add(f"inverse_stft_{number}", text, f"{draw.choice((4, 8, 16))}x1x{frames}")
    for number in range(8):
        channels, outputs = draw.choice((3, 8, 12, 16, 24, 32)), draw.choice((3, 8, 16, 32, 64))
        size = draw.choice((64, 100, 128, 256))
        add(f"pointwise_{number}", f"{channels},{outputs},1", f"8x{size}x{size}")
    for number in range(5):
        channels, size = draw.choice((24, 32, 64, 96, 144)), draw.choice((28, 56, 64, 112))
        more = draw.choice(("", ",output_padding=1"))
        text = f"{channels},{channels},1,stride=2,groups={channels}{more}"
        add(f"depthwise_1x1_{number}", text, f"{draw.choice((8, 16))}x{size}x{size}")
    for number in range(5):
        size, padding = draw.choice((32, 64, 100, 128, 224)), draw.choice((0, 1))
        text = f"16,64,3,padding={padding}"
        add(f"16_to_64_{number}", text, f"{draw.choice((4, 8, 16))}x{size}x{size}")
    return found


def log_uniform(draw: random.Random, least: int, most: int) -> int:
    """An integer whose logarithm is uniform."""
    return round(math.exp(draw.uniform(math.log(least), math.log(most))))


def channel_count(draw: random.Random) -> int:
    """Channels: as drawn in a quarter of all cases, else rounded as people round them."""
    count = log_uniform(draw, 1, 512)
    if draw.random() < 0.25 or count < 4:
        return count
    unit = 16 if count >= 24 else 4
    return max(unit, round(count / unit) * unit)


def drawn(draw: random.Random, name: str) -> Layer | None:
    """A random layer, or None if there is none of these parameters or it is too large or small."""
    is_signal = draw.random() < 0.15
    in_channels, out_channels, groups = channel_count(draw), channel_count(draw), 1
    if draw.random() < 0.12:  # depthwise
        out_channels = groups = in_channels
    elif draw.random() < 0.12:
        groups = draw.choice((2, 4, 8))
        in_channels, out_channels = (-(-c // groups) * groups for c in (in_channels, out_channels))
    kernel_x, stride_x = draw.randint(1, 9), draw.choice((1, 1, 2, 2, 2, 3, 4))
    kernel_y, stride_y = kernel_x, stride_x
    if draw.random() < 0.2:
        kernel_y, stride_y = draw.randint(1, 9), draw.choice((1, 2, stride_x))
    dilation = draw.choice((1, 1, 1, 1, 1, 1, 1, 2, 3))
    batch = log_uniform(draw, 1, 64)
    width = log_uniform(draw, 4, 512)
    height = width if draw.random() < 0.7 else log_uniform(draw, 4, 512)
    if is_signal:
        kernel_y = stride_y = height = 1
        width = log_uniform(draw, 64, 16384)
        kernel_x, stride_x = draw.choice(
            ((3, 1), (7, 1), (4, 2), (8, 4), (11, 5), (16, 8), (20, 10), (kernel_x, stride_x))
        )
    padding = [draw.randint(0, dilation * (k - 1) // 2) for k in (kernel_y, kernel_x)]
    extra = [draw.choice((0, 0, s - 1)) for s in (stride_y, stride_x)]
    try:
        layer = Layer(
            in_channels=in_channels,
            out_channels=out_channels,
            kernel_size=(kernel_y, kernel_x),
            stride=(stride_y, stride_x),
            padding=(padding[0], padding[1]),
            output_padding=(extra[0], extra[1]),
            groups=groups,
            bias=False,
            dilation=(dilation if kernel_y > 1 else 1, dilation if kernel_x > 1 else 1),
            batch=batch,
            height=height,
            width=width,
            name=name,
        )
    except ValueError:
        return None
    fits = elements(layer) <= MOST_ELEMENTS and flops(layer) <= MOST_FLOPS
    return layer if fits and math.prod(layer.y_shape) >= LEAST_ELEMENTS else None


def elements(layer: Layer) -> int:
    """Of input and output."""
    return math.prod(layer.x_shape) + math.prod(layer.y_shape)


def flops(layer: Layer) -> int:
    """Of the forward."""
    return layer.problem("forward").flops


def layers() -> list[Layer]:
    """The 150."""
    draw = random.Random(SEED)
    found = named(draw)
    while len(found) < COUNT:
        layer = drawn(draw, f"drawn_{len(found)}")
        if layer is not None:
            found.append(layer)
    return found


def main() -> None:
    """Writes the file."""
    found = layers()
    lines = (json.dumps(layer.record()) for layer in found)
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    print(f"{len(found)} layers in {FILE}")
    if "--plans" in sys.argv[1:]:
        for layer in found:
            problem = layer.problem("forward")
            chosen, least = plan(problem, Target.named("sm_90a")), floor(problem, H200).seconds
            print(
                f"{chosen.cost * 1e6:9.1f} us, {chosen.cost / least:5.1f} of the floor: "
                f"{chosen.stem} {chosen.tile}, {problem.math}, {layer}"
            )


if __name__ == "__main__":
    main()
