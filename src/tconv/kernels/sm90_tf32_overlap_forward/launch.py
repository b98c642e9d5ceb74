"""The launch of `sm90_tf32_overlap_forward`."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.launch import Argument, Launch, fields, input_image, output_rows, weights
from tconv.kernels.sm90_tf32_overlap_forward.layout import RESERVED_BYTES, layout, round_up
from tconv.kernels.sm90_tf32_overlap_forward.tiles import Tile
from tconv.kernels.source import Constant, KernelSource
from tconv.problem import Problem

STEM = "sm90_tf32_overlap_forward"


def _source(problem: Problem, tile: Tile, arguments: dict[str, Argument]) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    laid = layout(problem, tile)
    index = family.index_type(problem, laid.lines)
    stages = laid.stages(hopper.TARGET)
    shared = laid.weight_bytes + tile.warpgroups * stages * laid.stage_bytes + laid.table_bytes
    constants: tuple[tuple[str, Constant], ...] = (
        *family.layer_constants(problem, index),
        ("shared_bytes", round_up(shared, RESERVED_BYTES)),
        ("depth", laid.depth),
        ("stages", stages),
        ("columns", laid.columns),
        ("pitch", laid.pitch),
        ("skew", laid.skew),
        ("strip", laid.strip),
        ("first_column", laid.first_pixel - laid.skew),
        ("first_pixel", laid.first_pixel),
        ("lead", laid.lead),
        ("slot_begin", laid.slot_begin),
        ("offset_x", laid.offset_x),
        ("source_vectors", laid.source_vectors),
        ("store_vector", laid.store_vector),
        *family.axis_constants(problem),
        ("first_q", laid.first_row),
    )
    return KernelSource(
        stem=STEM,
        constants=constants,
        arguments=fields(arguments, index, ("lines",)),
        shared_bytes=round_up(shared, RESERVED_BYTES),
        threads=tile.threads,
    )


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel. It has a block for each SM, or for each group if there are more groups."""
    laid = layout(problem, tile)
    arguments: dict[str, Argument] = {
        "lines": laid.lines // laid.abreast(target),
        "share": laid.share(target),
        "rows": laid.rows,
        "strips": laid.strips // laid.abreast(target),
        "abreast": laid.abreast(target),
        "step": laid.step(target),
        **input_image(problem),
        **weights(),
        **output_rows(problem),
    }
    grid = problem.groups * laid.blocks(target)
    return (Launch("kernel", _source(problem, tile, arguments), grid, arguments, aligned=True),)
