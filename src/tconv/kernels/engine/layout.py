"""The geometry of a tile of the engine over a problem.

Forward reads x and makes the phases of y; the input gradient reads the phases of y and makes x. A
*source* is a view of what is read, a *result* one of what is made: x, or one phase of y, which has
the pixels (first + step*i) of both axes. Along an axis, position i of a result needs position
i + d of a source for a tap of distance d: with q = (o + padding) // stride of y's pixel o and x's
pixel q - shift (`tconv.problem`), a phase whose first pixel has q0 gives

    forward:         q0 + i = q,   i + d = q - shift    d = q0 - shift
    input gradient:  i = q - shift,   q0 + (i + d) = q  d = shift - q0
"""

from __future__ import annotations

import bisect
import collections
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tconv.jit.target import Target
from tconv.kernels import family, flat
from tconv.kernels.engine import fold
from tconv.kernels.engine.tiles import CONSUMERS, FLOAT32_TILES, GROUP_ROWS, Tile
from tconv.kernels.launch import Operand
from tconv.kernels.source import Constant
from tconv.problem import ITEM_BYTES, Axis, Problem

PIECE_BYTES = 64 * 128
MOST_SUMS = 128
"""Sums of a thread."""

STRICT_SUMS = 152
"""Those of strict float32, with the temporary ones of 64 positions: with 168, some spilled."""

RAW_STRICT_SUMS = 96
"""The same of a raw tile, with one of its two temporary sums: it has words of all taps too."""

STRICT_COLUMNS = 128
"""Positions of a consumer in strict float32, at most: 256 spilled with 140 sums."""

UNFOLDED_SUMS = 112
"""Those of a folded result, whose way to memory takes more registers: 128 spilled."""

MOST_PATCH_STAGES = 8
MOST_WEIGHT_STAGES = 8
MOST_SHARES = 16
"""Blocks that share a tile, at most."""

MOST_RESIDENT = 32
"""Most pieces of weights that a block keeps."""

LEAST_WEIGHT_STAGES = (4, 3, 2)
MOST_BOX = 256
SHORT_ROW = 4
LONG_ROW = 32
LONG_INTERLEAVED_ROW = 128
"""Values of a tile's row of a contiguous result: the shorter, the longer each takes to write.

By a guess, short ones take twice their number's time. From long ones on there is no difference.
With pixels of several phases in turn, 32 were too few by the rows of one layer, pointpillars_k4s4.
"""

SHORT_ROW_RATE = 8
"""Values of a short row that a raw tile writes a cycle, by a guess: long products hide them.

pose_32x24's rows of 24 in three boxes of 16 rows took 0.80 of the time of four rows in one.
"""

PART_BYTES = 2 * PIECE_BYTES
"""What a consumer has of a result that tensor maps write, until they have read it."""

MOST_IN_TURN = 16
"""Phases of a row that a tile writes together: eight channels of them fill two pieces."""

MOST_LINES = 24 * 1024
"""Bytes of the lines of all phases that a consumer has at a time."""

MOST_PARTS = 4
"""Parts of a consumer's box, each written by one copy."""

MOST_MAPS = 28
"""Tensor maps of a kernel, of its 4 KB of arguments."""

RAW_PIECES = 6
"""Pieces of a contiguous source under way, of all warps."""

RAW_BYTES = 8 * 1024
"""Of a piece, at most."""

SWIZZLED_LINE = 64
"""Pixels of a line that is swizzled."""

RAW_READ_STRIDE = 5
RAW_MADE_STRIDE = 4
"""Phases of a row that a raw tile reads, and makes, at most.

A raw tile that made five took 1.15 times another tile's time (kb81 in bfloat16).
"""

RAW_TAPS = 8
"""Taps of a row of a raw tile, at most: the operands of two steps are in registers."""

STRICT_RAW_TAPS = 7
"""The same of full float32 with 128 positions of a consumer: 8 spilled."""

WIDE_RAW_TAPS = 4
"""The same where a consumer has 256 positions: five spilled."""

MOST_SOURCES = 16
"""Tensor maps of a kernel's sources: 2 KB of its 4 KB of arguments."""

MOST_PHASES = 256
"""Phases of y that a kernel lists. With 250 000 of them, planning took 15 s."""

PACK_THREADS = 256
PACK_DEPTH = 16
THREAD_VALUES = 64
"""Values of a packed image that a thread of its packing takes at a time, about."""

PART_TAPS = 128
"""Taps of an item of the packing, at most."""

ITEM_WEIGHTS = 5000
"""Weights of an item of the packing, about: two vectors for each thread."""


class View(NamedTuple):
    """The pixels first, first + step, ... of an axis: `size` of them, the first at q."""

    first: int
    q: int
    size: int


class Slot(NamedTuple):
    """A tap of a result, in the order of the multiplication.

    Attributes:
        stage: its stage's index in `Layout.stages`.
        result: among those of its set that have sums.
        y, x: the distances within the stage's patch.
        tap: index of the weight, row by row.
    """

    stage: int
    result: int
    y: int
    x: int
    tap: int


