"""The kernels on the device, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tconv
from emulated_plans import HOPPER, problem_of
from layer_cases import (
    CORNERS,
    LAYOUTS,
    Case,
    assert_maps_right,
    assert_output_right,
    operands,
    random_cases,
    round_to_tf32,
    three_maps,
)
from tconv import tuning
from tconv.kernels import (
    mma_forward,
    pointwise_forward,
    pointwise_mma_forward,
    sm90_split_forward,
    sm90_tf32_flat_forward,
    sm90_tf32_forward,
    sm90_tf32_overlap_forward,
    sm90_tf32_wide_forward,
)
from tconv.memory_format import memory_format
from tconv.plan import Candidate, candidates

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def full_float32():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_corners(dtype, layout):
    for case in CORNERS:
        assert_maps_right(case, operands(case, dtype, layout, "cuda"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_layers(dtype, layout):
    seed = DTYPES.index(dtype) * len(LAYOUTS) + LAYOUTS.index(layout)
    for case in random_cases(12, seed, channels=40, size=33):
        assert_maps_right(case, operands(case, dtype, layout, "cuda", seed))


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_tf32_rounds_operands_to_nearest(layout):
    torch.backends.cudnn.allow_tf32 = True
    for case in (
        Case(2, 32, 48, 1, (17, 19), (3, 3)),
        Case(1, 16, 15, 2, (9, 8), (4, 4), (2, 2), (1, 1)),
        Case(1, 8, 40, 1, (9, 8), (3, 3), (2, 2), (1, 1)),
    ):
        assert_maps_right(case, operands(case, torch.float32, layout, "cuda"), tf32=True)


on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="Hopper's kernels are for compute capability 9.0",
)

# What Hopper's kernels on whole patches serve, with and without TF32.
HOPPER_CASES = (
    Case(2, 64, 64, 1, (67, 131), (3, 3)),
    Case(1, 64, 96, 1, (40, 90), (3, 5), bias=False),
    Case(2, 32, 32, 1, (37, 101), (3, 7), (1, 1), (1, 3)),
    Case(2, 48, 70, 2, (33, 29), (4, 4), (2, 2), (1, 1)),
    Case(3, 40, 3, 1, (17, 33), (4, 4), (2, 2), (1, 1)),
    Case(2, 64, 64, 1, (21, 35), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(1, 21, 21, 1, (9, 12), (16, 16), (8, 8), (4, 4)),
    Case(1, 24, 24, 1, (19, 22), (3, 3), (1, 1), (2, 1), (0, 0), (2, 3)),
    Case(300, 16, 16, 1, (3, 5), (3, 3), (2, 2)),
)


@on_hopper
@pytest.mark.parametrize("layout", ("contiguous", "strided"))
def test_strict_float32_on_hopper_tensor_cores(layout, monkeypatch):
    torch.backends.cudnn.allow_tf32 = False
    monkeypatch.setenv("TCONV_KERNEL", "sm90_split_forward")  # an error where it cannot serve
    for case in (*HOPPER_CASES, Case(2, 130, 200, 1, (7, 7), (2, 2), (2, 2))):
        assert_maps_right(case, operands(case, torch.float32, layout, "cuda"))


# Kernels that are their stride: copies of 16 and of 4 bytes, tails of tiles, padding.
STRIDE_CASES = (
    Case(2, 130, 200, 1, (7, 7), (2, 2), (2, 2)),
    Case(5, 64, 32, 1, (66, 132), (2, 2), (2, 2)),
    Case(3, 40, 70, 2, (21, 75), (4, 4), (4, 4), (1, 3), bias=False),
    Case(2, 33, 21, 1, (5, 67), (1, 3), (1, 3), (0, 2), (0, 1)),
    Case(40, 256, 64, 1, (64, 64), (2, 2), (2, 2)),
)


@on_hopper
@pytest.mark.parametrize(
    ("kernel", "cases"),
    (
        ("sm90_tf32_forward", (*HOPPER_CASES, STRIDE_CASES[0])),
        ("sm90_tf32_flat_forward", (*HOPPER_CASES, STRIDE_CASES[0])),
        ("sm90_tf32_wide_forward", STRIDE_CASES),
    ),
    ids=("forward", "flat", "wide"),
)
@pytest.mark.parametrize("layout", ("contiguous", "strided"))
def test_hopper_tensor_cores(layout, kernel, cases, monkeypatch):
    torch.backends.cudnn.allow_tf32 = True
    monkeypatch.setenv("TCONV_KERNEL", kernel)  # an error where it cannot serve
    for case in cases:
        assert_maps_right(case, operands(case, torch.float32, layout, "cuda"), tf32=True)


# 1x1 with planes on and off vectors, tails of channels and pixels; small images.
POINTWISE_CASES = {
    pointwise_forward: (
        Case(16, 1, 1, 64, (64, 64), (1, 1), (2, 2), bias=False),
        Case(44, 1, 272, 1, (4, 4), (1, 1), bias=False),
        Case(17, 4, 6, 2, (13, 13), (1, 1), (2, 2)),
        Case(3, 8, 3, 3, (70, 37), (1, 1), (1, 3), (0, 0), (0, 2)),
    ),
    pointwise_mma_forward: (
        Case(16, 240, 101, 1, (11, 40), (1, 1)),
        Case(2, 272, 64, 1, (78, 78), (1, 1), (2, 2), bias=False),
        Case(13, 136, 256, 1, (9, 9), (1, 1), (4, 4), (0, 0), (3, 0)),
        Case(3, 20, 70, 2, (8, 33), (1, 1), (2, 3)),
        Case(5, 100, 37, 2, (13, 20), (1, 1)),
        Case(3, 252, 127, 1, (9, 20), (1, 1), (2, 1)),
        Case(48, 128, 4, 1, (12, 12), (7, 5), (2, 2), (1, 4), (0, 0), (2, 2)),
        Case(5, 40, 3, 2, (5, 8), (4, 4), (2, 2), (1, 1)),
    ),
}


@pytest.mark.parametrize("layout", ("contiguous", "strided"))
@pytest.mark.parametrize("family", POINTWISE_CASES, ids=lambda family: family.STEM)
def test_pointwise(family, layout):
    tf32 = torch.backends.cudnn.allow_tf32 = family is pointwise_mma_forward
    served = set()
    for case in POINTWISE_CASES[family]:
        t = operands(case, torch.float32, layout, "cuda")
        for tile in family.TILES:
            for candidate in of_tile(family, tile, case, "tf32" if tf32 else "ieee"):
                with tuning.using(candidate):
                    assert_output_right(case, t, tf32=tf32)
                served.add(tile)
    assert served == set(family.TILES)


# Many tiles for each warpgroup, whose stores fill the queues that another's loads stand in.
BUSY_CASES = (
    Case(2, 64, 64, 1, (500, 1020), (3, 3)),
    Case(2, 32, 32, 1, (500, 1020), (3, 3)),
    Case(1, 32, 128, 1, (300, 508), (4, 4), (2, 2), (1, 1)),
    Case(2, 40, 256, 1, (150, 252), (2, 2), (2, 2)),
)


def named(value):
    """A kernel family or a tile, in a test's name."""
    return getattr(value, "STEM", str(value))


