"""The plan's cost models against the sweeps of every candidate, and the fits that they come from.

    PYTHONPATH=src python benchmarks/fit_costs.py          # how the plan's picks do
    PYTHONPATH=src python benchmarks/fit_costs.py --fit    # the fits; needs scipy
    PYTHONPATH=src python benchmarks/fit_costs.py --write  # and into the families' costs.json

Reads results/h200/sweep_*.csv (kernel and packing together, cold L2) and the layers beside them;
of the kernels for sm_80 results/h200/sm80, in bfloat16 on Hopper, where plans leave them out.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tconv.jit.target import Target
from tconv.kernels import costs, sm80
from tconv.kernels import sm90_tf32_flat_forward as flat
from tconv.kernels import sm90_tf32_forward as patches
from tconv.kernels.family import Family
from tconv.kernels.sm80.cost import VARIANTS as SM80_VARIANTS
from tconv.kernels.sm80.cost import (
    blocks_at_once,
    bytes_moved,
    bytes_packed,
    copies,
    launched,
    vectors,
)
from tconv.kernels.sm80.layout import DEPTH
from tconv.kernels.sm80.layout import layout as lay_sm80
from tconv.kernels.sm90_tf32_flat_forward.cost import packing_cost
from tconv.kernels.sm90_tf32_flat_forward.layout import LINE_BYTES, WEIGHT_BYTES
from tconv.kernels.sm90_tf32_forward.cost import VARIANTS
from tconv.layers import DIRECTIONS, read_layers
from tconv.plan import Candidate, candidates, family
from tconv.problem import Problem

RESULTS = Path(__file__).parent / "results" / "h200"
# A later file's rows take the place of an earlier one's.
SWEEPS = {
    "sweep_layers.csv": "layers.json",
    "sweep_random60.csv": "random60.json",
    "sweep_staged.csv": "layers.json",
    "sweep_half.csv": "layers.json",
    "sweep_half_random60.csv": "random60.json",
    "sweep_overlap.csv": "layers.json",
    "sweep_overlap_random60.csv": "random60.json",
    "sweep_tables.csv": "layers.json",
    "sweep_sectors.csv": "layers.json",
    "sweep_storers.csv": "layers.json",
    "sweep_mma.csv": "layers.json",
    "sweep_bulk.csv": "layers.json",
    "sweep_bulk_random60.csv": "random60.json",
    "sweep_aligned.csv": "layers.json",
    "sweep_aligned_random60.csv": "random60.json",
    "sweep_order.csv": "layers.json",
    "sweep_order_random60.csv": "random60.json",
    "sweep_common.csv": "layers.json",
    "sweep_common_random60.csv": "random60.json",
    "sweep_in_step.csv": "layers.json",
    "sweep_in_step_random60.csv": "random60.json",
    "sweep_groups.csv": "layers.json",
    "sweep_picks.csv": "layers.json",
    "sweep_few_channels_random60.csv": "random60.json",
}
_BEFORE_STAGING = ("sweep_layers.csv", "sweep_random60.csv")
TARGET = Target.named("sm_90a")
CLOCK = 1.7e9
# Of the rows of a layer in the fits; others that have a name weigh 2, random ones 1.
WEIGHTS = dict.fromkeys(("kb57", "kb65", "kb69", "kb71", "kb78"), 40.0) | dict.fromkeys(
    ("hd_k4s2", "unet_shallow", "sam_up2"), 6.0
)


@dataclass(frozen=True)
class Row:
    """One candidate of one layer.

    Attributes:
        seconds: measured, packing included.
        weight: in the fits.
    """

    layer: str
    problem: Problem
    candidate: Candidate
    seconds: float
    weight: float


def rows() -> list[Row]:
    """The newest row of every tile that is still in its kernel's table."""
    found: dict[tuple[str, str, str], Row] = {}
    for sweep, layers in SWEEPS.items():
        problems = {one.name: one.problem("forward") for one in read_layers(RESULTS / layers)}
        known = {
            name: {(c.stem, str(c.tile)): c for c in candidates(problem, TARGET) if not c.refusal}
            for name, problem in problems.items()
        }
        with (RESULTS / sweep).open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                name = row["layer"]
                if f"/{problems[name].math}" not in row["problem"]:  # the rule has changed since
                    continue
                kernel, tile = row["kernel"], row["tile"]
                candidate = known[name].get((kernel, tile))
                if candidate is None:
                    continue
                weight = WEIGHTS.get(name, 1.0 if name.startswith("random") else 2.0)
                if _timed_before_staging(sweep, candidate):
                    weight /= 5
                found[name, kernel, tile] = Row(
                    name, problems[name], candidate, float(row["ms"]) / 1e3, weight
                )
    return list(found.values())


