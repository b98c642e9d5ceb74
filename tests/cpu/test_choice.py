"""Who runs a CUDA call: our kernels or PyTorch's operator. A pretended GPU, on CPU tensors."""

from __future__ import annotations

import contextlib
import functools
import runpy
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tconv
from tconv import aten, choice, counts, functional, private, tuning
from tconv.choice import Ahead, Race, Timed, Verdict, verdict
from tconv.jit.target import Target
from tconv.layers import Layer
from tconv.ops import autograd
from tconv.plan import FAMILIES, candidates, make_plan, plan
from tconv.run import binding, calls, choosing, execution
from tconv.tuning import PYTORCH

ROOT = Path(__file__).resolve().parents[2]
SURE_SECONDS = choice.SURE_SECONDS
HOPPER = Target.named("sm_90a")
GEOMETRY = ((2, 2), (1, 1), (0, 0), (1, 1), 1)
SHORT, LONG = Timed(100e-6, 20e-6), Timed(2e-3, 20e-6)
CLOSE = Race(Timed(20e-6, 8e-6), Timed(60e-6, 30e-6))
"""Ours is ahead of PyTorch's, but not with casts beside it."""

SMALL = Race(Timed(100e-6, 20e-6), Timed(110e-6, 40e-6))
"""Ours is ahead of PyTorch's on both, but by less than our node costs the host."""
WATCHED = tuning.WATCHED


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    tconv.statistics(reset=True)
    monkeypatch.setattr(calls, "_known", {})
    monkeypatch.setattr(calls, "_known_gradients", {})
    monkeypatch.setattr(functional, "_left_to_pytorch", {})
    monkeypatch.setattr(functional, "_last_left", {})
    monkeypatch.setattr(functional, "_own_calls", ({}, {}))
    monkeypatch.setattr(choice, "SURE_SECONDS", 0.0)
    yield
    tuning.forget()


def fail(*_):
    pytest.fail("considered again")