def of_tile(family, tile, case, math="tf32"):
    """The tile as a candidate for a layer: in a list, empty where it cannot serve."""
    found = candidates(problem_of(case, math=math), HOPPER)
    return [c for c in found if (c.stem, c.tile, c.refusal) == (family.STEM, tile, None)]


@on_hopper
@pytest.mark.parametrize(
    ("family", "tile"),
    [(family, tile) for family in (sm90_tf32_forward, sm90_split_forward) for tile in family.TILES],
    ids=named,
)
def test_every_tile_of_staged_patches_on_a_busy_device(family, tile):
    strict = family is sm90_split_forward
    torch.backends.cudnn.allow_tf32 = not strict
    # The tensor cores cut a sum after each product; one wrong fragment is 1e-4.
    most = 5e-7 if strict else 1e-5
    served = 0
    for case in BUSY_CASES:
        for candidate in of_tile(family, tile, case, "ieee" if strict else "tf32"):
            served += 1
            t = operands(case, torch.float32, "contiguous", "cuda")
            x, w = (t.x, t.w) if strict else (round_to_tf32(t.x), round_to_tf32(t.w))
            exact = torch.nn.functional.conv_transpose2d(
                x.double(),
                w.double(),
                None if t.bias is None else t.bias.double(),
                stride=case.stride,
                padding=case.padding,
            )
            with tuning.using(candidate):
                for _ in range(3):
                    out = tconv.conv_transpose2d(
                        t.x, t.w, t.bias, stride=case.stride, padding=case.padding
                    )
                    error = (out.double() - exact).norm() / exact.norm()
                    assert error <= most, f"{case}: {error}"
    assert served > 0


