"""What a call of `general_input_gradient` launches."""

from tconv.jit.target import Target
from tconv.kernels import implicit_gemm
from tconv.kernels.general_input_gradient.layout import layout
from tconv.kernels.implicit_gemm import Tile
from tconv.kernels.launch import Argument, Launch
from tconv.problem import Problem

STEM = "general_input_gradient"


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel."""
    y, x = problem.height, problem.width
    sizes: dict[str, Argument] = {
        "pixel_height": y.size,
        "pixel_width": x.size,
        "source_height": y.output_size,
        "source_width": x.output_size,
        "destination_height": y.size,
        "destination_width": x.size,
    }
    return implicit_gemm.launches(STEM, problem, layout(problem, tile), ("y", "x"), sizes)
