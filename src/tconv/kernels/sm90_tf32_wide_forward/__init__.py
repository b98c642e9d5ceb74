"""`sm90_tf32_wide_forward`: the output of layers with many output channels and phases on Hopper.

float32 tensors with TF32 products on the tensor cores. `sm90_tf32_wide_pack` lays out the weights
first. See `sm90_tf32_wide_forward.cu`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.launch import Address, Argument, Launch, output_rows, strides
from tconv.kernels.source import KernelSource
from tconv.problem import Direction, Problem

STEM = "sm90_tf32_wide_forward"
PACK_STEM = "sm90_tf32_wide_pack"
DIRECTION: Direction = "forward"

WARPGROUP = 128
PACK_THREADS = 256
CONSUMERS = 2
WGMMA_ROWS = 64
UNIT = 8
"""Columns of a unit in each part."""

CHANNELS = 32
"""Input channels of a stage."""

LINE_BYTES = CHANNELS * 4
MOST_STRIDE = 16
MOST_STRIDE_Y = 32
"""A bit of a word for each phase says whether its outputs exist."""

MOST_LANE_COPIES = 24
"""Of a channel: their offsets are held in registers."""

LAUNCHED_REGISTERS = 168
"""Of each of three warpgroups; they then share them out anew."""

MOST_PIXEL_STAGES = 6
MOST_WEIGHT_STAGES = 8

SHARED_BESIDE_L1 = 195 << 10
"""Bytes of shared memory beside which an SM has 60 KiB of L1, through which outputs leave, and not
28: unet_shallow with three stages of each 0.124 ms so, 0.127 with more."""

AIMED_PIXEL_STAGES = (4, 3)
AIMED_WEIGHT_STAGES = (3, 4)
"""Within that, the first that fit: of weights as many as a chunk has slots, or the nearest. More
take longer: unet_shallow, with one slot, 0.119 ms with (4, 3), 0.123 with (3, 3), 0.125 with
(3, 4), 0.127 with (3, 5). random39, with four, 0.015 with (4, 4), 0.017 with (4, 3) or the most
that fit.
"""

PACK_WEIGHTS = 320
"""Weights of one input channel that the packing takes at a time, if a channel's taps are fewer."""

LEAST_PACK_ITEMS = 64
"""Pieces that the packing is divided into, if there are as many units of columns: sam_up1 takes
0.0260 ms with 64 and 0.0284 with 8.
"""


@dataclass(frozen=True)
class Tile:
    """What one block computes at a time.

    Attributes:
        pixel_tiles: times 64 pixels of each of the two consumers.
        columns: at most so many (phase in y, output channel, phase in x).
        apart: for a stride of 2 in x, the two phases are parts of their own, each with its own
            slots; otherwise they are neighbouring columns and share their slots.
        rows: of pixels of one image; 0 for neighbours in the line of all positions.
    """

    pixel_tiles: int
    columns: int
    apart: bool = False
    rows: int = 0

    @property
    def pixels(self) -> int:
        """Of a block."""
        return CONSUMERS * WGMMA_ROWS * self.pixel_tiles

    def __str__(self) -> str:
        """Pixels (rows and columns, where they are of one image) x columns, and how."""
        pixels = f"{self.rows}x{self.pixels // self.rows}" if self.rows else f"{self.pixels}"
        return f"{pixels}x{self.columns}" + ("/apart" if self.apart else "")


TILES = (
    *(Tile(1, columns) for columns in (256, 224, 192, 160, 128)),
    *(Tile(1, columns, apart=True) for columns in (256, 128)),
    # Twice the pixels for each weight, where few columns are computed anyway.
    Tile(2, 128),
    Tile(2, 64),
    # For wide images: in the line, a slot that reaches rows back brings those rows whole.
    Tile(1, 256, rows=2),
    Tile(2, 128, rows=4),
)

