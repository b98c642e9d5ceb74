"""Compiling ahead of time: the calls found are those made, their kernels are in the cache."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import tconv
from tconv import aten, choice, cli, filling, sizes
from tconv.errors import CompileError, TconvError
from tconv.filling import fill
from tconv.jit import cache as caches
from tconv.jit import compile as compiling
from tconv.jit.cache import default_cache
from tconv.jit.compile import compile_cuda
from tconv.jit.target import Target
from tconv.layers import DIRECTIONS, Layer
from tconv.plan import make_plan, plan
from tconv.recording import record
from tconv.run import execution


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache of the test's own."""
    monkeypatch.setenv("TCONV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(caches, "_caches", {})
    monkeypatch.setattr(caches, "_warned", set())
    return tmp_path / "cache"


@pytest.fixture
def nothing_compiles(monkeypatch):
    """What is not in the cache is an error."""

    def refuse(stem, *_):
        raise AssertionError(f"{stem} is compiled")

    monkeypatch.setattr(compiling, "run_nvrtc", refuse)


def up(in_channels=16, out_channels=8, kernel_size=4, stride=2, padding=1, **options):
    return tconv.ConvTranspose2d(in_channels, out_channels, kernel_size, stride, padding, **options)


class Views(torch.nn.Module):
    """Layouts that are neither contiguous nor channels_last, an input that is not on 16 bytes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = up(), up(8, 4)

    def forward(self, x):
        y = self.first(x[:, :, 1:, 1:])
        y = self.second(y.transpose(2, 3)) + self.second(y[:, :, ::2, ::2]).sum()
        return y.permute(0, 2, 3, 1) @ torch.eye(4, dtype=y.dtype)


class Autocast(torch.nn.Module):
    """Two dtypes by autocast in the forward, on the device that the examples have, or CUDA."""

    def __init__(self, device):
        super().__init__()
        self.device, self.layer = device, up()

    def forward(self, x):
        with torch.autocast(self.device, torch.bfloat16):
            low = self.layer(x)
        with torch.autocast(self.device, enabled=False):
            return {"low": low, "high": [self.layer(x.float())]}


class OnCuda(torch.nn.Module):
    """Names CUDA in every way that PyTorch has."""

    def __init__(self):
        super().__init__()
        self.layer = up()

    def forward(self, x):
        x = x.cuda().to("cuda").to(0).to(torch.device("cuda", 0)).to(device="cuda:0")
        with torch.device("cuda"):
            x = x + torch.ones(1)
        return self.layer(x + torch.zeros(1, device="cuda"))


class Mean(torch.nn.Module):
    """By PyTorch's function, in place on its input, unbatched."""

    def forward(self, x):
        x.sub_(x.mean())
        weight = torch.ones(16, 2, 3, 3, dtype=x.dtype, requires_grad=True)
        return torch.nn.functional.conv_transpose2d(x[0], weight, groups=2)


def encoder(memory_format):
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.BatchNorm2d(16), up(), torch.nn.SiLU()
    )
    return layers.to(memory_format=memory_format)


IMAGE = torch.rand(2, 16, 9, 9)
CHANNELS_LAST = IMAGE.to(memory_format=torch.channels_last)

MODELS = {
    "contiguous": (lambda: encoder(torch.contiguous_format), IMAGE),
    "channels_last": (lambda: encoder(torch.channels_last), CHANNELS_LAST),
    "channels_last weights": (lambda: encoder(torch.channels_last), IMAGE),
    "float64": (lambda: up(groups=4, bias=False).double(), IMAGE.double()),
    "bfloat16": (lambda: up().bfloat16(), IMAGE.bfloat16()),
    "views": (Views, IMAGE),
    "shared": (lambda: torch.nn.Sequential(*[up(16, 16, 3, 1, 1)] * 2), IMAGE),
    "frozen": (lambda: torch.nn.Sequential(up(16, 16), up()).requires_grad_(False), IMAGE),
    "autocast": (lambda: Autocast("cpu"), IMAGE),
    "on 16 bytes": (up, torch.rand(2, 16, 8, 8)),
    "not on 16 bytes": (up, torch.rand(2 * 16 * 64 + 1)[1:].view(2, 16, 8, 8)),
    "expanded": (up, torch.rand(2, 16, 9, 1).expand(2, 16, 9, 9)),
    "unbatched": (up, IMAGE[0]),
    "in place": (Mean, IMAGE),
    "deep": (lambda: torch.nn.Sequential(up(), up(8, 8)), IMAGE),
}


