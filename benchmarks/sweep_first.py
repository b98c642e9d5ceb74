"""Times the first candidates of each kernel for chosen layers, checked: one table a layer.

    FILE=benchmarks/results/h200/random150.json
    PYTHONPATH=src python benchmarks/sweep_first.py --layers $FILE --only '16_to_64_*' --first 3
    PYTHONPATH=src python benchmarks/sweep_first.py --layer 8,64,5 --input 8x128x128 --no-tf32
    PYTHONPATH=src python benchmarks/sweep_first.py --layers $FILE --kernels sm90_weight_gradient
        --direction weight_gradient --dtype bfloat16 --layout channels_last --first 20

`tconv bench --sweep` times every tile, which compiles hundreds. This times the `--first` cheapest
of each kernel by the model, beside cuDNN's best, so that a change of a cost model or of a limit is
looked at in one run. `off` is measured / modelled. Needs a GPU. --csv FILE also writes ours as
rows that fit_costs.py reads. `--kernels` names those to time.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import fnmatch
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from tconv.bench import contestants
from tconv.bench.check import Reference
from tconv.bench.contestants import flags, random_tensors
from tconv.bench.timing import timer
from tconv.choice import own_kernels
from tconv.jit.compile import compile_cuda
from tconv.jit.target import Target
from tconv.kernels.family import Family
from tconv.layers import DIRECTIONS, Layer, read_layers
from tconv.messages import one_line
from tconv.plan import Candidate, candidates, family, make_plan
from tconv.problem import Problem
from tconv.reference import poisoned_memory
from tconv.tuning import using


def first_of_each(
    problem: Problem, target: Target, families: tuple[Family, ...] | None, count: int
) -> list[Candidate]:
    """So many of each kernel, the cheapest by the model first."""
    seen: Counter[str] = Counter()
    found = []
    for candidate in candidates(problem, target, families):
        if candidate.refusal is None and seen[candidate.stem] < count:
            seen[candidate.stem] += 1
            found.append(candidate)
    return found


def sweep(layer: Layer, chosen: list[Candidate], watch: Any, options: Any) -> list[dict]:
    """A row for each candidate, and one for cuDNN's best."""
    import torch

    direction, layout, tf32, repeats = (
        options.direction,
        options.layout,
        options.tf32,
        options.repeat,
    )
    dtype = getattr(torch, options.dtype)
    tensors = random_tensors(layer, direction, dtype, layout, "cuda", 0)
    problem = problem_of(layer, options)
    reference = Reference(layer, direction, tensors, tf32=problem.math == "tf32")
    call = contestants.ours(layer, direction, tensors)
    rows = []

    def timed(of: Any) -> float:
        for _ in range(3):
            of()
        watch.synchronize()
        return watch.time([of], repeats)[0].median

    theirs = {}
    ways = contestants.settings(layer, direction, tensors, layout)
    for way in ways if options.rival else islice(ways, 1):
        with flags(benchmark=way.benchmark, tf32=tf32):
            try:
                theirs[way.name] = timed(way.call)
            except RuntimeError as error:  # no such operator, or no memory for it
                print(f"  {way.name}: {one_line(error)}")
    with flags(benchmark=False, tf32=tf32):
        verdict = reference.verdict(contestants.pytorch(layer, direction, tensors)(), None)
    best = min(theirs, key=lambda name: theirs[name])
    rows.append({"kernel": f"PyTorch, {best}", "ms": theirs[best], "error": verdict.error})
    for candidate in chosen:
        row: dict[str, Any] = {"kernel": candidate.stem, "tile": str(candidate.tile)}
        row["model_ms"] = candidate.cost * 1e3
        with flags(benchmark=False, tf32=tf32), own_kernels(), using(candidate):
            try:
                with poisoned_memory():
                    result = call()
                verdict = reference.verdict(result, None)
                row.update(error=verdict.error, wrong=verdict.wrong or "", ms=timed(call))
            except Exception as error:  # shown beside the others' times
                row["wrong"] = f"{type(error).__name__}: {one_line(error)}"
        rows.append(row)
    return [{"layer": layer.name or str(layer), "problem": str(problem), **row} for row in rows]


def problem_of(layer: Layer, options: Any) -> Problem:
    """The call's."""
    return layer.problem(options.direction, options.dtype, options.layout, options.tf32)


def show(layer: Layer, rows: list[dict]) -> None:
    """One table."""
    print(f"{layer}: {rows[0]['problem']}")
    for row in rows:
        ms, model = row.get("ms"), row.get("model_ms")
        numbers = f"{ms:9.4f} ms" if ms else "        - ms"
        numbers += f"{rows[0]['ms'] / ms:6.2f} of PyTorch's speed" if ms and model else " " * 23
        numbers += f", model {model:8.4f}, off {ms / model:5.2f}" if ms and model else " " * 27
        error = f"error {row['error']:.1e}" if row.get("error") is not None else ""
        print(f"  {numbers}  {error}  {row['kernel']} {row.get('tile', '')} {row.get('wrong', '')}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=Path, help="a layers file")
    parser.add_argument("--only", default="*", help="names in it, with * and ?, by commas")
    parser.add_argument("--layer", help="a layer as text: 8,64,5")
    parser.add_argument("--input", default="8x64x64", help="its input: 8x64x64")
    parser.add_argument("--first", type=int, default=2, help="candidates of each kernel")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--tf32", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--direction", choices=DIRECTIONS, default="forward")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layout", choices=("contiguous", "channels_last"), default="contiguous")
    parser.add_argument("--kernels", help="names, by commas; those of a plan by default")
    parser.add_argument(
        "--rival",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time all of cuDNN's settings, not the first alone",
    )
    parser.add_argument("--csv", type=Path)
    parsed = parser.parse_args()
    if (parsed.layer is None) == (parsed.layers is None):
        sys.exit("which layers? --layers FILE, or --layer 8,64,5")
    if parsed.layer is not None:
        layers = [Layer.parse(f"{parsed.layer},bias=no", parsed.input)]
    else:
        wanted = parsed.only.split(",")
        layers = [
            # As `tconv bench`: PyTorch needs a pass of its own for a bias.
            dataclasses.replace(layer, bias=False)
            for layer in read_layers(parsed.layers)
            if any(fnmatch.fnmatch(layer.name, one) for one in wanted)
        ]

    import torch

    target = Target.for_device(torch.cuda.current_device())
    families = None
    if parsed.kernels is not None:
        families = tuple(map(family, parsed.kernels.split(",")))
    chosen = {
        one: first_of_each(problem_of(one, parsed), target, families, parsed.first)
        for one in layers
    }
    sources = {
        source
        for layer, found in chosen.items()
        for candidate in found
        for source in make_plan(problem_of(layer, parsed), target, candidate).sources
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda source: compile_cuda(source, target.arch), sources))
    watch = timer("cuda")
    everything = []
    for layer in layers:
        rows = sweep(layer, chosen[layer], watch, parsed)
        show(layer, rows)
        everything += rows
    if parsed.csv is not None:
        names = ["layer", "problem", "kernel", "tile", "model_ms", "ms", "error"]
        with parsed.csv.open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, names, lineterminator="\n", extrasaction="ignore")
            table.writeheader()
            table.writerows(row for row in everything if "model_ms" in row and row.get("ms"))


if __name__ == "__main__":
    main()
