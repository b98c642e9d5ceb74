"""Writes src/tconv/kernels/ahead.json: where committed rows show a kernel ahead of PyTorch.

    python benchmarks/ahead.py [--write]

A class of problems is a GPU, a kernel, a dtype, an arithmetic and a layout. It is ahead if at least
`LEAST_ROWS` rows of `tconv bench` are in it and PyTorch's default takes `LEAST_RATIO` times ours or
more in each. Rows of calls that the model gives less than `choice.SURE_SECONDS` do not count:
there the host's time matters, which rows do not have. Without --write it prints the classes.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from pathlib import Path

from tconv.choice import SURE_SECONDS, Ahead

ROOT = Path(__file__).resolve().parent.parent
ROWS = (
    "bench-float32-tf32-contiguous.csv",
    "bench-float32-no-tf32-contiguous.csv",
    "random150-float32-tf32-contiguous.csv",
)
WRITTEN = ROOT / "src" / "tconv" / "kernels" / "ahead.json"
LEAST_ROWS = 6
LEAST_RATIO = 1.2


def ratios() -> dict[Ahead, list[float]]:
    """PyTorch's default time over ours, for each class."""
    found = defaultdict(list)
    for name in ROWS:
        with (ROOT / "benchmarks" / "results" / "h200" / name).open(newline="") as file:
            for row in csv.DictReader(file):
                if row["wrong"] or row["direction"] != "forward":
                    continue
                if float(row["modelled_ms"]) < SURE_SECONDS * 1e3:
                    continue
                stem = row["kernel"].split()[0]
                one = Ahead(row["gpu"], stem, row["dtype"], row["math"], row["layout"])
                found[one].append(float(row["eager_ms"]) / float(row["ours_ms"]))
    return found


def text() -> str:
    """What the file is to hold."""
    rows = [
        {**one._asdict(), "rows": len(values), "least": round(min(values), 2)}
        for one, values in sorted(ratios().items())
        if len(values) >= LEAST_ROWS and min(values) >= LEAST_RATIO
    ]
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n"


def main() -> None:
    """Prints or writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        WRITTEN.write_text(text(), encoding="utf-8")
        return
    for one, values in sorted(ratios().items()):
        print(*one, f"{len(values)} rows, least {min(values):.2f}")


if __name__ == "__main__":
    main()
