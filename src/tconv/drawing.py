"""Drawings of which taps reach which output pixel: as text, and as a picture by matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tconv.errors import MissingDependencyError
from tconv.layers import Layer
from tconv.problem import Axis, Phase

HEAD, TAIL = 10, 4
"""Outputs drawn at the start and at the end of an axis that is longer than both."""

MOST_INPUTS = 16
"""Inputs drawn of an axis; wide kernels reach over more."""

GAP = "..."


def taps_of(axis: Axis, output: int) -> list[tuple[int, int]]:
    """(input, tap) of every product in one output, by ascending input."""
    q, index = divmod(output + axis.padding, axis.stride)
    phase = axis.phases[index]
    pairs = ((q - tap.shift, tap.index) for tap in phase.taps)
    return sorted(pair for pair in pairs if 0 <= pair[0] < axis.size)


def taps_text(phase: Phase) -> str:
    """The taps of a phase with their shifts: "w0 at 0, w2 at 1"."""
    return ", ".join(f"w{tap.index} at {tap.shift}" for tap in phase.taps) or "none: bias alone"


def outputs_of(axis: Axis, phase: Phase) -> int:
    """How many outputs belong to a phase."""
    first = (phase.index - axis.padding) % axis.stride
    return len(range(first, axis.output_size, axis.stride))


def axis_drawing(axis: Axis) -> list[str]:
    """Lines of text: a column for each output, a row for each input, the tap where they meet.

    Long axes are drawn at both ends, wide kernels with their first inputs.
    """
    outputs = _shown(range(axis.output_size), HEAD, TAIL)
    reached = {o: dict(taps_of(axis, o)) for o in outputs if o is not None}
    inputs = _shown(sorted({i for pairs in reached.values() for i in pairs}), MOST_INPUTS, 0)
    lines = [
        ["output", *(GAP if o is None else f"y{o}" for o in outputs)],
        ["phase", *("" if o is None else str((o + axis.padding) % axis.stride) for o in outputs)],
    ]
    before = -1
    for i in inputs:
        if i is None or i > before + 1:
            lines.append([GAP])
        if i is None:
            continue
        before = i
        cells = ["" if o is None or i not in reached[o] else f"w{reached[o][i]}" for o in outputs]
        lines.append([f"x{i} *", *cells])
    label = max(len(line[0]) for line in lines) + 1
    width = max(len(cell) for line in lines for cell in line[1:]) + 1
    return [
        (line[0].ljust(label) + "".join(cell.rjust(width) for cell in line[1:])).rstrip()
        for line in lines
    ]


def pixel_drawing(layer: Layer, rows: int = 8, columns: int = 16) -> list[str]:
    """Lines of text: how many taps reach each pixel of the output's top left corner."""
    height, width = layer.axes
    down = [len(taps_of(height, o)) for o in range(min(rows, height.output_size))]
    along = [len(taps_of(width, o)) for o in range(min(columns, width.output_size))]
    cell = max(len(str(down_count * count)) for down_count in down for count in along) + 2
    return ["".join(str(a * b).rjust(cell) for b in along) for a in down]


def write_png(layer: Layer, path: Path) -> None:
    """A picture: both axes' taps, and the taps and phase of each pixel of a corner of the output.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OSError: the file cannot be written.
        ValueError: matplotlib does not know the kind of file.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
        colours: Any = importlib.import_module("matplotlib").colormaps["tab20"]
    except ImportError as error:
        raise MissingDependencyError(
            "a picture needs matplotlib, which does not import here: pip install matplotlib"
        ) from error
    figure = figures.Figure(figsize=(13, 9), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.5))
    figure.suptitle(f"{layer.kind}({layer.arguments})", fontsize=10)
    left, right = above.subplots(1, 2)
    for plot, name, axis in ((left, "height", layer.axes[0]), (right, "width", layer.axes[1])):
        _plot_axis(plot, name, axis, colours)
    _plot_pixels(below.subplots(), layer, colours)
    figure.savefig(path, dpi=120)


def _plot_axis(plot: Any, name: str, axis: Axis, colours: Any) -> None:
    outputs = range(min(axis.output_size, 16))
    pairs = [(o, i, t) for o in outputs for i, t in taps_of(axis, o)]
    inputs = 1 + max((i for _, i, _ in pairs), default=0)
    plot.set(
        title=f"{name}: which tap carries which input to which output",
        xlabel="output",
        ylabel="input",
        xlim=(-0.5, len(outputs) - 0.5),
        ylim=(inputs - 0.5, -0.5),
        xticks=list(outputs),
    )
    for output, input, tap in pairs:
        phase = (output + axis.padding) % axis.stride
        _cell(plot, output, input, f"w{tap}", colours(phase % 20), 8)


def _plot_pixels(plot: Any, layer: Layer, colours: Any) -> None:
    height, width = layer.axes
    rows, columns = min(height.output_size, 8), min(width.output_size, 16)
    plot.set(
        title="rows and columns of the kernel that reach each output pixel; a colour a phase",
        xlabel="output column",
        ylabel="output row",
        xlim=(-0.5, columns - 0.5),
        ylim=(rows - 0.5, -0.5),
        xticks=list(range(columns)),
        yticks=list(range(rows)),
    )
    for row in range(rows):
        down = sorted(tap for _, tap in taps_of(height, row))
        for column in range(columns):
            along = sorted(tap for _, tap in taps_of(width, column))
            phase_y = (row + height.padding) % height.stride
            phase_x = (column + width.padding) % width.stride
            text = "none"
            if down and along:
                text = f"rows {_some(down)}\ncols {_some(along)}"
            _cell(plot, column, row, text, colours((phase_y * width.stride + phase_x) % 20), 6)


def _cell(plot: Any, x: int, y: int, text: str, colour: Any, size: int) -> None:
    plot.fill(
        (x - 0.48, x + 0.48, x + 0.48, x - 0.48),
        (y - 0.48, y - 0.48, y + 0.48, y + 0.48),
        color=(*colour[:3], 0.45),
    )
    plot.text(x, y, text, ha="center", va="center", fontsize=size)


def _some(taps: list[int]) -> str:
    return ",".join(map(str, taps)) if len(taps) <= 4 else f"{taps[0]}..{taps[-1]}"


def _shown(values: Sequence[int], head: int, tail: int) -> list[int | None]:
    """The values, or the first and last of them with None between."""
    if len(values) <= head + tail + 1:
        return list(values)
    return [*values[:head], None, *values[len(values) - tail :]]
