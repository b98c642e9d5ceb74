"""`mma_overlap_forward`: few outputs, many taps, on `mma.sync` (`mma_overlap_forward.cu`)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import direct_forward, family, image_tiles
from tconv.kernels.image_tiles import AIMED_SHARED, RESERVED_SHARED
from tconv.kernels.launch import Launch
from tconv.kernels.source import Constant, KernelSource
from tconv.problem import Axis, Direction, Phase, Problem

STEM = "mma_overlap_forward"
DIRECTION: Direction = "forward"

OTHER_REGISTERS = 20
"""Registers of a thread for addresses, counters and one fragment of pixels: the least."""

FRAGMENT_REGISTERS = 4
"""Those for each further fragment of pixels that is multiplied at a time."""

SCALAR_REGISTERS = 12
"""Those for copies of single elements."""

MOST_PRODUCTS = 512
"""Instructions `mma` of a pass that are unrolled."""

MOST_LOADS = 512
"""Products that a warp's gathering of a step is unrolled over."""

MOST_FRAGMENTS = 5
"""Fragments of 8 pixels that a warp multiplies at a time, at most."""

MOST_UNITS = 8
"""Units of outputs that a warp gathers, at most: what more need beside their sums has spilled."""

MOST_STAGES = 4
"""Steps whose copies are under way or used, at most."""

MOST_STRIDE = 16
"""Outputs of a pixel along x that a thread holds, at most."""

STEP_BYTES = 64
"""Shared memory in which a block keeps where a step's rows lie."""

UNIT_BYTES = 32
"""Shared memory in which a block keeps what a warp gathers."""

STEP_ROUNDS = 4
"""Steps that starting a tile costs."""


