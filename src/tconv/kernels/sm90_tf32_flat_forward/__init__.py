"""`sm90_tf32_flat_forward`: the output of layers with many channels on Hopper's tensor cores.

float32 tensors with TF32 products. `sm90_tf32_flat_pack` lays out weights and pixels first. Tiles
marked `half` multiply in float16, whose significand is TF32's; where float16 cannot hold all the
values, a second launch of the kernel computes the layer again in TF32. See
`sm90_tf32_flat_forward.cu`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.launch import Address, Argument, Launch, TensorMap, output_rows, strides
from tconv.kernels.source import TENSOR_MAP, KernelSource
from tconv.problem import Direction, Problem

STEM = "sm90_tf32_flat_forward"
PACK_STEM = "sm90_tf32_flat_pack"
DIRECTION: Direction = "forward"

HOPPER = Target.named("sm_90a")
"""What sources are made for."""

WARPGROUP = 128
PACK_THREADS = 256
CONSUMERS = 2
WARPS = 4
WARP_ROWS = 16
GROUP_ROWS = 64
LINE_WORDS = 32
"""Of a position's channels in a stage: 32 channels in TF32, 64 in float16."""

LINE_BYTES = LINE_WORDS * 4
WEIGHT_BYTES = GROUP_ROWS * LINE_BYTES
MOST_PIXEL_STAGES = 6
MOST_RESIDENT_PIXEL_STAGES = 8
"""Beside resident weights, where pixels are all that comes."""

MOST_WEIGHT_STAGES = 8
ENOUGH_STAGES = (3, 4)
"""Of pixels and of weights, where the consumers write outputs and rows are of all phases in x. More
would fit: random59 takes 0.0486 ms so, 0.0504 with four and four and 0.0543 with six and six.
"""

MOST_BOX = 256
PACK_POSITIONS = 128
PACK_WEIGHTS = 320
"""Weights of one input channel that the packing takes at a time, if a channel's taps are fewer. In
float16, where it takes twice the channels, half as many, and half the positions.
"""

LEAST_ITEMS = 528
"""Pieces that the packing is divided into, if whole warps' rows allow it: four for each SM of an
H100 or H200, so that more loads are under way.
"""

MANY_TAPS = 256
"""Of one channel, from which on a piece of weights is of one phase in y."""

LEAST_WEIGHT_ITEMS = 128
"""Pieces of weights, if they have as many channels: one with many takes longer than all pixels."""

LEAST_BYTES_OF_GROUPS = 8 << 20
"""Packed weights of all groups from which on a group's tiles follow each other. stylegan2_mod, with
19 MB, takes 2 to 18% less time so, by tile; random13, with 5 MB, and three with less take as long,
or up to 2% more (random42's 128x96, 7%).
"""

PIXEL_EXPONENT = 9
"""Float16 pixels are multiplied by 2 to its power: they may then lie between 1.2e-7 and 127."""

MOST_SLIGHT = 4
"""Times that 8 channels of a pixel of an image may have a value below that, at most. Of images of
10^6 normal values one in 10 has one.
"""

FEW_OCTETS, OCTETS_OF_SLIGHT = 1024, 4096
"""Of normal values one in 1.3 * 10^6 times 8 channels has one: up to the first number in a batch,
none is allowed; for each of the second in an image one more than one.
"""

MOST_HALF_BLOCKS = 4096
"""Of a packing in float16: the blocks of the kernel read a word of each."""

STATUS_WORDS = 8
"""Room for `Status` of sm90_tf32_flat_forward/status.cuh, in 4 bytes."""


