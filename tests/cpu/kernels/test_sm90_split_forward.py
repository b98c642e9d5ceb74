"""sm90_split_forward and its packing: in the emulator, and through NVRTC."""

from __future__ import annotations

import dataclasses
import itertools

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
    assert_wants_vectors,
    assert_written_alone,
    run,
)
from layer_cases import Case, operands, random_cases, reference
from tconv.jit.target import Target
from tconv.kernels import sm90_split_forward as family
from tconv.plan import Candidate, Plan, make_plan, plan
from tconv.problem import Axis, Problem
from tiers import quick

CASES = (
    *(case for case in PATCH_CASES if case.in_channels >= 16),
    # One slot: weights of two stages by turns, or of an odd number of them, moved at each end.
    Case(1, 32, 70, 1, (5, 44), (2, 2), (2, 2)),
    Case(2, 48, 70, 1, (9, 140), (2, 2), (2, 2)),
    # Parts of a stage in a loop: three, and where rows of pixels stand for two output rows.
    Case(1, 16, 64, 1, (3, 44), (3, 7)),
    Case(1, 32, 12, 1, (6, 44), (5, 7), (2, 1), (2, 3)),
    *FEW_CHANNELS,
)


def problem_of(case: Case, **changes) -> Problem:
    return emulated_plans.problem_of(case, **({"math": "ieee"} | changes))


def plans(problem: Problem, resident: bool | None = None) -> list[Plan]:
    """One for each tile that serves; of one mode of the weights, or of both."""
    served = emulated_plans.plans(problem, family.STEM)
    return [chosen for chosen in served if resident in (None, chosen.tile.resident)]


def first_plan(case: Case) -> Plan:
    return plans(problem_of(case))[0]


def in_bfloat16(chosen: Plan) -> Plan:
    """The same tile's, all as blocks that end with repairs compute it."""
    tile = dataclasses.replace(chosen.tile, half=False, resident=False)
    return make_plan(chosen.problem, HOPPER, Candidate(family.STEM, tile, None, 0))


def alone(chosen: Plan) -> Plan:
    """Without what its blocks end with, repairs."""
    return chosen.with_source(dataclasses.replace(chosen.kernel.source, repair_source=None))


def same_bits(a, b) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def assert_right(out, case: Case, t) -> None:
    emulated_plans.assert_right(out, case, t, "ieee")


QUICK = (2, 8, 17)  # together they too serve every tile
FEW = tuple(CASES.index(case) for case in FEW_CHANNELS)