class Gpu:
    """CPU tensors count as a GPU's. Our kernels are PyTorch's operator in disguise, and noted."""

    def __init__(self, monkeypatch):
        self.ran = []
        self.timed = []
        self.flags = set()
        self.name = "NVIDIA Nobody Knows"
        self.faster = "tconv"
        self.captures = False
        self.is_late = False
        monkeypatch.setenv("TCONV_EMULATE", "1")  # so that CPU tensors come as far as tconv.run
        read = calls._read
        monkeypatch.setattr(calls, "_read", lambda is_cuda, dtype: read(True, dtype))
        find = calls._call.__wrapped__

        def on_gpu(*arguments):
            key = (*arguments[:6], 0, *arguments[7:])
            return self.calls.setdefault(key, find(*key))

        monkeypatch.setattr(calls, "_call", on_gpu)
        self.calls = {}
        monkeypatch.setattr(binding.Call, "target", HOPPER)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: self.name)
        monkeypatch.setattr(tuning, "race", self.race)
        monkeypatch.setattr(private, "is_capturing", lambda device: self.captures)
        monkeypatch.setattr(torch.cuda, "Event", lambda: self)
        monkeypatch.setattr(tuning, "relaxed_capture", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        for direction in ("forward", "input_gradient", "weight_gradient"):
            monkeypatch.setattr(execution, f"_{direction}", self.kernel(direction))
        monkeypatch.setattr(private, "empty_strided_cuda", None)  # so that `_forward` runs

    def race(self, problem, device, own, flags, launch):
        self.timed.append(problem.direction)
        self.flags.add(flags)
        for candidate in (own, PYTORCH):
            launch(candidate)
        races = {"tconv": Race(SHORT, LONG), "pytorch": Race(LONG, SHORT), "close": CLOSE}
        return (races | {"neither": None})[self.faster]

    def record(self, _stream):
        """It is an event of itself."""

    def query(self):
        return not self.is_late

    def lets_nothing_be_considered(self, monkeypatch):
        """From here on calls and gradients have to be found at once, and are counted anew."""
        tconv.statistics(reset=True)
        del self.ran[:]
        monkeypatch.setattr(functional, "_convolve", fail)
        monkeypatch.setattr(autograd.Step, "_longer_way", fail)

    def kernel(self, direction):
        def run(call, *arguments):
            self.ran.append(direction)
            # A kernel knows all sizes; a tensor may lack the height.
            pair = (a.unsqueeze(2) if a.dim() == 3 else a for a in arguments[:2])
            arguments = (*pair, *arguments[2:])
            if direction == "forward":
                axes = (call.problem.height, call.problem.width)
                names = ("stride", "padding", "output_padding", "dilation")
                geometry = *(tuple(getattr(a, n) for a in axes) for n in names), call.problem.groups
                arguments = (*arguments[:3], geometry)
            return getattr(aten, direction)(*arguments)

        return run


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


@pytest.fixture
def strict(monkeypatch):
    """Full float32 on a GPU before Hopper, where general kernels alone serve its gradients."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(binding.Call, "target", Target.named("sm_80"))


def operands(channels=32, size=16, dtype=torch.float32):
    """Of a small layer."""
    x = torch.randn(2, channels, size, size, dtype=dtype, requires_grad=True)
    w = torch.randn(channels, 8, 4, 4, dtype=dtype, requires_grad=True)
    return x, w, torch.randn(8, dtype=dtype, requires_grad=True)


def served():
    return {row[:3]: row.calls for row in tconv.statistics()}


def ours(x):
    """The kernel that the plan chooses for a forward call."""
    layer = Layer.parse("32,8,4,2,1", f"2x{x.shape[2]}x{x.shape[3]}")
    tf32 = torch.backends.cudnn.allow_tf32
    return plan(layer.problem("forward", tf32=tf32), binding.Call.target).stem


def test_a_general_kernel_leaves_the_call_to_pytorch(gpu):
    x, w, b = operands(dtype=torch.float64)
    for _ in range(2):
        out = tconv.conv_transpose2d(x, w, b, 2, 1)
        assert "Tconv" not in type(out.grad_fn).__name__  # its own backward, in C++
    assert gpu.ran == gpu.timed == []
    assert served() == {
        ("forward", "pytorch", "general"): 2,
        ("input_gradient", "pytorch", "general"): 2,
        ("weight_gradient", "pytorch", "general"): 2,
    }
    torch.testing.assert_close(out, F.conv_transpose2d(x, w, b, 2, 1), rtol=0, atol=0)


@pytest.mark.parametrize("faster", ["tconv", "pytorch"])
def test_in_between_both_are_timed_once(gpu, strict, faster):
    gpu.faster = faster
    # Whole numbers: the bias's gradient is summed in two orders, which give the same then.
    x, w, b = (operand.detach().round().requires_grad_() for operand in operands())
    results = []
    for _ in range(3):
        out = tconv.conv_transpose2d(x, w, b, 2, 1)
        results.append(torch.autograd.grad(out.square().sum(), (x, w, b)))
    assert gpu.timed == ["forward"]
    kernel = ours(x) if faster == "tconv" else "pytorch"
    counted = served()
    assert counted["forward", kernel, "timed"] == 3
    if faster == "tconv":
        assert gpu.ran == ["forward"] * (1 + 3)  # one timing
        # One operator of PyTorch's computes both gradients.
        assert counted["input_gradient", "pytorch", "general"] == 3
        assert counted["weight_gradient", "pytorch", "general"] == 3
    expected = F.conv_transpose2d(x, w, b, 2, 1)
    expected = torch.autograd.grad(expected.square().sum(), (x, w, b))
    for result in results:
        torch.testing.assert_close(result, expected)


def test_once_known_pytorch_runs_with_its_own_backward(gpu, strict):
    gpu.faster = "pytorch"
    x, w, b = operands()
    names = [type(tconv.conv_transpose2d(x, w, b, 2, 1).grad_fn).__name__ for _ in range(2)]
    assert names[0].startswith("TconvForward")  # timed within
    assert names[1] == type(F.conv_transpose2d(x, w, b, 2, 1).grad_fn).__name__


def step(x, w, b):
    """Forward and both gradients; the name of the forward's node."""
    out = tconv.conv_transpose2d(x, w, b, 2, 1)
    torch.autograd.grad(out, (x, w), torch.ones_like(out))
    return type(out.grad_fn).__name__


PYTORCHS = "ConvolutionBackward0"
OURS = "TconvForwardBackward"
THREE = ["forward", "input_gradient", "weight_gradient"]


@pytest.mark.parametrize("faster", ["tconv", "pytorch"])
def test_a_step_is_timed_within_our_node_and_then_decided_as_one(gpu, faster):
    gpu.faster = faster
    operand = operands(size=128, dtype=torch.bfloat16)
    names = [step(*operand) for _ in range(3)]
    assert gpu.timed == THREE
    assert names == [OURS, *[OURS if faster == "tconv" else PYTORCHS] * 2]
    if faster == "pytorch":
        assert served() == {(direction, "pytorch", "timed"): 3 for direction in THREE}


def test_a_step_of_another_size_is_decided_by_its_class(gpu, monkeypatch):
    gpu.faster = "pytorch"
    races = {}

    def race(problem, device, own, flags, launch):
        found = gpu.race(problem, device, own, flags, launch)
        return races.setdefault((tuning.size_class(problem), own.stem, flags), found)

    def raced(problem, _device, stem, flags):
        return races.get((tuning.size_class(problem), stem, flags))

    monkeypatch.setattr(tuning, "race", race)
    monkeypatch.setattr(tuning, "raced", raced)
    x, w, b = operands(size=128, dtype=torch.bfloat16)
    names = [step(x[:, :, :rows].detach().requires_grad_(), w, b) for rows in (120, 112, 100)]
    assert names == [OURS, PYTORCHS, PYTORCHS]
    assert gpu.timed == THREE


def test_gradients_that_nobody_asks_for_are_not_waited_for(gpu):
    gpu.faster = "pytorch"
    x, w, b = operands(size=128, dtype=torch.bfloat16)
    names = [type(tconv.conv_transpose2d(x, w, b, 2, 1).grad_fn).__name__ for _ in range(20)]
    assert set(names[:16]) == {OURS}
    assert set(names[17:]) == {PYTORCHS}


def test_gradients_that_are_not_wanted_decide_nothing(gpu, monkeypatch):
    gpu.faster = "pytorch"
    x, w, b = operands(size=128, dtype=torch.bfloat16)
    asked = []
    leave = choosing.leave_to_pytorch
    monkeypatch.setattr(choosing, "leave_to_pytorch", lambda *a: asked.append(a) or leave(*a))
    for _ in range(4):
        out = tconv.conv_transpose2d(x.detach(), w, b, 2, 1)
        torch.autograd.grad(out, w, torch.ones_like(out))
    assert len(asked) == 2
    assert type(out.grad_fn).__name__ == PYTORCHS


def test_a_step_of_which_ours_saves_nothing_is_pytorchs(gpu, monkeypatch):
    race = Race(Timed(120e-6, 20e-6), Timed(110e-6, 90e-6))
    monkeypatch.setattr(tuning, "race", lambda *_: race)
    operand = operands(size=128, dtype=torch.bfloat16)
    assert [step(*operand) for _ in range(3)] == [OURS, PYTORCHS, PYTORCHS]
    assert all(reason != "watched" for _, _, reason in served())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_small_step_is_ours_if_the_program_waits_for_the_device(
    gpu, monkeypatch, axes, autocast, late
):
    monkeypatch.setattr(tuning, "race", lambda *_: SMALL)
    layer = (tconv.ConvTranspose1d, tconv.ConvTranspose2d)[axes - 1](32, 16, 4, 2, 1)
    x = torch.randn(2, 32, *(16,) * axes, requires_grad=True)

    def node():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = layer(x)
            expected = type(layer).__base__.forward(layer, x)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        torch.autograd.grad(out, (x, layer.weight), torch.ones_like(out))
        made = out.grad_fn
        if type(made).__name__ == "SqueezeBackward1":  # of the height
            made = made.next_functions[0][0]
        return type(made).__name__

    assert node() == OURS  # timed within
    gpu.is_late = late
    considered = []
    convolve = functional._convolve
    monkeypatch.setattr(functional, "_convolve", lambda *a: considered.append(a) or convolve(*a))
    assert {node() for _ in range(WATCHED)} == {PYTORCHS}
    assert len(considered) == 1  # the others were found at once
    assert served()["forward", "pytorch", "watched"] == WATCHED
    gpu.is_late = not late
    assert {node() for _ in range(2 * WATCHED)} == {OURS if late else PYTORCHS}
    assert len(considered) <= 3
    if not late:
        assert served()["forward", "pytorch", "step"] == 2 * WATCHED


@pytest.mark.parametrize(("late", "name"), [(9, "ours"), (8, "pytorchs")])
def test_a_share_of_late_calls_is_enough(gpu, monkeypatch, late, name):
    """A program that waits for a result in each step finds the device idle at first."""
    monkeypatch.setattr(tuning, "race", lambda *_: SMALL)
    operand = operands(size=128, dtype=torch.bfloat16)
    step(*operand)
    for call in range(WATCHED):
        gpu.is_late = WATCHED - call <= late
        step(*operand)
    assert step(*operand) == {"ours": OURS, "pytorchs": PYTORCHS}[name]


def test_an_error_of_pytorchs_function_is_its_own(gpu, monkeypatch):
    watch = tuning.Watch(0)

    def fails(*_):
        raise ValueError("its own")

    monkeypatch.setattr(gpu, "query", fails)
    with pytest.raises(ValueError, match="its own"):
        watch.see(fails)


def test_layers_of_one_program_are_watched_together(gpu, monkeypatch):
    monkeypatch.setattr(tuning, "race", lambda *_: SMALL)
    layers = [operands(channels, 128, torch.bfloat16) for channels in (32, 64)]
    for turn in range(WATCHED + 2):
        for late, operand in enumerate(layers):
            gpu.is_late = turn > 0 and bool(late)
            name = step(*operand)
    assert name == PYTORCHS  # it is ahead there, and behind elsewhere
    assert step(*layers[0]) == PYTORCHS


def test_another_size_of_its_class_need_not_be_watched(gpu, monkeypatch):
    monkeypatch.setattr(tuning, "race", lambda *_: SMALL)
    monkeypatch.setattr(tuning, "raced", lambda *_: SMALL)
    gpu.is_late = True
    x, w, b = operands(size=128, dtype=torch.bfloat16)
    for _ in range(WATCHED + 1):
        step(x[:, :, :120].detach().requires_grad_(), w, b)
    assert step(x[:, :, :112].detach().requires_grad_(), w, b) == OURS


def test_steps_with_other_gradients_are_watched_apart(gpu, monkeypatch):
    monkeypatch.setattr(tuning, "race", lambda *_: SMALL)
    monkeypatch.setattr(tuning, "raced", lambda *_: SMALL)
    x, w, b = operands(size=128, dtype=torch.bfloat16)
    for _ in range(WATCHED + 2):
        step_of_weight(x, w, b)
    assert served()["forward", "pytorch", "step"] > 0
    gpu.is_late = True
    names = [step(x, w, b) for _ in range(WATCHED + 1)]
    assert names == [*[PYTORCHS] * WATCHED, OURS]


def test_a_graph_that_is_captured_goes_by_the_device_alone(gpu, monkeypatch):
    monkeypatch.setattr(tuning, "race", lambda *_: SMALL)
    operand = operands(size=128, dtype=torch.bfloat16)
    names = []
    for turn in range(5):
        gpu.captures = turn in (2, 4)
        names.append(step(*operand))
    assert names == [OURS, PYTORCHS, OURS, PYTORCHS, OURS]
    assert served()["forward", "pytorch", "watched"] == 2


def test_calls_that_are_not_found_at_once_are_watched_too(gpu, monkeypatch):
    monkeypatch.setattr(tuning, "race", lambda *_: SMALL)
    gpu.is_late = True
    x, w, _ = operands(size=128, dtype=torch.bfloat16)
    b = torch.randn(16, dtype=torch.bfloat16)[::2]
    names = [step(x, w, b) for _ in range(WATCHED + 2)]
    assert names == [OURS, *[PYTORCHS] * WATCHED, OURS]


def test_kinds_that_were_watched_leave_their_places(gpu, monkeypatch):
    monkeypatch.setattr(tuning, "race", lambda *_: SMALL)
    monkeypatch.setattr(tuning, "raced", lambda *_: SMALL)
    gpu.is_late = True
    layer = tconv.ConvTranspose2d(64, 64, 4, 2, 1)
    images = [torch.randn(batch, 64, 16, 16) for batch in range(32, 48)]
    for _ in range(6):
        for image in images:
            layer(image).sum().backward()
    gpu.lets_nothing_be_considered(monkeypatch)
    for image in images:
        layer(image).sum().backward()


def test_a_graph_that_is_captured_waits_for_no_gradients(gpu, monkeypatch):
    monkeypatch.setattr(tuning, "race", lambda *a: gpu.timed.append(a[0].direction) or SMALL)
    x, w, b = operands(size=128, dtype=torch.bfloat16)
    gpu.captures = True
    for _ in range(20):
        step_of_weight(x, w, b)
    gpu.captures = False
    step(x, w, b)
    assert set(gpu.timed) == set(THREE)


def step_of_weight(x, w, b):
    out = tconv.conv_transpose2d(x.detach(), w, b, 2, 1)
    torch.autograd.grad(out, w, torch.ones_like(out))


def test_without_timing_nothing_is_watched(gpu, monkeypatch):
    monkeypatch.setattr(tuning, "race", lambda *_: SMALL)  # as the cache folder has it
    monkeypatch.setenv("TCONV_TIMING", "0")
    operand = operands(size=128, dtype=torch.bfloat16)
    assert [step(*operand) for _ in range(3)] == [OURS, PYTORCHS, PYTORCHS]
    assert all(reason != "watched" for _, _, reason in served())


def test_a_step_whose_launches_save_the_host_a_lot_is_ours(gpu, monkeypatch):
    race = Race(Timed(100e-6, 20e-6), Timed(110e-6, 160e-6))
    monkeypatch.setattr(tuning, "race", lambda *_: race)
    operand = operands(size=128, dtype=torch.bfloat16)
    assert [step(*operand) for _ in range(2)] == [OURS, OURS]


def test_a_small_call_without_gradients_is_decided_by_its_own_times(gpu, monkeypatch):
    monkeypatch.setattr(tuning, "race", lambda *_: SMALL)
    operand = operands(size=128, dtype=torch.bfloat16)
    for _ in range(WATCHED + 2):
        step(*operand)
    counted = served()
    assert all(counted[direction, "pytorch", "step"] == 1 for direction in THREE)
    assert all(counted[direction, "pytorch", "watched"] == WATCHED for direction in THREE)
    with torch.no_grad():  # without gradients its time decides
        tconv.conv_transpose2d(*operand, 2, 1)
    assert gpu.ran[-1] == "forward"


@pytest.mark.parametrize("needs_input", [False, True])
@pytest.mark.parametrize("needs_weight", [False, True])
@pytest.mark.parametrize("needs_bias", [False, True])
def test_gradients_of_calls_left_to_pytorch_are_counted(gpu, needs_input, needs_weight, needs_bias):
    x, w, b = (operand.detach() for operand in operands(dtype=torch.float64))
    x.requires_grad_(needs_input)
    w.requires_grad_(needs_weight)
    b.requires_grad_(needs_bias)
    for _ in range(3):
        out = tconv.conv_transpose2d(x, w, b, 2, 1)
        if out.requires_grad:
            assert type(out.grad_fn).__name__ == "ConvolutionBackward0"  # no node of ours
    with torch.no_grad():  # records none
        tconv.conv_transpose2d(x, w, b, 2, 1)
    expected = {("forward", "pytorch", "general"): 4}
    if needs_input:
        expected["input_gradient", "pytorch", "general"] = 3
    if needs_weight:
        expected["weight_gradient", "pytorch", "general"] = 3
    assert served() == expected
    tconv.statistics(reset=True)
    assert served() == {}
    tconv.conv_transpose2d(x, w, b, 2, 1)
    assert set(served()) == set(expected)
    assert set(served().values()) == {1}


def test_gradients_of_calls_without_a_kernel_are_counted(gpu):
    x, w = torch.randn(1, 4, 3, 3, dtype=torch.complex64), torch.randn(4, 2, 3, 3)
    w = w.to(torch.complex64).requires_grad_()
    tconv.conv_transpose2d(x, w)
    with torch.no_grad():
        tconv.conv_transpose2d(x, w)
    reason = "no kernel for torch.complex64 tensors of layout torch.strided"
    assert served() == {
        ("forward", "pytorch", reason): 2,
        ("weight_gradient", "pytorch", reason): 1,
    }


def test_what_is_left_to_pytorch_is_found_at_once(gpu, monkeypatch):
    x, w, b = operands(dtype=torch.float64)
    layer = tconv.ConvTranspose2d(32, 16, 4, 2, 1, dtype=torch.float64)
    layer(x)
    tconv.conv_transpose2d(x, w, b, 2, 1)
    monkeypatch.setattr(functional.ops, "unobserved", lambda *_: pytest.fail("asked again"))
    for out in (tconv.conv_transpose2d(x, w, b, 2, 1), layer(x)):
        assert type(out.grad_fn).__name__ == "ConvolutionBackward0"


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, function, _types, arguments=(), named=None):
        return function(*arguments, **(named or {}))