Slot = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """A tile laid over a problem.

    Attributes:
        masks: the sets of parts, as bits, that share slots.
        classes: the distinct slots, (shift in y, shift in x), of column tiles, for each mask.
        column_class: the class of each column tile.
    """

    problem: Problem
    tile: Tile
    masks: tuple[int, ...]
    classes: tuple[tuple[tuple[Slot, ...], ...], ...]
    column_class: tuple[int, ...]

    @property
    def low_phases(self) -> int:
        """Phases in x that are neighbouring columns."""
        return _low_phases(self.problem, self.tile)

    @property
    def parts(self) -> int:
        """Groups of phases in x, each with columns of its own."""
        return self.problem.width.stride // self.low_phases

    @property
    def part_columns(self) -> int:
        """Columns of a part, the wgmma's N."""
        return _part_columns(self.problem, self.tile)

    @property
    def chunks(self) -> int:
        """Stages of pixels of a tile."""
        return -(-self.problem.in_channels_per_group // CHANNELS)

    @property
    def slots(self) -> int:
        """Stages of weights of a chunk, at most."""
        return max(sum(len(mask) for mask in class_) for class_ in self.classes)

    @functools.cached_property
    def most_slot(self) -> Slot:
        """The largest shift along each axis."""
        slots = [slot for class_ in self.classes for mask in class_ for slot in mask]
        return max((y for y, _ in slots), default=0), max((x for _, x in slots), default=0)

    @property
    def pitch(self) -> int:
        """Positions from one row to the next, in the line of all positions."""
        return hopper.pitch(self.problem.width, self.most_slot[1])

    @property
    def image_positions(self) -> int:
        """Positions from one image to the next, in the line of all positions."""
        return self.pitch * hopper.pitch(self.problem.height, self.most_slot[0])

    @property
    def tile_columns(self) -> int:
        """Pixels of a row of the tile; in the line, all."""
        return self.tile.pixels // self.tile.rows if self.tile.rows else self.tile.pixels

    @property
    def copied(self) -> int:
        """Neighbouring positions that a lane copies at a time."""
        on_vectors = self.problem.x_aligned and self.problem.width.size % 4 == 0
        return 4 if on_vectors and (self.tile.rows or self.pitch % 4 == 0) else 1

    @property
    def skew(self) -> int:
        """Positions ahead of the first that is used, so that copies start on their size."""
        return (self.problem.width.q_range.start - self.most_slot[1]) % self.copied

    @property
    def patch_columns(self) -> int:
        """Positions of a row of a stage, where the tile has rows."""
        columns = self.tile_columns + self.most_slot[1] + self.skew
        return -(-columns // self.copied) * self.copied

    @property
    def patch_positions(self) -> int:
        """Positions of a stage: the tile's, and those that its slots reach back to."""
        y, x = self.most_slot
        if self.tile.rows:
            return (self.tile.rows + y) * self.patch_columns
        # Coarse, so that widths close to each other share a kernel.
        return -(-(self.tile.pixels + y * self.pitch + x + self.skew) // 32) * 32

    @property
    def lane_copies(self) -> int:
        """Copies of a lane for one channel of a stage."""
        return -(-self.patch_positions // (32 * self.copied))

    @property
    def pixel_bytes(self) -> int:
        """Of a stage."""
        return CHANNELS * ((self.patch_positions + 23) // 32 * 32 + 8) * 4

    @property
    def weight_bytes(self) -> int:
        """Of a stage: a slot."""
        return self.parts * self.part_columns * LINE_BYTES

    @functools.cached_property
    def stages(self) -> tuple[int, int]:
        """Stages of pixels and of weights; (0, 0) where they do not fit."""
        least, most = AIMED_WEIGHT_STAGES
        weights = max(least, min(self.slots, most))
        for pixels in AIMED_PIXEL_STAGES:
            if pixels * self.pixel_bytes + weights * self.weight_bytes <= SHARED_BESIDE_L1 - 2048:
                return pixels, weights
        free = Target.named("sm_90a").shared_per_block - 2048
        for weights in (4, 3, 2):
            pixels = (free - weights * self.weight_bytes) // self.pixel_bytes
            if pixels >= 2:
                # More than three stages of pixels only beside six of weights.
                pixels = min(pixels, 3)
                weights = min(6, (free - pixels * self.pixel_bytes) // self.weight_bytes)
                pixels = min(
                    MOST_PIXEL_STAGES, (free - weights * self.weight_bytes) // self.pixel_bytes
                )
                return pixels, min(
                    MOST_WEIGHT_STAGES, (free - pixels * self.pixel_bytes) // self.weight_bytes
                )
        return 0, 0

    @property
    def lead(self) -> int:
        """Slots by which the first consumer is ahead of the second.

        None where a chunk has one slot: unet_shallow takes 1% less so, sam_up1 2%, and random39,
        which has four, 11% more.
        """
        # A chunk has at least a slot, or counts as one.
        return 0 if self.slots == 1 else min(self.stages) - 1

    def registers(self, index: str) -> tuple[int, int]:
        """Of a producer and of a consumer: the first hold an offset for each position."""
        offsets = self.lane_copies * (1 if index == "int" else 2)
        producer = next(count for count in (72, 88, 104) if count >= min(104, 67 + 2 * offsets))
        return producer, (LAUNCHED_REGISTERS * 3 - producer) // 2

    @property
    def block_begin(self) -> tuple[int, ...]:
        """The first block of weights of each column tile among those of a group, for one chunk."""
        begins = [0]
        for class_ in self.column_class:
            begins.append(begins[-1] + self.class_blocks[class_])
        return tuple(begins)

    @functools.cached_property
    def class_blocks(self) -> tuple[int, ...]:
        """Blocks of weights, one for a slot and part, of each class."""
        return tuple(
            sum(
                len(slots) * mask.bit_count()
                for mask, slots in zip(self.masks, class_, strict=True)
            )
            for class_ in self.classes
        )

    @property
    def pixel_tile_counts(self) -> tuple[int, int, int]:
        """Tiles of pixels: of an image along x and y, and of all; in the line, (1, 1, all)."""
        y, x = self.problem.height.q_range, self.problem.width.q_range
        if self.tile.rows:
            tiles_x, tiles_y = -(-len(x) // self.tile_columns), -(-len(y) // self.tile.rows)
            return tiles_x, tiles_y, tiles_x * tiles_y * self.problem.batch
        # Behind the last image's last output there is nothing to compute.
        unused = self.image_positions - (len(y) - 1) * self.pitch - len(x)
        positions = self.problem.batch * self.image_positions - unused
        return 1, 1, -(-positions // self.tile.pixels)

    @property
    def tiles(self) -> int:
        """Tiles of the launch."""
        return self.pixel_tile_counts[2] * self.problem.groups * len(self.column_class)

    @property
    def weight_elements(self) -> int:
        """Packed weights."""
        blocks = self.problem.groups * self.block_begin[-1] * self.chunks
        return blocks * self.part_columns * CHANNELS

    @property
    def pack_channels(self) -> int:
        """Output channels that the packing takes at a time."""
        unit = UNIT // self.low_phases
        channels = max(1, min(PACK_WEIGHTS // self.problem.taps, 64))
        while channels > unit and self._pack_items(channels) < LEAST_PACK_ITEMS:
            channels //= 2
        return channels - channels % min(channels, unit)

    @property
    def pack_items(self) -> int:
        """Pieces that the packing's blocks take."""
        return self._pack_items(self.pack_channels)

    def _pack_items(self, channels: int) -> int:
        parts = -(-self.problem.out_channels_per_group // channels)
        return self.problem.groups * self.chunks * parts

    @property
    def pack_bytes(self) -> int:
        """Shared memory of the packing."""
        return CHANNELS * (self.pack_channels * self.problem.taps | 1) * 4


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    y, x = problem.height, problem.width
    low = _low_phases(problem, tile)
    in_y = [{tap.shift for tap in phase.taps} for phase in y.phases]
    in_x = [{tap.shift for tap in phase.taps} for phase in x.phases]
    in_part = [set().union(*in_x[first : first + low]) for first in range(0, x.stride, low)]
    # Which parts have a tap at each shift in x.
    part_mask = {
        shift: sum(1 << part for part, shifts in enumerate(in_part) if shift in shifts)
        for shift in set().union(*in_part)
    }
    masks = tuple(sorted(set(part_mask.values()))) or (1,)
    phase_units = -(-problem.out_channels_per_group // (UNIT // low))
    part_units = _part_columns(problem, tile) // UNIT
    units = y.stride * phase_units
    classes: dict[tuple[tuple[Slot, ...], ...], int] = {}
    column_class = []
    for first in range(0, units, part_units):
        last = min(first + part_units, units)
        phases = {unit // phase_units for unit in range(first, last)}
        slots_y = set().union(*(in_y[phase] for phase in phases))
        slots = tuple(
            tuple(
                (slot_y, slot_x)
                for slot_y in sorted(slots_y)
                for slot_x in sorted(part_mask)
                if part_mask[slot_x] == mask
            )
            for mask in masks
        )
        column_class.append(classes.setdefault(slots, len(classes)))
    return Layout(problem, tile, masks, tuple(classes), tuple(column_class))


def _low_phases(problem: Problem, tile: Tile) -> int:
    return 2 if problem.width.stride % 2 == 0 and not tile.apart else 1


def _part_columns(problem: Problem, tile: Tile) -> int:
    return tile.columns // (problem.width.stride // _low_phases(problem, tile)) // UNIT * UNIT


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    refusal = hopper.tf32_why_not(problem, target)
    if refusal is not None:
        return refusal
    if problem.width.stride > MOST_STRIDE:
        return f"a thread writes {MOST_STRIDE} phases in x, the stride is {problem.width.stride}"
    if problem.height.stride > MOST_STRIDE_Y:
        return f"tells {MOST_STRIDE_Y} phases in y apart, the stride is {problem.height.stride}"
    return family.phases_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    x = problem.width
    if tile.apart and x.stride != 2:
        return f"takes two phases in x apart, the stride is {x.stride}"
    if tile.apart and len({tuple(t.shift for t in p.taps) for p in x.phases}) == 1:
        return "all phases in x have the same slots: nothing is gained by taking them apart"
    if _part_columns(problem, tile) == 0:
        return f"{tile.columns} columns are too few for {x.stride} phases in x"
    laid = layout(problem, tile)
    if laid.pack_bytes > target.shared_per_block:
        return f"the packing has no room for {problem.taps} taps"
    if laid.lane_copies > MOST_LANE_COPIES:
        return (
            f"a lane makes {MOST_LANE_COPIES} copies of a channel, "
            f"{laid.patch_positions} positions need {laid.lane_copies}"
        )
    if laid.stages == (0, 0):
        return f"two stages of {laid.pixel_bytes} bytes do not fit {target.arch} beside the weights"
    if laid.tiles > family.MAX_GRID or problem.batch * laid.image_positions >= 2**31 - 2**12:
        return f"{problem.batch * laid.image_positions} positions are over 32 bits"
    return None


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel.

    Cycles of an SM at 1.7 GHz, fitted by least squares of the logarithm to 290 rows of the sweeps
    of 29 layers and 60 random ones, benchmarks/fit_costs.py: off by 20% in the root mean square.
    """
    laid = layout(problem, tile)
    tiles = len(laid.column_class)
    # Of a tile: blocks of weights, slots, and products of both consumers.
    blocks = laid.chunks * laid.block_begin[-1] / tiles
    slots = laid.chunks / tiles
    slots *= sum(len(slots) for class_ in laid.column_class for slots in laid.classes[class_])
    products = 8 * blocks * tile.pixel_tiles
    multiplied = products * (16.7 + 0.24 * laid.part_columns)
    # A slot takes its time whatever its columns: operands are loaded and rounded for each pixel.
    loaded = slots * (93 + 422 * tile.pixel_tiles)
    produced = 206 * laid.chunks * laid.lane_copies
    brought = (blocks * laid.part_columns * LINE_BYTES + laid.chunks * laid.pixel_bytes) / 264
    # Writes of a consumer's four warps, for both halves of a product's rows.
    vectors = problem.width.stride // _vector(problem) * (2 // laid.low_phases)
    written = 14.4 * 16 * tile.pixel_tiles * laid.part_columns / UNIT * vectors
    of_tile = max(multiplied, loaded, produced) + brought + written + 1770
    waves = -(-laid.tiles // target.multiprocessors)
    busy, moved = waves * of_tile / 1.7e9, problem.bytes / 6.2e12
    packing = 8.4e-6 + 3.45 * 8 * laid.weight_elements / 4e12
    # Phases that are several parts of few columns took 8% more; many tiles of few stages less: what
    # one takes beside its products overlaps with another's.
    dearer = 1 if laid.parts == 1 or tile.apart else 1.08
    if laid.chunks <= 4 and waves >= 4 and _vector(problem) > 1:
        dearer *= 0.86
    if laid.slots == 1:
        dearer *= 0.87  # by hand, since weights are packed in more pieces and consumers in step
    if len(laid.column_class) > 1:
        dearer *= 1.03  # pixels are read again for other columns: 128 to 64 channels, in_step.log
    device = dearer * (max(busy, moved) + 0.4 * min(busy, moved) + packing)
    return family.with_host(device)


def source(problem: Problem, tile: Tile) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    laid = layout(problem, tile)
    index = _index(problem, laid)
    pixel_stages, weight_stages = laid.stages
    shared = pixel_stages * (laid.pixel_bytes + 16) + weight_stages * (laid.weight_bytes + 16)
    slots = sum(len(slots) for class_ in laid.classes for slots in class_)
    shared = -(-(shared + 4 * slots + 128) // 1024) * 1024
    constants = (
        *_layer_constants(problem, laid, index),
        ("shared_bytes", shared),
        ("pixel_tiles", tile.pixel_tiles),
        ("flat", tile.rows == 0),
        ("tile_rows", tile.rows),
        ("tile_columns", laid.tile_columns),
        ("patch_columns", laid.patch_columns),
        ("patch_positions", laid.patch_positions),
        ("copied", laid.copied),
        ("skew", laid.skew),
        ("pixel_stages", pixel_stages),
        ("weight_stages", weight_stages),
        ("lead", laid.lead),
        ("producer_registers", laid.registers(index)[0]),
        ("consumer_registers", laid.registers(index)[1]),
        ("vector", _vector(problem)),
        ("most_slot_y", laid.most_slot[0]),
        ("most_slot_x", laid.most_slot[1]),
        ("padding_y", problem.height.padding),
        ("padding_x", problem.width.padding),
        *hopper.tap_constants(problem),
        ("first_q_y", problem.height.q_range.start),
        ("first_q_x", problem.width.q_range.start),
        ("bias", problem.bias),
    )
    return KernelSource(
        stem=STEM,
        constants=constants,
        arguments=(
            ("source", "const void*"),
            ("weight", "const void*"),
            ("packed", "const void*"),
            ("bias", "const void*"),
            ("destination", "void*"),
            ("tiles", "int"),
            ("tiles_x", "int"),
            ("tiles_y", "int"),
            ("batch", "int"),
            ("pitch", "int"),
            ("image_positions", "int"),
            ("source_height", "int"),
            ("source_width", "int"),
            ("destination_height", "int"),
            ("destination_width", "int"),
            *family.stride_fields("source", "n c h w", index),
            *family.stride_fields("weight", "in out h w", index),
            *family.stride_fields("destination", "n c h", index),
        ),
        shared_bytes=shared,
        threads=WARPGROUP * (1 + CONSUMERS),
    )


def _vector(problem: Problem) -> int:
    """Outputs of one pixel that a thread can write at a time, on a multiple of their size."""
    x = problem.width
    for width in (4, 2):
        if x.stride % width == x.padding % width == x.output_size % width == 0:
            return width
    return 1


def _index(problem: Problem, laid: Layout) -> str:
    return family.index_type(problem, laid.weight_elements)


def _layer_constants(problem: Problem, laid: Layout, index: str) -> tuple[tuple, ...]:
    """What the kernel and its packing share."""
    begins = [0]
    for class_ in laid.classes:
        for mask in class_:
            begins.append(begins[-1] + len(mask))
    # An array has at least one element, even where no phase has a slot.
    slots = [slot for class_ in laid.classes for mask in class_ for slot in mask] or [(0, 0)]
    return (
        ("Index", index),
        ("groups", problem.groups),
        ("in_channels", problem.in_channels_per_group),
        ("out_channels", problem.out_channels_per_group),
        ("stride_y", problem.height.stride),
        ("stride_x", problem.width.stride),
        ("low_phases", laid.low_phases),
        ("part_columns", laid.part_columns),
        ("masks", len(laid.masks)),
        ("part_masks", laid.masks),
        ("column_class", laid.column_class),
        ("block_begin", laid.block_begin),
        ("group_blocks", laid.block_begin[-1]),
        ("slot_begin", tuple(begins)),
        ("slot_y", tuple(y for y, _ in slots)),
        ("slot_x", tuple(x for _, x in slots)),
    )


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The launch that lays the weights out, and the kernel: a block for each SM walks the tiles."""
    laid = layout(problem, tile)
    index = _index(problem, laid)
    packing = KernelSource(
        stem=PACK_STEM,
        constants=(
            *_layer_constants(problem, laid, index),
            ("shared_bytes", laid.pack_bytes),
            ("item_channels", laid.pack_channels),
            ("class_blocks", laid.class_blocks),
            *hopper.tap_constants(problem),
        ),
        arguments=(
            ("weight", "const void*"),
            ("packed", "void*"),
            *family.stride_fields("weight", "in out h w", index),
        ),
        shared_bytes=laid.pack_bytes,
        threads=PACK_THREADS,
    )
    places: dict[str, Argument] = {
        "weight": Address("w"),
        "packed": Address("packed"),
        **strides("weight", "in out h w", "w"),
    }
    tiles_x, tiles_y, _ = laid.pixel_tile_counts
    arguments: dict[str, Argument] = {
        **places,
        "source": Address("x"),
        "tiles": laid.tiles,
        "tiles_x": tiles_x,
        "tiles_y": tiles_y,
        "batch": problem.batch,
        "pitch": laid.pitch,
        "image_positions": laid.image_positions,
        "source_height": problem.height.size,
        "source_width": problem.width.size,
        **strides("source", "n c h w", "x"),
        **output_rows(problem),
    }
    return (
        Launch(
            "packing",
            packing,
            min(laid.pack_items, family.MAX_GRID),
            places,
            "lays the weights out",
            packed=laid.weight_elements,
        ),
        Launch(
            "kernel",
            source(problem, tile),
            min(target.multiprocessors, laid.tiles),
            arguments,
        ),
    )
