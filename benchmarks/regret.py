"""Regret: the default's time over that of the better of our kernels and PyTorch, for a user.

    python benchmarks/regret.py --compile                   # fills the cache; needs no GPU
    python benchmarks/regret.py --csv FILE --seconds 540    # on a GPU; stops by itself
    python benchmarks/regret.py --csv FILE --resume         # what FILE does not have yet
    python benchmarks/regret.py --show FILE --worst 20      # needs no GPU

A case is a layer, a dtype, a layout and a direction. `forward` is a call in inference mode. A
gradient is a step of forward and backward in which only the input, or only the weight, requires
one. Three contestants take the same tensors and weights, under PyTorch's default flags (TF32
allowed, cudnn.benchmark off): PyTorch's layer, ours, and ours within `own_kernels`.

Two clocks. `step` is what a user waits: a run of steps without a wait between them, by the wall's
clock, so the longer of the host's and the device's time. It is the least of a few rounds in turns:
whatever else runs only adds to it, and a host that changes its speed does so for all. `device` is
the median of the timings of `tconv bench`, which hide the host.

Of three figures, `step raw` takes the default's own time: it has what choosing costs the host, and
noise in both directions. `step by choice` and `device by choice` take the time of the contestant
that the default handed the case to. They are at least 1, without noise where it chose well. Where
it ran the forward on one and the gradient on the other (`mixed`) they take its own time, or are 1
where that is ahead of both.

The default first takes `FIRST_STEPS` steps, if they take less than 5 ms each: a choice is made
once, and a program goes on with it.

A choice that the cache folder (TCONV_CACHE_DIR) has from an earlier run is not timed again.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import dataclasses
import fnmatch
import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tconv
from tconv.bench.contestants import random_tensors
from tconv.bench.environment import commit, environment
from tconv.bench.timing import LEAST_REPEATS, CudaTimer
from tconv.cli.shared import DENSE_LAYOUTS, listed
from tconv.filling import fill, targets_of
from tconv.layers import DIRECTIONS, Layer, read_layers
from tconv.messages import one_line
from tconv.problem import Direction, DType, Layout

H200 = Path(__file__).parent / "results" / "h200"
LAYERS = ",".join(str(H200 / name) for name in ("layers.json", "random60.json"))
DTYPES = ("float32", "bfloat16", "float16")
PYTORCH, OWN, DEFAULT = CONTESTANTS = ("pytorch", "own", "default")
CLOCKS = ("step", "device")
CASE = ("layer", "dtype", "layout", "direction")
FIELDS = (
    *CASE,
    *(f"{name}_{clock}_us" for clock in CLOCKS for name in CONTESTANTS),
    *("ran", "failed", "gpu", "torch", "driver", "commit"),
)
FIGURES = ("step raw", "step by choice", "device by choice")

ROUNDS = 7
TURN = 2e-3
"""Seconds of a turn, in steps of the quickest contestant."""
MOST_STEPS = 100
FIRST_STEPS = 72
"""The default's, in which it is watched whether a program waits for the device."""
ALIKE = 4
"""Contestants within this factor of the quickest take as many steps a turn as it does."""
SHARE = 0.04
"""Seconds of a contestant on one clock, which slow ones keep by fewer rounds, down to one step."""
LONG = 20e-3
"""Seconds of a step from which on the host does not count: the device's time is the step's."""
AT_ONCE = 3
"""Timings of each contestant behind one head start. It hides some 0.4 ms of the host a step."""
APART = 0.1
"""Relative distance from PyTorch's result from which on a result is wrong."""

Run = Callable[[], Tensor]
Row = dict[str, str]


class Case(NamedTuple):
    """What is timed; the layer has no bias."""

    layer: Layer
    dtype: DType
    layout: Layout
    direction: Direction

    @property
    def columns(self) -> Row:
        """What names it in a row."""
        return dict(zip(CASE, (self.layer.name or str(self.layer), *self[1:]), strict=True))


