"""Leaving the process: what a model with our layers becomes for tools that know ATen alone."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import tconv


def network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        tconv.ConvTranspose2d(4, 6, 4, 2, 1),
        nn.ReLU(),
        tconv.ConvTranspose2d(6, 2, 3, 2, 1, 1, groups=2, dilation=2, bias=False),
    ).eval()


class Flat(nn.Module):
    """1-d, with and without a batch."""

    def __init__(self):
        super().__init__()
        self.layer = tconv.ConvTranspose1d(3, 4, 4, 2, 1)

    def forward(self, input):
        return self.layer(input) + self.layer(input[0])


def cases():
    return [(network(), torch.randn(2, 3, 7, 9)), (Flat().eval(), torch.randn(2, 3, 8))]


def open_sizes(input):
    return (
        {0: torch.export.Dim("batch", min=1, max=64), 2: torch.export.Dim("size", min=4, max=64)},
    )


def targets(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("model, input", cases(), ids=["2d", "1d"])
def test_a_decomposed_program_holds_aten_and_loads_without_tconv(model, input, tmp_path):
    program = torch.export.export(model, (input,), dynamic_shapes=open_sizes(input))
    assert "tconv.forward.default" in targets(program.graph)
    program = program.run_decompositions(tconv.decompositions())
    found = targets(program.graph)
    assert found.count("aten.convolution.default") == 2
    assert not any(name.startswith("tconv") for name in found)
    path = tmp_path / "program.pt2"
    torch.export.save(program, path)
    other = torch.randn(3, 3, 6, *input.shape[3:])
    torch.save(other, tmp_path / "input.pt")
    script = (
        "import sys, torch\n"
        f"program, input = torch.export.load({str(path)!r}), torch.load('input.pt')\n"
        "torch.save(program.module()(input).detach(), 'output.pt')\n"
        "assert 'tconv' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "output.pt"), model(other).detach())


def test_core_aten_with_pytorchs_own_table():
    table = torch.export.default_decompositions()
    table.update(tconv.decompositions())
    model, input = cases()[0]
    program = torch.export.export(model, (input,)).run_decompositions(table)
    found = targets(program.graph)
    assert found.count("aten.convolution.default") == 3 and "tconv.forward.default" not in found
    torch.testing.assert_close(program.module()(input), model(input))


def test_gradients_of_every_order_decompose():
    model, input = cases()[0]
    parameters = dict(model.named_parameters())

    def loss(parameters, input):
        return torch.func.functional_call(model, parameters, (input,)).sin().sum()

    def penalty(parameters, input):
        first = torch.func.grad(loss, (0, 1))(parameters, input)
        return sum(one.pow(2).sum() for one in [*first[0].values(), first[1]])

    second = torch.func.grad(penalty)
    kept = targets(make_fx(second)(parameters, input).graph)
    names = ("forward", "input_gradient", "weight_gradient")
    assert all(f"tconv.{name}.default" in kept for name in names)
    graph = make_fx(second, decomposition_table=tconv.decompositions())(parameters, input)
    found = targets(graph.graph)
    assert not any(name.startswith("tconv") for name in found)
    assert {"aten.convolution.default", "aten.convolution_backward.default"} < set(found)
    torch.testing.assert_close(graph(parameters, input), second(parameters, input))


def test_torch_compile_keeps_our_operators():
    from torch._inductor.decomposition import select_decomp_table

    ours = tconv.decompositions().keys()
    assert not ours & torch.export.default_decompositions().keys()
    assert not ours & select_decomp_table().keys()
    assert not torch._decomp.get_decompositions(list(ours))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++")
def test_torch_compile_where_ci_is_set(monkeypatch):
    # Inductor then refuses operators that could be decomposed.
    monkeypatch.setenv("CI", "true")
    model, input = cases()[0]
    torch.testing.assert_close(torch.compile(model)(input), model(input))


def test_fake_tensors_with_open_sizes_take_our_fakes(monkeypatch):
    # Where PyTorch decomposes for them, `aten.convolution` is called, which guards these sizes.
    monkeypatch.setattr(torch, "convolution", None)
    input, weight = torch.randn(2, 3, 5, 7), torch.randn(3, 4, 3, 3)
    traced = make_fx(lambda *tensors: tconv.conv_transpose2d(*tensors), tracing_mode="symbolic")
    graph = traced(input, weight)
    assert "tconv.forward.default" in targets(graph.graph)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("model, input", cases(), ids=["2d", "1d"])
@pytest.mark.parametrize("exported", [False, True], ids=["model", "program"])
def test_onnx(model, input, exported):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    sizes = open_sizes(input)
    flagged = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)
    if exported or not flagged:
        export = torch.export.export(model, (input,), dynamic_shapes=sizes)
        if not flagged:  # the exporter does not say that it traces: docs/other-tools.md
            export = export.run_decompositions(tconv.decompositions())
        program = torch.onnx.export(export, dynamo=True, verbose=False)
    else:
        program = torch.onnx.export(
            model, (input,), dynamo=True, dynamic_shapes=sizes, verbose=False
        )
    kinds = [node.op_type for node in program.model.graph]
    assert kinds.count("ConvTranspose") == 2
    file = io.BytesIO()
    program.save(file)
    session = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    (name,) = [one.name for one in session.get_inputs()]
    for one in (input, torch.randn(3, 3, 6, *input.shape[3:])):
        (output,) = session.run(None, {name: one.numpy()})
        torch.testing.assert_close(torch.from_numpy(output), model(one).detach())


def test_a_reverted_model_leaves_nothing_of_ours():
    model, input = cases()[0]
    expected = model(input)
    assert tconv.revert(model) == 2
    program = torch.export.export(model, (input,))
    assert not any(name.startswith("tconv") for name in targets(program.graph))
    torch.testing.assert_close(program.module()(input), expected)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles with g++")
def test_an_aotinductor_package_runs_our_operator_where_tconv_is_loaded(tmp_path):
    model, input = cases()[0]
    path = str(tmp_path / "model.pt2")
    program = torch.export.export(model, (input,))
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(input), model(input))
    script = f"import torch; torch._inductor.aoti_load_package({path!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode and "tconv::forward" in done.stderr
