"""The geometry of a tile of `sm90_tf32_flat_forward` over a problem."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.sm90_tf32_flat_forward.tiles import (
    CONSUMERS,
    GROUP_ROWS,
    REPAIR,
    REPAIR_APART,
    Tile,
)
from tconv.problem import Axis, Problem

PACK_THREADS = 256
WARPS = 4
WARP_ROWS = 16

LINE_WORDS = 32
"""Words (4 bytes) of a position's channels in a stage: 32 channels in TF32, 64 in float16."""

LINE_BYTES = LINE_WORDS * 4
WEIGHT_BYTES = GROUP_ROWS * LINE_BYTES
MOST_PIXEL_STAGES = 6
MOST_WEIGHT_STAGES = 8

ENOUGH_STAGES = (3, 4)
"""Most stages of pixels and of weights if consumers write outputs and rows have all phases in x.

More stages would fit, but take longer. random59 took 0.0486 ms with three and four, 0.0504 ms with
four and four, and 0.0543 ms with six and six.
"""

MOST_BOX = 256
PACK_POSITIONS = 128

PACK_WEIGHTS = 320
"""Weights of one input channel in a piece of the packing, if a channel has fewer taps.

In float16 a piece has twice the channels. It then has half as many weights of each, and half the
positions.
"""

LEAST_ITEMS = 528
"""Least number of pieces of the packing, if the rows of whole warps allow it.

That is four for each SM of an H100 or H200, so that more loads are under way.
"""

MANY_TAPS = 256
"""A piece of weights has one phase in y if a channel has at least so many taps."""

LEAST_WEIGHT_ITEMS = 128
"""Least number of pieces of weights, if there are as many channels.

A piece of many channels takes longer than all pixels.
"""

LEAST_BYTES_OF_GROUPS = 8 << 20
"""If the packed weights of all groups have at least so many bytes, a group's tiles are consecutive.

stylegan2_mod, with 19 MB, then takes 2 to 18% less time, depending on the tile. random13, with
5 MB, and three layers with less take as long, or up to 2% more (random42's 128x96: 7%).
"""

MOST_SLIGHT = 4
"""Most octets (8 channels of a pixel) of an image that may have a slight value.

Of images of 10^6 normal values, one in ten has one.
"""

FEW_OCTETS, OCTETS_OF_SLIGHT = 1024, 4096
"""Limits of octets with a slight value, by the number of octets.

Of normal values, one octet in 1.3 * 10^6 has one. A batch of up to FEW_OCTETS octets may have
none. An image may have one, and one more for each OCTETS_OF_SLIGHT octets, up to MOST_SLIGHT.
"""

MOST_OCTETS = 2_600_000
"""Most octets of an image that is multiplied in float16.

With so many, one image of normal values in twenty has more than MOST_SLIGHT octets with a slight
value, and is computed again. hd_k4s2, with 16.6 million, took three times as long for that.
"""

MOST_HALF_BLOCKS = 4096
"""Most blocks of a packing in float16. Each block of the kernel reads a word of each."""

STATUS_WORDS = 8
"""Size of `Status` (sm90_tf32_flat_forward/status.cuh), in words of 4 bytes."""

