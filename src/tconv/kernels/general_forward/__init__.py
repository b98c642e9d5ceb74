"""`general_forward`: the output of any layer, on fused multiply-adds (`general_forward.cu`)."""

from __future__ import annotations

from collections import Counter
from math import gcd

from tconv.jit.target import Target
from tconv.kernels import family, implicit_gemm
from tconv.kernels.implicit_gemm import Shape, Tile
from tconv.kernels.launch import Address, Argument, Launch, strides
from tconv.kernels.source import KernelSource
from tconv.problem import Axis, Direction, Problem

STEM = "general_forward"
DIRECTION: Direction = "forward"
TILES = implicit_gemm.TILES

MOST_PHASES = 4
"""Phases in x that one block interleaves; more would take too many registers."""


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    return family.coordinates_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    return _shape(problem, tile).why_not(target)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled time in seconds; depthwise layers take more, and all 7 us, as sweeps showed."""
    depthwise = 1.5 if problem.in_channels_per_group == 1 else 1.0
    return depthwise * _shape(problem, tile).cost(problem, target) + 7e-6


def source(problem: Problem, tile: Tile) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    shape = _shape(problem, tile)
    y, x = problem.height, problem.width
    index = family.index_type(problem, shape.pixels, shape.tiles)
    constants = (
        ("Element", family.ELEMENT_TYPES[problem.dtype]),
        *implicit_gemm.loop_constants(problem),
        *shape.constants(problem, index),
        *family.axis_constants(problem),
        ("bias", problem.bias),
        ("phases", shape.phases),
        ("first_phase_y", y.first_phase),
        ("first_phase_x", x.first_phase),
        ("used_phases_y", y.used_phases),
        ("used_phases_x", x.used_phases),
        ("sparse", _is_sparse(x)),
        # A step beyond the kernel finds no tap, and one of any length might leave 32 bits.
        ("tap_step_y", min(y.stride // gcd(y.stride, y.dilation), y.kernel)),
        ("shift_step_y", y.dilation // gcd(y.stride, y.dilation)),
        ("first_q_y", y.q_range.start),
        ("first_q_x", x.q_range.start),
        ("shift_count_x", len(x.shifts)),
        ("shifts_x", x.shifts),
        ("source_channels_last", problem.x_layout == "channels_last"),
        ("destination_channels_last", problem.y_layout == "channels_last"),
    )
    return KernelSource(
        stem=STEM,
        constants=constants,
        arguments=(
            ("source", "const void*"),
            ("weight", "const void*"),
            ("bias", "const void*"),
            ("destination", "void*"),
            ("tiles", index),
            ("pixels", index),
            ("pixel_height", "int"),
            ("pixel_width", "int"),
            ("source_height", "int"),
            ("source_width", "int"),
            ("destination_height", "int"),
            ("destination_width", "int"),
            *family.stride_fields("source", "n c h w", index),
            *family.stride_fields("weight", "in out h w", index),
            *family.stride_fields("destination", "n c h w", index),
        ),
        shared_bytes=shape.shared_bytes(8 if index == "long long" else 4),
        threads=implicit_gemm.THREADS,
    )


def _is_sparse(axis: Axis) -> bool:
    """Whether some phase with outputs has no tap at some shift."""
    taps = Counter(tap * axis.dilation % axis.stride for tap in range(axis.kernel))
    # The taps of a phase have shifts of their own each.
    return any(
        taps[(axis.first_phase + index) % axis.stride] < len(axis.shifts)
        for index in range(axis.used_phases)
    )


def _phases(axis: Axis) -> int:
    """Phases of a block: those with outputs, in the fewest equal shares of at most MOST_PHASES."""
    chunks = -(-axis.used_phases // MOST_PHASES)
    return -(-axis.used_phases // chunks)


def _shape(problem: Problem, tile: Tile) -> Shape:
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


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel; each block walks the tiles from its own on in steps of the grid."""
    shape = _shape(problem, tile)
    y, x = problem.height, problem.width
    arguments: dict[str, Argument] = {
        "source": Address("x"),
        "weight": Address("w"),
        "bias": Address("bias"),
        "destination": Address("y"),
        "tiles": shape.tiles,
        "pixels": shape.pixels,
        "pixel_height": len(y.q_range),
        "pixel_width": len(x.q_range),
        "source_height": y.size,
        "source_width": x.size,
        "destination_height": y.output_size,
        "destination_width": x.output_size,
        **strides("source", "n c h w", "x"),
        **strides("weight", "in out h w", "w"),
        **strides("destination", "n c h w", "y"),
    }
    grid = min(shape.tiles, family.MAX_GRID)
    return (Launch("kernel", source(problem, tile), grid, arguments),)