class SeesOperators(TorchDispatchMode):
    def __torch_dispatch__(self, operator, _types, arguments=(), named=None):
        return operator(*arguments, **(named or {}))


def own_run(layer, x, weight=None, bias=None):
    """What runs a call without that anybody considers it again, if ours does."""
    weight = layer.weight if weight is None else weight
    bias = layer.bias if bias is None else bias
    rest = (layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
    kinds = functional._own_calls[len(layer.kernel_size) - 1].get(id(weight), ())
    return functional._own(kinds, x, weight, bias, *rest)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_what_is_ours_is_found_at_once(gpu, monkeypatch, axes, bias):
    kind = (tconv.ConvTranspose1d, tconv.ConvTranspose2d)[axes - 1]
    layer = kind(32, 16, 4, 2, 1, bias=bias)
    x = torch.randn(2, 32, *(16,) * axes)
    expected = layer(x)
    layer(x)
    monkeypatch.setattr(functional, "_convolve", lambda *_: pytest.fail("considered again"))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    assert sum(served().values()) == len(gpu.ran) - 1 == 3  # one was the timing's


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("wanted", ["x", "w", "b", "xw", "xwb"])
@pytest.mark.parametrize("axes", [1, 2])
def test_a_step_of_ours_is_found_at_once(gpu, monkeypatch, axes, wanted, own):
    kind = (tconv.ConvTranspose1d, tconv.ConvTranspose2d)[axes - 1]
    layer = kind(64, 64, 4, 2, 1)
    x = torch.randn(2, 64, *((256,), (16, 16))[axes - 1])
    tensors = {"x": x, "w": layer.weight, "b": layer.bias}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in wanted)
    asked = [tensors[name] for name in wanted]
    expected = kind.__base__.forward(layer, x)
    grad = torch.randn_like(expected).round()  # the bias's gradient is summed in two orders
    expected = (expected, *torch.autograd.grad(expected, asked, grad))
    with tconv.own_kernels() if own else contextlib.nullcontext():
        for turn in range(4):
            if turn == 3:
                gpu.lets_nothing_be_considered(monkeypatch)
            out = layer(x)
            found = (out, *torch.autograd.grad(out, asked, grad))
            torch.testing.assert_close(found, expected)
    ran = [THREE[0], *[THREE[1]] * ("x" in wanted), *[THREE[2]] * ("w" in wanted)]
    assert gpu.ran == ran
    assert sum(served().values()) == len(ran)


