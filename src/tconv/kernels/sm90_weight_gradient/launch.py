"""The launches of `sm90_weight_gradient`: a packing where it is needed, and the kernel."""

from __future__ import annotations

import itertools

from tconv.jit.target import Target
from tconv.kernels import family, flat, hopper
from tconv.kernels.engine import fold
from tconv.kernels.engine.launch import contiguous_map, image_map
from tconv.kernels.engine.layout import (
    PACK_THREADS,
    View,
    image_pack_grid,
    packed_size,
    packed_values,
    read_pixels,
)
from tconv.kernels.launch import Address, Argument, Launch, Stride, TensorMap, strides
from tconv.kernels.sm90_weight_gradient.cost import best_splits
from tconv.kernels.sm90_weight_gradient.layout import (
    IMAGES,
    LINE_BYTES,
    MOST_STAGES,
    Layout,
    layout,
)
from tconv.kernels.sm90_weight_gradient.tiles import Tile
from tconv.kernels.source import TENSOR_MAP, KernelSource
from tconv.problem import Problem

STEM = "sm90_weight_gradient"
PACK_STEM = "sm90_pack_images"
LINES_STEM = "sm90_pack_lines"
UNIT_VALUES = 16
"""Of a unit of `sm90_pack_lines`, one for each thread."""


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel, whose partial sums are added in the order of the splits, if there are several."""
    splits = best_splits(problem, target, tile)
    laid = layout(problem, tile)
    problem = laid.problem
    whole = laid.writes_gradient(splits)
    n, y, x = laid.box
    pitch_y, pitch_x = laid.pitch
    arguments: dict[str, Argument] = {
        "x": _x_map(laid),
        **_y_maps(laid),
        "result": Address("w" if whole else "partial"),
        "boxes": laid.boxes,
        "boxes_y": laid.counts[1],
        "boxes_x": laid.counts[2],
        "box_n": n,
        "box_y": y,
        "box_x": x,
        "pitch_y": pitch_y,
        "pitch_x": pitch_x,
        # From 8 positions of x to the next: in a row, or those of the next row.
        "group_stride": LINE_BYTES * (8 if x > 8 else pitch_x),
        "patch_bytes": laid.patch_bytes * laid.patch_lines,
        "patch_stride": laid.patch_stride,
        "stage_bytes": laid.stage_bytes,
        "stages": laid.stages(target),
        "splits": splits,
        **({"x_bytes": laid.x_bytes} if tile.y_in_registers else {}),
        **({"line_stride": laid.line_stride} if tile.turned or laid.strict else {}),
        **({"part_boxes": laid.part_boxes} if laid.item == 4 else {}),
        **(flat.arguments(problem, "y") if laid.flat else {}),
        # NOTE: the last: before the others, which are then paired otherwise as they are read,
        # tiles of many taps spilled.
        "gradient_stride_out": Stride("w", 1),
        **_exact_arguments(laid),
    }
    index = family.index_type(problem, problem.in_channels * _columns(problem))
    source = KernelSource(
        stem=STEM,
        constants=(
            ("Index", index),
            ("Element", family.ELEMENT_TYPES[problem.dtype]),
            ("bfloat", problem.dtype == "bfloat16"),
            ("strict", laid.strict),
            ("maps_x", laid.maps_x),
            ("raw", tile.y_in_registers),
            ("turned", tile.turned),
            ("columns", LINE_BYTES // laid.item if tile.turned else tile.columns or tile.positions),
            ("flat", laid.flat),
            ("swizzled", laid.swizzled),
            ("stacked", laid.stacked),
            ("row_taps", laid.row_taps),
            ("consumers", tile.consumers),
            ("line_pixels", pitch_x if tile.columns else 64),
            *_words(laid),
            ("stride_y", problem.height.stride),
            ("stride_x", problem.width.stride if tile.columns else 1),
            ("dilation_x", problem.width.dilation),
            ("in_block", laid.in_block),
            ("takers", laid.takers),
            ("steps", laid.steps),
            ("buffers", laid.buffers),
            ("groups", problem.groups),
            ("in_channels", problem.in_channels_per_group),
            ("out_channels", problem.out_channels_per_group),
            ("taps", laid.call.taps),
            ("kernel_x", problem.width.kernel),
            *fold.constants(laid.call, tile.folded),
            ("positions", tile.positions),
            ("out_block", laid.out_block),
            ("consumer_taps", laid.consumer_taps),
            ("most_stages", MOST_STAGES),
            ("sets", laid.sets),
            ("set_tap", laid.set_taps),
            ("set_source", tuple(sources.start for sources in laid.set_sources)),
            ("set_sources", tuple(map(len, laid.set_sources))),
            ("set_place", tuple(itertools.accumulate((0, *map(len, laid.set_weights))))),
            ("source_first", tuple(view.first for view, _ in laid.sources)),
            ("source_y", tuple(y for y, _ in laid.origins)),
            ("source_x", tuple(x for _, x in laid.origins)),
            ("tap_source", tuple(tap.source for tap in laid.taps)),
            ("tap_y", tuple(tap.y for tap in laid.taps)),
            ("tap_x", tuple(tap.x for tap in laid.taps)),
            ("tap_index", tuple(tap.weight for tap in laid.taps)),
            ("tap_place", tuple(place for of_set in laid.set_places for place in of_set)),
            ("place_tap", tuple(tap for of_set in laid.set_weights for tap in of_set)),
            ("places_pair", laid.places_pair),
            # NOTE: kernels without full float32 read them too, in branches that they leave out.
            *((f"exact_{name}", value) for name, value in family.axis_constants(laid.call)),
        ),
        arguments=tuple(
            (
                name,
                TENSOR_MAP
                if isinstance(argument, TensorMap)
                else "void*"
                if isinstance(argument, Address)
                else index
                if name.startswith(("exact_x_stride", "exact_y_stride"))
                else "int",
            )
            for name, argument in arguments.items()
        ),
        shared_bytes=hopper.TARGET.shared_per_block - 1024,  # whatever the image
        threads=128 * (1 + tile.consumers),
    )
    kernel = Launch(
        "kernel",
        source,
        laid.units * splits,
        arguments,
        splits=0 if whole else splits,
        taps_first=True,
    )
    return (_pack(laid), kernel) if laid.packed[2] else (kernel,)


def _exact_arguments(laid: Layout) -> dict[str, Argument]:
    """Operands of which <sm90_weight_gradient/exact_sum.cuh> computes a sum."""
    if not laid.strict:
        return {}
    y, x = laid.call.height, laid.call.width
    return {
        "exact_x": Address("x"),
        "exact_y": Address("y"),
        "exact_batch": laid.call.batch,
        "exact_x_height": y.size,
        "exact_x_width": x.size,
        "exact_y_height": y.output_size,
        "exact_y_width": x.output_size,
        **strides("exact_x", "n c h w", "x"),
        **strides("exact_y", "n c h w", "y"),
    }


def _words(laid: Layout) -> tuple[tuple[str, int], ...]:
    """Whether takers' first pixels are odd, and their words: 0 or 1, or 2 if it differs."""
    firsts = {tap.x for tap in laid.taps[:: laid.consumer_taps]} if laid.tile.columns else {0}
    found = []
    for name, unit in (("odd_pixel", 1), ("late_word", 2)):
        bits = {(first + shift) // unit % 2 for first in firsts for shift in laid.shifts}
        used = unit == 1 or laid.problem.width.stride == 2
        found.append((name, (2 if len(bits) == 2 else bits.pop()) if used else 0))
    return tuple(found)


def _x_map(laid: Layout) -> TensorMap:
    problem, channels, (n, y, x) = laid.problem, laid.in_block, laid.box
    views = View(0, 0, problem.height.size), View(0, 0, problem.width.size)
    if laid.maps_x:
        box = (x, channels, y + laid.stacked - 1, n, 1)
        return contiguous_map(problem, "x", views[0], 1, box, packed=laid.packed[0])
    return image_map(problem, "x", views, (1, 1), _box(laid.item, n, y, x), laid.packed[0])


def _y_maps(laid: Layout) -> dict[str, Argument]:
    problem, n = laid.problem, laid.box[0]
    rows, columns = laid.pitch
    if laid.flat:
        channels = laid.out_block // flat.classes(problem, "y")
        return {"y_0": flat.flat_map(problem, "y", columns, channels, 1)}
    found: dict[str, Argument] = {}
    for i, views in enumerate(laid.sources):
        if not laid.tile.columns:
            box, step = _box(laid.item, n, rows, columns), _strides(problem)
            found[f"y_{i}"] = image_map(problem, "y", views, step, box, laid.packed[1])
            continue
        box = (columns, laid.out_block, rows, n, 1)
        found[f"y_{i}"] = contiguous_map(
            problem, "y", views[0], problem.height.stride, box, not laid.swizzled, laid.packed[1]
        )
    return found


def _box(item: int, n: int, y: int, x: int) -> tuple[int, ...]:
    return LINE_BYTES // item, x, y, n, 1


def _strides(problem: Problem) -> tuple[int, int]:
    return problem.height.stride, problem.width.stride


def _columns(problem: Problem) -> int:
    return problem.out_channels_per_group * problem.taps


def _units(laid: Layout) -> int:
    """Most that the packing of images counts, and most places of 16 bytes that it writes.

    Of a row it counts vectors, in runs of 16: as many for a single pixel.
    """
    problem, most = laid.problem, laid.packed[2] // 8
    for image, at in zip(IMAGES, laid.packed[:2], strict=True):
        if at is not None:
            of_column = packed_values(problem, image) // packed_size(problem, image)[1]
            width = problem.width.size if image == "x" else problem.width.output_size
            most = max(most, of_column * laid.item // 16 * -(-width // 16) * 16)
    return most


def _pack(laid: Layout) -> Launch:
    """The packing of what no tensor map can describe."""
    problem, lines = laid.problem, laid.tile.columns > 0
    arguments: dict[str, Argument] = {"batch": problem.batch}
    shapes = (laid.call.x_shape, laid.call.y_shape)
    for operand, shape, at in zip(IMAGES, shapes, laid.packed[:2], strict=True):
        if at is not None:
            arguments |= {
                operand: Address(operand),
                f"packed_{operand}": Address("packed", at),
                **strides(operand, "n c h w", operand),
                f"{operand}_height": shape[2],
                f"{operand}_width": shape[3],
            }
    if laid.tile.folded or (lines and laid.packed[1] is not None):
        arguments |= {
            "image_height": problem.height.output_size,
            "image_width": problem.width.output_size,
        }
    most = laid.packed[2] if lines or laid.tile.folded else _units(laid)
    index = family.index_type(problem, most)
    source = KernelSource(
        stem=LINES_STEM if lines else PACK_STEM,
        constants=(
            ("Index", index),
            ("Element", family.ELEMENT_TYPES[problem.dtype]),
            ("groups", problem.groups),
            ("in_channels", problem.in_channels_per_group),
            ("out_channels", problem.out_channels_per_group),
            ("packs_x", laid.packed[0] is not None),
            ("packs_y", laid.packed[1] is not None),
            ("folds", laid.tile.folded),
            ("strict", laid.strict),
            *fold.constants(laid.call, laid.tile.folded),
            ("x_channels_last", problem.x_layout == "channels_last"),
            ("y_channels_last", problem.y_layout == "channels_last"),
            *read_pixels(problem, "x", "x"),
            *read_pixels(problem, "y", "y"),
        ),
        arguments=tuple(
            (
                name,
                index
                if isinstance(argument, Stride)
                else "int"
                if isinstance(argument, int)
                else "void*"
                if name.startswith("packed")
                else "const void*",
            )
            for name, argument in arguments.items()
        ),
        shared_bytes=0,
        threads=PACK_THREADS,
    )
    values = laid.packed[2] // laid.item
    blocks = -(-values // (PACK_THREADS * UNIT_VALUES)) if lines else image_pack_grid(values)
    does = "lays images out"
    words = -(-laid.packed[2] // 4)
    return Launch("packing", source, blocks, arguments, does, packed=words)
