"""`tconv verify`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tconv.cli.shared import (
    DTYPES,
    EXIT_INTERRUPTED,
    UsageError,
    add_command,
    add_layer_options,
    console,
    exporters_layer,
    layers_given,
    not_negative,
    positive,
    print_whole,
)
from tconv.errors import MissingDependencyError
from tconv.reference import LAYOUTS

if TYPE_CHECKING:
    from rich.console import Console

    from tconv.cli.shared import Commands
    from tconv.layers import Layer
    from tconv.verify import Device, Row

DEFAULT_CASES = 8
DEVICES = ("cuda", "cpu", "emulator")

TF32 = 1e-5
"""Relative error from which on TF32 may explain a result of float32; it makes some 3e-4."""


def add(commands: Commands) -> argparse.ArgumentParser:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "verify",
        "outputs and gradients against float64, beside PyTorch's own errors",
        "Computes the output and every gradient of layers, compares them with float64, and shows "
        "the errors beside PyTorch's own. Without a layer it takes random ones. Exit code 1 if "
        "any result breaks the numerics contract (docs/numerics.md).",
        "tconv verify\n"
        "tconv verify --layers layers.json --only 'kb*' --device cuda --dtype all\n"
        "tconv verify --cases 50 --seed 3 --layout all --no-tf32\n"
        "tconv verify --device emulator --layer 64,32,4,2,1\n"
        "tconv verify --exported model_new.py --problem problem.py\n"
        "tconv verify --exported model_new.py --layer 64,128,4,2,1",
    )
    add_layer_options(parser, many=True)
    cases = parser.add_argument_group("what is computed")
    cases.add_argument(
        "--cases",
        type=positive,
        metavar="N",
        help="so many random layers, every fourth of one dimension "
        f"(default: {DEFAULT_CASES} where no layer is given)",
    )
    cases.add_argument(
        "--seed",
        type=not_negative,
        default=0,
        metavar="S",
        help="of the random layers and of all numbers (default: %(default)s)",
    )
    cases.add_argument(
        "--device",
        choices=DEVICES,
        help="cuda runs our kernels on a GPU; emulator runs them on the CPU, on layers that are "
        "shrunk; cpu runs what CPU tensors get, PyTorch's operators (default: cuda if there is a "
        "GPU, else emulator)",
    )
    cases.add_argument(
        "--dtype", choices=(*DTYPES, "all"), default="float32", help="default: %(default)s"
    )
    cases.add_argument(
        "--layout",
        choices=(*LAYOUTS, "all"),
        default="contiguous",
        help="of the tensors (default: %(default)s)",
    )
    cases.add_argument("--no-tf32", action="store_true", help="full float32 only")
    exported = parser.add_argument_group("an exported file")
    exported.add_argument(
        "--exported",
        metavar="FILE",
        type=Path,
        help="check the class ModelNew of this file, written by `tconv export`, instead",
    )
    exported.add_argument(
        "--problem",
        metavar="FILE",
        type=Path,
        help="the file with Model, get_inputs and get_init_inputs that it was exported from",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Runs the command."""
    device = _device(parsed.device)
    if parsed.exported is not None:
        rows = _exported_rows(parsed, device)
        notes: list[str] = []
        left = 0
    else:
        if parsed.problem is not None:
            raise UsageError("--problem goes with --exported FILE, which is not given")
        rows, notes, left = _layer_rows(parsed, device)
    if parsed.json:
        records = [row.record() for row in rows]
        print(json.dumps({"device": device, "notes": notes, "results": records}, indent=2))
    else:
        shown = console()
        for note in notes:
            shown.print(note, markup=False, soft_wrap=True)
        _show(rows, shown)
    if left:
        return EXIT_INTERRUPTED
    return 1 if any(row.wrong is not None for row in rows) else 0


def _device(wished: Device | None) -> Device:
    """The device to verify on.

    Raises:
        MissingDependencyError: it is not on this machine.
    """
    import torch

    from tconv.emulator.compile import compiler

    if wished is None:
        wished = "cuda" if torch.cuda.is_available() else "emulator"
    if wished == "cuda" and not torch.cuda.is_available():
        raise MissingDependencyError(
            "no CUDA device that this torch can use; --device emulator runs the same kernels on "
            "the CPU"
        )
    if wished == "emulator":
        compiler()
    return wished


