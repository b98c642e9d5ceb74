"""sm90_tf32_forward and its packing: in the emulator, and through NVRTC."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import emulated_plans
from emulated_plans import (
    FEW_CHANNELS,
    HOPPER,
    PATCH_CASES,
    PATCH_LAYERS,
    assert_compiled_well,
    assert_order_free,
    assert_right,
    assert_wants_vectors,
    assert_written_alone,
    problem_of,
    run,
)
from layer_cases import Case, operands, reference
from tconv.jit.target import Target
from tconv.kernels import sm90_tf32_forward as family
from tconv.plan import Candidate, Plan, candidates, make_plan, plan
from tconv.problem import Axis, Problem
from tiers import quick


def plans(problem: Problem, resident: bool | None = None) -> list[Plan]:
    """One for each tile that serves; of one mode of the weights, or of both."""
    served = emulated_plans.plans(problem, family.STEM)
    return [chosen for chosen in served if resident in (None, chosen.tile.resident)]


QUICK = (2, 8, 10, 17)  # together they too serve every tile


@pytest.mark.parametrize("case", quick((*PATCH_CASES, *FEW_CHANNELS), *QUICK, -4, -3), ids=str)
def test_every_tile_that_serves(case):
    t = operands(dataclasses.replace(case), torch.float32, "contiguous", "cpu")
    served = plans(problem_of(case))
    assert served
    for chosen in served:
        assert_right(run(chosen, t), case, t)


def test_cases_serve_every_tile():
    assert {p.tile for i in QUICK for p in plans(problem_of(PATCH_CASES[i]))} == set(family.TILES)


# Several stages of so many products that they are parts in a loop, in which registers of weights
# come round anew or do not.
PART_CASES = (
    Case(1, 40, 64, 1, (4, 72), (3, 7)),
    Case(1, 40, 32, 1, (5, 40), (3, 7), (1, 1), (1, 3)),
    Case(1, 24, 64, 1, (3, 20), (5, 5), (1, 1), (2, 2)),
    Case(1, 40, 64, 1, (6, 24), (9, 9), (2, 2), (4, 4)),
    Case(2, 24, 40, 1, (4, 30), (6, 10), (1, 2), (0, 4)),
)


@pytest.mark.parametrize("case", quick(PART_CASES, 0, 3), ids=str)
def test_parts_of_a_stage_in_a_loop(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    served = [p for p in plans(problem_of(case)) if _parts(p) > 1]
    assert served
    for chosen in served:
        assert_right(run(chosen, t), case, t)


def test_part_cases_have_all_kinds_of_parts():
    served = [p for case in PART_CASES for p in plans(problem_of(case)) if _parts(p) > 1]
    assert {(p.tile.resident, p.tile.half) for p in served} >= {
        (True, True),
        (False, True),
        (False, False),
    }
    assert {_parts(p) for p in served} >= {2, 3, 5}
    assert {max(dict(p.kernel.source.constants)["class_ahead"]) for p in served} == {3, 4}


def _parts(chosen: Plan) -> int:
    return max(dict(chosen.kernel.source.constants)["class_parts"])


@pytest.mark.parametrize("tile", family.TILES, ids=str)
def test_every_tile_with_resident_and_with_streamed_weights(tile, monkeypatch):
    # The table has most tiles in one mode only.
    other = dataclasses.replace(tile, resident=not tile.resident)
    monkeypatch.setattr(family, "TILES", (tile, other))
    for case in PATCH_CASES:
        t = operands(dataclasses.replace(case), torch.float32, "contiguous", "cpu")
        served = plans(problem_of(case))
        if {plan.tile for plan in served} == {tile, other}:
            first, second = (run(chosen, t) for chosen in served)
            assert torch.equal(first, second)
            return
    pytest.fail("no case serves the tile in both modes")


@pytest.mark.parametrize("layout", ("channels_last", "strided"))
def test_reads_any_strides(layout):
    case = PATCH_CASES[2]
    t = operands(case, torch.float32, layout, "cpu")
    x_layout = "channels_last" if layout == "channels_last" else "contiguous"
    chosen = plans(problem_of(case, x_layout=x_layout, source_aligned=False))[0]
    assert_right(run(chosen, t), case, t)


def test_values_that_are_not_finite():
    # Of NaNs the one that arithmetic on a GPU gives, and its negative: all bits of the mantissa.
    case = PATCH_CASES[1]
    t = operands(case, torch.float32, "contiguous", "cpu")
    special = (0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, -0x800000)
    chosen = plans(problem_of(case))[0]
    for bits in special:
        value = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        t.x[0, 3, 2, 17] = value[0]
        t.x.view(torch.int32)[0, 3, 2, 17] = bits
        out = run(chosen, t)
        want = reference(case, t.x, t.w, t.bias, t.grad_output)[0]
        assert torch.equal(out.isnan(), want.isnan())
        assert torch.equal(out.isinf(), want.isinf())


@pytest.mark.parametrize("case", PATCH_CASES[-4:], ids=str)
def test_tiles_that_overlap_write_into_longer_rows(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    overlapping = [p for p in plans(problem_of(case)) if p.tile.sectors]
    assert overlapping
    for chosen in overlapping:
        assert_written_alone(chosen, case, t)


def test_a_tile_that_is_repaired_leaves_its_neighbours_outputs():
    # What two tiles compute is written by one of them.
    case = PATCH_CASES[-4]
    t = operands(case, torch.float32, "contiguous", "cpu")
    x = t.x.clone()
    x[0, 3, 2, 20] = 1e5
    t = dataclasses.replace(t, x=x)
    chosen = next(p for p in plans(problem_of(case)) if p.tile.sectors)
    repaired, left = run(chosen, t), run(alone(chosen), t)
    assert_right(repaired, case, t)
    changed = (repaired != left).any(0).any(0).any(0).nonzero()
    first, last = int(changed.min()), int(changed.max())
    assert first < 20 < last < chosen.tile.columns
    assert torch.equal(repaired[..., last + 1 :], left[..., last + 1 :])


# What to do to an input and a weight so that float16 does not hold them as TF32 would. A pixel's
# value is small from 2^-27 of a sample's largest on; of 8 channels of a pixel those that are count
# as one. A weight is from 2^-28 on.
UNHELD = {
    "large": lambda x, w: x[0, 3, 2].fill_(1e5),
    "not a number": lambda x, w: x[0, 3, 2].fill_(float("nan")),
    "infinite": lambda x, w: x[0, 3, 2].fill_(-float("inf")),
    "all small": lambda x, w: x.mul_(1e-25),
    "all large": lambda x, w: x.mul_(1e5),
    "small channels": lambda x, w: x[:, 3::8].mul_(2.0**-31),
    "small weights": lambda x, w: w.mul_(1e-25),
    "a small weight": lambda x, w: w[-1, -1, -1, -1].fill_(1e-12),
    "large weights": lambda x, w: w.mul_(1e5),
    "an infinite weight": lambda x, w: w[0, 0, 0].fill_(float("inf")),
}

# And what is like that, but held.
HELD = {
    "random": lambda x, w: None,
    "a larger value": lambda x, w: x[:, 5, 1, 2].fill_(20.0),
    "a small value": lambda x, w: x[:, 4, 1, 1].fill_(1e-12),
    "all smaller": lambda x, w: x.mul_(1e-9),
    "all larger": lambda x, w: x.mul_(1e4),
    "an image of another scale": lambda x, w: x[1].mul_(1e-6),
    "zeros": lambda x, w: x[:, :3].zero_(),
    "smaller weights": lambda x, w: w.mul_(1e-9),
    "larger weights": lambda x, w: w.mul_(1e4),
    "zero weights": lambda x, w: w[3:9].zero_(),
}


def changed(case: Case, change):
    t = operands(case, torch.float32, "contiguous", "cpu")
    x, w = t.x.clone(), t.w.clone()
    change(x, w)
    return dataclasses.replace(t, x=x, w=w)


def half_plan(case: Case, common: bool) -> Plan:
    served = plans(problem_of(case))
    return next(p for p in served if p.tile.half and p.tile.common == common)


# Whether the consumers have patches of their own.
by_patches = pytest.mark.parametrize("common", (False, True), ids=("own", "common"))


def in_tf32(chosen: Plan) -> Plan:
    tile = dataclasses.replace(chosen.tile, half=False, resident=False)
    return make_plan(chosen.problem, HOPPER, Candidate(family.STEM, tile, None, 0))


def alone(chosen: Plan) -> Plan:
    """Without what its blocks end with, repairs."""
    return chosen.with_source(dataclasses.replace(chosen.kernel.source, repair_source=None))


def same_bits(a, b) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


# Strides 1 and 2, channels that are no multiple of 16, two groups; several tiles for a block.
HALF_CASES = (PATCH_CASES[1], PATCH_CASES[2], Case(1, 24, 16, 1, (9, 20), (3, 3)))
# Sixteen channels stand for four rows each, too many for what two consumers share.
COMMON_CASES = (*HALF_CASES[:2], Case(1, 24, 32, 1, (9, 20), (3, 3)))


@pytest.mark.parametrize(
    ("common", "case"),
    quick(
        ((common, case) for common in (False, True) for case in (HALF_CASES, COMMON_CASES)[common]),
        *(0, 2, 4),
    ),
    ids=lambda value: str(value) if isinstance(value, Case) else ("own", "common")[value],
)
@pytest.mark.parametrize("name", UNHELD)
def test_repairs_what_float16_cannot_hold(name, case, common):
    # Each tile of these cases reads what was changed, and so comes from the kernel in TF32.
    case = dataclasses.replace(case, bias=False)  # beside which small sums were nothing
    t = changed(case, UNHELD[name])
    if name in ("large", "not a number", "infinite"):
        t.x[:, 3 :: case.in_channels] = t.x[0, 3, 2, 0]
    chosen = half_plan(case, common)
    want = run(in_tf32(chosen), t)
    assert same_bits(run(chosen, t, blocks=2), want)
    assert not same_bits(run(alone(chosen), t, blocks=2), want)
    if all(values.isfinite().all() for values in (t.x, t.w)):
        assert_right(want, case, t)


@pytest.mark.parametrize("name", quick(HELD, 0, 2, 4, 5))
def test_float16_alone_computes_what_it_holds(name):
    case = dataclasses.replace(HALF_CASES[0], bias=False)
    t = changed(case, HELD[name])
    for chosen in plans(problem_of(case)):
        if chosen.tile.half:
            out, again = run(chosen, t), run(in_tf32(chosen), t)
            assert_right(out, case, t)
            assert same_bits(out, run(alone(chosen), t))
            for of_image, by_tf32 in zip(out, again, strict=True):
                assert not same_bits(of_image, by_tf32), "the bits tell nothing"


LEAST_WEIGHT, MOST_WEIGHT = 2.0**-27, 65504 * 2.0**-13


@pytest.mark.parametrize(
    ("value", "held"),
    (
        (LEAST_WEIGHT, True),
        (LEAST_WEIGHT * (1 - 2.0**-24), False),
        (MOST_WEIGHT, True),
        (MOST_WEIGHT * (1 + 2.0**-23), False),
        (-0.0, True),
    ),
)
@by_patches
def test_the_least_and_the_largest_weight(common, value, held):
    case = HALF_CASES[0]
    t = operands(case, torch.float32, "contiguous", "cpu")
    w = (1 + t.w.abs()).clamp(max=1.99).copysign(t.w)  # 2^13 times as large in float16
    w[-1, -1, -1, -1] = value
    t = dataclasses.replace(t, w=w)
    chosen = half_plan(case, common)
    out, in_half, again = run(chosen, t, blocks=2), run(alone(chosen), t), run(in_tf32(chosen), t)
    assert same_bits(out, in_half if held else again) and not same_bits(in_half, again)
    assert_right(out, case, t)


@by_patches
def test_an_image_does_not_depend_on_the_others(common):
    case = HALF_CASES[0]
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = half_plan(case, common)
    before = run(chosen, t)
    changes = ((float("nan"), "forward"), (1e5, "random:1"), (1e-25, "random:2"), (1e-9, "reverse"))
    for factor, schedule in changes:
        other = dataclasses.replace(t, x=torch.stack((t.x[0], t.x[1] * factor)))
        out = run(chosen, other, schedule, blocks=2)
        assert same_bits(out[0], before[0]) and not same_bits(out[1], before[1])


@by_patches
@pytest.mark.parametrize("other", (7, 12), ids=("of the same 8", "of two"))
def test_a_tile_is_repaired_for_two_small_values_of_a_pixel(other, common):
    case = Case(1, 16, 64, 1, (24, 70), (3, 3))
    t = operands(case, torch.float32, "contiguous", "cpu")
    for channel in (4, other):
        t.x[0, channel, 3, 17] = 1e-12
    chosen = half_plan(case, common)
    out, in_half, again = run(chosen, t, blocks=2), run(alone(chosen), t), run(in_tf32(chosen), t)
    assert_right(out, case, t)
    near, far = (..., slice(3, 6), slice(17, 20)), (..., slice(12, None), slice(None))
    for place, repaired in ((near, other == 12), (far, False)):
        in_place, *either = (y[place].contiguous() for y in (out, in_half, again))
        assert same_bits(in_place, either[repaired])
        assert not same_bits(in_place, either[not repaired])


@by_patches
@pytest.mark.parametrize(
    ("batch", "height", "repaired"), ((1, 16, True), (1, 17, False), (2, 8, True), (2, 9, False))
)
def test_in_a_call_of_few_values_one_small_value_is_repaired(batch, height, repaired, common):
    # Twice 8 channels of 512 pixels, or more.
    case = Case(batch, 16, 64, 1, (height, 32), (3, 3), bias=False)
    t = operands(case, torch.float32, "contiguous", "cpu")
    t.x[0, 4, 3, 17] = 1e-12
    chosen = half_plan(case, common)
    assert same_bits(run(chosen, t), run(alone(chosen), t)) != repaired
    assert_right(run(chosen, t), case, t)


@by_patches
def test_a_repair_computes_noted_tiles_alone(common):
    case = Case(1, 16, 64, 1, (24, 70), (3, 3))
    t = changed(case, UNHELD["large"])
    chosen = half_plan(case, common)
    before = run(alone(chosen), t)
    for schedule in ("forward", "random:1"):
        whole = run(chosen, t, schedule, blocks=2)
        assert same_bits(whole[:, :, 12:].contiguous(), before[:, :, 12:].contiguous())
        assert_right(whole, case, t)
        assert not same_bits(whole, before)


@by_patches
def test_tiles_are_repaired_once(common):
    case = Case(2, 48, 64, 1, (12, 70), (3, 3))
    t = changed(case, lambda x, w: x.mul_(1e6))
    chosen = half_plan(case, common)
    laid = family.layout(chosen.problem, chosen.tile)
    for schedule in ("forward", "random:1"):
        workspace = emulated_plans.new_workspace(chosen)
        run(chosen, t, schedule, blocks=2, workspace=workspace)
        chain = workspace.view(torch.int32)[laid.packed_bytes // 4 + 1 + laid.weight_words :]
        unused = torch.tensor(float("nan")).view(torch.int32)
        links = (chain.view(laid.tiles, -1) != unused).sum(1)
        assert torch.equal(links, torch.ones_like(links))


def test_output_must_start_on_a_vector():
    t = operands(PATCH_CASES[0], torch.float32, "contiguous", "cpu")
    assert_wants_vectors(plans(problem_of(PATCH_CASES[0]))[0], t)


@pytest.mark.parametrize("case", (PATCH_CASES[1], PATCH_CASES[6], PATCH_CASES[12]), ids=str)
def test_writes_into_longer_rows(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    assert_written_alone(plans(problem_of(case))[0], case, t)


def test_a_repair_finds_a_value_that_one_of_the_warps_brings():
    # Of a common patch four warps bring 32 pixels each in turn, whichever rows are whose.
    case = Case(1, 16, 64, 1, (9, 60), (3, 3))
    chosen = half_plan(case, common=True)
    rows, columns = chosen.problem.height, chosen.problem.width
    assert (rows.size, columns.size) == (9, 60)
    for y, x in ((0, 0), (0, 40), (1, 3), (1, 30), (8, 59)):
        t = operands(case, torch.float32, "contiguous", "cpu")
        value = t.x.clone()
        value[0, 5, y, x] = 1e5
        t = dataclasses.replace(t, x=value)
        assert_right(run(chosen, t), case, t)
        assert not same_bits(run(chosen, t), run(alone(chosen), t))


def test_patches_begin_on_lines_where_that_takes_no_more_tiles():
    def laid(width: int, tile: family.Tile) -> family.Layout:
        y, x = (Axis(size, 3, 1, 0, 0, 1) for size in (32, width))
        case = problem_of(Case(1, 32, 32, 1, (32, 64), (3, 3)), source_aligned=True)
        return family.layout(dataclasses.replace(case, height=y, width=x), tile)

    tile = family.Tile(columns=104, rows=2, m_tiles=1, half=True, resident=True, sectors=True)
    wide = laid(1024, tile)  # 11 tiles with room for 32 columns, one for each 96
    assert (wide.lead, wide.tiles_yx[1], wide.tile_step) == (8, 11, 96)
    # 448 bytes from the middle of a line on: 4 lines, where 32 bytes before one take 5.
    first = wide.q_ranges[1].start - wide.slots_x[-1] - wide.skew
    assert first % 32 == 16 and wide.patch_columns == 112
    full = laid(1062, tile)  # no room
    assert (full.lead, full.tiles_yx[1]) == (0, 11)
    assert laid(1022, tile).repairing.lead == laid(1022, tile).lead == 8


def test_a_packing_serves_tiles_that_differ_in_what_it_does_not_read():
    """Rows of another alignment, and tiles whose warps share their pixels."""
    layer = Case(1, 64, 64, 1, (8, 32), (3, 3))
    of_sizes = [
        plans(problem_of(layer)),
        plans(problem_of(dataclasses.replace(layer, size=(8, 33)))),
    ]
    every = [plan_ for of_size in of_sizes for plan_ in of_size]
    kinds = {(p.tile.m_tiles, p.tile.half, p.tile.resident) for p in every}
    assert len({p.launches[0].source for p in every}) == len(kinds)
    assert len({p.kernel.source for p in every}) == len(every)


# Whether patches come by tensor map or through registers, and weights from shared memory or L2.
by_map_or_loads = pytest.mark.parametrize("aligned", (True, False), ids=("map", "loads"))
by_weights = pytest.mark.parametrize("resident", (True, False), ids=("resident", "streamed"))


@by_map_or_loads
@by_weights
@pytest.mark.parametrize("wide", quick((False, True), 1), ids=("int", "long long"))
def test_wide_offsets_and_sanitizers(wide, resident, aligned):
    case = PATCH_CASES[1]
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = plans(problem_of(case, wide_offsets=wide, source_aligned=aligned), resident)[0]
    assert_right(run(chosen, t, sanitize=True), case, t)


@by_map_or_loads
@by_weights
def test_result_does_not_depend_on_the_order_of_threads(resident, aligned):
    case = PATCH_CASES[1]
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = plans(problem_of(case, source_aligned=aligned), resident)[0]
    assert_order_free(chosen, t)


# By loads: few and many pairs of a stage, strides of 1, 2 and 8.
LOADED_LAYERS = (
    "64 to 64, 3x3",
    "64 to 64, 3x7",
    "64 to 64, 4x4 s2",
    "64 to 32, 2x2 s2",
    "21 to 21, 16x16 s8",
)


def test_layers_compile_every_tile():
    mapped = [plans(problem_of(case, source_aligned=True)) for case in PATCH_LAYERS.values()]
    assert {p.tile for served in mapped for p in served} == set(family.TILES)
    loaded = [plans(problem_of(PATCH_LAYERS[name], source_aligned=False)) for name in LOADED_LAYERS]
    few = {tile for tile in family.TILES if tile.sums <= family.MOST_SUMS}
    assert {p.tile for served in loaded for p in served} == few


@pytest.mark.parametrize(
    ("name", "aligned"),
    quick(
        (*((name, True) for name in PATCH_LAYERS), *((name, False) for name in LOADED_LAYERS)),
        *(5, -1),
    ),
)
def test_compiles_without_spills_or_serialised_products(name, aligned):
    served = plans(problem_of(PATCH_LAYERS[name], source_aligned=aligned))
    assert served
    for chosen in served:
        assert_compiled_well(chosen)


@pytest.mark.parametrize(
    ("changes", "target", "reason"),
    (
        ({}, "sm_80", "needs the tensor cores of sm_90a, the target is sm_80"),
        ({}, "sm_100a", "the target is sm_100a"),
        (dict(math="ieee"), "sm_90a", "not float32/ieee"),
        (dict(dtype="float16", math="ieee"), "sm_90a", "not float16/ieee"),
        (dict(y_layout="channels_last"), "sm_90a", "writes contiguous outputs"),
        (dict(groups=8), "sm_90a", "pays from 4 input channels of a group on, there are 2"),
        (dict(width=Axis(9, 33, 17)), "sm_90a", "16 phases in x, the stride is 17"),
    ),
)
def test_refusals(changes, target, reason):
    problem = problem_of(Case(1, 16, 64, 1, (9, 70), (3, 3)), **changes)
    refusal = family.why_not(problem, Target.named(target))
    assert refusal is not None and reason in refusal


def test_a_tile_that_spills_where_a_row_of_pixels_stands_for_two():
    tile = family.Tile(columns=64, rows=4, m_tiles=1, resident=True, half=True, common=True)
    assert tile in family.TILES
    for channels, spills in ((32, True), (64, False)):
        problem = problem_of(Case(8, channels, channels, 1, (256, 512), (5, 5)))
        assert family.layout(problem, tile).row_step == (2 if spills else 1)
        refusal = family.tile_why_not(problem, HOPPER, tile)
        assert (refusal is not None and "spills" in refusal) == spills


def test_a_tile_that_spills_where_pixels_come_through_registers_for_one_product():
    tile = family.Tile(columns=88, rows=2, m_tiles=1, resident=True, half=True)
    assert tile in family.TILES
    case = PATCH_LAYERS["64 to 32, 2x2 s2"]
    for aligned in (True, False):
        refusal = family.tile_why_not(problem_of(case, source_aligned=aligned), HOPPER, tile)
        assert (refusal is not None and "spills" in refusal) != aligned
    case = PATCH_LAYERS["64 to 64, 4x4 s2"]
    assert family.tile_why_not(problem_of(case, source_aligned=False), HOPPER, tile) is None


def test_few_channels_are_refused_and_half_tiles_serve_from_four_on():
    def refusals(channels):
        problem = problem_of(Case(1, channels, 64, 1, (9, 72), (3, 3)))
        ours = [c for c in candidates(problem, HOPPER) if c.stem == family.STEM]
        return {c.refusal for c in ours if c.tile is None or c.tile.half}

    assert refusals(3) == {"pays from 4 input channels of a group on, there are 3"}
    for channels in (4, 12):
        assert None in refusals(channels)


@pytest.mark.parametrize(
    ("case", "reason"),
    (
        (Case(1, 32, 32, 1, (9, 60), (3, 3)), "tiles would overlap in x, and there is one"),
        # Rows of 224 outputs, the first of them a tile's first.
        (Case(1, 32, 32, 1, (9, 224), (3, 3), (1, 1), (1, 1)), "whole sectors without an overlap"),
    ),
)
def test_tiles_overlap_where_rows_begin_between_sectors(case, reason):
    found = [c for c in candidates(problem_of(case), HOPPER) if c.stem == family.STEM]
    refusals = [c.refusal for c in found if c.tile.sectors and c.tile.m_tiles == 1]
    assert refusals and all(reason in refusal for refusal in refusals)


def test_refuses_row_groups_without_slots():
    # Phases 1 and 3 of stride 5 have no tap of dilation 2.
    problem = problem_of(Case(1, 32, 64, 1, (9, 9), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)))
    found = [c for c in candidates(problem, HOPPER) if c.stem == family.STEM]
    assert found and all(c.refusal is not None for c in found)
    assert any("no slot" in c.refusal for c in found)


def test_the_plan_prefers_it_where_it_serves():
    assert plan(problem_of(PATCH_LAYERS["64 to 64, 3x3"]), HOPPER).stem == family.STEM
    assert (
        plan(problem_of(PATCH_LAYERS["64 to 64, 3x3"]), Target.named("sm_80")).stem != family.STEM
    )
    assert isinstance(candidates(problem_of(PATCH_CASES[0]), HOPPER)[0], Candidate)
