"""`general_input_gradient`: the gradient of the input of any layer, on fused multiply-adds."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import family, implicit_gemm
from tconv.kernels.implicit_gemm import Shape, Tile
from tconv.kernels.launch import Address, Argument, Launch, strides
from tconv.kernels.source import KernelSource
from tconv.problem import Direction, Problem

STEM = "general_input_gradient"
DIRECTION: Direction = "input_gradient"
TILES = implicit_gemm.TILES


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    return family.coordinates_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    return _shape(problem, tile).why_not(target)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled time in seconds."""
    return _shape(problem, tile).cost(problem, target)


def source(problem: Problem, tile: Tile) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    shape = _shape(problem, tile)
    index = family.index_type(problem, shape.pixels, shape.tiles)
    constants = (
        ("Element", family.ELEMENT_TYPES[problem.dtype]),
        *implicit_gemm.loop_constants(problem),
        *shape.constants(problem, index),
        *family.axis_constants(problem),
        ("source_channels_last", problem.y_layout == "channels_last"),
        ("destination_channels_last", problem.x_layout == "channels_last"),
    )
    return KernelSource(
        stem=STEM,
        constants=constants,
        arguments=(
            ("source", "const void*"),
            ("weight", "const void*"),
            ("destination", "void*"),
            ("tiles", index),
            ("pixels", index),
            ("pixel_height", "int"),
            ("pixel_width", "int"),
            ("source_height", "int"),
            ("source_width", "int"),
            *family.stride_fields("source", "n c h w", index),
            *family.stride_fields("weight", "in out h w", index),
            *family.stride_fields("destination", "n c h w", index),
        ),
        shared_bytes=shape.shared_bytes(8 if index == "long long" else 4),
        threads=implicit_gemm.THREADS,
    )


def _shape(problem: Problem, tile: Tile) -> Shape:
    return Shape(
        tile=tile,
        rows=problem.in_channels_per_group,
        channels=problem.out_channels_per_group,
        groups=problem.groups,
        pixels=problem.batch * problem.height.size * problem.width.size,
        slots=problem.taps,
        phases=1,
        variants=1,
        real_bytes=implicit_gemm.real_bytes(problem),
    )


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel; each block walks the tiles from its own on in steps of the grid."""
    shape = _shape(problem, tile)
    y, x = problem.height, problem.width
    arguments: dict[str, Argument] = {
        "source": Address("y"),
        "weight": Address("w"),
        "destination": Address("x"),
        "tiles": shape.tiles,
        "pixels": shape.pixels,
        "pixel_height": y.size,
        "pixel_width": x.size,
        "source_height": y.output_size,
        "source_width": x.output_size,
        **strides("source", "n c h w", "y"),
        **strides("weight", "in out h w", "w"),
        **strides("destination", "n c h w", "x"),
    }
    grid = min(shape.tiles, family.MAX_GRID)
    return (Launch("kernel", source(problem, tile), grid, arguments),)