def _layer_rows(parsed: argparse.Namespace, device: Device) -> tuple[list[Row], list[str], int]:
    """The results of all layers, what is to be said of them first, and how many calls are left.

    None are, but where Ctrl-C comes in between.
    """
    from tconv.reference import random_layers
    from tconv.verify import check_layer, shrunk

    layers = layers_given(parsed)
    stands_for: dict[str, Layer] = {}
    notes = [_where(device, tf32=not parsed.no_tf32)]
    if device == "emulator":
        small = [shrunk(layer) for layer in layers]
        notes += [
            f"Shrunk for the emulator: {layer} -> {after.text} on {after.input_text}"
            for layer, after in zip(layers, small, strict=True)
            if layer != after
        ]
        stands_for = dict(zip((layer.name for layer in _named(small)), layers, strict=True))
        layers = small
    count = parsed.cases or (0 if layers else DEFAULT_CASES)
    if count:
        most = {"channels": 40, "size": 33} if device == "cuda" else {}
        drawn = random_layers(count, parsed.seed, **most, one_dimension=True)
        layers += [
            dataclasses.replace(layer, name=f"random {number}")
            for number, layer in enumerate(drawn)
        ]
        notes.append(f"{count} random layers of seed {parsed.seed}.")
    layers = _named(layers)
    dtypes = DTYPES if parsed.dtype == "all" else (parsed.dtype,)
    layouts = LAYOUTS if parsed.layout == "all" else (parsed.layout,)
    asked = [(layer, d, o) for layer in layers for d in dtypes for o in layouts]

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    rows: list[Row] = []
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    errors = console(stderr=True)
    quiet = not errors.is_terminal
    with Progress(*columns, console=errors, transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=len(asked))
        done = 0
        with contextlib.suppress(KeyboardInterrupt):
            for layer, dtype, layout in asked:
                progress.update(task, description=f"{layer}, {dtype}, {layout}")
                rows += check_layer(
                    layer,
                    device=device,
                    dtype=dtype,
                    layout=layout,
                    tf32=not parsed.no_tf32,
                    seed=parsed.seed,
                    like=stands_for.get(layer.name),
                )
                done += 1
                progress.advance(task)
    notes += [str(layer) for layer in layers]
    if done < len(asked):
        notes.append(f"Interrupted after {done} of {len(asked)}; these are the results so far.")
    notes += [str(layer) for layer in layers]
    return rows, notes, len(asked) - done


def _exported_rows(parsed: argparse.Namespace, device: Device) -> list[Row]:
    from tconv.verify import check_exported

    layers = layers_given(parsed)
    if parsed.cases or len(layers) + (parsed.problem is not None) != 1:
        raise UsageError(
            "--exported needs what it was exported from: either --problem FILE or one --layer"
        )
    if device != "cuda":
        raise MissingDependencyError(
            "an exported file compiles its kernels by torch.utils.cpp_extension and runs on a GPU "
            "only; there is none here, or --device says otherwise"
        )
    with (
        tempfile.TemporaryDirectory(prefix="tconv-verify-") as folder,
        console(stderr=True).status(f"compiling and running {parsed.exported} ..."),
    ):
        problem = parsed.problem
        if problem is None:
            problem = Path(folder) / "problem.py"
            problem.write_text(exporters_layer(layers[0]).problem_text())
        return check_exported(parsed.exported, problem, seed=parsed.seed, tf32=not parsed.no_tf32)


def _where(device: Device, tf32: bool) -> str:
    import torch

    allowed = f"float32 with TF32 {'allowed' if tf32 else 'not allowed'}"
    if device == "cuda":
        return f"On {torch.cuda.get_device_name()}, {allowed}."
    if device == "emulator":
        return f"Our kernels in the emulator, on the CPU, {allowed} for them."
    return "CPU tensors, which PyTorch's own operators compute; our kernels have no part in this."


def _named(layers: Sequence[Layer]) -> list[Layer]:
    """The layers, those without a name numbered."""
    return [
        layer if layer.name else dataclasses.replace(layer, name=f"layer {number}")
        for number, layer in enumerate(layers, 1)
    ]


def _show(rows: Sequence[Row], shown: Console) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for heading in ("error", "PyTorch's", "worst", "PyTorch's", "checked", "bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    dtypes, layouts = {row.dtype for row in rows}, {row.layout for row in rows}
    before = ""
    for row in rows:
        label = row.layer
        label += f" {row.dtype}" if len(dtypes) > 1 else ""
        label += f" {row.layout}" if len(layouts) > 1 else ""
        if before and label != before:
            table.add_section()
        table.add_row(
            escape(label) if label != before else "",
            row.name,
            *map(
                _number,
                (
                    row.error,
                    row.torch_error,
                    row.worst,
                    row.torch_worst,
                    row.checked,
                    row.bound,
                ),
            ),
            "[green]ok" if row.wrong is None else "[bold red]FAILED",
        )
        before = label
    # First what an element of PyTorch's was off by, last whether the result is right.
    print_whole(table, shown, spare=(5, 4, 7, 6, 3))
    shown.print(
        "error: the distance from float64 as a share of its norm; worst: the largest of an "
        "element; checked: the error once the reference's operands are rounded as the numerics "
        "contract says, which must be within the bound."
    )
    if any(_is_tf32s(row) for row in rows):
        shown.print(
            "TF32 explains these errors: PyTorch's flags allow it, so operands of float32 have 10 "
            "bits of their fraction. --no-tf32 takes full float32."
        )
    kernels = sorted({row.kernel for row in rows if row.kernel})
    if kernels:
        shown.print(f"Kernels that ran: {', '.join(kernels)}.")
    failed = [row for row in rows if row.wrong is not None]
    for row in failed:
        which = f"{row.layer}, {row.dtype}, {row.layout}, {row.name}"
        shown.print(f"FAILED {which}: {row.wrong}", markup=False, style="bold red")
    if failed:
        shown.print(f"[bold red]{len(failed)} of {len(rows)} results are wrong.")
    else:
        shown.print(f"[bold green]All {len(rows)} results are right.")


def _is_tf32s(row: Row) -> bool:
    """Whether rounding to TF32 is what a right result is off by."""
    return row.dtype == "float32" and row.wrong is None and row.error > TF32 > 8 * row.checked


def _number(value: float) -> str:
    if value != value:
        return "-"
    return f"{value:.1e}" if value else "0"
