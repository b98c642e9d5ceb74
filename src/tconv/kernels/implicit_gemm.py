"""Tiles, launches and cost that general_forward and general_input_gradient share.

Their tile loop is `common/implicit_gemm.cuh`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tconv.jit.target import Target
from tconv.kernels import costs, family, image_tiles
from tconv.kernels.launch import Address, Argument, Launch, Operand, fields, strides
from tconv.kernels.source import Constant, KernelSource
from tconv.problem import ITEM_BYTES, Problem

COSTS = costs.load(str(Path(__file__).parent / "general_input_gradient" / "cost.py"))

THREADS = 128

MOST_THREAD_BYTES = 352
"""Bytes of a thread's registers for sums and staged values, without spilling.

Each staged value takes 4 bytes more, for its address.
"""


@dataclass(frozen=True)
class Tile:
    """How a block of 128 threads divides its outputs.

    Attributes:
        row_threads: number of threads along the rows (output channels in forward). The other
            factor of 128 is the number of threads along the pixels.
        thread_rows: rows x phases of one thread.
        thread_pixels: pixels of one thread.
        depth: products of one output that a step stages.
        blocks: blocks that an SM must hold. This bounds the registers.
    """

    row_threads: int
    thread_rows: int
    thread_pixels: int
    depth: int
    blocks: int

    @property
    def block_pixels(self) -> int:
        """Pixels of a block."""
        return THREADS // self.row_threads * self.thread_pixels

    def __str__(self) -> str:
        """Rows x pixels of a block."""
        return f"{self.row_threads * self.thread_rows}x{self.block_pixels}"


TILES = (
    Tile(row_threads=8, thread_rows=8, thread_pixels=8, depth=8, blocks=3),
    Tile(row_threads=8, thread_rows=4, thread_pixels=8, depth=8, blocks=4),
    Tile(row_threads=4, thread_rows=4, thread_pixels=8, depth=8, blocks=3),
    Tile(row_threads=2, thread_rows=4, thread_pixels=4, depth=8, blocks=3),
    Tile(row_threads=1, thread_rows=4, thread_pixels=4, depth=4, blocks=3),
    Tile(row_threads=1, thread_rows=1, thread_pixels=4, depth=4, blocks=3),
)


@dataclass(frozen=True)
class Shape:
    """A tile laid over a problem.

    Attributes:
        rows: rows of a group.
        channels: channels that each output sums over.
        pixels: pixels of the whole batch.
        slots: slots of the average variant, for the cost.
        phases: outputs of a pixel in one block.
        variants: tiles that share pixels and rows.
        real_bytes: bytes of a staged value.
    """

    tile: Tile
    rows: int
    channels: int
    groups: int
    pixels: int
    slots: float
    phases: int
    variants: int
    real_bytes: int

    @property
    def thread_rows(self) -> int:
        """Rows of a thread, each with all phases: a power of two."""
        rows = max(1, self.tile.thread_rows // self.phases)
        return 1 << (rows.bit_length() - 1)

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return self.tile.row_threads * self.thread_rows

    @property
    def row_tiles(self) -> int:
        """Blocks that the rows of a group take."""
        return -(-self.rows // self.block_rows)

    @property
    def depth_channels(self) -> int:
        """Channels staged in one step."""
        return min(self.channels, self.tile.depth)

    @property
    def depth_shifts(self) -> int:
        """Slots staged in one step."""
        return self.tile.depth // self.depth_channels

    @property
    def tiles(self) -> int:
        """Tiles of the launch."""
        pixel_tiles = -(-self.pixels // self.tile.block_pixels)
        return self.variants * self.row_tiles * self.groups * pixel_tiles

    @property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return self.phases * self.thread_rows * self.tile.thread_pixels

    def shared_bytes(self, index_bytes: int) -> int:
        """Bytes of the kernel's `Shared`."""
        depth = self.depth_channels * self.depth_shifts
        pixels = self.tile.block_pixels
        source = -(-depth * (pixels + 4) * self.real_bytes // 16) * 16
        weight = -(-depth * self.phases * self.block_rows * self.real_bytes // 16) * 16
        vector = min(self.thread_rows, 16 // self.real_bytes)
        outputs = self.tile.row_threads * vector * (pixels * self.phases + 1) * self.real_bytes
        union = -(-max(2 * (source + weight), outputs) // 16) * 16
        return -(-(union + pixels * (index_bytes + 8)) // 16) * 16

    def constants(self, problem: Problem, index: str) -> tuple[tuple[str, int | str], ...]:
        """The members of `struct Layer` that the tile loop reads."""
        return (
            ("blocks", family.blocks(problem, index, self.tile.blocks)),
            ("shared_bytes", self.shared_bytes(8 if index == "long long" else 4)),
            ("row_threads", self.tile.row_threads),
            ("thread_rows", self.thread_rows),
            ("thread_pixels", self.tile.thread_pixels),
            ("depth_shifts", self.depth_shifts),
            ("depth_channels", self.depth_channels),
            ("Index", index),
        )

    def why_not(self, target: Target) -> str | None:
        """A reason if the tile cannot run, else None."""
        staged = self.tile.depth * self.tile.block_pixels // THREADS
        needed = self.sums * self.real_bytes + staged * (self.real_bytes + 4)
        if needed > MOST_THREAD_BYTES:
            return (
                f"a thread would hold {self.sums} sums and {staged} staged values in {needed} "
                f"bytes, its registers allow {MOST_THREAD_BYTES}"
            )
        return image_tiles.shared_why_not(self.shared_bytes(8), target)

    def cost(self, problem: Problem, target: Target) -> float:
        """Modelled seconds: issued instructions of the busiest SM, or the bytes moved.

        For a step of one product, a warp issues its multiply-adds, its shared loads, and its part
        of the staging. An SM issues 4 instructions a cycle.
        """
        pixels, rows = self.tile.thread_pixels, self.thread_rows * self.phases
        staged = (self.tile.block_pixels + self.block_rows * self.phases) / THREADS
        step = pixels * rows + (pixels + rows) / 2 + COSTS.staged * staged
        if self.real_bytes == 8:
            step *= 2
        channels = -(-self.channels // self.depth_channels) * self.depth_channels
        epilogue = COSTS.epilogue * self.sums
        instructions = step * channels * self.slots + epilogue + COSTS.block
        waves = -(-self.tiles // target.multiprocessors)
        issue = waves * instructions * (THREADS / 32) / 4 / COSTS.clock
        return COSTS.scale * max(issue, problem.bytes / COSTS.memory_rate) + COSTS.launch


def launches(
    stem: str,
    problem: Problem,
    shape: Shape,
    images: tuple[Operand, Operand],
    sizes: dict[str, Argument],
    constants: tuple[tuple[str, Constant], ...] = (),
    bias: bool = False,
) -> tuple[Launch, ...]:
    """The kernel; each block walks the tiles from its own on in steps of the grid.

    Args:
        stem: the kernel.
        problem: the layer.
        shape: the tile laid over it.
        images: what is read and what is written, of x and y.
        sizes: the fields of `struct Arguments` between the pixels and the strides, all int.
        constants: members of `struct Layer` that only this kernel reads.
        bias: whether it takes the address of the bias.
    """
    index = family.index_type(problem, shape.pixels, shape.tiles)
    layouts = {"x": problem.x_layout, "y": problem.y_layout}
    source, destination = images
    arguments: dict[str, Argument] = {
        "source": Address(source),
        "weight": Address("w"),
        **({"bias": Address("bias")} if bias else {}),
        "destination": Address(destination),
        "tiles": shape.tiles,
        "pixels": shape.pixels,
        **sizes,
        **strides("source", "n c h w", source),
        **strides("weight", "in out h w", "w"),
        **strides("destination", "n c h w", destination),
    }
    kernel = KernelSource(
        stem=stem,
        constants=(
            ("Element", family.ELEMENT_TYPES[problem.dtype]),
            ("groups", problem.groups),
            ("in_channels", problem.in_channels_per_group),
            ("out_channels", problem.out_channels_per_group),
            ("round_to_tf32", problem.math == "tf32"),
            *shape.constants(problem, index),
            *family.axis_constants(problem),
            *constants,
            ("source_channels_last", layouts[source] == "channels_last"),
            ("destination_channels_last", layouts[destination] == "channels_last"),
        ),
        arguments=fields(arguments, index, ("tiles", "pixels")),
        shared_bytes=shape.shared_bytes(8 if index == "long long" else 4),
        threads=THREADS,
    )
    return (Launch("kernel", kernel, min(shape.tiles, family.MAX_GRID), arguments),)


def real_bytes(problem: Problem) -> int:
    """Bytes of a staged value."""
    return max(family.accumulator_bytes(problem), ITEM_BYTES[problem.dtype])