Slot = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """A tile laid over a problem.

    Attributes:
        classes: the distinct lists of slots, (shift in y, shift in x), of row groups.
        row_class: the class of each row group.
        of_layer: whether the kernel's constants are the same for all sizes of the layer.
        remembered: what all sizes of a kernel share (`family.of_kernel`, `family.once`).
    """

    problem: Problem
    tile: Tile
    classes: tuple[tuple[Slot, ...], ...]
    row_class: tuple[int, ...]
    of_layer: bool = False
    remembered: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @family.of_kernel
    def row_phases(self) -> int:
        """Phases in x that are adjacent in a warp's rows."""
        return 1 if self.tile.apart else self.problem.width.stride

    @family.of_kernel
    def warp_channels(self) -> int:
        """Output channels of a warp's 16 rows."""
        return WARP_ROWS // self.row_phases

    @family.of_kernel
    def word_channels(self) -> int:
        """Input channels in 4 bytes."""
        return 2 if self.tile.half else 1

    @family.of_kernel
    def chunks(self) -> int:
        """Pieces of the input channels."""
        return -(-self.problem.in_channels_per_group // (LINE_WORDS * self.word_channels))

    @family.of_kernel
    def most_slot(self) -> Slot:
        """The largest shift along each axis."""
        slots = [slot for row_class in self.classes for slot in row_class]
        return max((y for y, _ in slots), default=0), max((x for _, x in slots), default=0)

    @family.of_kernel
    def slots(self) -> int:
        """Slots of all classes, at least one."""
        return max(1, sum(map(len, self.classes)))

    @functools.cached_property
    def model(self) -> Layout:
        """The tile over the problem that the kernel's constants are for."""
        pattern = self.problem.pattern
        same = self.of_layer or pattern is self.problem
        return self if same else layout(pattern, self.tile)

    @functools.cached_property
    def pitch(self) -> int:
        """Positions from one row to the next."""
        x, columns = self.problem.width, self.tile.columns
        pitch = hopper.pitch(x, self.most_slot[1])
        # A paired tile has one more if that costs no row and gives vectors of four.
        odd = pitch % 2 == 1 and x.stride % 4 == 2 and x.output_size % 4 == 0
        spare = columns // pitch == columns // (pitch + 1)
        return pitch + 1 if self.tile.paired and odd and spare else pitch

    @functools.cached_property
    def image_positions(self) -> int:
        """Positions from one image to the next."""
        return self.pitch * hopper.pitch(self.problem.height, self.most_slot[0])

    @functools.cached_property
    def images(self) -> dict[str, int]:
        """Fields of `struct Arguments`: how images follow each other in the line."""
        pitch, image = hopper.division(self.pitch), hopper.division(self.image_positions)
        return {
            "pitch": self.pitch,
            "pitch_multiplier": pitch[0],
            "pitch_shift": pitch[1],
            "image_positions": self.image_positions,
            "image_multiplier": image[0],
            "image_shift": image[1],
        }

    @functools.cached_property
    def positions(self) -> int:
        """All positions."""
        return self.problem.batch * self.image_positions

    @family.of_kernel
    def slot_rows(self) -> tuple[int, ...]:
        """The distinct shifts in y."""
        return tuple(sorted({y for row_class in self.classes for y, _ in row_class}))

    @family.of_kernel
    def stage_rows(self) -> int:
        """Stages of pixels of a chunk, one for each of `slot_rows`; or one that serves all slots.

        The positions that all slots reach can be too many. With a dilation, most of them lie
        between the rows that are read.
        """
        if self.model is not self:
            return self.model.stage_rows
        if self.of_layer:  # rows of any length then fit
            return max(1, len(self.slot_rows))
        fits = self._fitting_stages(hopper.TARGET, self._boxes(self.most_slot[0])) != (0, 0)
        return 1 if fits else max(1, len(self.slot_rows))

    @family.of_kernel
    def tile_stages(self) -> int:
        """Stages of pixels of a tile."""
        return self.chunks * self.stage_rows

    @functools.cached_property
    def boxes(self) -> tuple[int, int]:
        """Tensor copies (TMA) that load a stage's pixels, and positions of each."""
        return self._boxes(self.most_slot[0] if self.stage_rows == 1 else 0)

    @functools.cached_property
    def patch_positions(self) -> int:
        """Positions of a stage."""
        return math.prod(self.boxes)

    def _boxes(self, rows: int) -> tuple[int, int]:
        """`boxes` for the tile's positions and those so many rows before them."""
        positions = self.tile.columns + rows * self.pitch + self.most_slot[1]
        count = -(-positions // MOST_BOX)
        return count, -(-positions // (16 * count)) * 16  # whole swizzle patterns

    @property
    def rows(self) -> int:
        """Whole rows of positions of a paired tile."""
        return self.tile.columns // self.pitch

    @functools.cached_property
    def step(self) -> int:
        """Positions from one tile to the next."""
        return self.rows * self.pitch if self.tile.paired else self.tile.columns

    @family.of_kernel
    def vector(self) -> int:
        """Outputs that a lane writes at a time.

        The alignment of the outputs and of the rows in shared memory decides.
        """
        return 1 if self.of_layer else self.model.most_vector

    @property
    def most_vector(self) -> int:
        """`vector`, if the kernel is for this problem."""
        x = self.problem.width
        if self.tile.paired:
            return math.gcd(4, x.output_size, self.pitch * x.stride)
        if self.tile.apart or x.output_size % 4 or (x.q_range.start * x.stride - x.padding) % 4:
            return 1
        pairs = self.pitch % 2 == 0 and self.tile.columns % 16 == 0
        return 4 if x.stride % 4 == 0 or (x.stride == 2 and pairs) else 1

    @family.of_kernel
    def shift(self) -> int:
        """Elements by which a paired tile's rows are shifted in shared memory.

        Their first output that exists is then aligned.
        """
        x = self.problem.width
        return -(x.padding % x.stride) % self.vector if self.tile.paired else 0

    @family.of_kernel
    def output_bytes(self) -> int:
        """Bytes of shared memory of a tile's outputs and of their positions."""
        part = self.tile.columns if self.tile.storers else 32
        columns = part * self.problem.width.stride + self.shift
        pitch = columns + ((33 if self.tile.apart else 40) - columns % 32) % 32
        groups = 1 if self.tile.apart else CONSUMERS
        return groups * WARPS * self.warp_channels * pitch * 4 + 2 * self.tile.columns * 16

    def stages(self, target: Target) -> tuple[int, int]:
        """Stages of pixels, and of each consumer's weights; (0, 0) where they do not fit."""
        pixels, weights = self.fitting_stages(target)
        if self.tile.storers or self.tile.apart:
            return pixels, weights
        return min(pixels, ENOUGH_STAGES[0]), min(weights, ENOUGH_STAGES[1])

    def fitting_stages(self, target: Target) -> tuple[int, int]:
        """As many stages of pixels and of weights as shared memory holds."""
        return self._fitting_stages(target, self.boxes)

    def _fitting_stages(self, target: Target, boxes: tuple[int, int]) -> tuple[int, int]:
        """As many stages as shared memory holds, if a stage of pixels has these boxes.

        Weights first have four stages, or three beside the storers' outputs. Pixels come next,
        since they take longer to load. What is left goes to weights. A kernel that is made for
        another image makes do with two stages of weights, if no more fit.
        """
        weights, pixels = CONSUMERS * WEIGHT_BYTES, math.prod(boxes) * LINE_BYTES
        free = min(target.shared_per_block, self.shared_bytes) - self.fixed_bytes
        counts: tuple[int, ...] = (3, 2) if self.tile.storers else (4, 3)
        if self.model is not self or self.of_layer:
            counts = (*counts, 2)
        for weight_stages in counts:
            pixel_stages = min(MOST_PIXEL_STAGES, (free - weight_stages * weights) // pixels)
            if pixel_stages < 2:
                continue
            return pixel_stages, min(MOST_WEIGHT_STAGES, (free - pixel_stages * pixels) // weights)
        return 0, 0

    @family.of_kernel
    def fixed_bytes(self) -> int:
        """Shared memory of a block besides its stages: outputs, places, slots and barriers."""
        barriers = 2 * MOST_PIXEL_STAGES + 2 * CONSUMERS * MOST_WEIGHT_STAGES + 13
        return -(-(self.output_bytes + 4 * self.slots + 64 + 8 * barriers) // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: all, so that a kernel does not depend on the image."""
        return hopper.TARGET.shared_per_block // 1024 * 1024

    def rings(self, target: Target) -> dict[str, int]:
        """Fields of `struct Arguments`: the stages, and the lead of the first consumer."""
        pixels, weights = self.stages(target)
        return {
            "box_positions": self.boxes[1],
            "pixel_bytes": self.patch_positions * LINE_BYTES,
            "pixel_stages": pixels,
            "weight_stages": weights,
            "lead": self._lead(target, pixels),
        }

    def _lead(self, target: Target, pixel_stages: int) -> int:
        """Stages of pixels by which the first consumer is ahead of the second.

        The lead is 0 where both write their outputs together. It is also 0 where a block has one
        tile: the second consumer would have nothing to write beside the first's products, and
        would end later by as much.
        """
        together = self.tile.apart and not self.tile.storers
        if together or self.tiles <= target.multiprocessors:
            return 0
        return min(pixel_stages // 2, -(-self.tile_stages // 2))

    @family.of_kernel
    def row_sets(self) -> int:
        """Tiles on the same pixels."""
        return -(-len(self.row_class) // CONSUMERS)

    @family.of_kernel
    def groups_outermost(self) -> bool:
        """Whether a group's tiles are consecutive; otherwise tiles of the same positions are.

        If so, blocks that run at the same time read the weights of few groups.
        """
        return self.problem.groups > 1 and 4 * self.weight_elements >= LEAST_BYTES_OF_GROUPS

    @family.of_kernel
    def row_begin(self) -> tuple[int, ...]:
        """The first slot of each row group among those of a group."""
        begins = [0]
        for row_class in self.row_class:
            begins.append(begins[-1] + len(self.classes[row_class]))
        return tuple(begins)

    @functools.cached_property
    def tiles(self) -> int:
        """Tiles of the launch."""
        # No output follows the last image's last one.
        y, x = self.problem.height.q_range, self.problem.width.q_range
        unused = self.image_positions - (len(y) - 1) * self.pitch - len(x)
        columns = -(-(self.positions - unused) // self.step)
        return columns * self.problem.groups * self.row_sets

    @family.of_kernel
    def weight_elements(self) -> int:
        """Packed weights, in words of 4 bytes."""
        return self.problem.groups * self.row_begin[-1] * self.chunks * GROUP_ROWS * LINE_WORDS

    @functools.cached_property
    def pixel_elements(self) -> int:
        """Packed pixels, in words of 4 bytes."""
        return self.problem.groups * self.chunks * self.positions * LINE_WORDS

    @functools.cached_property
    def operand_elements(self) -> int:
        """Packed weights and pixels, in words of 4 bytes."""
        return self.weight_elements + self.pixel_elements

    @functools.cached_property
    def index(self) -> str:
        """The C type of offsets."""
        operands = self.operand_elements, self.repairing.operand_elements
        return family.index_type(self.problem, *operands)

    @family.of_kernel
    def part_channels(self) -> int:
        """Output channels that the packing takes at a time."""
        if self.model is not self:
            return self.model.part_channels
        weights = PACK_WEIGHTS // self.word_channels
        channels = max(1, min(weights // self.problem.taps, GROUP_ROWS // self.row_phases))
        while True:
            # The rows of whole warps, if they fit.
            channels -= channels % min(channels, self.warp_channels)
            of_weights, of_pixels = self._pack_items(channels)
            items = of_weights + (0 if self.of_layer else of_pixels)
            divisible = channels > self.warp_channels and items < LEAST_ITEMS
            if channels == 1 or not (divisible or of_weights < LEAST_WEIGHT_ITEMS):
                return channels
            channels //= 2

    @functools.cached_property
    def pack_items(self) -> tuple[int, int]:
        """Pieces of weights and of pixels that the packing's blocks take."""
        return self._pack_items(self.part_channels)

    def _pack_items(self, part_channels: int) -> tuple[int, int]:
        channels = -(-self.problem.out_channels_per_group // self.warp_channels)
        parts = -(-channels * self.warp_channels // part_channels)
        parts *= self.problem.height.stride if self._row_step(part_channels) > 1 else 1
        planes = self.problem.groups * self.chunks
        positions = PACK_POSITIONS // self.word_channels
        return planes * parts, planes * -(-self.positions // positions)

    @family.of_kernel
    def packed_row_step(self) -> int:
        """Step, in kernel rows, between the rows of a piece: that of a phase in y, or 1."""
        return self._row_step(self.part_channels)

    def _row_step(self, part_channels: int) -> int:
        y = self.problem.height
        many = part_channels == 1 and self.problem.taps >= MANY_TAPS
        return y.stride // math.gcd(y.stride, y.dilation) if many else 1

    @property
    def pack_blocks(self) -> int:
        """Blocks of the packing."""
        return min(sum(self.pack_items), MOST_HALF_BLOCKS if self.tile.half else family.MAX_GRID)

    @family.of_kernel
    def pack_bytes(self) -> int:
        """Shared memory of the packing."""
        y, x = self.problem.height, self.problem.width
        rows = -(-y.kernel // self.packed_row_step)
        weights = self.part_channels * rows * x.kernel | 1
        positions = PACK_POSITIONS // self.word_channels
        staged = LINE_WORDS * max(weights, positions + 1) * 4
        noted = PACK_THREADS // 32 * positions if self.tile.half else 4
        return staged + noted + PACK_THREADS // 32 * 4

    @functools.cached_property
    def repairing(self) -> Layout:
        """Tiles in TF32, for the repair: one kernel, whatever the tile and the size.

        It recomputes whole images, so its tiles need not be those of the kernel in front.
        """
        apart = hopper.apart_why_not(self.problem) is None
        return layout(self.problem, REPAIR_APART if apart else REPAIR, of_layer=True)

    @functools.cached_property
    def status(self) -> int:
        """Where `Status` starts, then `notes`: behind all float16 operands."""
        return self.operand_elements + self.repairing.operand_elements

    @property
    def packed_elements(self) -> int:
        """The workspace, in words of 4 bytes."""
        if not self.tile.half:
            return self.operand_elements
        return self.status + sum(self.note_words)

    @functools.cached_property
    def note_words(self) -> tuple[int, int, int, int]:
        """Words of 4 bytes of four arrays, each a multiple of 16 bytes:

        - `Status`;
        - what each block of the packing notes of its weights;
        - the counts of each image;
        - the notes of pixels, a byte for each position of a line of channels.
        """
        images = -(-self.problem.batch // 4) * 4
        return STATUS_WORDS, -(-self.pack_blocks // 4) * 4, images, self.pack_items[1] * 16

    @functools.cached_property
    def image_octets(self) -> int:
        """Octets (8 channels of a pixel) of an image."""
        problem = self.problem
        octets = -(-problem.in_channels_per_group // 8)
        return problem.groups * octets * problem.height.size * problem.width.size

    @property
    def most_slight(self) -> int:
        """Most octets (8 channels of a pixel) of an image that may have too small a value.

        The limit allows for what chance brings; with few pixels it is 0. A pixel that is small in
        all channels exceeds it.
        """
        if self.problem.batch * self.image_octets <= FEW_OCTETS:
            return 0
        return min(MOST_SLIGHT, 1 + self.image_octets // OCTETS_OF_SLIGHT)

    @family.of_kernel
    def most_unfit_weights(self) -> int:
        """Most octets (8 weights of a tap) with a weight too small for float16.

        With more, the layer is not computed in float16. The limit is 1 weight in 2^18, more than
        normal weights have.
        """
        return math.prod(self.problem.w_shape) >> 18


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile, of_layer: bool = False) -> Layout:
    """Lays a tile over a problem; for the last argument see `Layout`."""
    if problem.like is not None:
        return family.over(layout(problem.like, tile, of_layer), problem)
    axes = (_of_any_size(problem.height), _of_any_size(problem.width))
    classes = _row_classes(*axes, problem.out_channels_per_group, tile)
    return Layout(problem, tile, *classes, of_layer)


def _of_any_size(axis: Axis) -> Axis:
    return Axis(1, axis.kernel, axis.stride, dilation=axis.dilation)


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def _row_classes(
    y: Axis, x: Axis, channels: int, tile: Tile
) -> tuple[tuple[tuple[Slot, ...], ...], tuple[int, ...]]:
    """`Layout.classes` and `Layout.row_class`: they are the same for all sizes of an image."""
    in_x = [{tap.shift for tap in phase.taps} for phase in x.phases]
    in_y = [{tap.shift for tap in phase.taps} for phase in y.phases]
    any_x = set().union(*in_x)
    channel_tiles = -(-channels // (WARP_ROWS // x.stride))
    # The slots in y and x of each row group, in the order of sm90_tf32_flat_forward/rows.cuh.
    row_slots: list[tuple[set[int], set[int]]] = []
    if tile.apart:
        groups = -(-channels // GROUP_ROWS)
        row_slots = [
            (slots_y, slots_x) for slots_y in in_y for _ in range(groups) for slots_x in in_x
        ]
    elif tile.paired:
        row_slots = [
            (in_y[pair + phase], any_x)
            for pair in range(0, y.stride, 2)
            for _ in range(-(-channel_tiles // WARPS))
            for phase in (0, 1)
        ]
    else:
        for first in range(0, y.stride * channel_tiles, WARPS):
            last = min(first + WARPS, y.stride * channel_tiles)
            phases = {warp_tile // channel_tiles for warp_tile in range(first, last)}
            row_slots.append((set().union(*(in_y[phase] for phase in phases)), any_x))
    classes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    row_class = []
    for slots_y, slots_x in row_slots:
        used = tuple(sorted(slots_y)), tuple(sorted(slots_x))
        used = used if all(used) else ((), ())
        row_class.append(classes.setdefault(used, len(classes)))
    return tuple(tuple(itertools.product(*used)) for used in classes), tuple(row_class)


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    refusal = hopper.tf32_why_not(problem, target)
    if refusal is not None:
        return refusal
    if problem.width.stride > WARP_ROWS:
        return f"a warp holds {WARP_ROWS} phases in x, the stride is {problem.width.stride}"
    return family.phases_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    if tile.apart and (refusal := hopper.apart_why_not(problem)):
        return refusal
    if tile.paired and problem.height.stride % 2:
        return f"takes two phases in y together, the stride is {problem.height.stride}"
    return _why_not(layout(problem, tile), target)


def _why_not(laid: Layout, target: Target) -> str | None:
    """The same of a layout."""
    problem, tile = laid.problem, laid.tile
    if tile.paired and laid.rows == 0:
        return f"takes whole rows of positions, which have {laid.pitch}"
    if tile.half and laid.chunks == laid.repairing.chunks:
        found = problem.in_channels_per_group
        return f"multiplies {2 * LINE_WORDS} input channels at a time, there are {found}"
    if tile.half and laid.image_octets > MOST_OCTETS:
        return (
            f"float16 holds images of up to {MOST_OCTETS} times 8 channels of a pixel, this has "
            f"{laid.image_octets}"
        )
    if tile.half:
        refusal = _why_not(laid.repairing, target)
        if refusal is not None:
            return f"the launch that repairs it: {refusal}"
    if laid.most_vector % laid.vector:
        return f"writes {laid.vector} outputs at a time, rows allow {laid.most_vector}"
    if laid.stage_rows > LINE_BYTES:
        return f"tells {LINE_BYTES} shifts in y apart, the kernel has {laid.stage_rows}"
    if laid.pack_bytes > target.shared_per_block:
        return f"the packing has no room for {problem.taps} taps"
    if laid.positions * LINE_BYTES >= 2**40 or laid.positions >= 2**30 - 2**10:
        return f"{laid.positions} positions are over a tensor map's size"
    if laid.stages(target) == (0, 0):
        return (
            f"two stages of {laid.patch_positions * LINE_BYTES} bytes do not fit {target.arch} "
            "beside the weights"
        )
    if laid.tiles > family.MAX_GRID:
        return f"{laid.tiles} tiles are over 32 bits"
    return hopper.apart_in_line_why_not(problem, laid.image_positions)