@pytest.mark.parametrize("theirs", [THREE[1:], THREE[1:2], THREE[2:], THREE[:1], THREE[:2]])
@pytest.mark.parametrize("axes", [1, 2])
def test_a_step_of_ours_with_parts_of_pytorchs_is_found_at_once(gpu, monkeypatch, axes, theirs):
    layer = (tconv.ConvTranspose1d, tconv.ConvTranspose2d)[axes - 1](64, 64, 4, 2, 1)
    x = torch.randn(2, 64, *((256,), (16, 16))[axes - 1], requires_grad=True)
    slow, quick = Timed(9e-3, 20e-6), Timed(1e-3, 20e-6)

    def race(problem, device, own, flags, launch):
        launch(own)
        return Race(slow, quick) if problem.direction in theirs else Race(quick, Timed(1, 20e-6))

    monkeypatch.setattr(tuning, "race", race)
    expected = type(layer).__base__.forward(layer, x)
    grad = torch.randn_like(expected)
    expected = torch.autograd.grad(expected, (x, layer.weight), grad)
    for turn in range(4):
        if turn == 3:
            gpu.lets_nothing_be_considered(monkeypatch)
        found = torch.autograd.grad(layer(x), (x, layer.weight), grad)
        torch.testing.assert_close(found, expected)
    assert gpu.ran == [direction for direction in THREE if direction not in theirs]
    counted = served()
    assert all(counted[direction, "pytorch", "timed"] == 1 for direction in theirs)
    assert sum(counted.values()) == 3


@pytest.mark.parametrize("faster", ["tconv", "pytorch"])
def test_a_step_whose_gradient_lies_otherwise_than_its_output_is_decided_by_that(gpu, faster):
    gpu.faster = faster
    x, w, b = operands(size=128, dtype=torch.bfloat16)
    names = []
    for _ in range(3):
        out = tconv.conv_transpose2d(x, w, b, 2, 1)
        names.append(type(out.grad_fn).__name__)
        torch.autograd.grad(out.sum(), (x, w))  # a view of one value
    assert names == [OURS, *[OURS if faster == "tconv" else PYTORCHS] * 2]
    assert gpu.timed == THREE


@pytest.mark.parametrize("flag", ["TCONV_STRICT", "TCONV_KERNEL", "benchmark", "deterministic"])
def test_flags_of_gradients_found_at_once_are_read_now_and_then(gpu, monkeypatch, flag):
    layer = tconv.ConvTranspose2d(64, 64, 4, 2, 1)
    x = torch.randn(2, 64, 16, 16, requires_grad=True)
    for _ in range(4):
        out = layer(x)
        torch.autograd.grad(out, (x, layer.weight), torch.ones_like(out))
    out = layer(x)
    ((at_once,),) = out.grad_fn.step._at_once.values()
    tensors = torch.ones_like(out), x, layer.weight
    with torch.no_grad():
        assert all(at_once(*tensors) for _ in range(2 * functional._EVERY))
        if flag.startswith("TCONV"):
            monkeypatch.setenv(flag, "1")
        else:
            monkeypatch.setattr(private, f"is_cudnn_{flag}", lambda: True)
        found = [bool(at_once(*tensors)) for _ in range(2 * functional._EVERY)]
    assert found.count(False) == 2


@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_that_are_not_alike_take_the_longer_way(gpu, monkeypatch, channels_last):
    layer = tconv.ConvTranspose2d(64, 64, 4, 2, 1)
    form = torch.channels_last if channels_last else torch.contiguous_format
    layer.to(memory_format=form)
    x = torch.randn(2, 64, 16, 16).to(memory_format=form).requires_grad_()
    longer, ways = autograd.Step._longer_way, []
    monkeypatch.setattr(autograd.Step, "_longer_way", lambda *rest: ways.append(1) or longer(*rest))
    y = torch.randn(2, 64, 32, 32).to(memory_format=form)
    off = torch.randn(y.numel() + 1)[1:].view_as(y)
    flags = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    plain = contextlib.nullcontext()
    others = [(grad, plain) for grad in (y[:1].expand(y.shape), off, torch._neg_view(y))]
    others += [(y, block) for block in (SeesOperators(), tconv.own_kernels(), flags)]

    def step(grad, around):
        del ways[:]
        out = layer(x)
        with around:
            return torch.autograd.grad(out, (x, layer.weight), grad)

    for grad, block in others:
        for _ in range(4):
            step(y, plain)
        assert not ways
        out = F.conv_transpose2d(x, layer.weight, layer.bias, 2, 1)
        expected = torch.autograd.grad(out, (x, layer.weight), grad)
        torch.testing.assert_close(step(grad, block), expected)
        assert ways


def test_misaligned_gradients_are_not_what_others_are_found_by(gpu, monkeypatch):
    layer = tconv.ConvTranspose2d(64, 64, 4, 2, 1)
    x = torch.randn(2, 64, 16, 16, requires_grad=True)
    aligned = torch.randn(2, 64, 32, 32)
    off = torch.randn(aligned.numel() + 1)[1:].view_as(aligned)
    for _ in range(2):
        torch.autograd.grad(layer(x), (x, layer.weight), aligned)
    for _ in range(20):
        out = layer(x)
        torch.autograd.grad(out, (x, layer.weight), off)
    assert not out.grad_fn.step._at_once
    for _ in range(2):
        torch.autograd.grad(layer(x), (x, layer.weight), aligned)
        monkeypatch.setattr(autograd.Step, "_longer_way", fail)


def test_gradients_that_lie_in_turns_otherwise_are_found_at_once(gpu, monkeypatch):
    layer = tconv.ConvTranspose2d(64, 64, 4, 2, 1)
    x = torch.randn(2, 64, 16, 16, requires_grad=True)
    dense = torch.randn(2, 64, 32, 32)
    for turn in range(5):
        if turn == 4:
            monkeypatch.setattr(autograd.Step, "_longer_way", fail)
        for grad in (dense, dense[:1].expand_as(dense)):
            found = torch.autograd.grad(layer(x), (x, layer.weight), grad)
            out = torch.nn.ConvTranspose2d.forward(layer, x)
            expected = torch.autograd.grad(out, (x, layer.weight), grad)
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("needs_input", [False, True])
@pytest.mark.parametrize("faster", ["tconv", "pytorch", "small, late", "small"])
def test_a_step_that_is_computed_twice_saves_the_same(gpu, monkeypatch, axes, needs_input, faster):
    """Whoever runs it each time, as that may be decided in between."""
    gpu.faster, gpu.is_late = faster, "late" in faster
    if "small" in faster:
        monkeypatch.setattr(tuning, "race", lambda *_: SMALL)
    kind = (tconv.ConvTranspose1d, tconv.ConvTranspose2d)[axes - 1]
    first, second = kind(64, 64, 3, 1, 1), kind(64, 64, 3, 1, 1)
    x = torch.randn(2, 64, *((256,), (16, 16))[axes - 1], requires_grad=needs_input)
    for _ in range(WATCHED + 5 if "small" in faster else 5):
        out = torch.utils.checkpoint.checkpoint(first, x, use_reentrant=False)
        out = torch.utils.checkpoint.checkpoint(second, out, use_reentrant=False)
        (found,) = torch.autograd.grad(out.square().sum(), first.weight)
    expected = kind.__base__.forward(second, kind.__base__.forward(first, x))
    (expected,) = torch.autograd.grad(expected.square().sum(), first.weight)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("watching", [SeesFunctions, SeesOperators, torch.profiler.profile])