@pytest.fixture
def problems_of_a_step(monkeypatch):
    """Runs a model and its backward on real tensors; returns the problems of its calls."""
    seen = {}

    def forward(call, *arguments):
        seen[call.problem] = None
        return aten.forward(*arguments)

    def input_gradient(call, *arguments):
        seen[call.problem] = None
        return aten.input_gradient(*arguments)

    def weight_gradient(call, *arguments):
        seen[call.problem] = None
        return aten.weight_gradient(*arguments)

    for stand_in in (forward, input_gradient, weight_gradient):
        monkeypatch.setattr(execution, stand_in.__name__, stand_in)

    def step(model, example, backward):
        example = example.detach().requires_grad_(backward)
        with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(backward):
            patch.setenv("TCONV_EMULATE", "1")
            outputs = model(example * 1 if isinstance(model, Mean) else example)
            if backward:
                leaves = torch.utils._pytree.tree_leaves(outputs)
                torch.autograd.backward(leaves, [torch.rand_like(leaf) for leaf in leaves])
        return set(seen)

    return step


@pytest.mark.parametrize("backward", (True, False), ids=("backward", "forward"))
@pytest.mark.parametrize("name", MODELS)
def test_the_calls_recorded_are_those_made(name, backward, problems_of_a_step):
    make, example = MODELS[name]
    model = make()
    with tconv.enable():
        recorded = record(model, (example,), {}, backward=backward, autocast=None)
        made = problems_of_a_step(model, example, backward)
    assert len(recorded) == len(set(recorded))
    assert made
    assert set(recorded) == made
    assert {problem.direction for problem in made} <= set(DIRECTIONS if backward else ["forward"])


def test_autocast_of_cuda_is_recorded_without_a_gpu():
    def recorded(model, **options):
        options = {"backward": True, "autocast": None, **options}
        return set(record(model, (IMAGE,), {}, **options))

    model = Autocast("cuda")
    assert recorded(model) == recorded(Autocast("cpu"))
    # A context around the call that PyTorch does not turn off, as on a machine with a GPU.
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        around = recorded(model.layer)
    finally:
        torch.set_autocast_dtype("cuda", torch.float16)
        torch.set_autocast_enabled("cuda", False)
    assert {problem.dtype for problem in around} == {"bfloat16"}
    assert around == recorded(model.layer, autocast=torch.bfloat16)
    assert {p.dtype for p in recorded(model.layer, autocast=True)} == {"float16"}
    assert {p.dtype for p in recorded(model.layer, autocast=False)} == {"float32"}


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch leaves autocast on")
def test_autocast_that_pytorch_turned_off_is_an_error():
    with torch.autocast("cuda", torch.bfloat16):
        with pytest.raises(TconvError, match=r"pass autocast=torch\.bfloat16"):
            record(up(), (IMAGE,), {}, backward=True, autocast=None)
        assert record(up(), (IMAGE,), {}, backward=True, autocast=False)


def test_a_model_may_name_cuda_and_lie_on_meta():
    expected = record(up(), (IMAGE,), {}, backward=True, autocast=None)
    assert record(OnCuda(), (IMAGE,), {}, backward=True, autocast=None) == expected
    with torch.device("meta"):
        model, example = up(), torch.empty(2, 16, 9, 9)
        assert record(model, (example,), {}, backward=True, autocast=None) == expected
        # Far more than any machine's memory.
        huge = torch.nn.Sequential(torch.nn.Linear(9, 1 << 40), torch.nn.Linear(1 << 40, 9), model)
    assert record(huge, (example,), {}, backward=True, autocast=None) == expected


def test_tf32_is_that_of_the_flags():
    def math():
        return {
            problem.math for problem in record(up(), (IMAGE,), {}, backward=True, autocast=None)
        }

    assert "tf32" in math()
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert math() == {"ieee"}