@on_hopper
@pytest.mark.parametrize(
    ("family", "tile"),
    [
        (family, tile)
        for family in (sm90_tf32_flat_forward, sm90_tf32_wide_forward)
        for tile in family.TILES
    ],
    ids=named,
)
def test_every_tile_of_many_channels(family, tile):
    torch.backends.cudnn.allow_tf32 = True
    served = 0
    for case in (
        Case(9, 130, 200, 1, (7, 9), (3, 3), (2, 2), (1, 1), (1, 1)),  # phases apart
        Case(3, 67, 300, 1, (9, 76), (4, 4), (2, 2), (1, 1)),  # copies of 16 bytes
        Case(5, 40, 70, 2, (21, 35), (2, 2), (2, 2), bias=False),
        Case(2, 100, 150, 1, (11, 13), (3, 3), (2, 2), (1, 1), (1, 0), (2, 2)),  # empty phases
        Case(4, 33, 21, 1, (5, 67), (3, 7), (1, 3), (1, 2)),
        # More tiles than multiprocessors: the flat kernel's consumers are apart.
        Case(80, 66, 40, 1, (15, 17), (4, 4), (2, 2), (1, 1)),
        Case(80, 66, 40, 1, (15, 17), (3, 3), (2, 2), (1, 1)),
        # So many taps that the flat kernel's packing takes each phase in y by itself.
        Case(2, 70, 21, 1, (9, 11), (16, 16), (8, 8), (4, 4)),
        # So many weights that the flat kernel takes group after group.
        Case(2, 2048, 1024, 2, (5, 6), (2, 2), (2, 2), bias=False),
        *STRIDE_CASES,
    ):
        for candidate in of_tile(family, tile, case):
            served += 1
            with tuning.using(candidate):
                tensors = operands(case, torch.float32, "contiguous", "cuda")
                assert_output_right(case, tensors, tf32=True)
    assert served > 0


# Many rows for each block: of whole sectors and not, with rows and columns that no tap reaches.
ROW_CASES = (
    Case(4, 8, 16, 4, (60, 256), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1)),
    Case(4, 8, 16, 4, (61, 255), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1), bias=False),
    Case(8, 32, 64, 1, (64, 128), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2), bias=False),
    Case(8, 32, 64, 1, (63, 127), (3, 3), (5, 5), (1, 1), (2, 1), (2, 2)),
    Case(4, 16, 40, 1, (70, 131), (3, 3), (1, 1), (1, 1)),
    Case(9, 64, 3, 1, (65, 64), (4, 4), (2, 2), (1, 1)),
    Case(16, 40, 24, 1, (9, 33), (2, 2), (2, 2)),
    Case(40, 8, 16, 2, (30, 136), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1)),
    Case(60, 16, 24, 1, (20, 67), (3, 3), (5, 5), (1, 1), (3, 3), (2, 2), bias=False),
)


