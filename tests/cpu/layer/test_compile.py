"""torch.compile and torch.export: one graph, our operators in it, sizes left open."""

from __future__ import annotations

import io
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tconv


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.config.error_on_recompile = False
    torch._dynamo.reset()


def network():
    return nn.Sequential(
        tconv.ConvTranspose2d(4, 8, 4, 2, 1),
        nn.ReLU(),
        tconv.ConvTranspose2d(8, 2, 3, 2, 1, 1, groups=2),
    )


BACKENDS = ["aot_eager"]
if shutil.which("g++"):
    BACKENDS.append(pytest.param("inductor", marks=pytest.mark.thorough))


@pytest.mark.parametrize("ours", [False, True], ids=["pytorch", "ours"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_trains_at_any_size(backend, ours, request):
    run = request.getfixturevalue("run") if ours else None
    model = network()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for index, size in enumerate(((2, 4, 5, 6), (3, 4, 7, 9), (5, 4, 8, 3))):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            input = torch.randn(size).to(memory_format=memory_format)
            leaves = [input.clone().requires_grad_() for _ in range(2)]
            outputs = [compiled(leaves[0]), model(leaves[1])]
            assert outputs[0].stride() == outputs[1].stride()
            gradients = [
                torch.autograd.grad(output.sin().sum(), [leaf, *model.parameters()])
                for output, leaf in zip(outputs, leaves, strict=True)
            ]
            torch.testing.assert_close(outputs[0], outputs[1])
            torch.testing.assert_close(gradients[0], gradients[1])
        if index == 0:
            # Each of the two formats is compiled once, for all sizes.
            torch._dynamo.config.error_on_recompile = True
    if ours:
        assert run.calls.count("forward") == run.calls.count("weight_gradient") == 24


def graph_of(model, *inputs):
    """A compiled call's result, and the operators in its graph."""
    found = []

    def backend(module, example):
        found.extend(str(node.target) for node in module.graph.nodes)
        return module

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    return compiled(*inputs), found


def test_the_graph_holds_our_operator():
    model, input = network(), torch.randn(2, 4, 5, 6)
    for given in (input, input[0]):
        output, found = graph_of(model, given)
        assert found.count("tconv.forward.default") == 2
        torch.testing.assert_close(output, model(given))


def test_output_size_and_no_grad():
    layer, input = tconv.ConvTranspose2d(4, 6, 3, 2), torch.randn(2, 4, 5, 6)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(input, (12, 13)), layer(input, (12, 13)))


def test_enabling_recompiles_and_disabling_too():
    layer, input = nn.ConvTranspose2d(4, 6, 3), torch.randn(2, 4, 5, 6)
    _, found = graph_of(layer, input)
    assert "tconv.forward.default" not in found
    with tconv.enable():
        _, found = graph_of(layer, input)
        assert "tconv.forward.default" in found
    _, found = graph_of(layer, input)
    assert "tconv.forward.default" not in found


def test_a_bad_call_fails_while_compiling_with_pytorchs_message():
    layer = tconv.ConvTranspose2d(4, 6, 3)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="to have 4 channels, but got 3 channels instead"):
        compiled(torch.randn(2, 3, 5, 6))


def test_autocast_inside_and_outside_of_the_graph():
    model, input = network(), torch.randn(2, 4, 5, 6)

    def inside(input):
        with torch.autocast("cpu", torch.bfloat16):
            return model(input)

    compiled_inside = torch.compile(inside, backend="aot_eager", fullgraph=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = inside(input)
    assert expected.dtype == torch.bfloat16
    torch.testing.assert_close(compiled_inside(input), expected)
    with torch.autocast("cpu", torch.bfloat16):
        actual = compiled(input)
    torch.testing.assert_close(actual, expected)
    actual.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_transforms_inside_the_graph():
    input, weight = torch.randn(3, 1, 4, 5, 6), torch.randn(4, 2, 3, 3)

    def per_sample(function):
        def loss(weight, input):
            return function(input, weight, None, 2).pow(2).sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))

    compiled = torch.compile(
        per_sample(tconv.conv_transpose2d), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(
        compiled(weight, input), per_sample(F.conv_transpose2d)(weight, input)
    )


@pytest.mark.parametrize("strict", [False, True])
def test_export_saves_and_loads_with_open_sizes(strict):
    model = network().eval()
    sizes = {0: torch.export.Dim("batch", min=1), 2: torch.export.Dim("height", min=2, max=64)}
    program = torch.export.export(
        model, (torch.randn(2, 4, 5, 6),), dynamic_shapes=(sizes,), strict=strict
    )
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("tconv.forward.default") == 2
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for size in ((1, 4, 9, 6), (5, 4, 2, 6)):
        input = torch.randn(size)
        torch.testing.assert_close(loaded(input), model(input))


def test_export_with_a_batch_that_data_decides():
    class Selected(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = tconv.ConvTranspose2d(4, 6, 3)

        def forward(self, input, mask):
            return self.layer(input[mask.nonzero()[:, 0]])

    model, input = Selected(), torch.randn(4, 4, 5, 6)
    program = torch.export.export(model, (input, torch.ones(4)))
    mask = torch.tensor([0.0, 1.0, 1.0, 0.0])
    torch.testing.assert_close(program.module()(input, mask), model(input, mask))