SM80 = tuple(family(f"sm80_{direction}") for direction in DIRECTIONS)


def rows_of_sm80() -> list[Row]:
    """Those of the kernels for sm_80, but for depthwise layers, which others serve."""
    layers = {one.name: one for one in read_layers(RESULTS / "layers.json")}
    found = []
    for of_direction in SM80:
        direction = of_direction.DIRECTION
        for layout in ("channels_last", "contiguous"):
            path = RESULTS / "sm80" / f"{direction}.{layout}.csv"
            with path.open(encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    layer = dataclasses.replace(layers[row["layer"]], bias=False)
                    if row["kernel"] != of_direction.STEM or layer.groups == layer.in_channels:
                        continue
                    problem = layer.problem(direction, "bfloat16", layout)
                    known = {str(c.tile): c for c in candidates(problem, TARGET, (of_direction,))}
                    name, seconds = f"{layer.name} {direction} {layout}", float(row["ms"]) / 1e3
                    found.append(Row(name, problem, known[row["tile"]], seconds, 1.0))
    return found


def _timed_before_staging(sweep: str, candidate: Candidate) -> bool:
    """Whether the row is of sm90_tf32_forward when streamed weights came through L1."""
    of_kernel = candidate.stem == patches.STEM
    return of_kernel and not candidate.tile.resident and sweep in _BEFORE_STAGING


class Pick(NamedTuple):
    """What the plan takes for a layer.

    Attributes:
        picked, best: the plan's candidate and the fastest of those measured.
        loss: the time of the first over that of the second; None where no sweep measured it.
    """

    layer: str
    picked: Candidate
    best: Candidate
    loss: float | None


def picks(measured: list[Row], families: tuple[Family, ...] | None = None) -> list[Pick]:
    """What the plan's picks cost against the best candidates, one for each layer.

    Args:
        measured: the rows.
        families: the kernels to pick from; None for those of a plan.
    """
    found = []
    for name in dict.fromkeys(row.layer for row in measured):
        of_layer = {row.candidate: row.seconds for row in measured if row.layer == name}
        problem = next(row.problem for row in measured if row.layer == name)
        picked = candidates(problem, TARGET, families)[0]
        best = min(of_layer, key=lambda candidate: of_layer[candidate])
        seconds = of_layer.get(picked)
        found.append(Pick(name, picked, best, seconds and seconds / of_layer[best]))
    return found


def mean_loss(found: list[Pick]) -> float:
    """The geometric mean of those that were measured."""
    return math.exp(statistics.mean(math.log(pick.loss) for pick in found if pick.loss))


def report(measured: list[Row], families: tuple[Family, ...] | None = None) -> None:
    """Prints the picks, and how far each model is off."""
    found = picks(measured, families)
    known = [pick for pick in found if pick.loss]
    print(f"{len(known)} layers: the pick takes {mean_loss(found):.3f} of the best, geometric mean")
    for pick in sorted(known, key=lambda pick: -(pick.loss or 0))[:12]:
        print(
            f"  {pick.loss:.2f} {pick.layer}: {pick.picked.stem} {pick.picked.tile}, "
            f"best {pick.best.stem} {pick.best.tile}"
        )
    for pick in found:
        if pick.loss is None:
            print(f"  no sweep measured the pick for {pick.layer}: {pick.picked}")
    for stem in dict.fromkeys(row.candidate.stem for row in measured):
        off = [
            math.log(row.seconds / row.candidate.cost)
            for row in measured
            if row.candidate.stem == stem
        ]
        print(
            f"{stem}: measured / modelled {math.exp(statistics.mean(off)):.2f}, "
            f"spread {statistics.pstdev(off):.2f}, {len(off)} rows"
        )


class Fit(NamedTuple):
    """Constants of a model, fitted.

    Attributes:
        values: by their name in costs.json.
        origin: the rows, and how far the model is off.
    """

    values: dict[str, float]
    origin: str


def least_squares(model, present: Any, names: str, measured: list[Row]) -> Fit:
    """The constants (not negative) with the least squares of the weighted logarithm.

    Args:
        model: seconds of each row, given a value for each name.
        present: the constants to start from, as attributes.
        names: those to fit, with spaces between.
        measured: the rows.
    """
    from scipy.optimize import minimize

    seconds = np.array([row.seconds for row in measured])
    weights = np.array([row.weight for row in measured])
    start = np.array([getattr(present, name) or 0.1 for name in names.split()])

    def loss(q):
        return float(np.average(np.log(model(*np.abs(q)) / seconds) ** 2, weights=weights))

    best = None
    for seed in range(8):
        first = start * np.exp(np.random.RandomState(seed).randn(len(start)) * 0.3)
        options = {"maxiter": 30000, "maxfev": 30000}
        found = minimize(loss, first, method="Nelder-Mead", options=options)
        if best is None or found.fun < best.fun:
            best = found
    values = {
        name: float(f"{value:.3g}")
        for name, value in zip(names.split(), np.abs(best.x), strict=True)
    }
    return Fit(values, f"{len(measured)} rows, off by {best.fun**0.5:.0%}")


def column(values) -> np.ndarray:
    """One value for each row."""
    return np.array(list(values), dtype=float)


def fit_patches(measured: list[Row], half: bool, resident: bool) -> Fit:
    """The constants of sm90_tf32_forward, in float16 or TF32, of resident or streamed weights.

    Of tiles whose consumers have a patch each: what a common one saves is set by hand.
    """
    chosen = [
        row
        for row in measured
        if row.candidate.stem == patches.STEM
        and not row.candidate.tile.common
        and (row.candidate.tile.half, row.candidate.tile.resident) == (half, resident)
    ]
    laid = [patches.layout(row.problem, row.candidate.tile) for row in chosen]
    tiles = [row.candidate.tile for row in chosen]
    present = costs.load(patches.__file__, VARIANTS[half, resident])

    waves = column(-(-one.tiles // (one.rings * TARGET.multiprocessors)) for one in laid)
    rings = column(one.rings for one in laid)
    chunks, pairs = column(one.chunks for one in laid), column(one.mean_pairs for one in laid)
    pixels = column(tile.rows * tile.columns for tile in tiles)
    patch = column(one.patch_rows * one.patch_columns for one in laid)
    outputs, pieces = (
        column(tile.m_tiles * tile.rows * tile.columns for tile in tiles),
        column(tile.m_tiles * tile.rows for tile in tiles),
    )
    plain = column(row.problem.width.stride == 1 for row in chosen) > 0
    mapped = column(row.problem.source_aligned for row in chosen) > 0
    one_raw = mapped & (column(one.stages(TARGET)[1] for one in laid) == 1)
    kept = column(one.resident_bytes for one in laid) / present.l2_bytes
    moved = column(row.problem.bytes for row in chosen)
    columns = column(
        tile.columns * row.problem.width.stride for tile, row in zip(tiles, chosen, strict=True)
    )

    def model(stage, pair, product, by_map, loaded, beside, output, phased, row, single, launch,
              rate, edge, both):  # fmt: skip
        products = pairs * pixels / 2
        per_patch = np.where(mapped, by_map, loaded) * patch
        consumed = pairs * pair + product * products
        of_stage = stage + np.maximum(consumed, per_patch + beside * products)
        of_stage = of_stage * np.where(one_raw, 1 + single, 1)
        of_tile = chunks * of_stage + np.where(plain, output, phased) * outputs + row * pieces
        busy = (waves * rings * of_tile + kept) / CLOCK
        memory = moved * (1 + edge / columns) / (rate * 1e12)
        return np.maximum(busy, memory) + both * np.minimum(busy, memory) + launch * 1e-6

    names = (
        "stage pair product mapped loaded beside output phased row single launch bytes edge both"
    )
    return least_squares(model, present, names, chosen)


def fit_flat(measured: list[Row]) -> Fit:
    """The constants of sm90_tf32_flat_forward that are no corrections."""
    chosen = [row for row in measured if row.candidate.stem == flat.STEM]
    laid = [flat.layout(row.problem, row.candidate.tile) for row in chosen]
    present = costs.load(flat.__file__)

    waves = column(-(-one.tiles // TARGET.multiprocessors) for one in laid)
    chunks = column(one.chunks for one in laid)
    steps = column(one.chunks * one.row_begin[-1] / one.row_sets for one in laid)
    columns = column(one.tile.columns for one in laid)
    strides = [row.problem.width.stride for row in chosen]
    outputs = column(one.step for one in laid) * column(
        1 if one & (one - 1) == 0 else present.division for one in strides
    )
    patch = column(one.chunks * one.patch_positions * LINE_BYTES for one in laid)
    pixel_stages = column(one.fitting_stages(TARGET)[0] for one in laid)
    weight_stages = column(one.fitting_stages(TARGET)[1] for one in laid)
    resident = column(one.tile.resident for one in laid) > 0
    ahead = weight_stages * np.maximum(steps / chunks / 2, 0.5)
    ahead = np.where(resident, pixel_stages, np.minimum(pixel_stages, ahead))
    storers = column(one.tile.storers for one in laid) > 0
    moved = column(row.problem.bytes for row in chosen)
    packing = column(packing_cost(one) for one in laid)

    def model(product, rate, step, stage, store, left, written, tile, memory, launch):
        copied = (np.where(resident, 0, steps * WEIGHT_BYTES) + patch) / rate
        main = np.maximum(product * steps * 2 * columns, copied) + step * steps
        main = np.maximum(main, stage * chunks / ahead)
        of_tile = np.where(
            storers,
            np.maximum(main, store * outputs) + left * outputs,
            main + written * outputs,
        )
        cycles = waves * (of_tile + tile)
        cycles += np.where(resident, steps * WEIGHT_BYTES / rate, 0)
        return np.maximum(cycles / CLOCK, moved / (memory * 1e12)) + packing + launch * 1e-6

    names = "product rate step stage store left written tile memory launch"
    return least_squares(model, present, names, chosen)


def fit_sm80(measured: list[Row]) -> dict[str, Fit]:
    """The constants of the kernels for sm_80: those of all, and each variant's."""
    laid = [lay_sm80(row.problem, TARGET, row.candidate.tile) for row in measured]
    tiles = [row.candidate.tile for row in measured]
    variants = [SM80_VARIANTS[row.problem.direction] for row in measured]
    present = costs.load(sm80.__file__, "gather")
    gathers = column(variant == "gather" for variant in variants) > 0
    waves = column(-(-one.blocks // TARGET.multiprocessors) for one in laid)
    stages = column(one.stages for one in laid)
    at_once = column(blocks_at_once(one, TARGET) for one in laid)
    products = column(tile.tile_rows * tile.tile_columns * DEPTH for tile in tiles)
    copied = column((tile.tile_rows + tile.tile_columns) * DEPTH * 2 for tile in tiles)
    of_thread = column(copies(tile) for tile in tiles)
    both = list(zip(measured, laid, strict=True))
    stored = column(vectors(row.problem, row.candidate.tile) for row in measured)
    moved = column(bytes_moved(row.problem, one) for row, one in both)
    images, weights = (
        column(bytes_packed(row.problem, one)[place] for row, one in both) for place in (0, 1)
    )
    launches = column(launched(one) for one in laid)

    def model(product, turned, copy, rate, written, block, packing, packing_weights, launch):
        stage = np.maximum(products / np.where(gathers, product, turned), copied / rate)
        stage = np.maximum(stage, of_thread * copy / at_once)
        of_block = stages * stage + (stored * written + block) / at_once
        seconds = np.hypot(waves * of_block / CLOCK, moved / (present.memory * 1e12))
        seconds += images / (packing * 1e12) + weights / (packing_weights * 1e12)
        return seconds + launch * 1e-6 * launches

    turned = costs.load(sm80.__file__, "weight_gradient").product
    start = argparse.Namespace(**present._asdict(), turned=turned)
    names = "product turned copy rate written block packing packing_weights launch"
    found = least_squares(model, start, names, measured)
    product = {
        "gather": found.values.pop("product"),
        "weight_gradient": found.values.pop("turned"),
    }
    return {"": found} | {of: Fit({"product": value}, "") for of, value in product.items()}


def write(module: str, fits: dict[str, Fit]) -> None:
    """Puts fits, by variant ("": the only one), into the costs.json beside a module."""
    path = Path(module).with_name("costs.json")
    constants = json.loads(path.read_text(encoding="utf-8"))
    origins = (f"{variant} {fit.origin}".strip() for variant, fit in fits.items() if fit.origin)
    origin = ", ".join(origins)
    for variant, fit in fits.items():
        for name, value in fit.values.items():
            constants[name]["origin"] = f"fit of fit_costs.py: {origin}"
            if variant:
                constants[name]["value"][variant] = value
            else:
                constants[name]["value"] = value
    lines = (f"  {json.dumps(name)}: {json.dumps(held)}" for name, held in constants.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    """Report, fit where asked to, and write the fits where asked to."""
    measured, of_sm80 = rows(), rows_of_sm80()
    report(measured)
    report(of_sm80, SM80)
    if not {"--fit", "--write"} & set(sys.argv[1:]):
        return
    fits = {
        patches.__file__: {
            variant: fit_patches(measured, half, resident)
            for (half, resident), variant in VARIANTS.items()
        },
        flat.__file__: {"": fit_flat(measured)},
        sm80.__file__: fit_sm80(of_sm80),
    }
    for module, of_module in fits.items():
        for variant, fit in of_module.items():
            print(f"{Path(module).parent.name} {variant}: {fit.origin}")
            for name, value in fit.values.items():
                print(f"  {name} = {value}")
        if "--write" in sys.argv[1:]:
            write(module, of_module)


if __name__ == "__main__":
    main()