def test_a_step_that_is_observed_once_saves_the_same(gpu, axes, turn, watching):
    layer = (tconv.ConvTranspose1d, tconv.ConvTranspose2d)[axes - 1](64, 64, 3, 1, 1)
    x = torch.randn(2, 64, *((256,), (16, 16))[axes - 1], requires_grad=True)
    for _ in range(3):
        with watching() if turn == 0 else contextlib.nullcontext():
            out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        with watching() if turn == 1 else contextlib.nullcontext():
            (found,) = torch.autograd.grad(out.square().sum(), x)
    (expected,) = torch.autograd.grad(type(layer).__base__.forward(layer, x).square().sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("axes", [1, 2])
def test_gradients_may_be_changed_in_place(gpu, axes):
    layer = (tconv.ConvTranspose1d, tconv.ConvTranspose2d)[axes - 1](64, 64, 4, 2, 1)
    x = torch.randn(2, 64, *((256,), (16, 16))[axes - 1], requires_grad=True)
    scale = torch.ones((), requires_grad=True)
    for _ in range(5):
        for found in torch.autograd.grad(layer(x).square().sum(), (x, layer.weight)):
            found.mul_(scale).sum().backward()


@pytest.mark.parametrize("axes", [1, 2])
def test_the_output_of_a_step_may_be_changed_in_place(gpu, axes):
    layer = (tconv.ConvTranspose1d, tconv.ConvTranspose2d)[axes - 1](64, 64, 4, 2, 1)
    x = torch.randn(2, 64, *((256,), (16, 16))[axes - 1], requires_grad=True)
    for _ in range(5):
        F.relu_(layer(x)).sum().backward()


@pytest.mark.parametrize("calls", [1, 5])
@pytest.mark.parametrize("axes", [1, 2])
def test_gradients_in_batches(gpu, calls, axes):
    layer = (tconv.ConvTranspose1d, tconv.ConvTranspose2d)[axes - 1](64, 64, 4, 2, 1)
    x = torch.randn(2, 64, *(16,) * axes, requires_grad=True)
    y = torch.randn(3, 2, 64, *(32,) * axes)
    for _ in range(calls):
        out = layer(x)
        torch.autograd.grad(out, (x, layer.weight), y[0], retain_graph=True)

    def of(grad):
        return torch.autograd.grad(out, (x, layer.weight), grad, retain_graph=True)

    expected = [torch.stack(found) for found in zip(*map(of, y), strict=True)]
    batched = torch.autograd.grad(
        out, (x, layer.weight), y, retain_graph=True, is_grads_batched=True
    )
    for found in (batched, torch.func.vmap(of)(y)):
        for one, right in zip(found, expected, strict=True):
            assert (one - right).norm() < 1e-6 * right.norm()


def test_a_gradient_of_a_step_found_at_once_is_differentiable(gpu):
    layer = tconv.ConvTranspose2d(64, 64, 4, 2, 1)
    x = torch.randn(2, 64, 16, 16, requires_grad=True)

    def penalty(function):
        (grad,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), (x, layer.weight))

    for _ in range(20):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    for _ in range(2):
        out = layer(x)
        out.sum().backward()
    assert out.grad_fn.step._at_once  # all those before cost no search
    expected = penalty(functools.partial(torch.nn.ConvTranspose2d.forward, layer))
    for found, right in zip(penalty(layer), expected, strict=True):
        assert (found - right).norm() < 1e-6 * right.norm()


def test_a_step_found_at_once_keeps_what_hooks_make_of_saved_tensors(gpu):
    layer = tconv.ConvTranspose2d(64, 64, 4, 2, 1)
    x = torch.randn(2, 64, 16, 16, requires_grad=True)

    def gradients(function):
        out = function(x)
        return torch.autograd.grad(out, (x, layer.weight), torch.ones_like(out))

    for _ in range(4):
        gradients(layer)
    twice = torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: 2 * one.mT.mT)
    with twice:
        found = gradients(layer)
        expected = gradients(functools.partial(torch.nn.ConvTranspose2d.forward, layer))
    torch.testing.assert_close(found, expected)


def test_under_autocast_a_step_is_found_at_once(gpu, monkeypatch):
    layer = tconv.ConvTranspose2d(64, 64, 4, 2, 1)
    x = torch.randn(2, 64, 16, 16, requires_grad=True)
    asked = (x, layer.weight, layer.bias)

    def gradients():
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        assert out.dtype is torch.bfloat16
        return torch.autograd.grad(out, asked, torch.ones_like(out))

    first, *_ = (gradients() for _ in range(4))
    monkeypatch.setattr(functional, "_convolve", fail)
    monkeypatch.setattr(autograd.Step, "_longer_way", fail)
    found = gradients()
    assert [one.dtype for one in found] == [torch.float32] * 3
    torch.testing.assert_close(found, first, rtol=0, atol=0)


