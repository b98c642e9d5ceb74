"""`Problem -> Plan`: enumerate the kernels' candidates, filter with reasons, rank by cost.

Needs no torch and no GPU: a `Target` says what the device is.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from dataclasses import dataclass
from typing import Any

from tconv import settings
from tconv.errors import NoKernelError
from tconv.jit.target import Target
from tconv.kernels import FAMILIES, LEFT_TO
from tconv.kernels.adding import addition
from tconv.kernels.family import Family
from tconv.kernels.launch import Launch, Role
from tconv.kernels.source import KernelSource
from tconv.problem import Problem

logger = logging.getLogger("tconv")


@dataclass(frozen=True)
class Candidate:
    """One kernel with one tile: its cost, or why it cannot serve.

    Attributes:
        stem: the kernel.
        tile: a row of its table; None if no tile of the kernel can serve.
        refusal: one sentence, or None.
        cost: modelled seconds; infinite if refused.
        like: the problem that the kernel's constants are for; None for the call's own.
    """

    stem: str
    tile: Any
    refusal: str | None
    cost: float
    like: Problem | None = None

    def __str__(self) -> str:
        """One line."""
        name = self.stem if self.tile is None else f"{self.stem} {self.tile}"
        return f"{name}: {self.refusal or f'{self.cost * 1e6:.1f} us modelled'}"


@dataclass(frozen=True)
class Plan:
    """The kernel chosen for a problem, ready to be compiled and launched.

    Attributes:
        problem, target: the call and the GPU that it was made for.
        stem, tile: the kernel and the row of its table.
        cost: modelled seconds.
        launches: what a call launches, in order.
    """

    problem: Problem
    target: Target
    stem: str
    tile: Any
    cost: float
    launches: tuple[Launch, ...]

    @property
    def kernel(self) -> Launch:
        """The launch of the kernel itself."""
        (kernel,) = self.of_role("kernel")
        return kernel

    def of_role(self, role: Role) -> tuple[Launch, ...]:
        """The launches of that role, in order."""
        return tuple(launch for launch in self.launches if launch.role == role)

    @property
    def packed(self) -> int:
        """float32 values of the workspace that the launches share; 0 if there is none."""
        return max(launch.packed for launch in self.launches)

    @property
    def splits(self) -> int:
        """Leading size of the workspace of partial results; 0 if there is none."""
        return self.kernel.splits

    @property
    def partial_strides(self) -> tuple[int, ...]:
        """Strides of the partial results, [splits, Cin, Cout/groups, kH, kW], in elements."""
        rows, columns, kernel_y, kernel_x = self.problem.w_shape
        taps = kernel_y * kernel_x
        if self.kernel.taps_first:
            plane = rows * columns
            return taps * plane, columns, 1, kernel_x * plane, plane
        return rows * columns * taps, columns * taps, taps, kernel_x, 1

    @functools.cached_property
    def addition(self) -> Launch | None:
        """What adds the partial results, behind `launches`; None where PyTorch does."""
        return addition(self.problem, self.kernel)

    @property
    def sources(self) -> tuple[KernelSource, ...]:
        """The kernels of all launches."""
        every = self.launches if self.addition is None else (*self.launches, self.addition)
        return tuple(launch.source for launch in every)

    def with_source(self, source: KernelSource) -> Plan:
        """The same plan with another kernel that takes the same arguments."""
        return dataclasses.replace(
            self,
            launches=tuple(
                dataclasses.replace(launch, source=source) if launch.role == "kernel" else launch
                for launch in self.launches
            ),
        )

    def __str__(self) -> str:
        """One line: kernel, tile, grid, and the problem."""
        source = self.kernel.source
        splits = f", {self.splits} splits" if self.splits else ""
        return (
            f"{self.stem} {self.tile}, {self.kernel.grid} blocks of {source.threads} threads, "
            f"{source.shared_bytes} bytes shared{splits}, on {self.target.arch}, "
            f"for {self.problem}"
        )


_BY_STEM = {kernel.STEM: kernel for kernel in FAMILIES}


def family(stem: str) -> Family:
    """The kernel family of that name.

    Raises:
        NoKernelError: there is none.
    """
    found = _BY_STEM.get(stem)
    if found is None:
        raise NoKernelError(f"a kernel is one of {', '.join(_BY_STEM)}, got {stem!r}")
    return found


def candidates(
    problem: Problem, target: Target, families: tuple[Family, ...] | None = None
) -> tuple[Candidate, ...]:
    """Every kernel and tile of the problem's direction, the cheapest first, refused ones last.

    Args:
        problem, target: the call and the GPU.
        families: the kernels, named. None for all but those that are left to others (`LEFT_TO`).
    """
    found: list[Candidate] = []
    for kernel in FAMILIES if families is None else families:
        if problem.direction != kernel.DIRECTION:
            continue
        refusal = kernel.why_not(problem, target)
        if refusal is None and families is None:
            refusal = _left_to(kernel, found)
        if refusal is not None:
            found.append(Candidate(kernel.STEM, None, refusal, float("inf")))
            continue
        for tile in kernel.TILES:
            refusal = kernel.tile_why_not(problem, target, tile)
            cost = float("inf") if refusal else kernel.cost(problem, target, tile)
            found.append(Candidate(kernel.STEM, tile, refusal, cost))
    return tuple(sorted(found, key=lambda candidate: candidate.cost))


def _left_to(kernel: Family, found: list[Candidate]) -> str | None:
    """One sentence if a kernel is left out for one before it that serves, else None."""
    ahead = LEFT_TO.get(kernel.STEM)
    if any(one.stem == ahead and one.refusal is None for one in found):
        return f"is left out for {ahead}, which is ahead of it; TCONV_KERNEL={kernel.STEM} runs it"
    return None


def usable(problem: Problem, target: Target) -> tuple[Candidate, ...]:
    """The candidates that can serve, the cheapest first.

    If TCONV_KERNEL names a kernel, its direction uses no other.

    Raises:
        NoKernelError: no kernel can serve, with each one's reason.
    """
    forced = settings.kernel()
    families = None
    if forced is not None and problem.direction == family(forced).DIRECTION:
        families = (family(forced),)
    considered = candidates(problem, target, families)
    found = tuple(candidate for candidate in considered if candidate.refusal is None)
    if not found:
        reasons = "".join(f"\n  {candidate}" for candidate in considered)
        wish = f" (TCONV_KERNEL={forced})" if forced else ""
        raise NoKernelError(f"no kernel{wish} can run {problem} on {target.arch}:{reasons}")
    return found


def plan(problem: Problem, target: Target) -> Plan:
    """The cheapest kernel and tile for the problem. The choice is deterministic.

    Calls on a GPU have the plan of `tconv.sizes.planned`, which is this one for common sizes.

    Raises:
        NoKernelError: no kernel can serve, with each one's reason.
    """
    return _plan(problem, target, settings.kernel())


@functools.lru_cache(maxsize=4096)
def _plan(problem: Problem, target: Target, forced: str | None) -> Plan:
    return make_plan(problem, target, usable(problem, target)[0])


def make_plan(problem: Problem, target: Target, candidate: Candidate) -> Plan:
    """The plan of a candidate that was not refused. It need not be the cheapest."""
    kernel = family(candidate.stem)
    like = candidate.like
    if like is not None and like is not problem.like and like != problem:
        served = problem.by(like)
        assert served is not None, f"{candidate} cannot serve {problem}"
        problem = served
    chosen = Plan(
        problem=problem,
        target=target,
        stem=candidate.stem,
        tile=candidate.tile,
        cost=candidate.cost,
        launches=kernel.launches(problem, target, candidate.tile),
    )
    logger.debug("%s", chosen)
    return chosen
