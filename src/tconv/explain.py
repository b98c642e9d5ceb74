"""Explains a layer: its work, its floor, its candidates, its plan and the plan's resources.

No GPU is needed. `tconv explain` prints the explanation.
"""

from __future__ import annotations

import dataclasses
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tconv import includes
from tconv.bench.floors import Ceilings, Floor, arithmetic, floor
from tconv.choice import SENTENCES, Verdict, verdict
from tconv.drawing import outputs_of
from tconv.errors import CompileError, MissingDependencyError, NoKernelError
from tconv.jit.compile import KERNELS, Compiled, compile_cuda
from tconv.jit.target import Target
from tconv.kernels.launch import Launch, Role
from tconv.kernels.source import KernelSource
from tconv.layers import Layer
from tconv.messages import one_line
from tconv.plan import Candidate, Plan, candidates
from tconv.problem import Axis, Direction, DType, Layout, Problem
from tconv.sizes import planned


@dataclass(frozen=True)
class Explanation:
    """One direction of a layer on one architecture.

    Attributes:
        layer, problem, target: what was asked.
        gpu: the GPU whose measured ceilings set the floor.
        candidates: every kernel and tile of the direction, the cheapest first, refused ones last.
        plan: the chosen one. None if no kernel can serve, or if the one that TCONV_KERNEL names
            cannot.
        no_plan: why there is no plan.
        verdict: whether the plan's kernel runs the call by default, or PyTorch's operator: on
            `device`, or where that is None on a GPU that nothing is known of.
        compiled: the plan's kernels (see `sources`), compiled for the architecture; empty if they
            were not compiled.
        not_compiled: why they were not compiled.
        broken: whether the compiler was found and refused them.
    """

    layer: Layer
    problem: Problem
    target: Target
    gpu: Ceilings
    candidates: tuple[Candidate, ...]
    plan: Plan | None
    no_plan: str | None
    verdict: Verdict | None
    compiled: tuple[Compiled, ...]
    not_compiled: str | None
    broken: bool

    @property
    def device(self) -> str | None:
        """The GPU's name, as CUDA gives it, if it is of the architecture that was planned for."""
        return _device(self.gpu, self.target)

    @property
    def floor(self) -> Floor:
        """The least time that the GPU allows."""
        return floor(self.problem, self.gpu)

    @property
    def named_compiled(self) -> tuple[tuple[str, Compiled], ...]:
        """`compiled`, each with its name (see `named_sources`)."""
        if self.plan is None or not self.compiled:
            return ()
        names = (name for name, _ in named_sources(self.plan))
        return tuple(zip(names, self.compiled, strict=True))

    def record(self) -> dict[str, Any]:
        """All of it as JSON values; times in seconds, sizes in bytes or elements."""
        problem = self.problem
        return {
            "layer": self.layer.record(),
            "problem": str(problem),
            "direction": problem.direction,
            "dtype": problem.dtype,
            "math": problem.math,
            "x_shape": problem.x_shape,
            "w_shape": problem.w_shape,
            "y_shape": problem.y_shape,
            "axes": {
                "height": _axis_record(problem.height),
                "width": _axis_record(problem.width),
            },
            "flops": problem.flops,
            "bytes": problem.bytes,
            "floor": {
                "gpu": self.gpu.name,
                "arithmetic": arithmetic(problem),
                "memory_seconds": self.floor.memory,
                "arithmetic_seconds": self.floor.arithmetic,
                "seconds": self.floor.seconds,
                "bound": self.floor.bound,
            },
            "arch": self.target.arch,
            "candidates": [
                {
                    "kernel": candidate.stem,
                    "tile": None if candidate.tile is None else str(candidate.tile),
                    "refusal": candidate.refusal,
                    "modelled_seconds": None if candidate.refusal else candidate.cost,
                }
                for candidate in self.candidates
            ],
            "plan": None if self.plan is None else plan_record(self.plan),
            "no_plan": self.no_plan,
            "default": None
            if self.verdict is None
            else {**self.verdict._asdict(), "why": SENTENCES[self.verdict.reason]},
            "compiled": [
                _compiled_record(compiled, name) for name, compiled in self.named_compiled
            ],
            "not_compiled": self.not_compiled,
        }


