"""Binding: from a call to launches that are complete but for the operands' addresses."""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, cast

from tconv import sizes, tuning
from tconv.choice import Race, Reason
from tconv.counts import Counter
from tconv.emulator.launch import EmulatedKernel
from tconv.errors import CompileError
from tconv.jit import runtime, tensor_map
from tconv.jit.module import Kernel
from tconv.jit.series import Series
from tconv.jit.target import Target
from tconv.kernels.launch import BoundLaunch
from tconv.kernels.source import KernelSource
from tconv.plan import Candidate, Plan, make_plan, plan
from tconv.problem import Problem, Sizes
from tconv.tuning import Watch


class Settings(NamedTuple):
    """What a call depends on besides its tensors.

    Attributes:
        kernel: TCONV_KERNEL.
        arch, sanitize: the emulator's TCONV_EMULATE_ARCH and TCONV_SANITIZE; "" and False on a GPU.
        own: whether the call keeps to our kernels.
        deterministic: whether PyTorch's operator must be.
        tf32: whether PyTorch's operator may use it.
        library: what PyTorch's operator computes with, "cudnn" or `flags.library_without_cudnn`.
    """

    kernel: str | None
    arch: str
    sanitize: bool
    own: bool
    deterministic: bool
    tf32: bool
    library: str

    @property
    def of_pytorch(self) -> tuple[object, ...]:
        """Those flags of PyTorch that its operator's time depends on."""
        return self.deterministic, self.tf32, self.library


@dataclass(frozen=True, slots=True)
class Way:
    """Who runs a call.

    Attributes:
        candidate: the kernel and tile; `tuning.PYTORCH` for PyTorch's operator; None for what the
            plan chooses.
        reason: why.
        served: counts the calls that went this way.
        race: the times that tell, where it was timed.
    """

    candidate: Candidate | None
    reason: Reason
    served: Counter
    race: Race | None = None


class Bound(NamedTuple):
    """What a call launches, and what its launches share. A plan has more, and is let go of.

    Binding takes longer than a launch, so it is done once for all calls on tensors of the same
    sizes and strides.

    Attributes:
        kernels: of its launches.
        launches: the plan's, in order.
        packed_elements: float32 values of the workspace; 0 without one.
        partial_shape: [splits, Cin, Cout/groups, kH, kW] of the partial results; None without them.
        partial_strides: theirs, in elements.
        adds: whether a launch adds the partial results.
    """

    kernels: tuple[Kernel | EmulatedKernel, ...]
    launches: tuple[BoundLaunch, ...]
    packed_elements: int
    partial_shape: Sizes | None
    partial_strides: Sizes
    adds: bool

    @property
    def pytorch_adds(self) -> bool:
        """Whether PyTorch has to add the partial results."""
        return self.partial_shape is not None and not self.adds


@dataclass(frozen=True)
class Call:
    """A map on tensors of given sizes, strides and alignment, wherever they lie.

    Attributes:
        problem: the call's.
        shape, result_strides: of the tensor that it writes. Behind a weight gradient's partial
            results, which have `partial_shape`, that is what they are added to.
        strides: of x, w and y, in elements.
        settings: what was read of the environment and PyTorch's flags.
        device: the device's ordinal; None in the emulator.
        choice: what the plan is made of; None lets the plan choose.
    """

    problem: Problem
    shape: Sizes
    result_strides: Sizes
    strides: tuple[Sizes, Sizes, Sizes]
    settings: Settings
    device: int | None
    choice: Candidate | None = None

    def on(self, choice: Candidate) -> Call:
        """This call on a candidate, untuned."""
        found = self._chosen.get(choice)
        if found is None:  # of two threads that make one at a time, both go on with the first's
            found = self._chosen.setdefault(choice, dataclasses.replace(self, choice=choice))
        return found

    def forget_tried(self, chosen: Candidate | None) -> None:
        """Lets go of the kernels of all candidates but the chosen one."""
        for candidate in list(self._chosen):  # another thread may do the same
            if candidate != chosen:
                self._chosen.pop(candidate, None)

    @functools.cached_property
    def _chosen(self) -> dict[Candidate, Call]:
        return {}

    @functools.cached_property
    def ways(self) -> dict[int, Way]:
        """Who runs it, for each `tuning.mode` in which that is settled."""
        return {}

    def watch(self, wanted: tuple[bool, bool]) -> Watch:
        """Sees whether programs wait for the device in a forward call of its class, on a GPU.

        Args:
            wanted: whether the input's and the weight's gradients are recorded, without which a
                step takes other times.
        """
        found = self._watches.get(wanted)
        if found is None:
            assert self.device is not None
            flags = *self.settings.of_pytorch, *wanted
            found = tuning.watch(self.problem, self.device, self.planned.stem, flags)
            self._watches[wanted] = found
        return found

    @functools.cached_property
    def _watches(self) -> dict[tuple[bool, bool], Watch]:
        return {}

    @property
    def target(self) -> Target:
        """What its plan is made for."""
        if self.device is None:
            return Target.named(self.settings.arch)
        return Target.for_device(self.device)

    @property
    def planned(self) -> Plan:
        """What our kernels would run it with, if nothing else is chosen."""
        return _planned(self.problem, self.device, self.target, None)

    @property
    def plan(self) -> Plan:
        """The plan that its launches come from."""
        return _planned(self.problem, self.device, self.target, self.choice)

    @functools.cached_property
    def bound(self) -> Bound:
        """The plan on compiled kernels."""
        strides = dict(zip("xwy", self.strides, strict=True))
        chosen, kernels = _prepare(
            self.problem, self.device, self.target, self.choice, self.settings.sanitize
        )
        if self.device is not None:
            runtime.hold(self)
        every = (*chosen.launches, chosen.addition) if chosen.addition else chosen.launches
        return Bound(
            kernels,
            tuple([launch.bind(strides) for launch in every]),
            chosen.packed,
            (chosen.splits, *self.problem.w_shape) if chosen.splits else None,
            chosen.partial_strides if chosen.splits else (),
            chosen.addition is not None,
        )

    @functools.cached_property
    def filled(self) -> Filled:
        """Its launches on a device."""
        return Filled(self.bound)

    def filled_before(self, other: Call) -> Filled:
        """Its launches on a device, and behind them those of another call."""
        found = self._joined.get(id(other))
        # The other may have gone, and a third lie in its place.
        if found is not None and found[0]() is other:
            return found[1]
        if len(self._joined) >= _MOST_JOINED:
            self._joined.clear()
        filled = Filled(self.bound, other.bound)
        self._joined[id(other)] = weakref.ref(other), filled
        other._joined_before[id(self)] = weakref.ref(self)
        return filled

    @functools.cached_property
    def _joined(self) -> dict[int, tuple[weakref.ref[Call], Filled]]:
        """By the identity of the call behind."""
        return {}

    @functools.cached_property
    def _joined_before(self) -> dict[int, weakref.ref[Call]]:
        """Those whose launches hold this one's kernels too, by their identity."""
        return {}

    def uses(self) -> int:
        """How often it has launched its kernels since they were loaded."""
        filled = vars(self).get("filled")
        # Without: a thread is about to. What is let go of now, nobody would look at again.
        return 2 if filled is None else filled.uses

    def release(self) -> None:
        """Lets go of its kernels, which the next launch loads again."""
        for reference in list(self._joined_before.values()):
            before = reference()
            if before is not None:
                before._joined.pop(id(self), None)
        for name in ("bound", "filled", "_joined", "_joined_before"):
            vars(self).pop(name, None)


