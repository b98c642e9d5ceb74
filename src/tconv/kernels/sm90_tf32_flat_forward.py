"""`sm90_tf32_flat_forward`: the output of layers with many channels on Hopper's tensor cores.

float32 tensors with TF32 products. `sm90_tf32_flat_pack` lays out weights and pixels first. See
`sm90_tf32_flat_forward.cu`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.family import Operands, Packing
from tconv.kernels.source import TENSOR_MAP, KernelSource
from tconv.problem import Direction, Problem

STEM = "sm90_tf32_flat_forward"
PACK_STEM = "sm90_tf32_flat_pack"
DIRECTION: Direction = "forward"

WARPGROUP = 128
PACK_THREADS = 256
CONSUMERS = 2
WARPS = 4
WARP_ROWS = 16
GROUP_ROWS = 64
CHANNELS = 32
"""Input channels of a stage."""

LINE_BYTES = CHANNELS * 4
WEIGHT_BYTES = GROUP_ROWS * LINE_BYTES
MOST_PIXEL_STAGES = 6
MOST_WEIGHT_STAGES = 8
MOST_BOX = 256
PACK_POSITIONS = 128
PACK_WEIGHTS = 320
"""Weights of one input channel that the packing takes at a time, if a channel's taps are fewer."""


@dataclass(frozen=True)
class Tile:
    """What one block computes at a time.

    Attributes:
        columns: positions, the wgmma's N.
        apart: for a stride of 2 in x, the two phases are row groups of their own, each with its
            own slots; otherwise phases lie side by side in a warp's rows and share their slots.
        storers: a warpgroup of its own writes the outputs; otherwise the consumers do.
    """

    columns: int
    apart: bool = False
    storers: bool = False

    def __str__(self) -> str:
        """Rows of a block x positions, and how."""
        apart = "/apart" if self.apart else ""
        storers = "/storers" if self.storers else ""
        return f"{CONSUMERS * GROUP_ROWS}x{self.columns}{apart}{storers}"


