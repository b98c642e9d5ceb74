"""Whole models, PyTorch's time over tconv's after `tconv.convert`, inference and training.

    python benchmarks/models.py [--csv FILE] [--gpu-name NAME] [--own-kernels] [--graph] [--host]

Each model runs with its own weights in PyTorch and, converted, in tconv, in turns, each timing a
few steps between two CUDA events. Inference is a forward pass in inference mode, training a forward
and a backward pass. The ratio is the median over the turns, since a host's speed drifts.
`--gpu-name` pretends another GPU, of which no committed row speaks. With `--graph` each step is a
CUDA graph, so that the host's time does not count. With `--host` it alone counts: the GPU sleeps
while the host prepares the steps.

A copy of PyTorch's model runs in the same turns. Its ratio, `control`, is the noise of the host.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean, median

import torch
from torch import Tensor, nn

import tconv

ROUNDS = 21
SECONDS = 3.0
"""Turns of each entry: at least so many, and for at least so long, as hosts are noisy."""

FIRST_STEPS = 72
"""Of ours, before any is timed: in most of them it is watched whether a program waits for the
device (`tconv.tuning.Watch`)."""

SLEEP, HOST_STEPS = 60_000_000, 4
"""Cycles that the GPU sleeps with `--host`, some 30 ms, and steps that the host prepares then."""

MODES = {
    "float32": (False, False),
    "float32 channels_last": (False, True),
    "bf16 autocast": (True, False),
    "bf16 autocast channels_last": (True, True),
}


def block(into: int, out: int) -> nn.Sequential:
    """Two 3x3 convolutions, normalised."""
    layers: list[nn.Module] = []
    for channels in (into, out):
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Four levels, transposed convolutions of 2x2 with stride 2."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = [width << level for level in range(5)]
        self.down = nn.ModuleList(block(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        pairs = list(zip(sizes[:0:-1], sizes[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.merge = nn.ModuleList(block(a, b) for a, b in pairs)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each pixel."""
        kept = []
        for level, down in enumerate(self.down):
            x = down(x if level == 0 else nn.functional.max_pool2d(x, 2))
            kept.append(x)
        for up, merge, skip in zip(self.up, self.merge, kept[-2::-1], strict=True):
            x = merge(torch.cat((up(x), skip), 1))
        return self.head(x)


def dcgan() -> nn.Module:
    """The generator of DCGAN, 64 x 64."""
    layers: list[nn.Module] = []
    for a, b, stride, padding in (
        (100, 512, 1, 0),
        (512, 256, 2, 1),
        (256, 128, 2, 1),
        (128, 64, 2, 1),
    ):
        layers += [
            nn.ConvTranspose2d(a, b, 4, stride, padding, bias=False),
            nn.BatchNorm2d(b),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh())