@torch.no_grad()
def test_what_is_not_alike_is_not_found_at_once(gpu):
    layer = tconv.ConvTranspose2d(32, 16, 4, 2, 1)
    x = torch.randn(2, 32, 16, 16)
    for _ in range(2):
        layer(x)
    assert own_run(layer, x)
    off = torch.randn(x.numel() + 1)[1:].view_as(x)
    others = (
        x[:1],
        x[0],
        x.double(),
        torch._neg_view(x),
        off,
        x.contiguous(memory_format=torch.channels_last),
    )
    assert not any(own_run(layer, other) for other in others)
    assert not own_run(layer, x, bias=layer.bias[:3])
    assert not own_run(layer, x, weight=layer.weight.clone())
    with torch.enable_grad():
        assert not own_run(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert not own_run(layer, x)
    for mode in (SeesFunctions(), SeesOperators(), torch.autograd.profiler.profile()):
        with mode:
            assert not own_run(layer, x)
    for block in (tconv.own_kernels(), tconv.autotune()):
        with block:
            assert not own_run(layer, x)
    found = []
    torch.func.vmap(lambda one: found.append(own_run(layer, one)) or one)(x.expand(3, *x.shape))
    torch.func.vmap(lambda one: found.append(own_run(layer, x)) or one)(x)
    torch.jit.trace(lambda one: found.append(own_run(layer, one)) or one + 1, x, check_trace=False)
    with torch.autograd.forward_ad.dual_level():
        found.append(own_run(layer, x))
    assert found == [None] * 4
    stride, layer.stride = layer.stride, (3, 3)
    assert not own_run(layer, x)
    layer.stride = stride
    layer.weight.requires_grad_(False)
    assert not own_run(layer, x)
    layer.weight.requires_grad_(True)
    assert own_run(layer, x)


@pytest.mark.parametrize("flag", ["TCONV_STRICT", "TCONV_KERNEL", "benchmark", "deterministic"])
@torch.inference_mode()
def test_flags_of_calls_found_at_once_are_read_now_and_then(gpu, monkeypatch, flag):
    layer = tconv.ConvTranspose2d(32, 16, 4, 2, 1)
    x = torch.randn(2, 32, 16, 16)
    for _ in range(2):
        layer(x)
    assert all(own_run(layer, x) for _ in range(2 * functional._EVERY))
    if flag.startswith("TCONV"):
        monkeypatch.setenv(flag, "1")
    else:
        monkeypatch.setattr(functional, f"_is_cudnn_{flag}", lambda: True)
        monkeypatch.setattr(private, f"is_cudnn_{flag}", lambda: True)
    found = [bool(own_run(layer, x)) for _ in range(2 * functional._EVERY)]
    assert found.count(False) == 2


@torch.inference_mode()
def test_precision_of_calls_found_at_once_is_read_each_time(gpu, monkeypatch):
    layer = tconv.ConvTranspose2d(32, 16, 4, 2, 1)
    x = torch.randn(2, 32, 16, 16)
    for _ in range(2):
        layer(x)
    assert own_run(layer, x)
    flags = torch.backends.cudnn.flags
    with flags(enabled=True, allow_tf32=not torch.backends.cudnn.allow_tf32):
        assert not own_run(layer, x)
    with flags(enabled=False, allow_tf32=torch.backends.cudnn.allow_tf32):
        assert not own_run(layer, x)
    assert own_run(layer, x)


@torch.inference_mode()
def test_a_weight_that_is_made_anew_is_found_at_once(gpu, monkeypatch):
    """As those of a parametrized layer are, which come to lie in the same places."""
    layer = tconv.ConvTranspose2d(32, 16, 4, 2, 1)
    x = torch.randn(2, 32, 16, 16)
    rest = (layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)

    def call():
        return tconv.conv_transpose2d(x, layer.weight * 2, layer.bias, *rest)

    for _ in range(20):
        expected = call()
    convolve, longer = functional._convolve, []
    monkeypatch.setattr(
        functional, "_convolve", lambda *arguments: longer.append(1) or convolve(*arguments)
    )
    for _ in range(100):
        torch.testing.assert_close(call(), expected, rtol=0, atol=0)
    assert len(longer) < 10


@torch.inference_mode()
def test_parameters_that_only_equal_a_layers_are_not_found_at_once(gpu):
    layer = tconv.ConvTranspose2d(32, 16, 3, 1, 1, bias=False)
    x = torch.randn(2, 32, 16, 16)
    for _ in range(2):
        layer(x)
    for stride in (1.0, True, (1.0, 1.0)):
        layer.stride = stride
        assert not own_run(layer, x)
        with pytest.raises(TypeError):
            layer(x)
    one = torch.tensor(1)
    layer.stride = (one, one)
    for _ in range(3):
        expected = layer(x)
    one.fill_(2)
    assert layer(x).shape != expected.shape


@torch.inference_mode()
def test_a_signals_call_is_not_found_for_an_images(gpu):
    layer = tconv.ConvTranspose1d(32, 16, 4, 2, 1)
    x = torch.randn(2, 32, 16)
    for _ in range(2):
        layer(x)
    with pytest.raises(RuntimeError):
        tconv.conv_transpose2d(x, layer.weight, layer.bias, (2,), (1,), (0,), 1, (1,))


@torch.inference_mode()
def test_under_autocast_ours_is_found_at_once(gpu, monkeypatch):
    layer = tconv.ConvTranspose2d(32, 16, 4, 2, 1)
    x = torch.randn(2, 32, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            layer(x)
        monkeypatch.setattr(functional, "_convolve", lambda *_: pytest.fail("considered again"))
        assert layer(x).dtype is torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert not own_run(layer, x)
    assert not own_run(layer, x)


def is_left(gpu, x, w, b=None, stride=2, padding=1, **rest):
    """Whether PyTorch runs a call without that anybody considers it again."""
    if functional._left(x, w, b, stride, padding, 0, rest.get("groups", 1), 1)[1] is None:
        return False
    before = len(gpu.timed)
    tconv.conv_transpose2d(x, w, b, stride, padding, **rest)
    assert len(gpu.timed) == before
    return True


def leave(gpu, x, w, b=None, stride=2, padding=1):
    """Makes a call that PyTorch wins until it is left to it."""
    gpu.faster = "pytorch"
    for _ in range(2):
        tconv.conv_transpose2d(x, w, b, stride, padding)
    assert is_left(gpu, x, w, b, stride, padding)


def in_place_of(weight, shape):
    """A weight of another layer with the identity that `weight`, the last reference, had."""
    identity = id(weight)
    del weight
    fresh = []
    for _ in range(50):
        fresh.append(torch.randn(shape))
        if id(fresh[-1]) == identity:
            return fresh[-1]
    pytest.skip("this Python gives no object the place of one before it")


def test_a_layer_whose_dtype_or_layout_changes_is_considered_again(gpu):
    layer = tconv.ConvTranspose2d(32, 16, 4, 2, 1)
    x = torch.randn(2, 32, 16, 16)
    weight = layer.weight
    with torch.no_grad():
        leave(gpu, x, weight)
        layer.to(memory_format=torch.channels_last)
        assert layer.weight is weight
        assert not is_left(gpu, x, weight)
        layer.to(memory_format=torch.contiguous_format)
        assert is_left(gpu, x, weight)
        layer.to(torch.bfloat16)
        gpu.faster = "tconv"
        timed = len(gpu.timed)
        for _ in range(3):
            layer(x.bfloat16())
    assert len(gpu.timed) == timed + 1
    kernels = {row.kernel: row.calls for row in tconv.statistics() if row.reason == "timed"}
    assert kernels.pop("pytorch") == 4
    assert list(kernels.values()) == [3]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_weight_in_the_place_of_another_layers_is_considered(gpu, requires_grad):
    x = torch.randn(2, 32, 16, 16)
    with torch.no_grad():
        weight = [torch.randn(32, 16, 4, 4)]
        leave(gpu, x, weight[0])
        same = in_place_of(weight.pop(), (32, 16, 4, 4)).requires_grad_(requires_grad)
        assert is_left(gpu, x, same) is not requires_grad  # a new weight of the same layer is
        weight, same = [same], None
        other = in_place_of(weight.pop(), (32, 8, 3, 3))
        assert not is_left(gpu, x, other)


def test_calls_that_differ_are_not_left_together(gpu):
    x, w, b = (operand.detach() for operand in operands())
    with torch.no_grad():
        leave(gpu, x, w, b)
        for stride, padding in ((4, 1), (2, 0), (1, 1), ((2, 1), 1)):
            assert not is_left(gpu, x, w, b, stride, padding)
        assert not is_left(gpu, x, w)  # without a bias
        assert not is_left(gpu, x, w, b, groups=2)
        wide = torch.randn(2, 32, 32, 32)  # as many pixels with the same strides
        leave(gpu, wide[:, :, :8, :16], w, b)
        assert not is_left(gpu, wide[:, :, :16, :8], w, b)
    assert not is_left(gpu, x, w, b)  # in another mode of autograd
    leave(gpu, x, w, b)
    assert not is_left(gpu, x, w, b.clone().requires_grad_())
    assert not is_left(gpu, x.clone().requires_grad_(), w, b)
    assert is_left(gpu, x, w, b)


def test_where_the_bias_alone_requires_gradients_the_call_is_considered_each_time(gpu):
    x, w, b = operands(dtype=torch.float64)
    x, w = x.detach(), w.detach()
    for _ in range(2):
        tconv.conv_transpose2d(x, w, b, 2, 1)
    assert not is_left(gpu, x, w, b)
    assert not is_left(gpu, x, w, b.detach())


def test_autocast_is_part_of_what_is_left(gpu):
    x, w, _ = (operand.detach() for operand in operands())
    with torch.no_grad():
        leave(gpu, x, w)
        with torch.autocast("cpu", torch.bfloat16):
            assert not is_left(gpu, x, w)
            leave(gpu, x, w)
        with torch.autocast("cpu", torch.float16):
            assert not is_left(gpu, x, w)
        assert is_left(gpu, x, w)


def test_flags_are_read_in_some_calls_that_are_left_and_the_rest_in_each(gpu, monkeypatch):
    x, w, _ = (operand.detach() for operand in operands())
    every, asked, find = functional._EVERY, [], functional._left

    def left(*arguments):
        asked.append(arguments)
        return find(*arguments)

    def times_asked(calls, *arguments):
        del asked[:]
        for _ in range(calls):
            tconv.conv_transpose2d(*arguments)
        return len(asked)

    with torch.no_grad():
        leave(gpu, x, w, None, 2, 1)
        monkeypatch.setattr(functional, "_left", left)
        assert times_asked(4 * every, x, w, None, 2, 1) == 4
        for other in (x[:1], x.to(memory_format=torch.channels_last), x.clone().requires_grad_()):
            assert times_asked(1, other, w, None, 2, 1) == 1
            assert times_asked(3, x, w, None, 2, 1) == 1
        assert times_asked(1, x, w, None, 2, 0) == 1
        times_asked(2, x, w, None, 2, 1)
        del gpu.ran[:]
        with tconv.own_kernels():
            assert times_asked(3, x, w, None, 2, 1) == 1
        assert gpu.ran == ["forward"] * 3
        times_asked(2, x, w, None, 2, 1)
        monkeypatch.setattr(functional, "_is_cudnn_benchmark", lambda: True)
        assert times_asked(2 * every, x, w, None, 2, 1) > every
        assert times_asked(every, x, w, None, 2, 1) == every


def test_a_list_of_parameters_may_change(gpu):
    x, w, _ = (operand.detach() for operand in operands())
    stride = [2, 2]
    with torch.no_grad():
        leave(gpu, x, w, stride=stride)
        assert is_left(gpu, x, w, stride=[2, 2])
        stride[0] = 1
        assert not is_left(gpu, x, w, stride=stride)


def test_what_misaligned_tensors_are_left_to_is_not_kept_for_aligned_ones(gpu):
    weight = torch.randn(32, 16, 4, 4)
    x = torch.randn(2 * 32 * 16 * 16 + 1)[1:].view(2, 32, 16, 16)
    gpu.faster = "pytorch"
    with torch.no_grad():
        for _ in range(3):
            tconv.conv_transpose2d(x, weight, None, 2, 1)
        assert not is_left(gpu, x.clone(), weight)


def test_one_identity_holds_few_kinds_of_calls(gpu, monkeypatch):
    monkeypatch.setattr(functional, "_MOST_OF_A_WEIGHT", 8)
    x = torch.randn(2, 32, 16, 16)
    weight = torch.randn(32, 16, 4, 4)
    with torch.no_grad():
        for size in range(4, 16):
            leave(gpu, x[:, :, :size], weight)
    (kinds,) = functional._left_to_pytorch.values()
    assert len(kinds) == functional._MOST_OF_A_WEIGHT


def test_an_invalid_call_like_one_of_pytorchs_is_pytorchs_error(gpu):
    x, w, b = operands(dtype=torch.float64)
    tconv.conv_transpose2d(x, w, b, 2, 1)
    messages = []
    for function in (tconv.conv_transpose2d, F.conv_transpose2d):
        with pytest.raises(RuntimeError) as raised:
            function(x, w, b[:3], 2, 1)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_committed_rows_spare_the_timing(gpu, monkeypatch):
    x, w, b = operands()
    row = Ahead(gpu.name, ours(x), "float32", "tf32", "contiguous")
    monkeypatch.setattr(choice, "ahead", lambda: frozenset({row}))
    with torch.no_grad():
        tconv.conv_transpose2d(x, w, b, 2, 1)
    assert gpu.timed == []
    assert served() == {("forward", ours(x), "measured"): 1}
    gpu.name = "another"
    calls._known.clear()
    gpu.calls.clear()
    functional._own_calls[1].clear()
    with torch.no_grad():
        tconv.conv_transpose2d(x, w, b, 2, 1)
    assert gpu.timed == ["forward"]


cudnn = torch.backends.cudnn
FLAGS = {
    "enabled": False,
    "deterministic": True,
    "allow_tf32": False,
}
"""Flags of cuDNN that change what PyTorch's operator runs, with values that are not the defaults.

NOTE: no fp32_precision of torch 2.9 and later: a test that set one could not put it back as it was.
"""


@pytest.fixture(params=[*FLAGS, "use_deterministic_algorithms"])
def turn(request, monkeypatch):
    """Sets one of the flags until the end of the test."""
    if request.param == "use_deterministic_algorithms":
        yield lambda: torch.use_deterministic_algorithms(True)
        torch.use_deterministic_algorithms(False)
        return
    yield lambda: monkeypatch.setattr(cudnn, request.param, FLAGS[request.param])


@pytest.mark.parametrize("faster", ["tconv", "pytorch"])
def test_another_flag_of_pytorchs_is_timed_again(gpu, turn, faster):
    gpu.faster = faster
    x, w, b = operands()
    with torch.no_grad():
        for _ in range(2):
            tconv.conv_transpose2d(x, w, b, 2, 1)
        assert gpu.timed == ["forward"]
        turn()
        for _ in range(functional._EVERY + 1):
            tconv.conv_transpose2d(x, w, b, 2, 1)
    assert gpu.timed == ["forward"] * 2
    assert len(gpu.flags) == 2  # so that the answers are kept apart on disk too


def test_without_cudnn_the_precision_of_matrix_products_counts(gpu, monkeypatch):
    monkeypatch.setattr(cudnn, "enabled", False)
    x, w, b = operands()
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        for allowed in (False, True):
            matmul.allow_tf32 = allowed
            with torch.no_grad():
                tconv.conv_transpose2d(x, w, b, 2, 1)
    finally:
        matmul.allow_tf32 = before
    assert {library for *_, library in gpu.flags} == {"cublas", "cublas tf32"}


def test_without_cudnn_a_dtype_that_has_no_tf32_is_timed_again(gpu, monkeypatch):
    x, w, b = operands(dtype=torch.bfloat16)
    for enabled in (True, False):
        monkeypatch.setattr(cudnn, "enabled", enabled)
        with torch.no_grad():
            tconv.conv_transpose2d(x, w, b, 2, 1)
    assert gpu.timed == ["forward"] * 2
    assert gpu.flags == {(False, False, "cudnn"), (False, False, "cublas")}


@pytest.mark.parametrize("way", ["context", "TCONV_STRICT"])
def test_own_kernels_run_alone_where_that_is_asked_for(gpu, monkeypatch, way):
    x, w, b = operands(dtype=torch.float64)

    def train():
        tconv.conv_transpose2d(x, w, b, 2, 1).sum().backward()

    train()
    if way == "context":
        with tconv.own_kernels():
            train()
    else:
        monkeypatch.setenv("TCONV_STRICT", "1")
        train()
        monkeypatch.delenv("TCONV_STRICT")
    assert gpu.ran == ["forward", "input_gradient", "weight_gradient"]
    train()
    assert len(gpu.ran) == 3
    assert gpu.timed == []


def test_a_call_that_may_not_be_timed_is_asked_again(gpu, monkeypatch):
    gpu.faster = "neither"
    x, w, b = operands()
    with torch.no_grad():
        for _ in range(2):
            tconv.conv_transpose2d(x, w, b, 2, 1)
        assert gpu.timed == ["forward"] * 2
        assert served() == {("forward", "pytorch", "not timed"): 2}
        gpu.faster = "tconv"
        tconv.conv_transpose2d(x, w, b, 2, 1)
        assert served()["forward", ours(x), "timed"] == 1


def test_without_timing_it_is_asked_once(gpu, monkeypatch):
    monkeypatch.setenv("TCONV_TIMING", "0")
    gpu.faster = "neither"
    x, w, b = operands()
    with torch.no_grad():
        for _ in range(3):
            tconv.conv_transpose2d(x, w, b, 2, 1)
    assert gpu.timed == ["forward"]
    assert served() == {("forward", "pytorch", "not timed"): 3}


@pytest.mark.parametrize("why", ["general", "measured", "timed", "tuned", "own", "emulated"])
def test_a_wrong_tconv_timing_is_an_error_of_each_new_call(request, monkeypatch, why):
    if why == "emulated":
        monkeypatch.setenv("TCONV_EMULATE", "1")
    else:
        gpu = request.getfixturevalue("gpu")
    x, w, b = operands(dtype=torch.float64 if why == "general" else torch.float32)
    if why == "measured":
        row = Ahead(gpu.name, ours(x), "float32", "tf32", "contiguous")
        monkeypatch.setattr(choice, "ahead", lambda: frozenset({row}))
    within = {"tuned": tconv.autotune, "own": tconv.own_kernels}.get(why, torch.enable_grad)
    monkeypatch.setenv("TCONV_TIMING", "never")
    with within():
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^TCONV_TIMING must be 0 or 1, got .*'never'$"):
                tconv.conv_transpose2d(x, w, b, 2, 1)
    assert served() == {}


def test_a_wrong_tconv_timing_does_not_stop_calls_that_are_settled(gpu, monkeypatch):
    x, w, b = operands()
    with torch.no_grad():
        tconv.conv_transpose2d(x, w, b, 2, 1)
        monkeypatch.setenv("TCONV_TIMING", "never")
        tconv.conv_transpose2d(x, w, b, 2, 1)
        with pytest.raises(ValueError, match="TCONV_TIMING"):
            tconv.conv_transpose2d(x[:, :, 1:], w, b, 2, 1)


def test_a_gradient_of_a_gradient_goes_the_same_way(gpu):
    x, w, b = operands(channels=4, size=4, dtype=torch.float64)
    found = []
    for function in (tconv.conv_transpose2d, F.conv_transpose2d):
        out = function(x, w, b, 2, 1)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (x, w)))
    torch.testing.assert_close(*found)


