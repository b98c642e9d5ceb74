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
from tconv.kernels import family, hopper
from tconv.kernels.engine import fold
from tconv.kernels.engine.layout import (
    MOST_BOX,
    MOST_SOURCES,
    View,
    packed_values,
    packs,
    phase_view,
)
from tconv.kernels.launch import Operand
from tconv.kernels.sm90_weight_gradient.tiles import CONSUMERS, Tile
from tconv.problem import Problem

LINE_BYTES = 128
LINE_PIXELS = 64
IN_BLOCK = 64
OUT_BLOCK = 64
MOST_TAPS = 16
"""Most taps of a consumer."""

RAW_REGISTERS = (160, 200)
"""Sums and operands of a raw tile's products, at most: of one step, and of several at a time."""

MOST_STAGES = 8
MOST_SPLITS = 1024
MOST_PARTIAL_BYTES = 256 << 20


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

    @functools.cached_property
    def _found(self) -> tuple[tuple[tuple[View, View], ...], tuple[Tap, ...]]:
        """The phases of y that any tap reads, and the taps, by phase."""
        problem = self.problem
        height, width = problem.height, problem.width
        sources: list[tuple[View, View]] = []
        taps: list[Tap] = []
        if self.tile.columns:
            for phase in height.phases:
                view = phase_view(height, phase.index)
                if phase.taps and view.size > 0:
                    for tap in sorted(phase.taps, key=lambda tap: tap.shift):
                        for x in range(width.kernel):
                            at = tap.shift - view.q, x * width.dilation - width.padding
                            taps.append(Tap(len(sources), *at, tap.index * width.kernel + x))
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

    @property
    def sources(self) -> tuple[tuple[View, View], ...]:
        """Phases of y: height and width."""
        return self._found[0]

    @functools.cached_property
    def origins(self) -> tuple[tuple[int, int], ...]:
        """The least distances of each source, where its patch begins: raw, at an octet."""
        every, octet = self._found[1], 8 if self.tile.columns else 1
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
        if self.tile.columns:  # warps' rows: 16 channels
            return 16 if channels <= 16 else 32 if channels <= 32 else OUT_BLOCK
        blocks = -(-channels // OUT_BLOCK)
        return -(-channels // (8 * blocks)) * 8

    @property
    def in_block(self) -> int:
        """Input channels of a block."""
        if not self.tile.columns:
            return IN_BLOCK
        channels = self.problem.in_channels_per_group
        taps = self.problem.width.kernel
        of_tap = min(self.tile.sums // taps, RAW_REGISTERS[0] // taps - 4)
        most = max(8, min(IN_BLOCK, 2 * of_tap // 8 * 8))
        blocks = -(-channels // most)
        return -(-channels // (8 * blocks)) * 8

    @property
    def takers(self) -> int:
        """Sets of taps are shared out among so many: the consumers.

        Of raw tiles, their warps of the same channels: each has a row of the kernel.
        """
        return CONSUMERS * OUT_BLOCK // self.out_block if self.tile.columns else CONSUMERS

    @property
    def steps(self) -> int:
        """Products of 16 positions, of a tap, whose operands a consumer has at a time."""
        steps = self.tile.positions // 16
        if not self.tile.columns:
            return steps
        taps = self.consumer_taps
        room = (RAW_REGISTERS[1] - taps * self.in_block // 2) // (4 * taps)
        return max(k for k in range(1, steps + 1) if steps % k == 0 and (k == 1 or k <= room))

    @functools.cached_property
    def consumer_taps(self) -> int:
        """Most taps of a taker: as many as there are registers for, evenly shared out.

        Of raw tiles, those of a row of the kernel.
        Fewer, if a stage would otherwise have patches of too many sources to fit twice.
        """
        pattern, count = self.call.pattern, len(self.taps)
        if self.tile.columns:
            return self.problem.width.kernel
        if pattern is not self.call:
            return layout(pattern, self.tile).consumer_taps
        most = max(1, min(MOST_TAPS, self.tile.sums // (self.out_block // 2)))
        for sets in range(max(1, -(-count // (CONSUMERS * most))), count + 1):
            taps = -(-count // (CONSUMERS * sets))
            of_set = (
                self.taps[i : i + CONSUMERS * taps] for i in range(0, count, CONSUMERS * taps)
            )
            sources = max(some[-1].source - some[0].source + 1 for some in of_set)
            stage = self.tile.positions * LINE_BYTES + sources * self.patch_stride
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
            tuple(sorted(tap.weight for tap in self.taps[first:end]))
            for first, end in itertools.pairwise(begins)
        )

    @property
    def set_places(self) -> tuple[tuple[int, ...], ...]:
        """For each set's taps, their places among `set_weights`."""
        begins = self.set_taps[:: self.takers]
        return tuple(
            tuple(weights.index(tap.weight) for tap in self.taps[first:end])
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

    @property
    def maps_x(self) -> bool:
        """Whether a contiguous x is copied as it lies, by a tensor map."""
        return self.call.pattern.x_mapped

    @functools.cached_property
    def box(self) -> tuple[int, int, int]:
        """Images, rows and columns of a box: the one of which the fewest are needed.

        Of those the one of the fewest positions of y. Copies of short lines are slow: by a guess, a
        line of an x that is contiguous takes a quarter of the time of a position of y.
        """
        positions = self.tile.positions
        best: tuple[tuple[int, int], tuple[int, int, int]] | None = None
        x = 8
        last = min(positions, LINE_BYTES // 2) if self.maps_x else positions
        if self.tile.columns:
            x = last = self.tile.columns
        while x <= last:
            rows = positions // x
            for y in (1 << k for k in range(rows.bit_length())):
                n = rows // y
                # Two groups of 8 must not lie in two images.
                odd = x == 8 and y % 2 and not self.tile.columns
                high = (y + self.reach[0], x + self.reach[1], n)
                if not odd and max(high) <= MOST_BOX:
                    counts = self._counts((n, y, x))
                    lines = self.in_block * n * y if self.maps_x else 0
                    rank = (math.prod(counts), math.prod(high) + lines // 4)
                    if best is None or rank < best[0]:
                        best = (rank, (n, y, x))
            x *= 2
        return (0, 0, 0) if best is None else best[1]

    def _counts(self, box: tuple[int, int, int]) -> tuple[int, int, int]:
        problem = self.problem
        sizes = (problem.batch, problem.height.size, problem.width.size)
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
        """Rows of an image, and positions of a row, of a patch of y: raw, octets of its pixels."""
        columns = self.box[2] + self.reach[1]
        if self.tile.columns:
            stride = self.problem.width.stride
            columns = (stride * (self.box[2] - 1) + self.reach[1]) // 8 * 8 + 8
        return self.box[1] + self.reach[0], columns

    @property
    def patch_bytes(self) -> int:
        """Bytes of a patch of y."""
        of_pixel = 2 * self.out_block if self.tile.columns else LINE_BYTES
        return self.box[0] * math.prod(self.pitch) * of_pixel

    @property
    def patch_stride(self) -> int:
        """Bytes from one patch of a stage to the next: swizzles begin on 1024."""
        if self.tile.columns:
            return self.box[0] * self.pitch[0] * self.out_block * LINE_BYTES
        return -(-self.patch_bytes // 1024) * 1024

    @property
    def x_bytes(self) -> int:
        """Bytes of x in a stage, with what is beside them."""
        return -(-2 * self.tile.positions * self.in_block // 1024) * 1024

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return self.x_bytes + max(map(len, self.set_sources)) * self.patch_stride

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
        sides: tuple[tuple[Operand, int, str, bool], ...] = (
            ("x", problem.in_channels_per_group, problem.x_layout, False),
            ("y", problem.out_channels_per_group, problem.y_layout, self.tile.folded),
        )
        for operand, channels, of_image, folds in sides:
            mapped = self.maps_x if operand == "x" else self.tile.columns > 0
            is_packed = folds or (not mapped and packs(problem, channels, of_image))
            found.append(end if is_packed else None)
            end += 2 * packed_values(problem, operand) if is_packed else 0
        return found[0], found[1], end

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
        return splits == 1 and not self.tile.folded


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    return Layout(fold.folded(problem) if tile.folded else problem, tile, problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    if tile.folded and (reason := fold.why_not(problem)):
        return reason
    laid = layout(problem, tile)
    if tile.columns and (reason := _raw_why_not(laid)):
        return reason
    if len(Layout(problem, tile, problem).taps) < problem.taps:
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
    pattern, width, tile = laid.call.pattern, laid.problem.width, laid.tile
    if not (pattern.x_mapped and pattern.y_mapped):
        return "reads contiguous images of rows on multiples of 16 bytes, x or y is none"
    if width.stride > 2:
        return f"takes one pixel of y or every second one, the stride along x is {width.stride}"
    if (found := width.kernel * (laid.in_block // 2 + 4)) > RAW_REGISTERS[0]:
        return f"has {RAW_REGISTERS[0]} registers for a row of the kernel, this takes {found}"
    last = width.stride * (tile.columns - 1) + laid.reach[1]
    if last >= LINE_PIXELS:
        return f"has lines of {LINE_PIXELS} pixels of y, {tile.columns} positions read {last + 1}"
    if tile.by_channel and laid.pitch[0] % 2 == 0:
        return f"lays an odd number of rows out by channels, to meet all banks, not {laid.pitch[0]}"
    return None
