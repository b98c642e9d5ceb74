"""`direct_forward`: layers bound by what they move, on multiply-adds (`direct_forward.cu`)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import family, image_tiles
from tconv.kernels.image_tiles import AIMED_SHARED, POSITIONS_BYTES, RESERVED_SHARED
from tconv.kernels.launch import Launch
from tconv.kernels.source import Constant, KernelSource
from tconv.problem import Axis, Direction, Problem

STEM = "direct_forward"
DIRECTION: Direction = "forward"

THREADS = 128
WARPS = THREADS // 32

MOST_PRODUCTS = 3072
"""Multiply-adds of one input channel that are unrolled; the instruction cache holds about twice."""

MOST_SPARE_WEIGHTS = 1024
"""Floats of weights that a block may hold twice."""

OTHER_REGISTERS = 40
"""Registers of a thread for addresses, counters and copies."""

LEAST_DEPTH = 2
"""Fewer input channels of a step are not worth its barrier."""


@dataclass(frozen=True)
class Tile:
    """How a block of 128 threads divides its outputs.

    Attributes:
        threads_x: threads along the pixels of a row.
        threads_o: threads along the output channels, at most; the others lie along y.
        pixels: neighbouring pixels of a thread.
        channels: output channels of a thread, at most.
        rows: rows of pixels that a thread computes one after another, where one step holds all
            input channels.
        depth: input channels of a step.
        sums: accumulators of a thread, at most.
        blocks: blocks that an SM must hold, which bounds the registers.
    """

    threads_x: int
    threads_o: int
    pixels: int
    channels: int
    rows: int
    depth: int
    sums: int
    blocks: int

    @property
    def registers(self) -> int:
        """Registers of a thread that let an SM hold the blocks."""
        return (64 << 10) // (THREADS * self.blocks) // 8 * 8

    def __str__(self) -> str:
        """Output channels x rows x columns of a block, where the layer has that many channels."""
        threads_y = THREADS // (self.threads_x * self.threads_o)
        return (
            f"{self.threads_o * self.channels}x{threads_y * self.rows}x"
            f"{self.threads_x * self.pixels}/{self.channels}x{self.pixels}"
        )


TILES = (
    Tile(threads_x=8, threads_o=4, pixels=8, channels=4, rows=1, depth=8, sums=96, blocks=3),
    Tile(threads_x=8, threads_o=8, pixels=8, channels=4, rows=1, depth=8, sums=96, blocks=3),
    Tile(threads_x=32, threads_o=4, pixels=8, channels=4, rows=1, depth=8, sums=64, blocks=3),
    Tile(threads_x=8, threads_o=4, pixels=4, channels=4, rows=1, depth=8, sums=64, blocks=4),
    Tile(threads_x=8, threads_o=8, pixels=4, channels=4, rows=1, depth=8, sums=64, blocks=4),
    Tile(threads_x=32, threads_o=4, pixels=4, channels=4, rows=1, depth=8, sums=64, blocks=4),
    Tile(threads_x=32, threads_o=1, pixels=4, channels=1, rows=8, depth=4, sums=32, blocks=5),
    Tile(threads_x=16, threads_o=1, pixels=4, channels=1, rows=8, depth=4, sums=32, blocks=5),
    Tile(threads_x=8, threads_o=1, pixels=4, channels=1, rows=2, depth=4, sums=32, blocks=5),
)


@dataclass(frozen=True)
class Taps:
    """The taps of one axis, for pixels of `stride` outputs that start at output 0.

    Attributes:
        phases: of each tap: the output of a pixel that it reaches.
        offsets: of each tap: the input that it reads, relative to the pixel's number.
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
        """The greatest offset less the least."""
        return max(self.offsets) - self.first


