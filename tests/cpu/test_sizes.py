"""Kernels that serve other sizes than the one they are made for, and their choice."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import subprocess
import sys
import threading
from collections import Counter

import pytest
import torch

from emulated_plans import HOPPER, OF_16_BITS, assert_right, problem_of, run
from layer_cases import Case, operands
from tconv import sizes
from tconv.jit.cache import default_cache
from tconv.jit.target import Target
from tconv.kernels import FAMILIES
from tconv.kernels.direct_forward.layout import layout as direct_layout
from tconv.kernels.mma_forward.layout import layout as mma_layout
from tconv.kernels.sm90_tf32_flat_forward.layout import layout as flat_layout
from tconv.kernels.sm90_tf32_forward.layout import layout as tf32_layout
from tconv.kernels.sm90_tf32_wide_forward.layout import layout as wide_layout
from tconv.layers import Layer
from tconv.plan import candidates, family, make_plan, plan
from tconv.problem import Problem
from tconv.run import binding

LAYERS = (
    "64,64,3",
    "64,64,3x7,padding=0x3",
    "128,64,4,2,1",
    "256,128,3,2,1,1",
    "64,3,4,2,1",
    "64,32,2,2",
    "32,32,3",
    "64,16,3,groups=2",
    "256,256,4,2,1,groups=256",
    "21,21,16,8,4",
    "16,64,3,2,dilation=2",
    "1d:256,1,512,128",
    "3,1,5x4",
    "32,24,1,2",
    "8,8,1,2,groups=8",
)


# In channels_last, 16-bit: channels that are read are multiples of 8.
LAST = (
    "64,64,3",
    "128,64,4,2,1",
    "256,128,3,2,1,1",
    "64,40,2,2",
    "64,16,3,groups=2",
    "16,64,3,2,dilation=2",
    "24,8,16,4,4",
)


def problem(text: str, math: str = "tf32") -> Problem:
    return Layer.parse(text).problem("forward", tf32=math == "tf32")


def resized(of: Problem, draw: random.Random) -> Problem:
    batch, height, width = draw.choice((1, 4, 32)), draw.randint(3, 70), draw.randint(3, 140)
    found = of.resized(batch, 1 if of.height.size == 1 else height, width)
    return dataclasses.replace(found, source_aligned=found.source_aligned and draw.random() < 0.8)


def texts(of) -> tuple:
    return tuple(launch.source for launch in of.launches)


SHARED = {
    "direct_forward": direct_layout,
    "mma_forward": mma_layout,
    "sm90_split_forward": tf32_layout,
    "sm90_tf32_flat_forward": flat_layout,
    "sm90_tf32_forward": tf32_layout,
    "sm90_tf32_wide_forward": wide_layout,
}
"""Families whose layouts share values between the sizes of a kernel."""


def found_alone(of: Problem, target: Target, candidate) -> tuple[tuple, dict]:
    """The text of a kernel, and what its layout remembers, as found for that size before others."""
    for layout in SHARED.values():
        layout.cache_clear()
    of_kernel = family(candidate.stem)
    made = make_plan(of, target, candidate)
    assert of_kernel.tile_why_not(of, target, candidate.tile) is None
    assert of_kernel.cost(of, target, candidate.tile) > 0
    layout = SHARED.get(candidate.stem)
    remembered = layout(of, candidate.tile).remembered if layout is not None else {}
    return texts(made), dict(remembered)


def served_by_the_same_text(problems, target: Target = HOPPER) -> Counter:
    """How often each kernel made for one size serves another; its text must be the same then."""
    draw = random.Random(3)
    served: Counter[str] = Counter()
    for of_layer in problems:
        for _ in range(6):
            like, other = (resized(of_layer, draw) for _ in range(2))
            if not like.serves(other):
                continue
            other = dataclasses.replace(other, like=like)
            for candidate in candidates(like, target):
                of_kernel = family(candidate.stem)
                if candidate.refusal or of_kernel.tile_why_not(other, target, candidate.tile):
                    continue
                of_other, of_like = (found_alone(of, target, candidate) for of in (other, like))
                assert of_other[0] == of_like[0], (candidate, other)
                same = of_other[1].keys() & of_like[1].keys()
                assert same or candidate.stem not in SHARED, "nothing is shared between sizes"
                differ = [name for name in same if of_other[1][name] != of_like[1][name]]
                assert not differ, (candidate, other)
                served[candidate.stem] += 1
    return served


OF_TF32 = ("mma_frames_forward", "pointwise_mma_forward")


@pytest.mark.parametrize("math", ("tf32", "ieee"))
def test_the_text_follows_the_pattern_alone(math):
    served = served_by_the_same_text(problem(layer, math) for layer in LAYERS)
    stems = {kernel.STEM for kernel in FAMILIES if kernel.DIRECTION == "forward"}
    stems -= set(OF_16_BITS)
    stems.discard("depthwise_forward")  # it serves float32 in channels_last alone
    of_tf32 = {stem for stem in stems if "tf32" in stem or stem in OF_TF32}
    other_math = of_tf32 if math == "ieee" else {"sm90_split_forward"}
    assert served.keys() == stems - other_math


@pytest.mark.parametrize(("arch", "prefix"), (("sm_90a", "sm90"), ("sm_80", "sm80")))
@pytest.mark.parametrize("direction", ("forward", "input_gradient", "weight_gradient"))
def test_the_text_of_kernels_of_16_bits_follows_the_pattern_alone(direction, arch, prefix):
    problems = [Layer.parse(one).problem(direction, "bfloat16", "channels_last") for one in LAST]
    served = served_by_the_same_text(problems, Target.named(arch))
    assert served.keys() == {f"{of}_{direction}" for of in (prefix, "general")}


# Sizes that a kernel is made for, and others that it serves: larger, smaller, unaligned.
EMULATED = (
    (Case(2, 20, 40, 1, (5, 9), (3, 5), (2, 3), (1, 1)), ((3, 7, 21), (1, 3, 4))),
    (Case(1, 24, 33, 2, (6, 12), (4, 4), (2, 2), (1, 1)), ((2, 9, 24), (3, 3, 36))),
    (Case(1, 16, 3, 1, (7, 9), (4, 4), (2, 2), (1, 1)), ((2, 4, 40), (1, 11, 5))),
    (Case(1, 70, 64, 1, (6, 20), (3, 3)), ((2, 3, 8), (1, 9, 44))),
    (Case(2, 6, 3, 2, (9, 30), (3, 3)), ((1, 20, 6), (3, 4, 70))),
    # Rows that one kernel writes whole, and images with narrower ones.
    (Case(1, 16, 16, 1, (9, 121), (3, 3)), ((2, 5, 1), (2, 5, 13), (1, 3, 33))),
)


@pytest.mark.parametrize("math", ("tf32", "ieee"))
@pytest.mark.parametrize(("case", "others"), EMULATED, ids=[str(case) for case, _ in EMULATED])
def test_a_kernel_for_another_size_is_right(case, others, math):
    like = problem_of(case, math=math)
    served = Counter()
    for batch, height, width in others:
        small = dataclasses.replace(case, batch=batch, size=(height, width))
        t = operands(small, torch.float32, "contiguous", "cpu")
        for candidate in candidates(like, HOPPER):
            kernel = dataclasses.replace(candidate, like=like)
            of_size = problem_of(small, math=math)
            if candidate.refusal or sizes.cost(kernel, of_size, HOPPER) == float("inf"):
                continue
            if candidate.stem.startswith("general") or served[candidate.stem] >= 4:
                continue
            served[candidate.stem] += 1
            made = make_plan(of_size, HOPPER, kernel)
            assert_right(run(made, t), small, t, math)
    assert served


def test_kernels_that_cannot_serve():
    aligned = problem("64,64,3").resized(1, 8, 32)
    assert aligned.source_aligned and not aligned.serves(aligned.resized(1, 8, 33))
    odd = aligned.resized(1, 8, 33)
    assert odd.serves(aligned) and odd.serves(aligned.resized(7, 1, 31))
    assert not odd.serves(problem("64,64,4").resized(1, 8, 33))
    assert not odd.serves(problem("64,64,3", "ieee").resized(1, 8, 33))
    wide = dataclasses.replace(odd, wide_offsets=True)
    assert not wide.serves(wide)
    with pytest.raises(ValueError, match=r"no kernel for .* can serve"):
        dataclasses.replace(odd, like=aligned)


def test_common_sizes():
    layer = problem("64,64,3")
    for height, width in ((1, 1), (7, 7), (56, 28), (640, 512), (5, 6), (9, 13), (384, 640)):
        assert sizes.is_common(layer.resized(2, height, width))
    for height, width in ((17, 8), (8, 19), (33, 33), (30, 64), (9, 48), (1333, 800)):
        assert not sizes.is_common(layer.resized(2, height, width))
    for height, width in ((14, 256), (256, 40), (80, 96), (56, 24)):  # in no simple ratio
        assert not sizes.is_common(layer.resized(2, height, width))
    for height, width in ((1080, 1920), (240, 135), (720, 1280)):  # of videos
        assert sizes.is_common(layer.resized(2, height, width))
        assert not sizes.is_common(layer.resized(2, height, width + height // 9))
    assert not sizes.is_common(layer.resized(2, 9 * 11, 16 * 11))
    row = problem("1d:64,32,16,8,4")
    assert sizes.is_common(row.resized(2, 1, 5 * 1024))
    assert not sizes.is_common(row.resized(2, 1, 5 * 1024 + 1))


@pytest.fixture
def no_choices(monkeypatch, tmp_path):
    """No kernels are known yet, here and on disk."""
    monkeypatch.setenv("TCONV_CACHE_DIR", str(tmp_path))

    def forget():
        sizes._any_sizes.clear()
        sizes._kernels.cache_clear()
        sizes._planned.cache_clear()
        sizes._expected.clear()

    forget()
    yield forget
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize(
    ("layer", "direction", "dtype"),
    (
        ("64,3,4,2,1", "forward", "float32"),
        ("256,256,4,2,1,groups=256", "forward", "float32"),
        ("1d:64,32,16,8,4", "forward", "float32"),
        # Of several launches: packing, kernel, repair or addition.
        ("256,128,3,2,1,1", "forward", "float32"),
        ("256,256,2,2", "forward", "float32"),
        ("128,64,4,2,1", "forward", "bfloat16"),
        ("128,64,4,2,1", "weight_gradient", "bfloat16"),
    ),
)
def test_few_kernels_serve_all_sizes(layer, direction, dtype, no_choices):
    """Packings, repairs and additions are kernels too."""
    draw = random.Random(5)
    of_layer = Layer.parse(layer).problem(direction, dtype)
    found, slower = set(), []
    drawn = [(512, 327), (250, 487)]  # of which a narrower or a wider one could be served alone
    drawn += [(draw.randint(8, 512), draw.randint(8, 512)) for _ in range(80)]
    for width, height in drawn:
        if of_layer.height.size == 1:
            height, width = 1, draw.randint(8, 1 << 16)
        of_size = of_layer.resized(draw.randint(1, 16), height, width)
        if sizes.is_common(of_size):
            continue
        made = sizes.planned(of_size, HOPPER)
        assert made.problem.like is not None, "a kernel of its own"
        found.update(texts(made))
        slower.append(made.cost / plan(of_size, HOPPER).cost)
    assert 1 < len(found) <= sizes.MOST_KERNELS == 6
    assert torch.tensor(slower).log().mean().exp() < 1.05


def test_common_sizes_have_kernels_of_their_own(no_choices):
    of_size = problem("64,64,3").resized(4, 64, 96)
    assert sizes.planned(of_size, HOPPER) is plan(of_size, HOPPER)


def test_the_choice_is_kept(no_choices, monkeypatch, caplog):
    of_layer = problem("64,32,2,2")
    first = sizes.kernels(of_layer, HOPPER)
    assert 1 < len(first) <= sizes.MOST_KERNELS
    no_choices()
    with monkeypatch.context() as patch:
        patch.setattr(sizes, "_find", lambda *_: pytest.fail("found again"))
        kept = sizes.kernels(of_layer.resized(3, 9, 9), HOPPER)
    assert [(k.stem, k.tile, k.like) for k in kept] == [(k.stem, k.tile, k.like) for k in first]
    no_choices()
    monkeypatch.setattr(sizes.default_cache(), "get", lambda key: b"[{}]")
    with caplog.at_level(logging.WARNING, "tconv"):
        assert sizes.kernels(of_layer, HOPPER) == first
    assert "they are found again" in caplog.text


def test_the_same_kernels_for_outputs_too_large_for_the_largest_image(no_choices):
    layer = problem("128,128,16,8,4")
    found = {sizes.kernels(layer.resized(1, size, size + 2), HOPPER) for size in (33, 47, 61)}
    assert len(found) == 1 and sizes._kernels.cache_info().misses == 1


def test_rows_and_images_of_a_layer_have_kernels_of_their_own(no_choices):
    def kernels(size):
        return [(k.stem, k.tile, k.like) for k in sizes.kernels(size, HOPPER)]

    row = problem("1d:64,64,3,padding=1")
    image = row.resized(2, 37, 53)
    assert image.layer == row.layer
    of_row, of_image = kernels(row), kernels(image)
    assert of_row != of_image
    no_choices()
    assert kernels(image) == of_image
    assert kernels(row) == of_row


def test_of_equal_kernels_the_one_that_serves_most_is_kept(no_choices):
    text = "96,3,2,stride=1x3"
    weight = Layer.parse(text).problem("weight_gradient")
    losses = []
    for size in ((11, 13), (34, 77), (130, 131), (201, 33)):
        small = weight.resized(2, *size)
        losses.append(sizes.planned(small, HOPPER).cost / plan(small, HOPPER).cost)
    assert max(losses) < 2


@pytest.mark.parametrize(
    "changes",
    (
        {"width": 65.5},
        {"width": float("nan")},
        {"batch": "a"},
        {"batch": True},
        {"kernel": "general_input_gradient", "tile": "64x128"},
        {"tile": "none such"},
    ),
    ids=str,
)
def test_an_entry_that_does_not_fit_is_found_again(changes, no_choices, caplog):
    layer = problem("64,64,3").resized(2, 33, 45)
    found = sizes.planned(layer, HOPPER)
    entry = sizes._entry(
        sizes._sample(layer, 1, sizes.MOST_PIXELS, sizes.MOST_PIXELS), HOPPER, None
    )
    records = json.loads(default_cache().get(entry))
    about = {"kind": "sizes", "stem": "sizes-forward", "arch": "sm_90a"}
    changed = json.dumps([record | changes for record in records])
    default_cache().put(entry, changed.encode(), about)
    no_choices()
    assert sizes.planned(layer, HOPPER) == found
    assert "holds no kernels" in caplog.text


def test_one_kernel_may_be_asked_for(no_choices, monkeypatch):
    monkeypatch.setenv("TCONV_KERNEL", "general_forward")
    of_size = problem("64,64,3").resized(1, 9, 33)
    assert sizes.planned(of_size, HOPPER).stem == "general_forward"
    monkeypatch.delenv("TCONV_KERNEL")
    assert sizes.planned(of_size, HOPPER).stem != "general_forward"


def expect(of_size: Problem) -> None:
    sizes.expect(of_size, sizes.planned(of_size, HOPPER))


def join_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "tconv-sizes":
            thread.join(30)
            assert not thread.is_alive()


def test_the_first_size_compiles_the_kernels_of_all(no_choices, monkeypatch):
    """But for its own, which the call compiles itself."""
    compiled = []
    monkeypatch.setattr(
        sizes, "compile_cuda", lambda source, arch, process: compiled.append(source)
    )
    of_layer = problem("64,64,3")  # of which two have the same packing
    expect(of_layer.resized(1, 8, 8))
    expect(of_layer.resized(1, 64, 96))
    join_threads()
    assert not compiled, "a common size has its own kernels"
    first = of_layer.resized(1, 23, 19)
    for size in (first, first, of_layer.resized(1, 27, 19)):
        expect(size)
    join_threads()
    wanted = [
        source
        for kernel in sizes.kernels(of_layer, HOPPER)
        for source in texts(make_plan(kernel.like, HOPPER, kernel))
    ]
    assert len(set(wanted)) < len(wanted)
    assert Counter(compiled) == Counter(set(wanted) - set(sizes.planned(first, HOPPER).sources))


def test_threads_that_compile_are_few_and_survive_an_error(no_choices, monkeypatch):
    monkeypatch.setattr(sizes.os, "sched_getaffinity", lambda _: range(4))
    go, names, most = threading.Event(), [], []

    def compile_cuda(source, arch, process):
        most.append(len(sizes._compiling))
        go.wait(30)
        names.append(source)
        raise RuntimeError("not today")

    monkeypatch.setattr(sizes, "compile_cuda", compile_cuda)
    for layer in ("64,64,3", "256,128,3,2,1,1", "64,3,4,2,1"):
        expect(problem(layer).resized(1, 23, 19))
    waiting = len(sizes._waiting)
    assert waiting > 2
    go.set()
    join_threads()
    assert max(most) <= 2 and len(names) >= waiting and not sizes._waiting
    assert not sizes._compiling


def test_a_size_whose_kernels_are_loaded_starts_no_thread(no_choices, monkeypatch):
    of_size = problem("256,128,3,2,1,1").resized(1, 23, 19)
    chosen = sizes.planned(of_size, HOPPER)
    assert len(chosen.sources) > 1
    loaded = {source: object() for source in chosen.sources}
    missing = chosen.sources[-1]
    asked = []

    def load(source, device):
        asked.append((source, threading.current_thread()))
        return loaded[source]

    monkeypatch.setattr(binding.runtime, "load", load)
    monkeypatch.setattr(binding.runtime, "hold", lambda _: None)
    monkeypatch.setattr(binding.sizes, "expect", lambda *_: None)
    for known in (loaded, {s: k for s, k in loaded.items() if s != missing}):
        monkeypatch.setattr(binding.runtime, "find", lambda source, _, of=known: of.get(source))
        plan_, kernels = binding._prepare(of_size, 0, HOPPER, None, False)
        assert plan_ is chosen and kernels == tuple(loaded[s] for s in chosen.sources)
        assert bool(asked) == (known is not loaded)
    assert all(thread is not threading.main_thread() for _, thread in asked)


ENDING = """
import threading, time
from tconv import sizes
from tconv.jit.target import Target
from tconv.layers import Layer

def compile_cuda(source, arch, process):
    time.sleep(0.3)
    print("compiled", flush=True)

sizes.os.sched_getaffinity = lambda _: range(2)
sizes.compile_cuda = compile_cuda
of_size = Layer.parse("64,64,3").problem("forward").resized(1, 23, 19)
target = Target.named("sm_90a")
sizes.expect(of_size, sizes.planned(of_size, target))
assert len(sizes._waiting) > 1
"""


def test_a_process_that_ends_compiles_no_more(tmp_path):
    """What is being compiled is waited for; what waits is left."""
    environment = {**os.environ, "TCONV_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", ENDING],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ended.stdout.split() == ["compiled"], ended.stderr
