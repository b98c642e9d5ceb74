"""Tiles, launches and cost that general_forward and general_input_gradient share.

Their products are those of `common/implicit_gemm.cuh`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tconv.jit.target import Target
from tconv.kernels import costs, family
from tconv.kernels.launch import Address, Argument, Launch, Operand, fields, strides
from tconv.kernels.source import Constant, KernelSource
from tconv.problem import Layout, Problem

COSTS = costs.load(str(Path(__file__).parent / "general_input_gradient" / "cost.py"))

THREADS = 128

BLOCKS = 4
"""Blocks that an SM must hold, which bounds the registers."""


@dataclass(frozen=True)
class Tile:
    """What each of a block's threads sums up: so many rows times pixels.

    Rows are output channels in forward, input channels in the gradient.
    """

    rows: int
    pixels: int

    def __str__(self) -> str:
        """Rows x pixels of a thread."""
        return f"{self.rows}x{self.pixels}"


TILES = (Tile(8, 4), Tile(8, 1), Tile(1, 4), Tile(1, 1))


@dataclass(frozen=True)
class Shape:
    """A tile laid over a problem.

    Attributes:
        rows: rows of a group.
        channels: channels that each output sums over.
        pixels: pixels of the whole batch.
        slots: slots of the average variant, for the cost.
        chain: and of the longest.
        variants: tiles that share pixels and rows.
        source: the layout of the image that is read.
    """

    tile: Tile
    rows: int
    channels: int
    groups: int
    pixels: int
    slots: float
    chain: int
    variants: int
    source: Layout

    @property
    def row_threads(self) -> int:
        """Neighbouring threads that share pixels, 1, 2 or 4: lanes then read fewer lines."""
        fit = self.rows // self.tile.rows if self.source == "channels_last" else 1
        return 4 if fit >= 4 else max(fit // 2 * 2, 1)

    @property
    def tiles(self) -> int:
        """Tiles of the launch."""
        row_tiles = -(-self.rows // (self.tile.rows * self.row_threads))
        pixel_tiles = -(-self.pixels * self.row_threads // (THREADS * self.tile.pixels))
        return self.variants * row_tiles * self.groups * pixel_tiles

    def cost(self, problem: Problem, target: Target) -> float:
        """Modelled seconds: the busiest SM's instructions or lines, a thread's waits, or the bytes.

        An SM issues 4 instructions and looks up one line a cycle.
        """
        pixels, rows = self.tile.pixels, self.tile.rows
        step = pixels * rows + COSTS.loaded * (pixels + rows)
        if problem.dtype == "float64":
            step *= 2
        slot = step * self.channels + COSTS.offset * pixels
        instructions = slot * self.slots + COSTS.epilogue * pixels * rows + COSTS.block
        looked_up = rows * self.row_threads
        looked_up += pixels * (32 // self.row_threads if self.source == "channels_last" else 1)
        a_warp = max(COSTS.scale * instructions / 4, looked_up * self.channels * self.slots)
        waves = -(-self.tiles // target.multiprocessors)
        cycles = max(waves * (THREADS // 32) * a_warp, COSTS.latency * self.channels * self.chain)
        return max(cycles / COSTS.clock, problem.bytes / COSTS.memory_rate) + COSTS.launch


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
    # A tile's last pixels may be behind the last one.
    index = family.index_type(problem, shape.pixels + THREADS * shape.tile.pixels, shape.tiles)
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
            ("Index", index),
            ("groups", problem.groups),
            ("in_channels", problem.in_channels_per_group),
            ("out_channels", problem.out_channels_per_group),
            ("round_to_tf32", problem.math == "tf32"),
            ("blocks", family.blocks(problem, index, BLOCKS)),
            ("tile_rows", shape.tile.rows),
            ("tile_pixels", shape.tile.pixels),
            ("row_threads", shape.row_threads),
            *family.axis_constants(problem),
            *constants,
        ),
        arguments=fields(arguments, index, ("tiles", "pixels")),
        shared_bytes=0,
        threads=THREADS,
    )
    return (Launch("kernel", kernel, min(shape.tiles, family.MAX_GRID), arguments),)
