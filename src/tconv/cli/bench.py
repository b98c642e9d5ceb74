"""`tconv bench`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tconv.cli.shared import (
    DENSE_LAYOUTS,
    DTYPES,
    UsageError,
    add_command,
    add_layer_options,
    console,
    layers_given,
    listed,
    not_negative,
    positive,
    print_whole,
)
from tconv.errors import MissingDependencyError
from tconv.layers import DIRECTIONS, Layer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from tconv.bench.measure import Bench, Options
    from tconv.bench.rows import Key, Row, SweepRow
    from tconv.bench.summary import Group
    from tconv.cli.shared import Commands
    from tconv.problem import Direction

AGAINST = ("eager", "best", "compile", "flaggems")
DEVICES = ("cuda", "cpu")
LEAST_REPEATS = 30
LONG = 0.02
"""Milliseconds of a floor above which launches count little."""

RESULTS = Path("benchmarks") / "results"


def add(commands: Commands) -> argparse.ArgumentParser:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "bench",
        "times of layers beside PyTorch's, cuDNN's best and the floor, with checked results",
        "Times each direction of each layer: medians with a cold L2 cache, on the same random "
        "tensors and with the same numerics for every contestant, and checks the result against "
        "float64. Shows a table, and writes the rows as JSON and CSV after each layer, so that an "
        "interrupted run keeps what it has. docs/measuring.md says what counts. Exit code 1 if a "
        "result is wrong or a call of ours failed.",
        "tconv bench --layers layers.json\n"
        "tconv bench --layers layers.json --only 'kb*,dcgan_4x4' --direction all --dtype bfloat16\n"
        "tconv bench --layers layers.json --no-tf32 --against best --out results\n"
        "tconv bench --layers layers.json --only kb57 --sweep\n"
        "tconv bench --layer 64,32,4,2,1 --input 8x32x32 --device cpu --against eager,best,compile",
    )
    add_layer_options(parser, many=True)
    call = parser.add_argument_group("the calls")
    call.add_argument(
        "--direction",
        type=listed(*DIRECTIONS),
        default=("forward",),
        metavar="NAME,...",
        help=f"some of {', '.join(DIRECTIONS)}, or all (default: forward)",
    )
    call.add_argument("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    call.add_argument(
        "--layout",
        type=listed(*DENSE_LAYOUTS),
        default=("contiguous",),
        metavar="NAME,...",
        help=f"some of {', '.join(DENSE_LAYOUTS)}, each with files of its own, or all (default: "
        "contiguous)",
    )
    call.add_argument(
        "--tf32",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether float32 may be computed in TF32, by every contestant (default: it may)",
    )
    call.add_argument(
        "--bias",
        action="store_true",
        help="add the layers' biases; without it no contestant adds one, since PyTorch needs a "
        "second kernel for that on a GPU",
    )
    call.add_argument("--seed", type=not_negative, default=0, metavar="S", help="of the data")
    how = parser.add_argument_group("the measurement")
    how.add_argument("--device", choices=DEVICES, help="default: cuda if there is a GPU, else cpu")
    how.add_argument(
        "--against",
        type=listed(*AGAINST),
        default=("eager", "best"),
        metavar="NAME,...",
        help="eager: PyTorch's call as it is; best: the fastest of its settings (cudnn.benchmark "
        "off and on, contiguous and channels_last, for stride 1 also conv2d with flipped "
        "weights); compile: torch.compile; flaggems: FlagGems' Triton kernels, forward "
        "alone, where it is installed; or all (default: eager,best)",
    )
    how.add_argument(
        "--autotune", action="store_true", help="ours within tconv.autotune(): chosen by timing"
    )
    how.add_argument(
        "--sweep",
        action="store_true",
        help="time every kernel and tile that can run, not only the plan's choice, beside what the "
        "model says of each",
    )
    how.add_argument(
        "--repeat",
        type=positive,
        default=LEAST_REPEATS,
        metavar="N",
        help="timings of each median (default: %(default)s, the least for a figure that counts)",
    )
    output = parser.add_argument_group("the rows")
    output.add_argument(
        "-o",
        "--out",
        metavar="DIR",
        type=Path,
        help=f"folder for the files (default: {RESULTS}/DEVICE, as {RESULTS}/h200, in a checkout "
        "of tconv; elsewhere nothing is written)",
    )
    output.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows that the file has: what it has of this commit is not timed again",
    )
    output.add_argument(
        "--commit",
        metavar="TEXT",
        help="recorded in each row (default: what git says, if tconv runs from a clone)",
    )
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Runs the command."""
    layers = layers_given(parsed)
    if not layers:
        raise UsageError("which layers? --layers FILE, or --layer 64,32,4,2,1")
    layers = [dataclasses.replace(layer, name=layer.name or str(layer)) for layer in layers]
    names = [layer.name for layer in layers]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UsageError(
            f"each layer needs a name of its own, got more than once: {', '.join(sorted(twice))}"
        )
    if parsed.sweep and parsed.resume:
        raise UsageError(
            "--resume goes on with a run's rows, not with a --sweep; --only chooses layers"
        )
    device = _device(parsed.device)

    from tconv.bench import contestants
    from tconv.bench.environment import commit, environment, short_name
    from tconv.bench.measure import Options

    options = Options(
        device=device,
        short_name=short_name(device),
        dtype=parsed.dtype,
        layout=parsed.layout[0],
        tf32=parsed.tf32,
        against=parsed.against,
        repeats=parsed.repeat,
        autotune=parsed.autotune,
        commit=commit() if parsed.commit is None else parsed.commit,
        environment=environment(device),
        seed=parsed.seed,
    )
    if parsed.sweep and not options.plans:
        raise UsageError(
            "--sweep times our kernels, which CPU tensors do not run: it needs a GPU; without one "
            "`tconv explain` lists the candidates with their modelled times"
        )
    if "flaggems" in options.against and not parsed.sweep:
        # Before anything is timed. Of "all", what is missing is left out, with a note.
        try:
            contestants.flag_gems()
        except MissingDependencyError as error:
            if set(options.against) != set(AGAINST):
                raise
            console(stderr=True).print(
                f"flaggems is left out: {error}", markup=False, style="yellow", soft_wrap=True
            )
            here = tuple(name for name in options.against if name != "flaggems")
            options = dataclasses.replace(options, against=here)
    if not parsed.bias:
        layers = [dataclasses.replace(layer, bias=False) for layer in layers]
    asked = [(layer, direction) for direction in parsed.direction for layer in layers]
    folder = parsed.out or (RESULTS / options.short_name if RESULTS.is_dir() else None)
    if parsed.resume and folder is None:
        raise UsageError("--resume needs the folder whose rows it keeps: -o DIR")
    shown = console()
    failed = 0
    for number, layout in enumerate(parsed.layout):
        options = dataclasses.replace(options, layout=layout)
        for note in _notes(options, parsed.bias, also=number > 0):
            shown.print(note, markup=False, soft_wrap=True)
        if parsed.sweep:
            stem = folder and folder / f"sweep-{_stem(options)}"
            failed |= _sweep(asked, options, stem, shown)
        else:
            stem = folder and folder / f"bench-{_stem(options)}"
            failed |= _bench(asked, options, stem, parsed.resume, shown)
    return failed


