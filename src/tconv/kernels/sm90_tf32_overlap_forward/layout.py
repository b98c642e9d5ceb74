"""The geometry of a tile of `sm90_tf32_overlap_forward` over a problem."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import family, hopper, image_tiles
from tconv.kernels.sm90_tf32_overlap_forward.tiles import Tile
from tconv.problem import Problem

WARP_PIXELS = 16

WARPS = 4
"""Warps of a warpgroup."""

UNIT_LANES = 4
"""Lanes that share a pixel, each with its own units."""

PRODUCT_DEPTH = 8
LINE_CHANNELS = 32
LINE_BYTES = 4 * LINE_CHANNELS
MOST_COLUMNS = 256

MOST_STRIDE = 16
"""Limit of the stride: a word has a bit for each output of two pixels, set if it exists."""

MOST_STAGES = 8

MOST_SLOTS_OF_TWO = 4
"""With more, the model has too little: 0.0333 ms for sam_up2, 16 slots, which took 0.0351."""

MOST_AHEAD_BYTES = 112 << 10
"""Most bytes that an SM's warpgroups prefetch beyond two stages each.

More takes longer: fsrcnn_x3 took 0.087 to 0.090 ms with 142 KiB, 0.084 to 0.086 ms with 95 KiB.
"""

MOST_CHUNKS = 8

LEAST_SHARE_ABREAST = 4
"""With at least so many rows each, neighbouring warpgroups may take adjacent strips."""

RESERVED_BYTES = 1024
"""Bytes of shared memory that stay free. A block's shared memory is a multiple of this."""

OTHER_REGISTERS = 44
"""Registers of a thread besides those that `Layout.held` counts."""

SCALAR_REGISTERS = 20
"""Registers of a thread for copies of single elements."""

WIDE_REGISTERS = 16
"""Registers of a thread for 64-bit offsets."""


