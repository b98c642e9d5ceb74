"""`tconv report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tconv.cli.shared import UsageError, add_command, console

if TYPE_CHECKING:
    from tconv.cli.shared import Commands


def add(commands: Commands) -> argparse.ArgumentParser:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "report",
        "a page with tables and plots of the rows that `tconv bench` wrote",
        "Turns rows of `tconv bench` into one HTML page with everything in it (geometric means, "
        "tables, environment, plots) and the plots as PNG files: speed-ups, a roofline, times "
        "against their floors. Where several files have a row of the same layer and call, the last "
        "file's counts. Needs matplotlib.",
        "tconv report benchmarks/results/h200/bench-float32-tf32-contiguous.json -o report\n"
        "tconv report results/*.json -o report --title 'After the last change'",
    )
    parser.add_argument("rows", metavar="ROWS.json", type=Path, nargs="+", help="files of rows")
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=Path,
        required=True,
        help="folder for index.html and the plots",
    )
    parser.add_argument("--title", default="tconv: a benchmark", help="default: %(default)s")
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Runs the command."""
    from tconv.bench import report
    from tconv.bench.rows import Row, merged, read_rows

    rows: list[Row] = []
    for path in parsed.rows:
        rows = merged(rows, read_rows(path))
    if not rows:
        raise UsageError(f"no rows in {', '.join(map(str, parsed.rows))}: `tconv bench` makes some")
    written = report.write(rows, parsed.output, parsed.title)
    shown = console()
    for path in written:
        shown.print(str(path), markup=False, soft_wrap=True)
    return 0
