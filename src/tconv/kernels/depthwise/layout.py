"""How the depthwise kernels lay a tile over a problem."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.depthwise.tiles import THREADS, Tile
from tconv.problem import ITEM_BYTES, Axis, Problem

MOST_MULTIPLE = 8
"""Most output channels of a group. With more, tensor cores have enough to multiply."""

MOST_SUMS = 64
"""Sums of a thread."""

MOST_COLUMNS = 64
"""Columns that a strip reads of a row, with those between its taps."""

MOST_PRODUCTS = 1024
"""Unrolled multiply-adds of a strip. There are two copies, and the instruction cache is short."""

OTHER_REGISTERS = 47
"""Registers of a thread for addresses, sizes and counters."""

MOST_SHARED = 48 << 10
"""Bytes of static shared memory."""

MOST_POSITIONS = 1 << 30
"""The kernel's division is exact below."""


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    if target.capability < (8, 0):
        return f"converts pairs as sm_80 does, the target is {target.arch}"
    if problem.dtype == "float64" or problem.math != "ieee":
        return f"adds in float32 without TF32, not {problem.dtype}/{problem.math}"
    if problem.in_channels_per_group != 1:
        return f"is for one input channel in a group, not {problem.in_channels_per_group}"
    if problem.out_channels_per_group > MOST_MULTIPLE:
        return (
            f"is for {MOST_MULTIPLE} output channels in a group at most, "
            f"not {problem.out_channels_per_group}"
        )
    kind = (problem.direction, problem.dtype, problem.y_layout)
    if kind == ("forward", "float32", "contiguous"):
        return "leaves contiguous outputs in float32 to direct_forward, whose times are known"
    return family.coordinates_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    laid = layout(problem, tile)
    if tile.vector > 1 and not laid.channels_last:
        return f"{tile.vector} channels of a thread are neighbours in channels_last alone"
    if laid.channels % tile.vector:
        return f"a thread has {tile.vector} channels, the layer {laid.channels}"
    if tile.vector * ITEM_BYTES[problem.dtype] > 16:
        return f"an access has 16 bytes at most, not {tile.vector} channels of {problem.dtype}"
    if laid.columns > MOST_COLUMNS or laid.source_rows > MOST_COLUMNS:
        return (
            f"a strip would read {laid.source_rows}x{laid.columns} pixels, "
            f"the limit is {MOST_COLUMNS} along an axis"
        )
    if laid.sums > MOST_SUMS:
        return f"a thread would hold {laid.sums} sums, the limit is {MOST_SUMS}"
    if laid.blocks == 0:
        return f"a thread would hold {laid.held} values, there are no registers for them"
    if laid.products > MOST_PRODUCTS:
        return f"{laid.products} unrolled multiply-adds exceed the limit of {MOST_PRODUCTS}"
    if laid.shared_bytes > MOST_SHARED:
        return f"a block needs {laid.shared_bytes} bytes of shared memory, of {MOST_SHARED}"
    if laid.positions >= MOST_POSITIONS:
        return f"counts {MOST_POSITIONS} strips at most, there are {laid.positions}"
    return None


