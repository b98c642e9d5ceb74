"""Fits the cost model of sm90_tf32_forward to the rows of its sweep logs.

    PYTHONPATH=src python benchmarks/fit_sm90_tf32_forward.py     # needs scipy

Prints the cycles that each part of a tile costs, as `cost` in kernels/sm90_tf32_forward.py has
them, how far the model is from each row, and for each layer which tile it would choose.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from tconv.kernels import sm90_tf32_forward as kernel
from tconv.layers import read_layers

RESULTS = Path(__file__).parent / "results" / "h200"
LOGS = ("sm90_tf32_forward_v5.log", "sm90_tf32_forward_v6.log")
MULTIPROCESSORS = 132
CLOCK = 1.7e9
LAUNCH = 3e-6


def features(problem, tile):
    """Seconds per cycle of: a product's pixel pair, a pair, a patch pixel, a stage, an output."""
    laid = kernel.layout(problem, tile)
    pairs = sum(len(laid.classes[c]) for c in laid.m_class) / len(laid.m_class)
    pixels = tile.rows * tile.columns
    waves = -(-laid.tiles // (kernel.RINGS * MULTIPROCESSORS))
    per_stage = (pairs * pixels / 2, pairs, laid.patch_rows * laid.patch_columns, 1)
    cycles = [laid.chunks * count for count in per_stage] + [tile.m_tiles * pixels]
    return np.array(cycles) * waves * kernel.RINGS / CLOCK


def main() -> None:
    """Fit and print."""
    problems = {one.name: one.problem("forward") for one in read_layers(RESULTS / "layers.json")}
    tiles = {str(tile): tile for tile in kernel.TILES}
    rows, layer = [], ""
    for log in LOGS:
        for line in (RESULTS / log).read_text().splitlines():
            if match := re.match(r"(\w+)\s+eager", line):
                layer = match[1]
            if (match := re.match(r"\s+(\d+x\d+x\d+)\s+([\d.]+) pack", line)) and match[1] in tiles:
                rows.append((layer, match[1], float(match[2]) * 1e-3))
    matrix = np.array([features(problems[name], tiles[tile]) for name, tile, _ in rows])
    times = np.array([time for *_, time in rows])
    cycles, _ = nnls(matrix / times[:, None], (times - LAUNCH) / times)
    ratio = (matrix @ cycles + LAUNCH) / times
    print(f"{len(rows)} rows; cycles {np.round(cycles, 3)}")
    mean = np.exp(np.log(ratio).mean())
    print(f"model / measured: {mean:.2f}, {ratio.min():.2f} to {ratio.max():.2f}")
    for name, tile, time in rows:
        model = features(problems[name], tiles[tile]) @ cycles + LAUNCH
        print(f"{name:18s} {tile:9s} measured {time * 1e3:.3f} model {model * 1e3:.3f}")


if __name__ == "__main__":
    main()
