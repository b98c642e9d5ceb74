"""`sm90_tf32_forward`: the output on Hopper's tensor cores, float32 tensors with TF32 products.

Weights are laid out by `sm90_tf32_pack` first. Tiles marked `half` multiply in float16, whose
significand is TF32's; at its end a block computes those in TF32 whose values float16 cannot hold.
See `sm90_tf32_forward.cu`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.launch import Address, Argument, Launch, Stride, TensorMap, output_rows, strides
from tconv.kernels.source import TENSOR_MAP, Constant, KernelSource
from tconv.problem import Axis, Direction, Problem

STEM = "sm90_tf32_forward"
PACK_STEM = "sm90_tf32_pack"
DIRECTION: Direction = "forward"

THREADS = 384
CONSUMERS = 2
WARPGROUP_ROWS = 64
WARP_ROWS = 16
WARPS = 4
CHANNELS = 8
"""Depth of one TF32 wgmma, half of a float16 one's."""

MOST_HALF_BLOCKS = 1024
"""Of a packing in float16: the kernel's blocks read a word of each warp's."""

MOST_UNFIT_WEIGHTS = 2**16 - 2
"""That are told of, so that the sum of what all threads of a packing tell is a 32-bit number."""

L2_BYTES_PER_CYCLE = 27
"""What an SM gets from L2."""

FRAGMENT_BYTES = 512
"""Weights that a warp needs for one product."""

PIECE_BYTES = WARPS * FRAGMENT_BYTES
"""Weights that a warpgroup needs for one product: what a packing's block writes at a time."""

UNIT_BYTES = 256
"""Shared memory of what the sums of float16's operands are multiplied by."""

ORDER_BYTES = 272
"""Shared memory in which a ring's next tiles are told."""

STAGES = ((4, 3), (3, 3), (3, 2), (2, 2), (3, 1), (2, 1))
COMMON_STAGES = ((4, 3), (3, 3), (2, 3), (3, 2), (2, 2), (3, 1), (2, 1))
"""(stages of a ring, raw patches under way): the first that fits is taken. A ring alone needs the
patches more: kb71 took 0.313 ms with (2, 3), 0.324 with (3, 2).
"""

SECTOR, LINE = 8, 32
"""Floats in a sector of device memory, and in a line."""

MOST_ROW_STEP = 4
MOST_AHEAD = 6
"""Pairs that weights without a place in shared memory are asked for before their use."""

WEIGHT_SLOTS = 4
"""Copies of staged weights under way for each consumer."""

PART_SLOTS = 2
"""And copies of a part's, which are larger."""

MOST_PRODUCTS = 160
"""Unrolled products of a stage: a bound on the code."""

MOST_UNROLLED = 4000
"""Columns of unrolled products: above, a loop goes through equal parts of a stage where there are
some, which is soon compiled.
"""

MOST_SUMS = 104
"""Sums of a thread that fit a third of the registers."""

MOST_SUMS_OF_CLASSES = 128
"""And those that fit where row groups have different sequences of slots."""


@dataclass(frozen=True)
class Tile:
    """What one warpgroup computes at a time.

    Attributes:
        columns: pixels along x, the wgmma's N.
        rows: rows of pixels.
        m_tiles: times 64 rows of (phase, output channel).
        resident: whether a block keeps all weights in shared memory; else it copies them there from
            L2 as they are used.
        half: whether it multiplies in float16, TF32's significand at twice the rate, and blocks end
            with computing the tiles again that float16 cannot hold.
        sectors: whether tiles overlap in x, so that each writes whole sectors of device memory
            where rows do not begin on them.
        common: whether both consumers multiply one patch, the second the rows below the first's:
            less halo is brought, and neither works ahead.
    """

    columns: int
    rows: int
    m_tiles: int
    resident: bool = False
    half: bool = False
    sectors: bool = False
    common: bool = False

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.m_tiles * self.rows * self.columns // 2

    def __str__(self) -> str:
        """Matrix rows x image rows x columns."""
        size = f"{self.m_tiles * WARPGROUP_ROWS}x{self.rows}x{self.columns}"
        marks = ("half", "resident", "sectors", "common")
        return " ".join([size, *(mark for mark in marks if getattr(self, mark))])