def explain(
    layer: Layer,
    *,
    arch: str,
    gpu: Ceilings,
    direction: Direction = "forward",
    dtype: DType = "float32",
    layout: Layout = "contiguous",
    tf32: bool = True,
    compile: bool = True,
) -> Explanation:
    """Plan one direction of a layer, and compile the plan's kernel.

    Args:
        layer: the layer.
        arch: the architecture that is planned and compiled for, "sm_90a".
        gpu: the GPU whose ceilings set the floor.
        direction, dtype, layout: of the call.
        tf32: whether float32 may be computed in TF32.
        compile: False skips compilation.

    Raises:
        ValueError: nothing is known of the architecture.
    """
    problem = layer.problem(direction, dtype, layout, tf32)
    target = Target.named(arch)
    chosen: Plan | None = None
    compiled: tuple[Compiled, ...] = ()
    no_plan: str | None = None
    not_compiled: str | None = None if compile else "not asked for"
    broken = False
    try:
        chosen = planned(problem, target)
    except NoKernelError as error:
        no_plan = str(error)
    if chosen is not None and compile:
        try:
            found = sources(chosen)
            with ThreadPoolExecutor(len(found)) as pool:
                compiled = tuple(pool.map(lambda source: compile_cuda(source, arch), found))
        except (MissingDependencyError, CompileError) as error:
            not_compiled = one_line(error)
            broken = isinstance(error, CompileError)
    return Explanation(
        layer,
        problem,
        target,
        gpu,
        candidates(problem, target),
        chosen,
        no_plan,
        None if chosen is None else verdict(chosen, _device(gpu, target) or ""),
        compiled,
        not_compiled,
        broken,
    )


def _device(gpu: Ceilings, target: Target) -> str | None:
    return gpu.device if gpu.arch == target.arch else None


def sources(chosen: Plan) -> tuple[KernelSource, ...]:
    """The kernels that a plan launches: its own, then packing, repair and addition, if any.

    The plan's own comes first, though the packing is launched before it.
    """
    return tuple(launch.source for launch in _launches(chosen))


def _launches(chosen: Plan) -> tuple[Launch, ...]:
    """The launches of `sources`."""
    roles: tuple[Role, ...] = ("packing", "repair", "addition")
    return (chosen.kernel, *(launch for role in roles for launch in chosen.of_role(role)))


def named_sources(chosen: Plan) -> tuple[tuple[str, KernelSource], ...]:
    """`sources`, each with a distinct name: others may have the stem of the kernel itself."""
    return tuple(
        (
            launch.source.stem
            + (f" ({launch.role})" if launch.role in ("repair", "addition") else ""),
            launch.source,
        )
        for launch in _launches(chosen)
    )


def tile_values(tile: Any) -> dict[str, Any]:
    """A tile's fields by name."""
    if dataclasses.is_dataclass(tile) and not isinstance(tile, type):
        return dataclasses.asdict(tile)
    return {"tile": str(tile)}


def stages(chosen: Plan) -> int | None:
    """The stages of the plan's pipeline; None if its kernel has no such constant."""
    value = dict(chosen.kernel.source.constants).get("stages")
    return value if isinstance(value, int) else None


def workspace_bytes(chosen: Plan) -> int:
    """Bytes of the memory that a call takes beside its tensors: packed values, partial results."""
    partial = 8 if chosen.problem.dtype == "float64" else 4
    return 4 * chosen.packed + partial * chosen.splits * math.prod(chosen.problem.w_shape)


def plan_record(chosen: Plan) -> dict[str, Any]:
    """A plan as JSON values."""
    packing = next(iter(chosen.of_role("packing")), None)
    return {
        "kernel": chosen.stem,
        "tile": str(chosen.tile),
        "tile_values": tile_values(chosen.tile),
        "stages": stages(chosen),
        "modelled_seconds": chosen.cost,
        "like": None if chosen.problem.like is None else chosen.problem.like.x_shape,
        "blocks": chosen.kernel.grid,
        "threads": chosen.kernel.source.threads,
        "shared_bytes": chosen.kernel.source.shared_bytes,
        "splits": chosen.splits,
        "workspace_bytes": workspace_bytes(chosen),
        "packing": None
        if packing is None
        else {
            "kernel": packing.source.stem,
            "blocks": packing.grid,
            "threads": packing.source.threads,
            "elements": packing.packed,
        },
        "repairs": [
            {
                "kernel": repair.source.stem,
                "blocks": repair.grid,
                "threads": repair.source.threads,
                "shared_bytes": repair.source.shared_bytes,
            }
            for repair in chosen.of_role("repair")
        ],
    }


def whole_text(source: KernelSource) -> str:
    """A kernel's translation unit with its headers inlined: one file, to be read from the top.

    Each header is where it is first included. The generated constants and arguments of the layer
    are where the kernel's own file begins.
    """
    # At most two blank lines remain where a header was inlined further up.
    return re.sub(r"\n{4,}", "\n\n\n", includes.inlined(source.text(), KERNELS))


def _axis_record(axis: Axis) -> dict[str, Any]:
    return {
        "input": axis.size,
        "output": axis.output_size,
        "phases": [
            {
                "phase": phase.index,
                "outputs": outputs_of(axis, phase),
                "taps": [{"tap": tap.index, "shift": tap.shift} for tap in phase.taps],
            }
            for phase in axis.phases
        ],
    }


def _compiled_record(compiled: Compiled, name: str) -> dict[str, Any]:
    return {
        "kernel": name,
        **dataclasses.asdict(compiled.resources),
        "arch": compiled.arch,
        "options": list(compiled.options),
        "cubin_bytes": len(compiled.cubin),
        "compile_seconds": compiled.seconds,
        "key": compiled.key,
    }
