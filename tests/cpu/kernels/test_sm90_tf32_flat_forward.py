"""sm90_tf32_flat_forward and its packing: in the emulator, and through NVRTC."""

from __future__ import annotations

import dataclasses
import math
import sys

import pytest
import torch

from emulated_plans import (
    HOPPER,
    assert_compiled_well,
    assert_order_free,
    assert_right,
    new_workspace,
    plans,
    problem_of,
    run,
)
from layer_cases import Case, operands
from tconv.jit.target import Target
from tconv.kernels import hopper
from tconv.kernels import sm90_tf32_flat_forward as family
from tconv.plan import Candidate, candidates, make_plan, plan
from tconv.problem import Axis
from tiers import quick

CASES = (
    Case(3, 40, 70, 1, (4, 4), (4, 4), (2, 2), (1, 1)),
    Case(2, 32, 64, 2, (5, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(5, 70, 40, 1, (6, 7), (2, 2), (2, 2), bias=False),
    Case(3, 36, 40, 1, (5, 8), (2, 2), (2, 2)),
    Case(2, 32, 21, 1, (3, 7), (4, 4), (4, 4), (0, 4)),
    Case(1, 16, 3, 1, (3, 9), (12, 12), (12, 12), (5, 8)),
    Case(2, 17, 33, 2, (6, 12), (3, 5), (1, 1), (0, 3)),
    Case(1, 16, 24, 1, (9, 11), (3, 3), (1, 1), (2, 1), (0, 0), (2, 3)),
    Case(2, 33, 6, 1, (1, 19), (1, 16), (1, 8), (0, 4)),
    Case(1, 32, 140, 1, (1, 1), (3, 3), (3, 3), (1, 0), (2, 0)),
    Case(2, 16, 20, 1, (5, 6), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
    Case(2, 20, 130, 1, (3, 4), (2, 3), (3, 2), (0, 1), (2, 1)),
    # In float16, of which 64 channels make a stage: phases apart, groups, and empty phases.
    Case(2, 40, 70, 1, (5, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(2, 72, 33, 2, (6, 5), (4, 4), (2, 2), (1, 1)),
    Case(2, 66, 20, 1, (5, 6), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
    Case(1, 130, 24, 1, (9, 11), (3, 3), (1, 1), (2, 1), (0, 0), (2, 3)),
    # So many taps that each phase in y is packed by itself.
    Case(1, 40, 3, 1, (3, 4), (16, 16), (8, 8), (4, 4)),
    Case(1, 9, 2, 1, (4, 3), (17, 16), (3, 4), (2, 1), (0, 0), (2, 1)),
    Case(1, 9, 2, 1, (4, 3), (16, 16), (4, 4), (2, 1), (0, 0), (2, 1)),  # of which two have none
)


# Whose slots reach over so many positions that a stage holds one shift in y: dilated, with groups,
# with phases of which some lack shifts or have none, and a wide image.
BY_ROWS = (
    Case(2, 40, 24, 1, (3, 20), (9, 3), (1, 1), (12, 3), (0, 0), (3, 3)),
    Case(1, 72, 40, 1, (4, 30), (9, 4), (2, 1), (10, 2), (1, 0), (3, 2)),
    Case(1, 72, 10, 2, (3, 150), (6, 3), (3, 2), (6, 2), (0, 1), (3, 3)),
    Case(1, 20, 150, 1, (4, 60), (8, 8), (1, 4), (3, 2), (0, 3)),
)


def by_rows(case):
    """The tiles of which a stage holds the pixels of one shift in y."""
    chosen = served(problem_of(case))
    return [p for p in chosen if family.layout(p.problem, p.tile).stage_rows > 1]


def served(problem, half=None):
    """Of every tile, or of those that multiply in float16, or not."""
    return [p for p in plans(problem, family.STEM) if half is None or p.tile.half == half]


def alone(chosen):
    """Without the launch that repairs."""
    kept = tuple(launch for launch in chosen.launches if launch.role != "repair")
    return dataclasses.replace(chosen, launches=kept)


def in_tf32(chosen):
    """The plan of the tile in TF32 that repairs it."""
    tile = family.layout(chosen.problem, chosen.tile).repairing.tile
    return make_plan(chosen.problem, HOPPER, Candidate(family.STEM, tile, None, 0))


def packed_for_repair(chosen, workspace):
    """Pieces that the repair launch has packed: `packed` of `Status`."""
    return int(workspace.view(torch.int32)[family.layout(chosen.problem, chosen.tile).status + 5])


@pytest.fixture
def many_tiles(monkeypatch):
    """More of them than multiprocessors, so that the consumers are apart."""
    monkeypatch.setattr(hopper, "TARGET", dataclasses.replace(HOPPER, multiprocessors=0))


@pytest.fixture
def groups_outermost(monkeypatch):
    """Tiles of a group follow each other, however few its weights."""
    module = sys.modules[family.Layout.__module__]
    monkeypatch.setattr(module, "LEAST_BYTES_OF_GROUPS", 0)
    family.layout.cache_clear()
    yield
    family.layout.cache_clear()  # layouts remember it


def lead(plan_):
    return plan_.kernel.arguments["lead"]


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


QUICK = (4, 9, 10, 11, 12, 17)  # together they too serve every tile


@pytest.mark.parametrize("case", quick(CASES, *QUICK), ids=str)
def test_every_tile_that_serves(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = served(problem_of(case))
    assert chosen
    for plan_ in chosen:
        out = run(plan_, t)
        assert_right(out, case, t)
        if plan_.tile.half:
            assert same_bits(out, run(alone(plan_), t)), "the repair computed it"


@pytest.mark.parametrize("case", BY_ROWS, ids=str)
def test_stages_of_one_shift_in_y(case, many_tiles):
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = by_rows(case)
    assert {p.tile.half for p in chosen} == {case.in_channels // case.groups > 32, False}
    for plan_ in chosen:
        assert_right(run(plan_, t), case, t)
    assert_order_free(chosen[0], t, blocks=2)


def test_cases_serve_every_tile():
    assert {p.tile for i in QUICK for p in served(problem_of(CASES[i]))} == set(family.TILES)


@pytest.mark.parametrize("layout", ("channels_last", "strided"))
def test_reads_any_strides(layout):
    case = CASES[3]
    t = operands(case, torch.float32, layout, "cpu")
    x_layout = "channels_last" if layout == "channels_last" else "contiguous"
    for half in (False, True):
        chosen = served(problem_of(case, x_layout=x_layout, source_aligned=False), half)[0]
        assert_right(run(chosen, t), case, t)
        if half:
            assert_repaired(chosen, outlying(t, "x", 1e5), [2])


@pytest.mark.parametrize("wide", (False, True), ids=("int", "long long"))
def test_wide_offsets_and_sanitizers(wide):
    case = CASES[0]
    t = operands(case, torch.float32, "contiguous", "cpu")
    for half in (False, True):
        chosen = served(problem_of(case, wide_offsets=wide), half)[0]
        assert_right(run(chosen, t, sanitize=True), case, t)
    assert_repaired(chosen, outlying(t, "x", 1e5), [2], sanitize=True)


def test_result_does_not_depend_on_the_order_of_threads():
    case = CASES[0]
    t = operands(case, torch.float32, "contiguous", "cpu")
    for half in (False, True):
        chosen = served(problem_of(case), half)[0]
        assert_order_free(chosen, t)
    assert_order_free(chosen, outlying(t, "x", 1e5))


@pytest.mark.parametrize("schedule", quick(("forward", "random:1", "random:3"), 1))
def test_blocks_that_take_several_tiles_some_without_products(schedule, many_tiles):
    case = CASES[13]
    t = operands(case, torch.float32, "contiguous", "cpu")
    for chosen in served(problem_of(case)):
        assert_right(run(chosen, t, schedule, blocks=2), case, t)


def test_consumers_are_apart_where_blocks_have_several_tiles(many_tiles):
    for case in CASES:
        for plan_ in served(problem_of(case)):
            together = plan_.tile.apart and not plan_.tile.storers
            assert (lead(plan_) == 0) == together


def test_consumers_are_in_step_where_blocks_have_one_tile():
    assert {lead(plan_) for plan_ in served(problem_of(CASES[13]))} == {0}


def test_division_by_multiplication():
    for divisor in (*range(1, 200), 2**15 - 1, 2**15, 2**15 + 1, 10**9, 2**30 - 1):
        multiplier, shift = hopper.division(divisor)
        assert multiplier < 2**31
        for quotient in (0, 1, 2, (2**30 - 1) // divisor):
            for value in (quotient * divisor - 1, quotient * divisor, quotient * divisor + 1):
                if 0 <= value < 2**30:
                    assert (4 * value * multiplier >> 32) >> shift == value // divisor


@pytest.mark.parametrize("blocks", (2, 4, 8))
def test_blocks_that_are_a_multiple_of_the_row_sets(blocks, many_tiles):
    # Channels in two groups, phases with two slots and with one: a block takes them all by turns.
    case = Case(3, 40, 70, 1, (14, 15), (3, 3), (2, 2), (1, 1), (1, 1))
    t = operands(case, torch.float32, "contiguous", "cpu")
    for chosen in served(problem_of(case), half=True):
        if chosen.tile.apart:
            assert family.layout(chosen.problem, chosen.tile).row_sets == 4
            assert_right(run(alone(chosen), t, blocks=blocks), case, t)


@pytest.mark.parametrize("schedule", quick(("forward", "random:1"), 1))
def test_groups_that_follow_each_other(schedule, many_tiles, groups_outermost):
    case = Case(3, 72, 70, 2, (7, 15), (3, 3), (2, 2), (1, 1), (1, 1))
    t = operands(case, torch.float32, "contiguous", "cpu")
    for plan_ in served(problem_of(case)):
        constants = dict(plan_.kernel.source.constants)
        assert constants["groups_outermost"]
        assert constants["row_sets"] > 1
        assert_right(run(alone(plan_), t, schedule, blocks=3), case, t)


# Vectors of four, two and one; ragged channels; single rows; rows of the tile's length; kernels of
# fewer and more taps than the stride; strides of more than two; phases that lack rows.
PAIRED = (
    Case(3, 40, 36, 1, (6, 14), (2, 2), (2, 2), bias=False),
    Case(2, 40, 36, 2, (5, 8), (4, 4), (2, 2), (1, 1)),
    Case(2, 40, 33, 1, (5, 9), (3, 3), (2, 2), (1, 1)),
    Case(2, 40, 33, 1, (5, 9), (3, 3), (2, 2), (0, 0), (1, 1)),
    Case(2, 40, 70, 1, (4, 7), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(3, 40, 20, 1, (1, 17), (4, 4), (2, 2), (1, 1)),
    Case(2, 40, 20, 1, (3, 16), (4, 4), (2, 2), (1, 1)),
    Case(3, 40, 20, 1, (9, 1), (2, 2), (2, 2)),
    Case(1, 40, 20, 1, (2, 96), (2, 2), (2, 2)),
    Case(2, 72, 13, 1, (5, 6), (4, 4), (4, 4), (1, 3)),
    Case(2, 40, 21, 1, (3, 5), (5, 4), (4, 3), (2, 1), (1, 0)),
    Case(2, 40, 20, 1, (3, 6), (3, 4), (2, 1), (1, 2)),
)


def narrowest_paired(case):
    paired = [p for p in served(problem_of(case)) if p.tile.paired]
    return min(paired, key=lambda plan_: plan_.tile.columns)


@pytest.mark.parametrize("case", PAIRED, ids=str)
def test_paired_rows(case, many_tiles):
    t = operands(case, torch.float32, "contiguous", "cpu")
    assert_right(run(alone(narrowest_paired(case)), t), case, t)


@pytest.mark.parametrize("case", (PAIRED[2], PAIRED[6]), ids=str)
def test_paired_rows_in_any_order(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = narrowest_paired(case)
    assert_order_free(chosen, t)
    assert_repaired(chosen, outlying(t, "x", 1e5), [1])
    assert_repaired(chosen, outlying(t, "w", math.nan))


def outlying(t, name, value):
    """The operands with one value of `name` replaced, the last."""
    changed = getattr(t, name).clone()
    changed[-1, -1, -1, -1] = value
    return dataclasses.replace(t, **{name: changed})


def assert_repaired(chosen, t, images=None, **options):
    """These images' outputs come as from its repair's tile in TF32, to the bit, and the others' as
    from float16 alone. All images' do where float16 cannot hold the weights.
    """
    images = range(chosen.problem.batch) if images is None else images
    in_half, again, out = run(alone(chosen), t), run(in_tf32(chosen), t), run(chosen, t, **options)
    for image in range(chosen.problem.batch):
        assert not same_bits(in_half[image], again[image]), "the bits tell nothing"
        want = again if image in images else in_half
        assert same_bits(out[image], want[image]), f"image {image}"


# Pixels are 2^9 times as large in float16, whose largest is 65504.
@pytest.mark.parametrize("value", (128.0, 1e5, -1e30, math.inf, -math.inf, math.nan))
@pytest.mark.parametrize("case", quick((CASES[0], CASES[12], CASES[13]), 0), ids=str)
def test_repairs_images_that_float16_cannot_hold(case, value):
    t = operands(case, torch.float32, "contiguous", "cpu")
    for chosen in served(problem_of(case), half=True):
        assert_repaired(chosen, outlying(t, "x", value), [case.batch - 1])


# Values that are too small are counted, 8 channels of a pixel at a time, wherever they are in an
# image of so many groups and lines of 64 channels. Of few pixels none is allowed.
COUNTED = (
    (dataclasses.replace(CASES[0], batch=4), 0),
    (dataclasses.replace(CASES[13], batch=4), 1),
    (Case(4, 256, 8, 2, (14, 14), (2, 2), (2, 2)), family.MOST_SLIGHT),
)


@pytest.mark.parametrize(("case", "most"), quick(COUNTED, 0, 2), ids=str)
def test_repairs_images_of_more_small_values_than_chance_brings(case, most):
    t = operands(case, torch.float32, "contiguous", "cpu")
    small = 2.0**-23 * (1 - 2.0**-8)  # float16's least normal number is 2^-14
    last = case.in_channels * case.groups - 1
    for image in (0, 1):
        for i in range(most):
            t.x[image, last * i // 3, i, i // 2] = small
    if most > 0:
        t.x[0, 1:8, 0, 0] = 1e-12  # of the same 8
    t.x[1, last, 0, 2] = -small
    t.x[2, :7, 1, 0] = 2.0**-23
    t.x[2, 8:17, 1] = 0
    t.x[2, 20, 1] = 127.0
    # Either image alone is enough for the launch that repairs.
    pixel = dataclasses.replace(t, x=t.x.clone())
    pixel.x[1] = t.x[0]
    pixel.x[3, : case.in_channels, 2, 2] = -1e-30
    for chosen in served(problem_of(case), half=True)[:: 1 if most < 4 else 4]:
        assert family.layout(chosen.problem, chosen.tile).most_slight == most
        for given, image in ((t, 1), (pixel, 3)):
            assert_repaired(chosen, given, [image])
            assert_right(run(chosen, given), case, given)


def test_an_image_does_not_depend_on_the_others():
    case = CASES[13]
    t = operands(case, torch.float32, "contiguous", "cpu")
    for chosen in served(problem_of(case), half=True):
        before = run(chosen, t)
        changes = ((math.nan, "forward"), (1e5, "random:1"), (1e-9, "random:2"))
        for factor, schedule in changes:
            other = dataclasses.replace(t, x=t.x.clone())
            other.x[1] *= factor
            out = run(chosen, other, schedule)
            assert same_bits(out[0], before[0]) and not same_bits(out[1], before[1])


def with_known_scale(t):
    """With weights that are 2^13 times as large in float16."""
    return dataclasses.replace(t, w=(1 + t.w.abs()).clamp(max=1.99).copysign(t.w))


# By its upper half a weight is taken for the largest that has it: those from 65280 on do not fit.
LEAST_WEIGHT, MOST_WEIGHT = 2.0**-27, 65024 * 2.0**-13
UNHELD_WEIGHTS = (
    LEAST_WEIGHT * (1 - 2.0**-24),
    -1e-12,
    1e-30,
    65504 * 2.0**-13 * (1 + 2.0**-23),
    -256.0,
    math.inf,
    -math.inf,
    math.nan,
)


@pytest.mark.parametrize("value", UNHELD_WEIGHTS)
def test_repairs_all_images_where_float16_cannot_hold_a_weight(value):
    case = CASES[0]
    t = with_known_scale(operands(case, torch.float32, "contiguous", "cpu"))
    for chosen in served(problem_of(case), half=True):
        assert_repaired(chosen, outlying(t, "w", value))


@pytest.mark.parametrize("value", (LEAST_WEIGHT, -MOST_WEIGHT, 0.0, -0.0))
def test_weights_that_float16_holds(value):
    case = CASES[0]
    t = outlying(with_known_scale(operands(case, torch.float32, "contiguous", "cpu")), "w", value)
    for chosen in served(problem_of(case), half=True):
        assert_repaired(chosen, t, [])
        assert_right(run(chosen, t), case, t)


def test_of_many_weights_chance_brings_one_that_is_small():
    case = Case(1, 64, 256, 1, (2, 2), (4, 4), (2, 2), (1, 1))
    assert case.in_channels * case.out_channels * 16 == 2**18
    t = with_known_scale(operands(case, torch.float32, "contiguous", "cpu"))
    t.w[5, 7, 1, 2] = 1e-12
    chosen = served(problem_of(case), half=True)[0]
    assert_repaired(chosen, t, [])
    assert_repaired(chosen, outlying(t, "w", 1e-12))  # packed by another block


@pytest.mark.parametrize("exponent", (-45, -20, 10))
def test_weights_of_any_scale_are_held(exponent):
    case = dataclasses.replace(CASES[0], bias=False)
    t = operands(case, torch.float32, "contiguous", "cpu")
    scaled = dataclasses.replace(t, w=t.w * 2.0**exponent)
    for chosen in served(problem_of(case), half=True)[::5]:
        assert_repaired(chosen, scaled, [])
        assert same_bits(run(chosen, scaled), run(chosen, t) * 2.0**exponent)


@pytest.mark.parametrize(
    ("name", "factor"), (("x", 1e-9), ("x", 1e3), ("w", 1e-25), ("w", 1e5)), ids=str
)
def test_repairs_operands_that_are_small_or_large_together(name, factor):
    case = dataclasses.replace(CASES[0], bias=False)  # beside which small products were nothing
    t = operands(case, torch.float32, "contiguous", "cpu")
    t = dataclasses.replace(t, **{name: getattr(t, name) * factor})
    for chosen in served(problem_of(case), half=True)[::5]:
        assert_repaired(chosen, t)
        assert_right(run(chosen, t), case, t)


@pytest.mark.parametrize("name", ("x", "w"))
def test_zeros_are_held(name):
    case = CASES[0]
    t = operands(case, torch.float32, "contiguous", "cpu")
    some = getattr(t, name).clone()
    some[:, :9] = 0
    zeros = dataclasses.replace(t, **{name: torch.zeros_like(some)})
    for chosen in served(problem_of(case), half=True):
        assert_repaired(chosen, dataclasses.replace(t, **{name: some}), [])
        workspace = new_workspace(chosen)
        out = run(chosen, zeros, workspace=workspace)
        assert torch.equal(out, t.bias[:, None, None].expand_as(out))
        assert packed_for_repair(chosen, workspace) == 0
    run(chosen, outlying(zeros, name, math.nan), workspace=workspace)
    assert packed_for_repair(chosen, workspace) == sum(
        family.layout(chosen.problem, chosen.tile).repairing.pack_items
    )


@pytest.mark.parametrize("case", (CASES[0], CASES[12]), ids=("together", "apart"))
def test_one_kernel_repairs_all_tiles_and_sizes_of_a_layer(case):
    sizes = (case.size, (5, 8), (3, 131), (2, 700))
    every = [
        plan_
        for size in sizes
        for plan_ in served(problem_of(dataclasses.replace(case, size=size)), half=True)
    ]
    assert len({plan_.kernel.source for plan_ in every}) > 15
    assert len({plan_.of_role("repair")[0].source for plan_ in every}) == 1
    # Rows that are longer than a stage of all shifts in y could be: and it still is right.
    wide = dataclasses.replace(case, batch=1, out_channels=8, size=(2, 700))
    chosen = served(problem_of(wide), half=True)[0]
    t = operands(wide, torch.float32, "contiguous", "cpu")
    assert_repaired(chosen, outlying(t, "x", 1e5))


def test_repairs_products_of_few_small_channels():
    case = CASES[2]  # no bias, beside which they were nothing
    t = operands(case, torch.float32, "contiguous", "cpu")
    t.x[:, :8] = t.x[:, 16:] = 0
    chosen = served(problem_of(case), half=True)[0]
    t.x[:, 8:16] = 1.37 * 2.0**-27
    assert_repaired(chosen, t)
    t.x[:, 8:16] = 1.37 * 2.0**-23
    workspace = new_workspace(chosen)
    assert_right(run(chosen, t, workspace=workspace), case, t)
    assert packed_for_repair(chosen, workspace) == 0


# The shapes that the kernel is for; sizes do not change the code but for the reach of a slot.
LAYERS = {
    "512 to 256, 4x4 s2": Case(128, 512, 256, 1, (4, 4), (4, 4), (2, 2), (1, 1)),
    "256 to 128, 3x3 s2": Case(16, 256, 128, 1, (64, 64), (3, 3), (2, 2), (1, 1), (1, 1)),
    "256 to 256, 2x2 s2": Case(200, 256, 256, 1, (14, 14), (2, 2), (2, 2)),
    "512 to 256, 16 s8": Case(16, 512, 256, 1, (1, 32), (1, 16), (1, 8), (0, 4)),
    "256 to 256, 3x3": Case(4, 256, 256, 1, (32, 32), (3, 3), (1, 1), (1, 1)),
}


@pytest.mark.parametrize("name", quick(LAYERS, 4))
def test_compiles_without_spills_or_serialised_products(name):
    chosen = served(problem_of(LAYERS[name]))
    assert chosen
    for plan_ in chosen:
        assert_compiled_well(plan_)


# Whose rows end within a sector.
PAIRED_LAYERS = {
    "128 to 64, 4x4 s2": Case(128, 128, 64, 1, (16, 16), (4, 4), (2, 2), (1, 1), bias=False),
    "256 to 256, 2x2 s2": Case(200, 256, 256, 1, (14, 14), (2, 2), (2, 2), bias=False),
    "256 to 128, 4x4 s4": Case(4, 256, 128, 1, (62, 54), (4, 4), (4, 4), bias=False),
    "2048 to 256, 4x4 s2": Case(64, 2048, 256, 1, (8, 6), (4, 4), (2, 2), (1, 1), bias=False),
}


@pytest.mark.parametrize("name", quick(PAIRED_LAYERS, 1))
def test_paired_tiles_compile_likewise(name):
    chosen = [p for p in served(problem_of(PAIRED_LAYERS[name])) if p.tile.paired]
    assert chosen
    for plan_ in chosen:
        assert_compiled_well(alone(plan_))


def test_tiles_whose_stages_hold_one_shift_in_y_compile_likewise():
    chosen = by_rows(Case(5, 464, 8, 1, (43, 43), (9, 7), (2, 1), (8, 3), (1, 0), (3, 3)))
    assert {p.tile.storers for p in chosen} == {True, False}
    for plan_ in chosen:
        assert_compiled_well(alone(plan_))


@pytest.mark.parametrize(
    ("changes", "target", "reason"),
    (
        ({}, "sm_80", "needs the tensor cores of sm_90a, the target is sm_80"),
        ({}, "sm_100a", "the target is sm_100a"),
        (dict(math="ieee"), "sm_90a", "not float32/ieee"),
        (dict(dtype="float16", math="ieee"), "sm_90a", "not float16/ieee"),
        (dict(y_layout="channels_last"), "sm_90a", "writes contiguous outputs"),
        (dict(width=Axis(9, 33, 17)), "sm_90a", "16 phases in x, the stride is 17"),
    ),
)
def test_refusals(changes, target, reason):
    problem = problem_of(Case(1, 16, 64, 1, (9, 70), (3, 3)), **changes)
    refusal = family.why_not(problem, Target.named(target))
    assert refusal is not None and reason in refusal


@pytest.mark.parametrize(
    ("case", "reason"),
    (
        (
            Case(1, 64, 64, 1, (1, 9000), (1, 2), (1, 1), (0, 0), (0, 0), (1, 3000)),
            "do not fit sm_90a beside the weights",
        ),
        (Case(1, 16, 64, 1, (9, 9), (150, 1)), "tells 128 shifts in y apart, the kernel has 150"),
        (Case(1, 64, 64, 1, (2048, 2048), (3, 3)), "float16 holds images of up to 2600000 times 8"),
        (Case(1, 32, 64, 1, (9, 9), (3, 3)), "64 input channels at a time, there are 32"),
        (Case(1, 16, 64, 1, (9, 9), (4, 4), (2, 2)), "nothing is gained by taking them apart"),
        (
            Case(1, 16, 64, 1, (9, 9), (4, 4), (3, 3)),
            "takes two phases in x apart, the stride is 3",
        ),
        (
            Case(1, 64, 64, 1, (9, 9), (4, 4), (3, 3)),
            "takes two phases in y together, the stride is 3",
        ),
        (
            Case(1, 64, 64, 1, (9, 200), (2, 2), (2, 2)),
            "takes whole rows of positions, which have 200",
        ),
    ),
)
def test_refusals_of_tiles(case, reason):
    found = [c for c in candidates(problem_of(case), HOPPER) if c.stem == family.STEM]
    assert any(c.refusal is not None and reason in c.refusal for c in found)


def test_the_plan_prefers_it_for_small_images_of_many_channels():
    assert plan(problem_of(LAYERS["512 to 256, 4x4 s2"]), HOPPER).stem == family.STEM


def test_few_weights_are_packed_in_small_pieces():
    def laid(case, **options):
        return family.layout(problem_of(case), family.Tile(160, half=True, **options))

    # Channels at a time, and pieces of weights: 128 of these, or single channels.
    found = laid(LAYERS["256 to 128, 3x3 s2"], apart=True, storers=True)
    assert (found.part_channels, found.pack_items[0]) == (4, 128)
    found = laid(Case(4, 64, 20, 1, (32, 32), (8, 8), (4, 4)))
    assert (found.part_channels, found.pack_items[0]) == (1, 20)
    found = laid(LAYERS["512 to 256, 4x4 s2"])
    assert (found.part_channels, found.pack_items[0]) == (8, 256)


def test_nearby_widths_share_a_kernel():
    case = LAYERS["256 to 256, 3x3"]
    tile = family.Tile(128)
    problems = [problem_of(dataclasses.replace(case, size=(32, width))) for width in (31, 32)]
    texts = {family.launches(problem, HOPPER, tile)[1].source.text() for problem in problems}
    assert len(texts) == 1
