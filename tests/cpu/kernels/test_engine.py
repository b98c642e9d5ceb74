"""The engine's two kernels and their packing: in the emulator, and through NVRTC."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import tconv
from emulated_plans import (
    HOPPER,
    allocations,
    arguments_of,
    assert_compiled_well,
    emulated,
    expect_worse_code,
    plans,
)
from layer_cases import Case, by_taps, off_by, operands
from tconv.jit.target import Target
from tconv.kernels import family as limits
from tconv.kernels import sm90_forward, sm90_input_gradient
from tconv.kernels.engine.layout import MOST_SOURCES, layout
from tconv.kernels.engine.tiles import FLOAT32_TILES
from tconv.plan import candidates
from tconv.problem import Axis, Problem
from tconv.reference import Expected, Operands, expected
from tiers import quick

FAMILIES = {family.DIRECTION: family for family in (sm90_forward, sm90_input_gradient)}
DIRECTIONS = tuple(FAMILIES)
DTYPES = (torch.bfloat16, torch.float16)

# What is read has a multiple of 8 channels in each group, of x (forward) or of y (input gradient):
# cases of one direction, or of both.
BOTH = (
    Case(2, 16, 24, 1, (5, 9), (3, 3), (1, 1), (1, 1)),
    Case(2, 72, 40, 1, (6, 7), (4, 4), (2, 2), (1, 1), bias=False),
    Case(1, 32, 48, 2, (5, 6), (3, 2), (2, 3), (1, 0)),
    Case(1, 136, 64, 1, (4, 4), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(1, 64, 136, 1, (3, 5), (2, 2), (2, 2)),
    # Dilated; and with gcd(stride, dilation) > 1, so that some phases have no tap.
    Case(1, 24, 8, 1, (9, 11), (3, 3), (1, 1), (2, 1), (0, 0), (2, 3)),
    Case(1, 16, 16, 1, (4, 5), (3, 3), (2, 2), (1, 1), (0, 0), (2, 2)),
    Case(2, 8, 16, 2, (5, 7), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1)),
    # A stride of more than the kernel: phases without a tap, which hold the bias alone.
    Case(2, 16, 8, 1, (3, 4), (2, 2), (3, 3), output_padding=(2, 1)),
    Case(1, 40, 24, 1, (4, 3), (1, 3), (4, 1), (0, 1), (3, 0)),
    # Single pixels; fewer outputs than phases; padding beyond the kernel's reach.
    Case(1, 16, 16, 1, (1, 1), (1, 1)),
    Case(1, 8, 72, 1, (1, 1), (3, 3), (4, 4), (1, 0), (1, 0)),
    Case(2, 16, 8, 1, (2, 2), (2, 3), (6, 7), (4, 5), (3, 5)),
    Case(1, 8, 8, 1, (9, 8), (2, 2), (1, 1), (3, 2)),
    # Many images of few pixels, of which a tile holds several; a kernel larger than the image.
    Case(257, 8, 16, 1, (1, 2), (2, 2), (2, 2)),
    Case(3, 16, 8, 1, (2, 2), (9, 11), (1, 1), (4, 5)),
    # Several tiles along the width and the height.
    Case(1, 8, 8, 1, (3, 301), (1, 4), (1, 2), (0, 1)),
    Case(1, 16, 8, 1, (30, 21), (3, 3), (1, 1), (1, 1)),
)
# Channels that are made in any number, also where a block of 64 has few or a second begins.
CASES = {
    "forward": (
        *BOTH,
        Case(3, 8, 3, 1, (4, 5), (4, 4), (2, 2), (1, 1)),
        Case(1, 64, 130, 1, (3, 3), (2, 2), (2, 2)),
        Case(2, 8, 5, 3, (4, 3), (3, 3), (2, 2), (1, 1), (1, 1)),
        Case(1, 16, 66, 2, (4, 6), (5, 3), (3, 1), (2, 1)),
    ),
    "input_gradient": (
        *BOTH,
        Case(3, 3, 8, 1, (4, 5), (4, 4), (2, 2), (1, 1), bias=False),
        Case(1, 130, 64, 1, (3, 3), (2, 2), (2, 2)),
        Case(2, 5, 8, 3, (4, 3), (3, 3), (2, 2), (1, 1), (1, 1)),
        Case(1, 66, 16, 2, (4, 6), (5, 3), (3, 1), (2, 1)),
        Case(2, 40, 72, 1, (6, 7), (4, 4), (2, 2), (1, 1), bias=False),
    ),
}
EVERY = [(direction, case) for direction in DIRECTIONS for case in CASES[direction]]


class Setting(NamedTuple):
    """A layer's call in one direction."""

    direction: str
    case: Case
    t: Operands

    @property
    def read(self) -> Tensor:
        return self.t.x if self.direction == "forward" else self.t.grad_output

    @property
    def made(self) -> Tensor:
        """A tensor of the shape and strides of the result."""
        return self.t.grad_output if self.direction == "forward" else self.t.x

    @property
    def bias(self) -> Tensor | None:
        return self.t.bias if self.direction == "forward" else None

    @property
    def want(self) -> Expected:
        return expected(self.case.layer, self.t, tf32=True)[DIRECTIONS.index(self.direction)]

    def with_read(self, values: Tensor) -> Setting:
        name = "x" if self.direction == "forward" else "grad_output"
        return self._replace(t=dataclasses.replace(self.t, **{name: values}))


def setting(direction: str, case: Case, dtype: torch.dtype, seed: int = 0) -> Setting:
    return Setting(direction, case, operands(case, dtype, "channels_last", "cpu", seed))


def with_packed_weights(given: Setting) -> Setting:
    """With a contiguous weight, which no tensor map can describe unless the kernel is 1x1."""
    return given._replace(t=dataclasses.replace(given.t, w=given.t.w.contiguous()))


def problem_of(given: Setting, **options) -> Problem:
    t = given.t
    return Problem.of(
        given.direction,
        tuple(t.x.shape),
        tuple(t.w.shape),
        given.case.geometry,
        dtype=str(t.x.dtype).removeprefix("torch."),
        bias=given.case.bias,
        strides=(t.x.stride(), t.w.stride(), t.grad_output.stride()),
        **options,
    )


def served(problem: Problem, target: Target = HOPPER):
    """Plans of all tiles that serve."""
    return plans(problem, FAMILIES[problem.direction].STEM, target)


def few(multiprocessors: int = 2) -> Target:
    """A device on which blocks have several tiles, so that the consumers are apart."""
    return dataclasses.replace(HOPPER, multiprocessors=multiprocessors)


def run(chosen, given: Setting, schedule="forward", sanitize=False, out=None, workspace=math.nan):
    """The result of the plan's launches, into `out` where it is given."""
    if out is None:
        out = torch.full_like(given.made, math.nan)
    packed = torch.full((chosen.packed,), workspace)
    made = "y" if given.direction == "forward" else "x"
    named = {"x": given.t.x, "w": given.t.w, "y": given.t.grad_output, "bias": given.bias}
    named |= {made: out, "packed": packed}
    memory = allocations([tensor for tensor in named.values() if tensor is not None])
    for launch in chosen.launches:
        kernel = emulated(launch.source, sanitize)
        arguments = arguments_of(launch, **named)
        kernel.launch(launch.grid, arguments, allocations=memory, schedule=schedule)
    return out


def assert_right(out: Tensor, given: Setting, want: Expected | None = None) -> None:
    wrong = (want or given.want).why_wrong(out)
    assert wrong is None, f"{given.direction}: {given.case}: {wrong}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize(("direction", "case"), EVERY, ids=str)
def test_some_tiles(direction, case):
    """Of each case others, in one dtype, of weights as they lie and packed; all are below."""
    turn = EVERY.index((direction, case))
    given = setting(direction, case, DTYPES[turn % 2])
    want = given.want
    for packed, number in ((False, turn), (True, 5 * turn + 7)):
        given = with_packed_weights(given) if packed else given
        every = served(problem_of(given))
        assert_right(run(every[number % len(every)], given), given, want)


