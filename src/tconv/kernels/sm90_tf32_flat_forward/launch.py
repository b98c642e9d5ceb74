"""The launches of `sm90_tf32_flat_forward`: packing, kernel, and in float16 a repair."""

from __future__ import annotations

import functools
import itertools

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.launch import (
    START,
    Address,
    Argument,
    Launch,
    TensorMap,
    fields,
    input_image,
    output_rows,
    weights,
)
from tconv.kernels.sm90_tf32_flat_forward.layout import (
    LINE_BYTES,
    LINE_WORDS,
    MOST_PIXEL_STAGES,
    MOST_WEIGHT_STAGES,
    PACK_THREADS,
    Layout,
    layout,
)
from tconv.kernels.sm90_tf32_flat_forward.tiles import CONSUMERS, Tile
from tconv.kernels.source import KernelSource
from tconv.problem import Problem

STEM = "sm90_tf32_flat_forward"
PACK_STEM = "sm90_tf32_flat_pack"

WARPGROUP = 128

PIXEL_EXPONENT = 9
"""Float16 pixels are multiplied by 2**PIXEL_EXPONENT. They may then lie between 1.2e-7 and 127."""


def _forward_source(
    laid: Layout, arguments: dict[str, Argument], repair: bool = False
) -> KernelSource:
    """The kernel, or the repair kernel of a layout in float16."""
    index = laid.index
    return family.once(
        laid, ("source", index, repair), lambda: _made_source(laid, index, arguments, repair)
    )


def _made_source(
    laid: Layout, index: str, arguments: dict[str, Argument], repair: bool
) -> KernelSource:
    problem, tile = laid.problem, laid.tile
    shared = max(laid.shared_bytes, laid.pack_bytes if repair else 0)
    constants = (
        *_layer_constants(laid, index),
        *_packing_constants(laid),
        ("shared_bytes", shared),
        ("columns", tile.columns),
        ("vector", laid.vector),
        ("shift", laid.shift),
        ("storers", tile.storers),
        ("repair", repair),
        ("fixed_bytes", laid.fixed_bytes),
        ("most_pixel_stages", MOST_PIXEL_STAGES),
        ("most_weight_stages", MOST_WEIGHT_STAGES),
        ("row_sets", laid.row_sets),
        ("groups_outermost", laid.groups_outermost),
        ("most_slot_y", laid.most_slot[0]),
        ("most_slot_x", laid.most_slot[1]),
        ("stage_rows", laid.stage_rows),
        ("slot_rows", laid.slot_rows or (0,)),
        ("padding_y", problem.height.padding),
        ("padding_x", problem.width.padding),
        ("first_q_y", problem.height.q_range.start),
        ("first_q_x", problem.width.q_range.start),
        ("bias", problem.bias),
    )
    return KernelSource(
        stem=STEM,
        constants=constants,
        arguments=fields(
            arguments, index, _WIDE, written=f"destination repair_packed {' '.join(_NOTES)}"
        ),
        shared_bytes=shared,
        threads=WARPGROUP * (1 + CONSUMERS + tile.storers),
    )


_NOTES = ("status", "notes", "images", "slight")
_WIDE = ("items", "weight_items", "weight_elements", "slight_vectors")


def _packing_constants(laid: Layout) -> tuple[tuple, ...]:
    """Constants of a kernel that packs."""
    return (
        ("packs_half", laid.tile.half),
        ("part_channels", laid.part_channels),
        ("packed_row_step", laid.packed_row_step),
        *hopper.tap_constants(laid.problem),
    )


