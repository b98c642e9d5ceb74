"""The geometry of a tile of `sm90_tf32_forward` over a problem."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.sm90_tf32_forward.schedule import Pair, schedule
from tconv.kernels.sm90_tf32_forward.tiles import Tile
from tconv.problem import Axis, Problem

CONSUMERS = 2
WARP_ROWS = 16
WARPS = 4

CHANNELS = 8
"""Input channels (K) of one TF32 wgmma. A float16 wgmma has twice as many."""

MOST_HALF_BLOCKS = 1024
"""Most blocks of a packing in float16. Each block of the kernel reads a word of all their warps."""

FRAGMENT_BYTES = 512
"""Bytes of weights that a warp needs for one product."""

PIECE_BYTES = WARPS * FRAGMENT_BYTES
"""Bytes of weights that a warpgroup needs for one product.

A block of the packing writes as many at a time.
"""

STAGES = ((4, 3), (3, 3), (3, 2), (2, 2), (3, 1), (2, 1))

COMMON_STAGES = ((4, 3), (3, 3), (2, 3), (3, 2), (2, 2), (3, 1), (2, 1))
"""(stages of a ring, raw patches under way), in order of preference, if there is one ring.

The first that fits is taken. With one ring, raw patches count for more: kb71 took 0.313 ms with
(2, 3), 0.324 ms with (3, 2).
"""

SECTOR, LINE = 8, 32
"""Floats in a sector of device memory, and in a line."""

MOST_ROW_STEP = 4
"""Most image rows that one row of pixels stands for."""

MOST_AHEAD = 6
"""Pairs by which weights are loaded ahead of their use, if they are not in shared memory."""

WEIGHT_SLOTS = 4
"""Copies of staged weights that a consumer has in flight."""

PART_SLOTS = 2
"""The same if a copy has a whole part, which is larger."""

MOST_SUMS = 104
"""Accumulators of a thread that fit into a third of the registers."""


@dataclass(frozen=True)
class Layout:
    """A tile laid over a problem.

    Attributes:
        row_step: image rows that one row of pixels stands for. With few output channels, several
            rows fill the 64 rows of a wgmma.
        classes: the distinct sequences of pairs.
        m_class: the class of each row group.
        slots_y, slots_x: all slots of an axis, ascending.
        imposed_skew: the `skew` of another layout, if both use the same patches.
        rolled: whether products, pixels and stores are loops. Code that seldom runs then compiles
            fast.
        remembered: what all sizes of a kernel share (`family.of_kernel`, `family.once`).
    """

    problem: Problem
    tile: Tile
    row_step: int
    classes: tuple[tuple[Pair, ...], ...]
    m_class: tuple[int, ...]
    slots_y: tuple[int, ...]
    slots_x: tuple[int, ...]
    imposed_skew: int | None = None
    rolled: bool = False
    remembered: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @family.of_kernel
    def tensor_map(self) -> bool:
        """Whether a tensor map loads the patches. Else producers do, through registers."""
        return self.problem.pattern.rows_aligned

    @family.of_kernel
    def depth(self) -> int:
        """Channels of a stage."""
        return 2 * CHANNELS if self.tile.half else CHANNELS

    @family.of_kernel
    def chunks(self) -> int:
        """Stages of a tile."""
        return -(-self.problem.in_channels_per_group // self.depth)

    @family.of_kernel
    def mean_pairs(self) -> float:
        """Pairs of a stage, averaged over the row groups."""
        return self.m_begin[-1] / len(self.m_class)

    @family.of_kernel
    def rings(self) -> int:
        """Rings of stages."""
        return 1 if self.tile.common else CONSUMERS

    @family.of_kernel
    def tile_rows(self) -> int:
        """Rows of pixels that a patch serves."""
        return self.tile.rows * CONSUMERS // self.rings

    @family.of_kernel
    def patch_rows(self) -> int:
        """Input rows of a tile, its halo included."""
        span = self.slots_y[-1] - self.slots_y[0]
        return self.row_step * (self.tile_rows - 1) + span + 1

    @family.of_kernel
    def skew(self) -> int:
        """Columns of a patch to the left of the first that a tile reads.

        A tensor map loads from a 16-byte boundary on. Patches begin on a sector, which costs the
        fewest bytes, if all tiles allow it and if as many stages fit.
        """
        if self.imposed_skew is not None:
            return self.imposed_skew
        if not self.tensor_map:
            return 0
        first = self.q_ranges[1].start - self.slots_x[-1]
        if self.tile_step % SECTOR == 0:
            target = hopper.TARGET
            if self._stages(target, first % SECTOR) == self._stages(target, first % 4):
                return first % SECTOR
        return first % 4

    @family.of_kernel
    def patch_columns(self) -> int:
        """Input columns of a tile, with its halo and what a tensor map adds."""
        return self._patch_columns(self.skew)

    def _patch_columns(self, skew: int) -> int:
        columns = skew + self.tile.columns + self.slots_x[-1] - self.slots_x[0]
        return -(-columns // 4) * 4 if self.tensor_map else columns

    @family.of_kernel
    def patch_row(self) -> int:
        """Size of a row of the staged patch, in 16 bytes, the unit of a wgmma descriptor."""
        return self.patch_columns * CHANNELS * 4 // 16

    @family.of_kernel
    def vector(self) -> int:
        """Outputs that a lane writes at a time. Rows begin on a multiple of them."""
        outputs = self.problem.pattern.width.output_size
        return next(width for width in (4, 2, 1) if outputs % width == 0)

    @family.of_kernel
    def tile_step(self) -> int:
        """Columns of pixels from a tile to the next."""
        if not self.tile.sectors:
            return self.tile.columns
        return self.tile.columns - overlap(self.problem.width.stride)

    @family.of_kernel
    def output_shift(self) -> int:
        """Columns from a multiple of `vector` to a tile's first output."""
        x = self.problem.width
        return (x.q_range.start * x.stride - x.padding) % self.vector

    @family.of_kernel
    def output_bytes(self) -> int:
        """Shared memory in which the epilogue gathers output rows."""
        stride = self.problem.width.stride
        columns = self.tile.columns * stride
        columns += 3 if self.tile.sectors else self.output_shift
        pitch = columns + ((24 - columns % 16) % 16 if stride == 1 else (40 - columns % 32) % 32)
        passes = 2 if 8 % stride == 0 else 1
        return CONSUMERS * WARPS * (warp_channels(self.problem) // passes) * pitch * 4

    @family.of_kernel
    def reaches(self) -> int:
        """Number of values of slot * stride + phase, in y, at which a tap may be."""
        y = self.problem.height
        return y.dilation * (y.kernel - 1) + 1

    @family.of_kernel
    def fragments(self) -> int:
        """Resident weights, in fragments. A fragment is what a warp needs for one product.

        Phases in y that have the same tap in several rows share its weights.
        """
        phase_tiles = -(-self.problem.out_channels_per_group // warp_channels(self.problem))
        in_chunk = self.reaches * len(self.slots_x) * phase_tiles
        return self.problem.groups * self.chunks * in_chunk

    @family.of_kernel
    def resident_bytes(self) -> int:
        """Shared memory of resident weights."""
        return self.fragments * self.parts * FRAGMENT_BYTES if self.tile.resident else 0

    @family.of_kernel
    def schedule(self) -> tuple[tuple[int, int, int], ...]:
        """For each class: parts of a stage, stages unrolled together, pairs with weights held."""
        if self.rolled:
            return ((1, 1, 1),) * len(self.classes)
        return tuple(schedule(pairs, self.tile, self.chunks) for pairs in self.classes)

    @family.of_kernel
    def slot_pairs(self) -> int:
        """Most pairs in a copy of staged weights."""
        return max(
            len(pairs) // parts if parts > 1 else ahead
            for pairs, (parts, _, ahead) in zip(self.classes, self.schedule, strict=True)
        )

    @family.of_kernel
    def weight_slots(self) -> int:
        """Buffers of a consumer for copies of its weights."""
        if self.tile.resident or self.split:
            return 0
        return WEIGHT_SLOTS if all(parts == 1 for parts, _, _ in self.schedule) else PART_SLOTS

    @family.of_kernel
    def staged_bytes(self) -> int:
        """Bytes of shared memory of staged weights and their barriers."""
        return CONSUMERS * self.weight_slots * (self.slot_pairs * WARPS * FRAGMENT_BYTES + 16)

    @family.of_kernel
    def raw_bytes(self) -> int:
        """Shared memory of one raw patch."""
        return self._raw_bytes(self.patch_columns)

    def _raw_bytes(self, columns: int) -> int:
        if not self.tensor_map:
            return 128
        return -(-CHANNELS * self.patch_rows * columns * 4 // 128) * 128

    def stages(self, target: Target) -> tuple[int, int]:
        """Stages of a ring and its raw patches under way, the most that fit; (0, 0) if none do."""
        return family.once(self, ("stages", target), lambda: self._stages(target, self.skew))

    def _stages(self, target: Target, skew: int) -> tuple[int, int]:
        columns = self._patch_columns(skew)
        for stages, raw_stages in COMMON_STAGES if self.tile.common else STAGES:
            raw = raw_stages if self.tensor_map else 1
            of_ring = stages * self._stage_bytes(columns) + raw * self._raw_bytes(columns)
            if self.rings * of_ring <= self._free(target):
                return stages, raw
        return 0, 0

    def _free(self, target: Target) -> int:
        """Shared memory left for stages of both kinds."""
        offsets = 0 if self.tensor_map else self.offset_bytes("long long")
        used = self.output_bytes + offsets + self.resident_bytes + self.staged_bytes
        return target.shared_per_block - 2048 - used

    def offset_bytes(self, index: str) -> int:
        """Bytes of shared memory for the offsets of producers that load through registers."""
        producers = 128 // self.rings
        pixels = self.patch_rows * self.patch_columns
        in_turn = -(-pixels // producers) * producers
        return self.rings * in_turn * (8 if index == "long long" else 4)

    @family.of_kernel
    def split(self) -> bool:
        """Whether operands are sums of parts (sm90_split_forward)."""
        return self.problem.math == "ieee"

    @family.of_kernel
    def shares(self) -> bool:
        """Whether producers give registers to the consumers.

        They do if consumers need more than a third of all registers.
        """
        return self.split or self.tile.sums > MOST_SUMS

    @family.of_kernel
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        return self._stage_bytes(self.patch_columns)

    def _stage_bytes(self, columns: int) -> int:
        patch = -(-self.patch_rows * columns * CHANNELS * 4 // 256) * 256
        return 2 * patch if self.split else patch

    @family.of_kernel
    def m_begin(self) -> tuple[int, ...]:
        """Index of the first pair of each row group, within a group."""
        begins = [0]
        for row_class in self.m_class:
            begins.append(begins[-1] + len(self.classes[row_class]))
        return tuple(begins)

    @functools.cached_property
    def q_ranges(self) -> tuple[range, range]:
        """Rows and columns of pixels."""
        y, x = self.problem.height, self.problem.width
        step = y.stride * self.row_step
        first, last = y.padding // step, (y.output_size - 1 + y.padding) // step
        return range(first, last + 1), range(x.q_range.start - self.lead, x.q_range.stop)

    @family.of_kernel
    def lead(self) -> int:
        """Columns of pixels of the first tile that have no outputs.

        With this number, patches touch the fewest lines of device memory. It must not add tiles.
        """
        if not self.tensor_map:
            return 0
        q_range, step = self.problem.pattern.width.q_range, self.tile_step

        def tiles_and_lines(lead: int) -> tuple[int, int]:
            first = q_range.start - lead - self.slots_x[-1]
            start = first - first % (SECTOR if step % SECTOR == 0 else 4)
            columns = first - start + self.tile.columns + self.slots_x[-1] - self.slots_x[0]
            # Starts modulo a line repeat after LINE tiles.
            starts = range(start, start + LINE * step, step)
            lines = sum((at % LINE + columns - 1) // LINE for at in starts)
            return _tiles(len(q_range) + lead, self.tile.columns, step), lines

        return min(range(0, LINE, SECTOR), key=tiles_and_lines)

    @functools.cached_property
    def tiles_yx(self) -> tuple[int, int]:
        """Tiles along y and x."""
        rows, columns = self.q_ranges
        tiles_x = _tiles(len(columns), self.tile.columns, self.tile_step)
        return -(-len(rows) // self.tile_rows), tiles_x

    @functools.cached_property
    def tiles(self) -> int:
        """Tiles of the launch."""
        tiles_y, tiles_x = self.tiles_yx
        return self.problem.batch * self.problem.groups * len(self.m_class) * tiles_y * tiles_x

    @family.of_kernel
    def parts(self) -> int:
        """Parts of packed weights: a high and a low part if float16 is split."""
        return 2 if self.split and self.tile.half else 1

    @family.of_kernel
    def packed_items(self) -> int:
        """Pieces of packed weights, of 2 KB for each part: a pair, or four fragments.

        Weights that come from L2 are loaded ahead of their use, so zeros follow the last.
        """
        if self.tile.resident:
            return -(-self.fragments // WARPS)
        pairs = self.problem.groups * self.m_begin[-1] * self.chunks
        return pairs + MOST_AHEAD if self.split else pairs

    @functools.cached_property
    def repairing(self) -> Layout:
        """The same tiles in TF32 or bfloat16, from patches of the same columns."""
        return family.over(family.once(self, "repairing", self._repairing), self.problem)

    def _repairing(self) -> Layout:
        tile = dataclasses.replace(self.tile, half=False, resident=False)
        laid = layout(self.problem.pattern, tile)
        return dataclasses.replace(laid, imposed_skew=self.skew, rolled=True, remembered={})

    @family.of_kernel
    def half_items(self) -> int:
        """Pieces of float16 weights. Those of the repair follow them."""
        return self.packed_items if self.tile.half else 0

    @family.of_kernel
    def half_bytes(self) -> int:
        """Bytes of the float16 pieces."""
        return self.half_items * self.parts * PIECE_BYTES

    @family.of_kernel
    def all_items(self) -> int:
        """Pieces that a packing writes."""
        return self.packed_items + (self.repairing.packed_items if self.tile.half else 0)

    @family.of_kernel
    def packed_bytes(self) -> int:
        """Bytes of all pieces. The words of `status_words` follow them."""
        return self.half_bytes + (self.all_items - self.half_items) * PIECE_BYTES

    @family.of_kernel
    def pack_blocks(self) -> int:
        """Blocks of the packing."""
        return min(self.all_items, MOST_HALF_BLOCKS if self.tile.half else family.MAX_GRID)

    @family.of_kernel
    def weight_words(self) -> int:
        """Words of status that a packing in float16 writes.

        They are the exponent of the weights' scale, and each warp's count of weights that do not
        fit.
        """
        return 1 + self.pack_blocks * WARPS if self.tile.half else 0

    @family.of_kernel
    def most_unfit_weights(self) -> int:
        """Most packed weights that may be too small for float16; with more, it is not used.

        Chance alone makes some too small: less than 1 in 2^18 normal weights, 1 in 12 000 split
        ones.
        """
        copies = 1 if self.tile.resident else self.row_step
        packed = math.prod(self.problem.w_shape) * copies
        return (packed >> 13) + 8 * copies if self.split else packed >> 18

    @property
    def status_words(self) -> int:
        """Words of status: the count of tiles, and in float16 also `weight_words` and the notes.

        A note is a word for a tile and a warp that loads its pixels. It says whether they fit.
        """
        notes = self.tiles * WARPS // self.rings
        return 1 + (self.weight_words + notes if self.tile.half else 0)


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    if problem.like is not None:
        return family.over(layout(problem.like, tile), problem)
    y, x = problem.height, problem.width
    phase_tiles = -(-problem.out_channels_per_group // warp_channels(problem))
    step = max(1, min(MOST_ROW_STEP, WARPS // (y.stride * phase_tiles)))
    slots_y, slots_x = _slots(y, y.stride * step), _slots(x, x.stride)
    all_x = tuple(sorted(set().union(*slots_x)))
    warp_tiles = y.stride * step * phase_tiles
    per_group = WARPS * tile.m_tiles
    classes: dict[tuple[tuple[int, ...], ...], int] = {}
    m_class = []
    for m_group in range(-(-warp_tiles // per_group)):
        used = []
        for m_tile in range(tile.m_tiles):
            first = m_group * per_group + m_tile * WARPS
            phases = range(
                first // phase_tiles,
                min(-(-(first + WARPS) // phase_tiles), y.stride * step),
            )
            used.append(tuple(sorted(set().union(*(slots_y[phase] for phase in phases)))))
        m_class.append(classes.setdefault(tuple(used), len(classes)))
    return Layout(
        problem=problem,
        tile=tile,
        row_step=step,
        classes=tuple(_pairs(used, all_x) for used in classes),
        m_class=tuple(m_class),
        slots_y=tuple(sorted(set().union(*slots_y))),
        slots_x=all_x,
    )


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def _pairs(slots_y: tuple[tuple[int, ...], ...], slots_x: tuple[int, ...]) -> tuple[Pair, ...]:
    """The products of a row group whose tiles have these slots in y; many tiles share them."""
    return tuple(
        Pair(m_tile, slot_y, slot_x)
        for m_tile, of_tile in enumerate(slots_y)
        for slot_y in of_tile
        for slot_x in slots_x
    )


def _tiles(columns: int, tile_columns: int, step: int) -> int:
    """Tiles along x."""
    return 1 + -(-max(0, columns - tile_columns) // step)


def overlap(stride: int) -> int:
    """Columns that adjacent tiles share, so that a sector that begins in a tile is whole in it.

    The step from tile to tile is whole sectors, and whole vectors of inputs. Tiles have a multiple
    of 8 columns.
    """
    return next(n for n in (4, 8) if n * stride >= SECTOR - 1 and n * stride % SECTOR == 0)


def warp_channels(problem: Problem) -> int:
    """Output channels of a warp's 16 rows, each with all phases in x."""
    return WARP_ROWS // problem.width.stride


def _slots(axis: Axis, phases: int) -> list[set[int]]:
    """The shifts, in inputs, at which each of `phases` phases (a multiple of the stride) has taps.

    Phase r of a stride of `phases = step * stride` reads input `step * q - slot` at tap t, where
    slot = (t*dilation - r) / stride.
    """
    reach = [tap * axis.dilation for tap in range(axis.kernel)]
    return [
        {(r - phase) // axis.stride for r in reach if (r - phase) % axis.stride == 0}
        for phase in range(phases)
    ]