def test_the_model_is_left_as_it_was():
    class Remembers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.last, self.list = encoder(torch.contiguous_format), None, []
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x, *, scale):
            self.calls += 1
            self.last = torch.nn.functional.dropout(x)
            self.list.append(self.last)
            return self.layers(self.last) * scale

    model = Remembers()
    example = IMAGE.clone().requires_grad_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    keywords = {"scale": torch.ones(1)}
    assert len(record(model, (example,), keywords, backward=True, autocast=None)) == 3
    assert torch.equal(torch.get_rng_state(), random)
    assert model.last is None
    assert model.list == []
    assert example.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, before[name])
    model(IMAGE, scale=2)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: torch.nn.ConvTranspose2d(16, 8, 4), r"but 1 torch.nn.ConvTranspose2d: call tconv"),
        (
            lambda: torch.nn.Sequential(torch.nn.Flatten(2), torch.nn.ConvTranspose1d(16, 8, 4)),
            r"but 1 torch.nn.ConvTranspose1d: call tconv.convert\(model\)",
        ),
        (
            lambda: torch.nn.Sequential(
                torch.nn.ConvTranspose2d(16, 8, 4),
                torch.nn.ConvTranspose2d(8, 8, 4),
                torch.nn.Flatten(2),
                torch.nn.ConvTranspose1d(8, 8, 4),
            ),
            "but 1 torch.nn.ConvTranspose1d and 2 torch.nn.ConvTranspose2d: call tconv",
        ),
        (lambda: torch.nn.Conv2d(16, 8, 4), "reaches no tconv.ConvTranspose1d or tconv.ConvTran"),
        (lambda: torch.nn.Sequential(NoImages(), up()), "reaches no tconv.ConvTranspose1d or tc"),
        (lambda: up(17), "run the model's forward on fake tensors: RuntimeError: Given transposed"),
        (lambda: Item(), r"DataDependentOutput.* may depend on them .*precompile --layer"),
        (lambda: torch.nn.Sequential(up(), Detached()), "pass backward=False"),
        (lambda: BadBackward(), "model's backward on fake tensors: ValueError: no gradient"),
    ],
)  # fmt: skip
def test_a_model_that_fails_is_one_error_and_nothing_is_written(
    model, says, folder, nothing_compiles
):
    with pytest.raises(TconvError, match=says) as raised:
        tconv.precompile(model(), IMAGE, arch="sm_80")
    assert "\n" not in str(raised.value)
    assert not folder.exists()


class Item(torch.nn.Module):
    def forward(self, x):
        return tconv.conv_transpose2d(x, torch.ones(16, 1, 2, 2))[: int(x.sum().item())]


class NoImages(torch.nn.Module):
    def forward(self, x):
        return x[:0]


class Detached(torch.nn.Module):
    def forward(self, x):
        return x.detach()


class BadBackward(torch.nn.Module):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("no gradient")

    def __init__(self):
        super().__init__()
        self.layer = up()

    def forward(self, x):
        return self.Function.apply(self.layer(x))


@pytest.mark.parametrize(
    ("arch", "says"),
    [
        ("sm_91", "got 'sm_91'"),
        (["sm_80", "hopper"], "got 'hopper'"),
        ("sm_90a:many", "as in sm_90a:114, got 'sm_90a:many'"),
        ("sm_90a:0", "got 'sm_90a:0'"),
        ([], "got none"),
    ],
)
def test_an_unknown_architecture_is_an_error_before_any_work(arch, says, folder):
    with pytest.raises(ValueError, match=says):
        tconv.precompile(Unreached(), IMAGE, arch=arch)
    assert not folder.exists()


class Unreached(torch.nn.Module):
    def forward(self, x):
        pytest.fail("the forward runs")


@pytest.mark.parametrize(("variable", "value"), [("TCONV_TIMING", "never"), ("TCONV_DEBUG", "9")])
def test_a_wrong_variable_is_an_error_before_any_work(variable, value, folder, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"^{variable} must be 0.*, got {variable}='{value}'$"):
        tconv.precompile(Unreached(), IMAGE, arch="sm_80")
    assert not folder.exists()


