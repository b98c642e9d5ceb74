"""tconv.autotune(): the fastest candidate is chosen, kept, found again, and never while capturing.

The timer is a stand-in, so that a machine without a GPU can say which candidate is to win.
"""

from __future__ import annotations

import contextlib
import json
import threading

import pytest
import torch
import torch.nn.functional as F

import tconv
from tconv import tuning
from tconv.emulator.compile import compiler
from tconv.errors import LaunchError, MissingDependencyError
from tconv.jit.cache import DiskCache
from tconv.jit.target import Target
from tconv.layers import Layer
from tconv.plan import candidates, plan
from tconv.run.binding import Call

TARGET = Target.named("sm_90a")
LAYER = Layer.parse("32,32,4,2,1,bias=no", "2x16x16")
PROBLEM = LAYER.problem("forward")
GPU = 0


class Machine:
    """A stand-in for a GPU: what it was asked to run, and how long each candidate takes there."""

    def __init__(self, monkeypatch, folder):
        self.name = "NVIDIA H200"
        self.capturing = False
        self.launched = []
        self.fastest = 2
        monkeypatch.setattr(tuning, "_target", lambda device: TARGET)
        monkeypatch.setattr(tuning, "_gpu", lambda device: self.name)
        monkeypatch.setattr(tuning, "timer_for", lambda device: self.time)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
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
        return abs(able().index(self.launched[-1]) - self.fastest) + 1.0

    def choose(self, problem=PROBLEM):
        return tuning.choose(problem, GPU, self.launch)


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
        monkeypatch.setattr(machine, "time", lambda call: call() or float(len(machine.launched)))
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
    monkeypatch.setattr(machine, "time", lambda call: call() or -float(len(machine.launched)))
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
    monkeypatch.setattr(tuning, "timer_for", lambda device: lambda call: call() or next(clock))
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
