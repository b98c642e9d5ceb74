"""The geometry of a tile of `sm90_weight_gradient` over a problem.

Position i of x and position i + d of a phase of y meet at a tap of distance d (`engine/layout.py`,
where they are those of the input gradient). A tile that reads contiguous images as they lie
has whole rows of y: its sources are phases of rows, and taps are pixels apart along x.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from tconv.jit.target import Target
from tconv.kernels import family, flat, hopper
from tconv.kernels.engine import fold
from tconv.kernels.engine.layout import (
    MOST_BOX,
    MOST_SOURCES,
    View,
    is_strict,
    line_bytes,
    operand_bytes,
    packed_values,
    packing_bytes,
    packs,
    part_products,
    phase_view,
    value_parts,
)
from tconv.kernels.launch import Operand
from tconv.kernels.sm90_weight_gradient.tiles import CONSUMERS, FLOAT32_TILES, Tile
from tconv.problem import ITEM_BYTES, Problem

LINE_BYTES = 128
STEP_BYTES = 32
"""Of positions of a product, of one channel."""
IN_BLOCK = 64
OUT_BLOCK = 64
MOST_TAPS = 12
"""Most taps of a consumer. With 13, boxes of 128 positions spill."""

RAW_REGISTERS = {2: (160, 208), 3: (116, 116)}
"""Sums and operands of a raw tile's products, at most: of one step, and of several at a time.

By consumers.
"""

FLOAT32_REGISTERS = 48
"""So many fewer of several steps of float32: with 24, one of three taps spilled."""

STRICT_STEPS = 2
"""Products of a tap of strict float32 whose operands a consumer loads at a time, in three parts."""

STRICT_SUMS = 128
"""Sums of a thread in strict float32, at most, beside the temporary ones of a tap."""

STRICT_RAW_SUMS = 160
"""Those of a raw tile, with two temporary ones of a tap."""

RAW_START = 12
"""Cycles of a product whose operand is in registers, beside a half for each column."""

GRADIENT_BYTES = 96 << 10
"""Of a block's gradient in shared memory, at most."""

LINE_CYCLES = 3
"""Those of a copied line, about."""

COPY_RATE = 40
SHARED_RATE = 128
BOX_CYCLES = 200
"""Bytes of a cycle that are copied, and that shared memory moves; cycles of a box beside, about."""

PART_POSITIONS = 4096
"""Those whose float32 products are summed before the sums are added to what a block has in memory.

A tensor core cuts a sum after each 8 of them, by half a unit in the last place on the average.
"""

MOST_STAGES = 8
MOST_SPLITS = 1024
MOST_PARTIAL_BYTES = 256 << 20


IMAGES: tuple[Operand, Operand] = ("x", "y")


