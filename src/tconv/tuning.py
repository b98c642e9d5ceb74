"""Choosing by timing: among our kernels and PyTorch's operator.

The plan's model ranks the candidates of a problem. Where tuning is on (`with tconv.autotune():`, or
`torch.backends.cudnn.benchmark`), the first call of a new problem times the best few of them, and
PyTorch's operator, with its own tensors. It takes the fastest, not what the model puts first.

Where it is off, our kernel and PyTorch's operator are timed (`race`), once for a class of problems,
and only where `tconv.choice` does not know who runs it without that.

Times alone do not tell who is to run a small step of forward and backward. For that it is watched
whether the program waits for the device (`Watch`).

Choices and times are kept beside the compiled kernels: the next process does not time again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tconv import choice, private, settings
from tconv.choice import NEVER, Race, Timed, ours_is_faster
from tconv.errors import NoKernelError
from tconv.jit.cache import default_cache, source_digest
from tconv.jit.compile import KERNELS
from tconv.jit.module import relaxed_capture
from tconv.jit.target import Target
from tconv.kernels.source import file_of
from tconv.plan import Candidate, family, make_plan, usable
from tconv.problem import Problem

logger = logging.getLogger("tconv")

PYTORCH = Candidate("pytorch", None, None, float("inf"))
"""PyTorch's operator, which no model puts a time to."""

Launch = Callable[[Candidate], object]
"""Runs a problem once with a candidate, on the tensors of the call."""

Timer = Callable[[Callable[[], object]], Timed]
"""What a call takes, once."""

TIMED_CANDIDATES = 6
"""How many candidates are timed: the cheapest by the model."""

REPEATS = 5
"""Timings of each candidate, in turns, after one warm-up."""

IN_A_ROW = 4
"""Calls of a timing that says who runs a class of problems, where the host's time may decide.

The first after a pause takes the host longer than those of a running program.
"""

HOST_DECIDES_BELOW = 1e-3
"""Modelled seconds below which the host's time may decide."""

WATCHED, COUNTED = 64, 12
"""Calls of a class that are watched, and how many of them count, the last ones.

The first come behind timings, which wait for the device, and take the host longer than later ones:
a layer's first step by PyTorch took 0.8 ms, the tenth 0.25, much later ones 0.1
(benchmarks/results/h200/host_steps.log, 12).
"""

AHEAD = 0.75
"""The share of calls in which the device has to lag behind in a program that waits for it.

A program that waits for a result in each step finds the device idle in the next one's first layer.
"""

KEY_PREFIX = "autotune-"
"""What the keys of cache entries start with that hold a problem's fastest candidate."""

RUNNER_PREFIX = "runner-"
"""What the keys of cache entries start with that say who is how fast for a class of problems."""

# Stands for any number of pixels along an axis; no padding leaves nothing of it.
_ANY_SIZE = 2**40

# Cycles (some 0.5 ms) that a GPU waits before a timing, while the host prepares the launches.
_HEAD_START = 1_000_000

_lock = threading.Lock()
_tuning = threading.Lock()
_depth = 0
_epoch = 1
_chosen: dict[tuple[Any, ...], Candidate] = {}
_races: dict[tuple[Any, ...], Race] = {}
_watches: dict[tuple[Any, ...], Watch] = {}
_seen: dict[int, list[bool]] = {}  # by all watches of a device
_forced: ContextVar[Candidate | None] = ContextVar("tconv_candidate", default=None)


@contextlib.contextmanager
def autotune() -> Iterator[None]:
    """Within the block the first CUDA call of each new problem times the best candidates.

    PyTorch's operator is one of them, except within `own_kernels`.

    It holds in the whole process and all of its threads, so also for the gradients that autograd
    computes in threads of its own. `torch.backends.cudnn.benchmark = True`, which makes cuDNN do
    the same, has the same effect. A choice is kept in the cache folder and in memory. It serves
    the calls of this problem wherever tuning is on; elsewhere the model chooses.

    Nothing is timed while a CUDA graph is captured: an earlier choice serves, else the model. The
    choice depends on timings, so another machine, or this one after `tconv cache clear`, may choose
    a kernel that sums in another order.
    """
    global _depth
    with _lock:
        _depth += 1
    choice.overrides.append(choice.TIMING)
    try:
        yield
    finally:
        choice.overrides.remove(choice.TIMING)
        with _lock:
            _depth -= 1


@contextlib.contextmanager
def using(candidate: Candidate) -> Iterator[None]:
    """Run this thread's calls of the candidate's direction on the candidate, within the block.

    For measuring candidates one by one. The candidate must be able to run the problem.
    """
    token = _forced.set(candidate)
    choice.overrides.append(choice.TIMING)
    try:
        yield
    finally:
        choice.overrides.remove(choice.TIMING)
        _forced.reset(token)


