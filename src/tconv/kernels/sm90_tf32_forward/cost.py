"""The modelled time of `sm90_tf32_forward`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.sm90_tf32_forward.layout import CONSUMERS, layout
from tconv.kernels.sm90_tf32_forward.tiles import Tile
from tconv.problem import Problem

L2_BYTES_PER_CYCLE = 27
"""What an SM gets from L2."""


@dataclass(frozen=True)
class _Fit:
    """What a tile's parts cost, in cycles of an SM at 1.7 GHz unless said otherwise.

    Attributes:
        stage: of 8 channels, whatever their number of pairs.
        pair, product: of a pair, and of each of its cycles on the tensor cores.
        mapped, loaded: of a pixel of the patch, by tensor map or through registers, while products
            take `beside` of their cycles.
        output, phased: of 64 outputs in one row, or of those with several phases in x.
        row: of 64 rows of outputs.
        single: share that is added where one raw patch at a time shows memory's latency.
        launch: of packing and kernel, in microseconds.
        bytes: moved in a second, in 1e12, if rows were endless; `edge`: columns that a row's ends
            cost.
        both: share of the lesser of the two that does not overlap.
    """

    stage: float
    pair: float
    product: float
    mapped: float
    loaded: float
    beside: float
    output: float
    phased: float
    row: float
    single: float
    launch: float
    bytes: float
    edge: float
    both: float


# Least squares of the logarithm over 265 rows of the sweeps of 29 layers and 60 random ones,
# benchmarks/fit_costs.py: off by 9% and 5% in the root mean square; KernelBench's layers weigh
# most. Then by hand: `mapped` and `edge` of streamed weights, for hd_k4s2's tile, and 4% more for
# resident ones: their small tiles move more pixels, and the chip slows down where the work takes
# all its power (kb57). In float16 294 rows, off by 7%; kb71's weighed 160, hd_k4s2's 30 and
# sam_up2's 10.
_STREAMED = _Fit(
    stage=322,
    pair=44.5,
    product=0.32,
    mapped=0.5,
    loaded=5.56,
    beside=0.848,
    output=4.05,
    phased=3.87,
    row=139,
    single=0.0357,
    launch=7.96,
    bytes=18.1,
    edge=100,
    both=0.282,
)

_RESIDENT = _Fit(
    stage=231,
    pair=53.8,
    product=0,
    mapped=0.865,
    loaded=3.06,
    beside=0.36,
    output=2.12,
    phased=3.8,
    row=60.6,
    single=0.387,
    launch=8.08,
    bytes=8.04,
    edge=79.1,
    both=0.464,
)

_HALF_STREAMED = _Fit(
    stage=267,
    pair=30.1,
    product=0.704,
    mapped=1.69,
    loaded=3.87,
    beside=0.658,
    output=10.4,
    phased=9.29,
    row=0.239,
    single=0.0867,
    launch=10.9,
    bytes=12.3,
    edge=169,
    both=0.256,
)

_HALF_RESIDENT = _Fit(
    stage=181,
    pair=9.28,
    product=0.0717,
    mapped=1.74,
    loaded=6.01,
    beside=0.142,
    output=10.5,
    phased=12.3,
    row=38.6,
    single=0.803,
    launch=7.06,
    bytes=4.28,
    edge=30.8,
    both=0.248,
)

_FITS = {
    (False, False): _STREAMED,
    (False, True): _RESIDENT,
    (True, False): _HALF_STREAMED,
    (True, True): _HALF_RESIDENT,
}
"""By whether a tile multiplies in float16, and keeps its weights."""


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel, and of the host."""
    return family.with_host(_device_cost(problem, target, tile))


def _device_cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel: a fit to measured times."""
    laid = layout(problem, tile)
    fit = _FITS[tile.half, tile.resident]
    pixels = laid.tile_rows * tile.columns  # of all that a patch serves
    products = laid.mean_pairs * pixels / 2
    patch = (fit.mapped if problem.x_aligned else fit.loaded) * laid.patch_rows * laid.patch_columns
    consumers = CONSUMERS // laid.rings
    consumed = consumers * laid.mean_pairs * fit.pair + fit.product * products
    stage = fit.stage + max(consumed, patch + fit.beside * products)
    if problem.x_aligned and laid.stages(target)[1] == 1:
        stage *= 1 + fit.single
    output = fit.output if problem.width.stride == 1 else fit.phased
    edge = fit.edge
    if tile.sectors:
        # By hand, from 47 rows of five layers: no ends of pieces, fewer and wider stores.
        edge, output = 0, output * (0.8 if tile.resident else 1)
    of_tile = laid.chunks * stage + tile.m_tiles * (output * pixels + fit.row * laid.tile_rows)
    waves = -(-laid.tiles // (laid.rings * target.multiprocessors))
    cycles = waves * laid.rings * of_tile + laid.resident_bytes / L2_BYTES_PER_CYCLE
    busy = cycles / 1.7e9
    ends = 1 + edge / (tile.columns * problem.width.stride)
    moved = problem.bytes * ends / (fit.bytes * 1e12)
    modelled = max(busy, moved) + fit.both * min(busy, moved) + fit.launch * 1e-6
    # Power, and with it clock, where products are many, by hand from sweep_order.csv: what is
    # computed twice takes some, and the more rows a tile has, the fewer pixels it brings for them.
    many = min(1, max(0, (problem.flops / problem.bytes - 130) / 14))
    if tile.half:
        power = 0.17 if tile.sectors else {3: -0.045, 4: -0.09}.get(tile.rows, 0)
        modelled *= 1 + power * many
    if tile.common:
        # By hand, from sweep_common.csv: 0.4 of what a common patch saves by this model is saved,
        # and some power, which counts where products are many.
        alone = _device_cost(problem, target, dataclasses.replace(tile, common=False))
        modelled = 0.4 * modelled + 0.6 * alone
        if tile.resident and not tile.sectors:
            modelled *= 1 - 0.05 * many
    # By hand: no such tile is among the fit's rows, and on images its halo costs more.
    return modelled * (1.06 if tile.rows == 1 else 1)