class Tap(NamedTuple):
    """A tap: its source, its distance from the source's patch in y and x, its weight's index."""

    source: int
    y: int
    x: int
    weight: int


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
    def item(self) -> int:
        """Bytes of a value as it is multiplied."""
        return operand_bytes(self.problem)

    @property
    def strict(self) -> bool:
        """Whether a value of float32 is multiplied as three of bfloat16, not rounded to TF32."""
        return is_strict(self.problem)

    @property
    def pixel(self) -> int:
        """Bytes of a value of y in a stage: raw tiles have it as it lies."""
        return ITEM_BYTES[self.problem.dtype] if self.tile.columns else self.item

    @property
    def octet(self) -> int:
        """Values of y of 16 bytes: 8, or 4 of float32."""
        return 16 // self.pixel

    @property
    def step(self) -> int:
        """Positions of a product."""
        return STEP_BYTES // self.item

    @property
    def line(self) -> float:
        """What takes as long to copy as a line of y, in lines of 128 bytes."""
        return max(1.0, self.pixel * self.problem.width.stride * self.tile.columns / LINE_BYTES)

    @functools.cached_property
    def _found(self) -> tuple[tuple[tuple[View, View], ...], tuple[Tap, ...]]:
        """The phases of y that any tap reads, and the taps, by phase."""
        problem = self.problem
        height, width = problem.height, problem.width
        sources: list[tuple[View, View]] = []
        taps: list[Tap] = []
        if self.tile.columns:
            for view, of_view in self._raw_views:
                for rows in of_view:
                    # Of a product's columns, the last are those of the nearest row of x.
                    y = min(rows)
                    for first in range(0, width.kernel, self.row_taps):
                        for x in range(first, first + self.row_taps):
                            at = y, x * width.dilation - width.padding
                            for i in reversed(range(self.stacked)):
                                row = rows.get(y + i, -1) if x < width.kernel else -1
                                weight = row * width.kernel + x if row >= 0 else -1
                                taps.append(Tap(len(sources), *at, weight))
                sources.append((view, View(0, 0, width.output_size)))
            return tuple(sources), tuple(taps)
        for phase_y in range(height.stride):
            for phase_x in range(width.stride):
                views = phase_view(height, phase_y), phase_view(width, phase_x)
                found = [
                    Tap(
                        len(sources),
                        tap_y.shift - views[0].q,
                        tap_x.shift - views[1].q,
                        tap_y.index * width.kernel + tap_x.index,
                    )
                    for tap_y in height.phases[phase_y].taps
                    for tap_x in width.phases[phase_x].taps
                ]
                if found and all(view.size > 0 for view in views):
                    sources.append(views)
                    taps += sorted(found)
        return tuple(sources), tuple(taps)

    @functools.cached_property
    def _raw_views(self) -> tuple[tuple[View, tuple[dict[int, int], ...]], ...]:
        """Phases of y's rows, and rows of the kernel by distance: each alone, or a phase's."""
        height = self.problem.height
        found = []
        for phase in height.phases:
            view = phase_view(height, phase.index)
            if phase.taps and view.size > 0:
                taps = sorted((tap.shift - view.q, tap.index) for tap in phase.taps)
                rows = (dict(taps),) if self.tile.stacked else tuple({y: i} for y, i in taps)
                found.append((view, rows))
        return tuple(found)

    @functools.cached_property
    def stacked(self) -> int:
        """Rows of x that are columns of a product."""
        rows = [of for _, of_view in self._raw_views for of in of_view] if self.tile.columns else []
        return max((max(of) - min(of) + 1 for of in rows), default=1)

    @functools.cached_property
    def _raw_blocks(self) -> tuple[int, int]:
        """Input channels of a block, and taps of a taker in a row.

        Those of the fewest cycles of a step's products, or copied lines, of all sets. Blocks of
        over 64 channels are few, for more splits, whose sums are added: only where rows of x are
        columns too, so that copies are worth it.
        """
        width, channels = self.problem.width.kernel, self.problem.in_channels_per_group
        rows = sum(len(of_view) for _, of_view in self._raw_views)
        most = RAW_REGISTERS[self.tile.consumers][0]
        best = (math.inf, 0, 8, width)
        wide = self.tile.stacked or self.item == 4
        most_channels = IN_BLOCK * (2 if wide else 1)
        # Lines of y for one of x: of float32 they are long, and read for a row of taps each.
        y_lines = self.out_block * (min(self.takers, rows) * self.line if self.item == 4 else 1)
        for widest in range(8, most_channels + 1, 8):
            blocks = -(-channels // widest)
            block = -(-channels // (8 * blocks)) * 8
            sums = block * self.stacked // 2
            for taps in range(1, width + 1):
                of_set = min(self.call.taps, self.takers * taps * self.stacked)
                fits = taps * sums <= self.tile.sums and taps * (sums + 4) <= most and sums <= 128
                if self.strict:
                    fits = (taps + 2) * sums <= STRICT_RAW_SUMS
                gradient = 2 * block * (of_set * self.out_block + 72)
                if fits and (self.item == 4 or gradient <= GRADIENT_BYTES):
                    sets = -(-rows * -(-width // taps) // self.takers)
                    products = self.tile.consumers * taps * (sums + RAW_START)
                    lines = (block + y_lines) * self.step / self.tile.columns
                    all_sets = blocks * sets
                    cycles = all_sets * max(products, LINE_CYCLES * lines)
                    best = min(best, (cycles, all_sets, block, taps))
        return best[2:]

    @functools.cached_property
    def _turned_blocks(self) -> tuple[int, int]:
        """Input channels of a turned tile's block, and taps of a taker.

        Those of the fewest cycles of a box, of all sets.
        """
        pattern, channels = self.call.pattern, self.problem.in_channels_per_group
        if pattern is not self.call:
            return layout(pattern, self.tile)._turned_blocks
        count, most = len(self.taps), RAW_REGISTERS[self.tile.consumers][0]
        best = (math.inf, 0, 8, 1)
        for widest in range(8, 2 * IN_BLOCK + 1, 8):
            blocks = -(-channels // widest)
            block = -(-channels // (8 * blocks)) * 8
            for at_most in range(1, min(MOST_TAPS, max(1, count)) + 1):
                sets = -(-max(1, count) // (self.takers * at_most))
                taps = -(-max(1, count) // (self.takers * sets))
                if taps * block // 2 > self.tile.sums or taps * (block // 2 + 4) > most:
                    continue
                size = self.takers * taps
                of_sets = (self.taps[i : i + size] for i in range(0, count, size))
                sources = max((some[-1].source - some[0].source + 1 for some in of_sets), default=1)
                copied = self._turned_x_bytes(block) + sources * self.patch_stride
                stage = copied + self.item * self.tile.positions * block
                if 2 * stage > hopper.TARGET.shared_per_block - 2048:
                    continue
                products = self.tile.positions // self.step * taps * (block // 2 + RAW_START)
                moved = self._turned_moved(block, taps, copied)
                cycles = max(
                    self.tile.consumers * products, copied / COPY_RATE, moved / SHARED_RATE
                )
                cycles += BOX_CYCLES
                best = min(best, (blocks * sets * cycles, blocks * sets, block, taps))
        return best[2:]

    def _turned_moved(self, block: int, taps: int, copied: int) -> int:
        """Bytes of shared memory that a box reads and writes: copies, turning, and operands.

        A product reads its columns of x there, and 64 rows of y on their way to registers.
        """
        of_x = self.item * self.tile.positions * block
        products = self.tile.consumers * taps * self.tile.positions // self.step
        return copied + 2 * of_x + products * STEP_BYTES * (block + 64)

    @property
    def moved_bytes(self) -> int:
        """The same of this tile, if it is turned."""
        return self._turned_moved(self.in_block, self.row_taps, self.copied_bytes)

    def _turned_x_bytes(self, block: int) -> int:
        """Bytes of x as it is copied: lines of 32 channels."""
        return -(-block * self.item // LINE_BYTES) * LINE_BYTES * self.tile.positions

    @property
    def row_taps(self) -> int:
        """Taps of a taker whose operands are in registers: of a raw tile those of a row."""
        if self.tile.turned:
            return self._turned_blocks[1]
        return self._raw_blocks[1] if self.tile.columns else 1

    @property
    def sources(self) -> tuple[tuple[View, View], ...]:
        """Phases of y: height and width."""
        return self._found[0]

    @functools.cached_property
    def origins(self) -> tuple[tuple[int, int], ...]:
        """The least distances of each source, where its patch begins: raw, at an octet."""
        every, octet = self._found[1], self.octet if self.tile.columns else 1
        return tuple(
            (
                min(tap.y for tap in every if tap.source == source),
                min(tap.x for tap in every if tap.source == source) // octet * octet,
            )
            for source in range(len(self.sources))
        )

    @functools.cached_property
    def taps(self) -> tuple[Tap, ...]:
        """The taps, by source; distances from where its patch begins."""
        return tuple(
            Tap(tap.source, tap.y - origin[0], tap.x - origin[1], tap.weight)
            for tap in self._found[1]
            for origin in (self.origins[tap.source],)
        )

    @property
    def reach(self) -> tuple[int, int]:
        """How far taps reach beyond a box, in y and x."""
        taps = self.taps
        return max((tap.y for tap in taps), default=0), max((tap.x for tap in taps), default=0)

    @property
    def out_block(self) -> int:
        """Output channels of a block."""
        channels = self.problem.out_channels_per_group
        if self.tile.y_in_registers:  # warps' rows: 16 channels
            return 16 if channels <= 16 else 32 if channels <= 32 else OUT_BLOCK
        blocks = -(-channels // OUT_BLOCK)
        return -(-channels // (8 * blocks)) * 8

    @property
    def in_block(self) -> int:
        """Input channels of a block."""
        if self.tile.turned:
            return self._turned_blocks[0]
        return self._raw_blocks[0] if self.tile.columns else IN_BLOCK

    @property
    def takers(self) -> int:
        """Sets of taps are shared out among so many: the consumers.

        Where y is in registers, their warps of the same channels.
        """
        consumers, in_registers = self.tile.consumers, self.tile.y_in_registers
        return consumers * OUT_BLOCK // self.out_block if in_registers else consumers

    @property
    def steps(self) -> int:
        """Products of a tap whose operands a consumer loads at a time."""
        return self._most_steps // self.buffers

    @functools.cached_property
    def _most_steps(self) -> int:
        """Products of a tap whose operands a consumer has registers for."""
        steps = self.tile.positions // self.step
        if self.strict:
            return STRICT_STEPS
        if not self.tile.y_in_registers:
            return steps
        most = RAW_REGISTERS[self.tile.consumers][1] - self.consumer_taps * self.in_block // 2
        most -= FLOAT32_REGISTERS if self.item == 4 else 0
        # A stride takes registers for words, as many as a tap.
        words = self.problem.width.stride - 1 if self.tile.columns else 0
        room = most // (4 * (self.row_taps + words))
        room = max(1, min(room, 4 if self.item == 4 else 16 // self.tile.consumers))
        return max(k for k in range(1, steps + 1) if steps % k == 0 and k <= room)

    @property
    def buffers(self) -> int:
        """Times that a consumer has registers for y: with two, it loads while products run.

        A stage is then handed back later. Turned tiles of large stages have few of them, and gained
        nothing by it.
        """
        if self.item == 2 or self._most_steps == 1:
            return 1
        lines = self.patch_lines * max(map(len, self.set_sources))  # of y, of a position
        return 1 if self.tile.turned and (self.in_block > 64 or lines > 3) else 2

    @functools.cached_property
    def consumer_taps(self) -> int:
        """Most taps of a taker: as many as there are registers for, evenly shared out.

        Of raw tiles, those of neighbouring columns of the kernel.
        Fewer, if a stage would otherwise have patches of too many sources to fit twice.
        """
        pattern, count = self.call.pattern, len(self.taps)
        if self.tile.y_in_registers:
            return self.row_taps * self.stacked
        if pattern is not self.call:
            return layout(pattern, self.tile).consumer_taps
        sums = min(self.tile.sums, STRICT_SUMS) if self.strict else self.tile.sums
        most = max(1, min(MOST_TAPS, sums // (self.out_block // 2)))
        for sets in range(max(1, -(-count // (CONSUMERS * most))), count + 1):
            taps = -(-count // (CONSUMERS * sets))
            of_set = (
                self.taps[i : i + CONSUMERS * taps] for i in range(0, count, CONSUMERS * taps)
            )
            sources = max(some[-1].source - some[0].source + 1 for some in of_set)
            stage = self.x_bytes + sources * self.patch_stride
            if 2 * stage <= hopper.TARGET.shared_per_block - 2048:
                return taps
        return 1

    @functools.cached_property
    def set_taps(self) -> tuple[int, ...]:
        """The first tap of each taker of each set, and the end."""
        count, most = len(self.taps), self.consumer_taps
        begins = range(0, count + most, most)
        takers = self.takers
        sets = max(1, -(-count // (takers * most)))
        return tuple(min(count, most * i) for i in range(takers * sets + 1)) if begins else (0,)

    @property
    def sets(self) -> int:
        """Sets of taps: a block has one."""
        return (len(self.set_taps) - 1) // self.takers

    @functools.cached_property
    def set_sources(self) -> tuple[range, ...]:
        """The sources that each set needs."""
        found = []
        for number in range(self.sets):
            first = self.set_taps[self.takers * number]
            end = self.set_taps[self.takers * (number + 1)]
            of_set = [tap.source for tap in self.taps[first:end]] or [0]
            found.append(range(min(of_set), max(of_set) + 1))
        return tuple(found)

    @functools.cached_property
    def set_weights(self) -> tuple[tuple[int, ...], ...]:
        """The weights' indices of each set's taps, in the order of the weight."""
        begins = self.set_taps[:: self.takers]
        return tuple(
            tuple(sorted(tap.weight for tap in self.taps[first:end] if tap.weight >= 0))
            for first, end in itertools.pairwise(begins)
        )

    @property
    def set_places(self) -> tuple[tuple[int, ...], ...]:
        """For each set's taps, their places among `set_weights`."""
        begins = self.set_taps[:: self.takers]
        return tuple(
            tuple(
                weights.index(tap.weight) if tap.weight >= 0 else -1 for tap in self.taps[first:end]
            )
            for weights, (first, end) in zip(
                self.set_weights, itertools.pairwise(begins), strict=True
            )
        )

    @property
    def places_pair(self) -> bool:
        """Whether places 0 and 1 of a set, 2 and 3, and so on are neighbours in each weight."""
        return self.sets == 1 or all(
            len(weights) % 2 == 0
            and all(
                a % 2 == 0 and b == a + 1 for a, b in zip(weights[::2], weights[1::2], strict=True)
            )
            for weights in self.set_weights
        )

    @functools.cached_property
    def packs_lines(self) -> tuple[bool, bool]:
        """Whether x and y are packed as lines (`sm90_pack_lines`): float32 that no map describes.

        And a folded y, and x of strict float32, whose values are three each.
        """
        pattern = self.call.pattern
        if not self.tile.columns or self.problem.dtype != "float32":
            return False, False
        mapped = pattern.y_mapped or _flat_why_not(layout(pattern, self.tile)) is None
        return self.strict or not pattern.x_mapped, self.tile.folded or not mapped

    @property
    def flat(self) -> bool:
        """Whether y has a flat map (`kernels/flat.py`)."""
        return self.tile.columns > 0 and not (self.call.pattern.y_mapped or self.packs_lines[1])

    @property
    def shifts(self) -> range:
        """How many pixels a line of y may be off by."""
        if not self.flat:
            return range(1)
        return range(0, self.octet, 2 - self.call.pattern.width.output_size % 2)

    @property
    def swizzled(self) -> bool:
        """Whether lines of y are swizzled: each octet of positions has pixels of its own."""
        stride = self.problem.width.stride
        line = self.pixel * stride * self.tile.columns
        whole = self.reach[1] < stride and line == LINE_BYTES
        return whole and not self.flat

    @property
    def maps_x(self) -> bool:
        """Whether x is copied as lines of pixels, by a tensor map."""
        mapped = self.call.pattern.x_mapped or self.packs_lines[0]
        return mapped and not self.tile.turned and (self.tile.columns > 0 or not self.strict)

    @functools.cached_property
    def box(self) -> tuple[int, int, int]:
        """Images, rows and columns of a box: the one of which the fewest are needed.

        Of those the one of the fewest positions of y. Copies of short lines are slow: by a guess, a
        line of an x that is contiguous takes a quarter of the time of a position of y.
        """
        positions = self.tile.positions
        best: tuple[tuple[int, int], tuple[int, int, int]] | None = None
        x = 4 if self.tile.turned else 8
        last = min(positions, LINE_BYTES // 2) if self.maps_x else positions
        if self.tile.columns:
            x = last = self.tile.columns
        while x <= last:
            rows = positions // x
            for y in (1 << k for k in range(rows.bit_length())):
                n = rows // y
                # Positions of a product must not lie in two images.
                odd = x < self.step and y % 2 and not self.tile.columns
                high = (y + self.reach[0] + self.stacked - 1, x + self.reach[1], n)
                if not odd and max(high) <= MOST_BOX:
                    counts = self._counts((n, y, x))
                    lines = self.in_block * n * y if self.maps_x else 0
                    # Of 4 columns, positions of y that are loaded at a time may meet a bank twice.
                    of_y = math.prod(high) + lines // 4 + (x < 8)
                    rank = math.prod(counts), of_y
                    if self.tile.columns:
                        patches = max(map(len, self.set_sources)) * (y + self.reach[0])
                        lines = n * self.in_block * (y + self.stacked - 1)
                        lines += n * self.out_block * patches
                        rank = self._raw_cycles(rank[0], lines), lines
                    if best is None or rank < best[0]:
                        best = (rank, (n, y, x))
            x *= 2
        return (0, 0, 0) if best is None else best[1]

    def _raw_cycles(self, boxes: int, lines: int) -> int:
        """Cycles of boxes of so many lines, about."""
        of_tap = self.in_block * self.stacked // 2 + RAW_START
        products = self.tile.consumers * self.row_taps * self.tile.positions // self.step * of_tap
        products *= part_products(self.problem)
        return boxes * max(products, LINE_CYCLES * lines)

    def _counts(self, box: tuple[int, int, int]) -> tuple[int, int, int]:
        problem = self.problem
        sizes = (problem.batch, problem.height.size + self.stacked - 1, problem.width.size)
        found = tuple(-(-size // part) for size, part in zip(sizes, box, strict=True))
        return found[0], found[1], found[2]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Boxes along images, rows and columns."""
        return self._counts(self.box)

    @property
    def boxes(self) -> int:
        """All boxes."""
        return math.prod(self.counts)

    @property
    def pitch(self) -> tuple[int, int]:
        """Rows of an image, and positions of a row, of a patch of y.

        Raw, pixels of a line: an odd number of octets, or a swizzle's.
        """
        rows, columns = self.box[1] + self.reach[0], self.box[2] + self.reach[1]
        if self.tile.columns:
            shift = max(self.shifts)
            last = self.problem.width.stride * (self.tile.columns - 1) + self.reach[1] + shift
            octets = last // self.octet + 1 | 1
            columns = LINE_BYTES // self.pixel if self.swizzled else octets * self.octet
        return rows, columns

    @property
    def patch_bytes(self) -> int:
        """Bytes of a patch of y, or of each of its parts."""
        pixels = self.box[0] * math.prod(self.pitch)
        return pixels * (self.pixel * self.out_block if self.tile.columns else LINE_BYTES)

    @property
    def patch_lines(self) -> int:
        """Parts of a patch: of turned tiles those of a line's channels, of strict float32 three."""
        if self.strict and not self.tile.columns:
            return value_parts(self.problem)
        return -(-self.out_block * self.item // LINE_BYTES) if self.tile.turned else 1

    @property
    def line_stride(self) -> int:
        """Bytes from one part of a patch to the next: swizzles begin on 1024."""
        return -(-self.patch_bytes // 1024) * 1024

    @property
    def patch_stride(self) -> int:
        """Bytes from one patch of a stage to the next."""
        return self.patch_lines * self.line_stride

    @property
    def x_bytes(self) -> int:
        """Bytes of x in a stage, as they are copied."""
        if self.tile.turned:
            return self._turned_x_bytes(self.in_block)
        rows = self.box[0] * (self.stacked - 1) * self.box[2]
        values = (self.tile.positions + rows) * self.in_block
        return value_parts(self.problem) * self.item * values

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        patches = max(map(len, self.set_sources)) * self.patch_stride
        turned = self.item * self.tile.positions * self.in_block if self.tile.turned else 0
        return -(-self.x_bytes // 1024) * 1024 + patches + turned

    @property
    def copied_bytes(self) -> int:
        """Bytes of a stage that are copied, with gaps."""
        turned = self.item * self.tile.positions * self.in_block if self.tile.turned else 0
        return self.stage_bytes - turned

    def stages(self, target: Target) -> int:
        """Stages that fit."""
        return min(MOST_STAGES, (target.shared_per_block - 2048) // self.stage_bytes)

    @functools.cached_property
    def packed(self) -> tuple[int | None, int | None, int]:
        """Where x and y lie in the workspace, None where they are read as they are, and its end.

        In bytes.
        """
        problem, end = self.problem, 0
        found: list[int | None] = []
        if self.tile.columns:
            for operand, is_packed in zip(IMAGES, self.packs_lines, strict=True):
                found.append(end if is_packed else None)
                end += self.lines_bytes(operand) if is_packed else 0
            return found[0], found[1], end
        sides: tuple[tuple[Operand, int, str, bool], ...] = (
            ("x", problem.in_channels_per_group, problem.x_layout, False),
            ("y", problem.out_channels_per_group, problem.y_layout, self.tile.folded),
        )
        for operand, channels, of_image, folds in sides:
            mapped = self.maps_x if operand == "x" else False
            is_packed = folds or (not mapped and packs(problem, channels, of_image))
            found.append(end if is_packed else None)
            end += self.item * packed_values(problem, operand) if is_packed else 0
        return found[0], found[1], end

    def lines_bytes(self, operand: Operand) -> int:
        """Bytes of an image that is packed as lines."""
        shape = self.problem.x_shape if operand == "x" else self.problem.y_shape
        if operand == "y":
            return math.prod(shape[:3]) * line_bytes(shape[3], self.pixel)
        parts = value_parts(self.problem)
        return parts * math.prod(shape[:3]) * line_bytes(shape[3], self.item)

    def packing_bytes(self, operand: Operand) -> float:
        """Bytes that packing an image moves."""
        if not self.tile.columns:
            return packing_bytes(self.problem, operand)
        shape = self.call.x_shape if operand == "x" else self.call.y_shape
        return self.lines_bytes(operand) + self.pixel * math.prod(shape)

    @property
    def units(self) -> int:
        """Blocks of a split."""
        problem = self.problem
        in_blocks = -(-problem.in_channels_per_group // self.in_block)
        out_blocks = -(-problem.out_channels_per_group // self.out_block)
        return problem.groups * in_blocks * out_blocks * self.sets

    def most_splits(self, target: Target) -> int:
        """Shares of the boxes: as many as give each SM a block."""
        weight_bytes = 4 * math.prod(self.problem.w_shape)
        wanted = max(1, target.multiprocessors // self.units)
        most = min(MOST_SPLITS, self.boxes, max(1, MOST_PARTIAL_BYTES // weight_bytes))
        # As many boxes for each, but for the last.
        return -(-self.boxes // -(-self.boxes // min(wanted, most)))

    def writes_gradient(self, splits: int) -> bool:
        """Whether the kernel rounds its sums and writes the gradient, as nothing is to be added.

        Not where phases are channels: their lines have weights all over the gradient.
        """
        return splits == 1 and not self.tile.folded and self.problem.dtype != "float32"

    @property
    def part_boxes(self) -> int:
        """Boxes whose float32 sums are left to the tensor cores, which cut them, at most."""
        return max(1, PART_POSITIONS // self.tile.positions)


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    return Layout(fold.folded(problem) if tile.folded else problem, tile, problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    if tile.folded and (reason := fold.why_not(problem)):
        return reason
    laid = layout(problem, tile)
    if laid.strict and (tile.stacked or tile.folded or tile.turned or tile.consumers > CONSUMERS):
        return "has full float32 neither stacked, turned nor folded, and of two consumers alone"
    line = laid.item * tile.columns
    if laid.item == 4 and (not tile.y_in_registers or tile.consumers > CONSUMERS):
        return "takes values of 16 bits"
    if line and line not in (32, 64, 128):
        return f"reads lines of 32, 64 or 128 bytes, {tile.columns} positions have {line}"
    if problem.dtype != "float32" and tile in FLOAT32_TILES:
        return "reads lines of float32"
    if tile.columns and (reason := _raw_why_not(laid)):
        return reason
    if sum(tap.weight >= 0 for tap in Layout(problem, tile, problem).taps) < problem.taps:
        return "some taps meet no output, and their gradient of zero is written by nobody"
    if len(laid.sources) > MOST_SOURCES:
        return f"has {MOST_SOURCES} tensor maps, there are {len(laid.sources)} phases to read"
    if laid.box == (0, 0, 0):
        return f"{tile.positions} positions and the reach {laid.reach} do not fit a tensor copy"
    if laid.stages(target) < 2:
        return f"two stages of {laid.stage_bytes} bytes do not fit {target.arch}"
    if laid.units * laid.most_splits(target) > family.MAX_GRID:
        return f"{laid.units} blocks of a split are over 32 bits"
    return None


def _raw_why_not(laid: Layout) -> str | None:
    """The same, of what reads contiguous images as they lie."""
    width, tile = laid.problem.width, laid.tile
    if not laid.maps_x:
        return "reads a contiguous x of rows on multiples of 16 bytes, this is none"
    if laid.flat and (reason := _flat_why_not(laid)):
        return reason
    if width.stride > 2 and laid.pixel == 2:
        return f"takes one pixel of y or every second one, the stride along x is {width.stride}"
    if laid.tile.stacked and laid.stacked == 1:
        return "multiplies rows of x at once, each tap has a row of its own"
    most = RAW_REGISTERS[tile.consumers][0]
    found = laid.row_taps * (laid.in_block * laid.stacked // 2 + 4)
    if not laid.strict and found > most:
        return f"has {most} registers for taps of a taker, these take {found}"
    if laid.pitch[1] > MOST_BOX:
        return f"copies lines of {MOST_BOX} pixels, {tile.columns} positions read {laid.pitch[1]}"
    return None


def _flat_why_not(laid: Layout) -> str | None:
    """The same, of a y that has a flat map."""
    width, columns = laid.problem.width, laid.tile.columns
    if laid.call.y_layout != "contiguous":
        return "reads contiguous images, y is none"
    odd = laid.call.pattern.width.output_size % 2 == 1
    if reason := flat.why_not(laid.call, "y", odd=odd):
        return reason
    if width.padding or width.size % columns:
        return f"has no zeros beside flat rows: x is {width.size}, its padding {width.padding}"
    if laid.out_block < 8 * flat.classes(laid.call, "y"):
        return f"copies 8 channels of a class or more, {laid.out_block} have fewer"
    return None