@pytest.mark.thorough
@pytest.mark.parametrize(("direction", "case"), EVERY, ids=str)
def test_every_tile_that_serves(direction, case):
    """Of one dtype, and weights as they lie or packed, in turn."""
    turn = EVERY.index((direction, case))
    given = setting(direction, case, DTYPES[turn % 2])
    packed = with_packed_weights(given)
    want = given.want
    plans_of = zip(served(problem_of(given)), served(problem_of(packed)), strict=True)
    for number, both in enumerate(plans_of):
        packs = (number + turn // 2) % 2
        assert_right(run(both[packs], packed if packs else given), given, want)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_cases_serve_every_tile(direction):
    """Those that turn serve rows on 16 bytes, which cases of their own have (`SOURCES`)."""
    found = {
        chosen.tile
        for case in (*CASES[direction], *SOURCES[direction], *FOLDED)
        for made in LAYOUTS[:2]
        for chosen in served(problem_of(of_layout(direction, case, torch.bfloat16, made)))
    }
    assert found == set(FAMILIES[direction].TILES) - set(FLOAT32_TILES)


# float32 for TF32: channels_last in both directions, and the input's gradient in any strides. Cases
# of fewer than 16 channels to sum over, full float32 in forward, are left out.
FLOAT32 = [
    (direction, case, layout)
    for layout in ("channels_last", "contiguous", "strided")
    for direction in (DIRECTIONS if layout == "channels_last" else DIRECTIONS[1:])
    for case in CASES[direction]
    if (case.in_channels if direction == "forward" else case.out_channels) // case.groups >= 16
]


def of_float32(direction: str, case: Case, layout: str) -> Setting:
    return Setting(direction, case, operands(case, torch.float32, layout, "cpu"))


@pytest.mark.parametrize(("direction", "case", "layout"), FLOAT32, ids=str)
def test_some_tiles_of_float32(direction, case, layout):
    turn = FLOAT32.index((direction, case, layout))
    given = of_float32(direction, case, layout)
    every = served(problem_of(given))
    assert_right(run(every[turn % len(every)], given), given)


# What is packed comes of either order: every second case of each.
OF_EVERY_TILE = [
    (direction, case, layout)
    for direction, case, layout in FLOAT32
    if layout == "channels_last"
    or (layout == "contiguous") == (CASES[direction].index(case) % 2 == 0)
]


@pytest.mark.thorough
@pytest.mark.parametrize(("direction", "case", "layout"), OF_EVERY_TILE, ids=str)
def test_every_tile_of_float32(direction, case, layout):
    given = of_float32(direction, case, layout)
    want = given.want
    for chosen in served(problem_of(given)):
        assert_right(run(chosen, given), given, want)


def test_the_cases_serve_every_tile_of_float32():
    for direction in DIRECTIONS:
        problems = [problem_of(of_float32(*one)) for one in FLOAT32 if one[0] == direction]
        found = {chosen.tile for problem in problems for chosen in served(problem)}
        assert set(FLOAT32_TILES) & set(FAMILIES[direction].TILES) <= found
        assert all(tile.positions_are_rows for tile in FLOAT32_TILES)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_float32_does_not_depend_on_the_order_of_threads(direction):
    given = of_float32(direction, SEVERAL[direction][0], "channels_last")
    want = given.want
    for target in (few(2), few(3)):
        for number, chosen in enumerate(served(problem_of(given), target)):
            first = run(chosen, given)
            assert_right(first, given, want)
            other = run(chosen, given, ("reverse", "random:1")[number % 2], sanitize=number == 1)
            assert same_bits(first, other), str(chosen)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_float32_reads_and_writes_its_tensors_alone(direction):
    t = operands(SEVERAL[direction][0], torch.float32, "strided", "cpu")
    x, y = within_more(t.x), within_more(t.grad_output)
    t = dataclasses.replace(t, x=x[0], grad_output=y[0])
    given = Setting(direction, SEVERAL[direction][0], t)
    problem, want = problem_of(given), given.want
    assert problem.source_aligned
    made, room = y if direction == "forward" else x
    for chosen in served(problem, few()):
        made.fill_(math.nan)
        assert_right(run(chosen, given, out=made), given, want)
        assert int(room.isnan().sum()) == room.numel() - made.numel(), str(chosen)


# Full float32: also of few channels, and with a bias.
STRICT = [
    (direction, case, layout)
    for layout in ("channels_last", "contiguous", "strided")
    for direction in (DIRECTIONS if layout == "channels_last" else DIRECTIONS[1:])
    for case in CASES[direction]
]


def strict_problem(given: Setting, **options) -> Problem:
    return dataclasses.replace(problem_of(given, **options), math="ieee")


def exact(given: Setting) -> Expected:
    found = expected(given.case.layer, given.t, tf32=False)
    return found[DIRECTIONS.index(given.direction)]


@pytest.mark.parametrize(("direction", "case", "layout"), STRICT, ids=str)
def test_some_tiles_of_full_float32(direction, case, layout):
    turn = STRICT.index((direction, case, layout))
    given = of_float32(direction, case, layout)
    every = served(strict_problem(given), few(3))
    assert_right(run(every[turn % len(every)], given, "random:1"), given, exact(given))


@pytest.mark.thorough
@pytest.mark.parametrize(("direction", "case", "layout"), STRICT, ids=str)
def test_every_tile_of_full_float32(direction, case, layout):
    given = of_float32(direction, case, layout)
    want = exact(given)
    for chosen in served(strict_problem(given)):
        assert_right(run(chosen, given), given, want)


def test_the_cases_serve_every_tile_of_full_float32():
    for direction in DIRECTIONS:
        problems = [strict_problem(of_float32(*one)) for one in STRICT if one[0] == direction]
        found = {chosen.tile for problem in problems for chosen in served(problem)}
        assert found == {
            tile
            for tile in FAMILIES[direction].TILES
            if tile.positions_are_rows
            and tile.columns <= 128
            and not (tile.folded or tile.turned or (tile.raw and direction == "forward"))
        }


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_full_float32_does_not_depend_on_the_order_of_threads(direction):
    given = of_float32(direction, SEVERAL[direction][0], "channels_last")
    want = exact(given)
    for number, chosen in enumerate(served(strict_problem(given), few(2))):
        first = run(chosen, given)
        assert_right(first, given, want)
        other = run(chosen, given, ("reverse", "random:1")[number % 2], sanitize=number == 1)
        assert same_bits(first, other), str(chosen)


@pytest.mark.parametrize(
    ("direction", "layout"),
    [*((direction, "channels_last") for direction in DIRECTIONS), (DIRECTIONS[1], "contiguous")],
)
def test_what_is_not_finite_in_full_float32_reaches_its_readers_alone(direction, layout):
    """As they read it: an infinity meets no zero that is not an operand, nor a part that is one."""
    for case in (
        Case(2, 16, 24, 1, (5, 6), (3, 3), (2, 2), (1, 1), (1, 0)),
        Case(1, 40, 16, 2, (4, 5), (3, 2), (1, 3), (1, 0), (0, 0), (2, 1)),
    ):
        given = of_float32(direction, case, layout)
        read, w = given.read.clone(), given.t.w.clone()
        read[0, 0, 0, 0], read[-1, -1, -1, -1], read[0, 3, 1, 0] = math.inf, -math.inf, math.nan
        read[0, 1, 2, 2] = torch.finfo(torch.float32).max
        w[0, 0, 0, 0], w[-1, -1, -1, -1] = math.inf, -math.inf
        other = given._replace(t=dataclasses.replace(given.t, w=w))
        for spoilt in (given.with_read(read), other):
            t = spoilt.t
            made = by_taps(case, t.x, t.w, spoilt.bias, t.grad_output)[DIRECTIONS.index(direction)]
            made = made.float()  # the largest times another may be infinite
            assert 0 < int(made.isfinite().sum()) < made.numel()
            for chosen in served(strict_problem(spoilt)):
                out = run(chosen, spoilt)
                assert torch.equal(out.isnan(), made.isnan()), str(chosen)
                assert torch.equal(out.isinf(), made.isinf()), str(chosen)
                infinite = made.isinf()
                assert torch.equal(out[infinite], made[infinite]), str(chosen)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_full_float32_reads_and_writes_its_tensors_alone(direction):
    t = operands(SEVERAL[direction][0], torch.float32, "strided", "cpu")
    x, y = within_more(t.x), within_more(t.grad_output)
    t = dataclasses.replace(t, x=x[0], grad_output=y[0])
    given = Setting(direction, SEVERAL[direction][0], t)
    want, (made, room) = exact(given), y if direction == "forward" else x
    for chosen in served(strict_problem(given), few()):
        made.fill_(math.nan)
        assert_right(run(chosen, given, out=made), given, want)
        assert int(room.isnan().sum()) == room.numel() - made.numel(), str(chosen)


def test_float32_is_rounded_to_nearest_ties_to_even():
    """Each value alone, times one: what the tensor cores get is TF32."""
    case = Case(1, 16, 16, 1, (1, 16), (1, 1), bias=False)
    given = of_float32("forward", case, "channels_last")
    bits = torch.randint(-(2**31), 2**31, (256,), generator=torch.Generator().manual_seed(0))
    bits[:7] = torch.tensor([0x3F801000, 0x3F800FFF, -0x407FF000, 0x1000, 0, 1, 0x7F7FEFFF])
    values = bits.to(torch.int32).view(torch.float32)
    values = torch.where(values.isfinite(), values, 1.0)
    x = values.view(1, 16, 1, 16).to(memory_format=torch.channels_last)
    w = torch.eye(16)[:, :, None, None].contiguous()
    given = given._replace(t=dataclasses.replace(given.t, x=x, w=w))
    for chosen in served(problem_of(given)):
        out = run(chosen, given)
        bits = x.contiguous().view(torch.int32)
        even = ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)
        assert torch.equal(out, even), str(chosen)


@pytest.mark.parametrize("value", (math.nan, math.inf))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_float32_pixel_that_is_not_finite_reaches_its_readers_alone(direction, value):
    given = of_float32(direction, SEVERAL[direction][0], "channels_last")
    values = given.read.clone(memory_format=torch.preserve_format)
    values[1, 5, 2, 3] = value
    marked = torch.zeros_like(values)
    marked[1, 5, 2, 3] = 1
    ones = given.with_read(marked)
    ones = ones._replace(t=dataclasses.replace(ones.t, w=torch.ones_like(given.t.w), bias=None))
    reached = ones.want.exact != 0
    given = given.with_read(values)
    for chosen in served(problem_of(given)):
        out = run(chosen, given)
        assert torch.equal(~out.isfinite(), reached), str(chosen)


# Two blocks of channels of which the second is ragged, phases with and without taps, groups, and
# more positions than a tile has: a block's tiles differ in all of these.
SEVERAL = {
    "forward": (
        Case(3, 72, 70, 1, (6, 14), (3, 3), (2, 2), (1, 1), (1, 1)),
        Case(2, 16, 66, 2, (7, 13), (3, 3), (3, 2), (1, 1), (0, 0), (1, 2)),
    ),
    "input_gradient": (
        Case(3, 70, 72, 1, (6, 14), (3, 3), (2, 2), (1, 1), (1, 1)),
        Case(2, 66, 16, 2, (7, 13), (3, 3), (3, 2), (1, 1), (0, 0), (1, 2)),
    ),
}
APART = [(direction, case) for direction in DIRECTIONS for case in SEVERAL[direction]]


@pytest.mark.parametrize(("direction", "case"), quick(APART, 0, 3), ids=str)
def test_result_does_not_depend_on_the_order_of_threads(direction, case):
    turn = APART.index((direction, case))
    given = setting(direction, case, DTYPES[turn % 2])
    want = given.want
    # Two blocks; and three, which in most tiles is no multiple of the row sets.
    for target, first in ((few(2), turn), (few(3), turn + 2)):
        every = served(problem_of(given), target)
        for chosen in every[first::4]:
            results = [
                run(chosen, given, s) for s in ("forward", "reverse", "random:1", "random:2")
            ]
            assert_right(results[0], given, want)
            assert all(same_bits(results[0], other) for other in results[1:]), str(chosen)
        given = with_packed_weights(given)


# Several row sets that need the same stages: all phases, and blocks of channels.
SETS = (
    ("forward", Case(3, 128, 136, 1, (6, 14), (2, 2), (2, 2))),
    ("forward", Case(2, 72, 24, 1, (9, 20), (4, 4), (2, 2), (1, 1))),
    ("input_gradient", Case(5, 264, 40, 1, (6, 14), (1, 1))),
)


@pytest.mark.parametrize("blocks", quick((3, 1, 2, 5), 0))
@pytest.mark.parametrize(("direction", "case"), SETS, ids=str)
def test_patches_that_a_block_keeps_for_all_row_sets(direction, case, blocks):
    given = setting(direction, case, DTYPES[blocks % 2])
    want = given.want
    every = served(problem_of(given), few(blocks))
    kept = [chosen for chosen in every if chosen.kernel.arguments["keeps_patches"]]
    loads = [layout(c.problem, c.tile).patch_loads(few(blocks)) for c in kept]
    assert loads and min(loads) < 1
    for number, chosen in enumerate(kept):
        out = run(chosen, given, ("random:1", "reverse")[number % 2], sanitize=number == 0)
        assert_right(out, given, want)


@pytest.mark.thorough
@pytest.mark.parametrize("blocks", (1, 2, 3, 4))
@pytest.mark.parametrize(("direction", "case"), APART, ids=str)
def test_a_result_does_not_depend_on_the_number_of_blocks(direction, case, blocks):
    given = setting(direction, case, torch.float16)
    every = {chosen.tile: chosen for chosen in served(problem_of(given))}
    others = served(problem_of(given), few(blocks))  # which leaves out shared tiles
    for other in others[blocks % 2 :: 2]:
        chosen = every[other.tile]
        assert same_bits(run(chosen, given), run(other, given, "random:3")), str(chosen)