def around(name: str) -> contextlib.AbstractContextManager[None]:
    """Around a contestant's steps."""
    return tconv.own_kernels() if name == OWN else contextlib.nullcontext()


def contestants(case: Case) -> dict[str, Run]:
    """A step of each, on the same tensors."""
    layer, direction = case.layer, case.direction
    dtype = getattr(torch, case.dtype)
    tensors = random_tensors(layer, direction, dtype, case.layout, "cuda", 0)
    *pairs, groups = layer.geometry
    stride, padding, output_padding, dilation = pairs
    shape = (layer.in_channels, layer.out_channels, layer.kernel_size)
    theirs = nn.ConvTranspose2d(
        *shape, stride, padding, output_padding, groups, False, dilation, device="meta"
    )
    theirs.weight = nn.Parameter(tensors.w, requires_grad=direction == "weight_gradient")
    ours = copy.deepcopy(theirs)
    tconv.convert(ours)
    x = tensors.x.requires_grad_(direction == "input_gradient")

    def step(module: nn.ConvTranspose2d) -> Run:
        if direction == "forward":
            return lambda: module(x)
        wanted: Tensor = x if direction == "input_gradient" else module.weight
        return lambda: torch.autograd.grad(module(x), wanted, tensors.y)[0]

    return {PYTORCH: step(theirs), OWN: step(ours), DEFAULT: step(ours)}


def first_steps(runs: dict[str, Run]) -> dict[str, str]:
    """Warms up; takes out of `runs` who fails or is wrong, and returns why."""
    failed, results = {}, {}
    for name, run in list(runs.items()):
        try:
            with around(name):
                results[name] = run()
                torch.cuda.synchronize()
        except RuntimeError as error:  # no such operator, or no memory for it
            failed[name] = one_line(error)
    torch.cuda.synchronize()  # raises where no later call can run
    theirs = results.pop(PYTORCH, None)
    if theirs is not None:
        norm = torch.linalg.vector_norm(theirs, dtype=torch.float32)
        for name, result in results.items():
            apart = float(torch.linalg.vector_norm(result - theirs, dtype=torch.float32) / norm)
            if not apart < APART:
                failed[name] = f"its result is {apart:.1e} apart from PyTorch's"
    for name in failed:
        del runs[name]
    return failed


def turn(name: str, run: Run, count: int) -> float:
    """Seconds a step of so many."""
    torch.cuda.synchronize()
    with around(name):
        start = time.perf_counter()
        for _ in range(count):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count


def steps(runs: dict[str, Run], once: dict[str, float]) -> dict[str, float]:
    """Seconds a step of each, the least of rounds; `once` has those of its quicker first step."""
    quickest = min(once.values())
    found = {name: [seconds] for name, seconds in once.items()}
    for number in range(ROUNDS):
        order = list(runs)[:: -1 if number % 2 else 1]
        for name in order:
            alike = once[name] < ALIKE * quickest
            count = int(TURN / (quickest if alike else once[name]))
            count = max(1, min(MOST_STEPS, count))
            if (number + 1) * count * once[name] <= SHARE:
                found[name].append(turn(name, runs[name], count))
    return {name: min(seconds) for name, seconds in found.items()}


