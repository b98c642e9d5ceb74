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
from tconv.plan import plan
from tconv.problem import Axis
from tiers import quick

# Widths that are multiples of 4 come by copies of 16 bytes, others element by element.
CASES = (
    Case(5, 70, 40, 1, (6, 7), (2, 2), (2, 2), bias=False),
    Case(3, 36, 40, 2, (5, 8), (2, 2), (2, 2)),
    Case(2, 32, 21, 1, (3, 7), (4, 4), (4, 4), (0, 4)),
    Case(1, 16, 3, 1, (3, 9), (12, 12), (12, 12), (5, 8)),
    Case(2, 20, 140, 1, (3, 4), (3, 2), (3, 2), (0, 1), (2, 1)),
    # Column tiles whose last columns do not exist.
    Case(2, 67, 150, 1, (4, 6), (2, 2), (2, 2), (1, 1), (1, 0)),
    # Tails of tiles below and to the right; phases of odd strides.
    Case(2, 33, 12, 1, (5, 75), (1, 3), (1, 3), (0, 2), (0, 1)),
    Case(1, 32, 20, 2, (6, 72), (2, 4), (2, 4), (1, 2)),
    # Rows on 16 bytes whose first output's pixel is not, and is again.
    Case(2, 18, 26, 1, (5, 12), (2, 2), (2, 2), (2, 3)),
    Case(2, 18, 26, 1, (5, 12), (2, 2), (2, 2), (3, 8)),
    Case(2, 40, 24, 1, (9, 68), (1, 1), (1, 1)),
)

PLAIN, TAILS = CASES[1], CASES[7]


def served(problem):
    return plans(problem, family.STEM)


QUICK = (0, 2, 7, 8)


