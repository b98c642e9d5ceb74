"""tconv.autotune(): the fastest candidate is chosen, kept, found again, and never while capturing.

The timer is a stand-in, so that a machine without a GPU can say which candidate is to win.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import re
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F

import tconv
from tconv import private, tuning
from tconv.choice import Timed, ours_is_faster
from tconv.emulator.compile import compiler
from tconv.errors import LaunchError, MissingDependencyError
from tconv.jit.cache import DiskCache
from tconv.jit.target import Target
from tconv.layers import Layer
from tconv.plan import candidates, plan
from tconv.run import binding
from tconv.run.binding import Call, Settings
from tconv.tuning import PYTORCH

TARGET = Target.named("sm_90a")
LAYER = Layer.parse("32,32,4,2,1,bias=no", "2x16x16")
PROBLEM = LAYER.problem("forward")
GPU = 0
CUDNN = (False, True, "cudnn")
CUBLAS = (False, True, "cublas")


class Machine:
    """A stand-in for a GPU: what it was asked to run, and how long each candidate takes there."""

    def __init__(self, monkeypatch, folder):
        self.name = "NVIDIA H200"
        self.capturing = False
        self.launched = []
        self.fastest = 2
        self.pytorch = 1.5
        monkeypatch.setattr(tuning, "_target", lambda device: TARGET)
        monkeypatch.setattr(tuning, "_gpu", lambda device: self.name)
        monkeypatch.setattr(tuning, "timer_for", lambda device: self.time)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(private, "is_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(private, "current_device", lambda: GPU)
        self.folder = folder
        monkeypatch.setattr(tuning, "default_cache", lambda: self.cache)
        self.restart()

    def restart(self):
        """A new process, on the same folder."""
        self.cache = DiskCache(self.folder)
        self.launched.clear()
        tuning.forget()

    def launch(self, candidate):
        assert not self.capturing
        self.launched.append(candidate)

    def time(self, call):
        call()
        if self.launched[-1] is PYTORCH:
            return Timed(self.pytorch, 0.0)
        return Timed(abs(able().index(self.launched[-1]) - self.fastest) + 1.0, 0.0)

    def choose(self, problem=PROBLEM, flags=None):
        """As a call does that keeps to our kernels, or one that does not."""
        if tuning.mode() == tuning.DEFAULT:
            return None
        if tuning.mode() == tuning.FORCED:
            return tuning.forced(problem)
        return tuning.choose(problem, GPU, self.launch, flags)

    def choose_runner(self, problem=PROBLEM, flags=CUDNN):
        """As a forward call does."""
        race = tuning.race(problem, GPU, able()[0], flags, self.launch)
        if race is None:
            return None
        return able()[0] if ours_is_faster(race, "forward") else PYTORCH


def able(problem=PROBLEM):
    return [c for c in candidates(problem, TARGET) if c.refusal is None]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    yield Machine(monkeypatch, tmp_path / "cache")
    tuning.forget()


def test_without_asking_nothing_is_timed(machine):
    assert machine.choose() is None
    with tconv.autotune():
        pass
    assert machine.choose() is None
    assert machine.launched == []


@pytest.mark.parametrize("way", ["context", "cudnn.benchmark"])
def test_the_fastest_of_the_best_is_chosen(machine, monkeypatch, way):
    if way == "cudnn.benchmark":
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
        chosen = machine.choose()
    else:
        with tconv.autotune():
            chosen = machine.choose()
    assert chosen == able()[2]
    assert plan(PROBLEM, TARGET).tile != chosen.tile
    # Each candidate as often as any other, in turns, and no more of them than the best few.
    assert machine.launched == able()[: tuning.TIMED_CANDIDATES] * (1 + tuning.REPEATS)
    assert len(able()) > tuning.TIMED_CANDIDATES


def test_a_choice_is_made_once(machine):
    with tconv.autotune():
        first = machine.choose()
        machine.launched.clear()
        assert machine.choose() == first
    assert machine.launched == []
    assert tuning.known(PROBLEM, GPU) == first


def test_a_choice_outlives_the_process(machine):
    with tconv.autotune():
        first = machine.choose()
        machine.restart()
        machine.fastest = 4
        assert machine.choose() == first
        assert machine.launched == []
    (path,) = machine.folder.glob("autotune-forward-*.tconv")
    payload = json.loads(DiskCache(machine.folder).get(path.stem))
    assert payload["gpu"] == "NVIDIA H200"
    assert payload["chosen"] == {"kernel": first.stem, "tile": str(first.tile)}
    measured = [candidate["measured_seconds"] for candidate in payload["candidates"]]
    assert measured.index(min(measured)) == 2
    assert len(measured) == tuning.TIMED_CANDIDATES


@pytest.mark.parametrize("what", ["gpu", "batch", "source", "candidates"])
def test_another_key_is_timed_again(machine, monkeypatch, what):
    with tconv.autotune():
        machine.choose()
        machine.restart()
        machine.fastest = 4
        problem = PROBLEM
        if what == "gpu":
            machine.name = "NVIDIA H100"
        elif what == "batch":
            problem = Layer.parse("32,32,4,2,1,bias=no", "3x16x16").problem("forward")
        elif what == "source":
            honest = tuning.source_digest
            monkeypatch.setattr(
                tuning, "source_digest", lambda text, *a: honest(text and text + "// new", *a)
            )
        else:
            monkeypatch.setattr(tuning, "TIMED_CANDIDATES", 5)
        monkeypatch.setattr(
            machine, "time", lambda call: call() or Timed(len(machine.launched), 0.0)
        )
        assert machine.choose(problem) == able(problem)[0]  # by a clock that only goes up
        assert machine.launched


def test_a_damaged_entry_is_timed_again(machine, caplog):
    with tconv.autotune():
        machine.choose()
        (path,) = machine.folder.glob("autotune-*.tconv")
        machine.restart()
        machine.cache.put(path.stem, b'{"chosen": "nothing"}')
        assert machine.choose() == able()[2]
        assert machine.launched
    assert "holds no choice of a kernel" in caplog.text


def test_nothing_is_timed_while_a_graph_is_captured(machine):
    with tconv.autotune():
        machine.capturing = True
        assert machine.choose() is None
        machine.capturing = False
        first = machine.choose()
        machine.capturing = True
        assert machine.choose() == first  # known by now
        machine.restart()
        assert machine.choose() == first  # from the folder


def test_it_holds_for_all_threads_and_times_once(machine):
    found = []
    with tconv.autotune():
        threads = [
            threading.Thread(target=lambda: found.append(machine.choose())) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [able()[2]] * 4
    assert len(machine.launched) == tuning.TIMED_CANDIDATES * (1 + tuning.REPEATS)


def test_nested_blocks_and_errors(machine):
    with tconv.autotune():
        with pytest.raises(KeyError), tconv.autotune():
            raise KeyError
        assert machine.choose() is not None
    machine.restart()
    assert machine.choose() is None


def test_tconv_kernel_is_kept(machine, monkeypatch):
    monkeypatch.setenv("TCONV_KERNEL", "general_forward")
    monkeypatch.setattr(machine, "time", lambda call: call() or Timed(-len(machine.launched), 0.0))
    with tconv.autotune():
        assert machine.choose().stem == "general_forward"
    assert {candidate.stem for candidate in machine.launched} == {"general_forward"}
    monkeypatch.delenv("TCONV_KERNEL")
    assert tuning.known(PROBLEM, GPU) is None


def test_an_error_of_a_candidate_is_raised(machine, monkeypatch):
    def fails(candidate):
        raise LaunchError("no such kernel")

    monkeypatch.setattr(machine, "launch", fails)
    with tconv.autotune(), pytest.raises(LaunchError):
        machine.choose()
    assert tuning.known(PROBLEM, GPU) is None


def test_using_takes_one_candidate_of_its_direction(machine):
    last = able()[-1]
    with tuning.using(last):
        assert machine.choose() == last
        assert machine.choose(LAYER.problem("input_gradient")) is None
    assert machine.choose() is None
    assert machine.launched == []


def test_the_emulator_is_not_timed():
    assert tuning.timer_for(None) is None
    with tconv.autotune():
        assert tuning.choose(PROBLEM, None, lambda candidate: pytest.fail("was run")) is None


def test_a_step_in_the_emulator(monkeypatch):
    monkeypatch.setenv("TCONV_EMULATE", "1")
    layer, x = tconv.ConvTranspose2d(2, 2, 2), torch.randn(1, 2, 3, 3, requires_grad=True)
    with tconv.autotune():
        (found,) = torch.autograd.grad(layer(x).sum(), x)
    (expected,) = torch.autograd.grad(torch.nn.ConvTranspose2d.forward(layer, x).sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("direction", ["forward", "input_gradient", "weight_gradient"])
def test_calls_run_what_was_chosen(monkeypatch, tmp_path, direction):
    """Through the layer, in the emulator: timed, chosen, and right."""
    try:
        compiler()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TCONV_EMULATE", "1")
    monkeypatch.setattr(tuning, "TIMED_CANDIDATES", 2)
    monkeypatch.setattr(tuning, "REPEATS", 1)
    cache = DiskCache(tmp_path)
    monkeypatch.setattr(tuning, "default_cache", lambda: cache)
    clock = iter(range(100, 0, -1))  # what is timed last is the fastest

    def time(call):
        call()
        return Timed(next(clock), 0.0)

    monkeypatch.setattr(tuning, "timer_for", lambda device: time)
    used = []
    honest = Call.on

    def on(call, candidate):  # timed or chosen
        call = honest(call, candidate)
        used.append((call.problem, (call.plan.stem, call.plan.tile)))
        return call

    monkeypatch.setattr(Call, "on", on)
    tuning.forget()

    x, w = torch.randn(1, 3, 4, 4), torch.randn(3, 2, 3, 3)
    leaves = {"forward": (), "input_gradient": (x,), "weight_gradient": (w,)}[direction]
    results = []
    for function in (tconv.conv_transpose2d, F.conv_transpose2d):
        given = [t.clone().requires_grad_(any(t is leaf for leaf in leaves)) for t in (x, w)]
        with contextlib.ExitStack() as stack:
            if direction == "forward" and function is tconv.conv_transpose2d:
                stack.enter_context(tconv.autotune())
            out = function(*given, stride=2)
        if direction == "forward":
            results.append(out)
            continue
        with tconv.autotune():
            out.backward(torch.ones_like(out))
        results.append(next(t.grad for t in given if t.requires_grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)

    problem, _ = used[-1]
    assert problem.direction == direction
    best = [c for c in candidates(problem, TARGET) if c.refusal is None][:2]
    assert tuning.known(problem, None) == best[1]
    two = [(candidate.stem, candidate.tile) for candidate in best]
    ran = [choice for of, choice in used if of.direction == direction]
    assert ran == [*two, *two, two[1]]  # warm, timed, and the call itself
    tuning.forget()


@pytest.mark.parametrize(("seconds", "faster"), [(0.5, True), (1.5, False)])
def test_pytorch_is_a_candidate_of_autotune(machine, seconds, faster):
    machine.pytorch = seconds
    with tconv.autotune():
        chosen = machine.choose(flags=CUDNN)
        assert chosen == (PYTORCH if faster else able()[2])
        assert machine.launched.count(PYTORCH) == 1 + tuning.REPEATS
        assert tuning.known(PROBLEM, GPU) == chosen
        machine.restart()
        assert machine.choose(flags=CUDNN) == chosen  # from the folder
        assert machine.launched == []


@pytest.mark.parametrize("again", [lambda machine: None, Machine.restart], ids=["memory", "folder"])
def test_a_choice_beside_pytorch_holds_for_its_flags_alone(machine, again):
    for choose, faster in ((machine.choose, able()[2]), (machine.choose_runner, able()[0])):
        with tconv.autotune():
            machine.pytorch = 0.5
            assert choose(flags=CUDNN) == PYTORCH
            again(machine)
            machine.pytorch = 4.0
            assert choose(flags=CUBLAS) == faster
            again(machine)
            assert choose(flags=CUDNN) == PYTORCH


@pytest.mark.parametrize(("seconds", "faster"), [(0.5, True), (4.0, False)])
def test_a_class_of_problems_is_timed_against_pytorch_once(machine, seconds, faster):
    machine.pytorch = seconds
    chosen = machine.choose_runner()
    own = able()[0]
    assert chosen == (PYTORCH if faster else own)
    several = tuning.IN_A_ROW
    in_turns = ([own] * several + [PYTORCH] * several) * tuning.REPEATS
    assert machine.launched == [own, PYTORCH, *in_turns]
    machine.launched.clear()
    near = Layer.parse("32,32,4,2,1,bias=no", "2x18x20").problem("forward")
    assert machine.choose_runner(near) == chosen
    assert machine.launched == []
    machine.restart()
    assert machine.choose_runner(near) == chosen  # from the folder
    assert machine.launched == []
    far = Layer.parse("32,32,4,2,1,bias=no", "2x32x32").problem("forward")
    for other in ({"problem": far}, {"flags": (True, True, "cudnn")}, {"flags": CUBLAS}):
        machine.launched.clear()
        machine.choose_runner(**other)
        assert machine.launched


def test_a_class_is_not_timed_under_capture_or_without_leave(machine, monkeypatch):
    machine.capturing = True
    assert machine.choose_runner() is None
    machine.capturing = False
    monkeypatch.setenv("TCONV_TIMING", "0")
    assert machine.choose_runner() is None
    assert machine.launched == []
    monkeypatch.delenv("TCONV_TIMING")
    found = machine.choose_runner()
    assert found is not None
    monkeypatch.setenv("TCONV_TIMING", "0")
    assert machine.choose_runner() == found  # what is known serves


@pytest.mark.parametrize("value", ["null", '"1"', "NaN", "-1"])
def test_kept_times_that_are_none_are_taken_again(machine, value):
    machine.choose_runner()
    (entry,) = (one.key for one in machine.cache.entries())
    text = machine.cache.get(entry).decode()
    changed = re.sub(r'"measured_seconds": [^,]+', f'"measured_seconds": {value}', text)
    assert changed != text
    machine.restart()
    machine.cache.put(entry, changed.encode(), {"kind": "choice", "stem": "", "arch": ""})
    assert machine.choose_runner() is not None
    assert machine.launched


def test_ours_runs_where_pytorch_fails(machine, monkeypatch):
    def launch(candidate):
        machine.launched.append(candidate)
        if candidate is PYTORCH:
            raise RuntimeError("cuDNN serves no such layer")

    monkeypatch.setattr(machine, "launch", launch)
    assert machine.choose_runner() == able()[0]
    assert machine.launched.count(PYTORCH) == 1


def test_an_error_of_ours_is_not_swallowed(machine, monkeypatch):
    def launch(candidate):
        if candidate is not PYTORCH:
            raise LaunchError("no such kernel")

    monkeypatch.setattr(machine, "launch", launch)
    with pytest.raises(LaunchError):
        machine.choose_runner()


def test_the_class_of_a_problem_holds_all_but_its_sizes():
    base = tuning.size_class(PROBLEM)
    assert tuning.size_class(dataclasses.replace(PROBLEM, batch=3)) == base
    for change in (
        {"batch": 4},
        {"dtype": "float16", "math": "ieee"},
        {"math": "ieee"},
        {"y_layout": "channels_last"},
        {"bias": True},
        {"out_channels": 64},
        {"width": dataclasses.replace(PROBLEM.width, padding=0)},
    ):
        assert tuning.size_class(dataclasses.replace(PROBLEM, **change)) != base


def test_kernels_that_lost_a_timing_are_let_go(monkeypatch):
    """As on a device, where whoever holds a kernel keeps it loaded."""

    class Loaded:
        def __init__(self, source):
            self.source = source

    loaded = weakref.WeakSet()

    def load(source, device):
        kernel = Loaded(source)
        loaded.add(kernel)
        return kernel

    monkeypatch.setattr(binding.runtime, "load", load)
    monkeypatch.setattr(binding.Target, "for_device", lambda device: TARGET)
    problem = Layer.parse("64,64,3", "1x56x56").problem("forward")
    strides = ((1, 1, 1, 1),) * 3
    read = Settings(None, "", False, True, False, True, "cudnn")
    call = Call(problem, problem.y_shape, (1, 1, 1, 1), strides, read, 0)
    tried = [c for c in candidates(problem, TARGET) if c.refusal is None][:4]
    for candidate in tried:
        assert call.on(candidate).plan.stem == candidate.stem and call.on(candidate).bound
    call.forget_tried(tried[0])
    gc.collect()
    kept = {launch.source for launch in call.on(tried[0]).plan.launches}
    assert {kernel.source for kernel in loaded} == kept
