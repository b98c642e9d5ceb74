"""Exported files on the device: compiled by load_inline, compared with `Model`, trained."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from exported import KERNELBENCH, PROBLEMS, assert_right, load, problem
from layer_cases import CORNERS, LAYOUTS, Case, operands, random_cases
from tconv.export import Layer, export_file

TOLERANCE = 1e-4  # KernelBench's atol and rtol for float32
SEEDS = (42, 1, 2, 3, 4)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Large enough that the engine's kernels are planned in all three directions.
OF_16_BITS = Layer(64, 48, (4, 4), (2, 2), (1, 1), size=(64, 72), batch=8)


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """Path of each exported file by name, all compiled, side by side."""
    folder = tmp_path_factory.mktemp("exported")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
    paths = {"layer": folder / "layer.py", "decoder_block": folder / "decoder_block.py"}
    layer = Layer(24, 20, (3, 4), stride=(2, 1), padding=(1, 1), size=(17, 19), batch=2)
    export_file(None, layer, paths["layer"])
    export_file(PROBLEMS / "decoder_block.py", None, paths["decoder_block"])
    for dtype in ("float16", "bfloat16"):
        paths[dtype] = folder / f"{dtype}.py"
        export_file(None, OF_16_BITS, paths[dtype], dtype=dtype)
    for number in KERNELBENCH:
        paths[number] = folder / f"model_new_{number}.py"
        export_file(problem(number), None, paths[number])
    running = [
        subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for path in paths.values()
    ]
    for process, path in zip(running, paths.values(), strict=True):
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, f"{path}:\n{output.decode()[-8000:]}"
    return paths


@pytest.fixture(scope="session")
def general(exported):
    """One exported file's module, for calls that its planned kernels were not made for."""
    return load(exported["layer"])


@pytest.fixture
def full_float32():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def milliseconds(function, *arguments) -> float:
    """The median of 20 calls."""
    for _ in range(3):
        function(*arguments)
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function(*arguments)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


@pytest.mark.slow
@pytest.mark.parametrize("number", KERNELBENCH)
@torch.no_grad()
def test_kernelbench_problems(number, exported, capsys):
    given, made = load(problem(number)), load(exported[number])
    arguments = given.get_init_inputs()
    worst = 0.0
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = given.Model(*arguments).cuda()
        torch.manual_seed(seed)
        new = made.ModelNew(*arguments).cuda()
        for (name, value), (other_name, other) in zip(
            model.state_dict().items(), new.state_dict().items(), strict=True
        ):
            assert name == other_name and torch.equal(value, other)
        (x,) = (value.cuda() for value in given.get_inputs())
        want, got = model(x), new(x)
        worst = max(worst, float((want - got).abs().max()))
        assert torch.allclose(want, got, atol=TOLERANCE, rtol=TOLERANCE), (seed, worst)
    times = milliseconds(model, x), milliseconds(new, x)
    with capsys.disabled():
        print(
            f"\n#{number}: within {TOLERANCE} for {len(SEEDS)} seeds, worst difference "
            f"{worst:.1e}; Model {times[0]:.3f} ms, ModelNew {times[1]:.3f} ms"
        )


@pytest.mark.parametrize("name", ("layer", "decoder_block"))
def test_trains_a_step(name, exported):
    made = load(exported[name])
    arguments = made.get_init_inputs()
    torch.manual_seed(0)
    new = made.ModelNew(*arguments).cuda()
    given = load(PROBLEMS / "decoder_block.py").Model if name == "decoder_block" else PlainLayer
    torch.manual_seed(0)
    model = given(*arguments).cuda()
    new.load_state_dict(model.state_dict(), strict=True)
    inputs = [value.cuda().requires_grad_() for value in made.get_inputs()]
    results = []
    for module in (model, new):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        gradients = torch.autograd.grad(module(*inputs).square().mean(), inputs, retain_graph=True)
        module(*inputs).square().mean().backward()
        optimizer.step()
        results.append([*gradients, *module.parameters()])
    for want, got in zip(*results, strict=True):
        assert torch.allclose(want, got, atol=1e-4, rtol=1e-3)