@pytest.mark.parametrize("case", quick(CASES, *QUICK), ids=str)
def test_every_tile_that_serves(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = served(problem_of(case))
    assert chosen
    for plan_ in chosen:
        assert_right(run(plan_, t), case, t)


def test_cases_cover_what_a_layout_decides():
    laid = [family.layout(p.problem, p.tile) for case in CASES for p in served(problem_of(case))]
    assert {one.tile for one in laid} == set(family.TILES)
    assert {one.copied for one in laid} == {1, 4}
    assert {one.low_phases for one in laid} == {1, 2} and max(one.parts for one in laid) > 2
    assert max(one.column_tiles for one in laid) > 1 and max(one.chunks for one in laid) > 2
    vectors = {family.vector(one.problem) for one in laid}
    assert vectors == {1, 2, 4}
    # Several tiles of an image, and several images of a tile.
    assert min(one.image_pixels for one in laid) < 64
    assert max(one.image_pixels for one in laid) > 256


@pytest.mark.parametrize(
    "case", quick(random_cases(10, 47, channels=40, size=12), 0, 1, 2), ids=str
)
def test_random_layers_with_their_stride_as_the_kernel(case):
    padding = tuple(min(p, (s - 1) // 2) for p, s in zip(case.padding, case.stride, strict=True))
    extra = tuple(min(p, s - 1) for p, s in zip(case.output_padding, case.stride, strict=True))
    case = dataclasses.replace(
        case, kernel=case.stride, dilation=(1, 1), padding=padding, output_padding=extra
    )
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = served(problem_of(case))
    assert chosen
    for plan_ in chosen:
        assert_right(run(plan_, t), case, t)


@pytest.mark.parametrize("case", (CASES[0], CASES[5], TAILS), ids=str)
@pytest.mark.parametrize("blocks", (1, 3))
def test_few_blocks_that_walk_many_tiles(blocks, case):
    # Both rings go round across tiles.
    t = operands(case, torch.float32, "contiguous", "cpu")
    for plan_ in served(problem_of(case)):
        few = with_blocks(plan_, min(blocks, plan_.kernel.grid))
        assert_right(run(few, t), case, t)


@pytest.mark.parametrize("case", (PLAIN, TAILS), ids=str)
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


@pytest.mark.parametrize("case", (PLAIN, TAILS), ids=str)
@pytest.mark.parametrize("layout", ("channels_last", "strided"))
def test_reads_any_strides(layout, case):
    t = operands(case, torch.float32, layout, "cpu")
    x_layout = "channels_last" if layout == "channels_last" else "contiguous"
    for plan_ in served(problem_of(case, x_layout=x_layout, source_aligned=False)):
        assert_right(run(plan_, t), case, t)


def test_reads_aligned_rows_that_are_not_neighbours():
    case = PLAIN
    t = operands(case, torch.float32, "contiguous", "cpu")
    storage = torch.full((3, 76, 7, 12), float("nan"))
    storage[:, 2:74, 1:6, 4:12] = t.x
    t = dataclasses.replace(t, x=storage[:, 2:74, 1:6, 4:12])
    for plan_ in served(problem_of(case, source_aligned=True)):
        assert_right(run(plan_, t), case, t)


@pytest.mark.parametrize("bits", (0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, -0x800000))
def test_inputs_that_are_not_finite(bits):
    case = Case(2, 40, 20, 1, (6, 8), (2, 2), (2, 2), (1, 1))
    t = operands(case, torch.float32, "contiguous", "cpu")
    t.x.view(torch.int32)[1, 35, 2, 5] = bits
    want = reference(case, t.x, t.w, t.bias, t.grad_output)[0]
    for plan_ in served(problem_of(case)):
        out = run(plan_, t)
        assert torch.equal(out.isnan(), want.isnan())
        infinite = want.isinf()
        assert torch.equal(out.isinf(), infinite)
        assert torch.equal(out[infinite].double(), want[infinite])


@pytest.mark.parametrize("bits", (0x7FFFFFFF, 0x7F800000, -0x800000))
def test_weights_that_are_not_finite(bits):
    case = Case(2, 40, 20, 1, (6, 8), (2, 2), (2, 2), (1, 1))
    t = operands(case, torch.float32, "contiguous", "cpu")
    t.w.view(torch.int32)[35, 7, 1, 0] = bits
    want = reference(case, t.x, t.w, t.bias, t.grad_output)[0]
    reached = torch.zeros(want.shape, dtype=torch.bool)
    reached[:, 7, 0::2, 1::2] = True  # (1 - padding) % 2, (0 - padding) % 2
    for plan_ in served(problem_of(case)):
        out = run(plan_, t)
        assert torch.equal(out.isfinite(), ~reached)
        assert not (want.isfinite() & ~reached & ~out.isfinite()).any()
        infinite = out.isinf()
        assert torch.equal(out[infinite].double(), want[infinite])


@pytest.mark.parametrize("case", (PLAIN, CASES[2], TAILS), ids=("plain", "padded", "tails"))
@pytest.mark.parametrize("wide", quick((False, True), 1), ids=("int", "long long"))
def test_wide_offsets_and_sanitizers(wide, case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    for plan_ in served(problem_of(case, wide_offsets=wide)):
        assert_right(run(plan_, t, sanitize=True), case, t)


@pytest.mark.parametrize("case", (PLAIN, CASES[2], TAILS), ids=("plain", "padded", "tails"))
def test_result_does_not_depend_on_the_order_of_threads(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    chosen = with_blocks(served(problem_of(case))[0], 2)
    assert_order_free(chosen, t)


# The shapes that the kernel is for, and strides of more parts; sizes do not change the code.
LAYERS = {
    "sam_up1": Case(8, 256, 64, 1, (64, 64), (2, 2), (2, 2)),
    "sam_up2": Case(8, 64, 32, 1, (128, 128), (2, 2), (2, 2)),
    "unet_shallow": Case(4, 128, 64, 1, (256, 256), (2, 2), (2, 2)),
    "maskrcnn": Case(200, 256, 256, 1, (14, 14), (2, 2), (2, 2)),
    "pointpillars_k4s4": Case(4, 256, 128, 1, (62, 54), (4, 4), (4, 4)),
    "96 to 64, 3x3 s3": Case(16, 96, 64, 1, (7, 14), (3, 3), (3, 3), (1, 0)),
    "64 to 8, 16x16 s16": Case(2, 64, 8, 1, (64, 64), (16, 16), (16, 16)),
    # One stage: between the products of its parts ptxas zeroed sums, and waited.
    "32 to 96, 2x4": Case(8, 32, 96, 1, (64, 14), (2, 4), (2, 4)),
}


@pytest.mark.parametrize("wide", (False, True), ids=("int", "long long"))
@pytest.mark.parametrize("name", quick(LAYERS, 0, -1))
def test_compiles_without_spills_or_serialised_products(name, wide):
    chosen = served(problem_of(LAYERS[name], wide_offsets=wide))
    assert chosen
    for plan_ in chosen:
        assert_compiled_well(plan_)


@pytest.mark.parametrize("name", quick(("unet_shallow", "pointpillars_k4s4"), 0))
def test_compiles_with_copies_of_4_bytes(name):
    for wide in (False, True):
        chosen = served(problem_of(LAYERS[name], wide_offsets=wide, source_aligned=False))
        assert chosen
        for plan_ in chosen:
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
        (dict(width=Axis(9, 17, 17)), "sm_90a", "16 phases in x, the stride is 17"),
        (dict(height=Axis(9, 33, 33)), "sm_90a", "32 phases in y apart, the stride is 33"),
        (dict(height=Axis(9, 4, 2)), "sm_90a", "along height the kernel is 4, the stride 2"),
        (dict(width=Axis(9, 2, 2, dilation=3)), "sm_90a", "the stride 2, the dilation 3"),
    ),
)
def test_refusals(changes, target, reason):
    problem = problem_of(Case(1, 16, 64, 1, (9, 70), (3, 3), (3, 3)), **changes)
    refusal = family.why_not(problem, Target.named(target))
    assert refusal is not None and reason in refusal


def test_tiles_of_few_columns_refuse_many_phases_in_x():
    case = Case(1, 16, 64, 1, (9, 9), (15, 15), (15, 15))
    assert {p.tile for p in served(problem_of(case))} == set(family.TILES)
    tile = family.Tile(64)
    refusal = family.tile_why_not(problem_of(case), HOPPER, tile)
    assert refusal == "64 columns are too few for 15 phases in x"


@pytest.mark.parametrize("tile", family.TILES, ids=str)
def test_rings_leave_room_to_l1(tile):
    # An SM with more than 195 KiB of shared memory has 28 KiB of L1, not 60.
    assert family.source(problem_of(LAYERS["unet_shallow"]), tile).shared_bytes <= 195 << 10


def test_few_weights_are_packed_in_small_pieces():
    def laid(channels):
        case = Case(8, channels, 64, 1, (64, 64), (2, 2), (2, 2))
        return family.layout(problem_of(case), family.Tile(256))

    # Channels at a time: 64 pieces, or pieces as small as a unit.
    found = [(one.pack_channels, one.pack_items) for one in map(laid, (1024, 256, 64))]
    assert found == [(32, 64), (8, 64), (4, 32)]


def test_the_plan_prefers_it_where_packing_the_pixels_would_take_long():
    for name in ("sam_up1", "unet_shallow"):
        assert plan(problem_of(LAYERS[name]), HOPPER).stem == family.STEM


def test_all_sizes_share_a_kernel():
    case = LAYERS["unet_shallow"]
    texts = {
        family.source(problem_of(dataclasses.replace(case, size=size)), family.Tile(256)).text()
        for size in ((256, 256), (33, 1000), (1, 4))
    }
    assert len(texts) == 1
