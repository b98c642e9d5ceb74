"""What images of many sizes cost a layer: kernels, their times, and stalls.

    PYTHONPATH=src python benchmarks/new_sizes.py --model            # needs no GPU
    PYTHONPATH=src python benchmarks/new_sizes.py --model --dtype bfloat16 --layout channels_last
    PYTHONPATH=src python benchmarks/new_sizes.py [--csv FILE]       # on a GPU

`--model` plans 600 random sizes of each of ten layers, in all three directions. It counts the
plans that differ, and the kernels: a plan may pack with one kernel, run a second, and repair or add
up with a third. The cost is the modelled time of the plans over that of each size's best kernel, as
a geometric mean.

On a GPU, the same is timed for 24 sizes. Then a process with an empty cache runs 200 sizes of each
layer forward, and so does a second process with the cache that it filled. What the first calls of
sizes take longer than their second calls is lost to planning, compiling and loading.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import geometric_mean
from typing import Any, get_args

from tconv import sizes
from tconv.jit.compile import compile_cuda
from tconv.jit.target import Target
from tconv.kernels.source import KernelSource
from tconv.layers import DIRECTIONS, Layer
from tconv.plan import Candidate, Plan, plan
from tconv.problem import Direction, DType, Layout, Problem

LAYERS = {
    "kb71": "32,32,3",
    "kb81": "32,64,3,stride=5,padding=1,dilation=2",
    "dcgan_16x16": "128,64,4,2,1",
    "dcgan_rgb": "64,3,4,2,1",
    "pix2pix_mid": "1024,256,4,2,1",
    "maskrcnn": "256,256,2,2",
    "pointpillars_k4s4": "256,128,4,4",
    "bilinear_dw": "256,256,4,2,1,groups=256",
    "k3s2op1": "256,128,3,2,1,1",
    "fcn8s": "21,21,16,8,4",
}
MODELLED, TIMED, RUN = 600, 24, 200
LEAST, MOST, MOST_BATCH = 8, 512, 16
MOST_ELEMENTS = 1 << 28
"""Of the larger tensor, so that 200 sizes take seconds."""


def draw(
    layer: str,
    count: int,
    direction: Direction = "forward",
    dtype: DType = "float32",
    layout: Layout = "contiguous",
    tf32: bool = True,
) -> list[Problem]:
    """Random sizes of a layer, the same at each call: uniform in height, width and batch."""
    of_layer = Layer.parse(layer).problem(direction, dtype, layout, tf32=tf32)
    numbers = random.Random(7)
    found: list[Problem] = []
    while len(found) < count:
        size = [numbers.randint(LEAST, MOST) for _ in range(2)]
        problem = of_layer.resized(numbers.randint(1, MOST_BATCH), *size)
        if max(_elements(problem.x_shape), _elements(problem.y_shape)) <= MOST_ELEMENTS:
            found.append(problem)
    return found


def _elements(shape: tuple[int, int, int, int]) -> int:
    return shape[0] * shape[1] * shape[2] * shape[3]


def model(dtypes: list[DType], layouts: list[Layout]) -> list[dict[str, Any]]:
    """Kernels and modelled cost of each layer, direction, dtype and layout, for an H200."""
    rows = []
    for dtype, layout in itertools.product(dtypes, layouts):
        for direction in DIRECTIONS:
            for tf32 in (True, False) if dtype == "float32" else (False,):
                found = [
                    _modelled(name, draw(layer, MODELLED, direction, dtype, layout, tf32))
                    for name, layer in LAYERS.items()
                ]
                kernels, cost = (row["kernels"] for row in found), (row["cost"] for row in found)
                math = "tf32" if tf32 else "ieee"
                print(
                    f"{dtype}/{math} {layout} {direction}: at most {max(kernels)} kernels, "
                    f"cost {geometric_mean(cost):.4f}",
                    flush=True,
                )
                rows += found
    return rows


def _modelled(name: str, problems: list[Problem]) -> dict[str, Any]:
    """The row of a layer in one direction."""
    target = Target.named("sm_90a")
    started = time.perf_counter()
    plans = [sizes.planned(problem, target) for problem in problems]
    seconds = time.perf_counter() - started
    own = [plan(problem, target) for problem in problems]
    first = problems[0]
    row = {
        "layer": name,
        "direction": first.direction,
        "dtype": first.dtype,
        "math": first.math,
        "layout": first.x_layout,
        "common_sizes": sum(map(sizes.is_common, problems)),
        "plans": len({found.sources for found in plans}),
        "kernels": len(_kernels(plans)),
        "plans_of_own": len({best.sources for best in own}),
        "kernels_of_own": len(_kernels(own)),
        "cost": geometric_mean(
            found.cost / best.cost for found, best in zip(plans, own, strict=True)
        ),
        "plan_ms": seconds / len(problems) * 1e3,
    }
    print("  ".join(_text(value) for value in row.values()), flush=True)
    return row


def _kernels(plans: list[Plan]) -> set[KernelSource]:
    """The kernels of all launches of these plans."""
    return {source for found in plans for source in found.sources}


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def operands(problem: Problem) -> tuple[Any, ...]:
    """Input, weight and bias of a forward call, as its plan expects them."""
    import torch

    shapes = problem.x_shape, problem.w_shape, (problem.out_channels,)
    return tuple(torch.randn(shape, device="cuda") for shape in shapes)


def timed(layers: list[str]) -> list[dict[str, Any]]:
    """Measured time of the plans over that of each size's best kernel by the model."""
    from tconv import conv_transpose2d, own_kernels
    from tconv.bench.timing import timer
    from tconv.tuning import using

    clock, target = timer("cuda"), Target.for_device(0)
    rows = []
    for name in layers:
        layer, ratios = LAYERS[name], []
        problems = draw(layer, TIMED)
        wanted = {
            source: None
            for problem in problems
            for source in (
                *sizes.planned(problem, target).sources,
                *plan(problem, target).sources,
            )
        }
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda source: compile_cuda(source, target.arch), wanted))
        for problem in problems:
            x, w, bias = operands(problem)
            stride, padding, output_padding, dilation, groups = Layer.parse(layer).geometry
            options = (bias, stride, padding, output_padding, groups, dilation)
            of_size, own = sizes.planned(problem, target), plan(problem, target)

            def call(of: Plan) -> Any:
                candidate = Candidate(of.stem, of.tile, None, of.cost, of.problem.like)

                def run() -> object:
                    with using(candidate):
                        return conv_transpose2d(x, w, *options)  # noqa: B023

                return run

            with own_kernels():
                shared, best = clock.time([call(of_size), call(own)], 20)
            ratios.append(shared.median / best.median)
        rows.append({"layer": name, "timed": geometric_mean(ratios), "worst": max(ratios)})
        print("  ".join(_text(value) for value in rows[-1].values()), flush=True)
    return rows