TILES = (
    Tile(columns=64, rows=4, m_tiles=1, resident=True, half=True, common=True),
    Tile(columns=64, rows=3, m_tiles=1, resident=True, half=True, common=True),
    Tile(columns=104, rows=2, m_tiles=1, resident=True, half=True, sectors=True, common=True),
    Tile(columns=88, rows=3, m_tiles=1, half=True, common=True),
    Tile(columns=64, rows=4, m_tiles=1, resident=True, half=True),
    Tile(columns=88, rows=2, m_tiles=1, resident=True, half=True),
    Tile(columns=40, rows=4, m_tiles=1, resident=True, half=True),
    Tile(columns=64, rows=2, m_tiles=2, resident=True, half=True),
    Tile(columns=104, rows=2, m_tiles=1, resident=True, half=True, sectors=True),
    Tile(columns=64, rows=2, m_tiles=2, resident=True, half=True, sectors=True),
    Tile(columns=88, rows=2, m_tiles=1, half=True, sectors=True),
    Tile(columns=64, rows=2, m_tiles=2, half=True, sectors=True),
    # For signals: images of one row.
    Tile(columns=128, rows=1, m_tiles=1, resident=True, half=True),
    Tile(columns=88, rows=3, m_tiles=1, half=True),
    Tile(columns=64, rows=4, m_tiles=1, half=True),
    Tile(columns=40, rows=6, m_tiles=1, half=True),
    Tile(columns=88, rows=2, m_tiles=1, half=True),
    Tile(columns=64, rows=2, m_tiles=2, half=True),
    Tile(columns=40, rows=4, m_tiles=1, resident=True),
    Tile(columns=88, rows=3, m_tiles=1),
    Tile(columns=88, rows=2, m_tiles=1),
)


@dataclass(frozen=True)
class Pair:
    """One product of a stage: the tile's `m_tile`-th 64 rows with the pixels at a slot."""

    m_tile: int
    slot_y: int
    slot_x: int


