"""What a call of `pointwise_forward` launches."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.launch import Argument, Launch, fields, input_image, output_rows, weights
from tconv.kernels.pointwise_forward.layout import THREADS, Tile, items, plane_vectors
from tconv.kernels.source import KernelSource
from tconv.problem import Problem

STEM = "pointwise_forward"


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel."""
    count = items(problem, tile)
    plane = problem.height.output_size * problem.width.output_size
    of_plane = hopper.division(plane_vectors(problem))
    width = hopper.division(problem.width.output_size)
    arguments: dict[str, Argument] = {
        **input_image(problem),
        **weights(),
        **output_rows(problem),
        "items": count,
        "plane": plane,
        "plane_vectors": plane_vectors(problem),
        "vectors_multiplier": of_plane[0],
        "vectors_shift": of_plane[1],
        "width_multiplier": width[0],
        "width_shift": width[1],
    }
    index = family.index_type(problem)
    source = KernelSource(
        stem=STEM,
        constants=(
            *family.layer_constants(problem, index),
            ("blocks", 2),
            ("stride_y", problem.height.stride),
            ("stride_x", problem.width.stride),
            ("planes", tile.planes),
        ),
        arguments=fields(arguments, index),
        shared_bytes=0,
        threads=THREADS,
    )
    return (
        Launch("kernel", source, -(-count // THREADS), arguments, aligned=True, whole_rows=True),
    )
