"""How `general_forward` lays a tile over a problem."""

from tconv.kernels.implicit_gemm import Shape, Tile
from tconv.problem import Problem


def layout(problem: Problem, tile: Tile) -> Shape:
    """The tile over the problem."""
    y, x = problem.height, problem.width
    variants = y.used_phases * x.used_phases
    return Shape(
        tile=tile,
        rows=problem.out_channels_per_group,
        channels=problem.in_channels_per_group,
        groups=problem.groups,
        pixels=problem.batch * len(y.q_range) * len(x.q_range),
        slots=problem.taps / variants,
        chain=y.phase_taps * x.phase_taps,
        variants=variants,
        source=problem.x_layout,
    )
