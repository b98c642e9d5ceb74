"""Images of many sizes on the device: few kernels, right results, and kernels that are unloaded."""

from __future__ import annotations

import dataclasses
import gc
import random

import pytest
import torch

from layer_cases import Case, assert_output_right, operands
from tconv import run, sizes
from tconv.jit import runtime
from tconv.jit.target import Target
from tconv.run import calls
from tconv.tuning import using

LAYERS = (
    Case(1, 64, 64, 1, (9, 9), (3, 3)),
    Case(1, 128, 64, 1, (9, 9), (4, 4), (2, 2), (1, 1)),
    Case(1, 64, 3, 1, (9, 9), (4, 4), (2, 2), (1, 1)),
    Case(1, 256, 96, 1, (9, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(1, 21, 21, 1, (9, 9), (16, 16), (8, 8), (4, 4)),
    Case(1, 1, 1, 64, (9, 9), (4, 4), (2, 2), (1, 1)),
    Case(1, 64, 32, 1, (9, 9), (2, 2), (2, 2)),
)


def resized(case: Case, draw: random.Random, most: int = 90) -> Case:
    size = (draw.randint(1, most), draw.randint(1, most))
    return dataclasses.replace(case, batch=draw.randint(1, 9), size=size)


@pytest.mark.parametrize("tf32", (True, False), ids=("tf32", "strict"))
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_the_kernels_of_all_sizes_are_right(case, tf32, monkeypatch):
    """Each of them at sizes that it was not made for, whatever the model says of them there."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    draw, target, ran = random.Random(1), Target.for_device(0), 0
    for _ in range(10):
        small = resized(case, draw)
        t = operands(small, torch.float32, "contiguous", "cuda")
        problem = small.layer.problem("forward", tf32=tf32)
        for kernel in sizes.kernels(problem, target):
            if sizes.cost(kernel, problem, target) < float("inf"):
                with using(kernel):
                    assert_output_right(small, t, tf32=tf32)
                ran += 1
    assert ran >= 10


def forget() -> None:
    """Lets go of all calls that are remembered, so of all kernels but captured ones."""
    for known in (calls._known, calls._known_gradients):
        known.clear()
    calls._call.cache_clear()
    gc.collect()


def test_kernels_are_unloaded_and_loaded_again(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    forget()
    before = len(runtime._kernels)
    for turn in range(2):
        for size in ((17, 19), (33, 9)):
            case = Case(2, 64, 64, 1, size, (3, 3))
            assert_output_right(case, operands(case, torch.float32, "contiguous", "cuda", turn))
        assert len(runtime._kernels) > before
        forget()
        assert len(runtime._kernels) == before


def test_a_captured_kernel_stays():
    case = Case(2, 64, 64, 1, (17, 19), (3, 3))
    t = operands(case, torch.float32, "contiguous", "cuda")
    with torch.no_grad():
        expected = run.forward(t.x, t.w, t.bias, case.geometry)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run.forward(t.x, t.w, t.bias, case.geometry)
    forget()
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
