"""The launches of `sm90_tf32_wide_forward`: the packing of the weights and the kernel."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.launch import (
    Address,
    Argument,
    Launch,
    fields,
    input_image,
    output_rows,
    weights,
)
from tconv.kernels.sm90_tf32_wide_forward.layout import Layout, layout, vector
from tconv.kernels.sm90_tf32_wide_forward.tiles import CONSUMERS, Tile
from tconv.kernels.source import KernelSource
from tconv.problem import Problem

STEM = "sm90_tf32_wide_forward"
PACK_STEM = "sm90_tf32_wide_pack"
WARPGROUP = 128
PACK_THREADS = 256


def source(problem: Problem, tile: Tile) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    laid = layout(problem, tile)
    index = _index(problem, laid)
    return family.once(laid, ("source", index), lambda: _source(laid, index))


def _source(laid: Layout, index: str) -> KernelSource:
    problem, tile = laid.problem, laid.tile
    pixel_stages, weight_stages = laid.stages
    shared = pixel_stages * (laid.pixel_bytes + 16) + weight_stages * (laid.weight_bytes + 16)
    slots = sum(len(slots) for class_ in laid.classes for slots in class_)
    shared = -(-(shared + 4 * slots + 128) // 1024) * 1024
    constants = (
        *_layer_constants(problem, laid, index),
        ("shared_bytes", shared),
        ("pixel_tiles", tile.pixel_tiles),
        ("flat", tile.rows == 0),
        ("tile_rows", tile.rows),
        ("tile_columns", laid.tile_columns),
        ("patch_columns", laid.patch_columns),
        ("patch_positions", laid.patch_positions),
        ("copied", laid.copied),
        ("skew", laid.skew),
        ("pixel_stages", pixel_stages),
        ("weight_stages", weight_stages),
        ("lead", laid.lead),
        ("producer_registers", laid.registers(index)[0]),
        ("consumer_registers", laid.registers(index)[1]),
        ("vector", vector(problem)),
        ("most_slot_y", laid.most_slot[0]),
        ("most_slot_x", laid.most_slot[1]),
        ("padding_y", problem.height.padding),
        ("padding_x", problem.width.padding),
        *hopper.tap_constants(problem),
        ("first_q_y", problem.height.q_range.start),
        ("first_q_x", problem.width.q_range.start),
        ("bias", problem.bias),
    )
    return KernelSource(
        stem=STEM,
        constants=constants,
        arguments=fields(_arguments(problem, laid), index),
        shared_bytes=shared,
        threads=WARPGROUP * (1 + CONSUMERS),
    )


def _arguments(problem: Problem, laid: Layout) -> dict[str, Argument]:
    """Values of the fields of the kernel's `struct Arguments`."""
    tiles_x, tiles_y, _ = laid.pixel_tile_counts
    return {
        "tiles": laid.tiles,
        "tiles_x": tiles_x,
        "tiles_y": tiles_y,
        "batch": problem.batch,
        "pitch": laid.pitch,
        "image_positions": laid.image_positions,
        **input_image(problem),
        **weights(),
        "packed": Address("packed"),
        **output_rows(problem),
    }


def _index(problem: Problem, laid: Layout) -> str:
    return family.index_type(problem, laid.weight_elements)


def _layer_constants(problem: Problem, laid: Layout, index: str) -> tuple[tuple, ...]:
    """What the kernel and its packing share."""
    begins = [0]
    for class_ in laid.classes:
        for mask in class_:
            begins.append(begins[-1] + len(mask))
    # An array has at least one element, even where no phase has a slot.
    slots = [slot for class_ in laid.classes for mask in class_ for slot in mask] or [(0, 0)]
    return (
        *hopper.layer_constants(problem, index),
        ("low_phases", laid.low_phases),
        ("part_columns", laid.part_columns),
        ("masks", len(laid.masks)),
        ("part_masks", laid.masks),
        ("column_class", laid.column_class),
        ("block_begin", laid.block_begin),
        ("group_blocks", laid.block_begin[-1]),
        ("slot_begin", tuple(begins)),
        ("slot_y", tuple(y for y, _ in slots)),
        ("slot_x", tuple(x for _, x in slots)),
    )


def _packing_source(laid: Layout, index: str, places: dict[str, Argument]) -> KernelSource:
    """The kernel that packs the weights."""
    return KernelSource(
        stem=PACK_STEM,
        constants=(
            *_layer_constants(laid.problem, laid, index),
            ("shared_bytes", laid.pack_bytes),
            ("item_channels", laid.pack_channels),
            ("class_blocks", laid.class_blocks),
            *hopper.tap_constants(laid.problem),
        ),
        arguments=fields(places, index, written="packed"),
        shared_bytes=laid.pack_bytes,
        threads=PACK_THREADS,
    )


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The packing of the weights, and the kernel: one block for each SM loops over the tiles."""
    laid = layout(problem, tile)
    index = _index(problem, laid)
    places: dict[str, Argument] = {**weights(), "packed": Address("packed")}
    packing = family.once(laid, ("packing", index), lambda: _packing_source(laid, index, places))
    return (
        Launch(
            "packing",
            packing,
            min(laid.pack_items, family.MAX_GRID),
            places,
            "lays the weights out",
            packed=laid.weight_elements,
        ),
        Launch(
            "kernel",
            source(problem, tile),
            min(target.multiprocessors, laid.tiles),
            _arguments(problem, laid),
        ),
    )
