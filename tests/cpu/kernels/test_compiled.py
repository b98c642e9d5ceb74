"""Every general kernel and tile through NVRTC, for every architecture: no spills."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tconv.jit.compile import compile_cuda, supported_architectures
from tconv.jit.target import Target
from tconv.kernels import FAMILIES
from tconv.plan import candidates, make_plan
from tconv.problem import Axis, Problem
from tiers import quick

GENERAL = tuple(family for family in FAMILIES if family.STEM.startswith("general_"))

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")

LAYERS = {
    "stride 1": Problem("forward", 8, 64, 64, 1, Axis(33, 3), Axis(40, 5)),
    "stride 2": Problem("forward", 8, 64, 32, 1, Axis(33, 4, 2, 1), Axis(40, 4, 2, 1)),
    "sparse": Problem("forward", 8, 12, 24, 2, Axis(33, 3, 5, 1, 0, 2), Axis(40, 3, 5, 1, 0, 2)),
    "depthwise": Problem("forward", 8, 16, 16, 16, Axis(33, 4, 3, 1), Axis(40, 4, 3, 1)),
}
VARIANTS = (
    dict(),
    dict(dtype="float64"),
    dict(dtype="bfloat16", x_layout="channels_last", y_layout="channels_last"),
    dict(dtype="float32", math="tf32", x_layout="channels_last"),
    dict(dtype="float16", wide_offsets=True, y_layout="channels_last"),
    dict(dtype="float64", wide_offsets=True, x_layout="channels_last", y_layout="channels_last"),
)


def variants_of(name: str) -> tuple[dict, ...]:
    """All for one layer, every second for the others: each tile meets each layer and variant."""
    first = {"stride 1": 0, "sparse": 1, "depthwise": 0}
    return VARIANTS if name == "stride 2" else VARIANTS[first[name] :: 2]


def check(problem: Problem, arch: str) -> int:
    target = Target.named(arch)
    compiled = 0
    for candidate in candidates(problem, target):
        if candidate.refusal is not None or not candidate.stem.startswith("general_"):
            continue
        plan = make_plan(problem, target, candidate)
        resources = compile_cuda(plan.kernel.source, arch).resources
        assert not resources.spills and resources.stack_frame == 0, f"{plan}: {resources}"
        assert not resources.warnings, f"{plan}: {resources}"
        compiled += 1
    return compiled


@pytest.mark.parametrize("stem", [family.STEM for family in GENERAL])
@pytest.mark.parametrize("arch", quick(ARCHITECTURES, 0, -1))
def test_every_tile_on_every_architecture(arch, stem):
    """One layer and dtype for each architecture in turn, all tiles; sm_90a takes them all below."""
    if arch not in supported_architectures():
        pytest.skip(f"this NVRTC does not know {arch}")
    direction = next(f.DIRECTION for f in GENERAL if stem == f.STEM)
    turn = ARCHITECTURES.index(arch)
    layer = list(LAYERS.values())[turn % len(LAYERS)]
    for variant in (VARIANTS[0], VARIANTS[1 + turn % (len(VARIANTS) - 1)]):
        problem = dataclasses.replace(layer, direction=direction, **variant)
        assert check(problem, arch) > 0


@pytest.mark.parametrize("name", quick(LAYERS, 1))
@pytest.mark.parametrize("direction", quick(("forward", "input_gradient", "weight_gradient"), -1))
def test_every_layer_and_dtype_on_hopper(direction, name):
    bias = direction == "forward"
    for variant in variants_of(name):
        problem = dataclasses.replace(LAYERS[name], direction=direction, bias=bias, **variant)
        assert check(problem, "sm_90a") > 0


def test_layers_cover_every_tile():
    """Each row of each table serves at least one of the problems compiled above."""
    target = Target.named("sm_90a")
    directions = ("forward", "input_gradient", "weight_gradient")
    served = {
        (c.stem, c.tile)
        for (name, layer), direction in itertools.product(LAYERS.items(), directions)
        for variant in variants_of(name)
        for c in candidates(dataclasses.replace(layer, direction=direction, **variant), target)
        if c.refusal is None and c.stem.startswith("general_")
    }
    assert served == {(family.STEM, tile) for family in GENERAL for tile in family.TILES}
