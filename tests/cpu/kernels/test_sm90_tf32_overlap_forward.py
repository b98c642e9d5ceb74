"""sm90_tf32_overlap_forward in the emulator, and through NVRTC."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import emulated_plans
from emulated_plans import (
    HOPPER,
    assert_bias_alone,
    assert_compiled_well,
    assert_order_free,
    assert_right,
    assert_wants_vectors,
    problem_of,
    run,
)
from layer_cases import Case, operands, random_cases
from tconv.jit.target import Target
from tconv.kernels import sm90_tf32_overlap_forward as family
from tconv.plan import Plan, plan
from tconv.problem import Problem
from tiers import quick

CASES = (
    # The layers that the kernel is for, in little: several strips, chunks and images, with tails.
    Case(2, 17, 3, 1, (9, 11), (4, 4), (2, 2), (1, 1), bias=False),
    Case(1, 40, 3, 1, (5, 150), (4, 4), (2, 2), (1, 1)),
    Case(2, 24, 1, 1, (20, 12), (9, 9), (3, 3), (4, 4), (2, 2)),
    Case(1, 56, 1, 1, (7, 133), (9, 9), (3, 3), (4, 4), (2, 2)),
    Case(1, 128, 3, 1, (6, 72), (4, 4), (2, 2), (1, 1)),
    # Units with fewer taps than others of their slot; groups; a chunk that is not whole.
    Case(1, 70, 7, 1, (6, 40), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(2, 20, 4, 3, (5, 70), (3, 4), (2, 4), (1, 1)),
    Case(1, 200, 2, 1, (3, 9), (5, 5), (3, 1), (1, 3)),
    Case(1, 36, 2, 2, (4, 64), (5, 6), (2, 4), (2, 1), (1, 2)),
    # Stride 1; single pixels; phases without taps; padding beyond the kernel's reach.
    Case(1, 9, 8, 1, (7, 9), (3, 3), (1, 1), (1, 1)),
    Case(1, 20, 1, 1, (6, 60), (4, 7), (1, 1), (1, 3)),
    Case(3, 2, 2, 1, (1, 1), (1, 1)),
    Case(1, 4, 3, 1, (3, 3), (3, 3), (1, 1), (2, 2)),
    Case(2, 3, 2, 1, (3, 4), (2, 2), (5, 4), (0, 0), (4, 3)),
    Case(1, 3, 4, 1, (9, 8), (2, 2), (1, 1), (3, 2)),
    Case(1, 5, 9, 1, (3, 66), (1, 1), (2, 2), (0, 0), (1, 1)),
    Case(1, 16, 2, 1, (4, 36), (2, 2), (2, 2)),
)


def plans(problem: Problem, target: Target = HOPPER) -> list[Plan]:
    return emulated_plans.plans(problem, family.STEM, target)


def distinct(found: list[Plan]) -> list[Plan]:
    """One plan of those whose tiles come to the same kernel."""
    return list({chosen.kernel.source.text(): chosen for chosen in found}.values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tile_that_serves(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    served = plans(problem_of(case))
    assert served
    for chosen in distinct(served):
        assert_right(run(chosen, t), case, t)


def test_cases_serve_every_tile():
    assert {p.tile for case in CASES for p in plans(problem_of(case))} == set(family.TILES)


def test_cases_cover_every_way_of_laying_out():
    laid = [family.layout(p.problem, p.tile) for case in CASES for p in plans(problem_of(case))]
    for name in ("source_vectors", "lead", "pitch", "window"):
        assert len({getattr(one, name) for one in laid}) > 1, name
    for name in ("strips", "chunks", "slots"):
        assert {min(getattr(one, name), 2) for one in laid} == {1, 2}, name
    assert {one.store_vector for one in laid} == {1, 2, 4}
    assert {one.skew for one in laid} == {0, 4, 6}
    assert {one.reach for one in laid} >= {0, 1, 2, 3}
    # A thread's last column of no tap; columns of units that do not exist.
    assert {one.slot_begin[-1] % 2 for one in laid} == {0, 1}


@pytest.mark.parametrize("case", (CASES[1], CASES[2], CASES[6], CASES[13]), ids=str)
@pytest.mark.parametrize("share", (3, 8, 10**6))
def test_shares_of_any_size(case, share, monkeypatch):
    """Shares end within strips, or hold several; each begins with the rows that reach into it."""
    monkeypatch.setattr(family.Layout, "share", lambda self, target: share)
    t = operands(case, torch.float32, "contiguous", "cpu")
    for chosen in distinct(plans(problem_of(case)))[:2]:
        assert_right(run(chosen, t), case, t)


def test_strips_side_by_side():
    """Neighbouring warpgroups process adjacent strips, over several images."""
    case = Case(2, 24, 1, 1, (20, 130), (9, 9), (3, 3), (4, 4), (2, 2))
    target = dataclasses.replace(HOPPER, multiprocessors=6)
    t = operands(case, torch.float32, "contiguous", "cpu")
    for chosen in distinct(plans(problem_of(case), target)):
        laid = family.layout(chosen.problem, chosen.tile)
        assert laid.abreast(target) == laid.strips > 1
        assert_right(run(chosen, t, sanitize=True), case, t)


@pytest.mark.parametrize(
    ("lines", "strips", "shared_out"),
    (
        (20560, 5, (5, 53)),
        (6192, 3, (3, 16)),
        (4224, 1, (1, 11)),
        (1184, 74, (1, 3)),
        (4500, 150, (1, 12)),
    ),
)
def test_strips_side_by_side_where_that_takes_no_more_rows(lines, strips, shared_out):
    assert family.share_out(lines, strips, 396) == shared_out


@pytest.mark.parametrize(
    ("case", "tile", "stages"),
    (
        # 16 KiB a row: two ahead for three warpgroups, three for two.
        (Case(16, 56, 1, 1, (256, 256), (9, 9), (3, 3), (4, 4), (2, 2)), (3, 64), 3),
        (Case(16, 56, 1, 1, (256, 256), (9, 9), (3, 3), (4, 4), (2, 2)), (2, 64), 4),
        # All that fit, three or not; short rows, of which many are ahead.
        (Case(16, 128, 3, 1, (128, 128), (4, 4), (2, 2), (1, 1)), (3, 64), 3),
        (Case(1, 16, 1, 1, (64, 64), (4, 4), (2, 2), (1, 1)), (3, 64), 8),
    ),
)
def test_no_more_is_asked_for_ahead_than_memory_needs(case, tile, stages):
    laid = family.layout(problem_of(case), family.Tile(*tile))
    assert laid.stages(HOPPER) == stages
    ahead = (stages - 1) * laid.tile.warpgroups * laid.stage_bytes
    assert ahead <= family.MOST_AHEAD_BYTES


def undilated(case: Case) -> Case:
    """With room for as much padding as before."""
    extra = tuple(min(e, s - 1) for e, s in zip(case.output_padding, case.stride, strict=True))
    size = tuple(n + 2 * p for n, p in zip(case.size, case.padding, strict=True))
    return dataclasses.replace(case, dilation=(1, 1), output_padding=extra, size=size)


def test_random_layers():
    served = 0
    for case in map(undilated, random_cases(16, seed=13)):
        t = operands(case, torch.float32, "contiguous", "cpu")
        for chosen in plans(problem_of(case))[:1]:
            assert_right(run(chosen, t), case, t)
            served += 1
    assert served >= 8


@pytest.mark.parametrize("layout", ("channels_last", "mixed", "strided"))
def test_reads_any_strides(layout):
    case = CASES[5]
    t = operands(case, torch.float32, layout, "cpu")
    x_layout = "channels_last" if layout == "channels_last" else "contiguous"
    served = plans(problem_of(case, x_layout=x_layout, source_aligned=False))
    assert served
    assert_right(run(served[0], t), case, t)


@pytest.mark.parametrize("wide", (False, True), ids=("int", "long long"))
@pytest.mark.parametrize("case", (CASES[1], CASES[2], CASES[6]), ids=str)
def test_wide_offsets_and_sanitizers(case, wide, monkeypatch):
    monkeypatch.setattr(family.Layout, "share", lambda self, target: 7)
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = plans(problem_of(case, wide_offsets=wide))[0]
    assert_right(run(chosen, t, sanitize=True), case, t)


@pytest.mark.parametrize("case", (CASES[1], CASES[3], CASES[5]), ids=str)
def test_result_does_not_depend_on_the_order_of_threads(case, monkeypatch):
    monkeypatch.setattr(family.Layout, "share", lambda self, target: 6)
    t = operands(case, torch.float32, "contiguous", "cpu")
    assert_order_free(plans(problem_of(case))[0], t)


def test_result_does_not_depend_on_the_shares(monkeypatch):
    """A row above a share is multiplied twice: the outputs are the same to the bit."""
    case = CASES[2]
    t = operands(case, torch.float32, "contiguous", "cpu")
    first = run(plans(problem_of(case))[0], t)
    monkeypatch.setattr(family.Layout, "share", lambda self, target: 5)
    assert torch.equal(first, run(plans(problem_of(case))[0], t))


def test_a_nan_reaches_its_outputs_alone():
    case = CASES[1]
    t = operands(case, torch.float32, "contiguous", "cpu")
    # The one that rounding by an addition would carry into the sign.
    t.x.view(torch.int32)[0, 3, 2, 70] = 0x7FFFFFFF
    bad = run(plans(problem_of(case))[0], t).isnan()
    expected = torch.zeros_like(bad)
    expected[:, :, 3:7, 139:143] = True
    assert torch.equal(bad, expected)


def test_outputs_without_taps_hold_the_bias_alone():
    case = CASES[13]
    t = operands(case, torch.float32, "contiguous", "cpu")
    for chosen in distinct(plans(problem_of(case))):
        # Rows 2, 3 and 4 of every 5 have no tap: the kernel has two.
        assert_bias_alone(chosen, t, [y for y in range(case.output_size[0]) if y % 5 >= 2])


def test_refusals_give_their_reasons():
    problem = problem_of(CASES[0])
    assert "sm_80" in family.why_not(problem, Target.named("sm_80"))
    assert "ieee" in family.why_not(dataclasses.replace(problem, math="ieee"), HOPPER)
    last = dataclasses.replace(problem, y_layout="channels_last")
    assert "contiguous" in family.why_not(last, HOPPER)
    dilated = problem_of(Case(1, 16, 1, 1, (8, 8), (3, 3), (1, 1), (1, 1), (0, 0), (1, 2)))
    assert "dilation in x is 2" in family.why_not(dilated, HOPPER)
    wide = problem_of(Case(1, 16, 1, 1, (2, 2), (2, 2), (1, 17)))
    assert "stride is 17" in family.why_not(wide, HOPPER)
    tile = family.Tile(3, 64)
    many = problem_of(Case(1, 32, 64, 1, (8, 8), (3, 3)))
    assert "576 columns" in family.tile_why_not(many, HOPPER, tile)
    long = problem_of(Case(1, 32, 1, 1, (8, 40), (1, 13)))
    assert "12 of a warp's 16 pixels" in family.tile_why_not(long, HOPPER, tile)
    held = problem_of(Case(1, 64, 2, 1, (8, 40), (9, 9), (3, 3)))
    assert "in registers" in family.tile_why_not(held, HOPPER, tile)
    deep = problem_of(Case(1, 640, 1, 1, (8, 40), (2, 2), (2, 2)))
    assert "10 stages" in family.tile_why_not(deep, HOPPER, tile)
    weights = problem_of(Case(1, 512, 6, 1, (8, 40), (4, 4), (2, 2), (1, 1)))
    assert "bytes of weights" in family.tile_why_not(weights, HOPPER, tile)
    units = problem_of(Case(1, 16, 9, 1, (8, 40), (4, 4), (2, 2), (1, 1)))
    assert "there are 5" in family.tile_why_not(units, HOPPER, family.Tile(2, 64))


def test_the_plan_takes_it_where_taps_are_many_and_outputs_few():
    assert plan(problem_of(LAYERS["9x9 s3, 56 to 1"]), HOPPER).stem == family.STEM
    for case in (
        Case(8, 64, 64, 1, (200, 200), (3, 3)),
        Case(8, 1, 1, 64, (64, 64), (4, 4), (2, 2)),
    ):
        assert plan(problem_of(case), HOPPER).stem != family.STEM


def test_output_must_start_on_a_vector():
    case = CASES[0]
    assert_wants_vectors(
        plans(problem_of(case))[0], operands(case, torch.float32, "contiguous", "cpu")
    )


# The layers that the kernel is for, and others that it can run.
LAYERS = {
    "4x4 s2, 64 to 3": Case(128, 64, 3, 1, (32, 32), (4, 4), (2, 2), (1, 1), bias=False),
    "4x4 s2, 128 to 3": Case(16, 128, 3, 1, (128, 128), (4, 4), (2, 2), (1, 1)),
    "9x9 s3, 56 to 1": Case(16, 56, 1, 1, (256, 256), (9, 9), (3, 3), (4, 4), (2, 2)),
    "2x2 s2, 64 to 8": Case(8, 64, 8, 1, (128, 128), (2, 2), (2, 2)),
    "8x8 s4, 64 to 1": Case(4, 64, 1, 1, (64, 64), (8, 8), (4, 4), (2, 2)),
    "3x3, 16 to 8": Case(16, 16, 8, 1, (128, 128), (3, 3), (1, 1), (1, 1)),
    "5x5, 100 to 3": Case(16, 100, 3, 1, (128, 128), (5, 5), (1, 1), (2, 2)),
    "3x5 s5x4, 256 to 3": Case(4, 256, 3, 1, (50, 128), (3, 5), (5, 4)),
}


def compiled(name: str, **changes) -> set[family.Tile]:
    """The tiles of a layer that were compiled."""
    chosen = distinct(plans(problem_of(LAYERS[name], **changes)))
    for one in chosen:
        assert_compiled_well(one)
    return {one.tile for one in chosen}


@pytest.mark.parametrize("aligned", (True, False), ids=("aligned", "unaligned"))
@pytest.mark.parametrize("name", quick(LAYERS, 0, 1))
def test_nothing_spills(name, aligned):
    assert compiled(name, source_aligned=aligned)


@pytest.mark.parametrize("changes", (dict(wide_offsets=True), dict(bias=False)), ids=str)
def test_nothing_spills_in_any_variant(changes):
    for name in ("4x4 s2, 128 to 3", "9x9 s3, 56 to 1"):
        assert compiled(name, **changes)


def test_layers_serve_every_tile():
    served = {p.tile for case in LAYERS.values() for p in plans(problem_of(case))}
    assert served == set(family.TILES)
