"""What a call of `general_forward` launches."""

from math import gcd

from tconv.jit.target import Target
from tconv.kernels import implicit_gemm
from tconv.kernels.general_forward.layout import layout
from tconv.kernels.implicit_gemm import Tile
from tconv.kernels.launch import Argument, Launch
from tconv.kernels.source import Constant
from tconv.problem import Problem

STEM = "general_forward"


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel."""
    y, x = problem.height, problem.width
    constants: tuple[tuple[str, Constant], ...] = (
        ("bias", problem.bias),
        ("first_phase_y", y.first_phase),
        ("first_phase_x", x.first_phase),
        ("used_phases_y", y.used_phases),
        ("used_phases_x", x.used_phases),
        # A step beyond the kernel finds no tap, and one of any length might leave 32 bits.
        ("tap_step_y", min(y.stride // gcd(y.stride, y.dilation), y.kernel)),
        ("tap_step_x", min(x.stride // gcd(x.stride, x.dilation), x.kernel)),
        ("shift_step_y", y.dilation // gcd(y.stride, y.dilation)),
        ("shift_step_x", x.dilation // gcd(x.stride, x.dilation)),
        ("first_q_y", y.q_range.start),
        ("first_q_x", x.q_range.start),
    )
    sizes: dict[str, Argument] = {
        "pixel_height": len(y.q_range),
        "pixel_width": len(x.q_range),
        "source_height": y.size,
        "source_width": x.size,
        "destination_height": y.output_size,
        "destination_width": x.output_size,
    }
    shape = layout(problem, tile)
    return implicit_gemm.launches(STEM, problem, shape, ("x", "y"), sizes, constants, bias=True)
