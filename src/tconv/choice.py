"""Who runs a CUDA call: one of our kernels, or PyTorch's operator. Needs no torch and no GPU.

PyTorch's operator is a candidate beside our kernels, in all three directions. Three rules decide,
in this order:

1. Our own kernels run where the user asks for them alone: within `own_kernels`, under
   TCONV_STRICT=1 or TCONV_KERNEL, and in the emulator.
2. What needs no timing: a general kernel never runs where PyTorch serves the call, and a kernel
   that committed rows show ahead of PyTorch on this GPU (`kernels/ahead.json`) always does.
3. Else the first call of a class of problems times both (`tuning.race`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tconv import settings
from tconv.plan import Plan, family
from tconv.problem import Direction

Runs = Literal["tconv", "pytorch", "timed"]

Reason = Literal[
    "own kernels",
    "measured",
    "general",
    "too large",
    "timed",
    "not timed",
    "step",
    "watched",
    "tuned",
]

SENTENCES: dict[Reason, str] = {
    "own kernels": "own_kernels, TCONV_STRICT, TCONV_KERNEL or the emulator keeps to our kernels",
    "measured": "committed rows show this kernel ahead of PyTorch on this GPU",
    "general": "only a general kernel of ours serves it, and PyTorch's operator is faster",
    "too large": "its offsets need 64 bits, which PyTorch's operator may refuse",
    "timed": "the first call of its class timed both",
    "not timed": "nothing was timed before, and TCONV_TIMING=0, a CUDA graph was being captured or "
    "nobody asked for the gradient",
    "step": "forward and gradients together save less than our node of autograd costs the host, "
    "which the program waits for",
    "watched": "its first calls show whether the program waits for the host or for the device",
    "tuned": "autotune or cudnn.benchmark timed the candidates and PyTorch's operator",
}
"""Why a call runs where it does, in words."""


HOST_MOST = 0.7
"""A call of ours keeps no program waiting for the host longer than PyTorch's does, if its launches
take the host this much of what PyTorch's operator takes it, both timed alike.