@dataclass(frozen=True)
class Layout:
    """A tile over a problem."""

    problem: Problem
    tile: Tile

    @property
    def forward(self) -> bool:
        """Whether strips are of outputs."""
        return self.problem.direction == "forward"

    @property
    def channels_last(self) -> bool:
        """Whether neighbouring threads have neighbouring channels. y is the larger image."""
        return self.problem.y_layout == "channels_last"

    @property
    def multiple(self) -> int:
        """Output channels of a group."""
        return self.problem.out_channels_per_group

    @property
    def channels(self) -> int:
        """Channels that threads have: of x for its gradient, else of y."""
        gradient = self.problem.direction == "input_gradient"
        return self.problem.in_channels if gradient else self.problem.out_channels

    @property
    def threads_c(self) -> int:
        """Threads of a block along the channels, a power of two up to a warp."""
        if not self.channels_last:
            return 1
        vectors = -(-self.channels // self.tile.vector)
        if vectors <= 32:
            return 1 << (vectors - 1).bit_length()
        return min((32, 16, 8), key=lambda count: -(-vectors // count) * count)

    @property
    def threads_p(self) -> int:
        """Threads of a block along the positions."""
        return THREADS // self.threads_c

    @property
    def block_channels(self) -> int:
        """Channels of a block."""
        return self.threads_c * self.tile.vector

    @property
    def chunks(self) -> int:
        """Blocks that the channels take."""
        return -(-self.channels // self.block_channels)

    def vectors(self, operand: str) -> bool:
        """Whether the values of a thread are neighbours in x or y."""
        if (self.problem.x_layout == "channels_last") != self.channels_last and operand == "x":
            return False
        # With several output channels in a group, the other image's channels are not in step.
        other = "y" if self.problem.direction == "input_gradient" else "x"
        in_step = self.multiple == 1 or operand != other
        return not self.channels_last or in_step

    def lead(self, axis: Axis) -> int:
        """Outputs of the first strip before the image.

        With those of one q begins a strip, which then reads the fewest inputs. Along rows that are
        written in vectors, a strip begins with the image instead.
        """
        along = axis is self.problem.width and not self.channels_last
        return axis.padding % axis.stride if self.forward and not along else 0

    @property
    def rows(self) -> int:
        """Rows of strips in an image."""
        axis = self.problem.height
        if not self.forward:
            return axis.size
        return -(-(axis.output_size + self.lead(axis)) // axis.stride)

    @property
    def strips(self) -> int:
        """Strips of a row."""
        axis = self.problem.width
        if not self.forward:
            return -(-axis.size // self.tile.strip)
        return -(-(axis.output_size + self.lead(axis)) // (axis.stride * self.tile.strip))

    @property
    def row_shift(self) -> int:
        """Logarithm of the rows that a block's warps have side by side.

        They share most rows of what is read. Where it is no divisor, some positions are none.
        """
        if not self.channels_last:
            return 0
        return max(s for s in range(3) if (-(-self.rows >> s) << s) * 8 <= 9 * self.rows)

    @property
    def row_groups(self) -> int:
        """Groups of these rows in an image."""
        return -(-self.rows >> self.row_shift)

    @property
    def positions(self) -> int:
        """Strips of all images."""
        return self.problem.batch * self.row_groups * self.strips << self.row_shift

    @functools.cached_property
    def columns(self) -> int:
        """Columns that a strip reads of a row, those between its taps included."""
        axis, strip = self.problem.width, self.tile.strip
        return self._read(axis, strip) if self.forward else self._met(axis, strip)

    @functools.cached_property
    def source_rows(self) -> int:
        """Rows that a strip reads, those between its taps included."""
        axis = self.problem.height
        return self._read(axis, 1) if self.forward else axis.kernel

    def _read(self, axis: Axis, strip: int) -> int:
        reach = axis.padding - self.lead(axis)
        first = -(-(reach - (axis.kernel - 1) * axis.dilation) // axis.stride)
        return max(1, (axis.stride * strip - 1 + reach) // axis.stride - first + 1)

    @staticmethod
    def _met(axis: Axis, strip: int) -> int:
        return (strip - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1

    @property
    def tap_rows(self) -> int:
        """Rows of taps that a thread sums for the weight's gradient."""
        row = self.problem.width.kernel * self.tile.vector
        return min(self.problem.height.kernel, max(1, MOST_SUMS // 2 // row))

    @property
    def tap_sets(self) -> int:
        """Blocks that the taps take for the weight's gradient."""
        return -(-self.problem.height.kernel // self.tap_rows)

    @property
    def outputs(self) -> int:
        """Outputs of a strip and a channel."""
        return self.problem.height.stride * self.problem.width.stride * self.tile.strip

    @property
    def sums(self) -> int:
        """Sums of a thread."""
        of_channel = {
            "forward": self.outputs,
            "input_gradient": self.tile.strip,
            "weight_gradient": self.tap_rows * self.problem.width.kernel,
        }
        return of_channel[self.problem.direction] * self.tile.vector

    @property
    def products(self) -> int:
        """Multiply-adds of a strip, in a thread."""
        rows = self.problem.height.kernel
        if self.problem.direction == "weight_gradient":
            rows = self.tap_rows
        return rows * self.problem.width.kernel * self.tile.strip * self.tile.vector

    @property
    def held(self) -> int:
        """Sums and pixels that a thread holds."""
        pixels = self.columns
        if self.problem.direction == "weight_gradient":
            pixels += self.tile.strip
        return self.sums + pixels * self.tile.vector

    @property
    def blocks(self) -> int:
        """Blocks that an SM must hold, which bounds the registers; 0 if there are not enough."""
        needed = self.held + OTHER_REGISTERS + 5 * (self.tile.vector - 1)
        needed += 16 if self.problem.wide_offsets else 0
        # Its pairs are two registers, also when stored. NOTE: without both rules sm_80 spills.
        needed += 8 if self.problem.dtype == "float32" else 0
        if self.problem.direction == "weight_gradient" and self.tap_sets > 1:
            return 1 if needed <= 168 else 0
        for blocks, registers in ((4, 64), (3, 80), (2, 128), (1, 168)):
            if needed <= registers:
                return blocks
        return 0

    @property
    def shared_bytes(self) -> int:
        """Bytes of weights or sums."""
        taps = self.problem.taps
        if self.problem.direction == "weight_gradient":
            taps = self.tap_rows * self.problem.width.kernel
        if self.problem.direction == "input_gradient":
            taps *= self.multiple
        return 4 * taps * self.block_channels + 16

    @property
    def units(self) -> int:
        """Blocks with the same positions."""
        sets = self.tap_sets if self.problem.direction == "weight_gradient" else 1
        return self.chunks * sets

    def shares(self, target: Target) -> int:
        """Blocks among which positions are divided.

        A few for each that an SM holds, so that they end together. Each has some steps, for the
        weights that it loads or the sums that it adds.
        """
        wanted = -(-4 * self.blocks * target.multiprocessors // self.units)
        return max(1, min(wanted, -(-self.positions // (2 * self.threads_p))))


layout = functools.lru_cache(maxsize=family.TILES_REMEMBERED)(Layout)