@dataclass(frozen=True)
class Tile:
    """What one block computes at a time.

    Attributes:
        columns: positions, the wgmma's N.
        apart: for a stride of 2 in x, the two phases are row groups of their own, each with its
            own slots; otherwise phases lie side by side in a warp's rows and share their slots.
        storers: a warpgroup of its own writes the outputs; otherwise the consumers do.
        half: whether it multiplies in float16, TF32's significand at twice the rate, and a launch
            after it computes the layer again if float16 cannot hold all its values.
        resident: a block keeps the weights of its rows, and its tiles follow each other along the
            positions; otherwise weights come again with each tile.
        paired: for an even stride in y, the consumers have two phases in y of the same channels,
            and a tile is whole rows of positions, so that storers write both phases' rows in the
            order of memory.
    """

    columns: int
    apart: bool = False
    storers: bool = False
    half: bool = False
    resident: bool = False
    paired: bool = False

    def __str__(self) -> str:
        """Rows of a block x positions, and how."""
        apart = "/apart" if self.apart else ""
        storers = "/storers" if self.storers else ""
        half = "/half" if self.half else ""
        paired = "/paired" if self.paired else ""
        resident = "/resident" if self.resident else ""
        return f"{CONSUMERS * GROUP_ROWS}x{self.columns}{apart}{storers}{paired}{half}{resident}"


TILES = (
    *(Tile(columns, half=True) for columns in (256, 208, 144, 88)),
    *(Tile(columns, storers=True, half=True) for columns in (160, 128, 96)),
    *(Tile(columns, storers=True, half=True, paired=True) for columns in (192, 160, 144, 128)),
    *(Tile(columns, apart=True, half=True) for columns in (216, 208)),
    Tile(160, apart=True, storers=True, half=True),
    # For few channels, which fill half of a stage in float16, and values that it cannot hold.
    *(Tile(columns) for columns in (208, 96)),
    *(Tile(columns, storers=True) for columns in (160, 96)),
    Tile(160, storers=True, resident=True),
    Tile(208, apart=True),
)

