"""Which calls reach our kernels, and what the layer promises of their results.

CUDA tensors, and CPU tensors under TCONV_EMULATE=1, go the same way; a recording of tconv.run
stands at its end here.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import tconv
from tconv import functional

FORMATS = (torch.contiguous_format, torch.channels_last)


def sample(dtype=torch.float32, batch=2):
    tensors = torch.randn(batch, 4, 5, 6), torch.randn(4, 3, 3, 3), torch.randn(6)
    return [tensor.to(dtype) for tensor in tensors]


GEOMETRY = {"stride": 2, "padding": (1, 0), "output_padding": 1, "groups": 2, "dilation": (1, 2)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["direct", "dispatched", "unbatched"])
def test_forward_and_both_gradients_run_ours(run, dtype, way):
    input, weight, bias = (tensor.requires_grad_() for tensor in sample(dtype))
    given = input[0] if way == "unbatched" else input
    with torch.autograd.profiler.profile(enabled=way == "dispatched"):
        output = tconv.conv_transpose2d(given, weight, bias, **GEOMETRY)
        output.sum().backward()
    assert run.calls == ["forward", "input_gradient", "weight_gradient"]
    assert torch.equal(output, F.conv_transpose2d(given, weight, bias, **GEOMETRY))


SOUND = [
    {"output_padding": (1, 0), "dilation": (2, 1)},  # smaller than one of stride and dilation
    {"output_padding": (0, 1), "stride": (1, 2)},
    {"padding": (3, 3)},  # one pixel left of the height
    {"groups": 4},
    {"stride": [2], "padding": torch.tensor(1)},
]


@pytest.mark.parametrize("options", SOUND, ids=str)
def test_calls_at_the_edge_of_what_is_sound_run_ours(run, options):
    input, weight, _ = sample()
    actual = tconv.conv_transpose2d(input, weight, None, **options)
    assert run.calls == ["forward"]
    if "padding" in options:  # torch 2.9 reads no tensor here, 2.13 does
        options = {**options, "padding": torch.as_tensor(options["padding"]).tolist()}
    assert torch.equal(actual, F.conv_transpose2d(input, weight, None, **options))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_pending_negation_is_done_before_a_kernel_reads(run, index):
    tensors = sample()
    negated = torch.complex(tensors[index], -tensors[index]).conj().imag
    assert negated.is_neg() and torch.equal(negated, tensors[index])
    expected = F.conv_transpose2d(*tensors, **GEOMETRY)
    tensors[index] = negated
    actual = tconv.conv_transpose2d(*tensors, **GEOMETRY)
    assert torch.equal(actual, expected)
    assert run.calls == ["forward"]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_tangent_is_computed_by_ours(run, index):
    tensors = [tensor.double() for tensor in sample()]
    tangent = torch.randn_like(tensors[index])

    def derivative(function):
        with forward_ad.dual_level():
            duals = list(tensors)
            duals[index] = forward_ad.make_dual(tensors[index], tangent)
            return forward_ad.unpack_dual(function(*duals, **GEOMETRY)).tangent

    torch.testing.assert_close(derivative(tconv.conv_transpose2d), derivative(F.conv_transpose2d))
    # The bias's tangent is only repeated.
    assert run.calls == ["forward"] * (1 if index == 2 else 2)


def test_without_the_emulator_a_cpu_call_never_comes_here(run, monkeypatch):
    monkeypatch.setenv("TCONV_EMULATE", "0")
    tconv.conv_transpose2d(*sample(), **GEOMETRY)
    assert run.calls == []


def test_a_bad_value_of_the_variable_is_refused(run, monkeypatch):
    monkeypatch.setenv("TCONV_EMULATE", "yes")
    with pytest.raises(ValueError, match="TCONV_EMULATE"):
        tconv.conv_transpose2d(*sample(), **GEOMETRY)


@pytest.mark.parametrize("x_format", FORMATS)
@pytest.mark.parametrize("w_format", FORMATS)
@pytest.mark.parametrize("loss", ["sum", "random"])
@pytest.mark.parametrize("kernel", [3, 1])
def test_memory_formats(run, x_format, w_format, loss, kernel):
    layer = tconv.ConvTranspose2d(4, 6, kernel, 2, groups=2).to(memory_format=w_format)
    input = torch.randn(2, 4, 5, 6).to(memory_format=x_format).requires_grad_()
    output = layer(input)
    either = max(x_format, w_format, key=FORMATS.index)
    assert output.stride() == output.contiguous(memory_format=either).stride()
    # The sum's gradient has no layout at all: it is one number, expanded.
    grad = torch.randn(output.shape) if loss == "random" else torch.ones(()).expand(output.shape)
    # Not through .grad, which takes its leaf's layout whatever it is given.
    grad_input, grad_weight = torch.autograd.grad(output, (input, layer.weight), grad)
    assert grad_weight.stride() == layer.weight.stride()
    assert grad_input.stride() == torch.empty(2, 4, 5, 6).to(memory_format=either).stride()
    assert run.calls == ["forward", "input_gradient", "weight_gradient"]


def test_nothing_to_compute_launches_nothing(run):
    results = []
    for function in (F.conv_transpose2d, tconv.conv_transpose2d):
        torch.manual_seed(0)
        leaves = [tensor.requires_grad_() for tensor in sample(batch=0)]
        output = function(*leaves, **GEOMETRY)
        output.sum().backward()
        results.append([output, *(leaf.grad for leaf in leaves)])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected) and actual.shape == expected.shape
    assert run.calls == []


def test_the_operator_makes_an_output_without_pixels(run):
    input, weight = torch.randn(2, 4, 2, 2), torch.randn(4, 3, 3, 3, requires_grad=True)
    geometry = ((1, 1), (2, 1), (0, 0), (1, 1), 1)
    output = torch.ops.tconv.forward(input, weight, None, *geometry)
    assert output.shape == (2, 3, 0, 2)
    output.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert run.calls == []


def test_a_kernels_error_reaches_the_caller(run, monkeypatch):
    def fail(*arguments):
        raise tconv.CompileError("no such instruction", log="error: line 1")

    monkeypatch.setattr(run, "forward", fail)
    for context in (torch.no_grad(), torch.enable_grad(), torch.profiler.profile()):
        with context, pytest.raises(tconv.CompileError, match="no such instruction"):
            tconv.conv_transpose2d(*sample(), **GEOMETRY)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_a_dtype_without_kernels_goes_to_pytorch_and_says_so_once(run, dtype, caplog, monkeypatch):
    monkeypatch.setattr(functional, "_warned", set())
    arguments = sample(dtype)
    expected = F.conv_transpose2d(*arguments, **GEOMETRY)
    with caplog.at_level(logging.WARNING, logger="tconv"):
        for _ in range(3):
            assert torch.equal(tconv.conv_transpose2d(*arguments, **GEOMETRY), expected)
    assert run.calls == []
    assert [record.name for record in caplog.records] == ["tconv"]
    assert str(dtype) in caplog.text
    monkeypatch.setenv("TCONV_STRICT", "1")
    with pytest.raises(RuntimeError, match="TCONV_STRICT=1"):
        tconv.conv_transpose2d(*arguments, **GEOMETRY)


def test_strict_leaves_what_we_serve_and_what_pytorch_refuses_alone(run, monkeypatch):
    monkeypatch.setenv("TCONV_STRICT", "1")
    input, weight, bias = sample()
    tconv.conv_transpose2d(input, weight, bias, **GEOMETRY)
    assert run.calls == ["forward"]
    with pytest.raises(RuntimeError, match="to have 4 channels, but got 3 channels instead"):
        tconv.conv_transpose2d(input[:, :3], weight, bias, **GEOMETRY)


@pytest.mark.parametrize("options", [{}, GEOMETRY, {"groups": 4}], ids=str)
def test_calls_like_one_before_are_pytorchs(run, options):
    for needs in ((False, False), (True, False), (False, True), (True, True)):
        input, weight, _ = sample()
        input.requires_grad_(needs[0])
        weight.requires_grad_(needs[1])
        bias = torch.randn(weight.shape[1] * options.get("groups", 1))
        output = tconv.conv_transpose2d(input, weight, bias, **options)
        assert torch.equal(output, F.conv_transpose2d(input, weight, bias, **options))
        assert output.requires_grad == any(needs)
        if any(needs):
            output.sum().backward()
            leaves = [tensor for tensor in (input, weight) if tensor.requires_grad]
            expected = F.conv_transpose2d(input, weight, bias, **options).sum()
            for leaf, gradient in zip(leaves, torch.autograd.grad(expected, leaves), strict=True):
                torch.testing.assert_close(leaf.grad, gradient)
    assert len(run.remembered) == 1
    assert run.calls.count("forward") == 4
    assert run.calls.count("input_gradient") == run.calls.count("weight_gradient") == 2


def test_the_operator_by_its_name_makes_no_call_known(run):
    """Nobody has checked its arguments, nor those of its gradients' gradients."""
    input, weight, _ = (tensor.double().requires_grad_() for tensor in sample())
    output = torch.ops.tconv.forward(input, weight, None, [2, 2], [1, 1], [0, 0], [1, 1], 1)
    gradients = torch.autograd.grad(output.pow(2).sum(), (input, weight), create_graph=True)
    sum(gradient.pow(2).sum() for gradient in gradients).backward()
    assert run.calls.count("forward") > 1
    assert not run.remembered