def test_under_autocast_pytorch_casts_by_itself(gpu):
    gpu.faster = "pytorch"
    x, w, b = operands()
    with torch.autocast("cpu", torch.bfloat16):
        assert [step(x, w, b) for _ in range(2)] == [OURS, PYTORCHS]
        out = tconv.conv_transpose2d(x, w, b, 2, 1)
        assert out.dtype == torch.bfloat16
        expected = F.conv_transpose2d(x, w, b, 2, 1)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert served()["forward", "pytorch", "timed"] == 3


def test_tuning_weighs_pytorch_too(gpu, monkeypatch):
    asked = []

    def choose(problem, device, launch, flags):
        asked.append((problem.direction, flags))
        launch(PYTORCH)
        return PYTORCH

    monkeypatch.setattr(tuning, "choose", choose)
    x, w, b = operands()
    with tconv.autotune():
        for _ in range(2):
            tconv.conv_transpose2d(x, w, b, 2, 1).sum().backward()
    flags = (False, True, "cudnn")  # not deterministic, TF32
    assert asked == [(d, flags) for d in ("forward", "input_gradient", "weight_gradient")]
    assert {reason for _, _, reason in served()} == {"tuned"}


def test_the_rules(monkeypatch):
    def of(text, size, stem=None, dtype="float32", direction="forward"):
        problem = Layer.parse(text, size).problem(direction, dtype)
        able = [c for c in candidates(problem, HOPPER) if c.refusal is None]
        chosen = next(c for c in able if stem in (None, c.stem))
        return make_plan(problem, HOPPER, chosen)

    general = of("32,16,4,2,1", "8x64x64", "general_forward")
    assert verdict(general, "any") == Verdict("pytorch", "general")
    large = of("64,64,3", "64x1024x1024", dtype="float64")
    assert large.problem.wide_offsets
    assert verdict(large, "any") == Verdict("tconv", "too large")
    for_half = of("64,64,3", "8x64x64", "sm90_forward", "float16")
    assert verdict(for_half, "any") == Verdict("timed", "timed")
    gradient = of("64,64,3", "8x64x64", dtype="float16", direction="input_gradient")
    assert verdict(gradient, "any") == Verdict("timed", "timed")
    plan = of("64,64,3", "8x512x512")
    assert verdict(plan, "any") == Verdict("timed", "timed")
    row = Ahead("any", plan.stem, "float32", "tf32", "contiguous")
    monkeypatch.setattr(choice, "ahead", lambda: frozenset({row}))
    assert verdict(plan, "any") == Verdict("tconv", "measured")
    assert verdict(plan, "another") == Verdict("timed", "timed")
    monkeypatch.setattr(choice, "SURE_SECONDS", 2 * plan.cost)
    assert verdict(plan, "any") == Verdict("timed", "timed")


