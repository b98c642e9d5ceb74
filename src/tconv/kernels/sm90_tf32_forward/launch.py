"""The launches of `sm90_tf32_forward`: the packing of the weights and the kernel."""

from __future__ import annotations

import dataclasses

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.launch import (
    START,
    Address,
    Argument,
    Launch,
    Stride,
    TensorMap,
    fields,
    input_image,
    output_rows,
    weights,
)
from tconv.kernels.sm90_tf32_forward.layout import CHANNELS, WARPS, Layout, layout, warp_channels
from tconv.kernels.sm90_tf32_forward.tiles import Tile
from tconv.kernels.source import Constant, KernelSource
from tconv.problem import Problem

STEM = "sm90_tf32_forward"
PACK_STEM = "sm90_tf32_pack"
THREADS = 384

MOST_UNFIT_WEIGHTS = 2**16 - 2
"""Where a packing's count saturates, so that the sum over its threads fits 32 bits."""

UNIT_BYTES = 256
"""Bytes of shared memory for the scales of float16 operands."""

ORDER_BYTES = 272
"""Bytes of shared memory for the queue of a ring's next tiles."""


def source(problem: Problem, tile: Tile) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    laid = layout(problem, tile)
    return family.once(laid, ("source", indices(laid)), lambda: _source(laid))


def indices(laid: Layout) -> tuple[str, ...]:
    """All of a kernel's and its repair's constants that depend on an image's size."""
    return (_index(laid), _index(laid.repairing)) if laid.tile.half else (_index(laid),)


def _index(laid: Layout) -> str:
    # As notes are counted.
    return family.index_type(laid.problem, laid.tiles * (WARPS // laid.rings))


def _source(laid: Layout) -> KernelSource:
    if not laid.tile.half:
        return _forward_source(laid, repairs=None)
    return ending_with(_forward_source(laid, None), _forward_source(laid.repairing, repairs=laid))


def ending_with(kernel: KernelSource, repair: KernelSource) -> KernelSource:
    """The kernel, whose blocks end with the functions of `repair`.

    Both use the same shared memory.
    """
    shared = max(kernel.shared_bytes, repair.shared_bytes)
    return dataclasses.replace(kernel, repair_source=repair, shared_bytes=shared)


def _forward_source(laid: Layout, repairs: Layout | None) -> KernelSource:
    """The kernel. `repairs` is the layout whose tiles it recomputes, if it is a repair."""
    parts, unroll, ahead = zip(*laid.schedule, strict=True)
    schedule = (("class_parts", parts), ("class_unroll", unroll), ("class_ahead", ahead))
    return kernel_source(STEM, laid, schedule, repairs)


def kernel_source(
    stem: str,
    laid: Layout,
    schedule: tuple[tuple[str, Constant], ...],
    repairs: Layout | None = None,
) -> KernelSource:
    """The kernel of that name for a layout; `schedule` holds its own constants."""
    problem, tile = laid.problem, laid.tile
    index = _index(laid)
    stages, raw_stages = laid.stages(hopper.TARGET)
    shared = stages * (laid.stage_bytes + 16) + raw_stages * (laid.raw_bytes + 8) + ORDER_BYTES
    shared *= laid.rings
    shared += laid.output_bytes + laid.resident_bytes + laid.staged_bytes
    shared += UNIT_BYTES
    shared += laid.rings * 8 if laid.tensor_map else laid.offset_bytes(index)
    shared = -(-(shared + 256) // 1024) * 1024
    constants = (
        *_layer_constants(problem, laid, index),
        ("padding_y", problem.height.padding),
        ("padding_x", problem.width.padding),
        ("vector", laid.vector),
        ("shares", laid.shares),
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
        ("tensor_map", laid.tensor_map),
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
        arguments=fields(_arguments(laid), index, ("tiles",), written="status destination"),
        shared_bytes=shared,
        threads=THREADS,
    )


def _layer_constants(problem: Problem, laid: Layout, index: str) -> tuple[tuple, ...]:
    """What the kernel and its packing share.

    NOTE: only what both read: one packing then serves tiles that differ in the rest.
    """
    pairs = [pair for row_class in laid.classes for pair in row_class]
    begins = [0]
    for row_class in laid.classes:
        begins.append(begins[-1] + len(row_class))
    return (
        *hopper.layer_constants(problem, index),
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
        ("resident", laid.tile.resident),
        ("reaches", laid.reaches),
        ("slots_x", len(laid.slots_x)),
        ("slot_x", laid.slots_x),
    )


def _pair_fragments(laid: Layout) -> tuple[int, ...]:
    """Offset of each pair's resident weights in a chunk, in fragments.

    It is that of a warp of phase 0 and the first channels. Those of other phases and channels are a
    constant distance further on.
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


def _packing_source(laid: Layout, index: str) -> KernelSource:
    """The kernel that packs the weights."""
    problem = laid.problem
    return KernelSource(
        stem=PACK_STEM,
        constants=(*_layer_constants(problem, laid, index), *hopper.tap_constants(problem)),
        arguments=fields(
            _packing_arguments(laid), index, ("items", "half_items"), written="packed status"
        ),
        shared_bytes=0,
        threads=128,
    )


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The packing, and the kernel: one block for each SM, whose warpgroups loop over the tiles."""
    return packed_launches(problem, target, tile, source(problem, tile))


def packed_launches(
    problem: Problem, target: Target, tile: Tile, kernel: KernelSource
) -> tuple[Launch, ...]:
    """The launch that packs the weights, and that of the kernel."""
    laid = layout(problem, tile)
    elements = laid.packed_bytes // 4 + laid.status_words
    index = family.index_type(problem, elements)
    packing = family.once(laid, ("packing", index), lambda: _packing_source(laid, index))
    grid = min(target.multiprocessors, -(-laid.tiles // laid.rings))
    return (
        Launch(
            "packing",
            packing,
            laid.pack_blocks,
            _packing_arguments(laid),
            "lays the weights out",
            packed=elements,
        ),
        Launch("kernel", kernel, grid, _arguments(laid), aligned=True),
    )


def _places(laid: Layout) -> dict[str, Argument]:
    """Fields of weights, packed weights and status."""
    status = Address("packed", laid.packed_bytes)
    return {**weights(), "packed": START["packed"], "status": status}


def _packing_arguments(laid: Layout) -> dict[str, Argument]:
    return {**_places(laid), "items": laid.all_items, "half_items": laid.half_items}


def _arguments(laid: Layout) -> dict[str, Argument]:
    problem = laid.problem
    tiles_y, tiles_x = laid.tiles_yx
    arguments: dict[str, Argument] = {
        **_places(laid),
        "tiles": laid.tiles,
        "tiles_y": tiles_y,
        "tiles_x": tiles_x,
        "patch_row": laid.patch_row,
        **input_image(problem),
        **output_rows(problem),
    }
    if laid.tensor_map:
        arguments["source_map"] = TensorMap(
            START["x"],
            dims=tuple(reversed(problem.x_shape)),
            strides=(Stride("x", 2), Stride("x", 1), Stride("x", 0)),
            box=(laid.patch_columns, laid.patch_rows, CHANNELS, 1),
        )
    return arguments