def test_calls_like_one_before_see_what_has_changed_around_them(run, monkeypatch):
    arguments = sample()
    plain = tconv.conv_transpose2d(*arguments, **GEOMETRY)
    with torch.autocast("cpu", torch.bfloat16):
        assert tconv.conv_transpose2d(*arguments, **GEOMETRY).dtype == torch.bfloat16
    assert tconv.conv_transpose2d(*arguments, **GEOMETRY).dtype == torch.float32
    with torch.inference_mode():
        assert tconv.conv_transpose2d(*arguments, **GEOMETRY).is_inference()
    mapped = torch.vmap(lambda x: tconv.conv_transpose2d(x, *arguments[1:], **GEOMETRY))
    torch.testing.assert_close(mapped(arguments[0][None])[0], plain)
    calls = len(run.calls)
    monkeypatch.setenv("TCONV_EMULATE", "0")
    assert torch.equal(tconv.conv_transpose2d(*arguments, **GEOMETRY), plain)
    assert len(run.calls) == calls


def test_autocast_reaches_the_kernels_in_its_dtype(run, monkeypatch):
    seen = []
    forward = run.forward

    def note(input, weight, bias, *rest):
        seen.append((input.dtype, weight.dtype, bias.dtype))
        return forward(input, weight, bias, *rest)

    monkeypatch.setattr(run, "forward", note)
    input, weight, bias = sample()
    with torch.autocast("cpu", torch.bfloat16):
        output = tconv.conv_transpose2d(input.half(), weight, bias, **GEOMETRY)
    assert seen == [(torch.bfloat16,) * 3]
    assert output.dtype == torch.bfloat16