@dataclass(frozen=True)
class Tile:
    """How a block divides its work.

    Attributes:
        warps: of a block.
        pixels: of a strip of an image, at most: a multiple of 32.
        row_tiles: fragments of 16 rows of the product that a warp owns, at most.
        blocks: blocks that an SM must hold, which bounds the registers.
    """

    warps: int
    pixels: int
    row_tiles: int
    blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def registers(self) -> int:
        """Registers of a thread that let an SM hold the blocks."""
        return min(255, (64 << 10) // (self.threads * self.blocks) // 8 * 8)

    def __str__(self) -> str:
        """Rows of the product of a warp x pixels of a strip / warps of an SM."""
        return f"{16 * self.row_tiles}x{self.pixels}/{self.warps}x{self.blocks}"


TILES = (
    Tile(warps=6, pixels=64, row_tiles=3, blocks=2),
    Tile(warps=8, pixels=128, row_tiles=3, blocks=1),
    Tile(warps=4, pixels=64, row_tiles=3, blocks=3),
    Tile(warps=8, pixels=64, row_tiles=3, blocks=2),
    Tile(warps=12, pixels=128, row_tiles=3, blocks=1),
    Tile(warps=8, pixels=64, row_tiles=6, blocks=1),
)


@dataclass(frozen=True)
class Division:
    """How the warps of a block divide a step's products.

    Attributes:
        row_tiles: fragments of 16 rows of a warp.
        m_groups, k_groups, n_groups: warps along the rows, the input channels and the pixels.
        k_steps: fragments of 8 input channels of a warp.
    """

    row_tiles: int
    m_groups: int
    k_groups: int
    n_groups: int
    k_steps: int

    @property
    def weights(self) -> int:
        """Registers that hold a warp's weights."""
        return 4 * self.row_tiles * self.k_steps


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below the value."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """A tile laid over a problem.

    Attributes:
        division: the warps' shares of the products.
        step_rows: input rows of a step.
        fragments, passes: of 8 pixels that a warp multiplies at a time, and how many times.
        stages: steps that shared memory holds.
    """

    problem: Problem
    tile: Tile
    division: Division
    step_rows: int
    fragments: int
    passes: int
    stages: int

    @property
    def stored_rows(self) -> int:
        """Rows of products that shared memory holds: whole fragments."""
        return 16 * self.division.m_groups * self.division.row_tiles

    @property
    def taps_x(self) -> direct_forward.Taps:
        """The taps along x, for pixels that start at output 0."""
        return direct_forward.taps_of(self.problem.width)

    @property
    def tap_rows(self) -> tuple[Phase, ...]:
        """The phases along y."""
        return self.problem.height.phases

    @property
    def strips(self) -> int:
        """Strips of an image."""
        return -(-pixels_x(self.problem) // self.tile.pixels)

    @property
    def strip(self) -> int:
        """Pixels of a strip: whole warps where there are several."""
        pixels = pixels_x(self.problem)
        return pixels if self.strips == 1 else round_up(-(-pixels // self.strips), 32)

    @property
    def first_column(self) -> int:
        """The input column from which the first strip's pixels are multiplied."""
        first = self.taps_x.first
        if self.strips == 1:
            first = min(max(0, first), self.problem.width.size - 1)
        return first // 4 * 4

    @property
    def columns(self) -> int:
        """Input columns of a strip that are multiplied."""
        end = self.strip + self.taps_x.first + self.taps_x.span
        if self.strips == 1:
            end = max(self.first_column + 1, min(end, self.problem.width.size))
        return round_up(end - self.first_column, 8)

    @property
    def guard(self) -> int:
        """Columns of zeros before those."""
        return round_up(max(0, self.first_column - self.taps_x.first), 2)

    @property
    def row_columns(self) -> int:
        """Columns of products of a row, those of zeros included."""
        last = self.guard + self.strip + self.taps_x.first + self.taps_x.span - self.first_column
        return round_up(max(self.guard + self.columns, last), 2)

    @property
    def step_fragments(self) -> int:
        """Fragments of 8 pixels of a step."""
        return self.step_rows * self.columns // 8

    @property
    def patch_channel(self) -> int:
        """Floats of a channel of a step: 8 more than a multiple of 16."""
        used = self.step_rows * self.columns
        return used + (24 - used % 16) % 16

    @property
    def depth(self) -> int:
        """Input channels of a step."""
        return 8 * self.division.k_groups * self.division.k_steps

    @property
    def product_pitch(self) -> int:
        """Floats of a row of products: 8 more than a multiple of 16."""
        used = self.step_rows * self.row_columns
        return used + (24 - used % 16) % 16

    @property
    def direct(self) -> bool:
        """Whether a thread's outputs of a row are stored as a vector."""
        return self.store_vector % self.problem.width.stride == 0

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a step's pixels."""
        return 4 * self.depth * self.patch_channel

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        products = self.division.k_groups * self.stored_rows * self.product_pitch
        outputs = self.tile.warps * (4 if self.direct else 32 * self.problem.width.stride)
        places = UNIT_BYTES * self.units + STEP_BYTES * (self.stages + 1)
        return self.stages * self.stage_bytes + 4 * (products + outputs) + places

    @property
    def lines(self) -> int:
        """Units along x, of 32 pixels."""
        return -(-self.strip // 32)

    @property
    def units(self) -> int:
        """Units of outputs that the warps gather."""
        return self.lines * self.problem.height.stride * self.problem.out_channels_per_group

    @property
    def unit_slots(self) -> int:
        """Units of a warp."""
        return -(-self.units // self.tile.warps)

    @property
    def most_taps_y(self) -> int:
        """Taps of the phase along y that has most."""
        return max(len(phase.taps) for phase in self.tap_rows)

    @property
    def span_y(self) -> int:
        """Input rows above its own that a row of pixels reads."""
        return max(tap.shift for phase in self.tap_rows for tap in phase.taps)

    @property
    def first_shifts(self) -> tuple[int, ...]:
        """Of each phase along y, the shift of its first tap."""
        return tuple(phase.taps[0].shift if phase.taps else 0 for phase in self.tap_rows)

    @property
    def sums(self) -> int:
        """Registers of a thread that hold outputs which are not complete."""
        return self.unit_slots * window(self.problem) * self.problem.width.stride

    @property
    def loads(self) -> int:
        """Products that a warp gathers of a step's row, unrolled."""
        taps = self.most_taps_y * self.problem.width.kernel
        return self.unit_slots * taps * self.division.k_groups

    @property
    def group_tiles(self) -> int:
        """Tiles that share their place, each with inputs and weights of its own."""
        return self.problem.groups

    def blocks(self, target: Target) -> int:
        """Blocks that an SM holds."""
        bound = bound_blocks(self.problem, self.tile)
        return max(1, image_tiles.blocks_held(self.shared_bytes, bound, target))

    def tile_rows(self, target: Target) -> int:
        """Rows of pixels of a tile: those that keep all SMs busy for the shortest time."""
        rows = len(self.problem.height.q_range)
        slots = target.multiprocessors * self.blocks(target)
        images = self.problem.groups * self.problem.batch * self.strips

        def steps(count: int) -> int:
            tile = -(-rows // count)
            each = -(-(tile + self.span_y) // self.step_rows) + STEP_ROUNDS
            return -(-images * -(-rows // tile) // slots) * each

        most = max(1, min(rows, 4 * slots // images + 1))
        return -(-rows // min(range(1, most + 1), key=steps))

    def tiles_yx(self, target: Target) -> tuple[int, int]:
        """Tiles along y and x."""
        return -(-len(self.problem.height.q_range) // self.tile_rows(target)), self.strips

    def tiles(self, target: Target) -> int:
        """Tiles of the launch."""
        tiles_y, tiles_x = self.tiles_yx(target)
        return self.group_tiles * self.problem.batch * tiles_y * tiles_x

    @property
    def source_vectors(self) -> bool:
        """Whether the input is copied by 16 bytes."""
        return image_tiles.source_vectors(self.problem)

    @property
    def store_vector(self) -> int:
        """Floats of the widest store that every output row is aligned for."""
        return image_tiles.store_vector(self.problem)


def product_rows(problem: Problem) -> int:
    """Rows of the product: output channels of a group, and taps."""
    return problem.out_channels_per_group * problem.taps


def pixels_x(problem: Problem) -> int:
    """Pixels along x, of `stride` outputs each."""
    return -(-problem.width.output_size // problem.width.stride)


def window(problem: Problem) -> int:
    """Output rows of a phase that an input row reaches, or that lie between those."""
    most = max(len(phase.taps) for phase in problem.height.phases)
    return (most - 1) * shift_step(problem.height) + 1


def shift_step(axis: Axis) -> int:
    """Inputs between those that neighbouring taps of a phase read."""
    return axis.dilation // math.gcd(axis.stride, axis.dilation)


def divide(problem: Problem, tile: Tile) -> Division | None:
    """Shares the products among the warps, so that shared memory has least to do, or None.

    A fragment of pixels is read by the warps of all row groups; each share of the input channels
    has its own sums, stored and gathered.
    """
    row_fragments = -(-product_rows(problem) // 16)
    k_fragments = -(-problem.in_channels_per_group // 8)
    found: list[tuple[float, Division]] = []
    for most in range(1, tile.row_tiles + 1):
        m_groups = -(-row_fragments // most)
        row_tiles = -(-row_fragments // m_groups)
        for k_groups in range(1, tile.warps // m_groups + 1):
            k_steps = -(-k_fragments // k_groups)
            n_groups = tile.warps // (m_groups * k_groups)
            one = Division(row_tiles, m_groups, k_groups, n_groups, k_steps)
            # Half of what is left is for sums.
            if one.weights + 4 * row_tiles * 2 > spare_registers(problem, tile, 2):
                continue
            used = m_groups * k_groups * n_groups / tile.warps
            reads = 2 * k_fragments * m_groups
            found.append(((reads + 8 * row_fragments * k_groups) / used, one))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def spare_registers(problem: Problem, tile: Tile, fragments: int) -> int:
    """Registers of a thread for weights and sums."""
    other = OTHER_REGISTERS + FRAGMENT_REGISTERS * (fragments - 1)
    if not image_tiles.source_vectors(problem):
        other += SCALAR_REGISTERS
    return tile.registers - other


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout | None:
    """Lays a tile over a problem; None where the warps cannot hold the weights."""
    division = divide(problem, tile)
    if division is None:
        return None
    one = Layout(problem, tile, division, 1, 1, 1, 2)
    most = max(1, (tile.pixels + 32) // one.columns)
    most = min(most, len(problem.height.q_range))

    def waste(rows: int) -> float:
        fragments = rows * one.columns // 8
        return -(-fragments // division.n_groups) * division.n_groups / fragments

    step_rows = min(range(most, 0, -1), key=waste)
    own = -(-step_rows * one.columns // 8 // division.n_groups)

    def fits(count: int) -> bool:
        held = division.weights + one.sums + 4 * division.row_tiles * count
        return held <= spare_registers(problem, tile, count)

    counts = [n for n in range(min(own, MOST_FRAGMENTS), 0, -1) if n == 1 or fits(n)]

    def slowness(count: int) -> float:
        # Products that do not wait for each other hide their latency.
        return -(-own // count) * count * (1 + 1 / (count * division.row_tiles))

    fragments = min(counts, key=slowness)
    passes = -(-own // fragments)
    budget = AIMED_SHARED // tile.blocks - RESERVED_SHARED
    laid = Layout(problem, tile, division, step_rows, fragments, passes, 2)
    spare = max(0, budget - laid.shared_bytes) // laid.stage_bytes
    stages = min(MOST_STAGES, 2 + spare)
    return Layout(problem, tile, division, step_rows, fragments, passes, stages)


def laid_out(problem: Problem, tile: Tile) -> Layout:
    """The layout of a tile that serves."""
    laid = layout(problem, tile)
    assert laid is not None, "tile_why_not refuses it"
    return laid


def bound_blocks(problem: Problem, tile: Tile) -> int:
    """The launch bound: 64-bit offsets take registers of one block."""
    return max(1, tile.blocks - (1 if problem.wide_offsets else 0))


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    refusal = image_tiles.mma_why_not(problem, target)
    if refusal is not None:
        return refusal
    if problem.width.stride > MOST_STRIDE:
        stride = problem.width.stride
        return f"holds {MOST_STRIDE} outputs of a pixel along x, the stride is {stride}"
    return family.phases_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    laid = layout(problem, tile)
    if laid is None:
        return (
            f"{tile.warps} warps cannot hold the weights of {product_rows(problem)} rows and "
            f"{problem.in_channels_per_group} input channels in registers"
        )
    division = laid.division
    held = division.weights + laid.sums + 4 * division.row_tiles * laid.fragments
    most = spare_registers(problem, tile, laid.fragments)
    if held > most:
        return f"a thread would hold {held} weights and sums in registers, {most} are for them"
    if laid.unit_slots > MOST_UNITS:
        return (
            f"a warp would gather {laid.unit_slots} units of 32 pixels of an output channel and a "
            f"phase, the limit is {MOST_UNITS}"
        )
    if laid.loads > MOST_LOADS:
        return f"{laid.loads} unrolled additions exceed the limit of {MOST_LOADS}"
    products = division.k_steps * division.row_tiles * laid.fragments
    if products > MOST_PRODUCTS:
        return f"{products} unrolled products exceed the limit of {MOST_PRODUCTS}"
    return image_tiles.shared_why_not(laid.shared_bytes, target)


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: what the busiest SM issues, multiplies or waits for, and the bytes.

    They overlap, but never wholly: a part of the lesser is added. Factors are fitted by least
    squares of the logarithm to the 76 rows that benchmarks/fit_costs.py reads of it: off by
    6% in the root mean square.
    """
    laid = laid_out(problem, tile)
    issue, shared, multiply = step_work(laid)
    blocks = laid.blocks(target)
    tiles = laid.tiles(target)
    steps = -(-(laid.tile_rows(target) + laid.span_y) // laid.step_rows)
    resident = min(-(-tiles // target.multiprocessors), blocks)
    rounds = -(-tiles // (target.multiprocessors * resident))
    # Of the issue slots: few warps leave more of them empty.
    efficiency = 0.32 + 0.026 * resident * tile.warps
    busiest = max(issue / 4, shared, multiply)
    step = resident * busiest / efficiency
    if resident == 1:
        # A block multiplies and gathers in turns; only another one fills the gaps.
        step += 0.18 * (issue / 4 + shared + multiply - busiest)
    # The two barriers of a step, and the way of its first products, come on top; half a step more
    # is where a tile starts.
    busy = rounds * (steps + 0.5) * (step + 530) / 1.7e9
    # Rows and columns that neighbouring tiles and strips read as well.
    halo = 1 + laid.span_y / laid.tile_rows(target)
    halo *= max(1.0, laid.strips * laid.columns / problem.width.size)
    uneven = rounds * resident * target.multiprocessors / tiles
    moved = problem.bytes / 4e12 * halo * (1 + 0.3 * (uneven - 1))
    return max(busy, moved) + 0.41 * min(busy, moved) + 6.8e-6


def step_work(laid: Layout) -> tuple[float, float, float]:
    """Of a block's step: instructions, cycles of shared memory, and of the tensor cores."""
    problem, division = laid.problem, laid.division
    warps = division.m_groups * division.k_groups * division.n_groups
    fragments = warps * laid.passes * laid.fragments
    products = fragments * division.k_steps * division.row_tiles
    reads = fragments * division.k_steps * 2
    stores = fragments * division.row_tiles * 2
    vector = 4 if laid.source_vectors else 1
    copies = laid.depth * laid.step_rows * laid.columns / vector / 32
    outputs = laid.units * laid.step_rows * problem.width.stride
    taps = problem.taps / problem.height.stride * division.k_groups
    gathered = laid.units * laid.step_rows * taps
    issue = products + 3 * reads + stores + 5 * copies + 5.6 * gathered
    # By way of shared memory an output is written and read, and each store asks if it lies inside.
    each = 2 if laid.direct else 4 + 8 / image_tiles.store_vector(problem)
    issue += outputs * each + laid.units * laid.step_rows * 25
    issue += laid.tile.warps * 100
    shared = reads + 2 * stores + copies * vector + gathered + outputs * (0 if laid.direct else 2)
    return issue, shared, products * 1024 / 640


def source(problem: Problem, tile: Tile) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    laid = laid_out(problem, tile)
    division = laid.division
    height = problem.height
    # A tile is a row of pixels or more.
    most_tiles = problem.groups * problem.batch * laid.strips * len(height.q_range)
    index = family.index_type(problem, most_tiles)
    shift = laid.guard - laid.first_column
    constants: tuple[tuple[str, Constant], ...] = (
        ("Index", index),
        ("blocks", bound_blocks(problem, tile)),
        ("shared_bytes", laid.shared_bytes),
        ("groups", problem.groups),
        ("in_channels", problem.in_channels_per_group),
        ("out_channels", problem.out_channels_per_group),
        ("bias", problem.bias),
        ("m_tiles", division.row_tiles),
        ("m_groups", division.m_groups),
        ("k_groups", division.k_groups),
        ("n_groups", division.n_groups),
        ("k_steps", division.k_steps),
        ("fragments", laid.fragments),
        ("passes", laid.passes),
        ("stages", laid.stages),
        ("step_rows", laid.step_rows),
        ("columns", laid.columns),
        ("strip", laid.strip),
        ("first_column", laid.first_column),
        ("guard", laid.guard),
        ("row_columns", laid.row_columns),
        ("source_vectors", laid.source_vectors),
        ("store_vector", laid.store_vector),
        *family.axis_constants(problem),
        # Of each phase in y; taps of a phase follow each other in equal steps.
        ("first_tap_y", tuple(p.taps[0].index if p.taps else 0 for p in laid.tap_rows)),
        ("first_shift_y", laid.first_shifts),
        ("tap_count_y", tuple(len(phase.taps) for phase in laid.tap_rows)),
        ("tap_step_y", height.stride // math.gcd(height.stride, height.dilation)),
        ("shift_step_y", shift_step(height)),
        ("most_taps_y", laid.most_taps_y),
        ("most_first_shift_y", max(laid.first_shifts)),
        ("span_y", laid.span_y),
        # Of each tap in x: the output of a pixel, and where a strip's first pixel finds it.
        ("tap_phase_x", laid.taps_x.phases),
        ("tap_column_x", tuple(offset + shift for offset in laid.taps_x.offsets)),
    )
    return KernelSource(
        stem=STEM,
        constants=constants,
        arguments=(*image_tiles.argument_fields(index), ("tile_rows", "int")),
        shared_bytes=laid.shared_bytes,
        threads=tile.threads,
    )


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """As many blocks as the SMs hold; each walks the tiles from its own on in steps of the grid."""
    laid = laid_out(problem, tile)
    tiles, tiles_yx = laid.tiles(target), laid.tiles_yx(target)
    grid = image_tiles.grid(target, laid.blocks(target), tiles, laid.group_tiles)
    arguments = image_tiles.arguments(problem, tiles, tiles_yx)
    arguments["tile_rows"] = laid.tile_rows(target)
    return (Launch("kernel", source(problem, tile), grid, arguments, aligned=True),)
