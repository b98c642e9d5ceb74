"""What several commands share: usage errors, the console, and how layers are given."""

from __future__ import annotations

import argparse
import copy
import fnmatch
import os
import sys
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tconv.layers import DEFAULT_INPUTS, GRAMMAR, Layer, read_layers
from tconv.problem import DType, Layout

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tconv import export

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # it has no public name

DTYPES: tuple[str, ...] = get_args(DType)
DENSE_LAYOUTS: tuple[str, ...] = get_args(Layout)

EXIT_INTERRUPTED = 130
"""Ctrl-C, as a shell counts a SIGINT."""

PIPE_WIDTH = 100
"""Columns of output that goes to a file or a pipe."""


class UsageError(Exception):
    """The options do not make sense together; exit code 2."""


def add_command(
    commands: Commands, name: str, help: str, description: str, examples: str
) -> argparse.ArgumentParser:
    """A subcommand whose --help ends with examples, one a line."""
    return commands.add_parser(
        name,
        help=help,
        description=description,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()),
        formatter_class=_Help,
    )


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the examples' lines, and wraps the description as argparse does by default."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


def console(stderr: bool = False) -> Console:
    """Rich output, of a fixed width where it does not go to a terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    fixed = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(stderr=stderr, highlight=False, width=fixed)


def print_whole(table: Table, shown: Console, spare: Sequence[int] = ()) -> None:
    """Prints a table without cutting a cell.

    Where it does not go to a terminal it is as wide as its cells need. A terminal that is narrower
    gets fewer columns, and below them the names of those left out.

    Args:
        table: it.
        shown: where it goes.
        spare: the columns that can be left out, by number, those that go first in front.
    """
    from rich.console import Console

    def needed() -> int:
        return Console(width=1000).measure(narrower).maximum

    narrower, left_out = table, list[int]()
    for number in spare if shown.is_terminal else ():
        if needed() <= shown.width:
            break
        left_out.append(number)
        narrower = _without(table, left_out)
    before, shown.width = shown.width, max(shown.width, needed())
    shown.print(narrower)
    shown.width = before
    if left_out:
        names = (str(table.columns[number].header) for number in sorted(left_out))
        shown.print(f"Left out, for want of room: {', '.join(names)}.", style="dim")


def _without(table: Table, numbers: Container[int]) -> Table:
    """A copy of a table without some of its columns."""
    found = copy.copy(table)
    found.columns, found.rows = [], []
    kept = [column for number, column in enumerate(table.columns) if number not in numbers]
    for column in kept:
        found.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap)
    for *cells, row in zip(*(column.cells for column in kept), table.rows, strict=True):
        found.add_row(*cells, style=row.style, end_section=row.end_section)
    return found


def add_layer_options(parser: argparse.ArgumentParser, *, many: bool, inputs: bool = False) -> None:
    """--layer and --input; where `many` are taken, also --layers and --only.

    Args:
        parser: gets the options.
        many: whether several layers are taken.
        inputs: whether --input takes several, with commas between them.
    """
    group = parser.add_argument_group("the layer")
    group.add_argument(
        "--layer",
        metavar="LAYER",
        action="append",
        help=f"{GRAMMAR}{'; may be given several times' if many else ''}",
    )
    group.add_argument(
        "--input",
        metavar=f"BATCHxHEIGHTxWIDTH{',...' if inputs else ''}",
        help=f"the input{'s' if inputs else ''} of --layer, BATCHxLENGTH of a 1d: one (default: "
        f"{DEFAULT_INPUTS[2]}, {DEFAULT_INPUTS[1]} of a 1d: one)",
    )
    if many:
        group.add_argument(
            "--layers",
            metavar="FILE",
            type=Path,
            help="a JSON list of layers: objects with in_channels, out_channels and kernel_size, "
            "and name, batch, height, width, stride, padding, output_padding, dilation, groups, "
            'bias; "dimensions": 1 with a length makes it a ConvTranspose1d',
        )
        group.add_argument(
            "--only",
            metavar="NAME,...",
            action="append",
            help="only these layers of the file; * stands for any letters; may be repeated",
        )


def layers_given(parsed: argparse.Namespace) -> list[Layer]:
    """The layers that the options name; an empty list if they name none.

    Raises:
        UsageError: they describe no layer.
        OSError: the file cannot be read.
    """
    layers: list[Layer] = []
    path: Path | None = getattr(parsed, "layers", None)
    only: list[str] | None = getattr(parsed, "only", None)
    if only and path is None:
        raise UsageError("--only chooses from --layers FILE, which is not given")
    texts = [*getattr(parsed, "layer_arguments", ()), *(parsed.layer or ())]
    if parsed.input is not None and not texts:
        raise UsageError("--input goes with --layer, which is not given")
    try:
        for text in texts:
            layers.append(Layer.parse(text, parsed.input))
        if path is not None:
            layers += chosen(read_layers(path), only, path)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return layers


def chosen(layers: list[Layer], only: list[str] | None, path: Path) -> list[Layer]:
    """The layers whose names fit one of the patterns; all where there are none.

    Raises:
        UsageError: a pattern that no layer fits, or a file without any layer.
    """
    if not layers:
        raise UsageError(f"{path} has no layers")
    if not only:
        return layers
    only = [name for given in only for name in given.split(",")]
    for pattern in only:
        if not any(fnmatch.fnmatchcase(layer.name, pattern) for layer in layers):
            known = ", ".join(layer.name for layer in layers)
            raise UsageError(f"no layer of {path} is named {pattern!r}; it has {known}")
    return [layer for layer in layers if any(fnmatch.fnmatchcase(layer.name, p) for p in only)]


def exporters_layer(layer: Layer) -> export.Layer:
    """The layer as the exporter names it."""
    from tconv import export

    return export.Layer(
        in_channels=layer.in_channels,
        out_channels=layer.out_channels,
        kernel_size=layer.kernel_size,
        stride=layer.stride,
        padding=layer.padding,
        output_padding=layer.output_padding,
        groups=layer.groups,
        bias=layer.bias,
        dilation=layer.dilation,
        batch=layer.batch,
        size=layer.size,
        dimensions=layer.dimensions,
    )


def listed(*choices: str) -> Callable[[str], tuple[str, ...]]:
    """An option's value: some of the choices with commas between them, or "all"."""

    def parse(text: str) -> tuple[str, ...]:
        wanted = [word.strip() for word in text.split(",")]
        if wanted == ["all"]:
            return choices
        for word in wanted:
            if word not in choices:
                raise argparse.ArgumentTypeError(
                    f"must be some of {', '.join(choices)}, with commas between them, or all; got "
                    f"{word!r}"
                )
        return tuple(choice for choice in choices if choice in wanted)

    return parse


def positive(text: str) -> int:
    """An option's value: a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def not_negative(text: str) -> int:
    """An option's value: a whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 on, got {text!r}")
    return int(text)


def bytes_text(count: float) -> str:
    """A number of bytes to be read: "1.5 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
