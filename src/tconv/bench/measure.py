"""Measures one direction of one layer: every contestant, the floor, and whether it is right."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor

from tconv import settings, tuning
from tconv.bench import contestants
from tconv.bench.check import Reference, Verdict
from tconv.bench.contestants import Setting, Tensors, flags, random_tensors
from tconv.bench.floors import GPUS, Floor, floor
from tconv.bench.rows import How, Row, SweepRow, What
from tconv.bench.timing import WIDE, Call, Timer, Times
from tconv.choice import own_kernels
from tconv.counts import statistics
from tconv.errors import MissingDependencyError
from tconv.explain import sources
from tconv.jit.compile import compile_cuda
from tconv.jit.target import Target
from tconv.layers import Layer
from tconv.messages import one_line
from tconv.plan import Candidate, Plan, candidates, make_plan, plan
from tconv.problem import Direction, DType, Layout, Math, Problem
from tconv.reference import poisoned_memory
from tconv.sizes import planned
from tconv.verify import TORCH_DTYPES

AGAINST = ("eager", "best", "compile", "flaggems")
"""The contestants beside ours: PyTorch's default, its best setting, torch.compile, FlagGems."""

WARM_UP = 3
PROBES = 5
"""Timings that decide which of PyTorch's settings are timed in full."""

NEAR = 1.25
"""A setting is timed in full if its probe takes at most this factor times the fastest's."""


@dataclass(frozen=True)
class Options:
    """Options that hold for a whole run.

    Attributes:
        device: "cuda" or "cpu".
        short_name: the device in one word, which names its ceilings.
        dtype, layout: of the tensors.
        tf32: whether TF32 is allowed, for every contestant.
        against: some of `AGAINST`.
        repeats: timings of each median.
        autotune: whether ours is tuned by timing.
        commit, environment: recorded in each row.
        seed: of the data.
    """

    device: str
    short_name: str
    dtype: DType = "float32"
    layout: Layout = "contiguous"
    tf32: bool = True
    against: tuple[str, ...] = ("eager", "best")
    repeats: int = 30
    autotune: bool = False
    commit: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    seed: int = 0

    @property
    def plans(self) -> bool:
        """Whether our kernels run: on CPU tensors they do under TCONV_EMULATE=1 only."""
        return self.device == "cuda" or settings.emulate()

    @property
    def target(self) -> Target:
        """What the plans are made for."""
        if self.device == "cuda":
            return Target.for_device(torch.cuda.current_device())
        return Target.named(settings.emulate_arch())

    def problem(self, layer: Layer, direction: Direction) -> Problem:
        """What the planner is asked in this run."""
        return layer.problem(direction, self.dtype, self.layout, self.tf32)

    @property
    def may_be_tf32(self) -> bool:
        """Whether TF32 makes a difference: to float32 where our kernels, or a GPU's, run."""
        return self.dtype == "float32" and self.plans

    def math(self, layer: Layer, direction: Direction) -> Math:
        """The arithmetic of ours; PyTorch's CPU operators know no TF32."""
        return self.problem(layer, direction).math if self.plans else "ieee"

    def what(self, layer: Layer, direction: Direction) -> dict[str, Any]:
        """The columns of `What` and `How`."""
        columns: dict[str, Any] = dict(
            layer=layer.name,
            dtype=self.dtype,
            layout=self.layout,
            math=self.math(layer, direction),
            direction=direction,
            device=self.short_name,
            commit=self.commit,
            text=layer.text,
            input=layer.input_text,
            bias=layer.bias and direction == "forward",
            tf32=self.tf32,
            autotune=self.autotune,
            repeats=self.repeats,
            measured=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **self.environment,
        )
        known = {column.name for kind in (What, How) for column in dataclasses.fields(kind)}
        return {name: value for name, value in columns.items() if name in known}


def floor_of(problem: Problem, device: str) -> Floor | None:
    """The floor on a device, by its one-word name; None where none was measured."""
    gpu = GPUS.get(device)
    return None if gpu is None else floor(problem, gpu)