def _device(wished: str | None) -> str:
    """The device to measure on.

    Raises:
        MissingDependencyError: it is not on this machine.
    """
    import torch

    if wished is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wished == "cuda" and not torch.cuda.is_available():
        raise MissingDependencyError(
            "no CUDA device that this torch can use; --device cpu times what CPU tensors get"
        )
    return wished


def _stem(options: Options) -> str:
    """The name of a run's files: what keeps its rows apart from another run's."""
    parts: list[str] = [options.dtype]
    if options.may_be_tf32:
        parts.append("tf32" if options.tf32 else "no-tf32")
    return "-".join([*parts, options.layout.replace("_", "-")])


def _notes(options: Options, bias: bool, *, also: bool) -> Iterator[str]:
    """What is measured, and how; `also`: after another layout, of which all was said."""
    allowed = f", TF32 {'allowed' if options.tf32 else 'not allowed'}"
    numbers = f"{options.dtype}{allowed if options.may_be_tf32 else ''}, {options.layout}"
    numbers += ", with their biases" if bias else ", without bias"
    if also:
        yield f"Then {numbers}."
        return
    versions = options.environment
    if options.device == "cuda":
        cudnn = f"cuDNN {versions['cudnn']}"
        yield (
            f"On {versions['gpu']}, driver {versions['driver'] or 'unknown'}, torch "
            f"{versions['torch']}, {cudnn}: {numbers}."
        )
        yield f"Medians of {options.repeats} CUDA-event timings, each with a cold L2 cache."
    else:
        count = versions["cpu_threads"]
        threads = f"{count} thread{'' if count == '1' else 's'}"
        yield (
            f"CPU tensors ({versions['platform']}, {threads}), torch "
            f"{versions['torch']}: {numbers}."
        )
        if options.plans:
            yield "Ours runs in the emulator (TCONV_EMULATE=1): its times say nothing of a GPU."
        else:
            yield (
                "PyTorch's own operators compute them, for tconv too: equal times are expected, "
                "but for the Python on the way."
            )
        yield f"Medians of {options.repeats} timings by the clock; nothing is flushed."
    if "flaggems" in options.against and options.dtype == "float32":
        yield (
            "FlagGems heeds no TF32 flag: it computes float32 about as exactly as float32 itself "
            "(each product is three of TF32), and takes the time of that."
        )
    if options.repeats < LEAST_REPEATS:
        yield (
            f"Fewer than {LEAST_REPEATS} timings: a look, not a figure that counts "
            "(docs/measuring.md)."
        )
    from tconv.bench.floors import GPUS

    if options.short_name not in GPUS:
        known = ", ".join(GPUS)
        yield (
            f"No floor: the ceilings of {options.short_name} were not measured (bench/floors.py "
            f"has {known})."
        )


