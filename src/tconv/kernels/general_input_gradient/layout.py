"""How `general_input_gradient` lays a tile over a problem."""

from tconv.kernels.implicit_gemm import Shape, Tile
from tconv.problem import Problem


def layout(problem: Problem, tile: Tile) -> Shape:
    """The tile over the problem."""
    return Shape(
        tile=tile,
        rows=problem.in_channels_per_group,
        channels=problem.out_channels_per_group,
        groups=problem.groups,
        pixels=problem.batch * problem.height.size * problem.width.size,
        slots=problem.taps,
        chain=problem.taps,
        variants=1,
        source=problem.y_layout,
    )
