"""`general_weight_gradient`: the gradient of the weight of any layer, on fused multiply-adds.

The pixels are divided into splits; each writes its partial sums to a workspace, which the caller
adds up in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.launch import Address, Argument, Launch, strides
from tconv.kernels.source import Constant, KernelSource
from tconv.problem import Direction, Problem

STEM = "general_weight_gradient"
DIRECTION: Direction = "weight_gradient"

THREADS = 128

MOST_THREAD_BYTES = 320
"""Sums and staged values that a thread's registers hold without spilling."""

MOST_CHAIN = 1 << 14
"""Pixels of a split: 71 000 of them err by 3.3e-6 where cuDNN errs by 1.6e-6 (kb71, H200)."""

MOST_SPLITS = 1024
MOST_PARTIAL_BYTES = 64 << 20
"""Beyond this much workspace the splits stop growing, unless the weight itself is larger."""


@dataclass(frozen=True)
class Tile:
    """How a block of 128 threads divides its products; rows are input channels, columns (tap,
    output channel), and what threads are left divide the pixels of a step.

    Attributes:
        row_threads, column_threads: threads along rows and columns.
        thread_rows, thread_columns: rows and columns of one thread.
        depth: pixels staged in one step.
        blocks: blocks that an SM must hold, which bounds the registers.
    """

    row_threads: int
    column_threads: int
    thread_rows: int
    thread_columns: int
    depth: int
    blocks: int

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return self.row_threads * self.thread_rows

    @property
    def block_columns(self) -> int:
        """Columns of a block."""
        return self.column_threads * self.thread_columns

    def __str__(self) -> str:
        """Rows x columns of a block."""
        return f"{self.block_rows}x{self.block_columns}"