def round_up(value: int, multiple: int) -> int:
    """The value, rounded up to a multiple."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """A tile laid over a problem."""

    problem: Problem
    tile: Tile

    @property
    def chunks(self) -> int:
        """Stages in which an input row is loaded."""
        return -(-self.problem.in_channels_per_group // self.tile.channels)

    @property
    def depth(self) -> int:
        """Input channels of a stage."""
        return round_up(-(-self.problem.in_channels_per_group // self.chunks), PRODUCT_DEPTH)

    @functools.cached_property
    def lead(self) -> int:
        """Outputs of a pixel that precede those that its first tap reaches."""
        x = self.problem.width

        def badness(lead: int) -> tuple[int, int, int]:
            return reach_of(self.problem, lead), -vector_of(self.problem, lead), lead

        return min(range(x.stride), key=badness)

    @property
    def offset_x(self) -> int:
        """Pixel c has the outputs from c * stride - offset_x on."""
        return self.problem.width.padding + self.lead

    @property
    def reach(self) -> int:
        """Earlier pairs of pixels that a pair's outputs read. A warp begins with so many pairs."""
        return reach_of(self.problem, self.lead)

    @property
    def store_vector(self) -> int:
        """Outputs of one store."""
        return vector_of(self.problem, self.lead)

    @property
    def source_vectors(self) -> bool:
        """Whether the input is copied by 16 bytes."""
        return image_tiles.source_vectors(self.problem)

    @property
    def strip(self) -> int:
        """Pixels of a strip whose outputs are written."""
        return WARPS * (WARP_PIXELS - 2 * self.reach)

    @property
    def first_used(self) -> int:
        """The first pixel that has an output, rounded down to an even number."""
        return self.offset_x // self.problem.width.stride // 2 * 2

    @property
    def used(self) -> int:
        """Pixels from `first_used` on that have outputs."""
        return self._used(self.problem)

    def _used(self, problem: Problem) -> int:
        x = problem.width
        return (x.output_size - 1 + self.offset_x) // x.stride + 1 - self.first_used

    @property
    def strips(self) -> int:
        """Strips of an image."""
        return -(-self.used // self.strip)

    @property
    def first_pixel(self) -> int:
        """The first pixel that is multiplied."""
        return self.first_used - 2 * self.reach

    @property
    def skew(self) -> int:
        """Pixels that are copied before `first_pixel`."""
        return self.first_pixel % 8 if self.source_vectors else 0

    @property
    def columns(self) -> int:
        """Pixels of a row that are copied: those that a strip's outputs need."""
        return self._columns(self.problem.pattern)

    @property
    def needed_columns(self) -> int:
        """The same for this problem's image, whose kernel may be for another's."""
        return self._columns(self.problem)

    def _columns(self, problem: Problem) -> int:
        needed = min(self.strip, self._used(problem))
        return round_up(self.skew + 2 * self.reach + needed, 4 if self.source_vectors else 2)

    @property
    def pitch(self) -> int:
        """Floats of a channel of a stage: 8 more than a multiple of 16."""
        return self.columns + (24 - self.columns % 16) % 16

    @property
    def rows(self) -> int:
        """Rows of pixels of an image, of `stride` outputs each, with input rows above the first."""
        return self.problem.height.q_range.stop - self.first_row

    @property
    def first_row(self) -> int:
        """The first row of pixels that an input row reaches, whether or not it has outputs.

        Every share then takes the same number of steps. A share that begins with an image would
        otherwise have no rows above it.
        """
        return max(0, self.problem.height.q_range.start - (self.window - 1))

    @property
    def lines(self) -> int:
        """Rows of all strips of a group."""
        return self.problem.batch * self.strips * self.rows

    @property
    def window(self) -> int:
        """Output rows of a phase that an input row reaches."""
        return max(len(phase.taps) for phase in self.problem.height.phases)

    @property
    def units(self) -> int:
        """Pairs of a phase in y and an output channel."""
        return self.problem.height.stride * self.problem.out_channels_per_group

    @property
    def slots(self) -> int:
        """Slots of a thread, one for each of its units."""
        return -(-self.units // UNIT_LANES)

    @functools.cached_property
    def slot_begin(self) -> tuple[int, ...]:
        """A thread's first column of each slot, then the end of the last.

        A slot has as many columns as its first unit has taps.
        """
        begins = [0]
        for slot in range(self.slots):
            phase = UNIT_LANES * slot // self.problem.out_channels_per_group
            taps = len(self.problem.height.phases[phase].taps) * self.problem.width.kernel
            begins.append(begins[-1] + taps)
        return tuple(begins)

    @property
    def product_columns(self) -> int:
        """Columns of the product, rounded up to whole slots of units."""
        return 8 * (-(-self.slot_begin[-1] // 2))

    @property
    def weight_bytes(self) -> int:
        """Bytes of shared memory of the weights."""
        channels = round_up(self.problem.in_channels_per_group, PRODUCT_DEPTH)
        return -(-channels // LINE_CHANNELS) * self.product_columns * LINE_BYTES

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory of a stage."""
        return 4 * self.depth * self.pitch

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of an input channel's weights: where each is read and stored."""
        return 12 * self.problem.out_channels_per_group * self.problem.taps

    def stages(self, target: Target) -> int:
        """Stages of a warpgroup that shared memory holds."""
        free = target.shared_per_block - RESERVED_BYTES - self.weight_bytes - self.table_bytes
        of_block = self.tile.warpgroups * self.stage_bytes
        wanted = max(3, 1 + MOST_AHEAD_BYTES // of_block)
        return min(MOST_STAGES, wanted, free // of_block)

    @property
    def sums(self) -> int:
        """Accumulators of a thread that later input rows add to."""
        x = self.problem.width
        of_row = 0
        for phase in range(x.stride):
            slots = [
                t // x.stride
                for t in range(self.lead, self.lead + x.kernel)
                if t % x.stride == phase
            ]
            of_row += len({pixel + slot for pixel in (0, 1) for slot in slots})
        return self.slots * (self.window - 1) * of_row

    @property
    def held(self) -> int:
        """Registers of a thread for products, sums, pixels, biases and places of outputs."""
        slots = self.slots * (4 if self.problem.wide_offsets else 3)
        return self.product_columns // 2 + self.sums + self.depth // 2 + slots

    @property
    def spare_registers(self) -> int:
        """Registers of a thread available for what `held` counts."""
        other = OTHER_REGISTERS + (0 if self.source_vectors else SCALAR_REGISTERS)
        return self.tile.registers - other - (WIDE_REGISTERS if self.problem.wide_offsets else 0)

    def warpgroups(self, target: Target) -> int:
        """Warpgroups of a group that the device holds."""
        return max(1, target.multiprocessors // self.problem.groups) * self.tile.warpgroups

    def abreast(self, target: Target) -> int:
        """Strips that neighbouring warpgroups process side by side: all, or one.

        Side by side, they read adjacent pieces of the same rows at the same time.
        """
        return share_out(self.lines, self.strips, self.warpgroups(target))[0]

    def share(self, target: Target) -> int:
        """Rows of pixels of a warpgroup."""
        return share_out(self.lines, self.strips, self.warpgroups(target))[1]

    def blocks(self, target: Target) -> int:
        """Blocks of a group."""
        most = max(1, target.multiprocessors // self.problem.groups)
        abreast = self.abreast(target)
        shares = abreast * -(-(self.lines // abreast) // self.share(target))
        if self.step(target) == 1:
            shares = -(-shares // self.tile.warpgroups)
        return min(shares, most)

    def step(self, target: Target) -> int:
        """Distance, in shares, between the shares of a block's warpgroups.

        Few shares are thus spread over all blocks.
        """
        full = self.share(target) >= LEAST_SHARE_ABREAST
        return 1 if full else max(1, target.multiprocessors // self.problem.groups)


def share_out(lines: int, strips: int, slots: int) -> tuple[int, int]:
    """Strips processed side by side, and the rows of each of `slots` warpgroups.

    All strips are side by side, unless rows are few or that costs a twentieth more rows.
    """
    share = -(-lines // slots)
    if share >= LEAST_SHARE_ABREAST and slots >= strips:
        of_strip = -(-(lines // strips) // (slots // strips))
        if 20 * of_strip <= 21 * share:
            return strips, of_strip
    return 1, share


def reach_of(problem: Problem, lead: int) -> int:
    """`Layout.reach` for a lead."""
    return ((problem.width.kernel - 1 + lead) // problem.width.stride + 1) // 2


def vector_of(problem: Problem, lead: int) -> int:
    """`Layout.store_vector` for a lead."""
    x = problem.width
    outputs = problem.pattern.width.output_size
    for width in (4, 2):
        if 2 * x.stride % width == (x.padding + lead) % width == outputs % width == 0:
            return width
    return 1


layout = functools.lru_cache(maxsize=family.TILES_REMEMBERED)(Layout)


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    refusal = hopper.tf32_why_not(problem, target)
    if refusal is not None:
        return refusal
    for name, axis in (("y", problem.height), ("x", problem.width)):
        if axis.dilation > 1:
            return f"takes neighbouring taps, the dilation in {name} is {axis.dilation}"
    if problem.width.stride > MOST_STRIDE:
        stride = problem.width.stride
        return f"holds {MOST_STRIDE} outputs of a pixel along x, the stride is {stride}"
    return family.phases_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    laid = layout(problem, tile)
    if tile.warpgroups < 3 and laid.slots > MOST_SLOTS_OF_TWO:
        return f"two warpgroups write {MOST_SLOTS_OF_TWO} units of a thread, there are {laid.slots}"
    if laid.product_columns > MOST_COLUMNS:
        return (
            f"the taps are {laid.product_columns} columns of the product, the limit is "
            f"{MOST_COLUMNS}"
        )
    if 2 * laid.reach > WARP_PIXELS // 2:
        return f"{2 * laid.reach} of a warp's {WARP_PIXELS} pixels would have no outputs"
    if laid.held > laid.spare_registers:
        return (
            f"a thread would hold {laid.held} products, sums and pixels in registers, "
            f"{laid.spare_registers} are for them"
        )
    if laid.chunks > MOST_CHUNKS:
        return f"an input row is {laid.chunks} stages, the limit is {MOST_CHUNKS}"
    if laid.needed_columns > laid.columns:
        return f"stages have {laid.columns} columns of a row, the image needs {laid.needed_columns}"
    if laid.stages(target) < 2:
        return (
            f"two stages of {laid.stage_bytes} bytes for each warpgroup do not fit {target.arch} "
            f"beside {laid.weight_bytes} bytes of weights"
        )
    if (blocks := problem.groups * laid.blocks(target)) > (outputs := math.prod(problem.y_shape)):
        return f"has {blocks} blocks for {outputs} outputs"
    return None
