"""Who runs a CUDA call: one of our kernels, or PyTorch's operator. Needs no torch and no GPU.

PyTorch's operator is a candidate beside our kernels, in all three directions. Three rules decide,
in this order:

1. Our own kernels run where the user asks for them alone: within `own_kernels`, under
   TCONV_STRICT=1 or TCONV_KERNEL, and in the emulator.
2. What needs no timing: a general kernel never runs where PyTorch serves the call, and a kernel
   that committed rows show ahead of PyTorch on this GPU (`kernels/ahead.json`) always does.
3. Else the first call of a class of problems times both (`tuning.choose_runner`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from tconv import settings
from tconv.plan import Plan, family

Runs = Literal["tconv", "pytorch", "timed"]

Reason = Literal[
    "own kernels",
    "measured",
    "general",
    "too large",
    "short",
    "timed",
    "not timed",
    "small",
    "tuned",
]

SENTENCES: dict[Reason, str] = {
    "own kernels": "own_kernels, TCONV_STRICT, TCONV_KERNEL or the emulator keeps to our kernels",
    "measured": "committed rows show this kernel ahead of PyTorch on this GPU",
    "general": "only a general kernel of ours serves it, and PyTorch's operator is faster",
    "too large": "its offsets need 64 bits, which PyTorch's operator may refuse",
    "short": "a gradient this short waits for the host, and PyTorch's operator takes the host less",
    "timed": "the first call of its class timed both",
    "not timed": "TCONV_TIMING=0, or a CUDA graph was being captured, and nothing was timed before",
    "small": "its gradients are PyTorch's, whose own backward saves the host more than our forward "
    "would save the device",
    "tuned": "autotune or cudnn.benchmark timed the candidates and PyTorch's operator",
}
"""Why a call runs where it does, in words."""


SMALL = 100e-6
"""A call that ours takes less than this many modelled seconds for is small.

Where the gradients are PyTorch's, our forward needs a node of autograd in Python. That costs the
host 50 to 150 us a step, more than a small call saves where the device waits for the host.
"""


CHECKS = 0.7
"""Checks and look-ups in Python that lead to our launch, as a share of the host's time for
PyTorch's call: 10 us of 20 on an H200's host, and more under autocast and in one dimension. With
half, vocoders in 16 bits ran at 0.87 of PyTorch's speed.
"""


LEFT_BELOW = 300e-6
"""Modelled seconds below which gradients, and 16-bit and channels_last calls that have some, are
left to PyTorch.

Each takes a whole model's host longer than PyTorch's operator does, by casts, allocations and nodes
of autograd in Python, which timing one call does not see. Models of layers below 100 us lost up to
a quarter, although each layer was ahead by itself (benchmarks/results/h100/engine_models.log).
"""

DEVICE_BOUND = 5
"""From this ratio of the device's time to the host's on, a program likely waits for the device."""

HOST_MOST = 0.9
"""The most of the host's time for PyTorch's operator that ours may take where a program may wait
for the host. Its public function takes the host a quarter less than the operator that is timed.
"""

WORTH = 4
"""How many times the host's extra time the device must save. A vocoder of four layers that saved
the device 26 us each, and took the host 25 us longer, was slower by a tenth.
"""

SURE_SECONDS = 50e-6
"""Committed rows speak for calls that the model gives at least so many seconds.

Below, a program may wait for the host, whose times rows do not have.
"""


class Timed(NamedTuple):
    """Seconds that a call takes the device and the host, which work beside each other."""

    device: float
    host: float


def ours_is_faster(ours: Timed, pytorch: Timed) -> bool:
    """Whether our kernel is ahead of PyTorch's operator for a user.

    What surrounds a call is not known. A program may wait for the host, so ours must not take it
    longer. It may where PyTorch's call takes the device `DEVICE_BOUND` times as long as the host,
    if ours saves the device `WORTH` times as much as it costs the host.

    Args:
        ours: one launch of our kernels.
        pytorch: one call of its operator.
    """
    host = ours.host + CHECKS * pytorch.host
    saved = pytorch.device - ours.device
    if saved > 0 and pytorch.device >= DEVICE_BOUND * pytorch.host:
        return saved >= WORTH * (host - pytorch.host)
    return saved >= 0 and host <= HOST_MOST * pytorch.host


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

overrides: list[None] = []
"""Not empty while a block on some thread, such as `own_kernels`, changes who runs calls."""


@contextlib.contextmanager
def own_kernels() -> Iterator[None]:
    """Within the block no call is handed to PyTorch because its operator is faster.

    It holds in the whole process and all of its threads, so also for the gradients that autograd
    computes in threads of its own. For measuring and testing our kernels. What none of our kernels
    serves still goes to PyTorch; TCONV_STRICT=1 makes that an error.
    """
    global _depth
    with _lock:
        _depth += 1
    overrides.append(None)
    try:
        yield
    finally:
        overrides.pop()
        with _lock:
            _depth -= 1


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
    if problem.direction != "forward" and plan.cost < LEFT_BELOW:
        return Verdict("pytorch", "short")
    return Verdict("timed", "timed")


def is_small(plan: Plan) -> bool:
    """Whether PyTorch is to run a forward call together with gradients that it runs anyway."""
    problem = plan.problem
    usual = problem.dtype == "float32" and problem.y_layout == "contiguous"
    return plan.cost < (SMALL if usual else LEFT_BELOW)


@functools.cache
def ahead() -> frozenset[Ahead]:
    """What `kernels/ahead.json` holds; `benchmarks/ahead.py` writes it from committed rows."""
    path = Path(__file__).parent / "kernels" / "ahead.json"
    rows = json.loads(path.read_text(encoding="utf-8"))
    return frozenset(Ahead(*(row[name] for name in Ahead._fields)) for row in rows)