DEFAULT = 0
"""The `mode` in which the model chooses."""

FORCED = -1
"""The `mode` within `using`."""


def mode() -> int:
    """How this thread's calls are chosen now: `DEFAULT`, `FORCED`, or a number while tuning is on.

    What was chosen for a call stays chosen while the mode is the same, and is not `FORCED`.
    """
    if _forced.get() is not None:
        return FORCED
    return _epoch if _depth > 0 or private.is_cudnn_benchmark() else DEFAULT


def forced(problem: Problem) -> Candidate | None:
    """The candidate that `using` names, if it can run the problem's direction."""
    candidate = _forced.get()
    if candidate is None or problem.direction != family(candidate.stem).DIRECTION:
        return None
    return candidate


def timer_for(device: int | None) -> Timer | None:
    """How candidates are timed on a device; None for the emulator, whose times mean nothing."""
    return None if device is None else _CudaTimer(device)


def choose(
    problem: Problem,
    device: int | None,
    launch: Launch,
    flags: tuple[object, ...] | None = None,
) -> Candidate | None:
    """The fastest candidate of a problem, or None for the one that the plan chooses by its model.

    Args:
        problem: the call's.
        device: its ordinal; None in the emulator.
        launch: runs the problem with a candidate on the call's own tensors.
        flags: those of PyTorch that its operator depends on; None if it is no candidate.

    Raises:
        CompileError, LaunchError, MissingDependencyError: a candidate cannot be compiled or run.
    """
    key = (*_key(problem, device), flags)

    def considered() -> tuple[Candidate, ...]:
        return _considered(problem, device) + (PYTORCH,) * (flags is not None)

    def entry(among: Sequence[Candidate]) -> str:
        return _entry(problem, _target(device), _gpu(device), among, flags)

    return _chosen.get(key) or _choose(key, considered, entry, problem, device, launch)


def race(
    problem: Problem, device: int, own: Candidate, flags: tuple[object, ...], launch: Launch
) -> Race | None:
    """The times of our candidate and of `PYTORCH`; None if they are not known and may not be taken.

    What one call finds serves all problems of its class (`size_class`): a new image size is not
    timed again.

    Args:
        problem, device, launch: as in `choose`.
        own: what the plan chooses.
        flags: those of PyTorch that its operator depends on.

    Raises:
        CompileError, LaunchError, MissingDependencyError: ours cannot be compiled or run.
    """
    of_class = _class_of(problem, own.stem, flags)
    key = (device, *of_class)

    def run(candidate: Candidate) -> object:
        return launch(PYTORCH if candidate is PYTORCH else own)

    found = _races.get(key)
    timer = None if found is not None else timer_for(device)
    if timer is None:
        return found
    with _tuning:  # one at a time, so that no timing disturbs another
        text = f"#include <{file_of(own.stem)}>\n"
        parts = [_gpu(device), *_pytorch_versions(), repr(of_class)]
        entry = f"{RUNNER_PREFIX}{problem.direction}-{source_digest(text, [KERNELS], parts)}"
        found = _races.get(key) or _read_race(entry)
        if found is None:
            if private.is_capturing(device) or not settings.timing():
                return None
            # Without its tile, which differs from size to size.
            ours = Candidate(own.stem, None, None, own.cost)
            calls = IN_A_ROW if own.cost < HOST_DECIDES_BELOW else 1
            times = _timed(problem, (ours, PYTORCH), run, timer, calls)
            found = Race(times[ours], times.get(PYTORCH, NEVER))
            faster = ours if ours_is_faster(found, problem.direction) else PYTORCH
            _keep(entry, problem, _gpu(device), times, faster)
        _races[key] = found
    return found


def raced(problem: Problem, device: int, stem: str, flags: tuple[object, ...]) -> Race | None:
    """The times that `race` found for the class in this process; None if it found none."""
    return _races.get((device, *_class_of(problem, stem, flags)))