def on_device(runs: dict[str, Run], taken: dict[str, float], watch: CudaTimer) -> dict[str, float]:
    """Seconds a step takes the device; `taken` has what it takes the wall's clock."""

    def inside(name: str, run: Run) -> Run:
        def call() -> Tensor:
            with around(name):
                return run()

        return call

    racing = {name: inside(name, run) for name, run in runs.items() if taken[name] < LONG}
    each: dict[str, list[float]] = {name: [] for name in racing}
    start = time.perf_counter()
    for _ in range(LEAST_REPEATS // AT_ONCE if racing else 0):
        found = watch.time(list(racing.values()), AT_ONCE)
        for name, times in zip(racing, found, strict=True):
            each[name] += times.each
        if time.perf_counter() - start > SHARE * len(racing):
            break
    return taken | {name: median(times) * 1e-3 for name, times in each.items()}


def measure(case: Case, watch: CudaTimer) -> Row:
    """The times, what the default ran, and who failed."""
    runs = contestants(case)
    forward = case.direction == "forward"
    with torch.inference_mode() if forward else contextlib.nullcontext():
        failed = first_steps(runs)
        row = {"failed": "; ".join(f"{name}: {why}" for name, why in failed.items())}
        if not runs:
            return row
        once = {}
        if DEFAULT in runs and turn(DEFAULT, runs[DEFAULT], 1) < LONG / 4:
            turn(DEFAULT, runs[DEFAULT], FIRST_STEPS)
        for name, run in runs.items():
            tconv.statistics(reset=True)
            # Two: a pause of the host in a single one would pass for the step's time.
            once[name] = min(turn(name, run, 1) for _ in range(2))
            if name == DEFAULT:
                served = {f"{s.direction} {s.kernel}: {s.reason}" for s in tconv.statistics()}
                row["ran"] = "; ".join(sorted(served))
        taken = steps(runs, once)
        for clock, seconds in zip(CLOCKS, (taken, on_device(runs, taken, watch)), strict=True):
            row |= {f"{name}_{clock}_us": f"{s * 1e6:.2f}" for name, s in seconds.items()}
    return row


def chosen(row: Row) -> str:
    """The contestant whose kernels the default ran; its own name where it ran some of both."""
    theirs = {part.split()[1] == "pytorch:" for part in row["ran"].split("; ") if part}
    return DEFAULT if len(theirs) != 1 else PYTORCH if theirs.pop() else OWN


def regrets(row: Row) -> dict[str, float]:
    """The figures of a row; none where the default or both others have no time."""
    found = {}
    for clock in CLOCKS:
        times = {n: float(v) for n in CONTESTANTS if (v := row.get(f"{n}_{clock}_us"))}
        if DEFAULT not in times or len(times) < 2:
            return {}
        better = min(times[name] for name in times if name != DEFAULT)
        if clock == "step":
            found[FIGURES[0]] = times[DEFAULT] / better
        taken = times.get(chosen(row), times[DEFAULT])
        found[f"{clock} by choice"] = max(1.0, taken / better)
    return found


def show(rows: list[Row], worst: int) -> None:
    """The table, and the worst cases."""
    for about in sorted({tuple(row[name] for name in FIELDS[-4:]) for row in rows}):
        print("{}, torch {}, driver {}, commit {}".format(*about))
    print("geometric mean and worst of the default's time / the better one's")
    print(
        f"{'':<40}{'cases':>6}{'theirs':>8}{'mixed':>6}{'failed':>7}",
        *(f"{f:>18}" for f in FIGURES),
    )
    groups = list(dict.fromkeys(tuple(row[name] for name in CASE[1:]) for row in rows))
    parts = [(" ".join(g), [r for r in rows if tuple(r[n] for n in CASE[1:]) == g]) for g in groups]
    for title, part in (*parts, ("all", rows)):
        found = [(row, figures) for row in part if (figures := regrets(row))]
        who = [chosen(row) for row, _ in found]
        line = f"{title:<40}{len(found):>6}{who.count(PYTORCH):>8}{who.count(DEFAULT):>6}"
        line += f"{sum(bool(row['failed']) for row in part):>7}"
        for name in FIGURES if found else ():
            values = [figures[name] for _, figures in found]
            line += f"{geometric_mean(values):>11.4f}{max(values):>8.3f}"
        print(line)
    ranked = sorted(
        ((figures, row) for row in rows if (figures := regrets(row))),
        key=lambda pair: -max(pair[0][FIGURES[1]], pair[0][FIGURES[0]]),
    )
    for figures, row in ranked[:worst]:
        print(
            *(row[name] for name in CASE),
            *(f"{name} {value:.3f}" for name, value in figures.items()),
            *(f"{name} {row.get(f'{name}_step_us') or '-'} us" for name in CONTESTANTS),
            row["ran"],
            sep=", ",
        )


def read(path: Path) -> list[Row]:
    """The rows of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cases(parsed: argparse.Namespace, done: Iterable[Row]) -> list[Case]:
    """Those asked for that no row is of."""
    layers = [
        dataclasses.replace(layer, bias=False)  # PyTorch needs a pass of its own for a bias
        for path in parsed.layers.split(",")
        for layer in read_layers(Path(path))
        if any(fnmatch.fnmatch(layer.name, one) for one in parsed.only.split(","))
    ]
    asked = itertools.product(layers, parsed.dtype, parsed.layout, parsed.direction)
    had = {tuple(row[name] for name in CASE) for row in done}
    every = (Case(*one) for one in asked if one[0].dimensions == 2)
    return [case for case in every if tuple(case.columns.values()) not in had]


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("--layers", default=LAYERS, help="layers files, by commas (29 + 60 layers)")
    found.add_argument("--only", default="*", help="names in them, with * and ?, by commas")
    listing = {"dtype": DTYPES, "layout": DENSE_LAYOUTS, "direction": DIRECTIONS}
    for name, choices in listing.items():
        text = f"{', '.join(choices)}, by commas (all)"
        found.add_argument(f"--{name}", type=listed(*choices), default=choices, help=text)
    found.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    found.add_argument("--csv", type=Path, help="written row by row")
    found.add_argument("--resume", action="store_true", help="leave out what --csv has, and add")
    found.add_argument("--compile", action="store_true", help="compile the kernels, no more")
    found.add_argument("--show", type=Path, metavar="FILE", help="the table of rows, no more")
    found.add_argument("--worst", type=int, default=10, help="cases to print below the table")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Prints the table; writes the rows."""
    started = time.perf_counter()
    options = parser()
    parsed = options.parse_args(arguments)
    if parsed.show is not None:
        show(read(parsed.show), parsed.worst)
        return
    if parsed.resume and parsed.csv is None:
        options.error("--resume needs the file to go on with: --csv FILE")
    if not (parsed.compile or torch.cuda.is_available()):
        options.error("it times a GPU, and there is none here; --compile and --show need none")
    rows = read(parsed.csv) if parsed.resume and parsed.csv.exists() else []
    wanted = cases(parsed, rows)
    # A step of one direction plans the others too, and runs the forward.
    parts = itertools.product(wanted, DIRECTIONS)
    problems = dict.fromkeys(c.layer.problem(d, c.dtype, c.layout) for c, d in parts)
    with tconv.own_kernels():  # so that all of them are compiled
        print(fill(list(problems), targets_of(None)), flush=True)
    if parsed.compile:
        return
    about = {**environment("cuda"), "commit": commit()}
    about = {name: about[name] for name in FIELDS[-4:]}
    with contextlib.ExitStack() as opened:
        table = None
        if parsed.csv is not None:
            mode = "a" if rows else "w"
            file = opened.enter_context(parsed.csv.open(mode, newline="", encoding="utf-8"))
            table = csv.DictWriter(file, FIELDS, restval="", lineterminator="\n")
            if not rows:
                table.writeheader()
        watch = CudaTimer()
        left = len(wanted)
        for case in wanted:
            if time.perf_counter() - started > parsed.seconds:
                break
            row: dict[str, Any] = {"ran": "", "failed": "", **case.columns, **about}
            try:
                row |= measure(case, watch)
            except RuntimeError as error:
                row["failed"] = one_line(error)
            if row["failed"]:
                torch.cuda.synchronize()  # raises where no later call can run
                torch.cuda.empty_cache()
            rows.append(row)
            left -= 1
            if table is not None:
                table.writerow(row)
                file.flush()
            said = ", ".join(f"{name} {value:.3f}" for name, value in regrets(row).items())
            print(*case.columns.values(), said or "-", row["ran"], row["failed"], flush=True)
    print(f"{left} of {len(wanted)} cases left, {time.perf_counter() - started:.0f} s")
    if rows:
        show(rows, parsed.worst)


if __name__ == "__main__":
    main()