@on_hopper
@pytest.mark.parametrize("tile", mma_forward.TILES, ids=str)
def test_every_tile_on_mma(tile):
    torch.backends.cudnn.allow_tf32 = not tile.split
    served = 0
    for case in ROW_CASES:
        if case.groups > 1 and not tile.split:
            continue  # few channels in a group: strict float32 whatever the flag
        for candidate in of_tile(mma_forward, tile, case, "ieee" if tile.split else "tf32"):
            served += 1
            with tuning.using(candidate):
                for _ in range(2):
                    tensors = operands(case, torch.float32, "contiguous", "cuda")
                    assert_output_right(case, tensors, tf32=not tile.split)
    assert served > 0


# What to multiply an input and a weight by, and what to put into one of the inputs.
UNHELD = {
    "large inputs": (1e6, 1, None),
    "small inputs": (1e-7, 1, None),
    "large weights": (1, 1e5, None),
    "small weights": (1, 1e-9, None),
    "one large input": (1, 1, 1e5),
    "not a number": (1, 1, float("nan")),
    "infinite": (1, 1, -float("inf")),
}


@on_hopper
@pytest.mark.parametrize("name", UNHELD)
@pytest.mark.parametrize("family", (sm90_tf32_forward, sm90_tf32_flat_forward, sm90_split_forward))
def test_what_float16_cannot_hold_comes_as_in_tf32(family, name):
    strict = family is sm90_split_forward
    torch.backends.cudnn.allow_tf32 = not strict
    of_input, of_weight, put = UNHELD[name]
    # These are held once they are scaled, and added up in other groups than TF32's.
    scaled = name.startswith("small")
    for case in (
        Case(2, 64, 64, 1, (67, 132), (3, 3)),
        Case(3, 72, 40, 2, (33, 28), (4, 4), (2, 2), (1, 1)),
        Case(2, 130, 96, 1, (21, 36), (3, 3), (2, 2), (1, 1), (1, 1), bias=False),
    ):
        if scaled:
            case = dataclasses.replace(case, bias=False)  # which would hide small outputs
        t = operands(case, torch.float32, "contiguous", "cuda")
        x, w = t.x * of_input, t.w * of_weight
        if put is not None:
            x[:, 3 :: case.in_channels, ::2, ::2] = put
        problem = problem_of(case, math="ieee" if strict else "tf32")
        served = [
            c
            for c in candidates(problem, HOPPER)
            if c.stem == family.STEM and c.refusal is None and c.tile.half
        ]
        assert served

        def output(candidate, case=case, t=t, x=x, w=w):
            with tuning.using(candidate):
                return tconv.conv_transpose2d(
                    x,
                    w,
                    t.bias,
                    stride=case.stride,
                    padding=case.padding,
                    output_padding=case.output_padding,
                    groups=case.groups,
                )

        for candidate in served[:4]:
            if family is sm90_tf32_flat_forward:
                # NOTE: which sums beside an infinity or NaN are no numbers, and so added up again
                # in another order, depends on the tile. All images here are its repair's.
                tile = family.layout(problem, candidate.tile).repairing.tile
            else:
                tile = dataclasses.replace(candidate.tile, half=False, resident=False)
            want = output(Candidate(family.STEM, tile, None, 0))
            finite = want[want.isfinite()].abs().max() if want.isfinite().any() else 0
            for _ in range(3):
                out = output(candidate)
                if strict or scaled:
                    # What float16 holds is added up in other groups. TF32 itself errs by 3e-4.
                    worst, norm = (2e-6, 5e-7) if strict else (1e-5, 1e-5)
                    near = {"rtol": 0, "atol": worst * float(finite), "equal_nan": True}
                    torch.testing.assert_close(out, want, **near)
                    held = want.isfinite()
                    assert (out - want)[held].norm() <= norm * want[held].norm(), candidate
                else:
                    assert torch.equal(out.view(torch.int32), want.view(torch.int32)), candidate


