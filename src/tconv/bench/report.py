"""A page of a benchmark's rows: tables, geometric means, plots; one HTML file without any other."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from tconv.bench import plots
from tconv.bench.rows import How, Key, Row
from tconv.bench.summary import Group, Mean, groups, ratio
from tconv.jit.files import write_whole

TEMPLATE = Path(__file__).with_suffix(".html")

_RIVALS = ("eager", "best", "compile", "flaggems")
_PAIRS = (*((name, "ours") for name in _RIVALS), ("ours", "floor"))
_NAMES = {
    "ours": "tconv",
    "eager": "PyTorch's default",
    "best": "PyTorch's best setting",
    "compile": "torch.compile",
    "flaggems": "FlagGems",
    "floor": "floor",
}

# Columns of the full table that stand elsewhere on the page.
_ELSEWHERE = {field.name for field in dataclasses.fields(How)} | {"direction", "dtype", "layout"}


def write(rows: Sequence[Row], folder: Path, title: str) -> list[Path]:
    """Writes index.html and the plots as PNG files into a folder, which is made.

    Returns:
        the files, the page first.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    plots.figures()
    folder.mkdir(parents=True, exist_ok=True)
    found = groups(rows)
    pictures = [plots.write(group, folder) for group in found]
    page = folder / "index.html"
    sections = [_section(*pair) for pair in zip(found, pictures, strict=True)]
    text = Template(TEMPLATE.read_text()).substitute(
        title=escape(title),
        lead=_lead(rows),
        environment=_environment(rows),
        groups="\n".join(sections),
    )
    write_whole(page, [text.encode()])
    return [page, *(path for of_group in pictures for path in of_group.values())]


def _lead(rows: Sequence[Row]) -> str:
    wrong = sum(row.wrong is not None for row in rows)
    compared = sum(row.error is not None and row.wrong is None for row in rows)
    right = (
        f"{compared} of {len(rows)} results were compared with float64 in the run that timed them, "
        "and are right."
    )
    if wrong:
        right += f" {wrong} of {len(rows)} results are wrong: see the tables."
    least, most = min(row.repeats for row in rows), max(row.repeats for row in rows)
    repeats = str(least) if least == most else f"{least} to {most}"
    few = "; fewer than 30 are a look, not a figure that counts" if least < 30 else ""
    return escape(
        f"Times are medians of {repeats} timings, in milliseconds{few}. Floor: the larger of the "
        "bytes that must move over the measured copy rate and the operations over the measured "
        "rate of the arithmetic, plus the time of an empty kernel. PyTorch's best setting: the "
        "least of cudnn.benchmark off and on, contiguous and channels_last, and for stride 1 "
        f"conv2d with flipped weights. {right}"
    )


def _environment(rows: Sequence[Row]) -> str:
    """One line for each thing that was recorded, its values if rows differ."""
    shown = [field.name for field in dataclasses.fields(How)]
    shown = ["commit", *(name for name in shown if name not in _names(Key))]
    lines = []
    for name in shown:
        values = sorted({str(getattr(row, name)) for row in rows} - {""})
        if name == "measured" and len(values) > 1:
            values = [f"{values[0]} to {values[-1]}"]
        if values:
            lines.append(
                f"<tr><th>{escape(name.replace('_', ' '))}</th>"
                f"<td>{escape(', '.join(values))}</td></tr>"
            )
    return f"<table>{''.join(lines)}</table>"


def _section(group: Group, pictures: dict[str, Path]) -> str:
    parts = [f"<h2>{escape(group.name[0].upper() + group.name[1:])}</h2>", _means(group)]
    for title, path in pictures.items():
        data = base64.b64encode(path.read_bytes()).decode()
        parts.append(
            f'<figure><img alt="{escape(title)}" src="data:image/png;base64,{data}">'
            f"<figcaption>{escape(title)}</figcaption></figure>"
        )
    if all(row.floor_ms is None for row in group.rows):
        device = escape(group.rows[0].device)
        parts.append(f"<p>No floor: the ceilings of {device} were not measured.</p>")
    parts += [_table(group), _everything(group)]
    return "\n".join(parts)


def _means(group: Group) -> str:
    lines = []
    for above, below in _PAIRS:
        mean = group.mean(above, below)
        if mean.value is not None:
            lines.append(
                f"<tr><td>{escape(_NAMES[above])} / {escape(_NAMES[below])}</td>"
                f'<td class="number ours">{mean.value:.2f}</td>'
                f'<td class="number">{mean.count} of {len(group.rows)}</td>'
                f"<td>{_extreme(mean, 'least')}</td><td>{_extreme(mean, 'most')}</td></tr>"
            )
    return (
        '<table><tr><th>ratio</th><th class="number">geometric mean</th>'
        '<th class="number">layers</th><th>least</th><th>most</th></tr>'
        f"{''.join(lines)}</table>"
    )


def _extreme(mean: Mean, which: str) -> str:
    found = getattr(mean, which)
    return "" if found is None else f"{found[0]:.2f}, {escape(found[1])}"


def _table(group: Group) -> str:
    """The times and ratios of each layer."""
    here = [name for name in _RIVALS if any(_ms(row, name) for row in group.rows)]
    timed = [*here, "ours", "floor"]
    pairs = [pair for pair in _PAIRS if pair[0] in timed]
    headings = ["layer", *(_NAMES[name] for name in timed)]
    headings += [f"{_NAMES[above]} / {_NAMES[below]}" for above, below in pairs]
    headings += ["error", "PyTorch's error", "kernel"]
    lines = [f"<tr>{''.join(_heading(heading) for heading in headings)}</tr>"]
    for row in group.rows:
        cells = [f"<td>{escape(row.layer)}</td>"]
        cells += [
            _number(_ms(row, name), ".4f", _spread(row, name), ours=name == "ours")
            for name in timed
        ]
        cells += [_number(ratio(_ms(row, a), _ms(row, b)), ".2f") for a, b in pairs]
        cells += [_number(row.error, ".1e"), _number(row.error_cudnn, ".1e")]
        if row.wrong is None:
            cells.append(f"<td>{escape(row.kernel)}</td>")
        else:
            cells.append(f'<td class="wrong">{escape(row.wrong)}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _everything(group: Group) -> str:
    """Every column of every row, folded away."""
    names = [field.name for field in dataclasses.fields(Row) if field.name not in _ELSEWHERE]
    names += ["text", "input", "repeats", "measured"]
    lines = [f"<tr>{''.join(_heading(name) for name in names)}</tr>"]
    for row in group.rows:
        cells = []
        for name in names:
            value = getattr(row, name)
            if isinstance(value, float):
                cells.append(_number(value, ".6g"))
            else:
                cells.append(f"<td>{'' if value is None else escape(str(value))}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        "<details><summary>All columns</summary>"
        f'<div class="wide"><table>{"".join(lines)}</table></div></details>'
    )


def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _ms(row: Row, name: str) -> float | None:
    return getattr(row, f"{name}_ms")


def _spread(row: Row, name: str) -> str:
    low, high = (getattr(row, f"{name}_{p}_ms", None) for p in ("p20", "p80"))
    return "" if low is None or high is None else f"p20 {low:.4f}, p80 {high:.4f}"


def _heading(text: str) -> str:
    kind = "" if text in ("layer", "kernel") else ' class="number"'
    return f"<th{kind}>{escape(text)}</th>"


def _number(value: float | None, form: str, title: str = "", ours: bool = False) -> str:
    classes = "number ours" if ours else "number"
    hint = f' title="{escape(title)}"' if title else ""
    return f'<td class="{classes}"{hint}>{"" if value is None else format(value, form)}</td>'
