"""The geometry of a tile of `direct_forward`."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from tconv.kernels import family, image_tiles
from tconv.kernels.direct_forward.tiles import THREADS, Tile
from tconv.kernels.image_tiles import AIMED_SHARED, POSITIONS_BYTES, RESERVED_SHARED
from tconv.problem import Axis, Problem

MOST_SPARE_WEIGHTS = 1024
"""Most floats of weights of which a block holds two copies."""

LEAST_DEPTH = 2
"""Least input channels of a step. Fewer are not worth its barrier."""


@dataclass(frozen=True)
class Taps:
    """The taps of one axis, for pixels of `stride` outputs that start at output 0.

    Attributes:
        phases: for each tap, the output of a pixel that it reaches.
        offsets: for each tap, the input that it reads, relative to the pixel's number.
    """

    phases: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def used(self) -> tuple[int, ...]:
        """The phases that some tap reaches, ascending."""
        return tuple(sorted(set(self.phases)))

    @property
    def first(self) -> int:
        """The least offset."""
        return min(self.offsets)

    @property
    def span(self) -> int:
        """The greatest offset minus the least."""
        return max(self.offsets) - self.first


def taps_of(axis: Axis) -> Taps:
    """The taps of an axis: output `stride*m + phase` reads input `m + offset`."""
    reaches = [tap * axis.dilation - axis.padding for tap in range(axis.kernel)]
    return Taps(
        phases=tuple(reach % axis.stride for reach in reaches),
        offsets=tuple(-(reach // axis.stride) for reach in reaches),
    )


@dataclass(frozen=True)
class Layout(image_tiles.Layout):
    """A tile laid over a problem.

    Attributes:
        y, x: the taps of both axes.
        depth: input channels of a step.
        thread_rows: rows of pixels of a thread.
        remembered: what all sizes of a kernel share (`family.of_kernel`, `family.once`).
    """

    problem: Problem
    tile: Tile
    y: Taps
    x: Taps
    depth: int
    thread_rows: int
    remembered: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @family.of_kernel
    def channels(self) -> int:
        """Output channels of a thread."""
        return min(self.tile.channels, self.problem.out_channels_per_group)

    @family.of_kernel
    def threads_o(self) -> int:
        """Threads along the output channels: a power of two."""
        wanted = -(-self.problem.out_channels_per_group // self.channels)
        return min(self.tile.threads_o, 1 << (wanted - 1).bit_length())

    @family.of_kernel
    def threads_y(self) -> int:
        """Threads along y."""
        return THREADS // (self.tile.threads_x * self.threads_o)

    @family.of_kernel
    def tile_columns(self) -> int:
        """Pixels of a block along x."""
        return self.tile.threads_x * self.tile.pixels

    @family.of_kernel
    def pixel_columns(self) -> int:
        """Pixels of an output row."""
        width = self.problem.pattern.width
        return -(-width.output_size // width.stride)

    @family.of_kernel
    def tile_rows(self) -> int:
        """Pixels of a block along y."""
        return self.threads_y * self.thread_rows

    @family.of_kernel
    def tile_channels(self) -> int:
        """Output channels of a block."""
        return self.threads_o * self.channels

    @family.of_kernel
    def slot_sums(self) -> int:
        """Accumulators of a thread for one phase in y."""
        return self.channels * self.tile.pixels * len(self.x.used)

    @family.of_kernel
    def groups_y(self) -> int:
        """Passes over the input channels, each with its share of the phases in y."""
        return -(-len(self.y.used) // max(1, self.tile.sums // self.slot_sums))

    @family.of_kernel
    def group_slots(self) -> int:
        """Phases in y of one pass."""
        return -(-len(self.y.used) // self.groups_y)

    @family.of_kernel
    def products(self) -> int:
        """Multiply-adds of a thread for one input channel and row, all passes."""
        return self.problem.taps * self.channels * self.tile.pixels

    @family.of_kernel
    def skew(self) -> int:
        """Columns from a multiple of 4 to the first that a tile reads."""
        return self.x.first % 4

    @family.of_kernel
    def patch_vectors(self) -> tuple[int, int]:
        """Vectors of 4 columns in a row of the patch: loaded, and with padding."""
        used = -(-(self.skew + self.tile_columns + self.x.span) // 4)
        multiple = self.tile.pixels // 4
        return used, -(-used // multiple) * multiple

    @family.of_kernel
    def window_vectors(self) -> int:
        """Vectors of 4 columns that a thread reads of a row of the patch."""
        return -(-(self.skew + self.tile.pixels + self.x.span) // 4)

    @family.of_kernel
    def patch_rows(self) -> int:
        """Input rows of a tile, its halo included."""
        return self.tile_rows + self.y.span

    @family.of_kernel
    def row_weights(self) -> int:
        """Weights of a thread for one input channel and tap in y, with padding."""
        return -(-self.problem.width.kernel * self.channels // 4) * 4

    @family.of_kernel
    def weights(self) -> int:
        """Floats of a tile's weights and bias."""
        weights = self.problem.in_channels_per_group * self.problem.height.kernel
        weights *= self.threads_o * self.row_weights
        return weights + -(-self.tile_channels // 4) * 4

    @family.of_kernel
    def weight_buffers(self) -> int:
        """Copies of a tile's weights: two if the next tile often needs others, and few."""
        return 2 if self.group_tiles > 1 and self.weights <= MOST_SPARE_WEIGHTS else 1

    @family.of_kernel
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        patch = self.depth * self.patch_rows * self.patch_vectors[1] * 4
        outputs = THREADS * self.tile.pixels * self.problem.width.stride
        buffers = 2 * patch + outputs + self.weight_buffers * self.weights
        return 4 * buffers + POSITIONS_BYTES

    @functools.cached_property
    def tiles_yx(self) -> tuple[int, int]:
        """Tiles along y and x."""
        height, width = self.problem.height, self.problem.width
        return (
            -(-height.output_size // (height.stride * self.tile_rows)),
            -(-width.output_size // (width.stride * self.tile_columns)),
        )

    @property
    def rows_in_image(self) -> float:
        """Share of the tiles' rows that warps compute.

        A warp may have its first row behind the image's last. If one step holds all input channels,
        it is done. In deeper tiles it must take part in the barriers, and computes.
        """
        if self.chunks > 1:
            return 1.0
        of_warp = max(1, 32 // (self.tile.threads_x * self.threads_o))
        height = self.problem.height
        pixel_rows = -(-height.output_size // height.stride)
        return -(-pixel_rows // of_warp) * of_warp / (self.tiles_yx[0] * self.tile_rows)

    @family.of_kernel
    def bound_blocks(self) -> int:
        """The launch bound: 64-bit offsets take registers of one block."""
        return self.tile.blocks - self.problem.wide_offsets


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    if problem.like is not None:
        return family.over(layout(problem.like, tile), problem)
    y, x = taps_of(problem.height), taps_of(problem.width)
    channels = problem.in_channels_per_group
    depth = min(tile.depth, channels)
    # Rows beyond the image are of no use. Nor is a depth with which too few blocks share an SM.
    rows = tile.rows if depth == channels else 1
    while True:
        laid = Layout(problem, tile, y, x, depth, rows)
        height = problem.pattern.height
        pixel_rows = -(-height.output_size // height.stride)
        if rows > 1 and (rows - 1) * laid.threads_y >= pixel_rows:
            rows //= 2
        elif laid.shared_bytes <= AIMED_SHARED // tile.blocks - RESERVED_SHARED:
            return laid
        elif rows > 1:
            rows //= 2
        elif depth > LEAST_DEPTH and channels > LEAST_DEPTH:
            depth = -(-depth // 2)
        else:
            return laid