def _bench(
    asked: Sequence[tuple[Layer, Direction]],
    options: Options,
    stem: Path | None,
    resume: bool,
    shown: Console,
) -> int:
    """Times the rows, writing after each where `stem` is given, and shows them."""
    from tconv.bench.rows import merged, write_rows

    kept, done = _kept(stem, options) if resume and stem else ([], set())
    left = [one for one in asked if _key(*one, options) not in done]
    if len(left) < len(asked):
        shown.print(
            f"{len(asked) - len(left)} of {len(asked)} rows are in {stem}.json and are kept.",
            soft_wrap=True,
            markup=False,
        )
    rows: list[Row] = []
    try:
        with _progress() as progress:
            task = progress.add_task("", total=len(left), doing="")
            bench = _prepared(left, options, progress, task, sweep=False)
            for layer, direction in left:
                progress.update(task, description=f"{layer.name}, {direction}")
                rows.append(bench.row(layer, direction))
                if stem is not None:
                    write_rows(stem, merged(kept, rows))
                progress.advance(task)
    except KeyboardInterrupt:
        _interrupted(len(rows), len(left), stem, shown, resume=True)
        raise
    keys = {_key(*one, options) for one in asked}
    wanted = [row for row in merged(kept, rows) if row.key in keys]
    _show(wanted, shown)
    _say_where(stem, shown)
    return _verdict([(f"{row.layer}, {row.direction}", row.wrong) for row in wanted], shown)


