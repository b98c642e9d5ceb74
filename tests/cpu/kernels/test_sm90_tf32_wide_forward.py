"""sm90_tf32_wide_forward and its packing: in the emulator, and through NVRTC."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from emulated_plans import (
    HOPPER,
    assert_compiled_well,
    assert_order_free,
    assert_right,
    plans,
    problem_of,
    run,
    with_blocks,
)
from layer_cases import Case, operands, random_cases, reference
from tconv.jit.compile import compile_cuda
from tconv.jit.target import Target
from tconv.kernels import sm90_tf32_wide_forward as family
from tconv.plan import candidates, plan
from tconv.problem import Axis
from tiers import quick

# Widths that are multiples of 4 come by copies of 16 bytes, others element by element.
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
    # Half of the phases of each axis are empty; column tiles without any slot, of three chunks.
    Case(2, 67, 150, 1, (4, 6), (3, 3), (2, 2), (1, 1), (1, 0), (2, 2)),
    # Tails of tiles of rows below and to the right, with a reach over both edges.
    Case(2, 33, 12, 1, (5, 76), (3, 5), (1, 1), (1, 2)),
    Case(1, 32, 20, 2, (6, 70), (4, 3), (2, 2), (1, 2)),
    # Copies of 16 bytes that start ahead of what is used, and padding beyond the reach.
    Case(2, 18, 26, 1, (5, 8), (5, 6), (2, 2), (2, 3), (0, 1)),
    Case(2, 20, 12, 1, (5, 8), (2, 3), (1, 1), (0, 1), (0, 1), (1, 2)),
    Case(1, 9, 17, 1, (8, 12), (2, 2), (1, 1), (4, 5)),
    # Phases in x whose slots all differ.
    Case(2, 20, 12, 1, (3, 9), (2, 5), (2, 5), (0, 3), (0, 0), (1, 3)),
)

DILATED, TAILS = CASES[12], CASES[13]


def served(problem):
    return plans(problem, family.STEM)


QUICK = (2, 11, 12, 17)  # together they too serve every tile


@pytest.mark.parametrize("case", quick(CASES, *QUICK), ids=str)
def test_every_tile_that_serves(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = served(problem_of(case))
    assert chosen
    for plan_ in chosen:
        assert_right(run(plan_, t), case, t)


def test_cases_serve_every_tile():
    assert {p.tile for i in QUICK for p in served(problem_of(CASES[i]))} == set(family.TILES)


def test_cases_cover_what_a_layout_decides():
    laid = [family.layout(p.problem, p.tile) for case in CASES for p in served(problem_of(case))]
    assert {one.copied for one in laid} == {1, 4}
    assert any(one.skew > 0 and one.tile.rows > 0 for one in laid)
    assert any(one.skew > 0 and one.tile.rows == 0 for one in laid)
    assert {len(one.masks) for one in laid} >= {1, 2, 3}
    # Column tiles of a class without a slot, beside others and alone.
    empty = [[not any(class_) for class_ in one.classes] for one in laid]
    assert any(any(classes) and not all(classes) for classes in empty)
    vectors = {family.vector(one.problem) for one in laid}
    assert vectors == {1, 2, 4}
    for rows in (2, 4):
        counts = [one.pixel_tile_counts for one in laid if one.tile.rows == rows]
        assert max(x for x, _, _ in counts) > 1 and max(y for _, y, _ in counts) > 1


@pytest.mark.parametrize(
    "case", quick(random_cases(10, 47, channels=40, size=12), 0, 1, 2), ids=str
)
def test_random_layers(case):
    # Few tiles of each: those of the first and of the last cost.
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = served(problem_of(case))
    for plan_ in chosen[:1] + chosen[-1:]:
        assert_right(run(plan_, t), case, t)


@pytest.mark.parametrize("case", (CASES[1], DILATED, TAILS), ids=str)
@pytest.mark.parametrize("blocks", (1, 3))
def test_few_blocks_that_walk_many_tiles(blocks, case):
    # Both rings go round across tiles, with and without slots, and tiles of other classes.
    t = operands(case, torch.float32, "contiguous", "cpu")
    for plan_ in served(problem_of(case))[::4]:
        few = with_blocks(plan_, min(blocks, plan_.kernel.grid))
        assert_right(run(few, t), case, t)


@pytest.mark.parametrize("case", (CASES[3], TAILS), ids=str)
def test_copies_of_16_bytes_and_of_4_give_the_same(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    single = {p.tile: p for p in served(problem_of(case, source_aligned=False))}
    compared = 0
    for plan_ in served(problem_of(case, source_aligned=True)):
        one = single[plan_.tile]
        if family.layout(plan_.problem, plan_.tile).copied == 4:
            assert family.layout(one.problem, one.tile).copied == 1
            assert torch.equal(run(plan_, t), run(one, t))
            compared += 1
    assert compared > 0


@pytest.mark.parametrize("case", (CASES[3], TAILS), ids=str)
@pytest.mark.parametrize("layout", ("channels_last", "strided"))
def test_reads_any_strides(layout, case):
    t = operands(case, torch.float32, layout, "cpu")
    x_layout = "channels_last" if layout == "channels_last" else "contiguous"
    chosen = served(problem_of(case, x_layout=x_layout, source_aligned=False))
    for plan_ in (chosen[0], next(p for p in chosen if p.tile.rows)):
        assert_right(run(plan_, t), case, t)


def test_reads_aligned_rows_that_are_not_neighbours():
    case = CASES[3]
    t = operands(case, torch.float32, "contiguous", "cpu")
    storage = torch.full((3, 40, 7, 12), float("nan"))
    storage[:, 2:38, 1:6, 4:12] = t.x
    t = dataclasses.replace(t, x=storage[:, 2:38, 1:6, 4:12])
    for plan_ in served(problem_of(case, source_aligned=True))[::3]:
        assert_right(run(plan_, t), case, t)


@pytest.mark.parametrize("bits", (0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, -0x800000))
def test_inputs_that_are_not_finite(bits):
    # All phases have taps at all slots, so that none meets a zero that is no weight.
    case = Case(2, 40, 20, 1, (6, 8), (4, 4), (2, 2), (1, 1))
    t = operands(case, torch.float32, "contiguous", "cpu")
    t.x.view(torch.int32)[1, 35, 2, 5] = bits
    want = reference(case, t.x, t.w, t.bias, t.grad_output)[0]
    for plan_ in served(problem_of(case))[::4]:
        out = run(plan_, t)
        assert torch.equal(out.isnan(), want.isnan())
        infinite = want.isinf()
        assert torch.equal(out.isinf(), infinite)
        assert torch.equal(out[infinite].double(), want[infinite])


@pytest.mark.parametrize("bits", (0x7FFFFFFF, 0x7F800000, -0x800000))
def test_weights_that_are_not_finite(bits):
    # Beyond the image it meets zeros, which make a NaN of an infinity: of its channel and phase.
    case = Case(2, 40, 20, 1, (6, 8), (4, 4), (2, 2), (1, 1))
    t = operands(case, torch.float32, "contiguous", "cpu")
    t.w.view(torch.int32)[35, 7, 1, 2] = bits
    want = reference(case, t.x, t.w, t.bias, t.grad_output)[0]
    reached = torch.zeros(want.shape, dtype=torch.bool)
    reached[:, 7, 0::2, 1::2] = True  # (1 - padding) % 2, (2 - padding) % 2
    for plan_ in served(problem_of(case))[::4]:
        out = run(plan_, t)
        assert torch.equal(out.isfinite(), ~reached)
        assert not (want.isfinite() & ~reached & ~out.isfinite()).any()
        infinite = out.isinf()
        assert torch.equal(out[infinite].double(), want[infinite])


@pytest.mark.parametrize("case", (CASES[0], DILATED, TAILS), ids=("plain", "dilated", "tails"))
@pytest.mark.parametrize("wide", quick((False, True), 1), ids=("int", "long long"))
def test_wide_offsets_and_sanitizers(wide, case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = served(problem_of(case, wide_offsets=wide))
    rows = [p for p in chosen if p.tile.rows]
    for plan_ in chosen[:1] + rows[:1]:
        assert_right(run(plan_, t, sanitize=True), case, t)


@pytest.mark.parametrize("case", (CASES[0], DILATED, TAILS), ids=("plain", "dilated", "tails"))
def test_result_does_not_depend_on_the_order_of_threads(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = with_blocks(served(problem_of(case))[0], 2)
    assert_order_free(chosen, t)


# The shapes that the kernel is for; sizes do not change the code but for the reach of a slot.
LAYERS = {
    "512 to 256, 4x4 s2": Case(128, 512, 256, 1, (4, 4), (4, 4), (2, 2), (1, 1)),
    "k3s2op1": Case(16, 256, 128, 1, (64, 64), (3, 3), (2, 2), (1, 1), (1, 1)),
    "maskrcnn": Case(200, 256, 256, 1, (14, 14), (2, 2), (2, 2)),
    "hifigan_k16s8": Case(16, 512, 256, 1, (1, 32), (1, 16), (1, 8), (0, 4)),
    "256 to 256, 3x3": Case(4, 256, 256, 1, (32, 32), (3, 3), (1, 1), (1, 1)),
    "sam_up1": Case(8, 256, 64, 1, (64, 64), (2, 2), (2, 2)),
    "unet_shallow": Case(4, 128, 64, 1, (256, 256), (2, 2), (2, 2)),
    "hd_k4s2": Case(1, 64, 64, 1, (1080, 1920), (4, 4), (2, 2), (1, 1)),
}


@pytest.mark.parametrize("wide", (False, True), ids=("int", "long long"))
@pytest.mark.parametrize("name", quick(LAYERS, 0))
def test_compiles_without_spills_or_serialised_products(name, wide):
    chosen = served(problem_of(LAYERS[name], wide_offsets=wide))
    assert chosen
    for plan_ in chosen[:: 3 if wide else 1]:
        assert_compiled_well(plan_)


@pytest.mark.parametrize("name", quick(("256 to 256, 3x3", "unet_shallow", "hd_k4s2"), 1))
def test_compiles_with_copies_of_4_bytes(name):
    for wide in (False, True):
        chosen = served(problem_of(LAYERS[name], wide_offsets=wide, source_aligned=False))
        assert chosen
        for plan_ in chosen[:: 3 + wide]:
            resources = compile_cuda(plan_.kernel.source, "sm_90a").resources
            assert not resources.spills and resources.stack_frame == 0, f"{plan_}: {resources}"
            assert not resources.warnings, f"{plan_}: {resources}"


@pytest.mark.parametrize(
    ("changes", "target", "reason"),
    (
        ({}, "sm_80", "needs the tensor cores of sm_90a, the target is sm_80"),
        ({}, "sm_100a", "the target is sm_100a"),
        (dict(math="ieee"), "sm_90a", "not float32/ieee"),
        (dict(dtype="float16", math="ieee"), "sm_90a", "not float16/ieee"),
        (dict(y_layout="channels_last"), "sm_90a", "writes contiguous outputs"),
        (dict(width=Axis(9, 33, 17)), "sm_90a", "16 phases in x, the stride is 17"),
        (dict(height=Axis(9, 33, 33)), "sm_90a", "32 phases in y apart, the stride is 33"),
    ),
)
def test_refusals(changes, target, reason):
    problem = problem_of(Case(1, 16, 64, 1, (9, 70), (3, 3)), **changes)
    refusal = family.why_not(problem, Target.named(target))
    assert refusal is not None and reason in refusal


@pytest.mark.parametrize(
    ("case", "reason"),
    (
        (Case(1, 64, 64, 1, (9, 4000), (3, 3)), "24 copies of a channel, 8160 positions need 255"),
        (Case(1, 64, 64, 1, (9, 250), (3, 3)), "do not fit sm_90a beside the weights"),
        (Case(1, 16, 64, 1, (9, 9), (2000, 1)), "no room for 2000 taps"),
        (Case(1, 16, 64, 1, (9, 9), (4, 4), (2, 2)), "nothing is gained by taking them apart"),
        (
            Case(1, 16, 64, 1, (9, 9), (4, 4), (3, 3)),
            "takes two phases in x apart, the stride is 3",
        ),
        (Case(1, 16, 64, 1, (9, 9), (9, 9), (9, 9)), "64 columns are too few for 9 phases in x"),
        (Case(8, 1, 1, 1, (16383, 16383)), "positions are over 32 bits"),
    ),
)
def test_refusals_of_tiles(case, reason):
    found = [c for c in candidates(problem_of(case), HOPPER) if c.stem == family.STEM]
    refusals = {c.refusal for c in found if c.refusal is not None}
    assert any(reason in refusal for refusal in refusals), refusals


def test_wide_images_are_served_by_tiles_of_rows_alone():
    tiles = {p.tile for p in served(problem_of(Case(1, 64, 64, 1, (9, 4000), (3, 3))))}
    assert tiles == {tile for tile in family.TILES if tile.rows}


@pytest.mark.parametrize(
    ("case", "tile", "stages"),
    (
        (Case(4, 128, 64, 1, (256, 256), (2, 2), (2, 2)), family.Tile(1, 256), (4, 3)),
        (Case(4, 128, 64, 1, (256, 256), (2, 2), (2, 2)), family.Tile(2, 128), (4, 3)),
        # A chunk has four slots, and there is room for a stage of weights for each.
        (Case(64, 24, 96, 1, (4, 8), (6, 6), (3, 3), (2, 3)), family.Tile(1, 160), (4, 4)),
        (Case(4, 128, 128, 1, (200, 200), (1, 4), (1, 2), (0, 2)), family.Tile(2, 128), (3, 3)),
        # Three stages of pixels do not fit so: all of shared memory.
        (Case(1, 64, 256, 1, (9, 30), (3, 3)), family.Tile(1, 256), (3, 4)),
        (Case(1, 64, 256, 1, (9, 80), (3, 3)), family.Tile(1, 256), (2, 4)),
    ),
)
def test_rings_leave_room_to_l1(case, tile, stages):
    problem = problem_of(case)
    laid = family.layout(problem, tile)
    assert laid.stages == stages
    aimed = family.source(problem, tile).shared_bytes <= family.SHARED_BESIDE_L1
    assert aimed == (case.kernel != (3, 3))


def test_consumers_are_in_step_where_a_chunk_has_one_slot():
    def lead(kernel):
        case = Case(4, 64, 32, 1, (64, 64), (kernel, kernel), (2, 2))
        return family.layout(problem_of(case), family.Tile(2, 128)).lead

    assert (lead(2), lead(3)) == (0, 2)


def test_few_weights_are_packed_in_small_pieces():
    def laid(channels):
        case = Case(8, channels, 64, 1, (64, 64), (2, 2), (2, 2))
        return family.layout(problem_of(case), family.Tile(1, 256))

    # Channels at a time: 64 pieces, or pieces as small as a unit.
    found = [(one.pack_channels, one.pack_items) for one in map(laid, (1024, 256, 64))]
    assert found == [(32, 64), (8, 64), (4, 32)]


def test_the_plan_prefers_it_where_packing_the_pixels_would_take_long():
    for name in ("sam_up1", "unet_shallow"):
        assert plan(problem_of(LAYERS[name]), HOPPER).stem == family.STEM


def test_nearby_widths_share_a_kernel():
    case = LAYERS["256 to 256, 3x3"]
    tile = family.Tile(1, 256)
    texts = {
        family.source(problem_of(dataclasses.replace(case, size=(32, width))), tile).text()
        for width in (33, 34)
    }
    assert len(texts) == 1