class Lines(NamedTuple):
    """What a stage of a raw tile has of a channel of an image.

    Attributes:
        rows: rows.
        segments: parts of a row of the tile, a line each.
        columns: positions of a segment.
        pixels: of a line.
        item: bytes of a pixel.
    """

    rows: int
    segments: int
    columns: int
    pixels: int
    item: int

    @property
    def copied(self) -> int:
        """What takes as long to copy as so many lines of 128 bytes."""
        return self.rows * self.segments * -(-self.pixels * self.item // 128)


class Stage(NamedTuple):
    """A patch of a source: where its first position lies, from the tile's first."""

    source: int
    y: int
    x: int


def phase_view(axis: Axis, phase: int) -> View:
    """The pixels of a phase of an axis of y."""
    first = (phase - axis.padding) % axis.stride
    size = max(0, -(-(axis.output_size - first) // axis.stride))
    return View(first, (first + axis.padding) // axis.stride, size)


def read_phases(axis: Axis) -> tuple[int, ...]:
    """The phases of an axis of y that taps read. A packed image has their pixels alone."""
    return tuple(phase.index for phase in axis.phases if phase.taps)


def read_before(axis: Axis, pixel: int) -> int:
    """How many pixels before this one are of those phases."""
    phases, cut = read_phases(axis), axis.padding % axis.stride

    def count(end: int) -> int:
        whole, phase = divmod(end, axis.stride)
        return whole * len(phases) + bisect.bisect_left(phases, phase)

    return count(pixel + cut) - count(cut)


_Value = TypeVar("_Value")


def _of_shape(find: Callable[[Layout], _Value]) -> functools.cached_property[_Value]:
    """A property that no size of the image changes, but by the phases that have pixels.

    The choice for many sizes (`tconv.sizes`) lays a tile over 64 images of a layer.
    """
    remembered: dict[object, _Value] = {}

    def found(laid: Layout) -> _Value:
        problem = laid.problem
        used = (problem.height.used_phases, problem.width.used_phases)
        key = (laid.tile, problem.layer, laid.call.layer, used)
        value = remembered.get(key)
        if value is None:
            value = find(laid)
            if len(remembered) >= family.TILES_REMEMBERED:
                remembered.clear()
            remembered[key] = value
        return value

    return functools.cached_property(found)


@dataclass(frozen=True)
class Layout:
    """A tile laid over a problem.

    Attributes:
        problem: the call's, or the folded one.
        tile: the tile.
        call: the call's.
    """

    problem: Problem
    tile: Tile
    call: Problem

    @property
    def forward(self) -> bool:
        """Whether y is made; otherwise x is."""
        return self.problem.direction == "forward"

    @property
    def rows(self) -> int:
        """Channels of a group that are made."""
        problem = self.problem
        return (problem.out_channels if self.forward else problem.in_channels) // problem.groups

    @property
    def reduced(self) -> int:
        """Channels of a group that are summed over."""
        problem = self.problem
        return (problem.in_channels if self.forward else problem.out_channels) // problem.groups

    @property
    def item(self) -> int:
        """Bytes of a value as it is multiplied."""
        return operand_bytes(self.problem)

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a value as it lies in a tensor."""
        return ITEM_BYTES[self.problem.dtype]

    @property
    def is_float32(self) -> bool:
        """Whether tensors are of float32."""
        return self.problem.dtype == "float32"

    @property
    def strict(self) -> bool:
        """Whether a value of float32 is multiplied as three of bfloat16, not rounded to TF32."""
        return is_strict(self.problem)

    @property
    def value_parts(self) -> int:
        """Values of 16 bits, or those of float32, that make one."""
        return value_parts(self.problem)

    @property
    def most_sums(self) -> int:
        """Sums of a thread at most, of a tile whose positions are rows, by 64 positions."""
        blocks = self.tile.columns // 64
        if not self.strict:
            return MOST_SUMS // blocks
        return (RAW_STRICT_SUMS if self.tile.raw else STRICT_SUMS) // (blocks + 1)

    @functools.cached_property
    def depth(self) -> int:
        """Channels of a stage. Short lines leave fewer bits for numbers (`tile_why_not`)."""
        if self.tile.raw:
            return self.tile.depth
        if self.item == 4:
            return 16 if self.reduced <= 16 else 32
        if self.reduced <= 16 and len(self.stages) * self.tile_sums <= 32:
            return 16
        large = self.strict and self.tile.positions > 128  # patches of three parts
        return 32 if self.reduced <= 32 or large else 64

    @property
    def line_bytes(self) -> int:
        """Bytes of a position in a stage, or of a row of weights."""
        return self.item * self.depth

    @property
    def chunks(self) -> int:
        """Stages of channels."""
        return -(-self.reduced // self.depth)

    @property
    def group_rows(self) -> int:
        """Rows of a row group: 64, or fewer where they are columns.

        So few that all phases of a contiguous result's row have registers, if any number does.
        """
        if not self.tile.positions_are_rows:
            return GROUP_ROWS
        if self.unfolds:
            return -(-self.block_rows // 8) * 8
        wide = self.tile.raw or self.is_float32
        most = min(256, self.most_sums * 2 // 8 * 8) if wide else GROUP_ROWS
        if self.phases_in_turn > 1:
            of_phase = MOST_SUMS // (self.tile.columns // 64 * len(self.tapped))  # sums
            most = min(most, of_phase * 2 // 8 * 8) or GROUP_ROWS
        blocks = -(-self.rows // most)
        return -(-self.rows // (8 * blocks)) * 8

    @property
    def maps_weights(self) -> bool:
        """Whether weights are copied as they lie, by a tensor map: nothing is packed."""
        of_tile = not self.tile.folded and not (self.tile.raw and self.forward)
        return self.problem.weight_mapped and not (self.packs_image or self.strict) and of_tile

    @property
    def rows_adjacent(self) -> bool:
        """Whether a line of a piece of weights has the rows of a channel, not the reverse."""
        return self.maps_weights and self.forward

    @property
    def weight_line(self) -> int:
        """Bytes of a line of a piece of weights: the span of its swizzle."""
        if self.rows_adjacent:
            return 64 if self.group_rows <= 32 else 128
        return self.line_bytes

    @property
    def unfolds(self) -> bool:
        """Whether the phases of the result are channels."""
        return self.forward and self.tile.folded

    @property
    def folds(self) -> bool:
        """Whether what is read is folded as it is packed."""
        return self.tile.folded and not self.forward

    @property
    def block_rows(self) -> int:
        """Rows of a row group that exist: whole lines of a folded result."""
        if not self.unfolds:
            return self.group_rows
        run = fold.run(self.call)
        most = max(1, UNFOLDED_SUMS * 2 * 64 // self.tile.columns // run)
        lines = self.rows // run
        return -(-lines // -(-lines // most)) * run

    @property
    def weight_bytes(self) -> int:
        """Bytes of a piece of weights."""
        lines = self.depth if self.rows_adjacent else self.group_rows
        return self.value_parts * lines * self.weight_line

    @functools.cached_property
    def tile_results(self) -> int:
        """Results of a tile, a set: as many as there are registers for, of whole rows if any."""
        if not self.tile.positions_are_rows:
            return 2 if self.tile.paired else 1
        if self.tile.raw:
            return len(self.results[1])
        fit = self._most_results
        count, turn = self.result_count, self.phases_in_turn
        parts = [k for k in range(1, count + 1) if count % k == 0]
        rows = [k for k in parts if k % turn == 0 and k // turn * len(self.tapped) <= fit]
        return max((turn > 1 and rows) or [k for k in parts if k <= fit], default=1)

    @property
    def _most_results(self) -> int:
        """Results that a thread has registers for, of a tile whose positions are rows."""
        blocks, of_block = self.tile.columns // 64, self.group_rows // 2
        if self.strict:
            return (STRICT_SUMS // of_block - 1) // blocks
        return MOST_SUMS // (blocks * of_block)

    @property
    def tile_sums(self) -> int:
        """Results of a tile that have sums. Of rows that are written together, others have none."""
        if not self.interleaved:
            return self.tile_results
        return self.tile_results // self.phases_in_turn * len(self.tapped)

    @property
    def set_count(self) -> int:
        """Sets of results."""
        return self.result_count // self.tile_results

    @functools.cached_property
    def phases(self) -> tuple[tuple[tuple[int, View], ...], ...]:
        """The phases of y's height, and of its width, that have pixels."""
        return tuple(
            tuple(
                (phase, view)
                for phase in range(axis.stride)
                if (view := phase_view(axis, phase)).size > 0
            )
            for axis in (self.problem.height, self.problem.width)
        )

    @_of_shape
    def _taps(self) -> tuple[tuple[tuple[tuple[int, int, int], int], ...], ...]:
        """For each result its taps: (source, distance in y and x) and the weight's index."""
        problem = self.problem
        axes = (problem.height, problem.width)
        results: list[list[tuple[tuple[int, int, int], int]]] = []
        sources = 0
        if self.tile.raw and not self.forward:
            return (self._raw_taps,)
        for phase_y, view_y in self.phases[0]:
            for phase_x, view_x in self.phases[1]:
                found = []
                for tap_y in axes[0].phases[phase_y].taps:
                    for tap_x in axes[1].phases[phase_x].taps:
                        y, x = tap_y.shift - view_y.q, tap_x.shift - view_x.q
                        at = (0, -y, -x) if self.forward else (sources, y, x)
                        found.append((at, tap_y.index * axes[1].kernel + tap_x.index))
                if self.forward:
                    results.append(found)
                elif found:
                    results = [[*(results[0] if results else []), *found]]
                    sources += 1
        return tuple(map(tuple, results)) or ((),)

    @property
    def _raw_taps(self) -> tuple[tuple[tuple[int, int, int], int], ...]:
        """The same of a raw tile's gradient: sources are phases of rows, x counts pixels."""
        y, x = self.problem.height, self.problem.width
        read = [(view, y.phases[phase].taps) for phase, view in self.phases[0]]
        return tuple(
            ((source, tap.shift - view.q, i * x.dilation - x.padding), tap.index * x.kernel + i)
            for source, (view, taps) in enumerate((v, t) for v, t in read if t)
            for tap in taps
            for i in range(x.kernel)
        )

    @functools.cached_property
    def sources(self) -> tuple[tuple[View, View], ...]:
        """The views that are read, of height and width."""
        y, x = self.problem.height, self.problem.width
        if self.forward:
            return ((View(0, 0, y.size), View(0, 0, x.size)),)
        # Raw rows have all phases.
        columns = ((0, View(0, 0, x.output_size)),) if self.tile.raw else self.phases[1]
        found = tuple(
            (view_y, view_x)
            for phase_y, view_y in self.phases[0]
            for phase_x, view_x in columns
            if y.phases[phase_y].taps and (self.tile.raw or x.phases[phase_x].taps)
        )
        return found or ((View(0, 0, 1), View(0, 0, 1)),)

    @functools.cached_property
    def results(self) -> tuple[tuple[View, ...], tuple[View, ...]]:
        """The views of height, and those of width, that are made, in all combinations."""
        if self.forward:
            height, width = (tuple(view for _, view in axis) for axis in self.phases)
            return height, width
        return (View(0, 0, self.problem.height.size),), (View(0, 0, self.problem.width.size),)

    @property
    def result_count(self) -> int:
        """Results of both axes together."""
        return len(self._taps)

    @_of_shape
    def _stages(self) -> tuple[tuple[Stage, ...], tuple[tuple[Slot, ...], ...], tuple[int, int]]:
        """Stages, the slots of each set, and how far a stage's taps reach in y and x."""
        reach = self.tile.reach

        def key(at: tuple[int, int, int]) -> tuple[int, ...]:
            if reach == "column":
                return at[0], at[2]
            return at[: {"image": 1, "row": 2, "tap": 3}[reach]]

        members: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
        for of_result in self._taps:
            for at, _ in of_result:
                members.setdefault(key(at), []).append(at)
        keys = sorted(members)
        stages = tuple(
            Stage(
                members[k][0][0], min(y for _, y, _ in members[k]), min(x for *_, x in members[k])
            )
            for k in keys
        )
        index = {k: i for i, k in enumerate(keys)}
        slots: list[list[Slot]] = [[] for _ in range(self.set_count)]
        for result, of_result in enumerate(self._taps):
            of_set, number = divmod(result, self.tile_results)
            if self.interleaved and of_result:
                row, phase = divmod(number, self.phases_in_turn)
                number = row * len(self.tapped) + self.tapped.index(phase)
            for at, tap in of_result:
                stage = index[key(at)]
                y, x = at[1] - stages[stage].y, at[2] - stages[stage].x
                slots[of_set].append(Slot(stage, number, y, x, tap))
        every = [slot for of_set in slots for slot in of_set]
        most = max((s.y for s in every), default=0), max((s.x for s in every), default=0)

        def order(slot: Slot) -> tuple[int, ...]:
            return (slot.stage, slot.tap) if self.tile.raw else tuple(slot)  # whole rows of taps

        of_sets = tuple(tuple(sorted(of_set, key=order)) for of_set in slots)
        return stages or (Stage(0, 0, 0),), of_sets, most

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The distinct stages."""
        return self._stages[0]

    @property
    def slots(self) -> tuple[tuple[Slot, ...], ...]:
        """The slots of each set, by stage and result."""
        return self._stages[1]

    @property
    def reach(self) -> tuple[int, int]:
        """How many positions beyond a tile's a stage holds, in y and x."""
        return (0, 0) if self.tile.raw else self._stages[2]

    @property
    def slot_count(self) -> int:
        """Slots of all sets."""
        return sum(map(len, self.slots))

    @property
    def row_blocks(self) -> int:
        """Blocks of rows of a set."""
        return -(-self.rows // self.block_rows)

    @property
    def row_groups(self) -> int:
        """Blocks of rows of all sets: of a block all sets follow each other."""
        return self.row_blocks * self.set_count

    @property
    def tile_groups(self) -> int:
        """Row groups of a tile."""
        return self.tile.row_groups

    @property
    def row_sets(self) -> int:
        """Tiles on the same positions."""
        return -(-self.row_groups // self.tile_groups)

    @functools.cached_property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """The stages that a row set needs. Row sets repeat these."""
        count, size = self.set_count, self.tile_groups
        kinds = count // size if count % size == 0 else count
        return tuple(
            tuple(
                sorted(
                    {
                        slot.stage
                        for i in range(size)
                        for slot in self.slots[(kind * size + i) % count]
                    }
                )
            )
            for kind in range(kinds)
        )

    @property
    def positions(self) -> int:
        """Positions of a tile."""
        return self.tile.positions

    @property
    def maps_result(self) -> bool:
        """Whether tensor maps write the result, one for each of its phases."""
        if self.contiguous or self.unfolds or self.rows % 8 != 0 or self.is_float32:
            return False
        return self.map_count + self.maps_weights + self.result_count <= MOST_MAPS

    @property
    def part_line(self) -> int:
        """Bytes of a position in a part: the span of its swizzle."""
        return max(32, 1 << (2 * self.group_rows - 1).bit_length())

    @property
    def part_lines(self) -> int:
        """Positions that a part has room for."""
        return min(self.tile.columns, PART_BYTES // self.part_line)

    @property
    def box(self) -> tuple[int, int, int]:
        """Images, rows and columns of a tile."""
        return self._cut_box[0]

    @functools.cached_property
    def _cut_box(self) -> tuple[tuple[int, int, int], int, int, int]:
        """A tile's box, that which needs the fewest tiles, and how it is cut where maps write it.

        Then consumers with other positions have other parts, all of the same size: of whole images,
        of rows of one, or of columns of one. Found: the axis, a part's size along it, and the parts
        of a consumer.

        Of a contiguous result, short rows are pieces of sectors: long ones are worth more tiles,
        but where long products hide them. A gradient's raw tile may have some rows of several
        images.
        """
        height = max(view.size for view in self.results[0])
        width = max(view.size for view in self.results[1])
        sizes = (self.problem.batch, height, width)
        (reach_y, reach_x), granule, of_pixel = self.reach, self.granule, self.row_phases
        shares = CONSUMERS if self.maps_result and self.tile_groups == 1 else 1
        most_parts, lines = (MOST_PARTS, self.part_lines) if self.maps_result else (1, 1 << 30)
        room = self.positions // shares
        packed = self.contiguous and not (self.tile.raw or self.tile.turned)
        long_row = LONG_INTERLEAVED_ROW if packed and of_pixel > 1 else LONG_ROW
        raw_gradient = self.tile.raw and not self.forward
        best: tuple[tuple[float, ...], tuple[tuple[int, int, int], int, int, int]] | None = None
        every = min(room * shares, MOST_BOX) // granule * granule
        for x in dict.fromkeys((width, *range(every, 0, -granule))):
            count = -(-width // x)
            even = width if count == 1 else -(-width // (count * granule)) * granule
            pitch = -(-(x + reach_x) // granule) * granule
            if x > room * shares or pitch > MOST_BOX or x != even:
                continue
            pieces = SHORT_ROW / min(long_row, x * of_pixel) if self.contiguous else 0
            if raw_gradient:
                written = self.positions * self.group_rows / SHORT_ROW_RATE
                pieces *= min(1.0, written / max(1.0, self.raw_cycles))
            # Of each axis: its number, rows of an image, all, positions of one and from one to the
            # next, its lines of a part.
            of_images = [
                (0, y, sizes[0], (y - 1) * pitch + x, (y + reach_y) * pitch, y * x, MOST_BOX)
                for y in (height, *(self._row_pieces(pitch) if raw_gradient and x == width else ()))
            ]
            of_rows = (1, 1, height, x, pitch, x, MOST_BOX - reach_y)
            of_columns = (2, 1, x, 1, 1, 1, MOST_BOX - reach_x)
            axes = (of_images[0], of_rows, of_columns, *of_images[1:])
            for axis, rows, total, one, each, of_part, most in axes:
                fit = (room - one) // each + 1 if one <= room else 0
                for parts in range(1, most_parts + 1):
                    cuts = shares * parts
                    size = min(lines // of_part, fit // parts, most // cuts)
                    if size < 1 or (axis == 2 and size * cuts < x):
                        continue
                    size = -(-total // (cuts * -(-total // (cuts * size))))
                    y = (rows, size * cuts, 1)[axis]
                    box = (size * cuts if axis == 0 else 1, y, size * cuts if axis == 2 else x)
                    if y + reach_y > MOST_BOX:
                        continue
                    if self.tile.raw and not self._raw_fits(box):
                        continue
                    tiles = math.prod(-(-s // b) for s, b in zip(sizes, box, strict=True))
                    # By turns of a block. Of flat maps, what rows take to copy matters more.
                    if self.tile.raw and not self.flat:
                        tiles *= self.problem.groups * self.row_sets
                        tiles = -(-tiles // _HOPPER.multiprocessors)
                    longer = 1 + pieces + (self._raw_copied(box) if self.tile.raw else 0.0)
                    rank = (tiles * longer, parts, box[0] * (y + reach_y) * pitch)
                    if best is None or rank < best[0]:
                        best = rank, (box, axis, size, parts)
        return ((0, 0, 0), 0, 0, 0) if best is None else best[1]

    def _row_pieces(self, pitch: int) -> tuple[int, ...]:
        """Rows of pieces that an image is cut into, evenly: several images' are a box.

        Of images of 14 x 14 a tile of 256 positions has one, and 60 for nothing, or two rows of 8.
        """
        height = max(view.size for view in self.results[0])
        most = min(height - 1, self.positions // pitch)
        return tuple(dict.fromkeys(-(-height // -(-height // y)) for y in range(most, 0, -1)))

    def raw_lines(self, box: tuple[int, int, int]) -> Lines:
        """The lines of a stage of a raw tile; of over 256 pixels where none fit a copy."""
        reach_y, reach_x = self._stages[2]
        if self.swizzled:
            columns = SWIZZLED_LINE // self.source_step[1]
            return Lines(box[1] + reach_y, -(-box[2] // columns), columns, SWIZZLED_LINE, 2)
        classes = flat.classes(self.problem, "y") if self.flat else 1
        for segments in range(1, box[2] // 8 + 2):
            even = 2 if segments == 1 else 8
            columns = -(-box[2] // (even * segments)) * even
            pixels = self.raw_first + self.source_step[1] * (columns - 1) + reach_x + 1
            line = flat.line_pixels(pixels, classes, self.raw_grain)
            if line <= MOST_BOX:
                break
        return Lines(box[1] + reach_y, segments, columns, line, self.pixel_bytes)

    def _raw_fits(self, box: tuple[int, int, int]) -> bool:
        lines = self.raw_lines(box)
        free = _HOPPER.shared_per_block - 2048 - self.fixed_bytes - 2 * self.weight_stage_bytes
        fits = 2 * self._raw_bytes(box) <= free
        return fits and max(lines.rows, lines.pixels, box[0]) <= MOST_BOX

    def _raw_bytes(self, box: tuple[int, int, int]) -> int:
        """Bytes of a stage of a raw tile."""
        lines = self.raw_lines(box)
        return self.pixel_bytes * lines.pixels * self.depth * lines.rows * lines.segments * box[0]

    @property
    def raw_products(self) -> float:
        """Products of a raw tile: of 64 positions, its channels and 32 bytes that are reduced."""
        slots = self.chunks * self.slot_count / self.set_count
        return slots * self.line_bytes / 32 * self.positions / 64

    @property
    def raw_cycles(self) -> float:
        """Cycles of the tensor cores for them."""
        return part_products(self.problem) * self.raw_products * self.group_rows / 2

    def _raw_copied(self, box: tuple[int, int, int]) -> float:
        """What copying lines takes of a raw tile's products, at three cycles for 128 bytes."""
        lines = box[0] * self.raw_lines(box).copied * len(self.stages)
        products = max(1, self.slot_count) * self.positions / 64 * self.group_rows / 2
        return 3 * (32 // self.item) * lines / (part_products(self.problem) * products)

    @property
    def flat(self) -> bool:
        """Whether a raw tile of a gradient reads by flat maps: of rows off 16 bytes."""
        return self.tile.raw and not self.problem.pattern.source_aligned

    @property
    def swizzled(self) -> bool:
        """Whether a raw tile's lines are those of a swizzle: 128 bytes, which whole rows fill.

        A thread's two positions then have an octet of their own, where an odd number of octets has
        one for nothing.
        """
        of, step = self.problem.pattern, self.source_step[1]
        width = of.x_shape[3] if self.forward else of.y_shape[3]
        own = self.stages[0].x == 0 and self._stages[2][1] < step and SWIZZLED_LINE % step == 0
        return own and not self.flat and not self.is_float32 and width % SWIZZLED_LINE == 0

    @property
    def raw_grain(self) -> int:
        """Pixels that a raw tile's lines are off 16 bytes by are a multiple of it."""
        return math.gcd(8, self.problem.pattern.width.output_size) if self.flat else 8

    @property
    def raw_margin(self) -> int:
        """Pixels of a raw tile's line before its first position's."""
        return -(self.stages[0].x // self.raw_grain * self.raw_grain)

    @property
    def raw_first(self) -> int:
        """The pixel of the first tap of a line's first position."""
        return self.raw_margin + self.stages[0].x

    @property
    def raw_end(self) -> int:
        """The pixel behind a row's last from that of the last position on, whatever the width."""
        width = self.problem.width
        return width.output_size - width.stride * (width.size - 1) if self.flat else 0

    @property
    def raw_slots(self) -> tuple[tuple[int, int], ...]:
        """Of a row of taps, the same for all: each one's pixel from the first, and its result."""
        row = next((of_set for of_set in self.slots if of_set), ())[: self.stage_slots]
        return tuple((slot.x, slot.result) for slot in row) or ((0, 0),) * self.stage_slots

    @property
    def parts(self) -> int:
        """Parts of a consumer's box."""
        return self._cut_box[3]

    @property
    def part(self) -> tuple[int, int, int]:
        """Images, rows and columns of a part."""
        box, axis, size, _ = self._cut_box
        n, y, x = (size if i == axis else whole for i, whole in enumerate(box))
        return n, y, x

    @property
    def part_steps(self) -> tuple[int, int, int]:
        """Images, rows and columns from one part to the next."""
        _, axis, size, _ = self._cut_box
        n, y, x = (size if i == axis else 0 for i in range(3))
        return n, y, x

    @property
    def part_positions(self) -> int:
        """Positions of the patch from one part to the next."""
        n, y, x = self.part_steps
        return n * self.pitch + y * self.pitch_x + x

    @functools.cached_property
    def pitch_x(self) -> int:
        """Positions from one row of a patch to the next."""
        return -(-(self.box[2] + self.reach[1]) // self.granule) * self.granule

    @property
    def pitch(self) -> int:
        """Positions from one image of a patch to the next."""
        return (self.box[1] + self.reach[0]) * self.pitch_x

    @property
    def patch_positions(self) -> int:
        """Positions that are loaded."""
        return self.box[0] * self.pitch

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage. Products of positions that do not exist read behind the patch."""
        if self.tile.raw:
            return self._raw_bytes(self.box)
        read = self.reach[0] * self.pitch_x + self.reach[1] + self.positions
        positions = -(-max(read, self.patch_positions) // 16) * 16
        return self.value_parts * positions * self.line_bytes

    @property
    def piece_bytes(self) -> int:
        """Half the bytes that a consumer writes through: pieces, or all if the result is folded.

        It writes float32 results from registers.
        """
        if self.is_float32:
            return 16
        if self.unfolds:
            return -(-self.tile.columns * self.group_rows // 1024) * 1024
        if self.interleaved and self.tile.positions_are_rows:
            # Lines as <engine/store.cuh> has them: of some channels, 64 positions of all phases.
            phases = self.row_phases
            line = 128 * phases + (16 if phases & (phases - 1) else 0)
            lines = min(self.group_rows, MOST_LINES // line // 8 * 8)
            return max(PIECE_BYTES, -(-lines * line // 2048) * 1024)
        return PIECE_BYTES

    @functools.cached_property
    def fixed_bytes(self) -> int:
        """Shared memory of a block besides its stages."""
        barriers = 2 * MOST_PATCH_STAGES + 2 * CONSUMERS * self.most_weight_stages + 1
        fixed = 2 * CONSUMERS * self.piece_bytes + 4 * max(1, self.slot_count) + 8 + 8 * barriers
        fixed += 160 + 2 * (self.tile.columns + 15) if self.maps_result else 48
        fixed += self.turning_warps * (self.raw_pieces * (self.raw_bytes + 8) + 32) + 128
        return -(-fixed // 1024) * 1024

    @property
    def stage_slots(self) -> int:
        """Slots whose weights are a stage: of raw tiles a row of taps."""
        return self.problem.width.kernel if self.tile.raw else 1

    @property
    def weight_stage_bytes(self) -> int:
        """Bytes of a stage of weights."""
        return self.stage_slots * self.weight_bytes

    def rings(self, target: Target) -> tuple[int, int]:
        """Stages of patches, and of each ring of weights; (0, 0) where they do not fit."""
        weights = self.tile_groups * self.weight_stage_bytes
        free = target.shared_per_block - 1024 - self.fixed_bytes
        free -= 1024 if weights % 1024 else 0  # before `first_patch`
        if self.resident:
            patches = (free - self.all_pieces * weights) // self.stage_bytes
            return min(MOST_PATCH_STAGES, patches), self.all_pieces
        for of_weights in LEAST_WEIGHT_STAGES:
            patches = min(MOST_PATCH_STAGES, (free - of_weights * weights) // self.stage_bytes)
            if patches >= 2:
                left = (free - patches * self.stage_bytes) // weights
                return patches, min(self.most_weight_stages, left)
        return 0, 0

    @property
    def all_pieces(self) -> int:
        """Stages of weights of a tile, of one ring."""
        return max(1, max(map(len, self.slots)) // self.stage_slots * self.chunks)

    @functools.cached_property
    def resident(self) -> bool:
        """Whether a block loads its weights once: all tiles have the same, and they fit."""
        if self.problem.groups * self.row_sets > 1 or self.all_pieces > MOST_RESIDENT:
            return False
        if self.tile.shared:
            return False
        weights = self.tile_groups * self.weight_stage_bytes * self.all_pieces
        # What depends on the image does not decide: two stages of the longest patch.
        most = 2 * self.value_parts * (2 * self.positions) * self.line_bytes
        return weights + most <= _HOPPER.shared_per_block - 4 * self.piece_bytes - 8192

    @property
    def most_weight_stages(self) -> int:
        """Barriers of a ring of weights."""
        return self.all_pieces if self.resident else MOST_WEIGHT_STAGES

    @property
    def first_patch(self) -> int:
        """Where the stages of patches begin in shared memory."""
        weights = self.tile_groups * self.rings(_HOPPER)[1] * self.weight_stage_bytes
        return -(-(self.fixed_bytes + weights) // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return _HOPPER.shared_per_block - 1024  # whatever the image: an SM has one block

    @property
    def tile_counts(self) -> tuple[int, int, int]:
        """Tiles along images, rows and columns."""
        n, y, x = self.box
        height = max(view.size for view in self.results[0])
        width = max(view.size for view in self.results[1])
        return -(-self.problem.batch // n), -(-height // y), -(-width // x)

    @property
    def tiles(self) -> int:
        """Tiles of the launch."""
        return math.prod(self.tile_counts) * self.problem.groups * self.row_sets

    @functools.cached_property
    def shares(self) -> int:
        """Blocks that share a tile, at least two if any; else 1."""
        if not self.tile.shared:
            return 1

        def taken(shares: int) -> float:
            """Chunks that the busiest block multiplies; a share adds a twentieth, by a guess."""
            tiles = -(-self.tiles * shares // _HOPPER.multiprocessors)
            return tiles * -(-self.chunks // shares) * (1 + shares / 20)

        return min(range(2, min(self.chunks, MOST_SHARES) + 1), key=taken, default=1)

    @property
    def share_bytes(self) -> int:
        """Of the sums of all shares."""
        tile = self.tile
        sums = tile.columns * (self.group_rows if tile.positions_are_rows else GROUP_ROWS)
        sums *= self.tile_sums * CONSUMERS
        return 4 * sums * self.tiles * self.shares if tile.shared else 0

    def keeps_patches(self, target: Target) -> bool:
        """Whether a block loads patches once for all row sets that it has of the same positions.

        It then has tiles that follow each other. All row sets need the same stages, which fit the
        ring together.
        """
        several = self.row_sets > 1 and len(set(self.kinds)) == 1 and not self.tile.shared
        return several and 1 <= self.chunks * len(self.kinds[0]) <= self.rings(target)[0]

    def patch_loads(self, target: Target) -> float:
        """The share of tiles whose patches are loaded."""
        if not self.keeps_patches(target):
            return 1.0
        return min(1.0, 1 / self.row_sets + min(target.multiprocessors, self.tiles) / self.tiles)

    def lead(self, target: Target) -> int:
        """Slots by which the first consumer is ahead; 0 where a block has one tile.

        About half a tile, so that one multiplies while the other writes, but of half a ring of
        patches, so that some are loaded meanwhile.
        """
        if self.tiles <= target.multiprocessors or self.tile.shared:
            return 0
        patches, weights = self.rings(target)
        # NOTE: counted in stages of weights.
        lead = -(-self.chunks * self.slot_count // (2 * self.set_count * self.stage_slots))
        most = self.chunks * max(map(len, self.kinds))
        for number, kind in enumerate(self.kinds):
            of_set = self.slots[number * self.tile_groups % self.set_count]
            each = collections.Counter(slot.stage for slot in of_set)
            stages = self.chunks * len(kind)
            loaded = min(patches, stages)
            ahead = [each[kind[i % len(kind)]] // self.stage_slots for i in range(loaded)]
            # NOTE: the second consumer begins when the first reaches the slot behind these. It must
            # do so in the first ring of stages, as the second hands none back before.
            behind = 0 if stages + most <= patches and not self.tile.turned else 1
            lead = min(lead, sum(ahead[: (patches + 1) // 2]), max(0, sum(ahead) - behind))
        if self.tile_groups == 1 and not self.resident:
            # Both consumers hand the same weights back.
            lead = min(lead, weights)
        return lead

    @property
    def weight_pieces(self) -> int:
        """Packed pieces."""
        if self.maps_weights:
            return 0
        return self.problem.groups * self.row_blocks * self.slot_count * self.chunks

    @property
    def packed_elements(self) -> int:
        """The workspace, in words of 4 bytes."""
        return self.share_offset // 4 + self.share_bytes // 4

    @property
    def share_offset(self) -> int:
        """Bytes of the workspace before the sums of shares."""
        return self.weight_pieces * self.weight_bytes + self.item * self.image_elements

    @property
    def part_taps(self) -> int:
        """Taps of an item of the packing; whole vectors of them where an item has not all."""
        taps = self.problem.taps
        parts = -(-taps // PART_TAPS)
        return taps if parts == 1 else -(-taps // (8 * parts)) * 8

    @property
    def item_rows(self) -> int:
        """Rows of an item of the packing."""
        rows = self.group_rows & -self.group_rows
        while rows > 8 and rows * PACK_DEPTH * self.part_taps > ITEM_WEIGHTS:
            rows //= 2
        return rows

    @property
    def slot_bytes(self) -> int:
        """Shared memory of the packing's table of slots."""
        return -(-8 * self.slot_count // 16) * 16

    @property
    def pack_bytes(self) -> int:
        """Shared memory of the packing, which weights alone need."""
        ins, outs = PACK_DEPTH, self.item_rows
        if not self.forward:
            ins, outs = outs, ins
        return self.slot_bytes + self.pixel_bytes * ins * self.part_taps * (outs + 8)

    @property
    def pack_grid(self) -> int:
        """Blocks of the packing."""
        depths = self.chunks * (self.depth // PACK_DEPTH)
        parts = -(-self.problem.taps // self.part_taps) * (self.group_rows // self.item_rows)
        items = self.problem.groups * self.row_blocks * depths * parts
        return items + image_pack_grid(self.item * self.image_elements // 2)

    @property
    def read_layout(self) -> str:
        """The layout of what is read."""
        return self.problem.x_layout if self.forward else self.problem.y_layout

    @property
    def contiguous(self) -> bool:
        """Whether the result is contiguous."""
        made = self.problem.y_layout if self.forward else self.problem.x_layout
        return made == "contiguous"

    @property
    def packs_image(self) -> bool:
        """Whether what is read is packed first, as no tensor map can describe it."""
        if self.tile.turned or self.tile.raw:
            return False
        return self.folds or packs(self.problem, self.reduced, self.read_layout)

    @property
    def source_step(self) -> tuple[int, int]:
        """Pixels from one position of a source to the next, in y and x."""
        problem = self.problem
        return (1, 1) if self.forward else (problem.height.stride, problem.width.stride)

    @property
    def row_views(self) -> tuple[View, ...]:
        """The views of height that are read, each by a map where rows are read whole."""
        return tuple(dict.fromkeys(y for y, _ in self.sources))

    @property
    def map_count(self) -> int:
        """Tensor maps of what is read."""
        if self.flat:
            return 1
        return len(self.row_views if self.tile.raw else self.sources)

    @property
    def row_octets(self) -> int:
        """Octets that are read of a row, which may begin within the first."""
        # What the first pixels of all tiles have in common as a factor.
        common = math.gcd(8, self.box[2]) if self.tile_counts[2] > 1 else 8
        before = 8 - common + max(stage.x % common for stage in self.stages)
        return -(-(before + self.pitch_x) // 8)

    @functools.cached_property
    def piece(self) -> tuple[int, int]:
        """Rows of a piece, evenly, and octets of each: the fewest, where a piece counts as one."""
        octets = min((8, 4, 2, 1), key=lambda most: -(-self.row_octets // most) * (most + 1))
        rows, most = self.box[1] + self.reach[0], RAW_BYTES // (16 * self.depth)
        return -(-rows // -(-rows * octets // most)), octets

    @property
    def pieces(self) -> tuple[int, int, int]:
        """Pieces of a stage: along rows and columns of an image, and all."""
        rows, octets = self.piece
        bands = -(-(self.box[1] + self.reach[0]) // rows)
        blocks = -(-self.row_octets // octets)
        return bands, blocks, self.box[0] * bands * blocks

    @property
    def turning_warps(self) -> int:
        """Warps that turn: those of the bringing warpgroup that have no ring of weights."""
        return 4 - self.tile_groups

    @property
    def raw_pieces(self) -> int:
        """Pieces that each of them has under way."""
        return RAW_PIECES // self.turning_warps if self.tile.turned else 1

    @property
    def raw_bytes(self) -> int:
        """Bytes of a piece as it lies."""
        return RAW_BYTES if self.tile.turned else 16

    @property
    def image_elements(self) -> int:
        """Values of the packed image."""
        problem = self.problem
        return packed_values(problem, "x" if self.forward else "y") if self.packs_image else 0

    @property
    def phases_in_turn(self) -> int:
        """Phases whose pixels follow each other in turn in a row of a contiguous result, or 1."""
        stride = self.problem.width.stride
        found = self.forward and self.contiguous and len(self.results[1]) == stride
        found = found and not self.is_float32
        return stride if found and stride <= MOST_IN_TURN else 1

    @property
    def tapped(self) -> tuple[int, ...]:
        """The phases of a row of y, all of which have pixels, that have taps too."""
        phases = self.problem.width.phases
        return tuple(phase for phase, _ in self.phases[1] if phases[phase].taps)

    @property
    def interleaved(self) -> bool:
        """Whether a tile has all phases of its columns, and writes their pixels together."""
        return self.phases_in_turn > 1 and self.tile_results % self.phases_in_turn == 0

    @property
    def row_phases(self) -> int:
        """Phases that rows of a tile have in turn as they are written."""
        return self.phases_in_turn if self.interleaved else 1

    @property
    def column_sums(self) -> tuple[int, ...]:
        """Which of a row's sums each of its phases has, in the order of columns; -1 if none."""
        found = {view.first: phase for phase, view in self.phases[1]}
        return tuple(
            self.tapped.index(found[x]) if found[x] in self.tapped else -1
            for x in range(self.row_phases)
        )

    @property
    def adjacent(self) -> bool:
        """Whether what a tile has of a row is adjacent in a contiguous result."""
        return not self.forward or self.problem.width.stride == 1 or self.interleaved

    @property
    def neighbours(self) -> int:
        """Values of a contiguous result that are written at a time, if its rows have no gaps.

        The kernel finds the length of its vectors itself, from addresses and strides.
        """
        made = self.problem.width
        width = made.output_size if self.forward else made.size
        if not (self.contiguous and self.adjacent) or self.unfolds:
            return 1
        return math.gcd(2 if self.is_float32 else 8, width)

    @functools.cached_property
    def granule(self) -> int:
        """What rows of a box, and of a patch, are a multiple of: vectors do not cross them."""
        if self.tile.raw:
            return 8
        return self.neighbours // math.gcd(self.neighbours, self.row_phases)

    @property
    def vector(self) -> int:
        """Channels that a thread writes at a time."""
        if self.contiguous or self.unfolds:
            return 1
        return math.gcd(2 if self.is_float32 else 8, self.rows)


def packs(problem: Problem, channels: int, layout: str) -> bool:
    """Whether an image is packed: no tensor map can describe it. `channels` are of a group."""
    lines = channels % chunk_values(problem) == 0 and problem.pattern.source_aligned
    return is_strict(problem) or layout == "contiguous" or not lines


def is_strict(problem: Problem) -> bool:
    """Whether values of float32 are not rounded to TF32."""
    return problem.dtype == "float32" and problem.math == "ieee"


def value_parts(problem: Problem) -> int:
    """As how many values one is multiplied (`common/split.cuh`)."""
    return 3 if is_strict(problem) else 1


def part_products(problem: Problem) -> int:
    """Products of the parts of two values that make one of them."""
    return 6 if is_strict(problem) else 1


def operand_bytes(problem: Problem) -> int:
    """Bytes of each of them."""
    return 2 if is_strict(problem) else ITEM_BYTES[problem.dtype]


def chunk_values(problem: Problem) -> int:
    """Values of 16 bytes, as they are multiplied."""
    return 16 // operand_bytes(problem)


def line_bytes(pixels: int, item: int) -> int:
    """Bytes from a line of a packed image to the next: whole vectors of 16 bytes."""
    return -(-item * pixels // 16) * 16


def packed_size(problem: Problem, operand: Operand) -> tuple[int, int]:
    """Rows and columns of a packed image: of y those that taps read."""
    y, x = problem.height, problem.width
    if operand == "x":
        return y.size, x.size
    # One where there is none, as tensor maps have no empty dimensions.
    return max(1, read_before(y, y.output_size)), max(1, read_before(x, x.output_size))


def packed_values(problem: Problem, operand: Operand) -> int:
    """Values of a packed image: the pixels of each group, or of each part of it, on 16 bytes."""
    groups, chunk = problem.groups * value_parts(problem), chunk_values(problem)
    channels = problem.in_channels if operand == "x" else problem.out_channels
    pixels = problem.batch * math.prod(packed_size(problem, operand))
    return pixels * groups * (-(-channels // (chunk * problem.groups)) * chunk)


def packing_bytes(problem: Problem, operand: Operand) -> float:
    """Bytes that packing an image moves. Columns that no tap reads share sectors with others."""
    width = problem.width.size if operand == "x" else problem.width.output_size
    moved = 1 + width / packed_size(problem, operand)[1]
    return operand_bytes(problem) * packed_values(problem, operand) * moved


def unread_bytes(problem: Problem, *, columns: bool) -> int:
    """Bytes of y in rows that no tap reads; with `columns` those in such columns too."""
    batch, channels, height, width = problem.y_shape
    rows, of_row = packed_size(problem, "y")
    unread = height * width - rows * (of_row if columns else width)
    return ITEM_BYTES[problem.dtype] * batch * channels * unread


def read_pixels(
    problem: Problem, operand: Operand, prefix: str
) -> tuple[tuple[str, Constant], ...]:
    """Which rows and columns are packed, as <engine/pack_image.cuh> takes them."""
    axes = (problem.height, problem.width)
    found: list[tuple[str, Constant]] = []
    for name, axis in zip(("rows", "columns"), axes, strict=True):
        phases = read_phases(axis) if operand == "y" else (0,)
        stride = axis.stride if operand == "y" and len(phases) < axis.stride else 1
        found += [
            (f"{prefix}_{name}_stride", stride),
            (f"{prefix}_{name}_cut", axis.padding % stride),
            (f"{prefix}_{name}", phases if stride > 1 else (0,)),
        ]
    return tuple(found)


def image_pack_grid(values: int) -> int:
    """Blocks of a packing of images with so many packed values."""
    return -(-values // (PACK_THREADS * THREAD_VALUES))


_HOPPER = Target.named("sm_90a")


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    return Layout(fold.folded(problem) if tile.folded else problem, tile, problem)


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    return hopper_why_not(target) or of_16_bits_why_not(problem)


def images_why_not(problem: Problem, target: Target) -> str | None:
    """The same, of what makes an image: float32 is served too, but for some."""
    if problem.dtype != "float32":
        return why_not(problem, target)
    return hopper_why_not(target) or _float32_why_not(problem) or _phases_why_not(problem)


def _float32_why_not(problem: Problem) -> str | None:
    if problem.direction == "forward" and problem.y_layout == "contiguous":
        return "makes no contiguous float32 output"
    return None


def hopper_why_not(target: Target) -> str | None:
    """One sentence if it is no Hopper GPU, else None."""
    if target.arch != "sm_90a":
        return f"needs the tensor cores of sm_90a, the target is {target.arch}"
    return None


def of_16_bits_why_not(problem: Problem) -> str | None:
    """The same, of what all kernels of 16-bit tensors ask for, whatever the target."""
    if problem.dtype not in ("float16", "bfloat16"):
        return f"multiplies 16-bit values, not {problem.dtype}"
    return _phases_why_not(problem)


def _phases_why_not(problem: Problem) -> str | None:
    strides = (problem.height.stride, problem.width.stride)
    if strides[0] * strides[1] > MOST_PHASES:
        return f"lists {MOST_PHASES} phases, the stride is {strides[0]}x{strides[1]}"
    return family.coordinates_why_not(problem)


def _raw_why_not(laid: Layout) -> str | None:
    axis = laid.problem.width
    if laid.read_layout != "contiguous" or not laid.contiguous:
        return f"reads and makes contiguous images, these are {laid.read_layout}"
    if laid.flat and laid.forward:
        # By flat maps, it took 1.4 to 2.2 times the best other tile (docs/history/engine.md).
        return "reads images of rows on multiples of 16 bytes, those that it reads are not"
    if laid.flat and (reason := flat.why_not(laid.problem, "y")):
        return reason
    if axis.stride > (most := RAW_MADE_STRIDE if laid.forward else RAW_READ_STRIDE):
        return f"has {most} phases of a row at most, the stride is {axis.stride}"
    if laid.forward and axis.stride == 1:
        return "makes rows of several phases, there is one"
    if laid.forward and len(laid.results[1]) < axis.stride:
        return "makes all phases of a row, some have no pixel"
    most = RAW_TAPS if laid.tile.columns < 256 else WIDE_RAW_TAPS
    if laid.strict and laid.tile.columns > 64:
        most = STRICT_RAW_TAPS
    if axis.kernel > most:
        return f"has {most} taps of a row in registers, there are {axis.kernel}"
    return None


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    if tile.folded and (reason := fold.why_not(problem)):
        return reason
    forward = problem.direction == "forward"
    of_16_bits = tile.turned or tile.paired or ((tile.raw or tile.folded) and forward)
    if problem.dtype == "float32" and of_16_bits:
        return "takes values of 16 bits"
    laid = layout(problem, tile)
    if tile in FLOAT32_TILES and not laid.is_float32:
        return "takes float32"
    if laid.strict and (tile.folded or not tile.positions_are_rows):
        return "has full float32 in tiles whose rows are positions, of images not folded"
    if laid.strict and tile.columns > STRICT_COLUMNS:
        return f"has {STRICT_COLUMNS} positions of a consumer in full float32, not {tile.columns}"
    if tile.paired and laid.phases_in_turn != 2:
        return "pairs the pixels of two phases in x of a contiguous result, there are no such two"
    if tile.turned and laid.read_layout != "contiguous":
        return f"turns contiguous images, what it reads is {laid.read_layout}"
    if tile.turned and not problem.pattern.source_aligned:
        return "turns images of rows on multiples of 16 bytes, those that it reads are not"
    if tile.raw and (reason := _raw_why_not(laid)):
        return reason
    if laid.map_count > MOST_SOURCES:
        return f"has {MOST_SOURCES} tensor maps, there are {laid.map_count} phases to read"
    numbers = len(laid.stages) * laid.tile_sums
    if numbers > laid.line_bytes:
        return f"numbers {laid.line_bytes} stages and results, there are {numbers}"
    if tile.positions_are_rows and laid.group_rows // 2 > laid.most_sums:
        return f"has {laid.most_sums} sums of 64 positions at most, not {laid.group_rows // 2}"
    if tile.reach != "tap" and not tile.raw and laid.reach == (0, 0):
        return "all taps have the same distance: nothing is gained by stages of several"
    if laid.box == (0, 0, 0):
        return f"{laid.positions} positions and the reach {laid.reach} do not fit a tensor copy"
    if laid.rings(target)[0] < 2:
        return f"two stages of {laid.stage_bytes} bytes do not fit {target.arch} beside the weights"
    if tile.shared and laid.chunks < 2:
        return f"shares chunks of {laid.depth} channels between blocks, there is one"
    if tile.shared and laid.tiles >= target.multiprocessors:
        return f"shares tiles between blocks where there are fewer than SMs, there are {laid.tiles}"
    if laid.tiles > family.MAX_GRID:
        return f"{laid.tiles} tiles are over 32 bits"
    return None