@on_hopper
@pytest.mark.parametrize("layout", ("contiguous", "strided"))
@pytest.mark.parametrize("tile", sm90_tf32_overlap_forward.TILES, ids=str)
def test_every_tile_that_adds_overlaps_in_registers(tile, layout):
    torch.backends.cudnn.allow_tf32 = True
    served = 0
    for case in (
        Case(16, 56, 1, 1, (256, 256), (9, 9), (3, 3), (4, 4), (2, 2)),
        Case(3, 128, 3, 1, (17, 128), (4, 4), (2, 2), (1, 1)),
        Case(128, 64, 3, 1, (32, 32), (4, 4), (2, 2), (1, 1), bias=False),
        Case(2, 40, 2, 1, (31, 300), (5, 4), (1, 3), (2, 0), (0, 1)),
        Case(3, 20, 4, 5, (11, 131), (3, 5), (2, 4), (1, 2), (0, 1)),
        Case(2, 100, 3, 1, (61, 60), (3, 3), (1, 1), (1, 1)),
    ):
        for candidate in of_tile(sm90_tf32_overlap_forward, tile, case):
            served += 1
            with tuning.using(candidate):
                tensors = operands(case, torch.float32, layout, "cuda")
                assert_output_right(case, tensors, tf32=True)
    assert served > 0


