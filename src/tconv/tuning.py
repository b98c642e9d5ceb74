"""Choosing a kernel by timing: `with tconv.autotune():`, or `torch.backends.cudnn.benchmark`.

The plan's model ranks the candidates of a problem. Where tuning is on, the first call of a new
problem times the best few of them with its own tensors and takes the fastest, instead of the one
that the model puts first. The choice is kept beside the compiled kernels, so that the next process
does not time again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from statistics import median
from typing import Any

import torch

from tconv import settings
from tconv.jit.cache import default_cache, source_digest
from tconv.jit.compile import KERNELS
from tconv.jit.target import Target
from tconv.plan import Candidate, candidates, family, make_plan
from tconv.problem import Problem

logger = logging.getLogger("tconv")

Launch = Callable[[Candidate], object]
"""Runs a problem once with a candidate, on the tensors of the call."""

Timer = Callable[[Callable[[], object]], float]
"""Seconds that a call takes, once."""

TIMED_CANDIDATES = 6
"""How many candidates are timed: the cheapest by the model."""

REPEATS = 5
"""Timings of each candidate, in turns, after one warm-up."""

KEY_PREFIX = "autotune-"
"""What the keys of its cache entries start with."""

# Cycles (some 0.2 ms) that a GPU waits before a timing, while the host prepares the launch.
_HEAD_START = 400_000

_Key = tuple[Problem, int | None, str | None, str]

_lock = threading.Lock()
_tuning = threading.Lock()
_depth = 0
_chosen: dict[_Key, Candidate] = {}
_forced: ContextVar[Candidate | None] = ContextVar("tconv_candidate", default=None)


@contextlib.contextmanager
def autotune() -> Iterator[None]:
    """Within the block the first CUDA call of each new problem times the best candidates.

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
    try:
        yield
    finally:
        with _lock:
            _depth -= 1


@contextlib.contextmanager
def using(candidate: Candidate) -> Iterator[None]:
    """Run this thread's calls of the candidate's direction on the candidate, within the block.

    For measuring candidates one by one. The candidate must be able to run the problem.
    """
    token = _forced.set(candidate)
    try:
        yield
    finally:
        _forced.reset(token)


def may_choose() -> bool:
    """Whether `choose` may return a candidate: tuning is on, or this thread is within `using`."""
    # What torch.backends.cudnn.benchmark reads, which takes a microsecond to get there.
    return _depth > 0 or torch._C._get_cudnn_benchmark() or _forced.get() is not None


def timer_for(device: int | None) -> Timer | None:
    """How candidates are timed on a device; None for the emulator, whose times mean nothing."""
    return None if device is None else _CudaTimer(device)


def choose(problem: Problem, device: int | None, launch: Launch) -> Candidate | None:
    """The candidate to run a problem on, or None for the one that the plan chooses by its model.

    Args:
        problem: the call's.
        device: its ordinal; None in the emulator.
        launch: runs the problem with a candidate on the call's own tensors. The timings write into
            the result: nobody has read it yet, and the final launch writes all of it.

    Raises:
        CompileError, LaunchError, MissingDependencyError: a candidate cannot be compiled or run.
    """
    forced = _forced.get()
    if forced is not None and problem.direction == family(forced.stem).DIRECTION:
        return forced
    if not (_depth > 0 or torch._C._get_cudnn_benchmark()):
        return None
    key = _key(problem, device)
    found = _chosen.get(key)
    if found is not None:
        return found
    timer = timer_for(device)
    if timer is None:
        return None
    with _tuning:  # one at a time, so that no timing disturbs another
        found = _chosen.get(key)
        if found is not None:
            return found
        considered = _considered(problem, device)
        if len(considered) < 2:  # nothing to choose; the plan says why if there is none at all
            return None
        name = _gpu(device)
        entry = _entry(problem, _target(device), name, considered)
        found = _read(entry, considered)
        if found is None:
            if _capturing(device):
                return None
            found = _timed(problem, name, considered, launch, timer, entry)
        _chosen[key] = found
    return found


def known(problem: Problem, device: int | None) -> Candidate | None:
    """What was chosen for a problem by timing, in this process; None if nothing was."""
    return _chosen.get(_key(problem, device))


def forget() -> None:
    """Forgets what this process has chosen; what is in the cache folder stays."""
    _chosen.clear()


def _key(problem: Problem, device: int | None) -> _Key:
    return problem, device, settings.kernel(), settings.emulate_arch()


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
    only = settings.kernel()
    if only is not None and problem.direction != family(only).DIRECTION:
        only = None
    usable = [
        candidate
        for candidate in candidates(problem, _target(device))
        if candidate.refusal is None and only in (None, candidate.stem)
    ]
    return tuple(usable[:TIMED_CANDIDATES])


def _capturing(device: int | None) -> bool:
    if device is None:
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _entry(problem: Problem, target: Target, gpu: str, considered: Sequence[Candidate]) -> str:
    """The cache's key: all that the timings depend on, the kernels' sources among it."""
    parts = [gpu, str(torch.version.cuda), repr(problem)]
    for candidate in considered:
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


def _timed(
    problem: Problem,
    gpu: str,
    considered: Sequence[Candidate],
    launch: Launch,
    timer: Timer,
    entry: str,
) -> Candidate:
    """Times the candidates in turns, keeps the medians, and returns the fastest."""
    for candidate in considered:  # compiled, loaded, and warm
        launch(candidate)
    seconds: list[list[float]] = [[] for _ in considered]
    for _ in range(REPEATS):
        for candidate, of_candidate in zip(considered, seconds, strict=True):
            of_candidate.append(timer(partial(launch, candidate)))
    medians = [median(of_candidate) for of_candidate in seconds]
    fastest = considered[medians.index(min(medians))]
    record: dict[str, Any] = {
        "problem": str(problem),
        "gpu": gpu,
        "chosen": {"kernel": fastest.stem, "tile": str(fastest.tile)},
        "candidates": [
            {
                "kernel": candidate.stem,
                "tile": str(candidate.tile),
                "modelled_seconds": candidate.cost,
                "measured_seconds": measured,
            }
            for candidate, measured in zip(considered, medians, strict=True)
        ],
    }
    stem = f"{KEY_PREFIX}{problem.direction}"
    about = {"kind": "choice", "stem": stem, "arch": gpu, **record["chosen"]}
    default_cache().put(entry, json.dumps(record, indent=1).encode(), about)
    logger.debug(
        "timed %d candidates of %s: %s %s is the fastest, %.1f us",
        len(considered),
        problem,
        fastest.stem,
        fastest.tile,
        min(medians) * 1e6,
    )
    return fastest


class _CudaTimer:
    """CUDA events around a call, on the current stream of a device."""

    def __init__(self, device: int) -> None:
        self._device = device

    def __call__(self, call: Callable[[], object]) -> float:
        with torch.cuda.device(self._device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_HEAD_START)
            start.record()
            call()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e-3