def taps_of(axis: Axis) -> Taps:
    """The taps of an axis: output `stride*m + phase` reads input `m + offset`."""
    reaches = [tap * axis.dilation - axis.padding for tap in range(axis.kernel)]
    return Taps(
        phases=tuple(reach % axis.stride for reach in reaches),
        offsets=tuple(-(reach // axis.stride) for reach in reaches),
    )


@dataclass(frozen=True)
class Layout:
    """A tile laid over a problem.

    Attributes:
        y, x: the taps of both axes.
        depth: input channels of a step.
        thread_rows: rows of pixels of a thread.
    """

    problem: Problem
    tile: Tile
    y: Taps
    x: Taps
    depth: int
    thread_rows: int

    @property
    def channels(self) -> int:
        """Output channels of a thread."""
        return min(self.tile.channels, self.problem.out_channels_per_group)

    @property
    def threads_o(self) -> int:
        """Threads along the output channels: a power of two."""
        wanted = -(-self.problem.out_channels_per_group // self.channels)
        return min(self.tile.threads_o, 1 << (wanted - 1).bit_length())

    @property
    def threads_y(self) -> int:
        """Threads along y."""
        return THREADS // (self.tile.threads_x * self.threads_o)

    @property
    def chunks(self) -> int:
        """Steps that hold all input channels."""
        return -(-self.problem.in_channels_per_group // self.depth)

    @property
    def tile_columns(self) -> int:
        """Pixels of a block along x."""
        return self.tile.threads_x * self.tile.pixels

    @property
    def tile_rows(self) -> int:
        """Pixels of a block along y."""
        return self.threads_y * self.thread_rows

    @property
    def tile_channels(self) -> int:
        """Output channels of a block."""
        return self.threads_o * self.channels

    @property
    def channel_tiles(self) -> int:
        """Blocks that the output channels of a group take."""
        return -(-self.problem.out_channels_per_group // self.tile_channels)

    @property
    def slot_sums(self) -> int:
        """Accumulators of a thread for one phase in y."""
        return self.channels * self.tile.pixels * len(self.x.used)

    @property
    def groups_y(self) -> int:
        """Passes over the input channels, each with its share of the phases in y."""
        return -(-len(self.y.used) // max(1, self.tile.sums // self.slot_sums))

    @property
    def group_slots(self) -> int:
        """Phases in y of one pass."""
        return -(-len(self.y.used) // self.groups_y)

    @property
    def products(self) -> int:
        """Multiply-adds of a thread for one input channel and row, all passes."""
        return self.problem.taps * self.channels * self.tile.pixels

    @property
    def skew(self) -> int:
        """Columns between a multiple of 4 and the first that a tile reads."""
        return self.x.first % 4

    @property
    def lead(self) -> int:
        """Vectors of 4 columns before those, so that a row of the patch begins with a sector."""
        return self.x.first // 4 % 2 if self.whole_sectors else 0

    @property
    def whole_sectors(self) -> bool:
        """Whether rows of the patch are copied as sectors of the input."""
        return self.source_vectors and self.tile_columns % 8 == 0

    @property
    def patch_vectors(self) -> tuple[int, int]:
        """Vectors of 4 columns in a row of the patch: loaded, and with padding."""
        used = self.lead - (-(self.skew + self.tile_columns + self.x.span) // 4)
        if self.whole_sectors:
            used = -(-used // 2) * 2
        multiple = self.tile.pixels // 4
        return used, -(-used // multiple) * multiple

    @property
    def window_vectors(self) -> int:
        """Vectors of 4 columns that a thread reads of a row of the patch."""
        return -(-(self.skew + self.tile.pixels + self.x.span) // 4)

    @property
    def patch_rows(self) -> int:
        """Input rows of a tile, its halo included."""
        return self.tile_rows + self.y.span

    @property
    def row_weights(self) -> int:
        """Weights of a thread for one input channel and tap in y, with padding."""
        return -(-self.problem.width.kernel * self.channels // 4) * 4

    @property
    def weights(self) -> int:
        """Floats of a tile's weights and bias."""
        weights = self.problem.in_channels_per_group * self.problem.height.kernel
        weights *= self.threads_o * self.row_weights
        return weights + -(-self.tile_channels // 4) * 4

    @property
    def group_tiles(self) -> int:
        """Tiles that share their pixels, each with weights of its own."""
        return self.problem.groups * self.channel_tiles

    @property
    def weight_buffers(self) -> int:
        """Copies of a tile's weights: two where the next tile often needs others, and few."""
        return 2 if self.group_tiles > 1 and self.weights <= MOST_SPARE_WEIGHTS else 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        patch = self.depth * self.patch_rows * self.patch_vectors[1] * 4
        outputs = THREADS * self.tile.pixels * self.problem.width.stride
        buffers = 2 * patch + outputs + self.weight_buffers * self.weights
        return 4 * buffers + POSITIONS_BYTES

    @property
    def tiles_yx(self) -> tuple[int, int]:
        """Tiles along y and x."""
        height, width = self.problem.height, self.problem.width
        return (
            -(-height.output_size // (height.stride * self.tile_rows)),
            -(-width.output_size // (width.stride * self.tile_columns)),
        )

    @property
    def tiles(self) -> int:
        """Tiles of the launch."""
        tiles_y, tiles_x = self.tiles_yx
        return self.group_tiles * self.problem.batch * tiles_y * tiles_x

    @property
    def rows_in_image(self) -> float:
        """Share of the tiles' rows that warps compute.

        A warp whose first row lies behind the image's last is done where one step holds all input
        channels; in deeper tiles it takes part in the barriers, and computes.
        """
        if self.chunks > 1:
            return 1.0
        of_warp = max(1, 32 // (self.tile.threads_x * self.threads_o))
        height = self.problem.height
        pixel_rows = -(-height.output_size // height.stride)
        return -(-pixel_rows // of_warp) * of_warp / (self.tiles_yx[0] * self.tile_rows)

    def blocks(self, target: Target) -> int:
        """Blocks that an SM holds."""
        bound = bound_blocks(self.problem, self.tile)
        return image_tiles.blocks_held(self.shared_bytes, bound, target)

    @property
    def source_vectors(self) -> bool:
        """Whether the input is copied by 16 bytes."""
        return image_tiles.source_vectors(self.problem)

    @property
    def store_vector(self) -> int:
        """Floats of the widest store that every output row is aligned for."""
        return image_tiles.store_vector(self.problem)


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    y, x = taps_of(problem.height), taps_of(problem.width)
    channels = problem.in_channels_per_group
    depth = min(tile.depth, channels)
    # Rows beyond the image's, or depth beyond what lets enough blocks share an SM, are no use.
    rows = tile.rows if depth == channels else 1
    while True:
        laid = Layout(problem, tile, y, x, depth, rows)
        pixel_rows = -(-problem.height.output_size // problem.height.stride)
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


def bound_blocks(problem: Problem, tile: Tile) -> int:
    """The launch bound: 64-bit offsets take registers of one block."""
    return tile.blocks - (1 if problem.wide_offsets else 0)


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    if target.capability < (8, 0):
        return f"copies by cp.async, which sm_80 brought, the target is {target.arch}"
    if problem.dtype != "float32":
        return f"computes float32, not {problem.dtype}"
    if problem.y_layout != "contiguous":
        return f"writes contiguous outputs, not {problem.y_layout}"
    return family.phases_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    laid = layout(problem, tile)
    if laid.slot_sums > tile.sums:
        return (
            f"a thread would hold {laid.slot_sums} sums for one phase in y, "
            f"its registers allow {tile.sums}"
        )
    held = laid.slot_sums * laid.group_slots + 4 * laid.window_vectors + laid.row_weights
    if held > tile.registers - OTHER_REGISTERS:
        return (
            f"a thread would hold {held} sums, inputs and weights in registers, "
            f"there are {tile.registers - OTHER_REGISTERS} for them"
        )
    if laid.products > MOST_PRODUCTS:
        return f"{laid.products} unrolled multiply-adds exceed the limit of {MOST_PRODUCTS}"
    return image_tiles.shared_why_not(laid.shared_bytes, target)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: what the busiest SM issues, or waits for of shared memory, and the bytes.

    The two overlap, but never wholly: a part of the lesser is added. Factors are fitted by least
    squares of the logarithm to the 184 rows that benchmarks/fit_costs.py reads of it: off by
    13% in the root mean square.
    """
    laid = layout(problem, tile)
    issue, shared = thread_work(laid)
    tiles = -(-laid.tiles // target.multiprocessors)
    resident = min(tiles, laid.blocks(target))
    # Of the issue slots: few warps leave more of them empty.
    efficiency = min(0.85, 0.45 + 0.12 * resident)
    busy = 0.97 * tiles * max(issue / efficiency, WARPS * shared) / 1.7e9
    # A block begins with its weights, which a thread copies, and for TF32 rounds, one by one.
    passes = 2 if problem.math == "tf32" else 1
    busy += 200 * passes * laid.weights / THREADS / 1.7e9
    # While some blocks walk one tile more than others, or all of an SM's wait, less is moved.
    rounds = laid.tiles / grid(problem, target, tile)
    uneven = 1 + 0.3 * (math.ceil(rounds) / rounds - 1) + 0.1 / resident
    if problem.width.output_size % 4:  # rows that begin between two vectors; least in long pieces
        if tile.channels > 1:
            uneven *= 1.25 if tile.threads_x == 32 else 1.48
        else:
            uneven *= 1.48 if tile.threads_x == 32 else 1.75
    if laid.tiles_yx[1] > 1:
        uneven *= 1.04  # by hand, from bilinear_dw: pieces of rows
    moved = problem.bytes / 4e12 * uneven
    return max(busy, moved) + 0.2 * min(busy, moved) + 5.5e-6


def thread_work(laid: Layout) -> tuple[float, float]:
    """Instructions of a warp for one tile, and the cycles that shared memory is busy with them.

    Means of the warps, of which some may have no row in the image. A shared access of 16 bytes a
    lane takes 4 cycles, 2 where several lanes read the same.
    """
    problem, tile = laid.problem, laid.tile
    channels = problem.in_channels_per_group
    rows = laid.thread_rows * laid.rows_in_image
    inputs = laid.window_vectors * (laid.y.span + 1) * laid.groups_y
    weights = problem.height.kernel * laid.row_weights / 4
    issue = rows * channels * (laid.products + laid.groups_y * 4 + inputs + weights)
    shared = rows * channels * (4.0 * inputs + 2.0 * weights)

    # What whole sectors add to a row was not found to cost anything.
    used = -(-(laid.skew + laid.tile_columns + laid.x.span) // 4)
    vector = 4 if laid.source_vectors else 1
    places = -(-laid.patch_rows * used * 4 // vector // 32) / WARPS
    each = (11 + 4.5 * vector) if problem.math == "tf32" else 11
    steps = laid.chunks * (laid.groups_y if laid.chunks > 1 else 1)
    issue += steps * (places * (40 + laid.depth * each) + 60) + 150
    shared += steps * places * laid.depth * vector * (3 if problem.math == "tf32" else 1)

    full = len(laid.y.used) * rows
    empty = problem.height.stride * rows - full
    outputs = laid.channels * tile.pixels * problem.width.stride
    stores = outputs / laid.store_vector + 6 * laid.channels * 32 / tile.threads_x
    issue += full * (outputs / 2 + outputs / laid.store_vector + stores) + empty * stores
    return issue, shared + full * 2 * outputs


def source(problem: Problem, tile: Tile) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    laid = layout(problem, tile)
    y, x = laid.y, laid.x
    index = family.index_type(problem, laid.tiles)
    empty = tuple(phase for phase in range(problem.height.stride) if phase not in y.used)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Index", index),
        ("blocks", bound_blocks(problem, tile)),
        ("shared_bytes", laid.shared_bytes),
        ("groups", problem.groups),
        ("in_channels", problem.in_channels_per_group),
        ("out_channels", problem.out_channels_per_group),
        ("bias", problem.bias),
        ("round_to_tf32", problem.math == "tf32"),
        ("threads_x", tile.threads_x),
        ("threads_o", laid.threads_o),
        ("thread_pixels", tile.pixels),
        ("thread_channels", laid.channels),
        ("thread_rows", laid.thread_rows),
        ("depth", laid.depth),
        ("group_slots", laid.group_slots),
        ("group_products", laid.products // laid.groups_y),
        ("weight_buffers", laid.weight_buffers),
        ("source_vectors", laid.source_vectors),
        ("store_vector", laid.store_vector),
        *family.axis_constants(problem),
        ("first_offset_y", y.first),
        ("first_offset_x", x.first),
        ("span_y", y.span),
        ("span_x", x.span),
        ("skew", laid.skew),
        ("lead", laid.lead),
        ("patch_vectors", laid.patch_vectors[0]),
        # Phases in y that have taps are slots; those that have none are listed apart.
        ("slots_y", len(y.used)),
        ("slot_phase", y.used),
        ("empty_phase", empty or (0,)),
        ("tap_slot", tuple(y.used.index(phase) for phase in y.phases)),
        ("tap_row", tuple(offset - y.first for offset in y.offsets)),
        ("tap_phase", x.phases),
        ("tap_column", tuple(offset - x.first for offset in x.offsets)),
    )
    return KernelSource(
        stem=STEM,
        constants=constants,
        arguments=image_tiles.argument_fields(index),
        shared_bytes=laid.shared_bytes,
        threads=THREADS,
    )


def grid(problem: Problem, target: Target, tile: Tile) -> int:
    """As many blocks as the SMs hold; each walks the tiles from its own on in steps of the grid."""
    laid = layout(problem, tile)
    return image_tiles.grid(target, laid.blocks(target), laid.tiles, laid.group_tiles)


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel."""
    laid = layout(problem, tile)
    arguments = image_tiles.arguments(problem, laid.tiles, laid.tiles_yx)
    blocks = grid(problem, target, tile)
    return (Launch("kernel", source(problem, tile), blocks, arguments, aligned=True),)
