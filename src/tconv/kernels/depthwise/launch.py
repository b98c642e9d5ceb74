"""What a call of a depthwise kernel launches."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.depthwise.layout import Layout, layout
from tconv.kernels.depthwise.tiles import THREADS, Tile
from tconv.kernels.launch import Address, Argument, Launch, fields, strides
from tconv.kernels.source import KernelSource
from tconv.problem import Problem

STEMS = {
    "forward": "depthwise_forward",
    "input_gradient": "depthwise_input_gradient",
    "weight_gradient": "depthwise_weight_gradient",
}
_WRITTEN = {"forward": "y", "input_gradient": "x", "weight_gradient": "partial"}


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel. The weight's gradient writes partial sums, added in the order of the splits."""
    laid = layout(problem, tile)
    shares = laid.shares(target)
    gradient = problem.direction == "weight_gradient"
    arguments: dict[str, Argument] = {
        "x": Address("x"),
        **({} if gradient else {"w": Address("w")}),
        "y": Address("y"),
        **({"bias": Address("bias")} if laid.forward else {}),
        **({"partial": Address("partial")} if gradient else {}),
        **_counts(laid),
        "units" if gradient else "chunks": laid.units,
        "shares": shares,
        "x_height": problem.height.size,
        "x_width": problem.width.size,
        "y_height": problem.height.output_size,
        "y_width": problem.width.output_size,
        **strides("x", "n c h w", "x"),
        **({} if gradient else strides("w", "in out h w", "w")),
        **strides("y", "n c h w", "y"),
    }
    index = family.index_type(problem, *_offsets(problem), shares * _weights(problem))
    source = KernelSource(
        stem=STEMS[problem.direction],
        constants=(
            ("Element", family.ELEMENT_TYPES[problem.dtype]),
            ("Index", index),
            ("blocks", laid.blocks),
            ("bias", problem.bias),
            ("channels", laid.channels),
            ("multiple", laid.multiple),
            ("vector", tile.vector),
            ("strip", tile.strip),
            ("threads_c", laid.threads_c),
            ("tap_rows", laid.tap_rows),
            *family.axis_constants(problem),
            ("lead_y", laid.lead(problem.height)),
            ("lead_x", laid.lead(problem.width)),
            ("channels_last", laid.channels_last),
            ("x_vectors", laid.vectors("x")),
            ("y_vectors", laid.vectors("y")),
        ),
        arguments=fields(arguments, index, written=_WRITTEN[problem.direction]),
        shared_bytes=0,
        threads=THREADS,
    )
    splits = shares if gradient else 0
    return (Launch("kernel", source, laid.units * shares, arguments, splits=splits),)


def _counts(laid: Layout) -> dict[str, Argument]:
    """Positions, and how one is divided into image, row and strip."""
    strips, groups = hopper.division(laid.strips), hopper.division(laid.row_groups)
    return {
        "positions": laid.positions,
        "rows": laid.rows,
        "row_shift": laid.row_shift,
        "row_groups": laid.row_groups,
        "groups_multiplier": groups[0],
        "groups_shift": groups[1],
        "strips": laid.strips,
        "strips_multiplier": strips[0],
        "strips_shift": strips[1],
    }


def _offsets(problem: Problem) -> tuple[int, ...]:
    """Elements of x and y, with the rows beyond them whose addresses are computed."""
    axis = problem.height
    beyond = axis.padding + axis.kernel * axis.dilation + 2 * axis.stride
    return tuple(
        (n * height + beyond) * channels * (width + problem.width.kernel * problem.width.dilation)
        for n, channels, height, width in (problem.x_shape, problem.y_shape)
    )


def _weights(problem: Problem) -> int:
    """Partial sums of a split."""
    return problem.out_channels * problem.taps