def compile_ahead(
    layers: Sequence[tuple[Layer, Direction]], options: Options, sweep: bool = False
) -> None:
    """Compile the kernels that a run will ask for, side by side, into the cache.

    What does not compile is left to the call that needs it, which says so.
    """
    if options.device != "cuda":
        return
    wanted = {}
    for layer, direction in layers:
        problem = options.problem(layer, direction)
        with contextlib.suppress(Exception):
            plans = [planned(problem, options.target)]
            if sweep or options.autotune:
                plans += [
                    make_plan(problem, options.target, candidate)
                    for candidate in candidates(problem, options.target)
                    if candidate.refusal is None
                ]
            for chosen in plans:
                wanted.update(dict.fromkeys(sources(chosen)))

    def compile(source: Any) -> None:
        with contextlib.suppress(Exception):
            compile_cuda(source, options.target.arch)

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile, wanted))


@dataclass
class Probed:
    """What a few timings said of PyTorch's settings.

    Attributes:
        default: the name of what a user gets.
        ways: the settings that are near the fastest, and the default if it works.
        probes: the median of every one, in milliseconds.
        failed: why others have none.
    """

    default: str = ""
    ways: list[Setting] = field(default_factory=list)
    probes: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Bench:
    """Measures layers on one device; holds what they share: the timer, the empty kernel's time."""

    def __init__(
        self, options: Options, timer: Timer, report: Callable[[str], None] = lambda text: None
    ) -> None:
        self.options = options
        self.timer = timer
        self.report = report
        self.empty_ms: float | None = None
        empty = timer.empty()
        if empty is not None:
            self._warm_up(empty)
            self.empty_ms = timer.time([empty], options.repeats)[0].median

    def row(self, layer: Layer, direction: Direction) -> Row:
        """One row; a contestant that fails leaves its times empty, and the row says why.

        Raises:
            MissingDependencyError: a compiler, a driver or a device is missing.
        """
        options = self.options
        columns = options.what(layer, direction)
        columns.update(self._work(layer, direction))
        self.report("data")
        tensors = self._tensors(layer, direction)
        racing: dict[str, Call] = {}
        tuned = tuning.autotune() if options.autotune else contextlib.nullcontext()
        if options.device == "cuda":
            columns["default"] = self._default(layer, direction, tensors)
        with flags(benchmark=False, tf32=options.tf32), own_kernels(), tuned:
            try:
                columns.update(self._first_call(layer, direction, tensors))
                columns.update(self._verdict(layer, direction, tensors))
                racing["ours"] = _under(False, contestants.ours(layer, direction, tensors))
            except MissingDependencyError:
                raise
            except Exception as error:
                columns["wrong"] = f"{type(error).__name__}: {one_line(error)}"
            probed = self._probed(layer, direction, tensors)
            racing |= {way.name: _under(way.benchmark, way.call) for way in probed.ways}
            failed = {}
            for name in ("compile", "flaggems"):
                if name in options.against:
                    try:
                        racing[name] = self._rival(name, layer, direction, tensors, columns)
                    except MissingDependencyError:
                        raise
                    except Exception as error:  # their errors are of any kind
                        failed[name] = f"{type(error).__name__}: {one_line(error)}"
            columns["failed"] = "; ".join(f"{name}: {why}" for name, why in failed.items())
            self.report("timing")
            times = self._race(racing)
        for name in ("ours", "compile", "flaggems"):
            if name in times:
                columns.update(_columns(name, times[name]))
        columns.update(self._of_settings(probed, times))
        return Row(**columns)

    def sweep(self, layer: Layer, direction: Direction) -> list[SweepRow]:
        """Every kernel and tile that can run the direction, the cheapest by the model first.

        Raises:
            MissingDependencyError: a compiler, a driver or a device is missing.
        """
        options = self.options
        what = options.what(layer, direction)
        problem = options.problem(layer, direction)
        tensors = self._tensors(layer, direction)
        reference = self._reference(layer, direction, tensors)
        call = contestants.ours(layer, direction, tensors)
        able = [c for c in candidates(problem, options.target) if c.refusal is None]
        chosen = plan(problem, options.target)
        rows = []
        for number, candidate in enumerate(able, 1):
            self.report(f"{number} of {len(able)}: {candidate.stem} {candidate.tile}")
            found: dict[str, Any] = {}
            using = tuning.using(candidate)
            with flags(benchmark=False, tf32=options.tf32), own_kernels(), using:
                try:
                    with poisoned_memory():
                        result = call()
                    verdict = reference.verdict(result, None)
                    found.update(error=verdict.error, wrong=verdict.wrong)
                    self._warm_up(call)
                    found.update(_columns("kernel", self.timer.time([call], options.repeats)[0]))
                except MissingDependencyError:
                    raise
                except Exception as error:
                    found["wrong"] = f"{type(error).__name__}: {one_line(error)}"
            rows.append(
                SweepRow(
                    **what,
                    **found,
                    kernel=candidate.stem,
                    tile=str(candidate.tile),
                    chosen=(candidate.stem, candidate.tile) == (chosen.stem, chosen.tile),
                    modelled_ms=candidate.cost * 1e3,
                )
            )
        return rows

    def _tensors(self, layer: Layer, direction: Direction) -> Tensors:
        options = self.options
        if options.device == "cuda":
            torch.cuda.empty_cache()  # of the layer before, whose sizes are others
        dtype = TORCH_DTYPES[options.dtype]
        return random_tensors(layer, direction, dtype, options.layout, options.device, options.seed)

    def _work(self, layer: Layer, direction: Direction) -> dict[str, Any]:
        """The floor and the work, and what the plan makes of the problem."""
        problem = self.options.problem(layer, direction)
        found: dict[str, Any] = {
            "flops": problem.flops,
            "bytes": problem.bytes,
            "empty_ms": self.empty_ms,
        }
        least = floor_of(problem, self.options.short_name)
        if least is not None:
            found["floor_ms"] = least.seconds * 1e3 + (self.empty_ms or 0.0)
            found["bound"] = least.bound
        return found

    def _first_call(self, layer: Layer, direction: Direction, tensors: Tensors) -> dict[str, Any]:
        self.report("tconv")
        call = contestants.ours(layer, direction, tensors)
        self.timer.synchronize()
        start = time.perf_counter()
        call()
        self.timer.synchronize()
        found: dict[str, Any] = {"first_call_ms": (time.perf_counter() - start) * 1e3}
        if self.options.plans:
            problem = self.options.problem(layer, direction)
            tuned = tuning.known(problem, self._ordinal) if self.options.autotune else None
            # The emulator's calls have the plan of their own size.
            of_call = plan if self._ordinal is None else planned
            used: Candidate | Plan = tuned or of_call(problem, self.options.target)
            found["kernel"] = f"{used.stem} {used.tile}"
            found["modelled_ms"] = used.cost * 1e3
        return found

    @property
    def _ordinal(self) -> int | None:
        return torch.cuda.current_device() if self.options.device == "cuda" else None

    def _default(self, layer: Layer, direction: Direction, tensors: Tensors) -> str:
        """Who runs the call by default, and why; "" where the call fails."""
        self.report("the default")
        before = set(statistics())
        with contextlib.suppress(Exception), flags(benchmark=False, tf32=self.options.tf32):
            contestants.ours(layer, direction, tensors)()
        ran = [row for row in statistics() if row not in before and row.direction == direction]
        return "; ".join(f"{row.kernel}: {row.reason}" for row in ran)

    def _reference(self, layer: Layer, direction: Direction, tensors: Tensors) -> Reference:
        self.report("float64")
        rounds = self.options.math(layer, direction) == "tf32"
        return Reference(layer, direction, tensors, tf32=rounds)

    def _verdict(self, layer: Layer, direction: Direction, tensors: Tensors) -> dict[str, Any]:
        reference = self._reference(layer, direction, tensors)
        with poisoned_memory():
            mine = contestants.ours(layer, direction, tensors)()
        other: Tensor | None = None
        if self.options.against:
            with contextlib.suppress(RuntimeError):  # PyTorch has no operator or no memory for it
                other = contestants.pytorch(layer, direction, tensors)()
        verdict: Verdict = reference.verdict(mine, other)
        return {
            "error": verdict.error,
            "error_cudnn": verdict.error_pytorch,
            "apart": verdict.apart,
            "checked": verdict.checked,
            "wrong": verdict.wrong,
        }

    def _rival(
        self,
        name: str,
        layer: Layer,
        direction: Direction,
        tensors: Tensors,
        columns: dict[str, Any],
    ) -> Call:
        """The call of `compile` or `flaggems`, warmed up.

        The result of `flaggems`, which is not PyTorch's, is checked first; its error goes into
        `columns`.

        Raises:
            ValueError: the result is wrong.
        """
        if name == "compile":
            self.report("torch.compile")
            call = contestants.compiled(layer, direction, tensors)
        else:
            self.report("FlagGems")
            call = contestants.flaggems(layer, direction, tensors)
            with poisoned_memory():
                result = call()
            reference = Reference(layer, direction, tensors, tf32=False)
            columns["error_flaggems"], wrong = reference.rival(result)
            if wrong is not None:
                raise ValueError(wrong)
        self._warm_up(call)
        return _under(False, call)

    def _probed(self, layer: Layer, direction: Direction, tensors: Tensors) -> Probed:
        """PyTorch's settings that are worth timing in full."""
        options = self.options
        found = Probed()
        if not {"eager", "best"} & set(options.against):
            return found
        for way in contestants.settings(layer, direction, tensors, options.layout):
            found.default = found.default or way.name
            if way.name != found.default and "best" not in options.against:
                break
            self.report(way.name)
            with flags(benchmark=way.benchmark, tf32=options.tf32):
                try:
                    self._warm_up(way.call)
                    found.probes[way.name] = self.timer.time([way.call], PROBES)[0].median
                except RuntimeError as error:  # no such operator, or no memory for it
                    found.failed[way.name] = one_line(error)
                    continue
            most = NEAR * min(found.probes.values())
            found.ways = [
                one
                for one in [*found.ways, way]
                if one.name == found.default or found.probes[one.name] <= most
            ]
        return found

    def _race(self, calls: dict[str, Call]) -> dict[str, Times]:
        """All calls in turns; where memory does not suffice for that, one after another."""
        repeats = self.options.repeats
        try:
            for call in calls.values():
                self._warm_up(call)
            times = self.timer.time(list(calls.values()), repeats)
            if any(of_call.spread > WIDE for of_call in times):
                self.report("timing again, as something disturbed it")
                again = self.timer.time(list(calls.values()), repeats)
                times = min(times, again, key=lambda each: max(one.spread for one in each))
            return dict(zip(calls, times, strict=True))
        except torch.OutOfMemoryError:
            alone = {}
            for name, call in calls.items():
                with contextlib.suppress(torch.OutOfMemoryError):
                    torch.cuda.empty_cache()
                    self._warm_up(call)
                    alone[name] = self.timer.time([call], repeats)[0]
            return alone

    def _of_settings(self, probed: Probed, times: dict[str, Times]) -> dict[str, Any]:
        """The columns of eager and best."""
        found: dict[str, Any] = {}
        medians = {way.name: times[way.name] for way in probed.ways if way.name in times}
        if probed.default in medians and "eager" in self.options.against:
            found.update(_columns("eager", medians[probed.default]))
        if "best" in self.options.against and medians:
            best = min(medians, key=lambda name: medians[name].median)
            found.update(_columns("best", medians[best]))
            found["best_setting"] = best
        said = [
            f"{name}: {medians[name].median:.4f}"
            if name in medians
            else f"{name}: {probe:.4f} ({PROBES} timings)"
            for name, probe in probed.probes.items()
        ]
        said += [f"{name}: {why}" for name, why in probed.failed.items()]
        found["settings"] = "; ".join(said)
        return found

    def _warm_up(self, call: Call) -> None:
        for _ in range(WARM_UP):
            call()
        self.timer.synchronize()


def _under(benchmark: bool, call: Call) -> Call:
    """A call that sets cudnn.benchmark first, for calls of different settings in turns."""

    def with_flag() -> object:
        torch.backends.cudnn.benchmark = benchmark
        return call()

    return with_flag


def _columns(contestant: str, times: Times) -> dict[str, float]:
    return {
        f"{contestant}_ms": times.median,
        f"{contestant}_p20_ms": times.p20,
        f"{contestant}_p80_ms": times.p80,
    }
