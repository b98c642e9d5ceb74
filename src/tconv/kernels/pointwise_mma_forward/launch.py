"""What a call of `pointwise_mma_forward` launches."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.launch import Argument, Launch, fields, input_image, output_rows, weights
from tconv.kernels.pointwise_mma_forward.layout import Tile, layout
from tconv.kernels.source import KernelSource
from tconv.problem import Problem

STEM = "pointwise_mma_forward"


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel: a block for each tile."""
    laid = layout(problem, target, tile)
    width = hopper.division(problem.width.output_size)
    arguments: dict[str, Argument] = {
        **input_image(problem),
        **weights(),
        **output_rows(problem),
        "tiles": laid.tiles,
        "tile_pixels": laid.tile_pixels,
        "width_multiplier": width[0],
        "width_shift": width[1],
    }
    index = family.index_type(problem)
    source = KernelSource(
        stem=STEM,
        constants=(
            *family.layer_constants(problem, index),
            ("blocks", tile.blocks),
            ("pointwise", laid.pointwise),
            *family.axis_constants(problem),
            ("rows", tile.rows),
            ("pixels", tile.pixels),
            ("splits", tile.splits),
            ("pixel_warps", tile.pixel_warps),
            ("chunk", laid.chunk),
            ("slots", laid.slots),
            ("pitch", laid.pitch),
            ("lies", laid.lies),
        ),
        arguments=fields(arguments, index),
        shared_bytes=laid.shared_bytes,
        threads=tile.threads,
    )
    return (Launch("kernel", source, laid.grid, arguments, aligned=True, whole_rows=True),)