def _layer_constants(laid: Layout, index: str) -> tuple[tuple, ...]:
    """What the kernel and its packing share."""
    problem = laid.problem
    begins = [0]
    for row_class in laid.classes:
        begins.append(begins[-1] + len(row_class))
    # An array has at least one element, even where no phase has a slot.
    slots = [slot for row_class in laid.classes for slot in row_class] or [(0, 0)]
    return (
        *hopper.layer_constants(problem, index),
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
    """The packing of weights and pixels, the kernel, and for a float16 kernel a repair.

    The kernel has one block for each SM, which loops over tiles. The repair recomputes in TF32
    the images that float16 cannot hold.
    """
    laid = layout(problem, tile)
    noted = _noted(laid)
    packing: dict[str, Argument] = {
        "packed": START["packed"],
        **_images(laid),
        **_packing_arguments(laid),
        **(noted if tile.half else {}),
    }
    arguments = _forward_arguments(laid, START["packed"])
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
            _packing_source(laid, packing),
            laid.pack_blocks,
            packing,
            "lays weights and pixels out",
            packed=laid.packed_elements,
        ),
        Launch("kernel", _forward_source(laid, arguments), grid, arguments),
    )
    if not tile.half:
        return found
    repairing = laid.repairing
    repair_packed = Address("packed", 4 * laid.operand_elements)
    repair: dict[str, Argument] = {
        **_forward_arguments(repairing, repair_packed),
        "repair_packed": repair_packed,
        **_packing_arguments(repairing),
        "status": noted["status"],
        "images": noted["images"],
        "blocks_in_front": grid,
        "most_slight": laid.most_slight,
    }
    blocks = min(target.multiprocessors, repairing.tiles)
    return *found, Launch("repair", _forward_source(repairing, repair, True), blocks, repair)


def _packing_source(laid: Layout, arguments: dict[str, Argument]) -> KernelSource:
    """The kernel that packs weights and pixels."""
    index = laid.index
    make = functools.partial(_made_packing_source, laid, index, arguments)
    return family.once(laid, ("packing", index), make)


def _made_packing_source(laid: Layout, index: str, arguments: dict[str, Argument]) -> KernelSource:
    return KernelSource(
        stem=PACK_STEM,
        constants=(
            *_layer_constants(laid, index),
            *_packing_constants(laid),
            ("shared_bytes", laid.pack_bytes),
        ),
        arguments=fields(arguments, index, _WIDE, written=f"packed {' '.join(_NOTES)}"),
        shared_bytes=laid.pack_bytes,
        threads=PACK_THREADS,
    )


def _noted(laid: Layout) -> dict[str, Argument]:
    """Where what is noted lies."""
    begins = itertools.accumulate((laid.status, *laid.note_words[:-1]))
    return {name: Address("packed", 4 * begin) for name, begin in zip(_NOTES, begins, strict=True)}


def _forward_arguments(laid: Layout, packed: Address) -> dict[str, Argument]:
    """Arguments of the kernel, whose operands start at `packed`."""
    planes = laid.problem.groups * laid.chunks
    return {
        # Elements are float32 values, or pairs of float16 values.
        "pixel_map": TensorMap(
            Address("packed", packed.offset + 4 * laid.weight_elements),
            dims=(LINE_WORDS, laid.positions, planes),
            strides=(LINE_BYTES, laid.positions * LINE_BYTES),
            box=(LINE_WORDS, laid.boxes[1], 1),
            swizzle=LINE_BYTES,
        ),
        "packed": packed,
        "tiles": laid.tiles,
        **({"rows": laid.rows} if laid.tile.paired else {}),
        **laid.rings(hopper.TARGET),
        **_images(laid),
        **output_rows(laid.problem),
    }


def _images(laid: Layout) -> dict[str, Argument]:
    """How images follow each other in the line."""
    return {"batch": laid.problem.batch, **laid.images}


def _packing_arguments(laid: Layout) -> dict[str, Argument]:
    """What a kernel that packs is told."""
    weight_items, pixel_items = laid.pack_items
    return {
        "items": weight_items + pixel_items,
        "weight_items": weight_items,
        "weight_elements": laid.weight_elements,
        "positions": laid.positions,
        **input_image(laid.problem),
        **weights(),
    }