TILES = (
    *(Tile(columns) for columns in (256, 208, 176, 144, 128, 96)),
    *(Tile(columns, apart=True) for columns in (256, 208)),
    *(Tile(columns, storers=True) for columns in (160, 128, 96)),
    Tile(160, apart=True, storers=True),
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
    def chunks(self) -> int:
        """Stages of pixels of a tile."""
        return -(-self.problem.in_channels_per_group // CHANNELS)

    @property
    def most_slot(self) -> Slot:
        """The largest shift along each axis."""
        slots = [slot for row_class in self.classes for slot in row_class]
        return max((y for y, _ in slots), default=0), max((x for _, x in slots), default=0)

    @property
    def pitch(self) -> int:
        """Positions from one row to the next."""
        return hopper.pitch(self.problem.width, self.most_slot[1])

    @property
    def image_positions(self) -> int:
        """Positions from one image to the next."""
        return self.pitch * hopper.pitch(self.problem.height, self.most_slot[0])

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

    @property
    def _reach(self) -> int:
        return self.most_slot[0] * self.pitch + self.most_slot[1]

    @property
    def quads(self) -> bool:
        """Whether outputs lie so that lanes can write four at a time, on 16 bytes."""
        x = self.problem.width
        if self.tile.apart or x.output_size % 4 or (x.q_range.start * x.stride - x.padding) % 4:
            return False
        pairs = self.pitch % 2 == 0 and self.tile.columns % 16 == 0
        return x.stride % 4 == 0 or (x.stride == 2 and pairs)

    @property
    def output_bytes(self) -> int:
        """Shared memory of a tile's outputs, and of where they lie."""
        part = self.tile.columns if self.tile.storers else 32
        columns = part * self.problem.width.stride
        pitch = columns + (40 - columns % 32) % 32
        groups = 1 if self.tile.apart else CONSUMERS
        return groups * WARPS * self.warp_channels * pitch * 4 + 2 * self.tile.columns * 16

    def stages(self, target: Target) -> tuple[int, int]:
        """Stages of pixels, and of each consumer's weights; (0, 0) where they do not fit.

        Four of weights, or three beside the storers' outputs, then pixels, which take longer to
        come, then more weights.
        """
        free = target.shared_per_block - 2048 - self.output_bytes
        weights, pixels = CONSUMERS * (WEIGHT_BYTES + 16), self.patch_positions * LINE_BYTES + 16
        for weight_stages in (3, 2) if self.tile.storers else (4, 3):
            pixel_stages = min(MOST_PIXEL_STAGES, (free - weight_stages * weights) // pixels)
            if pixel_stages >= 2:
                return pixel_stages, min(
                    MOST_WEIGHT_STAGES, (free - pixel_stages * pixels) // weights
                )
        return 0, 0

    def lead(self, target: Target) -> int:
        """Stages of pixels by which the first consumer is ahead of the second; none where both
        write their outputs together.
        """
        if self.tile.apart and not self.tile.storers:
            return 0
        return min(self.stages(target)[0] // 2, -(-self.chunks // 2))

    @property
    def row_sets(self) -> int:
        """Tiles on the same pixels."""
        return -(-len(self.row_class) // CONSUMERS)

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
        columns = -(-(self.positions - unused) // self.tile.columns)
        return columns * self.problem.groups * self.row_sets

    @property
    def weight_elements(self) -> int:
        """Packed weights."""
        return self.problem.groups * self.row_begin[-1] * self.chunks * GROUP_ROWS * CHANNELS

    @property
    def pixel_elements(self) -> int:
        """Packed pixels."""
        return self.problem.groups * self.chunks * self.positions * CHANNELS

    @property
    def part_channels(self) -> int:
        """Output channels that the packing takes at a time."""
        channels = max(1, min(PACK_WEIGHTS // self.problem.taps, GROUP_ROWS // self.row_phases))
        # Whole warps' rows, where they fit.
        return channels - channels % min(channels, self.warp_channels)

    @property
    def pack_items(self) -> tuple[int, int]:
        """Pieces of weights and of pixels that the packing's blocks take."""
        channels = -(-self.problem.out_channels_per_group // self.warp_channels)
        parts = -(-channels * self.warp_channels // self.part_channels)
        planes = self.problem.groups * self.chunks
        return planes * parts, planes * -(-self.positions // PACK_POSITIONS)

    @property
    def pack_bytes(self) -> int:
        """Shared memory of the packing."""
        weights = self.part_channels * self.problem.taps | 1
        return CHANNELS * max(weights, PACK_POSITIONS + 1) * 4


@functools.lru_cache(maxsize=1024)
def layout(problem: Problem, tile: Tile) -> Layout:
    """Lays a tile over a problem."""
    y, x = problem.height, problem.width
    in_x = [{tap.shift for tap in phase.taps} for phase in x.phases]
    in_y = [{tap.shift for tap in phase.taps} for phase in y.phases]
    any_x = set().union(*in_x)
    channel_tiles = -(-problem.out_channels_per_group // (WARP_ROWS // x.stride))
    # The slots in y and x of each row group, as common/sm90_tf32_flat_rows.cuh orders them.
    row_slots: list[tuple[set[int], set[int]]] = []
    if tile.apart:
        groups = -(-problem.out_channels_per_group // GROUP_ROWS)
        row_slots = [
            (slots_y, slots_x) for slots_y in in_y for _ in range(groups) for slots_x in in_x
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
    return family.coordinates_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    if tile.apart and problem.width.stride != 2:
        return f"takes two phases in x apart, the stride is {problem.width.stride}"
    if tile.apart and len({tuple(t.shift for t in p.taps) for p in problem.width.phases}) == 1:
        return "all phases in x have the same slots: nothing is gained by taking them apart"
    laid = layout(problem, tile)
    if laid.pack_bytes > target.shared_per_block:
        return f"the packing has no room for {problem.taps} taps"
    if laid.positions * LINE_BYTES >= 2**40 or laid.positions >= 2**31 - 2**10:
        return f"{laid.positions} positions are over a tensor map's size"
    if laid.stages(target) == (0, 0):
        return (
            f"two stages of {laid.patch_positions * LINE_BYTES} bytes do not fit {target.arch} "
            "beside the weights"
        )
    if laid.tiles > family.MAX_GRID:
        return f"{laid.tiles} tiles are over 32 bits"
    return None


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds of packing and kernel.

    Cycles of an SM at 1.7 GHz, fitted by least squares of the logarithm to 627 rows of the sweeps
    of 29 layers and 60 random ones, benchmarks/fit_costs.py: off by 19% in the root mean square.
    """
    laid = layout(problem, tile)
    # Of the consumers of a block together.
    steps = laid.chunks * laid.row_begin[-1] / laid.row_sets
    products = 1.15 * steps * 2 * tile.columns
    copied = (steps * WEIGHT_BYTES + laid.chunks * laid.patch_positions * LINE_BYTES) / 35.9
    # A stage of either ring comes no sooner than this after it was asked for.
    pixel_stages, weight_stages = laid.stages(target)
    ahead = min(pixel_stages, weight_stages * max(steps / laid.chunks / 2, 0.5))
    main = max(max(products, copied) + 75 * steps, 3190 * laid.chunks / ahead)
    # Phases that are no power of two are divided by for each output.
    stride = problem.width.stride
    outputs = tile.columns * (1 if stride & (stride - 1) == 0 else 1.6)
    if tile.storers:
        of_tile = max(main, 23.3 * outputs) + 16.2 * outputs + 288
    else:
        of_tile = main + 26 * outputs + 288
    waves = -(-laid.tiles // target.multiprocessors)
    packing = 7.4e-6 + 8 * laid.weight_elements / 4.18e12 + 8 * laid.pixel_elements / 4.44e12
    modelled = max(waves * of_tile / 1.7e9, problem.bytes / 5.6e12) + packing + 3e-6
    if tile.storers and waves == 1:
        modelled *= 1.1  # measured: there is no next tile whose products they could write beside
    # What 278 rows with dependent launches showed since: rows on 16 bytes cost less, phases with
    # different slots more.
    on_vectors = problem.width.output_size % 4 == 0
    if len({tuple(tap.shift for tap in phase.taps) for phase in problem.width.phases}) > 1:
        return modelled * (1.15 if on_vectors else 1.0 if tile.apart else 1.06)
    return modelled * (0.92 if on_vectors else 1.06)


def source(problem: Problem, tile: Tile) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    laid = layout(problem, tile)
    index = _index(problem, laid)
    pixel_stages, weight_stages = laid.stages(Target.named("sm_90a"))
    shared = pixel_stages * (laid.patch_positions * LINE_BYTES + 16) + laid.output_bytes
    shared += CONSUMERS * weight_stages * (WEIGHT_BYTES + 16)
    shared = -(-(shared + 128) // 1024) * 1024
    constants = (
        *_layer_constants(problem, laid, index),
        ("shared_bytes", shared),
        ("columns", tile.columns),
        ("quads", laid.quads),
        ("storers", tile.storers),
        ("patch_positions", laid.patch_positions),
        ("boxes", laid.boxes),
        ("pixel_stages", pixel_stages),
        ("weight_stages", weight_stages),
        ("lead", laid.lead(Target.named("sm_90a"))),
        ("row_sets", laid.row_sets),
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
            ("batch", "int"),
            ("pitch", "int"),
            ("image_positions", "int"),
            ("destination_height", "int"),
            ("destination_width", "int"),
            *family.stride_fields("destination", "n c h", index),
        ),
        shared_bytes=shared,
        threads=WARPGROUP * (1 + CONSUMERS + tile.storers),
    )


def packing(problem: Problem, tile: Tile) -> Packing:
    """The launch that lays weights and pixels out."""
    laid = layout(problem, tile)
    index = _index(problem, laid)
    weight_items, pixel_items = laid.pack_items
    return Packing(
        source=KernelSource(
            stem=PACK_STEM,
            constants=(
                *_layer_constants(problem, laid, index),
                ("shared_bytes", laid.pack_bytes),
                ("part_channels", laid.part_channels),
                *hopper.tap_constants(problem),
            ),
            arguments=(
                ("source", "const void*"),
                ("weight", "const void*"),
                ("packed", "void*"),
                ("items", index),
                ("weight_items", index),
                ("weight_elements", index),
                ("positions", "int"),
                ("batch", "int"),
                ("pitch", "int"),
                ("image_positions", "int"),
                ("source_height", "int"),
                ("source_width", "int"),
                *family.stride_fields("source", "n c h w", index),
                *family.stride_fields("weight", "in out h w", index),
            ),
            shared_bytes=laid.pack_bytes,
            threads=PACK_THREADS,
        ),
        grid=min(weight_items + pixel_items, family.MAX_GRID),
        elements=laid.weight_elements + laid.pixel_elements,
    )


def packing_arguments(
    problem: Problem, tile: Tile, operands: Operands
) -> dict[str, int | float | bytes]:
    """The fields of `struct Arguments` of `packing`."""
    laid = layout(problem, tile)
    weight_items, pixel_items = laid.pack_items
    return {
        "source": operands.x.address,
        "weight": operands.w.address,
        "packed": operands.packed,
        "items": weight_items + pixel_items,
        "weight_items": weight_items,
        "weight_elements": laid.weight_elements,
        "positions": laid.positions,
        "batch": problem.batch,
        "pitch": laid.pitch,
        "image_positions": laid.image_positions,
        "source_height": problem.height.size,
        "source_width": problem.width.size,
        **family.strides("source", "n c h w", operands.x),
        **family.strides("weight", "in out h w", operands.w),
    }


def grid(problem: Problem, target: Target, tile: Tile) -> int:
    """One block for each SM; it walks the tiles."""
    return min(target.multiprocessors, layout(problem, tile).tiles)


def splits(problem: Problem, target: Target, tile: Tile) -> int:
    """0: the kernel writes the output itself."""
    return 0


def arguments(
    problem: Problem, target: Target, tile: Tile, operands: Operands
) -> dict[str, int | float | bytes]:
    """The fields of `struct Arguments`."""
    laid = layout(problem, tile)
    planes = problem.groups * laid.chunks
    return {
        "pixel_map": operands.encode_tensor_map(
            operands.packed + 4 * laid.weight_elements,
            "float32",
            dims=(CHANNELS, laid.positions, planes),
            strides_bytes=(LINE_BYTES, laid.positions * LINE_BYTES),
            box=(CHANNELS, laid.patch_positions // laid.boxes, 1),
            swizzle=LINE_BYTES,
        ),
        "packed": operands.packed,
        "tiles": laid.tiles,
        "batch": problem.batch,
        "pitch": laid.pitch,
        "image_positions": laid.image_positions,
        **family.output_rows(problem, operands),
    }


def _index(problem: Problem, laid: Layout) -> str:
    return family.index_type(problem, laid.weight_elements + laid.pixel_elements)


def _layer_constants(problem: Problem, laid: Layout, index: str) -> tuple[tuple, ...]:
    """What the kernel and its packing share."""
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
        ("row_groups", len(laid.row_class)),
        ("row_class", laid.row_class),
        ("row_begin", laid.row_begin),
        ("group_slots", laid.row_begin[-1]),
        ("class_begin", tuple(begins)),
        ("slot_y", tuple(y for y, _ in slots)),
        ("slot_x", tuple(x for _, x in slots)),
    )
