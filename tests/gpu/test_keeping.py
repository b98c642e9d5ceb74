"""Weights that stay packed between calls, on the device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tconv
from emulated_plans import HOPPER, problem_of
from layer_cases import Case, assert_output_right, operands
from tconv import keeping, tuning
from tconv.kernels import sm90_tf32_flat_forward as family
from tconv.plan import candidates, make_plan

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

# As many weights as are kept; fewer tiles than multiprocessors, and several for each.
CASES = (
    Case(4, 264, 128, 1, (9, 11), (4, 4), (2, 2), (1, 1)),
    Case(2, 520, 260, 1, (7, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(64, 1030, 256, 1, (15, 9), (2, 2), (2, 2)),
    Case(3, 400, 128, 2, (9, 13), (4, 4), (2, 2), (1, 1)),
    Case(16, 512, 256, 1, (1, 32), (1, 16), (1, 8), (0, 4), bias=False),
)
TILES = [tile for tile in family.TILES if tile.half]


@pytest.fixture(autouse=True)
def _settings(monkeypatch):
    monkeypatch.setattr(family, "LEAST_KEPT_SHARE", 0)
    monkeypatch.setattr(family, "LEAST_KEPT_SECONDS", 0)
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.backends.cudnn.allow_tf32 = before


def call(case, t):
    return tconv.conv_transpose2d(
        t.x,
        t.w,
        t.bias,
        stride=case.stride,
        padding=case.padding,
        output_padding=case.output_padding,
        groups=case.groups,
        dilation=case.dilation,
    )


def assert_near(out, want):
    """The same but for the order of sums, which is TF32's where weights have changed unseen."""
    assert (out - want).norm() <= 1e-5 * want.norm()


def kept_of(t):
    """What is kept of the weight."""
    found = keeping._kept.get(id(t.w))
    return None if found is None else found.memory


def that_keep(case, tile):
    found = candidates(problem_of(case), HOPPER)
    able = [c for c in found if (c.stem, c.tile, c.refusal) == (family.STEM, tile, None)]
    return [c for c in able if make_plan(problem_of(case), HOPPER, c).keeping is not None]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile):
    served = 0
    for case in CASES:
        for candidate in that_keep(case, tile):
            served += 1
            t = operands(case, torch.float32, "contiguous", "cuda")
            with tuning.using(candidate):
                want = call(case, t)
                assert_output_right(case, t, tf32=True)  # the second call, which keeps them
                assert kept_of(t) is not None
                for _ in range(5):
                    assert torch.equal(call(case, t), want)
                torch.cuda.synchronize()
                assert not keeping._kept[id(t.w)].is_stale()
                for index in (0, t.w.numel() // 2 + 3, t.w.numel() - 1):
                    for _ in range(1 + keeping.LEAST_USES):
                        call(case, t)
                    assert kept_of(t) is not None
                    t.w.data.view(-1)[index] += 0.25
                    assert_output_right(case, t, tf32=True)
                    torch.cuda.synchronize()
                    assert keeping._kept[id(t.w)].is_stale(), f"{candidate}: {index}"
    assert served > 0


def test_changes_between_calls_that_do_not_wait():
    case = CASES[0]
    t = operands(case, torch.float32, "contiguous", "cuda")
    with tuning.using(that_keep(case, TILES[0])[0]):
        for _ in range(3):
            call(case, t)
        torch.cuda.synchronize()
        found, weights = [], []
        for index in range(30):
            if index % 3 == 1:
                t.w.data[index] *= -1
            weights.append(t.w.data.clone())
            found.append(call(case, t))
        for weight, out in zip(weights, found, strict=True):
            assert_near(out, call(case, dataclasses.replace(t, w=weight)))


def test_optimizer_steps_and_gradients():
    case = CASES[0]
    t = operands(case, torch.float32, "contiguous", "cuda")
    weight = torch.nn.Parameter(t.w)
    t = dataclasses.replace(t, w=weight)
    optimizer = torch.optim.SGD([weight], lr=1e-2)
    for _ in range(4):
        for _ in range(6):  # of the same weight, as gradients are gathered
            with tuning.using(that_keep(case, TILES[0])[0]):
                out = call(case, t)
            out.square().mean().backward()
        assert kept_of(t) is not None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), tuning.using(that_keep(case, TILES[0])[0]):
            assert_output_right(case, t, tf32=True)


def test_calls_on_several_streams():
    case = CASES[0]
    t = operands(case, torch.float32, "contiguous", "cuda")
    with tuning.using(that_keep(case, TILES[0])[0]):
        want = call(case, t)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(3)]
        for _ in range(20):
            found = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    found += [call(case, t) for _ in range(3)]
            torch.cuda.synchronize()
            assert all(torch.equal(out, want) for out in found)


def test_a_graph_packs_by_itself():
    case = CASES[0]
    t = operands(case, torch.float32, "contiguous", "cuda")
    with tuning.using(that_keep(case, TILES[0])[0]):
        for _ in range(3):
            call(case, t)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(case, t)
        del keeping._kept[id(t.w)]
        for _ in range(3):
            t.w.data.mul_(-1)
            graph.replay()
            torch.cuda.synchronize()
            assert_near(captured, call(case, t))


def test_memory_goes_with_the_weight():
    case = CASES[2]
    t = operands(case, torch.float32, "contiguous", "cuda")
    with tuning.using(that_keep(case, TILES[0])[0]):
        for _ in range(3):
            call(case, t)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        kept = kept_of(t).nbytes
        weight = t.w.nbytes
        assert kept <= 0.6 * weight
        del t
        assert torch.cuda.memory_allocated() <= before - kept - weight