@pytest.mark.parametrize("case", quick(CASES, *QUICK, FEW[0], FEW[1]), ids=str)
def test_every_tile_that_serves(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    served = plans(problem_of(case))
    assert served
    # That the repair did not compute it is asked of every tile by the first cases, and of the
    # first and the last tile by the others: it takes a second kernel.
    asked = served if CASES.index(case) in (*QUICK, *FEW) else (served[0], served[-1])
    for chosen in served:
        out = run(chosen, t)
        assert_right(out, case, t)
        if chosen in asked:
            assert same_bits(out, run(alone(chosen), t)), "the repair computed it"


@pytest.mark.parametrize("case", quick(CASES, 2, 17, FEW[0]), ids=str)
def test_repairs_of_every_layer(case):
    case = dataclasses.replace(case, bias=False)  # beside which small sums were nothing
    t = changed(case, UNHELD["all small"])
    served = plans(problem_of(case))
    for chosen in (served[0], served[-1]):
        out = run(chosen, t)
        assert_right(out, case, t)
        assert same_bits(out, run(in_bfloat16(chosen), t))


def test_cases_serve_every_tile():
    assert {p.tile for i in QUICK for p in plans(problem_of(CASES[i]))} == set(family.TILES)


def test_cases_have_parts_in_a_loop():
    served = [p for case in CASES for p in plans(problem_of(case)) if _parts(p) > 1]
    assert {(p.tile.resident, p.problem.height.stride) for p in served} == {
        (resident, stride) for resident in (False, True) for stride in (1, 2)
    }
    assert {_parts(p) for p in served} >= {2, 3, 4}


def _parts(chosen: Plan) -> int:
    return max(dict(chosen.kernel.source.constants)["class_parts"])


@pytest.mark.parametrize(
    "case", quick(random_cases(12, 31, channels=40, size=12), 0, 1, 2), ids=str
)
def test_random_layers(case):
    # Few tiles of each: those of the first and of the last cost.
    case = dataclasses.replace(case, in_channels=max(case.in_channels, 4))
    t = operands(case, torch.float32, "contiguous", "cpu")
    served = plans(problem_of(case))
    for chosen in served[:1] + served[-1:]:
        assert_right(run(chosen, t), case, t)


def test_resident_and_streamed_weights_give_the_same():
    case = CASES[11]
    t = operands(case, torch.float32, "contiguous", "cpu")
    served = plans(problem_of(case), resident=True)
    assert served
    for chosen in served:
        tile = dataclasses.replace(chosen.tile, resident=False)
        other = make_plan(chosen.problem, HOPPER, Candidate(family.STEM, tile, None, 0))
        assert torch.equal(run(chosen, t), run(other, t))


@pytest.mark.parametrize("layout", ("channels_last", "strided"))
def test_reads_any_strides(layout):
    case = CASES[2]
    t = operands(case, torch.float32, layout, "cpu")
    x_layout = "channels_last" if layout == "channels_last" else "contiguous"
    chosen = plans(problem_of(case, x_layout=x_layout, source_aligned=False))[0]
    assert_right(run(chosen, t), case, t)


@pytest.mark.parametrize("operand", ("x", "w"))
def test_values_that_are_not_finite(operand):
    # Also where blocks recompute what float16 cannot hold. Weights of 0.25 have no low parts: an
    # infinity times those would be a NaN.
    case = CASES[1]
    for bits in (0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, -0x800000):
        t = operands(case, torch.float32, "contiguous", "cpu")
        t.w[:, ::2] = 0.25
        changed = getattr(t, operand)
        place = (0, 3, 2, 17) if operand == "x" else (3, 5, 1, 2)
        changed.view(torch.int32)[place] = bits
        first = first_plan(case)
        for chosen in (first, in_bfloat16(first)):
            out = run(chosen, t)
            want = reference(case, t.x, t.w, t.bias, t.grad_output)[0]
            assert torch.equal(out.isnan(), want.isnan())
            assert torch.equal(out.isinf(), want.isinf())
            infinite = want.isinf()
            assert torch.equal(out[infinite].double(), want[infinite].double())


def test_the_largest_finite_values_stay_finite():
    # In bfloat16 they are infinite: such sums are recomputed, one by one.
    case = Case(1, 16, 16, 1, (4, 8), (1, 2), bias=False)
    t = operands(case, torch.float32, "contiguous", "cpu")
    t.x.fill_(torch.finfo(torch.float32).max)
    t.w.fill_(2.0**-6)
    first = first_plan(case)
    for chosen in (first, in_bfloat16(first)):
        out = run(chosen, t)
        want = reference(case, t.x, t.w, None, t.grad_output)[0]
        assert torch.isfinite(out).all()
        assert ((out.double() - want).abs() <= 2.0**-22 * want).all()


def test_small_values_keep_their_low_parts():
    case = CASES[1]
    t = operands(case, torch.float32, "contiguous", "cpu")
    t.x.mul_(2.0**-90)
    if t.bias is not None:
        t.bias.mul_(2.0**-90)
    first = first_plan(case)
    for chosen in (first, in_bfloat16(first)):
        assert_right(run(chosen, t), case, t)


def changed(case: Case, change):
    t = operands(case, torch.float32, "contiguous", "cpu")
    x, w = t.x.clone(), t.w.clone()
    change(x, w)
    return dataclasses.replace(t, x=x, w=w)


def keep_channels(of: torch.Tensor, kept: torch.Tensor) -> None:
    others = torch.ones(of.shape[1], dtype=torch.bool)
    others[kept] = False
    of[:, others] = 0


# What to do to an input and a weight that two parts of float16 then do not hold:
# each tile reads it. A value is small from 2^-16 of a sample's largest on. Those of 8 channels of a
# pixel count as one, or as more where none of the 8 is larger. Where only one of 8 channels is not
# zero, or few weights are not, an output may be a single product.
UNHELD = {
    "large": lambda x, w: x[:, 3].fill_(2e3),
    "not a number": lambda x, w: x[:, 3].fill_(float("nan")),
    "infinite": lambda x, w: x[:, 3].fill_(-float("inf")),
    "all small": lambda x, w: x.mul_(1e-20),
    "all large": lambda x, w: x.mul_(1e5),
    "a small channel": lambda x, w: x[:, 3].mul_(2.0**-20),
    "small channels": lambda x, w: x[:, 8:].mul_(2.0**-20),
    "lone channels": lambda x, w: keep_channels(x, torch.tensor([3, 8])),
    "small weights": lambda x, w: w.mul_(1e-20),
    "large weights": lambda x, w: w.mul_(1e5),
    "a small channel's weights": lambda x, w: w[5].mul_(2.0**-24),
    "an infinite weight": lambda x, w: w[0, 0, 0].fill_(float("inf")),
    "few weights": lambda x, w: keep_channels(w, torch.arange(0, 64, 16)),
}


@pytest.mark.parametrize("name", UNHELD)
def test_repairs_what_two_parts_of_float16_cannot_hold(name):
    case = dataclasses.replace(CASES[1], bias=False)  # beside which small sums were nothing
    t = changed(case, UNHELD[name])
    chosen = first_plan(case)
    want = run(in_bfloat16(chosen), t)
    assert same_bits(run(chosen, t, blocks=2), want)
    assert not same_bits(run(alone(chosen), t, blocks=2), want)
    if all(values.isfinite().all() for values in (t.x, t.w)):
        assert_right(want, case, t)


# And what is like that, but held.
HELD = {
    "all smaller": lambda x, w: x.mul_(1e-9),
    "all larger": lambda x, w: x.mul_(1e4),
    "an image of another scale": lambda x, w: x[1].mul_(1e-6),
    "few small values": lambda x, w: x[:, 3::8, 1, 20:24].mul_(2.0**-20),
    "zero channels": lambda x, w: x[:, 3:8].zero_(),
    "pairs of channels": lambda x, w: keep_channels(x, torch.tensor([3, 7, 8, 9])),
    "smaller weights": lambda x, w: w.mul_(1e-6),
    "larger weights": lambda x, w: w.mul_(1e4),
    "less weights": lambda x, w: keep_channels(w, torch.arange(0, 64, 4)),
}


@pytest.mark.parametrize("name", quick(HELD, 0, 2, 3, 4, 8))
def test_two_parts_of_float16_hold_most(name):
    case = dataclasses.replace(CASES[1], bias=False)
    t = changed(case, HELD[name])
    for chosen in plans(problem_of(case)):
        out, again = run(chosen, t, blocks=2), run(in_bfloat16(chosen), t)
        assert_right(out, case, t)
        assert same_bits(out, run(alone(chosen), t))
        for of_image, by_bfloat16 in zip(out, again, strict=True):
            assert not same_bits(of_image, by_bfloat16), "the bits tell nothing"


def test_an_image_does_not_depend_on_the_others():
    case = CASES[1]
    t = operands(case, torch.float32, "contiguous", "cpu")
    for chosen in plans(problem_of(case)):
        before = run(chosen, t)
        changes = ((float("nan"), "forward"), (1e4, "random:1"), (1e-20, "random:2"))
        for factor, schedule in changes:
            other = dataclasses.replace(t, x=torch.stack((t.x[0], t.x[1] * factor)))
            out = run(chosen, other, schedule, blocks=2)
            assert same_bits(out[0], before[0]) and not same_bits(out[1], before[1])


def test_of_weights_chance_brings_some_that_are_small():
    case = CASES[1]
    t = operands(case, torch.float32, "contiguous", "cpu")
    w = (1 + t.w.abs()).clamp(max=1.99).copysign(t.w)  # 2^13 times as large in float16
    chosen = first_plan(case)
    laid = family.layout(chosen.problem, chosen.tile)
    assert laid.row_step == 1  # times that a weight is packed
    for value in (2.0**-15 * (1 - 2.0**-24), 1e-12, -1e-30):
        for more in (0, 1):
            some = w.clone()
            some.view(-1)[-laid.most_unfit_weights - more :] = value
            some.view(-1)[:100] = 2.0**-15
            some.view(-1)[100:200] = 0
            given = dataclasses.replace(t, w=some)
            whole, in_half = run(chosen, given), run(alone(chosen), given)
            assert same_bits(whole, run(in_bfloat16(chosen), given) if more else in_half)
            assert same_bits(whole, in_half) == (more == 0)
            assert_right(whole, case, given)


@pytest.mark.parametrize("schedule", ("forward", "random:1"))
def test_a_small_pixel_is_repaired_and_no_other_tile(schedule):
    case = Case(1, 16, 64, 1, (24, 70), (3, 3))
    t = changed(case, lambda x, w: x[:, :, 3, 17].mul_(2.0**-20))
    near, far = (..., slice(3, 6), slice(17, 20)), (..., slice(12, None), slice(None))
    for chosen in plans(problem_of(case)):
        in_half, again = run(alone(chosen), t), run(in_bfloat16(chosen), t)
        out = run(chosen, t, schedule, blocks=2)
        assert_right(out, case, t)
        for place, repaired in ((near, True), (far, False)):
            in_place, *either = (y[place].contiguous() for y in (out, in_half, again))
            assert same_bits(in_place, either[repaired])
            assert not same_bits(in_place, either[not repaired])


# The least and the largest that all of an operand may be; a sample of it is brought near 2^13.
@pytest.mark.parametrize(
    ("x_most", "w_most"), ((2.0**-47, 65504.0), (65504.0, 2.0**-47), (2.0**-7, 63.0))
)
def test_two_parts_of_float16_keep_what_they_hold(x_most, w_most):
    case = dataclasses.replace(CASES[1], bias=False)
    t = operands(case, torch.float32, "contiguous", "cpu")
    x = t.x.clamp(-1, 1) * x_most
    x[:, :, :, ::5] = x_most
    w = t.w / t.w.abs().max() * w_most
    t = dataclasses.replace(t, x=x, w=w)
    chosen = first_plan(case)
    out = run(chosen, t)
    assert_right(out, case, t)
    assert same_bits(out, run(alone(chosen), t))
    assert not same_bits(out, run(in_bfloat16(chosen), t)), "the bits tell nothing"


def test_output_must_start_on_a_vector():
    t = operands(CASES[0], torch.float32, "contiguous", "cpu")
    assert_wants_vectors(plans(problem_of(CASES[0]))[0], t)


@pytest.mark.parametrize("case", (CASES[1], CASES[6], CASES[11]), ids=str)
def test_writes_into_longer_rows(case):
    t = operands(case, torch.float32, "contiguous", "cpu")
    assert_written_alone(plans(problem_of(case))[0], case, t, "ieee")


# (resident, temporaries): a tile of each differs in its code, and all have the same repairs.
KINDS = {
    "resident": (True, 2),
    "streamed": (False, 2),
    "streamed, one temporary": (False, 1),
}
# And whether patches come by tensor map or through registers, and tiles are repaired.
by_kind = pytest.mark.parametrize(
    ("kind", "aligned", "repaired"),
    [
        *itertools.product(KINDS, (True, False), (False,)),
        ("streamed", True, True),
        ("streamed", False, True),
    ],
)


def first_of(kind: str, served: list[Plan]) -> Plan:
    tiles = ((p, (p.tile.resident, p.tile.temporaries)) for p in served)
    return next(p for p, found in tiles if found == KINDS[kind])


def to_repair(case: Case, repaired: bool):
    """A layer and its operands, which float16 holds or not."""
    if not repaired:
        return case, operands(case, torch.float32, "contiguous", "cpu")
    case = dataclasses.replace(case, bias=False)
    return case, changed(case, UNHELD["all small"])


@by_kind
@pytest.mark.parametrize("wide", quick((False, True), 1), ids=("int", "long long"))
def test_wide_offsets_and_sanitizers(wide, kind, aligned, repaired):
    case, t = to_repair(CASES[1], repaired)
    chosen = first_of(kind, plans(problem_of(case, wide_offsets=wide, source_aligned=aligned)))
    assert_right(run(chosen, t, sanitize=True), case, t)


@by_kind
def test_result_does_not_depend_on_the_order_of_threads(kind, aligned, repaired):
    case, t = to_repair(CASES[1], repaired)
    assert_order_free(first_of(kind, plans(problem_of(case, source_aligned=aligned))), t)


# One layer for each number of slots in a group and mode of the weights: the code differs in these.
LAYERS = (
    "32 to 32, 3x3",
    "64 to 64, 3x3",
    "64 to 128, 3x5",
    "1024 to 512, 2x2 s2",
    "21 to 21, 16x16 s8",
    "48 to 32, 2x2 s2",
)
LOADED_LAYERS = ("32 to 32, 3x3", "1024 to 512, 2x2 s2", "48 to 32, 2x2 s2")
SHAPES = PATCH_LAYERS | {"48 to 32, 2x2 s2": Case(8, 48, 32, 1, (64, 64), (2, 2), (2, 2))}


def test_layers_compile_every_tile():
    for names, aligned in ((LAYERS, True), (LOADED_LAYERS, False)):
        served = [plans(problem_of(SHAPES[name], source_aligned=aligned)) for name in names]
        most = 256 if aligned else family.MOST_LOADED_COLUMNS
        tiles = {tile for tile in family.TILES if tile.columns <= most}
        assert {p.tile for of_layer in served for p in of_layer} == tiles


@pytest.mark.parametrize(
    ("name", "aligned"),
    quick((*((name, True) for name in LAYERS), *((name, False) for name in LOADED_LAYERS)), 1, -1),
)
def test_compiles_without_spills_or_serialised_products(name, aligned):
    served = plans(problem_of(SHAPES[name], source_aligned=aligned))
    assert served
    for chosen in served:
        assert_compiled_well(chosen)


@pytest.mark.parametrize(
    ("changes", "target", "reason"),
    (
        ({}, "sm_80", "needs the tensor cores of sm_90a, the target is sm_80"),
        ({}, "sm_100a", "the target is sm_100a"),
        (dict(math="tf32"), "sm_90a", "strict float32, not float32/tf32"),
        (dict(dtype="float64"), "sm_90a", "not float64/ieee"),
        (dict(y_layout="channels_last"), "sm_90a", "writes contiguous outputs"),
        (dict(groups=8), "sm_90a", "from 4 input channels of a group on, there are 2"),
        (dict(width=Axis(9, 33, 17)), "sm_90a", "16 phases in x, the stride is 17"),
    ),
)
def test_refusals(changes, target, reason):
    problem = problem_of(Case(1, 16, 64, 1, (9, 70), (3, 3)), **changes)
    refusal = family.why_not(problem, Target.named(target))
    assert refusal is not None and reason in refusal


@pytest.mark.parametrize("aligned", (True, False))
@pytest.mark.parametrize("channels", quick((16, 40, 64), 2))
def test_one_slot_and_any_number_of_stages(channels, aligned):
    case = Case(1, channels, 40, 1, (5, 44), (2, 2), (2, 2))
    t = operands(case, torch.float32, "contiguous", "cpu")
    served = plans(problem_of(case, source_aligned=aligned))
    assert {chosen.tile.resident for chosen in served} == {True, False}
    stages = -(-channels // 16)
    for chosen in served:
        constants = dict(chosen.kernel.source.constants)
        assert (constants["class_parts"], constants["class_groups"]) == ((1,), (1,))
        assert constants["class_unroll"] == (1 + (stages % 2 == 0),)
        out = run(chosen, t)
        assert_right(out, case, t)
        assert same_bits(out, run(alone(chosen), t))


def test_the_plan_prefers_it_where_its_products_are_fewer():
    assert plan(problem_of(PATCH_LAYERS["64 to 64, 3x3"]), HOPPER).stem == family.STEM
    assert plan(problem_of(PATCH_LAYERS["64 to 64, 3x3"]), Target.named("sm_80")).stem != (
        family.STEM
    )
    few = Case(16, 8, 16, 4, (128, 256), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1))
    assert plan(problem_of(few), HOPPER).stem == "mma_forward"
