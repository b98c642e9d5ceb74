"""`Problem -> Plan`: enumerate the kernels' candidates, filter with reasons, rank by cost.

Needs no torch and no GPU: a `Target` says what the device is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from tconv import settings
from tconv.errors import NoKernelError
from tconv.jit.target import Target
from tconv.kernels import FAMILIES
from tconv.kernels.family import (
    Family,
    Operands,
    Packing,
    PackingFamily,
    Repair,
    RepairingFamily,
)
from tconv.kernels.source import KernelSource
from tconv.problem import Problem

logger = logging.getLogger("tconv")


@dataclass(frozen=True)
class Candidate:
    """One kernel with one tile, and why it cannot serve or what it would cost.

    Attributes:
        stem: the kernel.
        tile: a row of its table; None where the refusal is the whole kernel's.
        refusal: one sentence, or None.
        cost: modelled seconds; infinite where refused.
    """

    stem: str
    tile: Any
    refusal: str | None
    cost: float

    def __str__(self) -> str:
        """One line."""
        name = self.stem if self.tile is None else f"{self.stem} {self.tile}"
        return f"{name}: {self.refusal or f'{self.cost * 1e6:.1f} us modelled'}"


class Launch(NamedTuple):
    """One launch of a plan.

    Attributes:
        source: its kernel.
        grid: its blocks.
        arguments: from the operands to the bytes of its one parameter.
    """

    source: KernelSource
    grid: int
    arguments: Callable[[Operands], bytes]


@dataclass(frozen=True)
class Plan:
    """The kernel chosen for a problem, ready to be compiled and launched.

    Attributes:
        problem, target: what it was made for.
        stem, tile: the kernel and the row of its table.
        cost: modelled seconds.
        source: the specialised kernel.
        grid: blocks of the launch.
        splits: leading size of the workspace of partial results; 0 where there is none.
        packing: the launch before the kernel's own, whose workspace that begins with, or None.
        repairs: launches behind the kernel's own, which compute again what it could not.
    """

    problem: Problem
    target: Target
    stem: str
    tile: Any
    cost: float
    source: KernelSource
    grid: int
    splits: int
    packing: Packing | None
    repairs: tuple[Repair, ...]

    def packing_arguments(self, operands: Operands) -> bytes:
        """The bytes of the packing kernel's one parameter."""
        assert self.packing is not None
        kernel = cast(PackingFamily, family(self.stem))
        return self.packing.source.pack(
            **kernel.packing_arguments(self.problem, self.tile, operands)
        )

    def arguments(self, operands: Operands) -> bytes:
        """The bytes of the kernel's one parameter.

        Raises:
            ValueError: the output does not start on 16 bytes, where the kernel counts on that.
        """
        kernel = family(self.stem)
        if self.source.rows_aligned and operands.y.address % 16:
            at = f"{operands.y.address:#x}"
            raise ValueError(f"{self.stem} writes from a multiple of 16 on, got {at}")
        return self.source.pack(**kernel.arguments(self.problem, self.target, self.tile, operands))

    def repair_arguments(self, index: int, operands: Operands) -> bytes:
        """The bytes of a repairing kernel's one parameter."""
        kernel = cast(RepairingFamily, family(self.stem))
        return self.repairs[index].source.pack(
            **kernel.repair_arguments(self.problem, self.target, self.tile, operands, index)
        )

    @property
    def launches(self) -> tuple[Launch, ...]:
        """All its launches, in order."""
        launches = [Launch(self.source, self.grid, self.arguments)]
        if self.packing is not None:
            packing = Launch(self.packing.source, self.packing.grid, self.packing_arguments)
            launches.insert(0, packing)
        for index, repair in enumerate(self.repairs):
            arguments = functools.partial(self.repair_arguments, index)
            launches.append(Launch(repair.source, repair.grid, arguments))
        return tuple(launches)

    def __str__(self) -> str:
        """One line: kernel, tile, grid, and the problem."""
        splits = f", {self.splits} splits" if self.splits else ""
        return (
            f"{self.stem} {self.tile}, {self.grid} blocks of {self.source.threads} threads, "
            f"{self.source.shared_bytes} bytes shared{splits}, on {self.target.arch}, "
            f"for {self.problem}"
        )


def family(stem: str) -> Family:
    """The kernel family of that name.

    Raises:
        NoKernelError: there is none.
    """
    for kernel in FAMILIES:
        if stem == kernel.STEM:
            return kernel
    known = ", ".join(kernel.STEM for kernel in FAMILIES)
    raise NoKernelError(f"a kernel is one of {known}, got {stem!r}")


def candidates(problem: Problem, target: Target) -> tuple[Candidate, ...]:
    """Every kernel and tile of the problem's direction, the cheapest first, refused ones last."""
    found = []
    for kernel in FAMILIES:
        if problem.direction != kernel.DIRECTION:
            continue
        refusal = kernel.why_not(problem, target)
        if refusal is not None:
            found.append(Candidate(kernel.STEM, None, refusal, float("inf")))
            continue
        for tile in kernel.TILES:
            refusal = kernel.tile_why_not(problem, target, tile)
            cost = float("inf") if refusal else kernel.cost(problem, target, tile)
            found.append(Candidate(kernel.STEM, tile, refusal, cost))
    return tuple(sorted(found, key=lambda candidate: candidate.cost))


def plan(problem: Problem, target: Target) -> Plan:
    """The cheapest kernel and tile for the problem; the same answer for the same question.

    TCONV_KERNEL names the kernel to be used for its direction.

    Raises:
        NoKernelError: no kernel can serve, with each one's reason.
    """
    return _plan(problem, target, settings.kernel())


@functools.lru_cache(maxsize=4096)
def _plan(problem: Problem, target: Target, forced: str | None) -> Plan:
    considered = candidates(problem, target)
    if forced is not None and problem.direction == family(forced).DIRECTION:
        considered = tuple(c for c in considered if c.stem == forced)
    if not considered or considered[0].refusal is not None:
        reasons = "".join(f"\n  {candidate}" for candidate in considered)
        wish = f" (TCONV_KERNEL={forced})" if forced else ""
        raise NoKernelError(f"no kernel{wish} can run {problem} on {target.arch}:{reasons}")
    return make_plan(problem, target, considered[0])


def make_plan(problem: Problem, target: Target, candidate: Candidate) -> Plan:
    """The plan of one candidate that was not refused, whatever the others cost."""
    kernel = family(candidate.stem)
    chosen = Plan(
        problem=problem,
        target=target,
        stem=candidate.stem,
        tile=candidate.tile,
        cost=candidate.cost,
        source=kernel.source(problem, candidate.tile),
        grid=kernel.grid(problem, target, candidate.tile),
        splits=kernel.splits(problem, target, candidate.tile),
        packing=_packing(kernel, problem, candidate.tile),
        repairs=_repairs(kernel, problem, target, candidate.tile),
    )
    logger.debug("%s", chosen)
    return chosen


def _packing(kernel: Family, problem: Problem, tile: Any) -> Packing | None:
    if not hasattr(kernel, "packing"):
        return None
    return cast(PackingFamily, kernel).packing(problem, tile)


def _repairs(kernel: Family, problem: Problem, target: Target, tile: Any) -> tuple[Repair, ...]:
    if not hasattr(kernel, "repairs"):
        return ()
    return cast(RepairingFamily, kernel).repairs(problem, target, tile)
