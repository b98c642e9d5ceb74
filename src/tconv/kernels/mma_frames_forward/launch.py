"""What a call of `mma_frames_forward` launches."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import family, image_tiles
from tconv.kernels.launch import Launch, fields
from tconv.kernels.mma_frames_forward.layout import DEPTH, PHASES, STAGES, THREADS, Tile, layout
from tconv.kernels.source import KernelSource
from tconv.problem import Problem

STEM = "mma_frames_forward"


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel: a block for each tile."""
    laid = layout(problem, tile)
    index = family.index_type(problem, laid.tiles)
    tiles_yx = (problem.height.size, laid.tiles_x)
    arguments = image_tiles.arguments(problem, laid.tiles, tiles_yx)
    source = KernelSource(
        stem=STEM,
        constants=(
            *family.layer_constants(problem, index),
            ("pixels", tile.pixels),
            ("phases", PHASES),
            ("depth", DEPTH),
            ("stages", STAGES),
            ("slots", laid.slots),
            ("source_pitch", laid.source_pitch),
            ("shared_bytes", laid.shared_bytes),
            ("first_q", problem.width.q_range.start),
            *family.axis_constants(problem),
        ),
        arguments=fields(arguments, index, ("tiles",)),
        shared_bytes=laid.shared_bytes,
        threads=THREADS,
    )
    return (Launch("kernel", source, min(laid.tiles, family.MAX_GRID), arguments),)
