"""Ratios of a benchmark's rows, and their geometric means."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tconv.bench.rows import Row


def ratio(above: float | None, below: float | None) -> float | None:
    """above / below, None where either is missing."""
    return above / below if above is not None and below else None


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean, None of nothing."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


@dataclass(frozen=True)
class Mean:
    """A geometric mean, and how many rows it is of: one without its measurement is in none.

    Attributes:
        value: the mean; None of no rows.
        count: rows that have it.
        least, most: the extremes, and the layers that they are of.
        ratios: of each row, with its layer.
    """

    value: float | None
    count: int
    least: tuple[float, str] | None
    most: tuple[float, str] | None
    ratios: tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class Group:
    """Rows that can be compared: one dtype, layout, TF32 setting, direction and device.

    Attributes:
        name: "forward, float32 with TF32, contiguous, h200".
        slug: the same for a file's name.
        rows: in the order in which they came.
    """

    name: str
    slug: str
    rows: tuple[Row, ...]

    def mean(self, above: str, below: str, *, least_floor: float = 0.0) -> Mean:
        """Of the ratio of two columns, as "eager" / "ours", over floors of so many ms and more."""
        found = []
        for row in self.rows:
            if (row.floor_ms or 0.0) < least_floor:
                continue
            value = ratio(getattr(row, f"{above}_ms"), getattr(row, f"{below}_ms"))
            if value is not None:
                found.append((value, row.layer))
        return Mean(
            geometric_mean(value for value, _ in found),
            len(found),
            min(found, default=None),
            max(found, default=None),
            tuple(found),
        )


def groups(rows: Sequence[Row]) -> list[Group]:
    """The rows by what can be compared, in the order in which they come."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = (row.direction, _arithmetic(row), row.layout, row.device, *_options(row))
        found.setdefault(key, []).append(row)
    return [
        Group(", ".join(key), re.sub("[ _]", "-", "-".join(key)).lower(), tuple(of_key))
        for key, of_key in found.items()
    ]


def _arithmetic(row: Row) -> str:
    if row.dtype != "float32" or row.device == "cpu":
        return row.dtype
    return "float32 with TF32" if row.tf32 else "float32 without TF32"


def _options(row: Row) -> list[str]:
    given = {"bias": row.bias, "autotune": row.autotune}
    return [f"with {name}" for name, on in given.items() if on]