class Vocoder(nn.Module):
    """The upsampler of HiFi-GAN, one residual convolution a stage; 1-d, or 2-d of height 1."""

    def __init__(self, two_d: bool) -> None:
        super().__init__()
        conv = nn.Conv2d if two_d else nn.Conv1d
        transposed = nn.ConvTranspose2d if two_d else nn.ConvTranspose1d

        def along(size: int, other: int = 0) -> int | tuple[int, int]:
            return (other, size) if two_d else size

        self.first = conv(80, 512, along(7, 1), padding=along(3))
        self.up, self.residual = nn.ModuleList(), nn.ModuleList()
        channels = 512
        for kernel, stride in ((16, 8), (16, 8), (4, 2), (4, 2)):
            self.up.append(
                transposed(
                    channels,
                    channels // 2,
                    along(kernel, 1),
                    along(stride, 1),
                    along((kernel - stride) // 2),
                )
            )
            channels //= 2
            self.residual.append(conv(channels, channels, along(3, 1), padding=along(1)))
        self.last = conv(channels, 1, along(7, 1), padding=along(3))

    def forward(self, x: Tensor) -> Tensor:
        """A wave from mel bands."""
        x = self.first(x)
        for up, residual in zip(self.up, self.residual, strict=True):
            x = up(nn.functional.leaky_relu(x, 0.1))
            x = x + residual(x)
        return torch.tanh(self.last(x))


def pose_head() -> nn.Module:
    """The head of SimpleBaseline on ResNet-50's features."""
    layers: list[nn.Module] = []
    for into in (2048, 256, 256):
        layers += [
            nn.ConvTranspose2d(into, 256, 4, 2, 1, bias=False),
            nn.BatchNorm2d(256),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.Conv2d(256, 17, 1))


def mask_head() -> nn.Module:
    """The mask head of Mask R-CNN."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.ConvTranspose2d(256, 256, 2, 2), nn.ReLU(), nn.Conv2d(256, 80, 1)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "U-Net 512 x 512": (UNet, (2, 3, 512, 512)),
    "DCGAN 64": (dcgan, (128, 100, 1, 1)),
    "HiFi-GAN upsampler": (lambda: Vocoder(True), (16, 80, 1, 32)),
    "HiFi-GAN upsampler, 1-d": (lambda: Vocoder(False), (16, 80, 32)),
    "pose head": (pose_head, (32, 2048, 8, 6)),
    "mask head": (mask_head, (100, 256, 14, 14)),
}


def step(model: nn.Module, x: Tensor, autocast: bool, training: bool) -> Callable[[], Tensor]:
    """One step of a model."""

    def run() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            if not training:
                with torch.inference_mode():
                    return model(x)
            out = model(x)
            loss = out.float().square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return out.detach()

    return run


def captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The same step as a CUDA graph. Its result is overwritten by the next replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def timed(run: Callable[[], Tensor], count: int) -> float:
    """Milliseconds of a step between two CUDA events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def timed_on_the_host(run: Callable[[], Tensor], _: int) -> float:
    """Milliseconds that a step takes the host, of a few that the driver's queue has room for."""
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    begin = time.perf_counter()
    for _ in range(HOST_STEPS):
        run()
    found = (time.perf_counter() - begin) / HOST_STEPS * 1e3
    torch.cuda.synchronize()
    return found


def race(
    steps: list[Callable[[], Tensor]], timed: Callable[[Callable[[], Tensor], int], float]
) -> list[list[float]]:
    """Milliseconds of each in turns, each turn a few steps."""
    for run in steps:
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    steps[0]()
    torch.cuda.synchronize()
    count = max(2, min(20, int(0.01 / (time.perf_counter() - start))))
    found: list[list[float]] = [[] for _ in steps]
    started = time.perf_counter()
    for turn in itertools.count():
        if turn >= ROUNDS and time.perf_counter() - started > SECONDS:
            break
        order = list(zip(steps, found, strict=True))
        first = turn // 2 % len(order)
        turned = order[first:] + order[:first]
        for run, times in turned if turn % 2 else turned[::-1]:
            times.append(timed(run, count))
    return found


def main() -> None:
    """Prints the table; writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--gpu-name")
    parser.add_argument("--own-kernels", action="store_true")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--only", default="")
    parsed = parser.parse_args()
    name = torch.cuda.get_device_name()
    if parsed.gpu_name:
        torch.cuda.get_device_name = lambda *_: parsed.gpu_name
    rows = []
    for title, (make, shape) in MODELS.items():
        if parsed.only not in title:
            continue
        for mode, (autocast, channels_last) in MODES.items():
            if channels_last and len(shape) != 4:
                continue
            torch.manual_seed(0)
            model = make().cuda()
            x = torch.randn(shape, device="cuda")
            if channels_last:
                model = model.to(memory_format=torch.channels_last)
                x = x.to(memory_format=torch.channels_last)
            converted, again = copy.deepcopy(model), copy.deepcopy(model)
            turned = tconv.convert(converted)
            ratios = []
            for training in (False, True):
                tconv.statistics(reset=True)
                own = tconv.own_kernels() if parsed.own_kernels else contextlib.nullcontext()
                steps = [step(m, x, autocast, training) for m in (model, converted, again)]
                with own:
                    if parsed.graph:
                        steps = [captured(run) for run in steps]
                    apart = (steps[0]() - steps[1]()).norm() / steps[0]().norm()
                    for _ in range(0 if parsed.graph else FIRST_STEPS):
                        steps[1]()
                    theirs, ours, copied = race(steps, timed_on_the_host if parsed.host else timed)
                ratio = median(a / b for a, b in zip(theirs, ours, strict=True))
                control = median(a / b for a, b in zip(theirs, copied, strict=True))
                ratios.append(f"{ratio:.3f} ({control:.3f})")
                ran = {f"{row.direction} {row.kernel}: {row.reason}" for row in tconv.statistics()}
                rows.append(
                    {
                        "model": title,
                        "mode": mode,
                        "training": training,
                        "layers": turned,
                        "pytorch_ms": median(theirs),
                        "tconv_ms": median(ours),
                        "ratio": ratio,
                        "control": control,
                        "apart": float(apart),
                        "graph": parsed.graph,
                        "host": parsed.host,
                        **{
                            f"{who}_turns_ms": " ".join(f"{time:.4f}" for time in times)
                            for who, times in (
                                ("pytorch", theirs),
                                ("tconv", ours),
                                ("control", copied),
                            )
                        },
                        "ran": "; ".join(sorted(ran)),
                        "gpu": name,
                        "as": parsed.gpu_name or name,
                        "torch": torch.__version__,
                    }
                )
            print(f"{title}, {mode}: {', '.join(ratios)} (apart {float(apart):.1e})", flush=True)
    ratios = [row["ratio"] for row in rows]
    print(f"least {min(ratios):.3f}, geometric mean {geometric_mean(ratios):.3f}")
    if parsed.csv:
        with parsed.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