def test_autocast_sums_the_bias_gradient_in_the_biass_own_dtype(run):
    input, weight, bias = (operand.requires_grad_() for operand in sample())
    for _ in range(2):  # the second is a call like one before
        bias.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            output = tconv.conv_transpose2d(input, weight, bias, **GEOMETRY)
        gradient = torch.randn_like(output)
        output.backward(gradient)
        assert torch.equal(bias.grad, gradient.sum((0, 2, 3), dtype=torch.float32))


def test_a_training_step_is_pytorchs(run):
    results = []
    for module in (nn, tconv):
        torch.manual_seed(5)
        model = nn.Sequential(
            module.ConvTranspose2d(3, 8, 4, 2, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            module.ConvTranspose2d(8, 2, 3, 2, 1, 1),
        ).double()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(2, 3, 4, 4, dtype=torch.float64)).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        results.append((losses, list(model.parameters())))
    for expected, actual in itertools.chain(*(zip(*part) for part in zip(*results))):  # noqa: B905
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    # The model's own input needs no gradient.
    assert run.calls.count("input_gradient") == 3
    assert run.calls.count("weight_gradient") == run.calls.count("forward") == 6


EMULATED = """
import torch, tconv
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from tconv.memory_format import is_channels_last

formats = (torch.contiguous_format, torch.channels_last)
options = {"stride": 2, "output_padding": 1, "groups": 2}
geometry = ((2, 2), (0, 0), (1, 1), (1, 1), 2)
for w_format in formats:
    input = torch.randn(2, 4, 3, 5, requires_grad=True)
    # A 1x1 kernel's strides fit both formats.
    weight = torch.randn(4, 2, 1, 1).to(memory_format=w_format).requires_grad_()
    outcomes = []
    for function in (F.conv_transpose2d, tconv.conv_transpose2d):
        output = function(input, weight, None, **options)
        outcomes.append((output, *torch.autograd.grad(output.sin().sum(), (input, weight))))
    torch.testing.assert_close(outcomes[1], outcomes[0])
    output, grad_input, grad_weight = outcomes[1]
    assert output.grad_fn.name() == "TconvForwardBackward"
    assert grad_weight.stride() == weight.stride()
    with FakeTensorMode() as mode:
        x, w, y = (mode.from_tensor(tensor) for tensor in (input, weight, output))
        last = is_channels_last(weight)
        fakes = (
            torch.ops.tconv.forward(x, w, None, *geometry),
            torch.ops.tconv.input_gradient(y, w, (3, 5), *geometry),
            torch.ops.tconv.weight_gradient(x, y, (1, 1), *geometry, last),
        )
    for real, fake in zip(outcomes[1], fakes, strict=True):
        assert (real.shape, real.stride()) == (fake.shape, fake.stride())
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs a C++ compiler")
def test_emulated_kernels_keep_the_fakes_promises():
    """The layer on the real tconv.run, in a process of its own."""
    kept = ("PATH", "HOME", "TCONV_CACHE_DIR", "OMP_NUM_THREADS")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TCONV_EMULATE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", EMULATED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