TILES = (
    Tile(8, 8, 8, 8, depth=16, blocks=3),
    Tile(8, 8, 4, 4, depth=32, blocks=4),
    Tile(4, 8, 4, 8, depth=16, blocks=4),
    Tile(8, 4, 8, 4, depth=16, blocks=4),
    Tile(1, 8, 4, 8, depth=16, blocks=4),
    Tile(1, 8, 1, 4, depth=32, blocks=4),
    Tile(1, 4, 1, 4, depth=32, blocks=4),
)


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    return family.coordinates_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    real = family.accumulator_bytes(problem)
    sums = tile.thread_rows * tile.thread_columns
    staged = tile.depth * (tile.block_rows + tile.block_columns) // THREADS
    if (sums + staged) * real > MOST_THREAD_BYTES:
        return (
            f"a thread would hold {sums} sums and {staged} staged values of {real} bytes, "
            f"its registers allow {MOST_THREAD_BYTES} bytes"
        )
    shared = _shared_bytes(problem, tile, 8)
    if shared > target.shared_per_block:
        return (
            f"a block needs {shared} bytes of shared memory, "
            f"{target.arch} has {target.shared_per_block}"
        )
    return None


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: issued instructions of the busiest SM, or the bytes moved."""
    real = family.accumulator_bytes(problem)
    own = tile.thread_rows * tile.thread_columns
    slices = THREADS // (tile.row_threads * tile.column_threads)
    per_pixel = (own + (tile.thread_rows + tile.thread_columns) / 2) / slices
    per_pixel += 16 * (tile.block_rows + tile.block_columns) / THREADS
    if real == 8:
        per_pixel *= 2
    count = _splits(problem, target, tile)
    pixels = -(-_pixels(problem) // count)
    instructions = pixels * per_pixel + 40 * slices + 500
    waves = -(-_tiles(problem, tile) * count // target.multiprocessors)
    issue = waves * instructions * (THREADS / 32) / 4 / 1.7e9
    partial = 2 * count * real * problem.in_channels * _columns(problem)
    return max(issue, problem.bytes / 3e12) + partial / 3e12


def source(problem: Problem, tile: Tile) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    # The number of tiles depends on the device through the splits; their bound does not.
    index = family.index_type(
        problem,
        _pixels(problem) + MOST_SPLITS * tile.depth,
        _tiles(problem, tile) * MOST_SPLITS,
        MOST_SPLITS * problem.in_channels * _columns(problem)
        if problem.in_channels * _columns(problem) * 4 > MOST_PARTIAL_BYTES
        else 0,
    )
    shared = _shared_bytes(problem, tile, 8 if index == "long long" else 4)
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
        arguments=(
            ("x", "const void*"),
            ("y", "const void*"),
            ("partial", "void*"),
            ("tiles", index),
            ("pixels", index),
            ("split_pixels", index),
            ("height", "int"),
            ("width", "int"),
            ("out_height", "int"),
            ("out_width", "int"),
            *family.stride_fields("x", "n c h w", index),
            *family.stride_fields("y", "n c h w", index),
        ),
        shared_bytes=shared,
        threads=THREADS,
    )


def _splits(problem: Problem, target: Target, tile: Tile) -> int:
    """Shares of the pixels: enough blocks for four on each SM, each with eight steps or more, and
    none that adds up so many pixels that its float32 sums lose more than cuDNN's.
    """
    weight_bytes = family.accumulator_bytes(problem) * problem.in_channels * _columns(problem)
    wanted = -(-4 * target.multiprocessors // _tiles(problem, tile))
    wanted = max(wanted, -(-_pixels(problem) // MOST_CHAIN))
    most = min(
        MOST_SPLITS,
        max(1, MOST_PARTIAL_BYTES // weight_bytes),
        max(1, _pixels(problem) // (8 * tile.depth)),
    )
    shares = min(wanted, most)
    # Rounding each share up to whole steps may leave the last ones empty.
    return -(-_pixels(problem) // _split_pixels(problem, tile, shares))


def _pixels(problem: Problem) -> int:
    return problem.batch * problem.height.size * problem.width.size


def _columns(problem: Problem) -> int:
    return problem.taps * problem.out_channels_per_group


def _tiles(problem: Problem, tile: Tile) -> int:
    """Tiles of one split."""
    row_tiles = -(-problem.in_channels_per_group // tile.block_rows)
    return row_tiles * -(-_columns(problem) // tile.block_columns) * problem.groups


def _split_pixels(problem: Problem, tile: Tile, shares: int) -> int:
    """Pixels of a split: whole steps."""
    return -(-_pixels(problem) // (shares * tile.depth)) * tile.depth


def _shared_bytes(problem: Problem, tile: Tile, index_bytes: int) -> int:
    """Bytes of the kernel's `Shared`."""
    real = family.accumulator_bytes(problem)
    widths = (tile.block_rows + 4, tile.block_columns + 4)
    stage = sum(-(-tile.depth * width * real // 16) * 16 for width in widths)
    sums = tile.block_rows * (tile.block_columns + 1) * real
    union = -(-max(2 * stage, sums) // 16) * 16
    tables = 2 * tile.depth * (2 * index_bytes + 8) + tile.block_columns * (index_bytes + 8)
    return -(-(union + tables) // 16) * 16


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel; each block walks the tiles from its own on in steps of the grid."""
    y, x = problem.height, problem.width
    splits = _splits(problem, target, tile)
    tiles = _tiles(problem, tile) * splits
    arguments: dict[str, Argument] = {
        "x": Address("x"),
        "y": Address("y"),
        "partial": Address("partial"),
        "tiles": tiles,
        "pixels": _pixels(problem),
        "split_pixels": _split_pixels(problem, tile, splits),
        "height": y.size,
        "width": x.size,
        "out_height": y.output_size,
        "out_width": x.output_size,
        **strides("x", "n c h w", "x"),
        **strides("y", "n c h w", "y"),
    }
    grid = min(tiles, family.MAX_GRID)
    return (Launch("kernel", source(problem, tile), grid, arguments, splits=splits),)
