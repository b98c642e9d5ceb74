"""mma_overlap_forward in the emulator, and through NVRTC."""

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
from tconv.kernels import mma_overlap_forward as family
from tconv.kernels import sm90_tf32_overlap_forward
from tconv.plan import Plan, candidates, plan
from tconv.problem import Problem

CASES = (
    # The layers that the kernel is for, in little: several strips, steps and tiles, with tails.
    Case(2, 17, 3, 1, (9, 11), (4, 4), (2, 2), (1, 1), bias=False),
    Case(1, 40, 3, 1, (5, 150), (4, 4), (2, 2), (1, 1)),
    Case(1, 24, 1, 1, (20, 12), (9, 9), (3, 3), (4, 4), (2, 2)),
    Case(1, 56, 1, 1, (7, 133), (9, 9), (3, 3), (4, 4), (2, 2)),
    Case(1, 128, 3, 1, (6, 72), (4, 4), (2, 2), (1, 1)),
    Case(2, 16, 21, 1, (5, 36), (2, 2), (2, 2)),
    Case(1, 72, 20, 1, (1, 132), (1, 4), (1, 2), (0, 1)),
    Case(1, 3, 5, 2, (5, 34), (8, 8), (4, 4), (2, 2)),
    Case(1, 70, 7, 1, (6, 40), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(1, 200, 2, 1, (3, 9), (5, 5), (3, 1), (1, 3)),
    # Stride 1; single pixels; phases without taps on both axes; padding beyond the kernel's reach.
    Case(1, 9, 8, 1, (7, 9), (3, 3), (1, 1), (1, 1)),
    Case(3, 2, 2, 1, (1, 1), (1, 1)),
    Case(1, 4, 3, 1, (3, 3), (3, 3), (1, 1), (2, 2)),
    Case(2, 3, 2, 1, (3, 4), (2, 2), (5, 4), (0, 0), (4, 3)),
    Case(1, 4, 6, 1, (4, 5), (3, 3), (4, 6), (1, 1), (2, 5), (6, 4)),
    Case(1, 3, 4, 1, (9, 8), (2, 2), (1, 1), (3, 2)),
    Case(1, 2, 18, 3, (6, 7), (3, 4), (2, 3), (2, 1), (0, 0), (2, 3), bias=False),
    Case(2, 5, 2, 2, (20, 40), (2, 3), (1, 2), (9, 19), (0, 1), (3, 4)),
)


def plans(problem: Problem, target: Target = HOPPER) -> list[Plan]:
    return emulated_plans.plans(problem, family.STEM, target)


def distinct(found: list[Plan]) -> list[Plan]:
    """One plan of those whose tiles come to the same kernel."""
    return list({chosen.kernel.source.text(): chosen for chosen in found}.values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tile_that_serves(case):
    """One block walks all tiles, so that steps, weights and patches follow one another."""
    t = operands(case, torch.float32, "contiguous", "cpu")
    served = plans(problem_of(case))
    assert served
    for chosen in distinct(served):
        assert_right(run(chosen, t, blocks=1), case, t)


def test_cases_serve_every_tile():
    assert {p.tile for case in CASES for p in plans(problem_of(case))} == set(family.TILES)


def test_cases_cover_every_way_of_laying_out():
    laid = [family.laid_out(p.problem, p.tile) for case in CASES for p in plans(problem_of(case))]
    for name in ("source_vectors", "store_vector", "direct", "stages", "first_column"):
        assert len({getattr(one, name) for one in laid}) > 1, name
    for name in ("strips", "step_rows", "fragments", "passes", "unit_slots", "lines"):
        assert {min(getattr(one, name), 2) for one in laid} == {1, 2}, name
    for name in ("row_tiles", "m_groups", "k_groups", "n_groups"):
        assert {min(getattr(one.division, name), 2) for one in laid} == {1, 2}, name
    assert {min(family.window(one.problem), 3) for one in laid} == {1, 2, 3}
    assert {min(one.guard, 1) for one in laid} == {0, 1}
    # Warps that have no share of the products; fragments that no warp is left for.
    warps = [(one.division, one.tile.warps) for one in laid]
    assert any(d.m_groups * d.k_groups * d.n_groups < of for d, of in warps)
    shares = [one.division.n_groups * one.passes * one.fragments for one in laid]
    assert any(share > one.step_fragments for share, one in zip(shares, laid, strict=True))


@pytest.mark.parametrize("case", (CASES[2], CASES[10], CASES[14], CASES[17]), ids=str)
@pytest.mark.parametrize("tile_rows", (1, 2, 5))
def test_tiles_of_any_height(case, tile_rows, monkeypatch):
    """Each tile begins with the input rows above it that reach into it."""
    monkeypatch.setattr(family.Layout, "tile_rows", lambda self, target: tile_rows)
    t = operands(case, torch.float32, "contiguous", "cpu")
    for chosen in plans(problem_of(case))[:2]:
        assert_right(run(chosen, t, blocks=2), case, t)


def test_random_layers():
    for case in random_cases(12, seed=11):
        t = operands(case, torch.float32, "contiguous", "cpu")
        for turn, chosen in enumerate(plans(problem_of(case, x_aligned=False))[:2]):
            assert_right(run(chosen, t, blocks=turn + 1), case, t)


@pytest.mark.parametrize("layout", ("channels_last", "mixed", "strided"))
def test_reads_any_strides(layout):
    case = CASES[8]
    t = operands(case, torch.float32, layout, "cpu")
    x_layout = "channels_last" if layout == "channels_last" else "contiguous"
    served = plans(problem_of(case, x_layout=x_layout, x_aligned=False))
    assert served
    for chosen in served[:2]:
        assert_right(run(chosen, t), case, t)


@pytest.mark.parametrize("wide", (False, True), ids=("int", "long long"))
@pytest.mark.parametrize("case", (CASES[1], CASES[2], CASES[7]), ids=str)
def test_wide_offsets_and_sanitizers(case, wide):
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = plans(problem_of(case, wide_offsets=wide))[0]
    assert_right(run(chosen, t, sanitize=True, blocks=2), case, t)


@pytest.mark.parametrize("case", (CASES[1], CASES[3], CASES[4]), ids=str)
def test_result_does_not_depend_on_the_order_of_threads(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = plans(problem_of(case))[0]
    assert_order_free(chosen, t, blocks=2, others=3)


def test_outputs_without_taps_hold_the_bias_alone():
    case = CASES[13]
    t = operands(case, torch.float32, "contiguous", "cpu")
    for chosen in distinct(plans(problem_of(case))):
        # Rows 2, 3 and 4 of every 5 have no tap: the kernel has two.
        assert_bias_alone(chosen, t, [y for y in range(case.output_size[0]) if y % 5 >= 2])


def test_refusals_give_their_reasons():
    problem = problem_of(CASES[0])
    assert "sm_80" in family.why_not(problem, Target.named("sm_75"))
    assert "ieee" in family.why_not(dataclasses.replace(problem, math="ieee"), HOPPER)
    last = dataclasses.replace(problem, y_layout="channels_last")
    assert "contiguous" in family.why_not(last, HOPPER)
    wide = problem_of(Case(1, 16, 1, 1, (2, 2), (2, 2), (1, 17)))
    assert "stride is 17" in family.why_not(wide, HOPPER)
    # 32 output channels of 3x3 taps: 576 rows.
    many = problem_of(Case(1, 32, 64, 1, (8, 8), (3, 3), (5, 5)))
    assert "576 rows" in family.tile_why_not(many, HOPPER, family.TILES[0])
    outputs = problem_of(Case(8, 64, 32, 1, (128, 128), (2, 2), (2, 2)))
    assert "gather 32 units" in family.tile_why_not(outputs, HOPPER, family.TILES[1])
    deep = problem_of(Case(1, 256, 1, 1, (8, 300), (3, 3)))
    assert "shared memory" in family.tile_why_not(deep, Target.named("sm_86"), family.TILES[1])


def test_the_plan_takes_it_where_taps_are_many_and_outputs_few():
    # But for one that is for sm_90a alone.
    for name in ("4x4 s2, 64 to 3", "4x4 s2, 128 to 3", "9x9 s3, 56 to 1"):
        found = candidates(problem_of(LAYERS[name]), HOPPER)
        others = [
            c for c in found if c.refusal is None and c.stem != sm90_tf32_overlap_forward.STEM
        ]
        assert min(others, key=lambda c: c.cost).stem == family.STEM
    for case in (LAYERS["1x4 s1x2, 64 to 32"], Case(8, 64, 32, 1, (128, 128), (2, 2), (2, 2))):
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
    "2x2 s2, 64 to 12": Case(8, 64, 12, 1, (128, 128), (2, 2), (2, 2)),
    "1x4 s1x2, 64 to 32": Case(16, 64, 32, 1, (1, 4096), (1, 4), (1, 2), (0, 1)),
    "4x4 s2, 32 to 3, wide": Case(4, 32, 3, 1, (200, 333), (4, 4), (2, 2), (1, 1)),
    "8x8 s4, 64 to 1": Case(4, 64, 1, 1, (64, 64), (8, 8), (4, 4), (2, 2)),
    "3x3, 16 to 8": Case(16, 16, 8, 1, (128, 128), (3, 3), (1, 1), (1, 1)),
}


def compiled(problem: Problem, arch: str = "sm_90a") -> int:
    count = 0
    for chosen in distinct(plans(problem, Target.named(arch))):
        assert_compiled_well(chosen, arch)
        count += 1
    return count


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_spills_on_hopper(name):
    assert compiled(problem_of(LAYERS[name])) > 0


@pytest.mark.parametrize("arch", ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a"))
def test_nothing_spills_elsewhere(arch):
    for name in ("4x4 s2, 64 to 3", "9x9 s3, 56 to 1"):
        assert compiled(problem_of(LAYERS[name]), arch) > 0


@pytest.mark.parametrize(
    "changes", (dict(wide_offsets=True), dict(x_aligned=False), dict(bias=False)), ids=str
)
def test_nothing_spills_in_any_variant(changes):
    for name in ("4x4 s2, 128 to 3", "9x9 s3, 56 to 1"):
        assert compiled(problem_of(LAYERS[name], **changes)) > 0