@dataclass(frozen=True)
class Layout:
    """A tile laid over a problem.

    Attributes:
        row_step: image rows that one row of pixels stands for, so that few output channels
            still fill 64 matrix rows.
        classes: the distinct sequences of pairs.
        m_class: the class of each row group.
        slots_y, slots_x: all slots of an axis, ascending.
        imposed_skew: `skew` where another kernel's patches decide.
        rolled: products, batches of pixels and rows that are stored are loops, for what is seldom
            run and soon compiled.
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

    @property
    def depth(self) -> int:
        """Channels of a stage."""
        return 2 * CHANNELS if self.tile.half else CHANNELS

    @property
    def chunks(self) -> int:
        """Stages of a tile."""
        return -(-self.problem.in_channels_per_group // self.depth)

    @property
    def mean_pairs(self) -> float:
        """Pairs of a stage, over the row groups."""
        return self.m_begin[-1] / len(self.m_class)

    @property
    def rings(self) -> int:
        """Rings of stages."""
        return 1 if self.tile.common else CONSUMERS

    @property
    def tile_rows(self) -> int:
        """Rows of pixels that a patch serves."""
        return self.tile.rows * CONSUMERS // self.rings

    @property
    def patch_rows(self) -> int:
        """Input rows of a tile, its halo included."""
        span = self.slots_y[-1] - self.slots_y[0]
        return self.row_step * (self.tile_rows - 1) + span + 1

    @functools.cached_property
    def skew(self) -> int:
        """Columns that a patch has to the left of its first.

        A tensor map loads from a 16-byte boundary on. From the start of a sector on it fetches the
        fewest: so where that leaves as many stages, and all tiles begin so.
        """
        if self.imposed_skew is not None:
            return self.imposed_skew
        if not self.problem.x_aligned:
            return 0
        first = self.q_ranges[1].start - self.slots_x[-1]
        if self.tile_step % SECTOR == 0:
            hopper = Target.named("sm_90a")
            if self._stages(hopper, first % SECTOR) == self._stages(hopper, first % 4):
                return first % SECTOR
        return first % 4

    @functools.cached_property
    def patch_columns(self) -> int:
        """Input columns of a tile, its halo and what a tensor map adds included."""
        return self._patch_columns(self.skew)

    def _patch_columns(self, skew: int) -> int:
        columns = skew + self.tile.columns + self.slots_x[-1] - self.slots_x[0]
        return -(-columns // 4) * 4 if self.problem.x_aligned else columns

    @property
    def patch_row(self) -> int:
        """A row of the staged patch, in the 16 bytes that a wgmma's descriptor counts."""
        return self.patch_columns * CHANNELS * 4 // 16

    @property
    def vector(self) -> int:
        """Outputs that a lane writes at a time, where rows begin on a multiple of them."""
        return next(width for width in (4, 2, 1) if self.problem.width.output_size % width == 0)

    @property
    def tile_step(self) -> int:
        """Columns of pixels from a tile to the next."""
        if not self.tile.sectors:
            return self.tile.columns
        return self.tile.columns - overlap(self.problem.width.stride)

    @property
    def output_shift(self) -> int:
        """Columns of a tile's first output behind a multiple of `vector`."""
        x = self.problem.width
        return (x.q_range.start * x.stride - x.padding) % self.vector

    @property
    def output_bytes(self) -> int:
        """Shared memory in which the epilogue gathers output rows."""
        stride = self.problem.width.stride
        columns = self.tile.columns * stride
        columns += 3 if self.tile.sectors else self.output_shift
        pitch = columns + ((24 - columns % 16) % 16 if stride == 1 else (40 - columns % 32) % 32)
        passes = 2 if 8 % stride == 0 else 1
        return CONSUMERS * WARPS * (warp_channels(self.problem) // passes) * pitch * 4

    @property
    def reaches(self) -> int:
        """Values of slot * stride + phase in y that a tap may lie at."""
        y = self.problem.height
        return y.dilation * (y.kernel - 1) + 1

    @property
    def fragments(self) -> int:
        """Resident weights, in what a warp needs for one product.

        Phases in y that stand for the same tap in several rows have them in common.
        """
        phase_tiles = -(-self.problem.out_channels_per_group // warp_channels(self.problem))
        in_chunk = self.reaches * len(self.slots_x) * phase_tiles
        return self.problem.groups * self.chunks * in_chunk

    @property
    def resident_bytes(self) -> int:
        """Shared memory of resident weights."""
        return self.fragments * self.parts * FRAGMENT_BYTES if self.tile.resident else 0

    @functools.cached_property
    def schedule(self) -> tuple[tuple[int, int, int], ...]:
        """Of each class: parts of a stage in a loop, stages unrolled together, and pairs whose
        weights a thread holds.
        """
        if self.rolled:
            return ((1, 1, 1),) * len(self.classes)
        return tuple(_schedule(pairs, self.tile, self.chunks) for pairs in self.classes)

    @functools.cached_property
    def slot_pairs(self) -> int:
        """Pairs of a copy of staged weights, at most."""
        return max(
            len(pairs) // parts if parts > 1 else ahead
            for pairs, (parts, _, ahead) in zip(self.classes, self.schedule, strict=True)
        )

    @property
    def weight_slots(self) -> int:
        """Slots of each consumer for copies of its weights."""
        if self.tile.resident or self.split:
            return 0
        return WEIGHT_SLOTS if all(parts == 1 for parts, _, _ in self.schedule) else PART_SLOTS

    @property
    def staged_bytes(self) -> int:
        """Shared memory of staged weights, and their barriers'."""
        return CONSUMERS * self.weight_slots * (self.slot_pairs * WARPS * FRAGMENT_BYTES + 16)

    @property
    def raw_bytes(self) -> int:
        """Shared memory of one raw patch."""
        return self._raw_bytes(self.patch_columns)

    def _raw_bytes(self, columns: int) -> int:
        if not self.problem.x_aligned:
            return 128
        return -(-CHANNELS * self.patch_rows * columns * 4 // 128) * 128

    def stages(self, target: Target) -> tuple[int, int]:
        """Stages of a ring and its raw patches under way, the most that fit; (0, 0) if none do."""
        return self._stages(target, self.skew)

    def _stages(self, target: Target, skew: int) -> tuple[int, int]:
        columns = self._patch_columns(skew)
        for stages, raw_stages in COMMON_STAGES if self.tile.common else STAGES:
            raw = raw_stages if self.problem.x_aligned else 1
            of_ring = stages * self._stage_bytes(columns) + raw * self._raw_bytes(columns)
            if self.rings * of_ring <= self._free(target):
                return stages, raw
        return 0, 0

    def _free(self, target: Target) -> int:
        """Shared memory left for stages of both kinds."""
        offsets = 0 if self.problem.x_aligned else self.offset_bytes("long long")
        used = self.output_bytes + offsets + self.resident_bytes + self.staged_bytes
        return target.shared_per_block - 2048 - used

    def offset_bytes(self, index: str) -> int:
        """Shared memory of the offsets of producers that load through registers."""
        producers = 128 // self.rings
        pixels = self.patch_rows * self.patch_columns
        in_turn = -(-pixels // producers) * producers
        return self.rings * in_turn * (8 if index == "long long" else 4)

    @property
    def split(self) -> bool:
        """Whether operands are sums of parts (sm90_split_forward)."""
        return self.problem.math == "ieee"

    @property
    def shares(self) -> bool:
        """Whether producers give registers to the consumers, which need more than a third."""
        return self.split or self.tile.sums > MOST_SUMS

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        return self._stage_bytes(self.patch_columns)

    def _stage_bytes(self, columns: int) -> int:
        patch = -(-self.patch_rows * columns * CHANNELS * 4 // 256) * 256
        return 2 * patch if self.split else patch

    @property
    def m_begin(self) -> tuple[int, ...]:
        """The first pair of each row group among those of a group."""
        begins = [0]
        for row_class in self.m_class:
            begins.append(begins[-1] + len(self.classes[row_class]))
        return tuple(begins)

    @property
    def q_ranges(self) -> tuple[range, range]:
        """Rows and columns of pixels."""
        y, x = self.problem.height, self.problem.width
        step = y.stride * self.row_step
        first, last = y.padding // step, (y.output_size - 1 + y.padding) // step
        return range(first, last + 1), range(x.q_range.start - self.lead, x.q_range.stop)

    @functools.cached_property
    def lead(self) -> int:
        """Columns of pixels of the first tile that have no outputs.

        So patches lie in the fewest lines of device memory, on the average, with no more tiles.
        """
        if not self.problem.x_aligned:
            return 0
        q_range, step = self.problem.width.q_range, self.tile_step

        def tiles_and_lines(lead: int) -> tuple[int, int]:
            first = q_range.start - lead - self.slots_x[-1]
            start = first - first % (SECTOR if step % SECTOR == 0 else 4)
            columns = first - start + self.tile.columns + self.slots_x[-1] - self.slots_x[0]
            # After so many tiles starts lie again as they did.
            starts = range(start, start + LINE * step, step)
            lines = sum((at % LINE + columns - 1) // LINE for at in starts)
            return _tiles(len(q_range) + lead, self.tile.columns, step), lines

        return min(range(0, LINE, SECTOR), key=tiles_and_lines)

    @property
    def tiles_yx(self) -> tuple[int, int]:
        """Tiles along y and x."""
        rows, columns = self.q_ranges
        tiles_x = _tiles(len(columns), self.tile.columns, self.tile_step)
        return -(-len(rows) // self.tile_rows), tiles_x

    @property
    def tiles(self) -> int:
        """Tiles of the launch."""
        tiles_y, tiles_x = self.tiles_yx
        return self.problem.batch * self.problem.groups * len(self.m_class) * tiles_y * tiles_x

    @property
    def parts(self) -> int:
        """Parts of packed weights: a high and a low one of split float16."""
        return 2 if self.split and self.tile.half else 1

    @property
    def packed_items(self) -> int:
        """Pieces of packed weights, of 2 KB for each part: pairs, or four fragments each.

        Weights straight from L2 are asked for ahead: behind the last come zeros that nothing uses.
        """
        if self.tile.resident:
            return -(-self.fragments // WARPS)
        pairs = self.problem.groups * self.m_begin[-1] * self.chunks
        return pairs + MOST_AHEAD if self.split else pairs

    @functools.cached_property
    def repairing(self) -> Layout:
        """The same tiles in TF32 or bfloat16, from patches of the same columns."""
        tile = dataclasses.replace(self.tile, half=False, resident=False)
        laid = layout(self.problem, tile)
        return dataclasses.replace(laid, imposed_skew=self.skew, rolled=True)

    @property
    def half_items(self) -> int:
        """Pieces of float16 weights, before those of what repairs."""
        return self.packed_items if self.tile.half else 0

    @property
    def half_bytes(self) -> int:
        """What they take."""
        return self.half_items * self.parts * PIECE_BYTES

    @property
    def all_items(self) -> int:
        """Pieces that a packing writes."""
        return self.packed_items + (self.repairing.packed_items if self.tile.half else 0)

    @property
    def packed_bytes(self) -> int:
        """What they take; behind them lies what the packing and the kernel count and note."""
        return self.half_bytes + (self.all_items - self.half_items) * PIECE_BYTES

    @property
    def pack_blocks(self) -> int:
        """Blocks of the packing."""
        return min(self.all_items, MOST_HALF_BLOCKS if self.tile.half else family.MAX_GRID)

    @property
    def weight_words(self) -> int:
        """Words that a packing in float16 writes behind the first: the exponent of the weights'
        scale, and for each warp how many of them it has seen that do not fit.
        """
        return 1 + self.pack_blocks * WARPS if self.tile.half else 0

    @property
    def most_unfit_weights(self) -> int:
        """Weights that may be too small for float16, as packed, for all to be computed in it.

        As many as are by chance: none of 2^18 normal ones, or of split ones 1 in 12 000.
        """
        copies = 1 if self.tile.resident else self.row_step
        packed = math.prod(self.problem.w_shape) * copies
        return (packed >> 13) + 8 * copies if self.split else packed >> 18

    @property
    def status_words(self) -> int:
        """And one that counts tiles, and those that note what float16 cannot hold: which weights,
        and which tiles, one for each of the warps that bring a tile's pixels.
        """
        notes = self.tiles * WARPS // self.rings
        return 1 + (self.weight_words + notes if self.tile.half else 0)


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    y, x = problem.height, problem.width
    phase_tiles = -(-problem.out_channels_per_group // warp_channels(problem))
    step = max(1, min(MOST_ROW_STEP, WARPS // (y.stride * phase_tiles)))
    slots_y, slots_x = _slots(y, y.stride * step), _slots(x, x.stride)
    all_x = sorted(set().union(*slots_x))
    warp_tiles = y.stride * step * phase_tiles
    per_group = WARPS * tile.m_tiles
    classes: dict[tuple[Pair, ...], int] = {}
    m_class = []
    for m_group in range(-(-warp_tiles // per_group)):
        pairs: list[Pair] = []
        for m_tile in range(tile.m_tiles):
            first = m_group * per_group + m_tile * WARPS
            phases = range(
                first // phase_tiles,
                min(-(-(first + WARPS) // phase_tiles), y.stride * step),
            )
            used = sorted(set().union(*(slots_y[phase] for phase in phases)))
            pairs += (Pair(m_tile, slot_y, slot_x) for slot_y in used for slot_x in all_x)
        m_class.append(classes.setdefault(tuple(pairs), len(classes)))
    return Layout(
        problem=problem,
        tile=tile,
        row_step=step,
        classes=tuple(classes),
        m_class=tuple(m_class),
        slots_y=tuple(sorted(set().union(*slots_y))),
        slots_x=tuple(all_x),
    )


def _tiles(columns: int, tile_columns: int, step: int) -> int:
    """Tiles along x."""
    return 1 + -(-max(0, columns - tile_columns) // step)


def overlap(stride: int) -> int:
    """Columns that tiles have in common for all sectors that begin in a tile to be in it whole.

    Steps are whole sectors, and whole vectors of inputs. Tiles have a multiple of 8 columns.
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


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    return hopper.tf32_why_not(problem, target) or shape_why_not(problem)


def shape_why_not(problem: Problem) -> str | None:
    """One sentence if the layer's shape or layout cannot be served, else None."""
    if problem.y_layout != "contiguous":
        return f"writes contiguous outputs, not {problem.y_layout}"
    if problem.in_channels_per_group < CHANNELS:
        found = problem.in_channels_per_group
        return f"works on {CHANNELS} input channels at a time, there are {found}"
    if problem.width.stride > WARP_ROWS:
        return f"a warp holds {WARP_ROWS} phases in x, the stride is {problem.width.stride}"
    return family.phases_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    if tile.sums > MOST_SUMS and not problem.x_aligned:
        # They spilled, or ptxas serialised the products.
        return f"{tile.sums} sums of a thread leave producers that load through registers too few"
    if tile.sums > MOST_SUMS_OF_CLASSES and len(layout(problem, tile).classes) > 1:
        # They spilled beside the code of further classes.
        return f"{tile.sums} sums of a thread want row groups that all have the same slots"
    if tile.common and tile.resident and tile.rows == 4 and layout(problem, tile).row_step > 1:
        # 4 bytes by NVRTC 13.0, none by 13.5; kb78 takes 0.408 ms, 0.402 with three rows.
        return "spills where a row of pixels stands for several output rows"
    if (tile.half and tile.resident and tile.columns == 88 and not problem.x_aligned) and max(
        len(pairs) for pairs in layout(problem, tile).classes
    ) == 1:
        # 388 bytes by NVRTC 13.5, none by 13.0.
        return "spills where pixels come through registers for one product of each row"
    if tile.half:
        if problem.in_channels_per_group < 2 * CHANNELS:
            found = problem.in_channels_per_group
            return f"multiplies {2 * CHANNELS} input channels at a time, there are {found}"
        refusal = laid_why_not(layout(problem, tile).repairing, target, MOST_PRODUCTS)
        if refusal is not None:
            return f"what repairs it: {refusal}"
    if tile.sectors:
        x = problem.width
        if layout(problem, tile).tiles_yx[1] == 1:
            return "tiles would overlap in x, and there is one"
        if x.output_size % SECTOR == (x.q_range.start * x.stride - x.padding) % SECTOR == 0:
            return "pieces of rows are whole sectors without an overlap of tiles"
    return laid_why_not(layout(problem, tile), target, MOST_PRODUCTS)


def laid_why_not(laid: Layout, target: Target, most_products: int) -> str | None:
    """`tile_why_not` of a tile laid over a problem, for a bound on the unrolled products."""
    problem, tile = laid.problem, laid.tile
    if laid.stages(target) == (0, 0):
        beside = f" beside {laid.resident_bytes} bytes of weights" if tile.resident else ""
        return (
            f"two stages of {laid.stage_bytes} bytes for each warpgroup do not fit "
            f"{target.arch}{beside}"
        )
    if problem.x_aligned and max(laid.patch_columns, laid.patch_rows) > 256:
        return f"a patch of {laid.patch_rows} x {laid.patch_columns} is over a tensor map's 256"
    products = max(len(pairs) for pairs in laid.classes) * tile.rows
    if products > most_products:
        return f"a stage has {products} unrolled products, {most_products} is the limit"
    if not all(laid.classes):
        return "some row groups have no slot at all, which would serialise the others' products"
    if len(laid.classes) > 4:
        return f"row groups have {len(laid.classes)} different sequences of slots, 4 is the limit"
    if tile.m_tiles > 1 and any(
        pair.m_tile == 0 and len({p.m_tile for p in pairs}) < tile.m_tiles
        for pairs in laid.classes
        for pair in pairs[:1]
    ):
        return f"the matrix has fewer rows than {tile.m_tiles} times {WARPGROUP_ROWS}"
    return None


@dataclass(frozen=True)
class _Fit:
    """What a tile's parts cost, in cycles of an SM at 1.7 GHz unless said otherwise.

    Attributes:
        stage: of 8 channels, whatever their number of pairs.
        pair, product: of a pair, and of each of its cycles on the tensor cores.
        mapped, loaded: of a pixel of the patch, by tensor map or through registers, while products
            take `beside` of their cycles.
        output, phased: of 64 outputs in one row, or of those with several phases in x.
        row: of 64 rows of outputs.
        single: share that is added where one raw patch at a time shows memory's latency.
        launch: of packing and kernel, in microseconds.
        bytes: moved in a second, in 1e12, if rows were endless; `edge`: columns that a row's ends
            cost.
        both: share of the lesser of the two that does not overlap.
    """

    stage: float
    pair: float
    product: float
    mapped: float
    loaded: float
    beside: float
    output: float
    phased: float
    row: float
    single: float
    launch: float
    bytes: float
    edge: float
    both: float


# Least squares of the logarithm over 265 rows of the sweeps of 29 layers and 60 random ones,
# benchmarks/fit_costs.py: off by 9% and 5% in the root mean square; KernelBench's layers weigh
# most. Then by hand: `mapped` and `edge` of streamed weights, for hd_k4s2's tile, and 4% more for
# resident ones: their small tiles move more pixels, and the chip slows down where the work takes
# all its power (kb57). In float16 294 rows, off by 7%; kb71's weighed 160, hd_k4s2's 30 and
# sam_up2's 10.
_STREAMED = _Fit(
    stage=322,
    pair=44.5,
    product=0.32,
    mapped=0.5,
    loaded=5.56,
    beside=0.848,
    output=4.05,
    phased=3.87,
    row=139,
    single=0.0357,
    launch=7.96,
    bytes=18.1,
    edge=100,
    both=0.282,
)
_RESIDENT = _Fit(
    stage=231,
    pair=53.8,
    product=0,
    mapped=0.865,
    loaded=3.06,
    beside=0.36,
    output=2.12,
    phased=3.8,
    row=60.6,
    single=0.387,
    launch=8.08,
    bytes=8.04,
    edge=79.1,
    both=0.464,
)


_HALF_STREAMED = _Fit(
    stage=267,
    pair=30.1,
    product=0.704,
    mapped=1.69,
    loaded=3.87,
    beside=0.658,
    output=10.4,
    phased=9.29,
    row=0.239,
    single=0.0867,
    launch=10.9,
    bytes=12.3,
    edge=169,
    both=0.256,
)
_HALF_RESIDENT = _Fit(
    stage=181,
    pair=9.28,
    product=0.0717,
    mapped=1.74,
    loaded=6.01,
    beside=0.142,
    output=10.5,
    phased=12.3,
    row=38.6,
    single=0.803,
    launch=7.06,
    bytes=4.28,
    edge=30.8,
    both=0.248,
)
_FITS = {
    (False, False): _STREAMED,
    (False, True): _RESIDENT,
    (True, False): _HALF_STREAMED,
    (True, True): _HALF_RESIDENT,
}
"""By whether a tile multiplies in float16, and keeps its weights."""


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel, and of the host."""
    return family.with_host(_device_cost(problem, target, tile))


def _device_cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel: a fit to measured times."""
    laid = layout(problem, tile)
    fit = _FITS[tile.half, tile.resident]
    pixels = laid.tile_rows * tile.columns  # of all that a patch serves
    products = laid.mean_pairs * pixels / 2
    patch = (fit.mapped if problem.x_aligned else fit.loaded) * laid.patch_rows * laid.patch_columns
    consumers = CONSUMERS // laid.rings
    consumed = consumers * laid.mean_pairs * fit.pair + fit.product * products
    stage = fit.stage + max(consumed, patch + fit.beside * products)
    if problem.x_aligned and laid.stages(target)[1] == 1:
        stage *= 1 + fit.single
    output = fit.output if problem.width.stride == 1 else fit.phased
    edge = fit.edge
    if tile.sectors:
        # By hand, from 47 rows of five layers: no ends of pieces, fewer and wider stores.
        edge, output = 0, output * (0.8 if tile.resident else 1)
    of_tile = laid.chunks * stage + tile.m_tiles * (output * pixels + fit.row * laid.tile_rows)
    waves = -(-laid.tiles // (laid.rings * target.multiprocessors))
    cycles = waves * laid.rings * of_tile + laid.resident_bytes / L2_BYTES_PER_CYCLE
    busy = cycles / 1.7e9
    ends = 1 + edge / (tile.columns * problem.width.stride)
    moved = problem.bytes * ends / (fit.bytes * 1e12)
    modelled = max(busy, moved) + fit.both * min(busy, moved) + fit.launch * 1e-6
    # Power, and with it clock, where products are many, by hand from sweep_order.csv: what is
    # computed twice takes some, and the more rows a tile has, the fewer pixels it brings for them.
    many = min(1, max(0, (problem.flops / problem.bytes - 130) / 14))
    if tile.half:
        power = 0.17 if tile.sectors else {3: -0.045, 4: -0.09}.get(tile.rows, 0)
        modelled *= 1 + power * many
    if tile.common:
        # By hand, from sweep_common.csv: 0.4 of what a common patch saves by this model is saved,
        # and some power, which counts where products are many.
        alone = _device_cost(problem, target, dataclasses.replace(tile, common=False))
        modelled = 0.4 * modelled + 0.6 * alone
        if tile.resident and not tile.sectors:
            modelled *= 1 - 0.05 * many
    # By hand: no such tile is among the fit's rows, and on images its halo costs more.
    return modelled * (1.06 if tile.rows == 1 else 1)


def source(problem: Problem, tile: Tile) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    laid = layout(problem, tile)
    if not tile.half:
        return _forward_source(laid, repairs=None)
    return ending_with(_forward_source(laid, None), _forward_source(laid.repairing, repairs=laid))


def ending_with(kernel: KernelSource, again: KernelSource) -> KernelSource:
    """A kernel whose blocks end with another's functions, in the same shared memory."""
    shared = max(kernel.shared_bytes, again.shared_bytes)
    return dataclasses.replace(kernel, again=again, shared_bytes=shared)


def _forward_source(laid: Layout, repairs: Layout | None) -> KernelSource:
    """The kernel; `repairs`: what it computes again."""
    parts, unroll, ahead = zip(*laid.schedule, strict=True)
    schedule = (("class_parts", parts), ("class_unroll", unroll), ("class_ahead", ahead))
    return kernel_source(STEM, laid, schedule, repairs)


def kernel_source(
    stem: str,
    laid: Layout,
    schedule: tuple[tuple[str, Constant], ...],
    repairs: Layout | None = None,
) -> KernelSource:
    """The kernel of that name, and constants of its own."""
    problem, tile = laid.problem, laid.tile
    index = family.index_type(problem, laid.tiles * (WARPS // laid.rings))  # as notes are counted
    stages, raw_stages = laid.stages(Target.named("sm_90a"))
    shared = stages * (laid.stage_bytes + 16) + raw_stages * (laid.raw_bytes + 8) + ORDER_BYTES
    shared *= laid.rings
    shared += laid.output_bytes + laid.resident_bytes + laid.staged_bytes
    shared += UNIT_BYTES
    shared += laid.rings * 8 if problem.x_aligned else laid.offset_bytes(index)
    shared = -(-(shared + 256) // 1024) * 1024
    constants = (
        *_layer_constants(problem, laid, index),
        ("shared_bytes", shared),
        ("stages", stages),
        ("raw_stages", raw_stages),
        ("weight_slots", laid.weight_slots),
        ("slot_pairs", laid.slot_pairs),
        ("repair", repairs is not None),
        ("packed_begin", 0 if repairs is None else repairs.half_bytes // 4),
        ("rolled", laid.rolled),
        ("rings", laid.rings),
        ("weight_words", (repairs or laid).weight_words),
        ("tensor_map", problem.x_aligned),
        ("tile_columns", tile.columns),
        ("tile_step", laid.tile_step),
        ("tile_rows", tile.rows),
        ("patch_rows", laid.patch_rows),
        ("patch_columns", laid.patch_columns),
        ("shift_bottom", laid.slots_y[-1]),
        ("shift_right", laid.slots_x[-1]),
        ("skew", laid.skew),
        ("first_q_y", laid.q_ranges[0].start),
        ("first_q_x", laid.q_ranges[1].start),
        ("bias", problem.bias),
        *hopper.tap_constants(problem),
        ("pair_fragment", _pair_fragments(laid)),
        *schedule,
        (
            "pair_pixel",
            tuple(
                (laid.slots_y[-1] - pair.slot_y) * laid.patch_columns
                + laid.skew
                + laid.slots_x[-1]
                - pair.slot_x
                for pairs in laid.classes
                for pair in pairs
            ),
        ),
    )
    return KernelSource(
        stem=stem,
        constants=constants,
        arguments=(
            *((("source_map", TENSOR_MAP),) if problem.x_aligned else ()),
            ("source", "const void*"),
            ("packed", "const void*"),
            ("status", "void*"),
            ("bias", "const void*"),
            ("destination", "void*"),
            ("tiles", index),
            ("tiles_y", "int"),
            ("tiles_x", "int"),
            ("patch_row", "int"),
            ("source_height", "int"),
            ("source_width", "int"),
            ("destination_height", "int"),
            ("destination_width", "int"),
            *family.stride_fields("source", "n c h w", index),
            *family.stride_fields("destination", "n c h", index),
            ("weight", "const void*"),
            *family.stride_fields("weight", "in out h w", index),
        ),
        shared_bytes=shared,
        threads=THREADS,
    )


def _layer_constants(problem: Problem, laid: Layout, index: str) -> tuple[tuple, ...]:
    """What the kernel and its packing share."""
    pairs = [pair for row_class in laid.classes for pair in row_class]
    begins = [0]
    for row_class in laid.classes:
        begins.append(begins[-1] + len(row_class))
    return (
        ("Index", index),
        ("groups", problem.groups),
        ("in_channels", problem.in_channels_per_group),
        ("out_channels", problem.out_channels_per_group),
        ("stride_y", problem.height.stride),
        ("stride_x", problem.width.stride),
        ("padding_y", problem.height.padding),
        ("padding_x", problem.width.padding),
        ("vector", laid.vector),
        ("row_step", laid.row_step),
        ("warp_channels", warp_channels(problem)),
        ("m_tiles", laid.tile.m_tiles),
        ("m_groups", len(laid.m_class)),
        ("m_class", laid.m_class),
        ("m_begin", laid.m_begin),
        ("group_pairs", laid.m_begin[-1]),
        ("classes", len(laid.classes)),
        ("class_begin", tuple(begins)),
        ("pair_m_tile", tuple(pair.m_tile for pair in pairs)),
        ("pair_slot_y", tuple(pair.slot_y for pair in pairs)),
        ("pair_slot_x", tuple(pair.slot_x for pair in pairs)),
        ("split", laid.split),
        ("half", laid.tile.half),
        ("most_unfit_weights", min(laid.most_unfit_weights, MOST_UNFIT_WEIGHTS)),
        ("shares", laid.shares),
        ("resident", laid.tile.resident),
        ("reaches", laid.reaches),
        ("slots_x", len(laid.slots_x)),
        ("slot_x", laid.slots_x),
    )


def _pair_fragments(laid: Layout) -> tuple[int, ...]:
    """Where each pair's resident weights lie in a chunk, for a warp of phase 0 and its first
    channels, in fragments; other phases and channels lie a constant distance further on.
    """
    phase_tiles = -(-laid.problem.out_channels_per_group // warp_channels(laid.problem))
    return tuple(
        (
            pair.slot_y * laid.problem.height.stride * len(laid.slots_x)
            + laid.slots_x.index(pair.slot_x)
        )
        * phase_tiles
        for pairs in laid.classes
        for pair in pairs
    )


def _schedule(pairs: tuple[Pair, ...], tile: Tile, chunks: int) -> tuple[int, int, int]:
    """(parts of a stage in a loop, stages unrolled together, pairs whose weights a thread holds).

    The first that divides; shared memory answers in less time than a pair's products take. A part's
    first weights come while the last ones of the part before are used, so not to their place.
    """
    columns = tile.rows * tile.columns
    if tile.m_tiles == 1 and len(pairs) * columns > MOST_UNROLLED:
        for parts in range(2, len({pair.slot_y for pair in pairs}) + 1):
            count = len(pairs) // parts
            if are_alike(pairs, parts) and count * columns <= MOST_UNROLLED:
                for ahead in (3, 4, 2):
                    if ahead <= count and count % ahead != 1:
                        return parts, 1, ahead
    for ahead in (3, 4, 2):
        for unroll in (1, 2, 4):
            held = len(pairs) * unroll
            if chunks % unroll == 0 and held % ahead == 0 and held <= 64:
                return 1, unroll, ahead
    return 1, 1, 1


def are_alike(pairs: tuple[Pair, ...], parts: int) -> bool:
    """Whether so many equal parts all have the first one's slots, further on in y."""
    count = len(pairs) // parts
    if len(pairs) % parts:
        return False
    step = pairs[count].slot_y - pairs[0].slot_y
    first = pairs[:count]
    return all(
        pair
        == dataclasses.replace(first[i % count], slot_y=first[i % count].slot_y + i // count * step)
        for i, pair in enumerate(pairs)
    )


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The packing, and the kernel: one block for each SM, whose warpgroups walk the tiles."""
    return packed_launches(problem, target, tile, source(problem, tile))


def packed_launches(
    problem: Problem, target: Target, tile: Tile, kernel: KernelSource
) -> tuple[Launch, ...]:
    """The launch that lays the weights out, and that of the kernel."""
    laid = layout(problem, tile)
    elements = laid.packed_bytes // 4 + laid.status_words
    index = family.index_type(problem, elements)
    packing = KernelSource(
        stem=PACK_STEM,
        constants=(*_layer_constants(problem, laid, index), *hopper.tap_constants(problem)),
        arguments=(
            ("weight", "const void*"),
            ("packed", "void*"),
            ("status", "void*"),
            ("items", index),
            ("half_items", index),
            *family.stride_fields("weight", "in out h w", index),
        ),
        shared_bytes=0,
        threads=128,
    )
    places: dict[str, Argument] = {
        "weight": Address("w"),
        "packed": Address("packed"),
        "status": Address("packed", laid.packed_bytes),
        **strides("weight", "in out h w", "w"),
    }
    items: dict[str, Argument] = {"items": laid.all_items, "half_items": laid.half_items}
    tiles_y, tiles_x = laid.tiles_yx
    arguments: dict[str, Argument] = {
        **places,
        "source": Address("x"),
        "tiles": laid.tiles,
        "tiles_y": tiles_y,
        "tiles_x": tiles_x,
        "patch_row": laid.patch_row,
        "source_height": problem.height.size,
        "source_width": problem.width.size,
        **strides("source", "n c h w", "x"),
        **output_rows(problem),
    }
    if problem.x_aligned:
        arguments["source_map"] = TensorMap(
            Address("x"),
            dims=tuple(reversed(problem.x_shape)),
            strides=(Stride("x", 2), Stride("x", 1), Stride("x", 0)),
            box=(laid.patch_columns, laid.patch_rows, CHANNELS, 1),
        )
    grid = min(target.multiprocessors, -(-laid.tiles // laid.rings))
    return (
        Launch(
            "packing",
            packing,
            laid.pack_blocks,
            places | items,
            "lays the weights out",
            packed=elements,
        ),
        Launch("kernel", kernel, grid, arguments, aligned=True),
    )