def epoch(layer: str) -> None:
    """Prints the seconds lost to the first calls of the layer's sizes, in this process.

    And how many took 0.1 s longer than the second call, and what was lost to the first size alone
    and to Python's garbage collector.
    """
    import torch

    from tconv import conv_transpose2d, own_kernels

    stride, padding, output_padding, dilation, groups = Layer.parse(layer).geometry
    torch.zeros(1, device="cuda").add_(1)
    lost, stalls, first, collected = 0.0, 0, 0.0, 0.0

    def collecting(phase: str, _info: object) -> None:
        nonlocal collected
        collected += time.perf_counter() * (1 if phase == "stop" else -1)

    gc.callbacks.append(collecting)
    with own_kernels():
        for problem in draw(layer, RUN):
            x, w, bias = operands(problem)
            seconds = []
            for _ in range(2):
                torch.cuda.synchronize()
                started = time.perf_counter()
                conv_transpose2d(x, w, bias, stride, padding, output_padding, groups, dilation)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
            lost += seconds[0] - seconds[1]
            stalls += seconds[0] - seconds[1] > 0.1
            first = first or lost
    print(f"{lost:.3f} {stalls} {first:.3f} {collected:.3f}")


def epochs(layers: list[str]) -> list[dict[str, Any]]:
    """Seconds lost over an epoch of each layer, with an empty cache and with a filled one."""
    rows = []
    for name in layers:
        layer = LAYERS[name]
        with tempfile.TemporaryDirectory() as folder:
            row: dict[str, Any] = {"layer": name}
            for state in ("cold", "warm"):
                found = subprocess.run(
                    [sys.executable, __file__, "--epoch", layer],
                    env={**os.environ, "TCONV_CACHE_DIR": folder},
                    check=True,
                    capture_output=True,
                    text=True,
                )
                lost, stalls, first, collected = found.stdout.split()[-4:]
                row |= {
                    f"{state}_s": float(lost),
                    f"{state}_stalls": int(stalls),
                    f"{state}_first_s": float(first),
                    f"{state}_gc_s": float(collected),
                }
        rows.append(row)
        print("  ".join(_text(value) for value in row.values()), flush=True)
    return rows


def main() -> None:
    """Prints the tables; writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="store_true", help="plans alone: needs no GPU")
    parser.add_argument("--epoch", metavar="LAYER", help="one layer's epoch, in this process")
    for option, choices in (("--dtype", get_args(DType)), ("--layout", get_args(Layout))):
        parser.add_argument(
            option, nargs="+", choices=choices, default=choices[:1], help="with --model"
        )
    parser.add_argument(
        "--layers", nargs="+", choices=LAYERS, default=list(LAYERS), help="on a GPU"
    )
    parser.add_argument("--csv", type=Path)
    parsed = parser.parse_args()
    if parsed.epoch is not None:
        epoch(parsed.epoch)
        return
    if parsed.model:
        rows = model(parsed.dtype, parsed.layout)
    else:
        lost = {row["layer"]: row for row in epochs(parsed.layers)}
        rows = [row | lost[row["layer"]] for row in timed(parsed.layers)]
    if parsed.csv is not None:
        with parsed.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
