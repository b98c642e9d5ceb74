"""One plan of each kind of tile of every kernel, in the emulator: what tests/cpu/numerics runs.

    python tests/scale_plans.py

runs them over all of `SCALES` and prints the worst ratios.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import emulated_plans
import layer_cases
from emulated_plans import HOPPER, OF_16_BITS
from layer_cases import Case
from scale_cases import SCALES, Ratios, Worst, operands, wanted
from tconv.kernels import FAMILIES
from tconv.plan import Candidate, Plan, candidates, family, make_plan
from tconv.problem import Direction, Layout, Math

DIRECTIONS: tuple[Direction, ...] = ("forward", "input_gradient", "weight_gradient")
MODES: tuple[Math, ...] = ("tf32", "ieee")
LAYOUTS: tuple[Layout, ...] = ("contiguous", "channels_last")
ENGINE = ("sm90_forward", "sm90_input_gradient")
"""Whose channels_last images are read as they lie."""

# Small, but of several tiles and images; some rows begin on 16 bytes, some do not.
CASES = (
    Case(2, 32, 24, 1, (7, 44), (3, 3), bias=False),
    Case(3, 40, 20, 1, (6, 12), (4, 4), (2, 2), (1, 1), bias=False),
    Case(3, 36, 40, 1, (5, 8), (2, 2), (2, 2), bias=False),
    Case(2, 72, 32, 1, (7, 9), (3, 3), (2, 2), (1, 1), (1, 1), bias=False),
    # Every other phase has no tap.
    Case(2, 40, 24, 1, (5, 6), (3, 3), (2, 2), (1, 1), (0, 0), (2, 2), bias=False),
    Case(2, 21, 21, 1, (9, 20), (1, 1), bias=False),
    Case(2, 32, 3, 1, (7, 20), (4, 4), (2, 2), (1, 1), bias=False),
    Case(2, 20, 32, 2, (6, 17), (3, 3), (1, 1), (1, 1), bias=False),
    # Images smaller than a tile.
    Case(4, 72, 24, 1, (4, 4), (4, 4), (2, 2), (1, 1), bias=False),
    # Several tiles along x.
    Case(1, 16, 32, 1, (3, 212), (3, 3), bias=False),
    Case(2, 24, 16, 1, (4, 132), (3, 3), bias=False),
    Case(1, 16, 64, 1, (3, 132), (4, 4), (2, 2), (1, 1), bias=False),
    # Rows that leave by bulk copies, with blank ones between them or not.
    Case(2, 20, 7, 1, (4, 128), (3, 3), (1, 1), (1, 1), bias=False),
    Case(2, 16, 20, 1, (3, 60), (3, 3), (5, 5), (1, 1), (3, 3), (2, 2), bias=False),
    Case(1, 32, 32, 1, (18, 36), (3, 3), (1, 1), (1, 1), bias=False),
    # Frames that overlap in the output.
    Case(2, 40, 1, 1, (1, 40), (1, 50), (1, 20), (0, 15), bias=False),
    # Few channels, many products.
    Case(2, 8, 40, 1, (6, 44), (5, 5), bias=False),
    Case(1, 5, 24, 2, (7, 36), (5, 6), (1, 1), (2, 2), bias=False),
)

_ROWS = "positions_are_rows"
OF_FLOAT32 = {
    *(("sm90_forward", each) for each in ((), ("alike",), (_ROWS,), (_ROWS, "shared"))),
    *(("sm90_input_gradient", each) for each in ((), ("alike",), ("shared",), (_ROWS,))),
    *(("sm90_input_gradient", (_ROWS, each)) for each in ("shared", "raw", "folded")),
    ("sm90_weight_gradient", ()),
    *(("sm90_weight_gradient", (each,)) for each in ("stacked", "turned", "folded")),
}
"""Kinds of tiles of 16-bit kernels that serve float32 too."""

COUNTED = {
    "direct_forward": ("rows",),
    "sm90_tf32_forward": ("m_tiles",),
}
"""Of these kernels: numbers that make another kind of tile where they are above 1."""


@dataclass(frozen=True)
class Pick:
    """A plan, and the layer that it is for."""

    plan: Plan
    case: Case

    @property
    def direction(self) -> Direction:
        """Which of the three maps."""
        return self.plan.problem.direction

    @property
    def math(self) -> Math:
        """Of the plan's problem."""
        return self.plan.problem.math

    @property
    def stem(self) -> str:
        """The kernel."""
        return self.plan.stem

    def __str__(self) -> str:
        tile = str(self.plan.tile).replace(" ", "/")
        layout = "-last" if self.plan.problem.x_layout == "channels_last" else ""
        case = dataclasses.replace(self.case, bias=True)
        return f"{self.stem}-{tile}-{self.math}{layout}-{case}"

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        """What Hypothesis prints."""
        printer.text(str(self))

    def run(self, first: Tensor, second: Tensor) -> Tensor:
        """The result on operands as `scale_cases.operands` returns them."""
        if self.plan.problem.x_layout == "channels_last":
            first = first.to(memory_format=torch.channels_last)
            return emulated_plans.run_general(self.plan, x=first, w=second, y=first)
        if self.direction == "forward":
            empty = first.new_empty(0)
            return emulated_plans.run(
                self.plan, layer_cases.Operands(x=first, w=second, bias=None, grad_output=empty)
            )
        if self.direction == "input_gradient":
            return emulated_plans.run_general(self.plan, x=first, w=second, y=first)
        return emulated_plans.run_general(self.plan, x=first, w=second, y=second)

    def ratios(self, name: str, seed: int) -> Ratios:
        """On operands of one of `SCALES`."""
        got = self.run(*operands(self.direction, self.case, name, seed))
        held_to = wanted(self.direction, self.case, name, seed, self.math)
        return held_to.ratios(got, self.by(name))

    def by(self, name: str) -> tuple[int, ...]:
        """The slices that have norms of their own; the weight's gradient sums over samples."""
        return () if self.direction == "weight_gradient" else SCALES[name].by

    @property
    def without_repairs(self) -> Pick:
        """The same, but that nothing is computed again.

        NOTE: what a kernel computes again is summed in another order, so that equal bits say that
        it did not. A kernel that repairs in another way is to be asked here.
        """
        kernel = self.plan.kernel
        alone = self.plan.with_source(dataclasses.replace(kernel.source, repair_source=None))
        kept = tuple(launch for launch in alone.launches if launch.role != "repair")
        return dataclasses.replace(self, plan=dataclasses.replace(alone, launches=kept))

    @property
    def repairs(self) -> bool:
        """Whether it computes anything again, on some operands."""
        return (
            bool(self.plan.of_role("repair")) or self.plan.kernel.source.repair_source is not None
        )

    @property
    def sees_its_pixels(self) -> bool:
        """Whether float16's scale comes from a fair sample: 256 values of a tile's patch, of which
        a fifth at least lies in the image. Of the plan's picks for 89 layers all do.

        A sample of a few values may miss the large ones, and then the tile is computed again.
        """
        if self.stem not in ("sm90_tf32_forward", "sm90_split_forward"):
            return True
        problem = self.plan.problem
        laid = family(self.stem).layout(problem, self.plan.tile)
        rows = min(problem.height.size, laid.patch_rows)
        columns = min(problem.width.size, laid.patch_columns)
        return 5 * rows * columns >= laid.patch_rows * laid.patch_columns