@pytest.mark.parametrize("kernel", ("direct_forward", "mma_forward"))
@pytest.mark.parametrize("layout", ("contiguous", "strided"))
def test_layers_of_few_channels(layout, kernel, monkeypatch):
    torch.backends.cudnn.allow_tf32 = True
    monkeypatch.setenv("TCONV_KERNEL", kernel)  # an error where it cannot serve
    for case in (
        Case(2, 32, 64, 1, (13, 21), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
        Case(3, 40, 3, 1, (17, 33), (4, 4), (2, 2), (1, 1)),
        Case(2, 64, 32, 1, (19, 22), (2, 2), (2, 2), bias=False),
        Case(1, 16, 12, 2, (11, 131), (3, 5), (2, 3), (1, 2)),
    ):
        assert_maps_right(case, operands(case, torch.float32, layout, "cuda"), tf32=True)


@on_hopper
@pytest.mark.parametrize("tile", [t for t in mma_forward.TILES if t.split], ids=str)
@pytest.mark.parametrize("layout", ("contiguous", "strided"))
def test_every_strict_tile_of_few_channels(layout, tile):
    torch.backends.cudnn.allow_tf32 = False
    served = 0
    for case in (
        Case(4, 8, 16, 4, (65, 256), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1)),  # empty phases
        Case(2, 32, 64, 1, (33, 128), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
        Case(3, 4, 8, 2, (41, 300), (4, 4), (2, 2), (1, 1), bias=False),
        Case(2, 70, 12, 1, (21, 150), (1, 2), (1, 2)),  # several steps
        Case(2, 9, 20, 1, (17, 33), (3, 3), (1, 1), (1, 1)),
    ):
        for candidate in of_tile(mma_forward, tile, case, "ieee"):
            served += 1
            with tuning.using(candidate):
                tensors = operands(case, torch.float32, layout, "cuda")
                assert_output_right(case, tensors)
    assert served > 0


@pytest.mark.parametrize("channels_last", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_calls_memory_is_pytorchs(dtype, channels_last):
    """The first call of its kind, and those like it, which go a shorter way."""
    x = torch.randn(2, 6, 5, 7, device="cuda", dtype=dtype)
    w = torch.randn(6, 4, 3, 3, device="cuda", dtype=dtype)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    expected = torch.nn.functional.conv_transpose2d(x, w, stride=2)
    # Which PyTorch gives some of its results alone.
    expected = expected.contiguous(memory_format=memory_format(channels_last))
    exact = torch.nn.functional.conv_transpose2d(x.double(), w.double(), stride=2)
    kept = []
    for turn in range(4):
        with torch.inference_mode(turn == 3):
            output = tconv.conv_transpose2d(x, w, stride=2)
        assert (output.dtype, output.device) == (dtype, x.device)
        assert (output.shape, output.stride()) == (expected.shape, expected.stride())
        assert output.is_inference() == (turn == 3)
        assert output.untyped_storage().nbytes() == output.numel() * output.element_size()
        error = (output.double() - exact).norm() / exact.norm()
        assert error <= 2 * torch.finfo(dtype).eps
        kept.append(output)
    assert len({output.data_ptr() for output in kept}) == 4
    for output in kept[1:]:
        assert torch.equal(output, kept[0])


def test_calls_like_one_before_run_on_the_current_stream_and_in_graphs():
    x, w = torch.randn(8, 32, 40, 40, device="cuda"), torch.randn(32, 32, 3, 3, device="cuda")
    expected = tconv.conv_transpose2d(x, w)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        output = tconv.conv_transpose2d(late, w)
    stream.synchronize()
    assert torch.equal(output, expected)

    graph = torch.cuda.CUDAGraph()
    late.zero_()
    with torch.cuda.graph(graph):
        output = tconv.conv_transpose2d(late, w)
    late.copy_(x)
    graph.replay()
    assert torch.equal(output, expected)


def test_the_same_call_gives_the_same_bits():
    case = Case(4, 33, 17, 2, (31, 29), (4, 4), (2, 2), (1, 1))
    tensors = operands(case, torch.float32, "contiguous", "cuda")
    first = three_maps(case, tensors)
    for _ in range(3):
        for a, b in zip(first, three_maps(case, tensors), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "case",
    (
        Case(70_000, 2, 3, 1, (2, 2), (2, 2), (2, 2)),  # batch beyond 65535
        Case(1, 70_000, 1, 1, (2, 2), (2, 2), (2, 2)),  # channels beyond 65535
        Case(1, 1, 70_000, 1, (2, 2), (2, 2), (2, 2)),
        Case(1, 1, 1, 70_000, (2, 2), (2, 2), (2, 2)),
        Case(1, 1, 1, 1, (70_000, 3), (3, 3), (2, 1)),
    ),
    ids=named,
)
def test_sizes_beyond_a_grid_dimension(case):
    assert_maps_right(case, operands(case, torch.float32, "contiguous", "cuda"))


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_more_than_two_to_the_31_outputs(layout):
    """The last images of a batch whose output has over 2^31 elements, against a small batch."""
    case = Case(1030, 1, 2, 1, (512, 512), (2, 2), (2, 2), bias=False)
    tensors = operands(
        Case(1, 1, 2, 1, (512, 512), (2, 2), (2, 2), bias=False),
        torch.bfloat16,  # float16 would overflow in the sum over the batch
        layout,
        "cuda",
    )
    memory_format = getattr(torch, f"{layout}_format" if layout == "contiguous" else layout)
    x = tensors.x.expand(case.batch, -1, -1, -1).contiguous(memory_format=memory_format)
    y = tensors.grad_output.expand(case.batch, -1, -1, -1).contiguous(memory_format=memory_format)
    assert y.numel() > 2**31
    out, grad_x, grad_w = three_maps(
        case, type(tensors)(x=x, w=tensors.w, bias=None, grad_output=y)
    )
    small = Case(1, 1, 2, 1, (512, 512), (2, 2), (2, 2), bias=False)
    one, one_x, one_w = three_maps(small, tensors)
    for image in (0, 511, 512, 1022, 1023, 1024, 1029):
        assert torch.equal(out[image], one[0])
        assert torch.equal(grad_x[image], one_x[0])
    torch.testing.assert_close(grad_w.double() / case.batch, one_w.double(), rtol=2.0**-7, atol=0)


def test_expanded_and_overlapping_strides():
    case = Case(3, 4, 5, 1, (6, 7), (3, 3), (2, 2))
    t = operands(case, torch.float32, "contiguous", "cuda")
    x = t.x[:1, :1].expand_as(t.x)
    overlapping = torch.randn(200, device="cuda").as_strided(t.grad_output.shape, (9, 5, 3, 1))
    assert_maps_right(case, type(t)(x=x, w=t.w, bias=t.bias, grad_output=overlapping))
