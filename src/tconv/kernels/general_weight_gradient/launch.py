"""What a call of `general_weight_gradient` launches."""

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.general_weight_gradient import layout
from tconv.kernels.general_weight_gradient.tiles import THREADS, Tile
from tconv.kernels.launch import Address, Argument, Launch, fields, strides
from tconv.kernels.source import Constant, KernelSource
from tconv.problem import Problem

STEM = "general_weight_gradient"
BLOCKS = 4
"""Blocks that an SM must hold, which bounds the registers."""


def _source(problem: Problem, tile: Tile, arguments: dict[str, Argument]) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    # The number of tiles depends on the device through the splits; their bound does not.
    index = family.index_type(
        problem,
        layout.pixels(problem) + (layout.MOST_SPLITS + 1) * THREADS,
        layout.split_tiles(problem, tile) * layout.MOST_SPLITS,
        layout.MOST_SPLITS * layout.weights(problem)
        if layout.weights(problem) * 4 > layout.MOST_PARTIAL_BYTES
        else 0,
    )
    shared = layout.shared_bytes(problem, tile)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", family.ELEMENT_TYPES[problem.dtype]),
        ("Index", index),
        ("groups", problem.groups),
        ("in_channels", problem.in_channels_per_group),
        ("out_channels", problem.out_channels_per_group),
        ("round_to_tf32", problem.math == "tf32"),
        ("blocks", family.blocks(problem, index, BLOCKS)),
        ("shared_bytes", shared),
        ("tile_rows", tile.rows),
        ("tile_columns", tile.columns),
        *family.axis_constants(problem),
    )
    return KernelSource(
        stem=STEM,
        constants=constants,
        arguments=fields(arguments, index, ("tiles", "pixels", "split_pixels"), written="partial"),
        shared_bytes=shared,
        threads=THREADS,
    )


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel; each block walks the tiles from its own on in steps of the grid."""
    y, x = problem.height, problem.width
    splits = layout.splits(problem, target, tile)
    tiles = layout.split_tiles(problem, tile) * splits
    arguments: dict[str, Argument] = {
        "x": Address("x"),
        "y": Address("y"),
        "partial": Address("partial"),
        "tiles": tiles,
        "pixels": layout.pixels(problem),
        "split_pixels": layout.split_pixels(problem, splits),
        "height": y.size,
        "width": x.size,
        "out_height": y.output_size,
        "out_width": x.output_size,
        **strides("x", "n c h w", "x"),
        **strides("y", "n c h w", "y"),
    }
    grid = min(tiles, family.MAX_GRID)
    return (Launch("kernel", _source(problem, tile, arguments), grid, arguments, splits=splits),)
