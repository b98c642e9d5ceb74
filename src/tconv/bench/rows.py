"""The rows of a benchmark: their columns, and files of them, JSON and CSV.

A file is one list of rows, and each row says what it was measured on, so that rows of many runs can
be put together.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tconv.jit.files import write_whole

CONTESTANTS = ("ours", "eager", "best", "compile", "flaggems")
"""Each has a column with its median, and beside it p20 and p80."""


@dataclass(frozen=True)
class Key:
    """Identity of a row: two rows with one key measure the same, on the same kind of device.

    Attributes:
        layer: its name, or its text where it has none.
        text, input: the layer and its input, as `tconv` takes them on the command line.
        bias: whether forward added one.
        dtype, layout: of the tensors.
        tf32: whether TF32 was allowed.
        direction: which of the three maps.
        device: in one word: "h200", "cpu".
        autotune: whether ours was tuned by timing, not only by the model.
    """

    layer: str
    text: str
    input: str
    bias: bool
    dtype: str
    layout: str
    tf32: bool
    direction: str
    device: str
    autotune: bool


@dataclass(frozen=True, kw_only=True)
class What:
    """The columns that say what was measured: the first ones of every row.

    Attributes:
        layer, dtype, layout, direction, device: as in `Key`.
        math: the arithmetic of ours: "tf32", or "ieee" in the dtype itself.
        commit: of tconv; "" if unknown.
    """

    layer: str
    dtype: str
    layout: str
    math: str
    direction: str
    device: str
    commit: str


@dataclass(frozen=True, kw_only=True)
class How:
    """The columns that say how and on what it was measured: the last ones of every row.

    Attributes:
        text, input, bias, tf32, autotune: as in `Key`.
        repeats: timings of each median.
        gpu, driver, torch, cuda, cudnn, python, platform, cpu_threads, tconv: what it ran on.
        measured: when, UTC.
    """

    text: str = ""
    input: str = ""
    bias: bool = False
    tf32: bool = True
    autotune: bool = False
    repeats: int = 0
    gpu: str = ""
    driver: str = ""
    torch: str = ""
    cuda: str = ""
    cudnn: str = ""
    python: str = ""
    platform: str = ""
    cpu_threads: str = ""
    tconv: str = ""
    measured: str = ""


@dataclass(frozen=True, kw_only=True)
class Row(How, What):
    """One direction of one layer; times in milliseconds, None for what was not measured.

    Attributes:
        ours_ms, eager_ms, best_ms, compile_ms, flaggems_ms: medians, with `_p20_` and `_p80_` of
            each.
        floor_ms: the least time that the device allows, the empty kernel's included.
        error, error_cudnn, error_flaggems: relative errors against float64 of ours, of `eager` and
            of `flaggems`.
        apart: the whole result's distance from `eager`'s, as a share of its norm.
        checked: which part of the result the errors are of.
        wrong: one sentence if ours is wrong or failed, else None.
        failed: why `compile` or `flaggems` has no time though it was asked for, "name: why; ...".
        best_setting: which of PyTorch's settings was the fastest.
        settings: the median of every setting that was tried, "name: ms; ...".
        kernel: the kernel and tile that the plan chose, "" where PyTorch computed ours.
        default: who would have run the call by default, and why: "pytorch: general"; ours is timed
            in any case. "" where that is not known.
        modelled_ms: what the plan's model says of it.
        first_call_ms: our first call: planning, loading and running, on the host's clock.
        empty_ms: an empty kernel's time in the same harness.
        bound: what sets the floor: "memory" or "arithmetic".
        flops, bytes: the least work.
    """

    ours_ms: float | None = None
    ours_p20_ms: float | None = None
    ours_p80_ms: float | None = None
    eager_ms: float | None = None
    eager_p20_ms: float | None = None
    eager_p80_ms: float | None = None
    best_ms: float | None = None
    best_p20_ms: float | None = None
    best_p80_ms: float | None = None
    compile_ms: float | None = None
    compile_p20_ms: float | None = None
    compile_p80_ms: float | None = None
    flaggems_ms: float | None = None
    flaggems_p20_ms: float | None = None
    flaggems_p80_ms: float | None = None
    floor_ms: float | None = None
    error: float | None = None
    error_cudnn: float | None = None
    error_flaggems: float | None = None
    apart: float | None = None
    checked: str = ""
    wrong: str | None = None
    failed: str = ""
    best_setting: str = ""
    settings: str = ""
    kernel: str = ""
    default: str = ""
    modelled_ms: float | None = None
    first_call_ms: float | None = None
    empty_ms: float | None = None
    bound: str = ""
    flops: int = 0
    bytes: int = 0

    @property
    def key(self) -> Key:
        """What the row is of."""
        return Key(**{name: getattr(self, name) for name in _names(Key)})


@dataclass(frozen=True, kw_only=True)
class SweepRow(How, What):
    """One kernel and tile on one direction of one layer.

    Attributes:
        kernel, tile: a row of the kernel's table of tiles.
        chosen: whether the plan chooses it.
        default: who would have run the call by default, and why: "pytorch: general"; ours is timed
            in any case. "" where that is not known.
        modelled_ms: what the plan's model says of it.
        kernel_ms: the whole call with it, with p20 and p80; None if it failed.
        error: relative error against float64.
        wrong: one sentence if it is wrong or failed, else None.
    """

    kernel: str
    tile: str
    chosen: bool
    modelled_ms: float
    kernel_ms: float | None = None
    kernel_p20_ms: float | None = None
    kernel_p80_ms: float | None = None
    error: float | None = None
    wrong: str | None = None


def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


REQUIRED = (
    *_names(What),
    *("ours_ms", "eager_ms", "best_ms", "floor_ms", "error", "error_cudnn"),
)
"""Columns without which a record is no row."""


def write_rows(stem: Path, rows: Sequence[Row] | Sequence[SweepRow]) -> None:
    """Writes <stem>.json and <stem>.csv, each whole or not at all.

    Raises:
        OSError: one cannot be written.
    """
    if not rows:
        raise ValueError("a file of rows needs at least one row, got none")
    records = [_record(row) for row in rows]
    stem.parent.mkdir(parents=True, exist_ok=True)
    json_text = "[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n"
    text = io.StringIO()
    table = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(records)
    for suffix, content in ((".json", json_text), (".csv", text.getvalue())):
        write_whole(stem.with_name(stem.name + suffix), [content.encode()])


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSON file. Columns that this version does not know are dropped.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no rows; says which row lacks which column.
    """
    try:
        records = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from None
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise ValueError(
            f"{path} must hold a list of rows, as `tconv bench` writes it; got {_kind(records)}"
        )
    known = _names(Row)
    rows = []
    for number, record in enumerate(records):
        missing = [name for name in REQUIRED if name not in record]
        if missing:
            raise ValueError(
                f"{path} must hold rows as `tconv bench` writes them; row {number} lacks "
                f"{', '.join(missing)}"
            )
        rows.append(Row(**{name: value for name, value in record.items() if name in known}))
    return rows


def merged(kept: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """The rows, a new one in the place of the kept one with its key."""
    by_key = {row.key: row for row in kept}
    by_key.update((row.key, row) for row in new)
    return list(by_key.values())


def _kind(value: object) -> str:
    if isinstance(value, dict):
        return f"an object with {', '.join(map(str, list(value)[:5])) or 'nothing in it'}"
    return f"a {type(value).__name__}"


def _record(row: Row | SweepRow) -> dict[str, Any]:
    """As JSON takes it, None for a number that is none; what was measured comes before how."""
    last = _names(How)
    values = dataclasses.asdict(row)
    ordered = [name for name in values if name not in last] + list(last)
    return {name: _finite(values[name]) for name in ordered}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
