"""The pictures of `tconv report`: speed-ups, a roofline, times against their floors."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tconv.bench.floors import GPUS
from tconv.bench.rows import Row
from tconv.bench.summary import Group, ratio
from tconv.errors import MissingDependencyError

OURS, EAGER, BEST, GREY = "#c1440e", "#7a8b99", "#2b5c8a", "#9a9a9a"
DPI = 110

_LABELS = {"eager": "PyTorch's default / tconv", "best": "PyTorch's best setting / tconv"}


def figures() -> Any:
    """matplotlib's module of figures, which need no screen.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingDependencyError(
            "plots need matplotlib, which does not import here: pip install matplotlib"
        ) from error


def write(group: Group, folder: Path) -> dict[str, Path]:
    """The pictures that the group's rows have columns for, as <what>-<group>.png.

    Args:
        group: rows of one kind.
        folder: must exist.

    Returns:
        a title and the file of each, in order.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OSError: one cannot be written.
    """
    drawn = {
        "speedup": ("Speed-up: times PyTorch's, 1 is equal", _speedup(group)),
        "roofline": ("Roofline: what each layer reaches of what its bytes allow", _roofline(group)),
        "floor": ("Time against the floor, 1 is the least possible", _floor(group)),
    }
    written = {}
    for what, (title, figure) in drawn.items():
        if figure is not None:
            path = folder / f"{what}-{group.slug}.png"
            figure.savefig(path, dpi=DPI)
            written[title] = path
    return written


def _speedup(group: Group) -> Any | None:
    """Bars of eager/ours and best/ours for each layer, on a logarithmic axis around 1."""
    bars = {
        name: [(row.layer, ratio(getattr(row, f"{name}_ms"), row.ours_ms)) for row in group.rows]
        for name in _LABELS
    }
    bars = {name: b for name, b in bars.items() if any(value is not None for _, value in b)}
    if not bars:
        return None
    figure, plot = _horizontal(group, len(bars))
    for number, (name, of_name) in enumerate(bars.items()):
        mean = group.mean(name, "ours")
        offset = 0.8 * ((number + 0.5) / len(bars) - 0.5)
        for place, (_, value) in enumerate(of_name):
            if value is not None:
                plot.barh(
                    place + offset,
                    value - 1,
                    left=1,
                    height=0.8 / len(bars),
                    color=EAGER if name == "eager" else BEST,
                    label=f"{_LABELS[name]}, geometric mean {mean.value:.2f}",
                )
                _note(plot, f"{value:.2f}", value, place + offset, left=value < 1)
    plot.set(xscale="log", xlabel="times as fast as PyTorch")
    plot.axvline(1, color="black", linewidth=1)
    plot.margins(x=0.12)
    _plain_ticks(plot.xaxis)
    _legend(figure, plot)
    return figure


def _floor(group: Group) -> Any | None:
    """Bars of ours/floor and markers of best/floor for each layer."""
    if not any(ratio(row.ours_ms, row.floor_ms) for row in group.rows):
        return None
    figure, plot = _horizontal(group, 1)
    mean = group.mean("ours", "floor")
    for place, row in enumerate(group.rows):
        mine, best = ratio(row.ours_ms, row.floor_ms), ratio(row.best_ms, row.floor_ms)
        if mine is not None:
            label = f"tconv, geometric mean {mean.value:.2f}"
            plot.barh(place, mine - 1, left=1, height=0.6, color=OURS, alpha=0.85, label=label)
            text = f"{mine:.2f}  ({row.bound})" if row.bound else f"{mine:.2f}"
            _note(plot, text, max(mine, best or mine), place)
        if best is not None:
            plot.plot(best, place, "|", color=BEST, markersize=12, label="PyTorch's best setting")
    plot.set(xscale="log", xlabel="time / floor, the empty kernel's time in it")
    plot.axvline(1, color="black", linewidth=1)
    plot.margins(x=0.12)
    _plain_ticks(plot.xaxis)
    _legend(figure, plot)
    return figure


def _roofline(group: Group) -> Any | None:
    """Arithmetic reached over intensity, each layer a point, under the device's measured roof."""
    rows = [row for row in group.rows if row.ours_ms and row.flops and row.bytes]
    if not rows:
        return None
    figure = figures().Figure(figsize=(9, 5.5), layout="constrained")
    plot = figure.subplots()
    intensities = [row.flops / row.bytes for row in rows]
    low, high = min(intensities) / 2, max(intensities) * 2
    gpu = GPUS.get(group.rows[0].device)
    if gpu is not None:
        steps = [low * (high / low) ** (step / 200) for step in range(201)]
        for name in sorted({_rate(row) for row in rows}):
            rate = gpu.rates[name]
            roof = [min(rate, gpu.copy * step) / 1e12 for step in steps]
            plot.plot(steps, roof, color=GREY, linewidth=1.5)
            plot.annotate(
                f"{name}, {rate / 1e12:.0f} TFLOP/s",
                (steps[-1], roof[-1]),
                xytext=(-2, 4),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color="#555555",
            )
    for name, colour, marker in (("best", BEST, "x"), ("ours", OURS, "o")):
        timed = [(row, getattr(row, f"{name}_ms")) for row in rows]
        points = [(r.flops / r.bytes, r.flops / ms / 1e9, r) for r, ms in timed if ms]
        label = "tconv" if name == "ours" else "PyTorch's best setting"
        plot.plot(
            [x for x, _, _ in points],
            [y for _, y, _ in points],
            marker,
            color=colour,
            markersize=5,
            label=label,
        )
        if name == "ours":
            for x, y, row in points:
                plot.annotate(
                    row.layer, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=6.5
                )
    plot.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        xlabel="FLOP for each byte that must move",
        ylabel="TFLOP/s",
        title=group.name,
    )
    plot.grid(alpha=0.25, which="both")
    plot.legend(loc="lower right", fontsize=8)
    return figure


def _rate(row: Row) -> str:
    """The key of `Ceilings.rates`."""
    return "tf32" if row.math == "tf32" else row.dtype


def _horizontal(group: Group, bars: int) -> tuple[Any, Any]:
    """A figure with one line for each layer, the first at the top."""
    lines = len(group.rows)
    height = 1.5 + lines * (0.14 + 0.1 * bars)
    figure = figures().Figure(figsize=(9, height), layout="constrained")
    plot = figure.subplots()
    plot.set_yticks(range(lines), [row.layer for row in group.rows], fontsize=8)
    plot.set_ylim(lines - 0.4, -0.6)
    plot.set_title(group.name, fontsize=10)
    plot.grid(axis="x", alpha=0.25, which="both")
    return figure, plot


def _plain_ticks(axis: Any) -> None:
    """1, 2, 5 instead of powers of ten."""
    ticker: Any = importlib.import_module("matplotlib.ticker")
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _note(plot: Any, text: str, x: float, y: float, left: bool = False) -> None:
    """A figure beside the end of a bar."""
    plot.annotate(
        text,
        (x, y),
        xytext=(-3 if left else 5, 0),
        textcoords="offset points",
        ha="right" if left else "left",
        va="center",
        fontsize=7,
    )


def _legend(figure: Any, plot: Any) -> None:
    """Each label once, below the plot."""
    handles, labels = plot.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    figure.legend(list(once.values()), list(once), loc="outside lower center", ncols=2, fontsize=8)
