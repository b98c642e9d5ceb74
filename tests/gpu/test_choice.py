"""Who runs a call on the device by default: our kernels or PyTorch's operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tconv
from tconv import functional, tuning
from tconv.choice import Race, Timed
from tconv.jit.cache import DiskCache
from tconv.jit.series import GRAPH_AFTER
from tconv.layers import DIRECTIONS
from tconv.run import calls

pytestmark = pytest.mark.default_choice


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    cache = DiskCache(tmp_path / "cache")
    monkeypatch.setattr(tuning, "default_cache", lambda: cache)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA Nobody Knows")
    tables = (functional._left_to_pytorch, functional._last_left, *functional._own_calls)
    for known in (calls._known, calls._known_gradients, *tables):
        known.clear()
    calls._call.cache_clear()
    tuning.forget()
    tconv.statistics(reset=True)
    yield
    calls._call.cache_clear()
    tuning.forget()


def operands(dtype=torch.float32, size=64, grad=True):
    x = torch.randn(8, 64, size, size, device="cuda", dtype=dtype, requires_grad=grad)
    w = torch.randn(64, 64, 4, 4, device="cuda", dtype=dtype, requires_grad=grad)
    return x, w


def reasons():
    return {row.reason for row in tconv.statistics()}


@pytest.mark.parametrize(("size", "node"), [(4, "ConvolutionBackward0"), (256, "TconvForward")])
def test_a_step_in_bfloat16_is_decided_as_one(size, node):
    x, w = operands(torch.bfloat16, size)
    for _ in range(3):
        out = tconv.conv_transpose2d(x, w, stride=2, padding=1)
        torch.autograd.grad(out, (x, w), torch.ones_like(out))
    assert type(out.grad_fn).__name__.startswith(node)
    assert {row.direction for row in tconv.statistics()} == set(DIRECTIONS)


@pytest.mark.parametrize("busy", [False, True])
def test_a_small_step_is_ours_where_the_program_waits_for_the_device(busy, monkeypatch):
    race = Race(Timed(100e-6, 20e-6), Timed(110e-6, 40e-6))
    monkeypatch.setattr(tuning, "race", lambda *_: race)
    x, w = operands(size=16)
    expected = F.conv_transpose2d(x, w, stride=2, padding=1)
    grad = torch.ones_like(expected)
    expected = torch.autograd.grad(expected, (x, w), grad)
    names = []
    for _ in range(tuning.WATCHED + 3):
        if busy:
            torch.cuda._sleep(5_000_000)
        else:
            torch.cuda.synchronize()
        out = tconv.conv_transpose2d(x, w, stride=2, padding=1)
        for got, want in zip(torch.autograd.grad(out, (x, w), grad), expected, strict=True):
            assert (got - want).norm() / want.norm() < 2e-3
        names.append(type(out.grad_fn).__name__.startswith("Tconv"))
    assert names == [True, *[False] * tuning.WATCHED, busy, busy]


def test_a_graph_that_is_captured_meanwhile_is_ours(monkeypatch):
    race = Race(Timed(100e-6, 20e-6), Timed(110e-6, 40e-6))
    monkeypatch.setattr(tuning, "race", lambda *_: race)
    x, w = operands(size=16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            out = tconv.conv_transpose2d(x, w, stride=2, padding=1)
            torch.autograd.grad(out, (x, w), torch.ones_like(out))
        assert "watched" in reasons()
        tconv.statistics(reset=True)
        with torch.cuda.graph(graph):
            out = tconv.conv_transpose2d(x, w, stride=2, padding=1)
            grads = torch.autograd.grad(out, (x, w), torch.ones_like(out))
        graph.replay()
        torch.cuda.synchronize()
    assert reasons() == {"timed"}
    expected = F.conv_transpose2d(x, w, stride=2, padding=1)
    expected = (expected, *torch.autograd.grad(expected, (x, w), torch.ones_like(expected)))
    for got, want in zip((out, *grads), expected, strict=True):
        assert (got - want).norm() / want.norm() < 2e-3


def test_a_forward_in_float32_is_timed_once():
    x, w = operands(grad=False)
    outs = [tconv.conv_transpose2d(x, w, stride=2, padding=1) for _ in range(3)]
    assert reasons() == {"timed"}
    assert sum(row.calls for row in tconv.statistics()) == 3
    expected = F.conv_transpose2d(x.double(), w.double(), stride=2, padding=1)
    for out in outs:
        assert (out - expected).norm() / expected.norm() < 1e-3


@pytest.mark.parametrize("kind", [tconv.ConvTranspose1d, tconv.ConvTranspose2d])
@torch.inference_mode()
def test_calls_of_a_layer_that_are_found_at_once(kind, monkeypatch):
    """With operands at other addresses, in turns, on another stream."""
    race = Race(Timed(1e-6, 1e-6), Timed(1e-3, 1e-6))
    monkeypatch.setattr(tuning, "race", lambda *_: race)
    axes = 2 if kind is tconv.ConvTranspose2d else 1
    layers = [kind(64, 3, 8, 4, 2, device="cuda") for _ in range(2)]
    images = [torch.randn(8, 64, *(512 // axes**3,) * axes, device="cuda") for _ in range(3)]
    for layer in layers:
        for _ in range(2):
            layer(images[0])
    assert len(functional._own_calls[axes - 1]) == len(layers)
    for layer in layers:  # until a call's launches are a graph
        first = layer(images[0])
        for _ in range(3 * GRAPH_AFTER):
            assert torch.equal(layer(images[0]), first)
    plain = getattr(F, f"conv_transpose{axes}d")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            found = [(layer, x, layer(x)) for x in images for layer in layers]
            with tconv.autotune():  # another mode: who runs a call is asked again
                found += [(layers[0], images[0], layers[0](images[0]))]
        torch.cuda.synchronize()
        for layer, x, out in found:
            expected = plain(x.double(), layer.weight.double(), layer.bias.double(), 4, 2)
            assert (out - expected).norm() / expected.norm() < 1e-3


@pytest.mark.parametrize("form", ["contiguous", "channels_last", "1-d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_that_are_repeated_have_the_same_bits(dtype, form):
    """They are found at once, and their launches become graphs, also within a user's."""
    x, w = operands(dtype, size=20)
    function = tconv.conv_transpose2d
    if form == "channels_last":
        x, w = (t.detach().to(memory_format=torch.channels_last).requires_grad_() for t in (x, w))
    if form == "1-d":
        x, w = (t.detach().flatten(2).requires_grad_() for t in (x, w))
        function = tconv.conv_transpose1d

    def step():
        out = function(x, w, stride=2, padding=1)
        return out, *torch.autograd.grad(out, (x, w), grad)

    with tconv.own_kernels():
        grad = torch.randn_like(function(x, w, stride=2, padding=1))
        first = [one.detach().clone() for one in step()]
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                for _ in range(3 * GRAPH_AFTER):
                    found = step()
                    assert all(map(torch.equal, found, first))
        assert found[0].grad_fn.step._at_once
        del found  # autograd waits for the stream of a graph that is alive, which a capture forbids
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        for one in found:
            one.detach().fill_(float("nan"))
        graph.replay()
        assert all(map(torch.equal, found, first))
    assert {row.reason for row in tconv.statistics()} == {"own kernels"}


def test_gradients_with_our_forward():
    x, w = operands(size=128)
    found = []
    for function in (tconv.conv_transpose2d, F.conv_transpose2d):
        out = function(x, w, stride=2, padding=1)
        found.append(torch.autograd.grad(out.square().mean(), (x, w)))
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-5)


def test_a_capture_times_nothing():
    x, w = operands(grad=False)
    graph = torch.cuda.CUDAGraph()
    F.conv_transpose2d(x, w, stride=2, padding=1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        F.conv_transpose2d(x, w, stride=2, padding=1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = tconv.conv_transpose2d(x, w, stride=2, padding=1)
    assert reasons() == {"not timed"}
    graph.replay()
    expected = F.conv_transpose2d(x, w, stride=2, padding=1)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    tconv.conv_transpose2d(x, w, stride=2, padding=1)
    assert "timed" in reasons()


def test_without_timing_pytorch_runs(monkeypatch):
    monkeypatch.setenv("TCONV_TIMING", "0")
    x, w = operands(grad=False)
    tconv.conv_transpose2d(x, w, stride=2, padding=1)
    assert reasons() == {"not timed"}