def kind(stem: str, tile: Any) -> tuple[str, ...]:
    """What a tile does otherwise than the kernel's others; sizes alone do not count."""
    values = {field.name: getattr(tile, field.name) for field in dataclasses.fields(tile)}
    marks = [name for name, value in values.items() if value is True]
    return (*marks, *(name for name in COUNTED.get(stem, ()) if values[name] > 1))


@functools.cache
def picks(direction: Direction) -> tuple[Pick, ...]:
    """For each kernel, mode and kind of tile: the cheapest that serves one case; for another case
    the dearest in forward, where they differ most.
    """
    forward = direction == "forward"
    serving: dict[tuple[str, Math, Layout, tuple[str, ...]], dict[int, list[Candidate]]]
    serving = defaultdict(lambda: defaultdict(list))
    for index, case in enumerate(CASES):
        for math, layout in itertools.product(MODES, LAYOUTS):
            problem = case.layer.problem(direction, layout=layout, tf32=math == "tf32")
            if problem.math != math:  # too few channels
                continue
            # Named, so that none is left to another.
            for found in candidates(problem, HOPPER, FAMILIES):
                if found.refusal is None and (found.stem in ENGINE or layout == "contiguous"):
                    key = (found.stem, math, layout, kind(found.stem, found.tile))
                    serving[key][index].append(found)
    chosen = []
    for turn, ((_, math, layout, _), by_case) in enumerate(sorted(serving.items())):
        # Each kind begins with another case, so that together they take all.
        indices = [sorted(by_case)[(turn + i * len(by_case) // 2) % len(by_case)] for i in (0, 1)]
        for index, place in zip(dict.fromkeys(indices), (0, -1), strict=False):
            problem = CASES[index].layer.problem(direction, layout=layout, tf32=math == "tf32")
            plan = make_plan(problem, HOPPER, by_case[index][place if forward else 0])
            chosen.append(Pick(plan, CASES[index]))
    # By cases, which keeps what they are held to in `wanted`'s memory.
    return tuple(sorted(chosen, key=lambda pick: (pick.math, CASES.index(pick.case))))


def kinds_of_tables() -> set[tuple[str, tuple[str, ...]]]:
    """All that there are for float32, but for layers that no case here is.

    Those are depthwise ones and 1x1 of few channels. Their kernels scale nothing:
    `test_depthwise.py` and `test_pointwise.py` have their numerics.
    """
    families = [
        each
        for each in FAMILIES
        if each.STEM not in OF_16_BITS
        and not each.STEM.startswith(("depthwise", "pointwise_forward"))
    ]
    kinds = {(each.STEM, kind(each.STEM, t)) for each in families for t in each.TILES}
    return kinds | OF_FLOAT32


def main() -> None:
    """Prints the worst ratios of all picks."""
    torch.set_num_threads(1)
    worst = Worst()
    for direction in DIRECTIONS:
        for pick in picks(direction):
            for name in SCALES:
                worst.note(pick.stem, pick.math, name, pick.ratios(name, 0))
    print(worst)


if __name__ == "__main__":
    main()