_MOST_FILLED, _MOST_JOINED = 64, 8


class Filled(dict[Sizes, Series]):
    """Launches of a call, or of some behind each other, on a device, by the operands' addresses.

    Remembered: a program's calls soon meet the allocator's same few addresses again, and filling in
    takes longer than a launch. One object a size, where an `lru_cache` has six.

    Attributes:
        uses: how often they were launched.
    """

    __slots__ = ("_bound", "uses")

    def __init__(self, *bound: Bound) -> None:
        super().__init__()
        self._bound = bound
        self.uses = 0

    def __missing__(self, addresses: Sizes) -> Series:
        groups, count = [], len(addresses) // len(self._bound)
        for number, needed in enumerate(self._bound):
            own, group = addresses[number * count :][:count], []
            for kernel, bound in zip(needed.kernels, needed.launches, strict=True):
                assert not isinstance(kernel, EmulatedKernel)
                arguments = bound.arguments(own, tensor_map.encode)
                group.append(kernel.prepare(bound.grid, arguments))
            groups.append(group)
        if len(self) >= _MOST_FILLED:
            self.clear()
        series = self[addresses] = Series(*groups)
        return series


def _planned(
    problem: Problem, device: int | None, target: Target, choice: Candidate | None
) -> Plan:
    """What our kernels run a problem with: in the emulator, each size has its own kernel."""
    if choice is not None:
        return make_plan(problem, target, choice)
    return plan(problem, target) if device is None else sizes.planned(problem, target)


def _prepare(
    problem: Problem, device: int | None, target: Target, choice: Candidate | None, sanitize: bool
) -> tuple[Plan, tuple[Kernel | EmulatedKernel, ...]]:
    """The plan and the compiled kernels of its launches.

    Not remembered: who holds a kernel keeps it loaded, and that is the call.
    """
    chosen = _planned(problem, device, target, choice)
    sources = chosen.sources
    if choice is None and device is not None:
        sizes.expect(problem, chosen)

    def load(source: KernelSource) -> Kernel | EmulatedKernel:
        if device is None:
            return EmulatedKernel(source, sanitize=sanitize)
        return runtime.load(source, device)

    if device is not None:
        # A thread takes longer to start than all else that a new size needs.
        found = tuple(runtime.find(source, device) for source in sources)
        if None not in found:
            return chosen, cast(tuple[Kernel, ...], found)
    try:
        # Beside each other: NVRTC takes a second or two for each, and 13.0 has a lock for half of
        # that. No thread can be started when the interpreter ends.
        if len(sources) > 1 and threading.main_thread().is_alive():
            with ThreadPoolExecutor(len(sources)) as threads:
                kernels = tuple(threads.map(load, sources))
        else:
            kernels = tuple(map(load, sources))
    except CompileError as error:
        error.plan = chosen
        raise
    return chosen, kernels
