"""The kernels for 1x1 without padding: in the emulator, and through NVRTC."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import emulated_plans
from emulated_plans import HOPPER, assert_compiled_well, assert_order_free, assert_right, run
from layer_cases import LAYOUTS, Case, operands
from tconv.jit.target import Target
from tconv.kernels import pointwise_forward, pointwise_mma_forward
from tconv.plan import Plan, plan
from tconv.problem import Axis
from tiers import quick

ONE = (1, 1)
FEW = (
    Case(2, 1, 1, 5, (6, 8), ONE, (2, 2), bias=False),
    Case(2, 1, 2, 3, (5, 7), ONE, (2, 2), (0, 0), (1, 1)),
    Case(3, 1, 19, 1, (4, 4), ONE, bias=False),
    Case(2, 4, 6, 2, (5, 3), ONE, (2, 3)),
    Case(1, 8, 3, 1, (3, 9), ONE, (1, 2), (0, 0), (0, 1)),
    Case(1, 3, 2, 1, (1, 1), ONE),
    # Rows of one output, whose vectors span several; and strides beyond the image.
    Case(2, 2, 3, 1, (9, 1), ONE, (1, 1)),
    Case(2, 2, 3, 1, (2, 1), ONE, (5, 7), (0, 0), (4, 0)),
    Case(1, 1, 2, 2, (1, 70), ONE, (1, 4)),
)
MANY = (
    Case(2, 16, 32, 1, (8, 8), ONE),
    Case(1, 20, 70, 2, (11, 8), ONE, bias=False),
    Case(2, 40, 101, 1, (11, 20), ONE),
    # Rows of an odd width, of vectors of two, and of one pixel; tails in all directions.
    Case(2, 24, 33, 1, (7, 9), ONE, (2, 2)),
    Case(1, 17, 64, 1, (5, 26), ONE, (2, 2), bias=False),
    Case(2, 9, 40, 1, (9, 1), ONE, (4, 3), (0, 0), (3, 2)),
    Case(1, 70, 36, 1, (3, 40), ONE, (1, 2), (0, 0), (0, 1)),
    Case(1, 16, 8, 3, (4, 6), ONE, (3, 1), (0, 0), (2, 0)),
    Case(1, 16, 8, 1, (1, 130), ONE),
    # Weights as they lie: odd and even channels in groups, a part of the last chunk and of its last
    # product, all rows of a product, and two blocks' rows, which do not lie.
    Case(1, 100, 37, 2, (3, 20), ONE),
    Case(2, 252, 127, 1, (4, 4), ONE, (2, 1)),
    Case(1, 92, 30, 2, (5, 13), ONE, bias=False),
    Case(1, 24, 131, 1, (6, 10), ONE),
)
# Small images and few output channels: taps of one residue alone, empty phases, groups, cropped
# taps, outputs beyond the last tap's, a signal.
SMALL = (
    Case(2, 24, 4, 1, (12, 12), (7, 5), (2, 2), (1, 4), (0, 0), (2, 2), bias=False),
    Case(2, 17, 3, 2, (5, 8), (4, 4), (2, 2), (1, 1)),
    Case(1, 20, 5, 1, (3, 7), (3, 2), (4, 5), (0, 0), (3, 4), (1, 3)),
    Case(1, 16, 8, 1, (4, 6), (3, 3), (1, 1), (2, 2)),
    Case(1, 9, 2, 1, (1, 33), (1, 9), (1, 3), (0, 5)),
    Case(1, 16, 3, 1, (3, 5), ONE, (3, 2), (1, 0), (2, 1)),
)
CASES = [(pointwise_forward, "ieee", case) for case in FEW]
CASES += [(pointwise_mma_forward, "tf32", case) for case in (*MANY, *SMALL)]
MANY_CASE = CASES[len(FEW) + 3]


def named(value) -> str:
    return getattr(value, "STEM", str(value))


def plans(family, math: str, case: Case, target: Target = HOPPER, **changes) -> list[Plan]:
    problem = emulated_plans.problem_of(case, math=math, **changes)
    return emulated_plans.plans(problem, family.STEM, target)


@pytest.mark.parametrize("layout", quick(LAYOUTS, 0))
@pytest.mark.parametrize(("family", "math", "case"), CASES, ids=named)
def test_every_tile(family, math, case, layout):
    t = operands(case, torch.float32, layout, "cpu")
    last = t.x.is_contiguous(memory_format=torch.channels_last)
    served = plans(family, math, case, x_layout="channels_last" if last else "contiguous")
    pixels = case.size[0] * case.size[1]
    assert {chosen.tile for chosen in served} == {
        tile for tile in family.TILES if case not in SMALL or pixels <= tile.pixels
    } or case.kernel == (7, 5)
    for chosen in served:
        assert_right(run(chosen, t), case, t, math)


@pytest.mark.parametrize(("family", "math", "case"), CASES[1::3], ids=named)
def test_result_does_not_depend_on_the_order_of_threads(family, math, case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    for chosen in plans(family, math, case):
        assert_order_free(chosen, t)


@pytest.mark.parametrize(("family", "math", "case"), (CASES[1], MANY_CASE, CASES[-6]), ids=named)
def test_sanitizers_and_wide_offsets(family, math, case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    wide = plans(family, math, case, wide_offsets=True)
    assert (family is pointwise_forward) == bool(wide)
    for chosen in (*wide, *plans(family, math, case)[::2]):
        assert_right(run(chosen, t, sanitize=True), case, t, math)


@pytest.mark.parametrize(("family", "math", "case"), CASES[::2], ids=named)
def test_tensors_with_gaps(family, math, case):
    """x, w and y off vectors, and planes of y, or channels of w, with room between them."""
    t = operands(case, torch.float32, "contiguous", "cpu")

    def off(tensor):
        moved = torch.full((tensor.numel() + 1,), float("nan"))[1:].view_as(tensor)
        return moved.copy_(tensor)

    room = torch.nn.functional.pad(t.w, (0, 0, 0, 0, 0, 4), value=float("nan"))
    apart = dataclasses.replace(t, w=room[:, : t.w.shape[1]])
    t = dataclasses.replace(t, x=off(t.x), w=off(t.w))
    channels, plane = t.grad_output.shape[1], t.grad_output[0, 0].numel()
    storage = torch.full((case.batch, channels, plane + 3), float("nan"))
    out = storage[..., :plane].view(t.grad_output.shape)
    for chosen in plans(family, math, case):
        assert_right(run(chosen, t, out=out.fill_(float("nan"))), case, t, math)
        assert storage[..., plane:].isnan().all()
        assert_right(run(chosen, apart), case, apart, math)


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
def test_compiles_without_spills(arch):
    target = Target.named(arch)
    for family, math, case in (CASES[0], CASES[3], CASES[len(FEW) + 2], MANY_CASE, *CASES[-6:-4]):
        for wide in (False, True):
            for chosen in plans(family, math, case, target, wide_offsets=wide):
                assert_compiled_well(chosen, arch)


def test_what_it_refuses():
    problem = emulated_plans.problem_of(FEW[0], math="ieee")
    of = pointwise_forward.why_not
    assert of(problem, HOPPER) is None
    changed = {"height": Axis(6, 1, 2, 1), "math": "ieee"}
    assert "no padding along height" in of(emulated_plans.problem_of(FEW[0], **changed), HOPPER)
    assert "TF32" in of(emulated_plans.problem_of(FEW[0]), HOPPER)
    beyond = {"width": Axis(8, 1, 2, 0, 2, 3), "math": "ieee"}
    read = emulated_plans.problem_of(Case(1, 5, 2, 1, (4, 4), ONE), math="ieee")
    assert "not 5.0" in of(read, HOPPER)
    assert "beyond the last" in of(emulated_plans.problem_of(FEW[0], **beyond), HOPPER)
    of, of_tile = pointwise_mma_forward.why_not, pointwise_mma_forward.tile_why_not
    for case, why in (
        (Case(1, 16, 16, 1, (4, 81), ONE, (2, 2)), "whole rows"),
        (Case(1, 16, 8, 1, (9, 9), (3, 3)), "whole images"),
        (Case(1, 16, 8, 1, (4, 4), (9, 9)), "all taps"),
    ):
        problem = emulated_plans.problem_of(case)
        assert of(problem, HOPPER) is None
        assert why in of_tile(problem, HOPPER, pointwise_mma_forward.TILES[0])
    many = emulated_plans.problem_of(Case(1, 16, 9, 1, (4, 4), (3, 3)))
    assert "8 output channels" in of(many, HOPPER)


def test_the_plan_takes_them():
    for case, family in (
        (
            Case(48, 128, 4, 1, (12, 12), (7, 5), (2, 2), (1, 4), (0, 0), (2, 2), bias=False),
            pointwise_mma_forward,
        ),
        (Case(16, 1, 1, 64, (64, 64), ONE, (2, 2), bias=False), pointwise_forward),
        (
            Case(13, 136, 256, 1, (9, 9), ONE, (4, 4), (0, 0), (3, 0), bias=False),
            pointwise_mma_forward,
        ),
    ):
        assert plan(case.layer.problem("forward"), HOPPER).stem == family.STEM