class Watch:
    """Sees whether a program that calls a class of problems waits for the device, or for the host.

    Layers of one program are watched beside each other, and what is seen of one counts for all: the
    host is behind somewhere in a program that waits for it, and ahead elsewhere.

    Not thread-safe: what two threads see counts alike.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._seen = _seen.setdefault(device, [])
        self._first: int | None = None  # of what counts
        self._is_ahead: bool | None = None
        self._calls_left = WATCHED

    @property
    def is_ahead(self) -> bool | None:
        """Whether the host is: the program waits for the device then. None if it is not known."""
        return self._is_ahead

    def goes_on(self) -> bool:
        """Whether it is to see calls now. None of what a CUDA graph captures runs at once."""
        return self._calls_left > 0 and not private.is_capturing(self._device)

    def see(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """The function's result. Sees whether the device gets there only when the host has left.

        Our node of autograd costs the host about as much time as passes meanwhile.
        """
        there = torch.cuda.Event()
        there.record(torch.cuda.current_stream(self._device))
        try:
            result = function(*arguments)
        except BaseException:  # `checkpoint` stops so, when it has what it wants
            with contextlib.suppress(RuntimeError):
                self._note(there)
            raise
        self._note(there)
        return result

    def _note(self, there: torch.cuda.Event) -> None:
        with relaxed_capture():  # else it breaks what another thread captures
            self._seen.append(not there.query())
        self._calls_left -= 1
        if self._calls_left <= COUNTED and self._first is None:
            self._first = len(self._seen)
        if self._calls_left <= 0:
            seen = self._seen[self._first :]
            self._is_ahead = sum(seen) >= AHEAD * len(seen)


def watch(problem: Problem, device: int, stem: str, flags: tuple[object, ...]) -> Watch:
    """The one of steps of a problem's class in this process.

    Args:
        problem, device, stem: of the forward call, as for `raced`.
        flags: those of PyTorch, and whatever else the steps differ by.
    """
    return _watches.setdefault((device, *_class_of(problem, stem, flags)), Watch(device))


def _class_of(problem: Problem, stem: str, flags: tuple[object, ...]) -> tuple[object, ...]:
    """What times hold for."""
    return size_class(problem), stem, flags


def size_class(problem: Problem) -> tuple[object, ...]:
    """All of a problem but its batch and image size, and the power of two below its pixels."""
    axes = (dataclasses.replace(axis, size=_ANY_SIZE) for axis in (problem.height, problem.width))
    layer = dataclasses.replace(problem, batch=1, height=next(axes), width=next(axes))
    pixels = problem.batch * problem.height.size * problem.width.size
    return layer, pixels.bit_length(), problem.height.size == 1


def _choose(
    key: tuple[Any, ...],
    considered: Callable[[], tuple[Candidate, ...]],
    entry_of: Callable[[Sequence[Candidate]], str],
    problem: Problem,
    device: int | None,
    launch: Launch,
) -> Candidate | None:
    """The fastest: as remembered, as the cache folder says, or as timed now."""
    timer = timer_for(device)
    if timer is None:
        return None
    with _tuning:  # one at a time, so that no timing disturbs another
        found = _chosen.get(key)
        if found is not None:
            return found
        among = considered()
        if len(among) < 2:  # nothing to choose; the plan says why if there is none at all
            return None
        entry = entry_of(among)
        found = _read(entry, among)
        if found is None:
            if device is not None and private.is_capturing(device):
                return None
            times = _timed(problem, among, launch, timer)
            found = min(times, key=lambda candidate: times[candidate])
            _keep(entry, problem, _gpu(device), times, found)
        _chosen[key] = found
    return found


def known(problem: Problem, device: int | None) -> Candidate | None:
    """What was chosen for a problem by timing, in this process; None if nothing was."""
    key = _key(problem, device)
    found = {flags: chosen for (*of, flags), chosen in list(_chosen.items()) if tuple(of) == key}
    return found.get(None) or next(iter(found.values()), None)


def forget() -> None:
    """Forgets what this process has chosen; what is in the cache folder stays."""
    global _epoch
    _chosen.clear()
    _races.clear()
    _watches.clear()
    _seen.clear()
    _epoch += 1


def _key(problem: Problem, device: int | None) -> tuple[Any, ...]:
    return problem, device, settings.kernel(), settings.emulate_arch()


def _pytorch_versions() -> tuple[str, ...]:
    """What PyTorch's operator is made of."""
    return torch.__version__, str(torch.version.cuda), str(torch.backends.cudnn.version())


def _target(device: int | None) -> Target:
    if device is None:
        return Target.named(settings.emulate_arch())
    return Target.for_device(device)


def _gpu(device: int | None) -> str:
    if device is None:
        return f"emulated {settings.emulate_arch()}"
    return torch.cuda.get_device_name(device)


def _considered(problem: Problem, device: int | None) -> tuple[Candidate, ...]:
    """The candidates to time: those that the plan would choose among, the cheapest by the model."""
    try:
        return usable(problem, _target(device))[:TIMED_CANDIDATES]
    except NoKernelError:  # the plan says why
        return ()