def _sweep(
    asked: Sequence[tuple[Layer, Direction]],
    options: Options,
    stem: Path | None,
    shown: Console,
) -> int:
    """Times every candidate of the rows, writing after each layer, and shows them."""
    from tconv.bench.rows import write_rows

    rows: list[SweepRow] = []
    done = 0
    try:
        with _progress() as progress:
            task = progress.add_task("", total=len(asked), doing="")
            bench = _prepared(asked, options, progress, task, sweep=True)
            for layer, direction in asked:
                progress.update(task, description=f"{layer.name}, {direction}")
                rows += bench.sweep(layer, direction)
                if rows and stem is not None:
                    write_rows(stem, rows)
                done += 1
                progress.advance(task)
    except KeyboardInterrupt:
        _interrupted(done, len(asked), stem, shown, resume=False)
        raise
    _show_sweep(rows, shown)
    _say_where(stem, shown)
    names = [f"{row.layer}, {row.direction}, {row.kernel} {row.tile}" for row in rows]
    return _verdict(list(zip(names, (row.wrong for row in rows), strict=True)), shown)


def _prepared(
    asked: Sequence[tuple[Layer, Direction]],
    options: Options,
    progress: Progress,
    task: TaskID,
    *,
    sweep: bool,
) -> Bench:
    from tconv.bench.measure import Bench, compile_ahead
    from tconv.bench.timing import timer

    progress.update(task, description="compiling", doing="")
    compile_ahead(asked, options, sweep)
    return Bench(options, timer(options.device), lambda doing: progress.update(task, doing=doing))


def _progress() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    errors = console(stderr=True)
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
        TextColumn("[dim]{task.fields[doing]}"),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )


def _kept(stem: Path, options: Options) -> tuple[list[Row], set[Key]]:
    """The rows that a file has, and the keys of those that need not be timed again."""
    from tconv.bench.rows import read_rows

    path = stem.with_name(stem.name + ".json")
    if not path.exists():
        return [], set()
    kept = read_rows(path)
    done = {
        row.key
        for row in kept
        if row.commit == options.commit
        and row.repeats >= options.repeats
        and row.wrong is None
        and all(
            getattr(row, f"{name}_ms") is not None or f"{name}: " in row.failed
            for name in ("ours", *options.against)
        )
    }
    return kept, done


def _key(layer: Layer, direction: Direction, options: Options) -> Key:
    from tconv.bench.rows import Row

    return Row(**options.what(layer, direction)).key


def _interrupted(done: int, total: int, stem: Path | None, shown: Console, *, resume: bool) -> None:
    way_out = "; --resume times the rest" if resume else ""
    written = done and stem is not None
    where = f"the rows so far are in {stem}.json{way_out}" if written else "nothing was written"
    shown.print(f"Interrupted after {done} of {total}: {where}.", markup=False, soft_wrap=True)


def _say_where(stem: Path | None, shown: Console) -> None:
    where = "not kept, as this is no checkout of tconv; -o DIR keeps them"
    if stem is not None:
        where = f"{stem}.json, {stem}.csv"
    shown.print(f"Rows: {where}", markup=False, soft_wrap=True)