By the host's times of inference in which ours runs all of a model's layers and none (`--host` of
benchmarks/models.py): without autocast a layer's call takes ours 0.5 to 1.1 of what PyTorch's
function takes, 0.79 in the mean of nine entries, where launches took 0.26 to 0.58 of the operator
(benchmarks/results/h200/host_graphs.log; a mask head's one layer is lost in the noise there).
"""

CHECKED = 2
"""What a call of ours takes the host, in times of its launches, which alone are timed: its checks
and look-ups in Python take as long again.
"""

OF_OPERATOR = 0.55
"""What PyTorch's function takes the host at the least, in times of the operator that is timed: in a
loop functions of small layers take 18 to 37 us, but for one (runs 1 and 3 of host_time.csv), where
a vocoder's operators were timed at 43 to 59, a mask head's at 33 to 73 (models_races.log, all in
benchmarks/results/h200).
"""

CAST = 2
"""What the casts of autocast take the host more from Python than within PyTorch's function, in the
same times. An input that is cast already counts too. With 1, a mask head that waited for the host
took 0.46 ms by PyTorch's kernels and 0.50 with one layer by ours, which saved the device 46 us
(benchmarks/results/h200/models_casts_1.csv, models_races.log).
"""

DEVICE_BOUND = 3
"""From this ratio of the device's time to the host's on, a program likely waits for the device.

With 2, a vocoder that waited for the host took 0.87 ms by PyTorch's kernels and 0.91 with one layer
by ours; with 2.5, a DCGAN on a host that was slow at times 0.82 and 0.93
(models_bound_2.csv, models_bound_25.csv, in benchmarks/results/h200).
"""

WORTH = 3
"""How many times the host's extra time ours must save the device, in a call by itself."""

STEP = 60
"""From this time of the device's on, in times of our launches of its least call, a step of forward
and backward by PyTorch's nodes keeps a program waiting for the device, with what surrounds it.

Launches take the host 11 to 20 us. With 25 a DCGAN's training was at 0.94 of PyTorch's speed, with
20 a pose head's at 0.95, with 15 a vocoder's at 0.96 (models_steps_25.csv, models_steps_20.csv,
models_steps_15.csv in benchmarks/results/h200), with 60 all models at 0.985 or more
(host_steps.log, 5). Of shorter steps it is watched whether the program waits for the device.
"""

STEP_SAVES = 20
"""How many of those times a step of ours must save the device.

With half, when our node cost more, a pose head that waited for the host took 2.02 ms a step by
PyTorch's nodes and 2.20 with some of ours (benchmarks/results/h200/models_step_2.csv).
"""

HOST_SAVES = 20
"""How many of those times a step of ours saves the host where that is sure to be more than our node
costs it: an identity of autograd in Python costs a model's step 100 us, further ones 30 to 70 each,
where launches take 12 (host_steps.log, 10).
"""

NODE = 3
"""What our node of autograd, in Python, takes the host more than PyTorch's, in those times: -50 to
50 us a layer without a bias, 15 to 130 with one, where launches take 12 to 20 (host_steps.log).

A gradient by PyTorch's operator within our node takes about as much more than by our kernels.
"""

SURE_SECONDS = 100e-6
"""Committed rows speak for calls that the model gives at least so many seconds.

Below, a program may wait for the host, whose times rows do not have. Nor do they say how much a
step of forward and backward gains.
"""


class Timed(NamedTuple):
    """Seconds that a call takes the device and the host, which work beside each other."""

    device: float
    host: float


NEVER = Timed(float("inf"), 0.0)
"""What PyTorch's operator takes where it fails."""


class Race(NamedTuple):
    """The times of one call by our kernels, and by PyTorch's operator."""

    ours: Timed
    pytorch: Timed

    @property
    def saved(self) -> float:
        """Seconds that ours saves the device; negative where PyTorch's operator is ahead."""
        return self.pytorch.device - self.ours.device


def ours_is_faster(race: Race, direction: Direction, cast: bool = False) -> bool:
    """Whether our kernel runs a call rather than PyTorch's operator.

    Args:
        race: the call's times.
        direction: of the call.
        cast: whether autocast casts tensors of a forward call, which the times do not have.

    What surrounds a forward call is not known. It is ours if it saves the device something, and a
    program does not wait for its host either: because it takes the host no more than PyTorch's
    (`HOST_MOST`), or because PyTorch's takes the device so long that the host is ahead
    (`DEVICE_BOUND`), and ours saves the device more than it costs the host (`WORTH`).

    A gradient is computed within our node of autograd, which runs where a whole step gains by it
    (`step_is_ours`). PyTorch's operator takes the host longer there than ours by about what the
    node does (`NODE`), so it runs only where it saves the device as much.
    """
    ours, pytorch = race
    if direction != "forward":
        return race.saved > -NODE * ours.host
    if race.saved <= 0 or (not cast and ours.host <= HOST_MOST * pytorch.host):
        return race.saved > 0
    host, theirs = (CHECKED + CAST * cast) * ours.host, OF_OPERATOR * pytorch.host
    return pytorch.device >= DEVICE_BOUND * host and race.saved >= WORTH * (host - theirs)


def step_is_ours(
    races: Sequence[tuple[Race, bool]], is_ahead: Callable[[], bool | None]
) -> bool | None:
    """Whether a forward call and its gradients gain by our node of autograd.

    The alternative is PyTorch's own function with its own backward.

    Args:
        races: of the forward call and those of its gradients that are asked for, as far as they
            were timed, and whether ours runs each within our node.
        is_ahead: whether the host is ahead of the device where the program makes such calls, so
            that it waits for the device and our node costs it nothing; None if that is to be
            watched first.

    Returns:
        None where `is_ahead` decides, and does not know.
    """
    saved = sum(race.saved for race, is_ours in races if is_ours)
    if saved <= 0:
        return False
    device = sum(race.pytorch.device for race, _ in races)
    launches = min(race.ours.host for race, _ in races)
    if device >= STEP * launches and saved >= STEP_SAVES * launches:
        return True
    host = sum(race.pytorch.host - race.ours.host for race, is_ours in races if is_ours)
    return True if host >= HOST_SAVES * launches else is_ahead()


class Verdict(NamedTuple):
    """Who runs a call, and why. "timed": both have to be timed to tell."""

    runs: Runs
    reason: Reason


class Ahead(NamedTuple):
    """A class of problems in which one of our kernels is ahead of PyTorch's default.

    Attributes:
        gpu: the device's name, as CUDA gives it.
        kernel: the stem.
        dtype, math, layout: of the problems; the layout is the output's.
    """

    gpu: str
    kernel: str
    dtype: str
    math: str
    layout: str


_lock = threading.Lock()
_depth = 0

OWN, TIMING = "own_kernels", "timing"

overrides: list[str] = []
"""What blocks on some thread, such as `own_kernels`, change who runs calls: `OWN` or `TIMING`."""


@contextlib.contextmanager
def own_kernels() -> Iterator[None]:
    """Within the block no call is handed to PyTorch because its operator is faster.

    It holds in the whole process and all of its threads, so also for the gradients that autograd
    computes in threads of its own. For measuring and testing our kernels. What none of our kernels
    serves still goes to PyTorch; TCONV_STRICT=1 makes that an error.
    """
    global _depth
    overrides.append(OWN)  # first: a call that another thread keeps meanwhile is known within only
    with _lock:
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
        overrides.remove(OWN)


def own_only() -> bool:
    """Whether CUDA calls keep to our kernels."""
    return _depth > 0 or (
        settings.keeps_to_own_kernels() and (settings.strict() or settings.kernel() is not None)
    )


def verdict(plan: Plan, gpu: str) -> Verdict:
    """Who runs a problem by default, as far as that is known without timing.

    Args:
        plan: the problem's.
        gpu: the device's name, as CUDA gives it.
    """
    problem = plan.problem
    if family(plan.stem).GENERAL:
        # PyTorch raises where cuDNN does not serve such tensors. Ours runs.
        if problem.wide_offsets:
            return Verdict("tconv", "too large")
        return Verdict("pytorch", "general")
    found = Ahead(gpu, plan.stem, problem.dtype, problem.math, problem.y_layout)
    if plan.cost >= SURE_SECONDS and found in ahead():
        return Verdict("tconv", "measured")
    return Verdict("timed", "timed")


@functools.cache
def ahead() -> frozenset[Ahead]:
    """What `kernels/ahead.json` holds; `benchmarks/ahead.py` writes it from committed rows."""
    path = Path(__file__).parent / "kernels" / "ahead.json"
    rows = json.loads(path.read_text(encoding="utf-8"))
    return frozenset(Ahead(*(row[name] for name in Ahead._fields)) for row in rows)