def _entry(
    problem: Problem,
    target: Target,
    gpu: str,
    considered: Sequence[Candidate],
    flags: tuple[object, ...] | None,
) -> str:
    """The cache's key: all that the timings depend on, the kernels' sources among it."""
    parts = [gpu, str(torch.version.cuda), repr(problem)]
    for candidate in considered:
        if candidate is PYTORCH:
            parts += [*_pytorch_versions(), repr(flags)]
            continue
        source = make_plan(problem, target, candidate).kernel.source
        parts += [candidate.stem, str(candidate.tile), source_digest(source.text(), [KERNELS])]
    return f"{KEY_PREFIX}{problem.direction}-{source_digest('', [], parts)}"


def _read(entry: str, considered: Sequence[Candidate]) -> Candidate | None:
    """The choice in the cache; None where there is none, or none that can be read."""
    payload = default_cache().get(entry)
    if payload is None:
        return None
    try:
        chosen = json.loads(payload)["chosen"]
        wanted = (chosen["kernel"], chosen["tile"])
    except (ValueError, KeyError, TypeError):
        logger.warning("the cache entry %s holds no choice of a kernel; it is timed again", entry)
        return None
    found = [c for c in considered if (c.stem, str(c.tile)) == wanted]
    return found[0] if found else None


def _read_race(entry: str) -> Race | None:
    """The times in the cache; None where there are none, or none that can be read."""
    payload = default_cache().get(entry)
    if payload is None:
        return None
    try:
        times = {
            row["kernel"] == PYTORCH.stem: Timed(row["measured_seconds"], row["host_seconds"])
            for row in json.loads(payload)["candidates"]
        }
        # NaN is in no order.
        if not all(0 <= seconds < NEVER.device for timed in times.values() for seconds in timed):
            raise ValueError("seconds are finite, and not below 0")
        return Race(times[False], times.get(True, NEVER))
    except (ValueError, KeyError, TypeError):
        logger.warning("the cache entry %s holds no times; the call is timed again", entry)
        return None


def _timed(
    problem: Problem,
    considered: Sequence[Candidate],
    launch: Launch,
    timer: Timer,
    calls: int = 1,
) -> dict[Candidate, Timed]:
    """Times the candidates in turns: the device's median, and the host's least.

    Whatever else runs on the host only adds to its time.

    Args:
        problem: the call's.
        considered: the candidates. PyTorch's operator may fail, and is left out then.
        launch: runs one.
        timer: times it.
        calls: in a row, in one timing.
    """

    def run(candidate: Candidate) -> None:
        for _ in range(calls):
            launch(candidate)

    timings: dict[Candidate, list[Timed]] = {}
    for candidate in considered:  # compiled, loaded, and warm
        try:
            launch(candidate)
        except RuntimeError as error:
            if candidate is not PYTORCH:
                raise
            logger.debug("PyTorch's operator failed, ours runs %s: %s", problem, error)
        else:
            timings[candidate] = []
    for _ in range(REPEATS):
        for candidate, of_candidate in timings.items():
            device, host = timer(partial(run, candidate))
            of_candidate.append(Timed(device / calls, host / calls))
    return {
        candidate: Timed(median(one.device for one in times), min(one.host for one in times))
        for candidate, times in timings.items()
    }


def _keep(
    entry: str, problem: Problem, gpu: str, times: dict[Candidate, Timed], fastest: Candidate
) -> None:
    """Writes times and the choice to the cache."""
    record: dict[str, Any] = {
        "problem": str(problem),
        "gpu": gpu,
        "chosen": {"kernel": fastest.stem, "tile": str(fastest.tile)},
        "candidates": [
            {
                "kernel": candidate.stem,
                "tile": str(candidate.tile),
                "modelled_seconds": None if candidate is PYTORCH else candidate.cost,
                "measured_seconds": measured.device,
                "host_seconds": measured.host,
            }
            for candidate, measured in times.items()
        ],
    }
    stem = entry[: entry.index(problem.direction) + len(problem.direction)]
    about = {"kind": "choice", "stem": stem, "arch": gpu, **record["chosen"]}
    default_cache().put(entry, json.dumps(record, indent=1).encode(), about)
    logger.debug(
        "timed %d candidates of %s: %s %s is the fastest, %.1f us",
        len(times),
        problem,
        fastest.stem,
        fastest.tile,
        times[fastest].device * 1e6,
    )


class _CudaTimer:
    """CUDA events around a call, on the current stream of a device."""

    def __init__(self, device: int) -> None:
        self._device = device

    def __call__(self, call: Callable[[], object]) -> Timed:
        with torch.cuda.device(self._device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_HEAD_START)
            start.record()
            begun = time.perf_counter()
            call()
            host = time.perf_counter() - begun
            end.record()
            end.synchronize()
            return Timed(start.elapsed_time(end) * 1e-3, host)