def test_what_is_ahead_follows_from_the_committed_rows(monkeypatch):
    monkeypatch.setattr(choice, "SURE_SECONDS", SURE_SECONDS)
    script = runpy.run_path(str(ROOT / "benchmarks" / "ahead.py"))
    # If this fails, run benchmarks/ahead.py --write.
    assert script["WRITTEN"].read_text(encoding="utf-8") == script["text"]()
    assert choice.ahead()


@pytest.mark.parametrize(
    ("ours", "pytorch", "faster"),
    [
        ((20, 25), (150, 30), True),  # the device is waited for
        ((40, 25), (150, 30), True),
        ((160, 20), (150, 30), False),
        ((20, 170), (150, 30), False),  # ours would make it wait for the host
        ((20, 3), (40, 30), True),  # either may be waited for: ours is ahead on both
        ((39, 20), (40, 30), True),  # by a little
        ((20, 22), (40, 30), False),  # the host
        ((45, 8), (40, 30), False),
        (
            (75, 30),
            (200, 30),
            False,
        ),  # it saves the device less than three times what it costs the host
        ((50, 30), (200, 30), True),
        ((20, 50), (170, 30), False),  # others may keep the host busy
        ((90, 80), (10000, 30), True),
    ],
)
def test_which_is_faster_counts_device_and_host(ours, pytorch, faster):
    race = Race(Timed(*ours), Timed(*pytorch))
    assert choice.ours_is_faster(race, "forward") is faster


def test_casts_of_autocast_count(gpu):
    assert choice.ours_is_faster(CLOSE, "forward")
    assert not choice.ours_is_faster(CLOSE, "forward", cast=True)
    gpu.faster = "close"
    x, w, _ = (operand.detach() for operand in operands())
    for half in (x.bfloat16(), w.bfloat16()), (x, w):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half[0] is x):
            for _ in range(3):
                tconv.conv_transpose2d(*half, None, 2, 1)
            assert is_left(gpu, *half) is (half[0] is x)


def test_a_gradient_within_our_node_is_pytorchs_if_it_saves_what_that_costs_the_host():
    for ours, faster in (
        ((90, 30), True),
        ((180, 30), True),
        ((200, 30), False),
    ):
        race = Race(Timed(*ours), Timed(100, 30))
        assert choice.ours_is_faster(race, "input_gradient") is faster


@pytest.mark.parametrize(
    ("races", "gains"),
    [
        ([((100, 20), (700, 20), True)] * 3, True),
        ([((20, 20), (390, 20), True)] * 3, None),  # the host may be waited for: 1200 in all
        ([((20, 20), (410, 20), True)] * 3, True),
        ([((600, 20), (730, 20), True)] * 3, None),  # it has to save 400
        ([((600, 20), (740, 20), True)] * 3, True),
        ([((400, 20), (900, 20), True), ((900, 20), (400, 20), False)], True),
        ([((900, 20), (400, 20), False)] * 3, False),
        ([], False),  # nothing of it was timed: rules leave all to PyTorch
    ],
)
def test_a_step_is_ours_if_it_saves_more_than_our_node_costs(races, gains):
    found = [(Race(Timed(*ours), Timed(*pytorch)), is_ours) for ours, pytorch, is_ours in races]
    assert choice.step_is_ours(found, lambda: None) is gains


def test_rows_of_what_is_ahead_name_kernels():
    stems = {family.STEM for family in FAMILIES if not family.GENERAL}
    assert {row.kernel for row in choice.ahead()} <= stems


def test_a_row_may_be_counted_by_several():
    gradient = ("input_gradient", "pytorch", "timed")
    counts.counter(*gradient).add()
    for reason in ("timed", "step"):
        counts.counter("forward", "pytorch", reason, gradient).add()
    assert tconv.statistics()[0] == counts.Served(*gradient, 3)
    assert served()["forward", "pytorch", "step"] == 1


def test_counting_is_exact_in_many_threads():
    one = counts.counter("forward", "kernel", "timed")
    threads = [threading.Thread(target=lambda: [one.add() for _ in range(1000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tconv.statistics(reset=True)[0].calls == 8000
    assert tconv.statistics() == ()


def test_the_emulator_keeps_to_our_kernels(monkeypatch):
    monkeypatch.setenv("TCONV_EMULATE", "1")
    x, w, _ = operands(4, 3)
    found = calls._find_forward(x, w, None, GEOMETRY)
    assert choosing.known(found, tuning.DEFAULT).reason == "own kernels"