class PlainLayer(torch.nn.Module):
    def __init__(self, *arguments):
        super().__init__()
        self.conv_transpose2d = torch.nn.ConvTranspose2d(*arguments)

    def forward(self, x):
        return self.conv_transpose2d(x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_layer_without_compiling_again(dtype, layout, general, full_float32):
    seed = DTYPES.index(dtype) * len(LAYOUTS) + LAYOUTS.index(layout)
    for case in (*CORNERS, *random_cases(12, seed, channels=80, size=33)):
        assert_right(general, case, operands(case, dtype, layout, "cuda", seed))


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_kernels_planned_for_16_bits(dtype, exported, monkeypatch):
    made = load(exported[str(dtype).removeprefix("torch.")])
    stems = {launch.name for call in made.PLANNED_CALLS for launch in call.launches}
    assert {"sm90_forward", "sm90_input_gradient", "sm90_weight_gradient"} <= stems
    for name in ("run_correlation", "run_reduction"):  # the general kernels
        monkeypatch.delattr(made, name)
    case = Case(8, 64, 48, 1, (64, 72), (4, 4), (2, 2), (1, 1))
    assert_right(made, case, operands(case, dtype, "contiguous", "cuda"))


def test_many_channels_and_splits(general, full_float32):
    case = Case(8, 130, 70, 2, (65, 63), (3, 3), (2, 2), (1, 1), (1, 1))
    assert_right(general, case, operands(case, torch.float32, "contiguous", "cuda"))


def test_tf32_where_it_is_allowed(general):
    for case in (
        Case(2, 32, 48, 1, (17, 19), (3, 3)),
        Case(1, 16, 15, 2, (9, 8), (4, 4), (2, 2), (1, 1)),
        Case(1, 8, 40, 1, (9, 8), (3, 3), (2, 2), (1, 1)),
    ):
        assert_right(general, case, operands(case, torch.float32, "mixed", "cuda"), tf32=True)


def test_derivatives_of_second_order(general):
    layer = general.TransposedConvolution(
        4, 6, (2, 3), stride=(2, 1), padding=(1, 0), groups=2, device="cuda", dtype=torch.float64
    )
    x = torch.randn(2, 4, 3, 4, device="cuda", dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda x, w, b: general.transposed_convolution(x, w, b, (2, 1), (1, 0), 0, 2),
        (x, layer.weight, layer.bias),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_dimension_without_compiling_again(dtype, general, full_float32):
    """Contiguous and with channels innermost; the results are contiguous."""
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
    for seed, arguments in enumerate(((48, 40, 16, 8, 4), (1, 3, 4, 2, 1), (6, 4, 5, 3, 2, 2, 2))):
        torch.manual_seed(seed)
        ours = general.TransposedConvolution1d(*arguments, device="cuda", dtype=dtype)
        theirs = torch.nn.ConvTranspose1d(*arguments).cuda().double()
        theirs.load_state_dict(ours.state_dict())
        for length in (1, 37):
            x = torch.randn(2, arguments[0], length, device="cuda", dtype=dtype)
            for given in (x, x.mT.contiguous().mT):
                results = []
                for layer, leaf in ((ours, given.clone()), (theirs, given.double())):
                    leaf.requires_grad_()
                    output = layer(leaf)
                    gradients = torch.autograd.grad(output.sum(), [leaf, *layer.parameters()])
                    results.append([output, *gradients])
                assert results[0][0].is_contiguous()
                for got, want in zip(*results, strict=True):
                    assert got.shape == want.shape and got.dtype == dtype
                    error = (got.double() - want).norm() / want.norm().clamp_min(1e-3)
                    assert error <= bound[dtype], (arguments, length, float(error))


def test_runs_on_the_current_stream(general):
    layer = general.TransposedConvolution(32, 32, 3, device="cuda")
    x = torch.zeros(8, 32, 128, 128, device="cuda")
    want = layer(torch.ones_like(x))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(1)
        got = layer(x)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, want)


def test_is_captured_in_a_graph(general):
    layer = general.TransposedConvolution(16, 8, 4, stride=2, padding=1, device="cuda")
    x = torch.randn(2, 16, 9, 9, device="cuda")
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer(x)
        x.normal_()
        graph.replay()
        assert torch.equal(captured, layer(x))


def test_autocast_and_empty_batch(general):
    layer = general.TransposedConvolution(16, 8, 4, stride=2, padding=1, device="cuda")
    x = torch.randn(2, 16, 9, 9, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    empty = layer(x[:0].requires_grad_())
    assert empty.shape == (0, 8, 18, 18)
    empty.sum().backward()
    assert layer.weight.grad.abs().max() == 0


def test_raises_what_pytorch_raises(general):
    x = torch.randn(2, 4, 6, 6, device="cuda")
    w = torch.randn(4, 3, 3, 3, device="cuda")
    for arguments in (
        (x[:, :3], w),
        (x[0, 0], w),
        (x, w, torch.randn(4, device="cuda")),
        (x, w, None, 1, 0, 1),
        (x, w, None, 1, -1),
        (x, w, None, 0),
        (x.double(), w),
        (x[:, :, :0], w),
    ):
        with pytest.raises(RuntimeError) as theirs:
            F.conv_transpose2d(*arguments)
        with pytest.raises(RuntimeError) as ours:
            general.transposed_convolution(*arguments)
        assert str(ours.value) in str(theirs.value) or str(theirs.value) in str(ours.value)
    with pytest.raises(RuntimeError, match="CUDA"):
        general.transposed_convolution(x.cpu(), w.cpu())
