"""How `general_forward` lays a tile over a problem."""

from collections import Counter

from tconv.kernels import implicit_gemm
from tconv.kernels.implicit_gemm import Shape, Tile
from tconv.problem import Axis, Problem

MOST_PHASES = 4
"""Phases in x that one block interleaves; more would take too many registers."""


def layout(problem: Problem, tile: Tile) -> Shape:
    """The tile over the problem."""
    y, x = problem.height, problem.width
    phases = _phases(x)
    return Shape(
        tile=tile,
        rows=problem.out_channels_per_group,
        channels=problem.in_channels_per_group,
        groups=problem.groups,
        pixels=problem.batch * len(y.q_range) * len(x.q_range),
        slots=y.kernel / y.used_phases * len(x.shifts),
        phases=phases,
        variants=y.used_phases * -(-x.used_phases // phases),
        real_bytes=implicit_gemm.real_bytes(problem),
    )


def _phases(axis: Axis) -> int:
    """Phases of a block: those with outputs, in the fewest equal shares of at most MOST_PHASES."""
    chunks = -(-axis.used_phases // MOST_PHASES)
    return -(-axis.used_phases // chunks)


def is_sparse(axis: Axis) -> bool:
    """Whether some phase with outputs has no tap at some shift."""
    taps = Counter(tap * axis.dilation % axis.stride for tap in range(axis.kernel))
    # The taps of a phase have shifts of their own each.
    return any(
        taps[(axis.first_phase + index) % axis.stride] < len(axis.shifts)
        for index in range(axis.used_phases)
    )