def test_what_nvrtc_does_not_know_is_an_error_before_any_work(monkeypatch, nothing_compiles):
    monkeypatch.setattr(compiling, "supported_architectures", lambda: ("sm_75", "sm_80"))
    with pytest.raises(CompileError, match="kernels cannot be compiled for sm_90a"):
        tconv.precompile(up(), IMAGE, arch=("sm_80", "sm_90a"))


def test_only_a_module_is_a_model():
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, got function"):
        tconv.precompile(lambda x: x, IMAGE)


def test_kernels_are_found_by_a_second_call_and_by_the_calls_plans(folder, monkeypatch):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), up())
    example = torch.rand(2, 3, 21, 21)
    archs = ("sm_80", "sm_90:114")
    with choice.own_kernels():
        first = tconv.precompile(model, example, arch=archs)
    assert (first.calls, first.pytorchs, first.found) == (3, 0, 0)
    assert first.architectures == archs
    entries = default_cache().entries()
    choices = [entry for entry in entries if entry.metadata["kind"] == "sizes"]
    entries = [entry for entry in entries if entry not in choices]
    assert len(choices) == len(archs) * first.calls, "for sizes that are not common"
    assert first.compiled == len(entries) > 3
    assert first.nbytes == sum(entry.nbytes for entry in entries)
    assert {entry.metadata["arch"] for entry in entries} == {"sm_80", "sm_90a"}
    assert str(first.compiled) in str(first)

    monkeypatch.setattr(compiling, "run_nvrtc", None)  # fails if anything is compiled
    with choice.own_kernels():
        again = tconv.precompile(model, example, arch=archs)
    assert (again.compiled, again.found, again.nbytes) == (0, first.compiled, first.nbytes)
    keys = set()
    for target in (Target.named("sm_80"), Target.parse("sm_90a:114")):
        for problem in record(model, (example,), {}, backward=True, autocast=None):
            others = sizes.kernels(problem, target)
            plans = [make_plan(other.like, target, other) for other in others]
            for one in (sizes.planned(problem, target), *plans):
                for source in one.sources:
                    compiled = compile_cuda(source, target.arch)
                    assert compiled.cached
                    keys.add(compiled.key)
    assert keys == {entry.key for entry in entries}


def test_processes_share_the_search_for_kernels_of_many_layers(monkeypatch):
    monkeypatch.setattr(filling, "LEAST_SEARCHES", 1)
    target = Target.named("sm_80")
    layers = [Layer.parse(text, "1x19x19") for text in ("2,3,3", "3,2,3", "2,2,5")]
    problems = [layer.problem("weight_gradient") for layer in layers]
    assert not any(sizes.are_found(problem, target) for problem in problems)
    filling._search(problems, [target], jobs=1)  # one gains nothing
    assert not any(sizes.are_found(problem, target) for problem in problems)
    filling._search(problems, [target], jobs=2)
    monkeypatch.setattr(sizes, "_find", lambda *_: pytest.fail("searched for here"))
    assert all(sizes.kernels(problem, target) for problem in problems)


def test_calls_of_pytorchs_operator_need_no_kernel(nothing_compiles):
    layer = up().bfloat16()
    problems = record(layer, (IMAGE.bfloat16(),), {}, backward=True, autocast=None)
    general = [p for p in problems if plan(p, Target.named("sm_90a")).stem.startswith("general_")]
    assert general
    filled = fill(general, {"sm_90a": Target.named("sm_90a")})
    assert (filled.calls, filled.pytorchs, filled.compiled) == (len(general), len(general), 0)
    with choice.own_kernels(), pytest.raises(AssertionError, match="is compiled"):
        fill(general, {"sm_90a": Target.named("sm_90a")})


def test_without_gradients_the_forward_alone_is_compiled():
    layer = up()
    with torch.no_grad():
        assert tconv.precompile(layer, IMAGE, arch="sm_80").calls == 1
    assert tconv.precompile(layer, IMAGE, arch="sm_80", backward=False).calls == 1


