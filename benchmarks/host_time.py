"""What a call costs the host: PyTorch's function, tconv's default, and our kernels alone.

    python benchmarks/host_time.py [--csv FILE]

Microseconds a call of 20 that are queued, medians of `ROUNDS` rounds in turns, on layers so small
that the device waits for the host. Forward without gradients, and forward with backward.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import time
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean, median

import torch
import torch.nn.functional as F

import tconv
from tconv.layers import Layer

LAYERS = {
    "64 to 32, 4x4 stride 2": ("64,32,4,2,1", "1x8x8"),
    "16 depthwise, 4x4 stride 2": ("16,16,4,2,1,groups=16", "1x8x8"),
    "64 to 64, 3x3": ("64,64,3,1,1", "1x16x16"),
    "128 to 64, 2x2 stride 2": ("128,64,2,2", "1x8x8"),
    "256 to 128, 4x4 stride 2": ("256,128,4,2,1", "1x4x4"),
}
CALLS = 20
ROUNDS = 40
OWN = "own kernels"


def kernels(name: str) -> contextlib.AbstractContextManager[None]:
    """Around the calls of a contestant, not around each: entering takes as long as a check."""
    return tconv.own_kernels() if name == OWN else contextlib.nullcontext()


def calls(layer: Layer, backward: bool) -> dict[str, Callable[[], object]]:
    """A call by each contestant."""
    x = torch.randn(layer.x_shape, device="cuda", requires_grad=backward)
    w = torch.randn(layer.w_shape, device="cuda", requires_grad=backward)
    b = torch.randn(layer.out_channels, device="cuda", requires_grad=backward)
    y = torch.randn(layer.y_shape, device="cuda")
    stride, padding, output_padding, dilation, groups = layer.geometry

    def call(function: Callable[..., torch.Tensor]) -> Callable[[], object]:
        def run() -> object:
            out = function(x, w, b, stride, padding, output_padding, groups, dilation)
            return torch.autograd.grad(out, (x, w, b), y) if backward else out

        return run

    ours = call(tconv.conv_transpose2d)
    return {"pytorch": call(F.conv_transpose2d), "tconv": ours, OWN: ours}


def measure(contestants: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds a call of each."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for name, run in contestants.items():
        with kernels(name):
            for _ in range(30):
                run()
    for _ in range(ROUNDS):
        for name, run in contestants.items():
            torch.cuda.synchronize()
            with kernels(name):
                start = time.perf_counter()
                for _ in range(CALLS):
                    run()
                found[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: median(values) for name, values in found.items()}


def main() -> None:
    """Prints the table; writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    parsed = parser.parse_args()
    rows = []
    for backward in (False, True):
        what = "forward + backward" if backward else "forward"
        for name, (text, size) in LAYERS.items():
            grad = contextlib.nullcontext() if backward else torch.no_grad()
            with grad:
                found = measure(calls(Layer.parse(text, size), backward))
            rows.append({"what": what, "layer": name, **found})
            print(what, name, *(f"{key} {value:.1f}" for key, value in found.items()), sep=", ")
    for what in ("forward", "forward + backward"):
        for ours in ("tconv", OWN):
            ratio = [row[ours] / row["pytorch"] for row in rows if row["what"] == what]
            print(
                f"{what}: {ours} / pytorch, median {median(ratio):.3f}, "
                f"mean {geometric_mean(ratio):.3f}, most {max(ratio):.3f}"
            )
    for row in tconv.statistics():
        print(*row)
    if parsed.csv:
        with parsed.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