def test_consumers_are_apart_where_blocks_have_several_tiles():
    for direction, case in APART:
        problem = problem_of(setting(direction, case, torch.bfloat16))
        every = served(problem, few())
        assert any(chosen.kernel.arguments["lead"] > 0 for chosen in every)
        for chosen in every:
            tiles = layout(problem, chosen.tile).tiles
            assert chosen.kernel.grid == min(2, tiles)
            assert tiles > 2 or chosen.kernel.arguments["lead"] == 0


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sanitized(direction):
    case = SEVERAL[direction][1]
    given = setting(direction, case, torch.bfloat16)
    want = given.want
    every = served(problem_of(given), few())
    for chosen in (every[0], every[len(every) // 2]):
        assert_right(run(chosen, given, "random:1", sanitize=True), given, want)


@pytest.mark.thorough
@pytest.mark.parametrize(("direction", "case"), EVERY[::2], ids=str)
def test_cases_sanitized(direction, case):
    turn = EVERY.index((direction, case))
    given = setting(direction, case, DTYPES[turn // 2 % 2])
    every = served(problem_of(given))
    assert_right(run(every[5 * turn % len(every)], given, sanitize=True), given)


def within_more(values: Tensor) -> tuple[Tensor, Tensor]:
    """The values in channels_last with NaN on all sides, and all of that memory.

    Beyond a pixel's channels there are 8 or more, so that pixels still start on 16 bytes.
    """
    n, channels, height, width = values.shape
    more = -(-channels // 8) * 8 + 8
    room = torch.full((n + 2, height + 2, width + 2, more), math.nan, dtype=values.dtype)
    view = room[1:-1, 1:-1, 1:-1, :channels].permute(0, 3, 1, 2)
    view.copy_(values)
    return view, room


@pytest.mark.parametrize("wide", (False, True), ids=("int", "long long"))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_reads_and_writes_its_tensors_alone(direction, wide):
    """Between NaN in memory, which stays; weights of any strides."""
    case = CASES[direction][-1] if wide else SEVERAL[direction][0]
    t = operands(case, torch.float16, "strided", "cpu")
    x, y = within_more(t.x), within_more(t.grad_output)
    t = dataclasses.replace(t, x=x[0], grad_output=y[0])
    given = Setting(direction, case, t)
    want = given.want
    problem = problem_of(given)
    assert problem.source_aligned
    every = served(dataclasses.replace(problem, wide_offsets=wide), few())
    out, room = y if direction == "forward" else x
    outside = room.isnan()
    for chosen in every[int(wide) :: 6]:
        room.fill_(math.nan)
        assert_right(run(chosen, given, out=out), given, want)
        assert torch.equal(room.isnan(), outside), f"{chosen} wrote beside its tensor"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_workspace_may_hold_anything(direction):
    case = SEVERAL[direction][1]
    given = with_packed_weights(setting(direction, case, torch.bfloat16))
    for chosen in served(problem_of(given))[::6]:
        assert chosen.packed
        first = run(chosen, given, workspace=0.0)
        assert same_bits(first, run(chosen, given, workspace=math.nan))
        assert same_bits(first, run(chosen, given, workspace=math.inf))


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_values_that_are_not_finite_stay_in_their_image_and_group(direction, value):
    case = SEVERAL[direction][1]
    given = setting(direction, case, torch.float16)
    made = given.made.shape[1] // case.groups
    read = given.read.shape[1] // case.groups
    image = given.read.clone(memory_format=torch.preserve_format)
    image[1] = value
    group = given.read.clone(memory_format=torch.preserve_format)
    group[:, read:] = value
    for chosen in served(problem_of(given), few())[::6]:
        before = run(chosen, given)
        after = run(chosen, given.with_read(image))
        assert same_bits(before[0], after[0]) and not after[1].isfinite().all()
        after = run(chosen, given.with_read(group))
        assert same_bits(before[:, :made], after[:, :made])
        assert not after[:, made:].isfinite().all()


# Padded, so that taps of pixels at the edge lie beside the image; phases without a tap.
EDGES = (
    Case(1, 16, 16, 1, (4, 5), (3, 3), (2, 2), (1, 1)),
    Case(2, 16, 8, 2, (5, 7), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1)),
)


def assert_reaches_readers_alone(given: Setting, find=None) -> None:
    """Of a result, what reads a value that is not finite is so too, and nothing else."""
    number = DIRECTIONS.index(given.direction)
    t = given.t
    want = by_taps(given.case, t.x, t.w, given.bias, t.grad_output)[number]
    assert not want.isfinite().all()
    for chosen in served(problem_of(given))[::6] if find is None else find(problem_of(given)):
        out = run(chosen, given)
        assert torch.equal(out.isfinite(), want.isfinite()), str(chosen)
        # NaN for NaN, and infinities of the same sign.
        infinite = ~want.isfinite()
        assert torch.equal(out[infinite].double().nan_to_num(0), want[infinite].nan_to_num(0))


@pytest.mark.parametrize("case", EDGES, ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_pixel_that_is_not_finite_reaches_its_readers_alone(direction, case):
    given = setting(direction, case, torch.bfloat16)
    values = given.read.clone(memory_format=torch.preserve_format)
    values[-1, -1, -1, -1] = -math.inf
    values[0, 3, 1, 0] = math.nan
    assert_reaches_readers_alone(given.with_read(values))


@pytest.mark.xfail(strict=True, reason="it is multiplied with the zeros beside the image too")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_weight_that_is_not_finite_reaches_its_readers_alone(direction):
    given = setting(direction, EDGES[1], torch.bfloat16)
    values = given.t.w.clone(memory_format=torch.preserve_format)
    values[0, 0, 0, 0] = values[-1, -1, -1, -1] = math.inf
    assert_reaches_readers_alone(given._replace(t=dataclasses.replace(given.t, w=values)))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_kernel_for_another_size_is_right(direction):
    case = SEVERAL[direction][0]
    like = problem_of(setting(direction, case, torch.float16))
    for turn, (batch, size) in enumerate(((1, (3, 4)), (2, (5, 32)), (4, (13, 12)))):
        given = setting(direction, dataclasses.replace(case, batch=batch, size=size), torch.float16)
        want = given.want
        problem = dataclasses.replace(problem_of(given), like=like)
        for chosen in served(problem)[turn::5]:
            assert_right(run(chosen, given), given, want)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_image_does_not_depend_on_the_others(direction):
    """Neither on their values nor on their number."""
    case = dataclasses.replace(SEVERAL[direction][1], batch=5)
    given = setting(direction, case, torch.bfloat16)
    alone = Setting(
        direction,
        dataclasses.replace(case, batch=1),
        dataclasses.replace(
            given.t,
            x=given.t.x[3:4].contiguous(memory_format=torch.channels_last),
            grad_output=given.t.grad_output[3:4].contiguous(memory_format=torch.channels_last),
        ),
    )
    tiles = {chosen.tile: chosen for chosen in served(problem_of(alone))}
    for chosen in served(problem_of(given))[::6]:
        # Of a shared tile the number of shares depends on how many tiles there are.
        if chosen.tile in tiles and not chosen.tile.shared:
            assert same_bits(run(chosen, given)[3:4], run(tiles[chosen.tile], alone)), str(chosen)


def test_outputs_without_a_tap_hold_the_bias():
    case = Case(2, 16, 10, 1, (3, 4), (2, 2), (5, 4), output_padding=(4, 3))
    given = setting("forward", case, torch.bfloat16)
    for chosen in served(problem_of(given))[::6]:
        out = run(chosen, given)
        for rows in (2, 3, 4, 7, 14):
            assert torch.equal(out[:, :, rows], given.bias[:, None].expand_as(out[:, :, rows]))


def test_inputs_that_no_output_reads_have_no_gradient():
    # Padding cuts the outputs off that the first and last rows alone would have reached.
    case = Case(1, 10, 16, 1, (9, 8), (2, 2), (1, 1), (3, 2), bias=False)
    given = setting("input_gradient", case, torch.float16)
    for chosen in served(problem_of(given))[::6]:
        out = run(chosen, given)
        assert (out[:, :, :2] == 0).all() and (out[:, :, -2:] == 0).all()
        assert (out[:, :, 3:6] != 0).any()


def of_shape(direction: str, case: Case, dtype: str = "bfloat16", **changes) -> Problem:
    """Of tensors in channels_last as PyTorch allocates them, without any."""
    problem = case.layer.problem(direction, dtype, "channels_last")
    return dataclasses.replace(problem, **changes)


# Whose phases are folded: of one line and of several, those of a block of rows or of several; with
# phases of one axis; several images, runs and pieces of a tile; images of a single pixel.
FOLDED = (
    Case(2, 16, 1, 1, (5, 7), (9, 9), (3, 3), (4, 4), (2, 2)),
    Case(1, 21, 21, 1, (4, 5), (16, 16), (8, 8), (4, 4)),
    Case(3, 16, 3, 1, (6, 5), (4, 4), (2, 2), (1, 1)),
    Case(2, 24, 5, 2, (3, 9), (4, 3), (2, 1), (1, 2), (1, 0)),
    Case(1, 8, 2, 1, (1, 70), (1, 6), (1, 3), (0, 4), (0, 1)),
    Case(257, 8, 3, 1, (1, 2), (2, 2), (2, 2)),
    Case(1, 64, 10, 1, (9, 40), (4, 6), (4, 2), (3, 1), (2, 0), bias=False),
    Case(1, 3, 1, 2, (1, 1), (6, 4), (3, 2), (1, 1)),
    Case(2, 70, 3, 1, (6, 16), (4, 4), (2, 2), (1, 1)),
    Case(3, 40, 2, 2, (5, 8), (9, 9), (3, 3), (4, 4), (2, 2)),
    Case(1, 21, 21, 1, (3, 72), (16, 16), (8, 8), (4, 4)),
    Case(1, 16, 4, 1, (3, 6), (4, 4), (2, 2), (2, 2)),
    Case(2, 16, 24, 2, (3, 5), (4, 4), (2, 2), (1, 1)),
)
FOLDS = [
    (direction, case, order)
    for direction in DIRECTIONS
    for case in FOLDED
    for order in ("contiguous", "channels_last", "strided")
]


def folded(problem: Problem, target: Target = HOPPER):
    return [chosen for chosen in served(problem, target) if chosen.tile.folded]


def folded_setting(direction: str, case: Case, order: str) -> Setting:
    turn = FOLDS.index((direction, case, order))
    return Setting(direction, case, operands(case, DTYPES[turn % 2], order, "cpu"))


@pytest.mark.parametrize(("direction", "case", "order"), FOLDS[1::2], ids=str)
def test_some_folded_tiles(direction, case, order):
    given = folded_setting(direction, case, order)
    turn, want = FOLDS.index((direction, case, order)), given.want
    every = folded(dataclasses.replace(problem_of(given), wide_offsets=turn % 5 == 0), few())
    chosen = every[turn // 2 % len(every)]
    assert_right(run(chosen, given, sanitize=turn % 8 == 1), given, want)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_folded_kernel_for_another_size_is_right(direction):
    case = FOLDED[2]
    like = problem_of(setting(direction, case, torch.bfloat16))
    for turn, size in enumerate(((1, 1), (5, 41), (13, 12))):
        given = setting(direction, dataclasses.replace(case, size=size), torch.bfloat16)
        every = folded(dataclasses.replace(problem_of(given), like=like))
        alike = {chosen.tile: chosen.kernel.source for chosen in folded(like)}
        for chosen in every[turn::2]:
            assert chosen.kernel.source == alike[chosen.tile]
            assert_right(run(chosen, given), given)


@pytest.mark.thorough
@pytest.mark.parametrize(("direction", "case", "order"), FOLDS[::2], ids=str)
def test_every_folded_tile(direction, case, order):
    given = folded_setting(direction, case, order)
    want = given.want
    for number, chosen in enumerate(folded(problem_of(given), few())):
        first = run(chosen, given)
        assert_right(first, given, want)
        assert same_bits(run(chosen, given, ("reverse", "random:1")[number % 2]), first)


FOLDED_FLOATS = [
    (case, order)
    for case in FOLDED
    if case.out_channels >= 16
    for order in ("contiguous", "channels_last", "strided")
]


@pytest.mark.parametrize(("case", "order"), FOLDED_FLOATS, ids=str)
def test_folded_gradients_of_float32(case, order):
    given = Setting("input_gradient", case, operands(case, torch.float32, order, "cpu"))
    want, every = given.want, folded(problem_of(given), few())
    assert every
    for chosen in every:
        assert_right(run(chosen, given, "random:1"), given, want)


@pytest.mark.parametrize("order", ("nchw", "nhwc"))
@pytest.mark.parametrize("case", (FOLDED[0], FOLDED[2], FOLDED[3], FOLDED[5]), ids=str)
def test_folded_images_at_any_alignment(case, order):
    """y is written, and read, of dense rows and of rows with gaps, between NaN, which stays."""
    of_layout = "contiguous" if order == "nchw" else "channels_last"
    for number, (offset, gap) in enumerate(((0, 0), (4, 0), (2, 0), (1, 0), (0, 8), (0, 3))):
        given = folded_setting("forward", case, of_layout)
        y = off_by(given.t.grad_output, order, offset, gap)
        room = torch.tensor([], dtype=y.dtype).set_(y.untyped_storage())
        outside = room.isnan()
        given = given._replace(t=dataclasses.replace(given.t, grad_output=y))
        gradient = given._replace(direction="input_gradient")
        every = folded(problem_of(gradient, aligned=offset == 0))
        assert_right(run(every[number % len(every)], gradient), gradient)
        want, every = given.want, folded(problem_of(given), few())
        y.fill_(math.nan)
        chosen = every[number % len(every)]
        assert_right(run(chosen, given, out=y), given, want)
        assert torch.equal(room.isnan(), outside), f"{chosen} {offset=} {gap=}"


@pytest.mark.parametrize("case", (FOLDED[0], FOLDED[3]), ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_folded_a_pixel_that_is_not_finite_reaches_its_readers_alone(direction, case):
    given = folded_setting(direction, case, "channels_last")
    values = given.read.clone(memory_format=torch.preserve_format)
    values[-1, -1, -1, -1] = -math.inf
    values[0, 0, 1, 0] = math.nan
    assert_reaches_readers_alone(given.with_read(values), folded)


# The shapes that the kernels are for; sizes do not change the code.
LAYERS = {
    "512 to 256, 4x4 s2": Case(16, 512, 256, 1, (8, 8), (4, 4), (2, 2), (1, 1)),
    "64 to 64, 3x3": Case(8, 64, 64, 1, (200, 200), (3, 3), (1, 1), (1, 1)),
    "256 to 128, 3x3 s2": Case(8, 256, 128, 1, (64, 64), (3, 3), (2, 2), (1, 1), (1, 1)),
    "1024 to 512, 2x2 s2": Case(4, 1024, 512, 1, (32, 32), (2, 2), (2, 2), bias=False),
    "64 to 8, 4x4 s2": Case(8, 64, 8, 1, (32, 32), (4, 4), (2, 2), (1, 1)),
    "8 to 72, 3x3 in groups": Case(4, 8, 72, 4, (40, 40), (3, 3), (1, 1), (1, 1), bias=False),
    "72 to 8, 3x3 in groups": Case(4, 72, 8, 4, (40, 40), (3, 3), (1, 1), (1, 1), bias=False),
    "56 to 1, 9x9 s3": Case(4, 56, 1, 1, (64, 64), (9, 9), (3, 3), (4, 4), (2, 2)),
    "21 to 21, 16x16 s8": Case(4, 21, 21, 1, (64, 64), (16, 16), (8, 8), (4, 4)),
    "24 to 24, 16x16 s4": Case(4, 24, 24, 1, (64, 64), (16, 16), (4, 4), (6, 6)),
    "128 to 128, 3x3 dilated": Case(
        4, 128, 128, 1, (28, 28), (3, 3), (1, 1), (2, 2), (0, 0), (2, 2)
    ),
    "32 to 64, 3x3 s5 dilated": Case(
        4, 32, 64, 1, (64, 128), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)
    ),
    "32 to 64, 3x5 s3 in groups": Case(
        4, 32, 64, 4, (128, 256), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1)
    ),
}
COMPILED = [
    (direction, name, (turn + place) % 2)
    for turn, name in enumerate(LAYERS)
    for place, direction in enumerate(DIRECTIONS)
]


@pytest.mark.parametrize(("direction", "name", "part"), quick(COMPILED, 0, 3))
def test_compiles_without_spills_or_serialised_products(direction, name, part, request):
    """Every second tile, from the first or the second on."""
    expect_worse_code(request, (12, 4), (12, 8))
    dtype = ("bfloat16", "float16")[list(LAYERS).index(name) % 2]
    every = served(of_shape(direction, LAYERS[name], dtype, weight_mapped=part == 0))
    assert every
    for chosen in every[part::2]:
        assert_compiled_well(chosen)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize("name", ("64 to 8, 4x4 s2", "56 to 1, 9x9 s3"))
def test_folded_results_without_a_bias_compile_likewise(name, layout):
    problem = LAYERS[name].layer.problem("forward", "bfloat16", layout)
    every = folded(dataclasses.replace(problem, bias=False))
    assert every
    for chosen in every:
        assert_compiled_well(chosen)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_with_wide_offsets_it_compiles_likewise(direction, request):
    expect_worse_code(request, (12, 4), (12, 8))
    every = served(of_shape(direction, LAYERS["64 to 64, 3x3"], wide_offsets=True))
    for chosen in every[::5]:
        assert_compiled_well(chosen)


@pytest.mark.parametrize(
    ("direction", "wide"), quick(itertools.product(DIRECTIONS, (False, True)), 1), ids=str
)
def test_for_contiguous_tensors_it_compiles_likewise(direction, wide, request):
    expect_worse_code(request, (12, 4), (12, 8))
    turn = 2 * DIRECTIONS.index(direction) + wide
    for name in ("64 to 64, 3x3", "256 to 128, 3x3 s2", "64 to 8, 4x4 s2"):
        problem = LAYERS[name].layer.problem(direction, "bfloat16", "contiguous")
        for chosen in served(dataclasses.replace(problem, wide_offsets=wide))[turn::5]:
            assert_compiled_well(chosen)


@pytest.mark.parametrize("wide", quick((False, True), 1), ids=("int", "long long"))
@pytest.mark.parametrize(
    "name", quick(("256 to 128, 3x3 s2", "512 to 256, 4x4 s2", "1024 to 512, 2x2 s2"), 0, 2)
)
def test_paired_tiles_compile_likewise(name, wide):
    problem = LAYERS[name].layer.problem("forward", "float16", "contiguous")
    for bias in (False, True):
        every = served(dataclasses.replace(problem, wide_offsets=wide, bias=bias))
        every = [chosen for chosen in every if chosen.tile.paired]
        assert every
        for chosen in every:
            assert_compiled_well(chosen)


# Strides of 3, 4, 5 and 8 along x, and phases without a tap.
STRIDES = (
    "32 to 64, 3x3 s5 dilated",
    "24 to 24, 16x16 s4",
    "21 to 21, 16x16 s8",
    "32 to 64, 3x5 s3 in groups",
)


@pytest.mark.parametrize("name", quick(STRIDES, 3))
def test_tiles_of_all_phases_compile_likewise(name):
    turn = STRIDES.index(name)
    problem = LAYERS[name].layer.problem("forward", ("bfloat16", "float16")[turn % 2], "contiguous")
    for number, bias in enumerate((False, True)):
        problem = dataclasses.replace(problem, bias=bias, wide_offsets=bias and turn % 2 == 1)
        every = interleaved(served(problem))
        assert every
        for chosen in every[number::2]:
            assert_compiled_well(chosen)


# Strides of 1, 2 and 4 along x; fewer channels than a stage, and more.
TURNED = ("64 to 64, 3x3", "256 to 128, 3x3 s2", "1024 to 512, 2x2 s2", "24 to 24, 16x16 s4")


@pytest.mark.parametrize(
    ("direction", "name"),
    # A gradient's are raw, and not of 16 taps.
    quick([("forward", n) for n in TURNED] + [("input_gradient", n) for n in TURNED[:3]], 0, 5, 6),
)
def test_turned_tiles_compile_likewise(direction, name, request):
    if direction == "forward":
        expect_worse_code(request, (12, 4), (12, 8))
    turn = TURNED.index(name)
    problem = LAYERS[name].layer.problem(direction, ("bfloat16", "float16")[turn % 2], "contiguous")
    every = [c for c in served(problem) if unpacked(c)]
    assert every
    for chosen in every:
        assert_compiled_well(chosen)
    wide = served(dataclasses.replace(problem, wide_offsets=True))
    turned, raw = ([c for c in wide if of(c.tile)] for of in (lambda t: t.turned, lambda t: t.raw))
    assert turned if direction == "forward" else raw
    for chosen in turned[:1] + raw[:1]:
        assert_compiled_well(chosen)


# Rows off 16 bytes; taps beside them, or none.
OFF = {
    "64 to 64, 3x3": Case(8, 64, 64, 1, (200, 200), (3, 3)),
    "64 to 64, 3x7": Case(8, 64, 64, 1, (200, 200), (3, 7)),
    "256 to 256, 2x2 s2": Case(8, 256, 256, 1, (14, 14), (2, 2), (2, 2)),
    "256 to 128, 4x4 s2": Case(8, 256, 128, 1, (14, 14), (4, 4), (2, 2), (1, 1)),
    "256 to 128, 3x3 s2": Case(8, 256, 128, 1, (63, 63), (3, 3), (2, 2), (1, 1), (1, 1)),
    "128 to 128, 3x3": Case(8, 128, 128, 1, (28, 28), (3, 3), (1, 1), (1, 1)),
    "32 to 64, 3x5 s3 in groups": Case(16, 32, 64, 4, (128, 256), (3, 5), (2, 3), (1, 2)),
    # One stage: between its first products ptxas zeroed sums, and waited.
    "64 to 8, 1x2": Case(8, 64, 8, 1, (14, 50), (1, 2), (1, 2)),
}


@pytest.mark.parametrize("name", quick(OFF, 0, 3, 4, -1))
def test_flat_maps_compile_likewise(name):
    turn = list(OFF).index(name)
    dtype = ("bfloat16", "float16")[turn % 2]
    problem = OFF[name].layer.problem("input_gradient", dtype, "contiguous")
    every = served(dataclasses.replace(problem, wide_offsets=turn % 3 == 1))
    raw = [chosen for chosen in every if chosen.tile.raw]
    assert raw
    for chosen in raw:
        assert_compiled_well(chosen)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_layers_compile_every_tile(direction):
    found = {
        chosen.tile
        for case in LAYERS.values()
        for made in LAYOUTS[:2]
        for chosen in served(case.layer.problem(direction, "bfloat16", made))
    }
    assert found == set(FAMILIES[direction].TILES) - set(FLOAT32_TILES)


SMALL = Case(2, 16, 16, 1, (9, 9), (3, 3))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("changes", "target", "reason"),
    (
        ({}, "sm_80", "needs the tensor cores of sm_90a, the target is sm_80"),
        ({}, "sm_100a", "needs the tensor cores of sm_90a, the target is sm_100a"),
        (dict(dtype="float64"), "sm_90a", "multiplies 16-bit values, not float64"),
        (dict(height=Axis(2, 3, 257)), "sm_90a", "lists 256 phases, the stride is 257x1"),
        (
            dict(height=Axis(2, 3, 17), width=Axis(2, 3, 17)),
            "sm_90a",
            "lists 256 phases, the stride is 17x17",
        ),
        (dict(width=Axis(2**31, 3)), "sm_90a", "coordinates along width need 32 bits"),
    ),
)
def test_refusals(direction, changes, target, reason):
    refusal = FAMILIES[direction].why_not(
        of_shape(direction, SMALL, **changes), Target.named(target)
    )
    assert refusal is not None and reason in refusal


@pytest.mark.parametrize(
    ("direction", "case", "reason"),
    (
        (
            "input_gradient",
            Case(1, 16, 16, 1, (4, 4), (5, 5), (5, 5)),
            f"has {MOST_SOURCES} tensor maps, there are 25 phases to read",
        ),
        (
            "forward",
            Case(1, 16, 16, 1, (9, 9), (12, 12)),
            "numbers 64 stages and results, there are 144",
        ),
        (
            "forward",
            Case(1, 16, 16, 1, (9, 9), (3, 3)),
            "turns contiguous images, what it reads is channels_last",
        ),
        (
            "forward",
            Case(1, 16, 16, 1, (9, 9), (4, 4), (2, 2)),
            "pairs the pixels of two phases in x of a contiguous result",
        ),
        (
            "forward",
            Case(1, 16, 16, 1, (9, 9), (2, 2), (2, 2)),
            "all taps have the same distance: nothing is gained by stages of several",
        ),
        # Of one column: a stage of one shift in y then has taps of one distance.
        (
            "input_gradient",
            Case(1, 16, 16, 1, (9, 9), (3, 1)),
            "all taps have the same distance: nothing is gained by stages of several",
        ),
        (
            "forward",
            Case(1, 16, 16, 1, (9, 9), (1, 300)),
            "positions and the reach (0, 299) do not fit a tensor copy",
        ),
        ("forward", Case(1, 40, 16, 1, (9, 40), (12, 3), dilation=(4, 4)), "two stages of"),
        ("forward", SMALL, "there is one phase, nothing to fold"),
        (
            "input_gradient",
            Case(1, 16, 16, 1, (4, 4), (4, 4), (2, 2), dilation=(1, 3)),
            "kernels of a multiple of the stride, not 4 with stride 2 and dilation 3",
        ),
    ),
)
def test_refusals_of_tiles(direction, case, reason):
    found = candidates(of_shape(direction, case), HOPPER, (FAMILIES[direction],))
    assert any(c.refusal is not None and reason in c.refusal for c in found), found


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_more_tiles_than_a_grid_has_are_refused(direction):
    family = FAMILIES[direction]
    problem = of_shape(direction, dataclasses.replace(SMALL, batch=2**31 - 1, size=(64, 64)))
    refused = [family.tile_why_not(problem, HOPPER, tile) for tile in family.TILES]
    assert all(
        reason is not None
        and any(
            part in reason
            for part in (
                "over 32 bits",
                "nothing",
                "turns",
                "pairs",
                "reads and makes",
                "fewer than SMs",
                "there is one",
                "takes float32",
            )
        )
        for reason in refused
    )
    assert limits.MAX_GRID == 2**31 - 1


def misaligned(values: Tensor) -> Tensor:
    """The values in channels_last, one element behind a multiple of 16 bytes."""
    n, channels, height, width = values.shape
    room = torch.empty(values.numel() + 8, dtype=values.dtype)
    offset = -room.data_ptr() % 16 // values.element_size() + 1
    view = room[offset:][: values.numel()].view(n, height, width, channels).permute(0, 3, 1, 2)
    assert view.data_ptr() % 16 == values.element_size()
    return view.copy_(values)


# Channels of a group that are read in any number, so that a pixel is off 16 bytes.
ODD = {
    "forward": (
        Case(2, 3, 21, 1, (5, 9), (4, 4), (2, 2), (1, 1)),
        Case(1, 6, 10, 2, (5, 6), (3, 2), (2, 3), (1, 0)),
        Case(1, 70, 8, 1, (9, 9), (3, 3)),
        Case(1, 13, 66, 1, (1, 67), (1, 16), (1, 8), (0, 4)),
    ),
    "input_gradient": (
        Case(2, 21, 3, 1, (5, 9), (4, 4), (2, 2), (1, 1)),
        Case(1, 10, 6, 2, (5, 6), (3, 2), (2, 3), (1, 0)),
        Case(1, 8, 70, 1, (9, 9), (3, 3)),
        Case(1, 66, 13, 1, (1, 67), (1, 16), (1, 8), (0, 4)),
        # Of rows and columns that no tap reads; the last has no other pixel.
        Case(2, 16, 24, 1, (5, 9), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
        Case(1, 8, 13, 2, (3, 4), (1, 2), (3, 4), (0, 1), (2, 3)),
        Case(2, 8, 8, 1, (4, 8), (3, 2), (2, 4), (2, 3), (1, 2), (2, 2)),
        Case(1, 8, 8, 1, (1, 1), (1, 1), (3, 3), (1, 1), (2, 2)),
    ),
}
LAYOUTS = ("contiguous", "channels_last", "strided")


def of_layout(direction: str, case: Case, dtype: torch.dtype, layout: str) -> Setting:
    return Setting(direction, case, operands(case, dtype, layout, "cpu"))


ANY = [(d, case) for d in DIRECTIONS for case in (*ODD[d], BOTH[1], BOTH[2])]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("direction", "case"), quick(ANY, *range(0, len(ANY), 2)), ids=str)
def test_any_layout_and_channels(direction, case, layout):
    """What no tensor map describes is packed; contiguous results are written as such."""
    given = of_layout(direction, case, torch.bfloat16, layout)
    problem = problem_of(given)
    for chosen in served(problem)[::3]:
        packing = chosen.of_role("packing")
        mapped = problem.weight_mapped and not chosen.tile.folded
        assert bool(packing) == (layout_of(chosen) or not mapped)
        assert not packing or ("image" in packing[0].arguments) == layout_of(chosen)
        assert_right(run(chosen, given), given)


def layout_of(chosen) -> bool:
    """Whether the plan packs the image that it reads."""
    return layout(chosen.problem, chosen.tile).packs_image


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_packed_images_in_any_order_and_sanitized(direction):
    given = of_layout(direction, ODD[direction][1], torch.float16, "contiguous")
    chosen = next(filter(layout_of, served(problem_of(given), few())))
    first = run(chosen, given)
    assert_right(run(chosen, given, sanitize=True), given)
    for schedule in ("reverse", "random:1"):
        assert same_bits(run(chosen, given, schedule), first)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_images_off_16_bytes_are_packed(direction):
    given = setting(direction, SMALL, torch.bfloat16)
    assert not layout_of(served(problem_of(given))[0])
    given = given.with_read(misaligned(given.read))
    problem = problem_of(given, aligned=False)
    assert not problem.source_aligned
    chosen = served(problem)[0]
    assert layout_of(chosen)
    assert_right(run(chosen, given), given)


# Sizes of images: rows and planes of 1, 2, 4 and 8 times an odd number of pixels, shorter and
# longer than what neighbouring threads take.
SIZES = ((1, 1), (3, 5), (5, 6), (3, 12), (2, 4), (3, 8), (5, 40), (7, 33), (14, 14))
PACKED = [(order, size) for order in ("nchw", "nhwc", "nchw gap", "nhwc gap") for size in SIZES]


@pytest.mark.parametrize(("order", "size"), PACKED, ids=str)
def test_the_packed_image_has_each_value_and_zeros_behind_the_channels(order, size):
    turn = PACKED.index((order, size))
    for number, (batch, channels, groups) in enumerate(
        ((1, 3, 1), (3, 8, 1), (1, 72, 1), (3, 1, 5), (1, 13, 2), (2, 12, 3), (1, 16, 2), (2, 2, 1))
    ):
        case = Case(batch, channels, 8, groups, size, (1, 1))
        given = of_layout("forward", case, torch.bfloat16, "contiguous")
        offset = (0, 4, 2, 1)[(turn + number) % 4]
        gap = (1, 2, 4, 8)[(turn + number // 2) % 4] if "gap" in order else 0
        values = off_by(given.read, order.split()[0], offset, gap)
        given = given.with_read(values)
        problem = problem_of(given, aligned=offset == 0)
        chosen = next(filter(layout_of, served(problem)), None)
        if chosen is None:
            assert "nhwc" in order and problem.source_aligned and channels % 8 == 0
            continue
        launch = chosen.launches[0]
        packed = torch.full((chosen.packed,), math.nan)
        named = {"x": values, "w": given.t.w, "packed": packed}
        kernel = emulated(launch.source, True)  # which sees a vector off its alignment
        memory = allocations(list(named.values()))
        kernel.launch(launch.grid, arguments_of(launch, **named), allocations=memory)
        line = -(-channels // 8) * 8
        want = torch.zeros(batch, *size, groups, line, dtype=values.dtype)
        want[..., :channels] = values.permute(0, 2, 3, 1).reshape(batch, *size, groups, channels)
        image = packed.view(torch.bfloat16)[-want.numel() :].view(want.shape)
        assert torch.equal(image, want), f"{case} {offset=} {gap=}"


def turned(given: Setting, target: Target = HOPPER) -> list:
    """Plans of the tiles that serve and turn what they read, or read it raw."""
    return [chosen for chosen in served(problem_of(given), target) if unpacked(chosen)]


def unpacked(chosen) -> bool:
    """Whether a contiguous source is read as it lies."""
    return chosen.tile.turned or chosen.tile.raw


# Rows of one octet and of more, several tiles along each axis, and images of which a tile has
# several; one channel, and more than two stages of them in groups; strides of 1 to 4, phases
# without a tap, and taps that are dilated.
SOURCES = {
    "forward": (
        Case(3, 1, 8, 1, (5, 8), (3, 3), (1, 1), (1, 1)),
        Case(2, 70, 72, 1, (9, 40), (3, 5), (1, 1), (0, 2)),
        Case(1, 40, 16, 2, (7, 304), (2, 2), (2, 2)),
        Case(70, 24, 8, 1, (2, 8), (3, 3), (2, 2), (1, 1), (1, 1)),
        Case(1, 136, 70, 1, (4, 16), (4, 3), (2, 3), (1, 1), (1, 2), (1, 2)),
        Case(1, 8, 8, 1, (40, 16), (3, 3), (1, 1), (2, 2), (0, 0), (2, 2)),
    ),
    "input_gradient": (
        Case(3, 8, 1, 1, (5, 8), (3, 3), (1, 1), (1, 1)),
        Case(2, 72, 70, 1, (9, 20), (4, 4), (2, 2), (1, 1)),
        Case(1, 16, 40, 2, (7, 300), (2, 2), (2, 2)),
        Case(70, 8, 24, 1, (2, 4), (3, 3), (2, 2), (1, 1), (1, 1)),
        Case(1, 70, 136, 1, (4, 12), (4, 3), (3, 2), (1, 2), (1, 1), (1, 2)),
        Case(2, 24, 24, 1, (6, 16), (4, 8), (2, 4), (1, 2)),
        Case(1, 8, 8, 1, (40, 16), (3, 3), (1, 1), (2, 2), (0, 0), (2, 2)),
    ),
}
READS = [(direction, case) for direction in DIRECTIONS for case in SOURCES[direction]]


@pytest.mark.parametrize(("direction", "case"), READS, ids=str)
def test_turned_sources_of_dense_rows_and_of_rows_with_gaps(direction, case):
    """Between NaN in memory."""
    turn = READS.index((direction, case))
    given = of_layout(direction, case, DTYPES[turn % 2], "contiguous")
    want = given.want
    for number, (offset, gap) in enumerate(((0, 0), (8, 0), (0, 8), (8, 24))):
        other = given.with_read(off_by(given.read, "nchw", offset, gap))
        every = turned(other, few())
        chosen = every[(turn + number) % len(every)]
        assert_right(run(chosen, other), other, want)


@pytest.mark.parametrize(("offset", "gap"), ((4, 0), (1, 0), (0, 4), (0, 3)))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rows_that_no_tensor_map_describes_are_not_turned(direction, offset, gap):
    given = of_layout(direction, SOURCES[direction][1], torch.float16, "contiguous")
    assert turned(given)
    read = off_by(given.read, "nchw", offset, gap)
    problem = problem_of(given.with_read(read), aligned=offset % 8 == 0)
    reasons = {c.refusal for c in candidates(problem, HOPPER, (FAMILIES[direction],))}
    if direction == "forward":
        for does in ("turns", "reads"):
            reason = f"{does} images of rows on multiples of 16 bytes, those that it reads are not"
            assert reason in reasons
    else:
        assert "reads dense images that start on 16 bytes, these have gaps or do not" in reasons
    assert not [chosen for chosen in served(problem) if unpacked(chosen)]


def test_refusals_of_raw_tiles():
    case = Case(1, 8, 8, 1, (5, 8), (3, 3), (1, 1), (1, 1))
    six = dict(kernel=(3, 7), stride=(1, 6), size=(5, 3), padding=(1, 2), output_padding=(0, 1))
    for direction, changes, made, reason in (
        ("input_gradient", six, "contiguous", "has 5 phases of a row at most, the stride is 6"),
        ("forward", dict(stride=(1, 5)), "contiguous", "has 4 phases of a row at most"),
        ("forward", {}, "contiguous", "makes rows of several phases, there is one"),
        (
            "forward",
            dict(stride=(1, 3), padding=(1, 11)),
            "contiguous",
            "makes all phases of a row, some have no pixel",
        ),
        (
            "input_gradient",
            dict(kernel=(3, 9), padding=(1, 4)),
            "contiguous",
            "has 8 taps of a row in registers, there are 9",
        ),
        ("input_gradient", {}, "channels_last", "reads and makes contiguous images"),
    ):
        problem = dataclasses.replace(case, **changes).layer.problem(direction, "bfloat16", made)
        found = candidates(problem, HOPPER, (FAMILIES[direction],))
        assert not any(c.tile.raw and c.refusal is None for c in found)
        assert any(c.tile.raw and reason in str(c.refusal) for c in found), reason


@pytest.mark.thorough
@pytest.mark.parametrize(("direction", "case"), READS, ids=str)
def test_every_turned_tile(direction, case):
    turn = READS.index((direction, case))
    given = of_layout(direction, case, DTYPES[1 - turn % 2], "contiguous")
    want = given.want
    for number, chosen in enumerate(turned(given, few((1, 3)[turn // 2 % 2]))):
        assert_right(run(chosen, given, f"random:{number}"), given, want)


# Of 150 images of 14 x 14, a tile of 256 positions has some rows of several, not one image.
SOME_ROWS = Case(150, 8, 16, 1, (14, 14), (2, 2), (2, 2))
# Of a line all words are read, or of the first and the last pair one; dilated; several lines of a
# row, and an odd number of positions; single pixels, one channel, and most taps of a row; phases
# without a tap, and rows of y that no tap reads; a margin of two octets.
RAW = {
    "forward": (
        Case(2, 72, 70, 1, (9, 24), (4, 4), (2, 2), (1, 1)),
        Case(3, 1, 8, 1, (5, 8), (3, 3), (1, 2), (1, 1)),
        Case(1, 40, 16, 2, (7, 152), (2, 2), (2, 2), bias=False),
        Case(70, 24, 8, 1, (2, 8), (3, 3), (2, 2), (1, 1), (1, 1)),
        Case(1, 136, 70, 1, (4, 16), (4, 3), (2, 3), (1, 1), (1, 2), (1, 2)),
        Case(2, 24, 24, 1, (6, 16), (4, 8), (2, 4), (1, 2)),
        Case(1, 8, 8, 1, (20, 16), (3, 3), (1, 2), (2, 12), (0, 0), (2, 7)),
        Case(1, 33, 200, 1, (8, 16), (4, 4), (2, 2), (1, 1)),
        Case(2, 16, 8, 1, (3, 8), (2, 2), (3, 3), output_padding=(2, 1)),
        # Rows of y without a tap: all, and the first.
        Case(1, 8, 8, 1, (1, 8), (2, 3), (4, 2), (1, 1), (0, 1), (2, 1)),
        Case(1, 8, 8, 1, (1, 8), (2, 3), (4, 2), (1, 1), (1, 1), (2, 1)),
        # Lines of a swizzle.
        Case(2, 40, 24, 1, (5, 64), (2, 2), (2, 2)),
        Case(1, 24, 70, 2, (3, 192), (2, 3), (1, 3)),
    ),
    "input_gradient": (
        Case(1, 8, 8, 1, (1, 8), (2, 3), (4, 2), (1, 1), (0, 1), (2, 1)),
        Case(2, 72, 70, 1, (9, 20), (4, 4), (2, 2), (1, 1)),
        Case(1, 8, 24, 1, (5, 11), (3, 5), (2, 2), (1, 1), (0, 1)),
        Case(1, 24, 40, 2, (3, 148), (2, 2), (2, 2)),
        Case(1, 40, 24, 1, (3, 102), (1, 3), (1, 1), (0, 2), (0, 0), (1, 3)),
        Case(1, 16, 8, 1, (4, 7), (3, 2), (1, 4), (1, 2), (0, 2)),
        Case(3, 136, 1, 1, (1, 1), (8, 8)),
        Case(2, 8, 17, 1, (3, 7), (2, 3), (3, 2), (1, 0), (2, 1)),
        Case(1, 8, 8, 1, (6, 33), (5, 2), (1, 1), (0, 12), (0, 0), (2, 7)),
        Case(257, 8, 16, 1, (1, 4), (2, 2), (2, 2)),
        Case(1, 264, 8, 1, (8, 8), (3, 3), (1, 1), (1, 1), bias=False),
        Case(1, 16, 16, 1, (4, 29), (3, 5), (2, 3), (1, 1), (0, 1)),
        # Lines of a swizzle.
        Case(3, 24, 40, 1, (5, 32), (2, 2), (2, 2)),
        Case(1, 72, 40, 2, (3, 288), (3, 2), (1, 2), (1, 0)),
        Case(2, 16, 24, 1, (3, 48), (4, 3), (3, 4), (0, 0), (1, 1)),
        Case(1, 40, 16, 1, (4, 128), (2, 1)),
        # Of a stride of 5, and boxes of some rows of several images.
        Case(1, 24, 16, 1, (5, 8), (5, 5), (5, 5)),
        SOME_ROWS,
    ),
}
EVERY_RAW = [(direction, case) for direction in DIRECTIONS for case in RAW[direction]]


# Rows off 16 bytes, by 2 or 4 pixels: of 1, 2 and 4 classes of planes, strides of 1 to 5, dilated;
# several segments of a row, single pixels, and images of which a tile has several; rows outside y.
FLAT = (
    Case(2, 72, 70, 1, (8, 20), (3, 3)),
    Case(1, 24, 40, 2, (3, 149), (2, 2), (2, 2)),
    Case(1, 24, 40, 2, (4, 150), (2, 2), (2, 2)),
    Case(1, 16, 16, 1, (3, 130), (2, 4), (2, 2)),
    Case(3, 8, 8, 1, (3, 4), (3, 3)),
    Case(2, 8, 18, 1, (3, 7), (2, 4), (3, 3)),
    Case(1, 16, 8, 1, (4, 7), (3, 4), (1, 4), (1, 0)),
    Case(1, 16, 8, 1, (3, 7), (3, 2), (2, 4)),
    Case(3, 136, 8, 1, (1, 1), (2, 2)),
    Case(257, 8, 16, 1, (1, 2), (2, 2), (2, 2)),
    Case(1, 40, 24, 1, (3, 102), (1, 3), (1, 1), (0, 0), (0, 0), (1, 3)),
    Case(1, 8, 8, 1, (6, 35), (5, 2), (1, 1), (3, 0), (0, 0), (2, 7)),
    Case(1, 264, 8, 1, (8, 8), (3, 3), (1, 1), (1, 0), bias=False),
    Case(1, 16, 16, 1, (4, 29), (3, 5), (2, 3), (1, 0), (0, 1)),
    Case(2, 8, 8, 3, (4, 7), (3, 2), (2, 2), (1, 0), (1, 0)),
    # Taps beside a row.
    Case(2, 24, 72, 1, (5, 10), (4, 4), (2, 2), (1, 1)),
    Case(1, 24, 40, 1, (5, 133), (4, 4), (2, 2), (1, 1)),
    Case(1, 24, 40, 1, (6, 14), (3, 3), (1, 1), (1, 1)),
    Case(1, 8, 8, 1, (6, 35), (5, 2), (1, 1), (0, 12), (0, 0), (2, 7)),
    Case(1, 24, 40, 1, (4, 7), (4, 8), (2, 4), (1, 2)),
    Case(2, 32, 64, 1, (3, 24), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
    Case(2, 8, 32, 2, (4, 33), (1, 6), (2, 5), (0, 2)),
)
EVERY_RAW += [("input_gradient", case) for case in FLAT]


@pytest.mark.parametrize(("direction", "case"), EVERY_RAW, ids=str)
def test_every_raw_tile(direction, case):
    turn = EVERY_RAW.index((direction, case))
    given = of_layout(direction, case, DTYPES[turn % 2], "contiguous")
    want = given.want
    every = [c for c in turned(given, few(3)) if c.tile.raw]
    assert every
    for number, chosen in enumerate(every):
        sanitize = number == 0 and turn % 4 == 0
        assert_right(run(chosen, given, "random:1", sanitize=sanitize), given, want)


def test_boxes_of_raw_tiles_have_some_rows_of_several_images():
    for dtype in (torch.bfloat16, torch.float32):  # of flat maps, and of tiled ones
        problem = problem_of(of_layout("input_gradient", SOME_ROWS, dtype, "contiguous"))
        laid = [layout(c.problem, c.tile) for c in served(problem) if c.tile.raw]
        assert {one.flat for one in laid} == {dtype is torch.bfloat16}
        assert any(one.box[0] > 1 and one.box[1] < 14 for one in laid)


RAW_FLOATS = [
    case for direction, case in EVERY_RAW if direction == DIRECTIONS[1] and case.out_channels >= 16
]
RAW_FLOATS += [
    Case(2, 40, 16, 1, (5, 8), (3, 4), (1, 4), (1, 2), (0, 2)),
    Case(1, 24, 24, 2, (4, 11), (3, 3), (2, 1), (1, 0)),
    Case(3, 70, 20, 1, (4, 7), (2, 5), (1, 3), (0, 2), (0, 1)),
]


@pytest.mark.parametrize("case", RAW_FLOATS, ids=str)
def test_raw_tiles_of_float32(case):
    turn = RAW_FLOATS.index(case)
    given = of_layout("input_gradient", case, torch.float32, "contiguous")
    want = given.want
    every = [c for c in served(problem_of(given), few(3)) if c.tile.raw]
    assert len(every) > 1
    for number, chosen in enumerate(every[turn % 2 :: 2]):
        sanitize = number == 0 and turn % 4 == 0
        assert_right(run(chosen, given, "random:1", sanitize=sanitize), given, want)


RAW_STRICT = [case for direction, case in EVERY_RAW if direction == DIRECTIONS[1]]
RAW_STRICT += [case for case in RAW_FLOATS if case not in RAW_STRICT]


@pytest.mark.parametrize("case", RAW_STRICT, ids=str)
def test_raw_tiles_of_full_float32(case):
    turn = RAW_STRICT.index(case)
    given = of_layout("input_gradient", case, torch.float32, "contiguous")
    every = [c for c in served(strict_problem(given), few(3)) if c.tile.raw]
    assert every
    for number, chosen in enumerate(every[turn % 2 :: 2] or every):
        sanitize = number == 0 and turn % 4 == 0
        assert_right(run(chosen, given, "random:1", sanitize=sanitize), given, exact(given))


# Rows on 16 bytes and off them, strides of 1 to 5.
COMPILED_FLOATS = (
    *LAYERS.values(),
    Case(8, 64, 64, 1, (32, 32), (8, 8), (4, 4), (2, 2)),
    Case(8, 32, 64, 1, (16, 32), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
    Case(8, 64, 64, 1, (32, 33), (3, 3)),
    Case(8, 64, 32, 1, (32, 32), (8, 8), (4, 4), (2, 2)),
)


@pytest.mark.parametrize("case", quick(COMPILED_FLOATS, 2, -2), ids=str)
def test_gradients_of_float32_compile_likewise(case):
    problem = case.layer.problem("input_gradient", "float32", "contiguous")
    if problem.math == "tf32":
        every = [c for c in served(problem) if c.tile.raw or c.tile.folded]
        assert every or case.stride[1] > 5
        for chosen in every:
            assert_compiled_well(chosen)


@pytest.mark.parametrize("case", quick(COMPILED_FLOATS, 2, -2), ids=str)
def test_full_float32_compiles_likewise(case):
    for direction in DIRECTIONS:
        layout_ = "channels_last" if direction == "forward" else "contiguous"
        problem = case.layer.problem(direction, "float32", layout_, tf32=False)
        every = served(problem)
        # The layout of one channel is contiguous, which has other kernels.
        assert every or case.stride[1] > 5 or problem.y_layout != layout_
        for chosen in every:
            assert_compiled_well(chosen)


@pytest.mark.parametrize("problem", (problem_of, strict_problem))
@pytest.mark.parametrize("place", (0, 10))
def test_raw_floats_do_not_depend_on_the_order_of_threads(place, problem):
    given = of_layout("input_gradient", RAW_FLOATS[place], torch.float32, "contiguous")
    for chosen in [c for c in served(problem(given), few()) if c.tile.raw]:
        first = run(chosen, given)
        assert all(same_bits(first, run(chosen, given, s)) for s in ("reverse", "random:2"))


def flat_setting(draw: random.Random) -> Setting:
    """A call that flat maps serve, among NaN in memory, some of whose rows end in what is not
    finite.
    """
    direction = "input_gradient"
    while True:
        kernel, stride = (
            (draw.randint(1, 4), draw.randint(1, 8)),
            (draw.randint(1, 3), draw.randint(1, 4)),
        )
        dilation = draw.randint(1, 2), draw.choice((1, 1, 2, 3))
        size = draw.randint(1, 8), draw.choice((draw.randint(1, 20), draw.randint(1, 140)))
        of_axes = list(zip(size, kernel, stride, dilation, strict=True))
        case = Case(
            draw.choice((1, 1, 2, 5)),
            draw.choice((4, 8, 12, 20, 40, 72)),
            draw.choice((4, 8, 12, 20, 40, 72)),
            draw.choice((1, 1, 1, 2, 3)),
            size,
            kernel,
            stride,
            tuple(
                draw.randint(0, min(4, ((n - 1) * s + d * (k - 1)) // 2)) for n, k, s, d in of_axes
            ),
            tuple(draw.randrange(max(s, d)) for *_, s, d in of_axes),
            dilation,
            bias=draw.random() < 0.5,
        )
        dtype = draw.choice((*DTYPES, torch.float32))
        given = of_layout(direction, case, dtype, "contiguous")
        if not problem_of(given).source_aligned and any(c.tile.raw for c in turned(given)):
            values = given.read.clone()
            for _ in range(draw.randrange(3)):
                n, c, y = (draw.randrange(size) for size in values.shape[:3])
                values[n, c, y, draw.choice((0, -1))] = draw.choice((math.inf, math.nan))
            return given.with_read(off_by(values, "nchw", 8, 0))


@pytest.mark.parametrize("seed", quick(range(12), 0, 1))
def test_flat_maps_at_random(seed):
    draw = random.Random(seed)
    for number in range(8):
        given = flat_setting(draw)
        every = [c for c in turned(given, few(3)) if c.tile.raw]
        chosen = draw.choice(every)
        made = by_taps(given.case, given.t.x, given.t.w, given.bias, given.t.grad_output)
        finite = made[DIRECTIONS.index(given.direction)].isfinite()
        out = run(chosen, given, f"random:{seed}", sanitize=number == 0)
        assert torch.equal(out.isfinite(), finite), f"{given.case} {chosen}"
        clean = given.with_read(given.read.nan_to_num(0.0, 0.0, 0.0))
        assert_right(run(chosen, clean), clean)
        assert torch.equal(out[finite], run(chosen, clean)[finite])


@pytest.mark.parametrize(
    ("case", "swizzled", "dtype"),
    (
        (Case(2, 24, 24, 1, (5, 6), (4, 4), (2, 2), (1, 1)), False, torch.float16),
        (Case(2, 24, 24, 1, (5, 32), (2, 2), (2, 2)), True, torch.float16),
        (Case(2, 24, 24, 1, (5, 6), (4, 4), (2, 2)), False, torch.float32),
    ),
)
def test_raw_tiles_of_other_sizes(case, swizzled, dtype):
    """Flat maps also of rows on 16 bytes, and of other numbers of classes."""
    direction = "input_gradient"
    like = problem_of(of_layout(direction, case, dtype, "contiguous"))
    sources = {c.tile: c.launches[-1].source for c in served(like) if c.tile.raw}
    assert sources
    assert all(dict(source.constants)["swizzled"] == swizzled for source in sources.values())
    for batch, size in ((1, (3, 4)), (3, (6, 20)), (1, (2, 148)), (2, (1, 8))):
        other = dataclasses.replace(case, batch=batch, size=size)
        given = of_layout(direction, other, dtype, "contiguous")
        problem = dataclasses.replace(problem_of(given), like=like)
        every = [c for c in served(problem) if c.tile.raw]
        assert {c.tile: c.launches[-1].source for c in every} == sources
        for chosen in every:
            assert_right(run(chosen, given), given)


def test_refusals_of_flat_maps():
    def problem(direction: str, case: Case) -> Problem:
        return case.layer.problem(direction, "bfloat16", "contiguous")

    rows = Case(2, 8, 8, 1, (5, 9), (2, 3), (2, 3))  # of 9 and 27 pixels
    classes = Case(2, 6, 6, 1, (3, 6), (1, 1), (1, 1))
    even = Case(2, 8, 8, 1, (5, 12), (2, 2), (2, 2))
    for direction, case, reason in (
        ("input_gradient", rows, "reads rows of an even number of pixels"),
        ("input_gradient", classes, "reads channels by 4, a group has 6"),
        ("forward", even, "reads images of rows on multiples of 16 bytes"),
    ):
        found = candidates(problem(direction, case), HOPPER, (FAMILIES[direction],))
        reasons = {str(c.refusal) for c in found if c.tile.raw and c.tile not in FLOAT32_TILES}
        assert reasons and all(reason in found for found in reasons), reasons
    like = problem("input_gradient", Case(2, 8, 8, 1, (5, 6), (2, 2), (2, 2)))
    assert any(c.tile.raw for c in served(like))
    # Its kernel expects no gaps.
    for refused in (
        dataclasses.replace(like, source_dense=False),
        dataclasses.replace(like, source_dense=False, like=like),
    ):
        assert not any(c.tile.raw for c in served(refused))


@pytest.mark.parametrize("place", (1, 4))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_turned_sources_in_any_order_and_sanitized(direction, place):
    given = of_layout(direction, SOURCES[direction][place], torch.float16, "contiguous")
    want = given.want
    every = turned(given, few())
    for chosen in [*every[place::4], *[c for c in every if c.tile.raw][:1]]:
        first = run(chosen, given, sanitize=True)
        assert_right(first, given, want)
        for schedule in ("reverse", "random:1", "random:2"):
            assert same_bits(run(chosen, given, schedule), first)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_is_not_finite_in_a_turned_source_reaches_its_readers_alone(direction):
    width = 8 if direction == "forward" else 4
    for case in (
        Case(1, 16, 16, 1, (4, width), (3, 3), (2, 2), (1, 1), (0, 1)),
        Case(2, 16, 8, 2, (5, 2 * width), (3, 5), (2, 2), (1, 2), (0, 1), (2, 1)),
    ):
        given = of_layout(direction, case, torch.bfloat16, "contiguous")
        values = given.read.clone()
        values[-1, -1, -1, -1] = -math.inf
        values[0, 3, 1, 0] = math.nan
        given = given.with_read(values)
        want = by_taps(case, given.t.x, given.t.w, given.bias, given.t.grad_output)
        every = turned(given)
        assert every
        for chosen in [*every[::3], *[c for c in every if c.tile.raw]]:
            out = run(chosen, given)
            made = want[DIRECTIONS.index(direction)]
            assert not made.isfinite().all()
            assert torch.equal(out.isfinite(), made.isfinite()), str(chosen)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_kernel_that_turns_serves_other_sizes(direction):
    of_octet = 8 if direction == "forward" else 4  # columns
    case = dataclasses.replace(SOURCES[direction][1], size=(9, 3 * of_octet))
    like = problem_of(of_layout(direction, case, torch.float16, "contiguous"))
    for turn, (batch, size) in enumerate(((1, (3, 1)), (2, (5, 9)), (4, (13, 2)))):
        case = dataclasses.replace(case, batch=batch, size=(size[0], size[1] * of_octet))
        given = of_layout(direction, case, torch.float16, "contiguous")
        want = given.want
        problem = dataclasses.replace(problem_of(given), like=like)
        every = [c for c in served(problem) if unpacked(c)]
        assert every
        for chosen in every[turn::3]:
            assert_right(run(chosen, given), given, want)


# Widths of results of 1, 2, 4 and 8 times an odd number, in one tile and in several; of a stride of
# 2 with two phases of a tile and, where there are three rows of phases, with six.
WRITTEN = {
    "forward": (
        Case(1, 8, 3, 1, (4, 9), (3, 3), (1, 1), (1, 1)),
        Case(3, 16, 8, 1, (3, 12), (1, 1)),
        Case(1, 8, 8, 1, (3, 10), (1, 3), (1, 1), (0, 1)),
        Case(1, 8, 72, 1, (5, 32), (3, 3), (1, 1), (1, 1)),
        Case(1, 8, 8, 2, (3, 301), (2, 2)),
        Case(1, 8, 8, 1, (2, 600), (1, 3), (1, 1), (0, 1)),
        Case(3, 8, 3, 1, (4, 7), (2, 2), (2, 2)),
        Case(1, 16, 8, 1, (5, 8), (4, 4), (2, 2), (1, 1)),
        Case(1, 8, 72, 1, (3, 6), (3, 3), (2, 2), (1, 1)),
        Case(2, 8, 1, 5, (4, 10), (4, 4), (2, 2), (1, 1)),
        Case(1, 8, 24, 1, (3, 300), (3, 4), (3, 2), (0, 1), bias=False),
        Case(1, 8, 40, 1, (2, 131), (1, 5), (1, 2), (0, 2), (0, 1)),
        Case(3, 8, 10, 1, (3, 5), (3, 3), (3, 3)),
        Case(1, 8, 8, 1, (3, 1), (1, 1), (1, 2)),
    ),
    "input_gradient": (
        Case(1, 3, 8, 1, (4, 9), (3, 3), (1, 1), (1, 1)),
        Case(3, 8, 16, 1, (3, 12), (1, 1)),
        Case(1, 72, 8, 1, (5, 32), (4, 4), (2, 2), (1, 1)),
        Case(1, 8, 8, 2, (3, 302), (2, 2)),
        Case(3, 1, 8, 3, (5, 264), (3, 3), (3, 3)),
    ),
}
WRITES = [(direction, case) for direction in DIRECTIONS for case in WRITTEN[direction]]


# All phases of a row of a tile: of lines whose length is a power of two, of an odd number of chunks
# and between; phases without a tap, in x and in y; groups; rows of a multiple of 8, 4, 2 and 1;
# several images of a tile, and several tiles along x; channels of several blocks and parts.
INTERLEAVED = (
    Case(2, 8, 10, 1, (3, 8), (3, 3), (3, 3)),
    Case(1, 8, 40, 1, (2, 301), (1, 5), (1, 3), (0, 2)),
    Case(2, 8, 16, 4, (5, 42), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1)),
    Case(1, 16, 72, 1, (3, 9), (4, 6), (2, 4), (1, 1)),
    Case(3, 8, 24, 1, (4, 14), (4, 4), (4, 4), bias=False),
    Case(2, 16, 64, 1, (3, 9), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
    Case(1, 8, 13, 2, (3, 132), (2, 3), (2, 5), (0, 3), (1, 2)),
    Case(1, 8, 21, 1, (4, 5), (16, 16), (8, 8), (4, 4)),
    Case(1, 8, 40, 1, (3, 7), (1, 3), (1, 6), (0, 1), (0, 0), (1, 2)),
    Case(1, 24, 16, 1, (2, 6), (2, 7), (3, 7), (1, 2), (0, 1)),
    Case(2, 8, 24, 1, (1, 9), (1, 1), (1, 16), output_padding=(0, 15)),
    Case(1, 8, 72, 1, (3, 10), (3, 3), (2, 2), (1, 1), (0, 1), (2, 2)),
)
ALIGNMENTS = ((0, 0), (4, 0), (2, 0), (1, 0), (0, 8), (0, 3), (0, 2))
"""Elements that a result begins behind a vector, and gaps between its rows."""


def assert_written(given: Setting, want: Expected, offset: int, gap: int, find) -> None:
    """Of a contiguous result at this alignment, between NaN in memory, which stays."""
    out = off_by(torch.zeros_like(given.made), "nchw", offset, gap)
    room = torch.tensor([], dtype=out.dtype).set_(out.untyped_storage())
    name = "grad_output" if given.direction == "forward" else "x"
    given = given._replace(t=dataclasses.replace(given.t, **{name: out}))
    out.fill_(0)
    outside = room.isnan()
    for chosen in find(served(problem_of(given), few())):
        out.fill_(math.nan)
        assert_right(run(chosen, given, out=out), given, want)
        assert torch.equal(room.isnan(), outside), f"{chosen} {offset=} {gap=}"


@pytest.mark.parametrize(("direction", "case"), WRITES, ids=str)
def test_contiguous_results_at_any_alignment(direction, case):
    """Of dense rows and of rows with gaps."""
    turn = WRITES.index((direction, case))
    given = of_layout(direction, case, DTYPES[turn % 2], "contiguous")
    want = given.want
    for number, (offset, gap) in enumerate(ALIGNMENTS):
        first = (turn + number) % 5
        assert_written(given, want, offset, gap, lambda every, first=first: every[first::5])


def interleaved(every: list) -> list:
    return [c for c in every if layout(c.problem, c.tile).interleaved]


@pytest.mark.parametrize("case", INTERLEAVED, ids=str)
def test_rows_of_all_phases_at_any_alignment(case):
    turn = INTERLEAVED.index(case)
    given = of_layout("forward", case, DTYPES[turn % 2], "contiguous")
    want = given.want
    for number, (offset, gap) in enumerate(ALIGNMENTS):

        def find(every, place=turn + number):
            found = interleaved(every)
            return [found[place % len(found)]]

        assert_written(given, want, offset, gap, find)


SHARED = (
    Case(2, 40, 200, 1, (6, 5), (4, 4), (2, 2), (1, 1)),
    Case(3, 66, 136, 2, (5, 4), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(2, 8, 260, 1, (1, 9), (1, 16), (1, 8), (0, 4)),
    Case(1, 130, 72, 1, (7, 6), (5, 3), (3, 2), (2, 1)),
)


@pytest.mark.parametrize("place", ("contiguous", "channels_last"))
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_blocks_that_share_a_tile(case, place):
    """By blocks of one share and of several, in any order; the result's bits are the same."""
    given = of_layout("input_gradient", case, DTYPES[SHARED.index(case) % 2], place)
    target, want = few(7), given.want
    found = [chosen for chosen in served(problem_of(given), target) if chosen.tile.shared]
    assert found
    for chosen in found:
        assert layout(chosen.problem, chosen.tile).shares > 1
        out = run(chosen, given, "random:1")
        assert_right(out, given, want)
        assert same_bits(out, run(chosen, given, "reverse"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "alignment"), list(itertools.product(INTERLEAVED, ALIGNMENTS))[::2], ids=str
)
def test_rows_of_all_phases_of_every_tile(case, alignment):
    turn = INTERLEAVED.index(case)
    given = of_layout("forward", case, DTYPES[1 - turn % 2], "contiguous")
    assert_written(given, given.want, *alignment, interleaved)


def test_a_kernel_of_all_phases_serves_other_sizes():
    case = dataclasses.replace(INTERLEAVED[5], size=(3, 7))  # rows of 33 pixels
    like = problem_of(of_layout("forward", case, torch.float16, "contiguous"), aligned=False)
    alike = {chosen.tile: chosen.kernel.source for chosen in interleaved(served(like))}
    for turn, (batch, size) in enumerate(((1, (4, 5)), (2, (5, 34)), (4, (13, 12)))):
        case = dataclasses.replace(case, batch=batch, size=size)
        given = of_layout("forward", case, torch.float16, "contiguous")
        want = given.want
        problem = dataclasses.replace(problem_of(given), like=like)
        for chosen in interleaved(served(problem))[turn::5]:
            assert chosen.kernel.source == alike[chosen.tile]
            assert_right(run(chosen, given), given, want)


def test_phases_without_a_tap_have_no_sums():
    """Of a stride of 5 and a dilation of 2, three phases of five have taps."""
    given = of_layout("forward", INTERLEAVED[5], torch.bfloat16, "contiguous")
    found = [layout(c.problem, c.tile) for c in interleaved(served(problem_of(given)))]
    assert found
    assert {(laid.tile_results, laid.tile_sums) for laid in found} <= {(5, 3), (25, 15)}


@pytest.mark.thorough
@pytest.mark.parametrize(("direction", "case"), (*EVERY, *WRITES), ids=str)
def test_tiles_of_contiguous_tensors(direction, case):
    turn = (*EVERY, *WRITES).index((direction, case))
    given = of_layout(direction, case, DTYPES[turn % 2], "contiguous")
    want = given.want
    for chosen in served(problem_of(given), few())[turn // 2 % 2 :: 2]:
        assert_right(run(chosen, given, "random:1"), given, want)


@pytest.mark.parametrize(
    ("case", "step"),
    (
        (Case(3, 72, 70, 1, (6, 14), (3, 3), (2, 2), (1, 1), (1, 1)), 2),
        (INTERLEAVED[2], 8),
        (INTERLEAVED[5], 8),
    ),
    ids=str,
)
def test_contiguous_results_in_any_order_and_sanitized(case, step):
    given = of_layout("forward", case, torch.float16, "contiguous")
    want = given.want
    every = interleaved(served(problem_of(given), few()))
    assert every
    for chosen in every[::step]:
        first = run(chosen, given, sanitize=True)
        assert_right(first, given, want)
        for schedule in ("reverse", "random:1"):
            assert same_bits(run(chosen, given, schedule), first)


class Called(NamedTuple):
    kernels: dict[str, str]
    """By direction."""
    output: Tensor
    gradient: Tensor


def called(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> Called:
    """What the public function and its backward make of these, and which kernels do."""
    x = x.detach().requires_grad_()
    tconv.statistics(reset=True)
    output = tconv.conv_transpose2d(x, w, bias)
    (gradient,) = torch.autograd.grad(output, x, y)
    return Called(
        {row.direction: row.kernel for row in tconv.statistics()}, output.detach(), gradient
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_it_serves_who_names_it(direction, monkeypatch):
    monkeypatch.setenv("TCONV_EMULATE", "1")
    monkeypatch.setenv("TCONV_KERNEL", FAMILIES[direction].STEM)
    case = Case(1, 24, 16, 1, (4, 7), (3, 3))
    given = setting("forward", case, torch.bfloat16)
    found = called(given.t.x, given.t.w, given.t.bias, given.t.grad_output)
    assert found.kernels[direction] == FAMILIES[direction].STEM
    assert found.output.is_contiguous(memory_format=torch.channels_last)
    for got, want in zip(found[1:], expected(case.layer, given.t), strict=False):
        assert_right(got, given, want)
    x, w, y = given.t.x, given.t.w, given.t.grad_output
    for others in ((misaligned(x), w, misaligned(y)), (x, misaligned(w), y)):
        found = called(*others[:2], given.t.bias, others[2])
        assert found.kernels[direction] == FAMILIES[direction].STEM
        for got, want in zip(found[1:], expected(case.layer, given.t), strict=False):
            assert_right(got, given, want)


def test_packed_weights_of_two_gigabytes_have_wide_offsets():
    for direction, family in FAMILIES.items():
        problem = of_shape(direction, Case(1, 8, 8, 3000, (8, 8), (16, 16)), weight_mapped=False)
        for chosen in served(problem):
            wide = dict(chosen.kernel.source.constants)["Index"] == "long long"
            assert wide or 4 * chosen.packed < 2**31, f"{family.STEM}: {chosen}"