def _show(rows: Sequence[Row], shown: Console) -> None:
    """A table for each group of rows, with its geometric means."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from tconv.bench.summary import groups, ratio

    for number, group in enumerate(groups(rows)):
        if number:
            shown.print()
        here = [name for name in AGAINST if any(getattr(r, f"{name}_ms") for r in group.rows)]
        floors = any(row.floor_ms is not None for row in group.rows)
        title = f"Milliseconds: {group.name}"
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
        table.add_column("layer", no_wrap=True)
        headings = [*here, "tconv", "p20", "p80", *(["floor"] if floors else [])]
        headings += [f"{name} / tconv" for name in here] + (["tconv / floor"] if floors else [])
        headings += ["error", "PyTorch's"]
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for row in group.rows:
            times = [getattr(row, f"{name}_ms") for name in here]
            cells = [*map(_time, (*times, row.ours_ms, row.ours_p20_ms, row.ours_p80_ms))]
            cells += [_time(row.floor_ms)] if floors else []
            cells += [_ratio(ratio(time, row.ours_ms)) for time in times]
            cells += [_ratio(ratio(row.ours_ms, row.floor_ms))] if floors else []
            cells += [_error(row.error), _error(row.error_cudnn)]
            state = "[green]ok" if row.wrong is None else "[bold red]FAILED"
            table.add_row(escape(row.layer), *cells, state)
        # The layer, the times, their ratios and whether the result is right stay.
        stay = {"layer", *here, "tconv", *(f"{name} / tconv" for name in here), ""}
        spare = [n for n, column in enumerate(table.columns) if column.header not in stay]
        print_whole(table, shown, spare[::-1])
        for line in [*_failures(group), *_disturbed(group), *_means(group, here, floors)]:
            shown.print(line, markup=False, soft_wrap=True)


def _failures(group: Group) -> Iterator[str]:
    """The contestants that have no time, and why; layers with one reason in one line."""
    layers: dict[str, list[str]] = {}
    for row in group.rows:
        if row.failed:
            layers.setdefault(row.failed, []).append(row.layer)
    for why, names in layers.items():
        yield f"Not timed for {', '.join(names)}: {why}"


def _disturbed(group: Group) -> Iterator[str]:
    """The layers whose second timings are as far apart as their first."""
    from tconv.bench.timing import WIDE

    ends = [(row.layer, row.ours_p20_ms, row.ours_p80_ms) for row in group.rows]
    names = [layer for layer, low, high in ends if low and high and high > WIDE * low]
    if names:
        yield f"Disturbed, p80 is more than {WIDE} times p20: {', '.join(names)}"


def _means(group: Group, here: Sequence[str], floors: bool) -> Iterator[str]:
    pairs = [(name, "ours") for name in here] + ([("ours", "floor")] if floors else [])
    if not pairs:
        return
    yield "Geometric means:"
    for above, below in pairs:
        mean = group.mean(above, below)
        label = f"{above} / {below}".replace("ours", "tconv")
        if mean.value is None or mean.least is None or mean.most is None:
            yield f"  {label}: no row has both"
            continue
        yield (
            f"  {label}: {mean.value:.2f} over {mean.count} of {len(group.rows)} rows, "
            f"{mean.least[0]:.2f} ({mean.least[1]}) to {mean.most[0]:.2f} ({mean.most[1]})"
        )
        if below == "ours":
            behind = sorted(found for found in mean.ratios if found[0] < 1)
            if behind:
                names = ", ".join(f"{layer} {value:.2f}" for value, layer in behind)
                yield f"    behind on {len(behind)}: {names}"
        else:
            long = group.mean(above, below, least_floor=LONG)
            if long.value is not None:
                yield f"    where the floor is over {LONG * 1e3:.0f} us: {long.value:.2f}"


def _show_sweep(rows: Sequence[SweepRow], shown: Console) -> None:
    """One table: the candidates of each layer by time, the plan's choice marked."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("layer", "kernel", "tile"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ms", "p20", "p80", "modelled", "modelled / ms", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    of_layer: dict[str, list[SweepRow]] = {}
    for row in rows:
        of_layer.setdefault(f"{row.layer}, {row.direction}", []).append(row)
    for label, found in of_layer.items():
        found.sort(key=lambda row: (row.kernel_ms is None, row.kernel_ms or 0.0))
        for number, row in enumerate(found):
            state = "[bold red]FAILED" if row.wrong else "[green]the plan's" if row.chosen else ""
            table.add_row(
                escape(label) if not number else "",
                row.kernel,
                escape(row.tile),
                *map(_time, (row.kernel_ms, row.kernel_p20_ms, row.kernel_p80_ms)),
                _time(row.modelled_ms),
                _ratio(row.modelled_ms / row.kernel_ms if row.kernel_ms else None),
                _error(row.error),
                state,
            )
        table.add_section()
    print_whole(table, shown, spare=(8, 5, 4, 7, 6))


def _verdict(found: Sequence[tuple[str, str | None]], shown: Console) -> int:
    wrong = [(name, why) for name, why in found if why is not None]
    for name, why in wrong:
        shown.print(f"FAILED {name}: {why}", markup=False, style="bold red")
    if wrong:
        shown.print(f"[bold red]{len(wrong)} of {len(found)} results are wrong.")
        return 1
    shown.print(f"[bold green]All {len(found)} results are right.")
    return 0


def _time(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.4f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _error(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1e}" if value else "0"