Slot = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """A tile laid over a problem.

    Attributes:
        classes: the distinct lists of slots, (shift in y, shift in x), of row groups.
        row_class: the class of each row group.
    """

    problem: Problem
    tile: Tile
    classes: tuple[tuple[Slot, ...], ...]
    row_class: tuple[int, ...]

    @property
    def row_phases(self) -> int:
        """Phases in x that lie side by side in a warp's rows."""
        return 1 if self.tile.apart else self.problem.width.stride

    @property
    def warp_channels(self) -> int:
        """Output channels of a warp's 16 rows."""
        return WARP_ROWS // self.row_phases

    @property
    def word_channels(self) -> int:
        """Input channels in 4 bytes."""
        return 2 if self.tile.half else 1

    @property
    def chunks(self) -> int:
        """Stages of pixels of a tile."""
        return -(-self.problem.in_channels_per_group // (LINE_WORDS * self.word_channels))

    @functools.cached_property
    def most_slot(self) -> Slot:
        """The largest shift along each axis."""
        slots = [slot for row_class in self.classes for slot in row_class]
        return max((y for y, _ in slots), default=0), max((x for _, x in slots), default=0)

    @property
    def slots(self) -> int:
        """Of all classes, one at least."""
        return max(1, sum(map(len, self.classes)))

    @functools.cached_property
    def pitch(self) -> int:
        """Positions from one row to the next."""
        x, columns = self.problem.width, self.tile.columns
        pitch = hopper.pitch(x, self.most_slot[1])
        # One more in a paired tile where that costs no row and brings vectors of four.
        odd = pitch % 2 == 1 and x.stride % 4 == 2 and x.output_size % 4 == 0
        spare = columns // pitch == columns // (pitch + 1)
        return pitch + 1 if self.tile.paired and odd and spare else pitch

    @functools.cached_property
    def image_positions(self) -> int:
        """Positions from one image to the next."""
        return self.pitch * hopper.pitch(self.problem.height, self.most_slot[0])

    @property
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

    @property
    def positions(self) -> int:
        """All positions."""
        return self.problem.batch * self.image_positions

    @property
    def boxes(self) -> int:
        """Tensor copies that bring a stage's pixels."""
        return -(-(self.tile.columns + self._reach) // MOST_BOX)

    @property
    def patch_positions(self) -> int:
        """Positions of a stage: the tile's, and those that its slots reach back to."""
        # To whole swizzle patterns; coarser, so that widths close to each other share a kernel.
        step = 16 * self.boxes
        return -(-(self.tile.columns + self._reach) // step) * step

    @functools.cached_property
    def _reach(self) -> int:
        return self.most_slot[0] * self.pitch + self.most_slot[1]

    @property
    def rows(self) -> int:
        """Of positions in a paired tile: whole ones."""
        return self.tile.columns // self.pitch

    @property
    def step(self) -> int:
        """Positions from one tile to the next."""
        return self.rows * self.pitch if self.tile.paired else self.tile.columns

    @property
    def vector(self) -> int:
        """Outputs that lanes write at a time, as these and the shared memory's rows lie."""
        x = self.problem.width
        if self.tile.paired:
            return math.gcd(4, x.output_size, self.pitch * x.stride)
        if self.tile.apart or x.output_size % 4 or (x.q_range.start * x.stride - x.padding) % 4:
            return 1
        pairs = self.pitch % 2 == 0 and self.tile.columns % 16 == 0
        return 4 if x.stride % 4 == 0 or (x.stride == 2 and pairs) else 1

    @property
    def shift(self) -> int:
        """Of a paired tile's rows in shared memory: their first output that exists is aligned."""
        x = self.problem.width
        return -(x.padding % x.stride) % self.vector if self.tile.paired else 0

    @property
    def output_bytes(self) -> int:
        """Shared memory of a tile's outputs, and of where they lie."""
        part = self.tile.columns if self.tile.storers else 32
        columns = part * self.problem.width.stride + self.shift
        pitch = columns + ((33 if self.tile.apart else 40) - columns % 32) % 32
        groups = 1 if self.tile.apart else CONSUMERS
        return groups * WARPS * self.warp_channels * pitch * 4 + 2 * self.tile.columns * 16

    @property
    def resident_pieces(self) -> int:
        """Of the weights that a consumer keeps: all slots of all chunks of its rows."""
        return max(1, self.chunks * max(len(row_class) for row_class in self.classes))

    def stages(self, target: Target) -> tuple[int, int]:
        """Stages of pixels, and of each consumer's weights; (0, 0) where they do not fit."""
        pixels, weights = self.fitting_stages(target)
        if self.tile.storers or self.tile.apart:
            return pixels, weights
        return min(pixels, ENOUGH_STAGES[0]), min(weights, ENOUGH_STAGES[1])

    def fitting_stages(self, target: Target) -> tuple[int, int]:
        """As many stages as shared memory holds.

        Four of weights, or three beside the storers' outputs, then pixels, which take longer to
        come, then more weights. Resident weights have a stage for each piece.
        """
        free = target.shared_per_block - 2048 - self.output_bytes - 4 * self.slots
        weights, pixels = CONSUMERS * (WEIGHT_BYTES + 16), self.patch_positions * LINE_BYTES + 16
        if self.tile.resident:
            pieces = self.resident_pieces
            pixel_stages = min(MOST_RESIDENT_PIXEL_STAGES, (free - pieces * weights) // pixels)
            return (pixel_stages, pieces) if pixel_stages >= 2 else (0, 0)
        for weight_stages in (3, 2) if self.tile.storers else (4, 3):
            pixel_stages = min(MOST_PIXEL_STAGES, (free - weight_stages * weights) // pixels)
            if pixel_stages >= 2:
                return pixel_stages, min(
                    MOST_WEIGHT_STAGES, (free - pixel_stages * pixels) // weights
                )
        return 0, 0

    def lead(self, target: Target) -> int:
        """Stages of pixels by which the first consumer is ahead of the second.

        None where both write their outputs together, or where a block has one tile: then the second
        has nothing to write beside the first's products, and ends later by as much.
        """
        together = self.tile.apart and not self.tile.storers
        if together or self.tiles <= target.multiprocessors:
            return 0
        return min(self.stages(target)[0] // 2, -(-self.chunks // 2))

    @property
    def row_sets(self) -> int:
        """Tiles on the same pixels."""
        return -(-len(self.row_class) // CONSUMERS)

    @property
    def groups_outermost(self) -> bool:
        """Whether a group's tiles follow each other; otherwise those of the same positions do.

        Then a turn of the blocks reads few groups' weights.
        """
        return self.problem.groups > 1 and 4 * self.weight_elements >= LEAST_BYTES_OF_GROUPS

    @property
    def row_begin(self) -> tuple[int, ...]:
        """The first slot of each row group among those of a group."""
        begins = [0]
        for row_class in self.row_class:
            begins.append(begins[-1] + len(self.classes[row_class]))
        return tuple(begins)

    @property
    def tiles(self) -> int:
        """Tiles of the launch."""
        # Behind the last image's last output there is nothing to compute.
        y, x = self.problem.height.q_range, self.problem.width.q_range
        unused = self.image_positions - (len(y) - 1) * self.pitch - len(x)
        columns = -(-(self.positions - unused) // self.step)
        return columns * self.problem.groups * self.row_sets

    @property
    def weight_elements(self) -> int:
        """Packed weights, in 4 bytes."""
        return self.problem.groups * self.row_begin[-1] * self.chunks * GROUP_ROWS * LINE_WORDS

    @property
    def pixel_elements(self) -> int:
        """Packed pixels, in 4 bytes."""
        return self.problem.groups * self.chunks * self.positions * LINE_WORDS

    @property
    def operand_elements(self) -> int:
        """Both."""
        return self.weight_elements + self.pixel_elements

    @functools.cached_property
    def part_channels(self) -> int:
        """Output channels that the packing takes at a time."""
        weights = PACK_WEIGHTS // self.word_channels
        channels = max(1, min(weights // self.problem.taps, GROUP_ROWS // self.row_phases))
        while True:
            # Whole warps' rows, where they fit.
            channels -= channels % min(channels, self.warp_channels)
            of_weights, of_pixels = self._pack_items(channels)
            divisible = channels > self.warp_channels and of_weights + of_pixels < LEAST_ITEMS
            if channels == 1 or not (divisible or of_weights < LEAST_WEIGHT_ITEMS):
                return channels
            channels //= 2

    @property
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

    @property
    def packed_row_step(self) -> int:
        """Rows of the kernel from one of a piece to its next: those of a phase in y, or 1."""
        return self._row_step(self.part_channels)

    def _row_step(self, part_channels: int) -> int:
        y = self.problem.height
        many = part_channels == 1 and self.problem.taps >= MANY_TAPS
        return y.stride // math.gcd(y.stride, y.dilation) if many else 1

    @property
    def pack_blocks(self) -> int:
        """Blocks of the packing."""
        return min(sum(self.pack_items), MOST_HALF_BLOCKS if self.tile.half else family.MAX_GRID)

    @property
    def pack_bytes(self) -> int:
        """Shared memory of the packing."""
        y, x = self.problem.height, self.problem.width
        rows = -(-y.kernel // self.packed_row_step)
        weights = self.part_channels * rows * x.kernel | 1
        positions = PACK_POSITIONS // self.word_channels
        staged = LINE_WORDS * max(weights, positions + 1) * 4
        noted = PACK_THREADS // 32 * positions if self.tile.half else 4
        return staged + noted + PACK_THREADS // 32 * 4

    @property
    def repairing(self) -> Layout:
        """The same tiles in TF32, whose weights are twice as much to keep: they come again."""
        return layout(self.problem, dataclasses.replace(self.tile, half=False, resident=False))

    @property
    def status(self) -> int:
        """Behind all operands in float16: `Status`, then `notes`."""
        return self.operand_elements + self.repairing.operand_elements

    @property
    def packed_elements(self) -> int:
        """The workspace, in 4 bytes."""
        if not self.tile.half:
            return self.operand_elements
        return self.status + sum(self.note_words)

    @property
    def note_words(self) -> tuple[int, int, int, int]:
        """4 bytes of `Status`, of what each block of the packing notes of weights, of what is
        counted of each image, and of what is noted of pixels: a byte for each position of a line of
        channels.

        All on 16 bytes.
        """
        images = -(-self.problem.batch // 4) * 4
        return STATUS_WORDS, -(-self.pack_blocks // 4) * 4, images, self.pack_items[1] * 16

    @property
    def most_slight(self) -> int:
        """Times that 8 channels of a pixel of an image may have too small a value: as often as
        chance brings, of few pixels never. A pixel that is small in all channels has more.
        """
        problem = self.problem
        octets = -(-problem.in_channels_per_group // 8)
        of_image = problem.groups * octets * problem.height.size * problem.width.size
        if problem.batch * of_image <= FEW_OCTETS:
            return 0
        return min(MOST_SLIGHT, 1 + of_image // OCTETS_OF_SLIGHT)

    @property
    def most_unfit_weights(self) -> int:
        """Times that 8 weights of a tap may have one too small for float16, for all to be computed
        in it: as many as 1 weight of 2^18, more than of normal ones are.
        """
        return math.prod(self.problem.w_shape) >> 18


@functools.lru_cache(maxsize=family.TILES_REMEMBERED)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    y, x = problem.height, problem.width
    in_x = [{tap.shift for tap in phase.taps} for phase in x.phases]
    in_y = [{tap.shift for tap in phase.taps} for phase in y.phases]
    any_x = set().union(*in_x)
    channel_tiles = -(-problem.out_channels_per_group // (WARP_ROWS // x.stride))
    # The slots in y and x of each row group, as sm90_tf32_flat_forward/rows.cuh orders them.
    row_slots: list[tuple[set[int], set[int]]] = []
    if tile.apart:
        groups = -(-problem.out_channels_per_group // GROUP_ROWS)
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
    classes: dict[tuple[Slot, ...], int] = {}
    row_class = []
    for slots_y, slots_x in row_slots:
        slots = tuple((slot_y, slot_x) for slot_y in sorted(slots_y) for slot_x in sorted(slots_x))
        row_class.append(classes.setdefault(slots, len(classes)))
    return Layout(problem, tile, tuple(classes), tuple(row_class))


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
    if tile.apart and problem.width.stride != 2:
        return f"takes two phases in x apart, the stride is {problem.width.stride}"
    if tile.apart and len({tuple(t.shift for t in p.taps) for p in problem.width.phases}) == 1:
        return "all phases in x have the same slots: nothing is gained by taking them apart"
    if tile.paired and problem.height.stride % 2:
        return f"takes two phases in y together, the stride is {problem.height.stride}"
    laid = layout(problem, tile)
    if tile.paired and laid.rows == 0:
        return f"takes whole rows of positions, which have {laid.pitch}"
    if tile.half and laid.chunks == laid.repairing.chunks:
        found = problem.in_channels_per_group
        return f"multiplies {2 * LINE_WORDS} input channels at a time, there are {found}"
    if tile.half:
        refusal = tile_why_not(problem, target, laid.repairing.tile)
        if refusal is not None:
            return f"the launch that repairs it: {refusal}"
    if laid.pack_bytes > target.shared_per_block:
        return f"the packing has no room for {problem.taps} taps"
    if laid.positions * LINE_BYTES >= 2**40 or laid.positions >= 2**30 - 2**10:
        return f"{laid.positions} positions are over a tensor map's size"
    if laid.stages(target) == (0, 0):
        if tile.resident:
            return (
                f"{CONSUMERS * laid.resident_pieces * WEIGHT_BYTES} bytes of weights and two stages"
                f" of {laid.patch_positions * LINE_BYTES} do not fit {target.arch}"
            )
        return (
            f"two stages of {laid.patch_positions * LINE_BYTES} bytes do not fit {target.arch} "
            "beside the weights"
        )
    if laid.tiles > family.MAX_GRID:
        return f"{laid.tiles} tiles are over 32 bits"
    return None


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing, kernel and repair, and of the host."""
    return family.with_host(_device_cost(problem, target, tile))


def _device_cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel.

    Cycles of an SM at 1.7 GHz, fitted by least squares of the logarithm to 627 rows of the sweeps
    of 29 layers and 60 random ones, benchmarks/fit_costs.py: off by 19% in the root mean square.
    """
    laid = layout(problem, tile)
    # Of the consumers of a block together.
    steps = laid.chunks * laid.row_begin[-1] / laid.row_sets
    products = 1.15 * steps * 2 * tile.columns
    weights = 0 if tile.resident else steps * WEIGHT_BYTES
    copied = (weights + laid.chunks * laid.patch_positions * LINE_BYTES) / 35.9
    # A stage of either ring comes no sooner than this after it was asked for. Fitted when a block
    # had as many as fit.
    pixel_stages, weight_stages = laid.fitting_stages(target)
    ahead: float = pixel_stages
    if not tile.resident:
        ahead = min(ahead, weight_stages * max(steps / laid.chunks / 2, 0.5))
    main = max(max(products, copied) + 75 * steps, 3190 * laid.chunks / ahead)
    # Phases that are no power of two are divided by for each output.
    stride = problem.width.stride
    outputs = laid.step * (1 if stride & (stride - 1) == 0 else 1.6)
    # Rows of less than a line of 128 bytes fill few lanes of a store; more so in long tiles
    # (maskrcnn, the one layer of the sweeps that its stores bind).
    if problem.width.output_size < 32 and not tile.paired:
        outputs *= 1.6 * (tile.columns / 128) ** 0.5
    if tile.storers:
        # 16.2 before the outputs went over in slices; by hand since.
        left = 12 if tile.paired else 13
        of_tile = max(main, 23.3 * outputs) + left * outputs + 288
    else:
        of_tile = main + 26 * outputs + 288
    waves = -(-laid.tiles // target.multiprocessors)
    packing = packing_cost(laid)
    cycles = waves * of_tile
    if tile.resident:
        cycles += steps * WEIGHT_BYTES / 35.9  # once
    modelled = max(cycles / 1.7e9, problem.bytes / 5.6e12) + packing + 3e-6
    # What the sweep with consumers in step where a block has one tile, and fewer stages, showed.
    if waves == 1 and not tile.apart:
        modelled *= 0.87 if tile.storers else 0.8
    # By hand, for stylegan2_mod and fcn8s.
    modelled *= (1.03 if tile.apart and tile.storers else 1) * (0.88 if tile.resident else 1)
    modelled *= 1.03 if tile.storers and tile.columns > 160 else 1
    if laid.groups_outermost:  # for stylegan2_mod too
        modelled *= 0.945 if tile.storers else 1.03
    # What 278 rows with dependent launches showed since: rows on 16 bytes cost less, phases with
    # different slots more.
    on_vectors = problem.width.output_size % 4 == 0
    if len({tuple(tap.shift for tap in phase.taps) for phase in problem.width.phases}) > 1:
        return modelled * (1.15 if on_vectors else 1.0 if tile.apart else 1.06)
    return modelled * (0.92 if on_vectors else 1.06)


def packing_cost(laid: Layout) -> float:
    """Modelled seconds of all but the kernel."""
    # What is read and written for 4 bytes of operands.
    moved = 4 * laid.word_channels + 4
    packing = moved * (laid.weight_elements / 4.18e12 + laid.pixel_elements / 4.44e12)
    # A guess: the launch that repairs, with nothing to do.
    idle = 1.5e-6 if laid.tile.half else 0
    return 7.4e-6 + packing + idle


def source(problem: Problem, tile: Tile) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    return _forward_source(layout(problem, tile))


def _forward_source(laid: Layout, repair: bool = False) -> KernelSource:
    """The kernel, or the one that repairs a layout in float16."""
    problem, tile = laid.problem, laid.tile
    index = _index(laid)
    pixel_stages, weight_stages = laid.stages(HOPPER)
    shared = pixel_stages * (laid.patch_positions * LINE_BYTES + 16) + laid.output_bytes
    shared += CONSUMERS * weight_stages * (WEIGHT_BYTES + 16)
    shared += 128 + 4 * laid.slots
    own: tuple[tuple[str, str], ...] = ()
    if repair:
        shared = max(shared, laid.pack_bytes)
        own = (
            ("packed_again", "void*"),
            *_packing_fields(index),
            ("status", "void*"),
            ("images", "const void*"),
            ("blocks_in_front", "int"),
            ("most_slight", "int"),
        )
    elif not tile.half:
        own = _packing_fields(index)
    else:
        own = (*_NOTES, ("note_count", "int"), ("slight_vectors", index), ("most_slight", "int"))
    shared = -(-shared // 1024) * 1024
    constants = (
        *_layer_constants(laid, index),
        *_packing_constants(laid),
        ("shared_bytes", shared),
        ("columns", tile.columns),
        ("vector", laid.vector),
        ("shift", laid.shift),
        ("storers", tile.storers),
        ("resident", tile.resident),
        ("repair", repair),
        ("patch_positions", laid.patch_positions),
        ("boxes", laid.boxes),
        ("pixel_stages", pixel_stages),
        ("weight_stages", weight_stages),
        ("lead", laid.lead(HOPPER)),
        ("row_sets", laid.row_sets),
        ("groups_outermost", laid.groups_outermost),
        ("most_slot_y", laid.most_slot[0]),
        ("most_slot_x", laid.most_slot[1]),
        ("padding_y", problem.height.padding),
        ("padding_x", problem.width.padding),
        ("first_q_y", problem.height.q_range.start),
        ("first_q_x", problem.width.q_range.start),
        ("bias", problem.bias),
    )
    return KernelSource(
        stem=STEM,
        constants=constants,
        arguments=(
            ("pixel_map", TENSOR_MAP),
            ("packed", "const void*"),
            ("bias", "const void*"),
            ("destination", "void*"),
            ("tiles", "int"),
            *((("rows", "int"),) if tile.paired else ()),
            *_IMAGES,
            ("destination_height", "int"),
            ("destination_width", "int"),
            *family.stride_fields("destination", "n c h", index),
            *own,
        ),
        shared_bytes=shared,
        threads=WARPGROUP * (1 + CONSUMERS + tile.storers),
    )


_NOTES = tuple((name, "void*") for name in ("status", "notes", "images", "slight"))


_IMAGES = tuple(
    (name, "int")
    for name in (
        "batch",
        "pitch",
        "pitch_multiplier",
        "pitch_shift",
        "image_positions",
        "image_multiplier",
        "image_shift",
    )
)


def _packing_fields(index: str) -> tuple[tuple[str, str], ...]:
    """Fields of `struct Arguments` of a kernel that packs."""
    return (
        ("source", "const void*"),
        ("weight", "const void*"),
        ("items", index),
        ("weight_items", index),
        ("weight_elements", index),
        ("positions", "int"),
        ("source_height", "int"),
        ("source_width", "int"),
        *family.stride_fields("source", "n c h w", index),
        *family.stride_fields("weight", "in out h w", index),
    )


def _packing_constants(laid: Layout) -> tuple[tuple, ...]:
    """What a kernel that packs knows of this packing."""
    return (
        ("packs_half", laid.tile.half),
        ("part_channels", laid.part_channels),
        ("packed_row_step", laid.packed_row_step),
        *hopper.tap_constants(laid.problem),
    )


def _index(laid: Layout) -> str:
    return family.index_type(laid.problem, laid.operand_elements, laid.repairing.operand_elements)


def _layer_constants(laid: Layout, index: str) -> tuple[tuple, ...]:
    """What the kernel and its packing share."""
    problem = laid.problem
    begins = [0]
    for row_class in laid.classes:
        begins.append(begins[-1] + len(row_class))
    # An array has at least one element, even where no phase has a slot.
    slots = [slot for row_class in laid.classes for slot in row_class] or [(0, 0)]
    return (
        ("Index", index),
        ("groups", problem.groups),
        ("in_channels", problem.in_channels_per_group),
        ("out_channels", problem.out_channels_per_group),
        ("stride_y", problem.height.stride),
        ("stride_x", problem.width.stride),
        ("apart", laid.tile.apart),
        ("paired", laid.tile.paired),
        ("half", laid.tile.half),
        ("pixel_exponent", PIXEL_EXPONENT),
        ("most_unfit_weights", laid.most_unfit_weights),
        ("row_groups", len(laid.row_class)),
        ("row_class", laid.row_class),
        ("row_begin", laid.row_begin),
        ("group_slots", laid.row_begin[-1]),
        ("classes", len(laid.classes)),
        ("class_begin", tuple(begins)),
        ("slots", len(slots)),
        ("slot_y", tuple(y for y, _ in slots)),
        ("slot_x", tuple(x for _, x in slots)),
    )


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The launch that lays weights and pixels out, and the kernel: a block for each SM walks the
    tiles. Behind a kernel in float16 one in TF32, for the images that float16 cannot hold.
    """
    laid = layout(problem, tile)
    noted = _noted(laid)
    packing: dict[str, Argument] = {
        "packed": Address("packed"),
        **_images(laid),
        **_packing_arguments(laid),
        **(noted if tile.half else {}),
    }
    arguments = _forward_arguments(laid, 0)
    if tile.half:
        arguments |= {
            **noted,
            "note_count": laid.pack_blocks,
            "slight_vectors": laid.note_words[-1] // 4,
            "most_slight": laid.most_slight,
        }
    else:
        arguments |= _packing_arguments(laid)
    grid = min(target.multiprocessors, laid.tiles)
    found = (
        Launch(
            "packing",
            _packing_source(laid),
            laid.pack_blocks,
            packing,
            "lays weights and pixels out",
            packed=laid.packed_elements,
        ),
        Launch("kernel", source(problem, tile), grid, arguments),
    )
    if not tile.half:
        return found
    again = laid.repairing
    packed_again = 4 * laid.operand_elements
    repair: dict[str, Argument] = {
        **_forward_arguments(again, packed_again),
        "packed_again": Address("packed", packed_again),
        **_packing_arguments(again),
        "status": noted["status"],
        "images": noted["images"],
        "blocks_in_front": grid,
        "most_slight": laid.most_slight,
    }
    blocks = min(target.multiprocessors, again.tiles)
    return *found, Launch("repair", _forward_source(again, repair=True), blocks, repair)


def _packing_source(laid: Layout) -> KernelSource:
    """The kernel that lays weights and pixels out."""
    index = _index(laid)
    return KernelSource(
        stem=PACK_STEM,
        constants=(
            *_layer_constants(laid, index),
            *_packing_constants(laid),
            ("shared_bytes", laid.pack_bytes),
        ),
        arguments=(
            ("packed", "void*"),
            *_IMAGES,
            *_packing_fields(index),
            *(_NOTES if laid.tile.half else ()),
        ),
        shared_bytes=laid.pack_bytes,
        threads=PACK_THREADS,
    )


def _noted(laid: Layout) -> dict[str, Argument]:
    """Values of the fields of `_NOTES`."""
    begins = itertools.accumulate((laid.status, *laid.note_words[:-1]))
    return {
        name: Address("packed", 4 * begin) for (name, _), begin in zip(_NOTES, begins, strict=True)
    }


def _forward_arguments(laid: Layout, packed: int) -> dict[str, Argument]:
    """Of a launch of the kernel on operands that lie `packed` bytes from the workspace's start."""
    planes = laid.problem.groups * laid.chunks
    return {
        # Of float32, or of pairs of float16.
        "pixel_map": TensorMap(
            Address("packed", packed + 4 * laid.weight_elements),
            dims=(LINE_WORDS, laid.positions, planes),
            strides=(LINE_BYTES, laid.positions * LINE_BYTES),
            box=(LINE_WORDS, laid.patch_positions // laid.boxes, 1),
            swizzle=LINE_BYTES,
        ),
        "packed": Address("packed", packed),
        "tiles": laid.tiles,
        **({"rows": laid.rows} if laid.tile.paired else {}),
        **_images(laid),
        **output_rows(laid.problem),
    }


def _images(laid: Layout) -> dict[str, Argument]:
    """The fields of `_IMAGES`: how images follow each other in the line."""
    return {"batch": laid.problem.batch, **laid.images}


def _packing_arguments(laid: Layout) -> dict[str, Argument]:
    """Values of the fields of `_packing_fields`."""
    weight_items, pixel_items = laid.pack_items
    return {
        "source": Address("x"),
        "weight": Address("w"),
        "items": weight_items + pixel_items,
        "weight_items": weight_items,
        "weight_elements": laid.weight_elements,
        "positions": laid.positions,
        "source_height": laid.problem.height.size,
        "source_width": laid.problem.width.size,
        **strides("source", "n c h w", "x"),
        **strides("weight", "in out h w", "w"),
    }
