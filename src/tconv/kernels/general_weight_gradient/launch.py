"""What a call of `general_weight_gradient` launches."""

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.general_weight_gradient import layout
from tconv.kernels.general_weight_gradient.tiles import THREADS, Tile
from tconv.kernels.launch import Address, Argument, Launch, fields, strides
from tconv.kernels.source import Constant, KernelSource
from tconv.problem import Problem

STEM = "general_weight_gradient"


def _source(problem: Problem, tile: Tile, arguments: dict[str, Argument]) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    # The number of tiles depends on the device through the splits; their bound does not.
    index = family.index_type(
        problem,
        layout.pixels(problem) + layout.MOST_SPLITS * tile.depth,
        layout.split_tiles(problem, tile) * layout.MOST_SPLITS,
        layout.MOST_SPLITS * problem.in_channels * layout.columns(problem)
        if problem.in_channels * layout.columns(problem) * 4 > layout.MOST_PARTIAL_BYTES
        else 0,
    )
    shared = layout.shared_bytes(problem, tile, 8 if index == "long long" else 4)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", family.ELEMENT_TYPES[problem.dtype]),
        ("Index", index),
        ("groups", problem.groups),
        ("in_channels", problem.in_channels_per_group),
        ("out_channels", problem.out_channels_per_group),
        ("round_to_tf32", problem.math == "tf32"),
        ("blocks", family.blocks(problem, index, tile.blocks)),
        ("shared_bytes", shared),
        ("row_threads", tile.row_threads),
        ("column_threads", tile.column_threads),
        ("thread_rows", tile.thread_rows),
        ("thread_columns", tile.thread_columns),
        ("depth", tile.depth),
        *family.axis_constants(problem),
        ("x_channels_last", problem.x_layout == "channels_last"),
        ("y_channels_last", problem.y_layout == "channels_last"),
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
        "split_pixels": layout.split_pixels(problem, tile, splits),
        "height": y.size,
        "width": x.size,
        "out_height": y.output_size,
        "out_width": x.output_size,
        **strides("x", "n c h w", "x"),
        **strides("y", "n c h w", "y"),
    }
    grid = min(tiles, family.MAX_GRID)
    return (Launch("kernel", _source(problem, tile, arguments), grid, arguments, splits=splits),)