def test_a_kernel_that_does_not_compile_leaves_the_others(monkeypatch, folder):
    layer = Layer.parse("16,8,4,2,1", "1x8x8")
    problems = [layer.problem(direction) for direction in DIRECTIONS]
    run = compiling.run_nvrtc

    def fail_for_one(stem, *rest):
        if stem == "general_input_gradient":
            raise CompileError(f"{stem} did not compile")
        return run(stem, *rest)

    monkeypatch.setattr(compiling, "run_nvrtc", fail_for_one)
    with choice.own_kernels(), pytest.raises(CompileError, match="plan: general_input_gradient"):
        fill(problems, {"sm_80": Target.named("sm_80")}, jobs=1)
    assert default_cache().entries()
    assert not any(entry.damaged for entry in default_cache().entries())
    assert not [path for path in folder.iterdir() if path.suffix != caches.SUFFIX]


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("TCONV_CACHE", "0", "TCONV_CACHE=0 turns off"),
        ("TCONV_CACHE_LIMIT", "100", "did not keep 1 of 1 kernel: TCONV_CACHE_LIMIT"),
        ("TCONV_CACHE_LIMIT", "0", "TCONV_CACHE_LIMIT must be"),
    ],
)
def test_a_cache_that_keeps_nothing_is_an_error(variable, value, says, monkeypatch):
    monkeypatch.setenv(variable, value)
    problem = Layer.parse("2,2,2,2", "1x4x4").problem("forward")
    with choice.own_kernels(), pytest.raises((TconvError, ValueError), match=says):
        fill([problem], {"sm_80": Target.named("sm_80")})


def test_a_folder_that_others_can_write_to_is_an_error(folder, nothing_compiles):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(TconvError, match="chmod 700"):
        tconv.precompile(up(), IMAGE, arch="sm_80")


def test_command_compiles_for_each_size_architecture_and_dtype(capsys, tmp_path):
    def run(*words):
        assert cli.main(["precompile", *words]) == 0
        return capsys.readouterr().out

    words = ("--layer", "8,4,3", "--input", "1x8x8,2x16x16", "--direction", "forward")
    words += ("--arch", "sm_80,sm_86", "--dtype", "float32,float64", "--json")
    done = json.loads(run(*words))
    assert (done["calls"], done["architectures"], done["found"]) == (4, ["sm_80", "sm_86"], 0)
    assert done["compiled"] == len(default_cache().entries())
    path = tmp_path / "layers.json"
    path.write_text(json.dumps([Layer.parse("8,4,3", "1x8x8").record()]))
    text = run("--layers", str(path), "--direction", "forward", "--arch", "sm_80", "-j", "1")
    assert "1 call for sm_80: 0 kernels compiled, 1 already there" in text


def test_command_and_model_find_the_same_calls(monkeypatch):
    seen = []
    monkeypatch.setattr(filling, "fill", lambda problems, *_, **__: seen.append(problems))
    layer = Layer.parse("16,8,4,2,1", "2x9x9")
    for layout, example in (("contiguous", IMAGE), ("channels_last", CHANNELS_LAST)):
        cli.main(["precompile", "--layer", layer.text, "--input", "2x9x9", "--layout", layout])
        tconv.precompile(up(), example)
        of_command, of_model = seen[-2:]
        assert set(of_command) == set(of_model)


def test_interrupted_it_leaves_whole_kernels(folder):
    command = [sys.executable, "-m", "tconv", "precompile", "--layer", "16,8,4,2,1"]
    started = subprocess.Popen(
        [*command, "--layout", "all", "--dtype", "all", "--arch", "sm_80,sm_86,sm_89", "-j", "1"],
        env=os.environ | {"TCONV_STRICT": "1"},
        stderr=subprocess.PIPE,
        text=True,
        # A shell has what it starts in the background ignore it, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    until = time.monotonic() + 60
    while not list(folder.glob(f"*{caches.SUFFIX}")) and time.monotonic() < until:
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=60)
    assert (started.returncode, errors) == (130, "")
    entries = default_cache().entries()
    assert 0 < len(entries) < 10
    assert not any(entry.damaged for entry in entries)
    assert len(list(folder.iterdir())) == len(entries)
