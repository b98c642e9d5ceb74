"""The launches of an engine kernel: the packing of weights, and the kernel."""

from __future__ import annotations

import bisect
import itertools
import math

from tconv.jit.target import Target
from tconv.kernels import family, flat, hopper
from tconv.kernels.engine import fold
from tconv.kernels.engine.layout import (
    MOST_PATCH_STAGES,
    PACK_THREADS,
    Layout,
    View,
    chunk_values,
    is_strict,
    layout,
    line_bytes,
    operand_bytes,
    packed_size,
    read_before,
    read_phases,
    read_pixels,
    value_parts,
)
from tconv.kernels.engine.tiles import CONSUMERS, Tile
from tconv.kernels.launch import (
    Address,
    Argument,
    Launch,
    Operand,
    Stride,
    TensorMap,
    fields,
    read_type,
    strides,
    weights,
)
from tconv.kernels.source import Constant, KernelSource
from tconv.problem import ITEM_BYTES, Problem

PACK_STEM = "sm90_pack"


def launches(stem: str, problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The packing, if any, the kernel of a block for each SM, and what adds shared tiles."""
    laid = layout(problem, tile)
    arguments = _arguments(laid, target)
    shared = tile.shared
    kernel = Launch(
        "kernel",
        _source(stem, laid, arguments, 1 if shared else 0),
        min(target.multiprocessors, laid.tiles * laid.shares),
        arguments,
        packed=laid.packed_elements if shared and laid.maps_weights else 0,
        # NOTE: of y alone; the input's gradient is a new tensor.
        aligned=laid.forward and laid.vector > 1,
    )
    kernels: tuple[Launch, ...] = (kernel,)
    if shared:
        adding = {**arguments, "tiles": laid.tiles}
        source, grid = _source(stem, laid, adding, 2), min(target.multiprocessors, laid.tiles)
        kernels = (kernel, Launch("addition", source, grid, adding, aligned=kernel.aligned))
    if laid.maps_weights:
        return kernels
    packing = Launch(
        "packing",
        _pack_source(laid),
        laid.pack_grid,
        _pack_arguments(laid),
        "lays weights and the image out" if laid.packs_image else "lays weights out",
        packed=laid.packed_elements,
    )
    return packing, *kernels


def _index(laid: Layout) -> str:
    return family.index_type(laid.problem, 4 * laid.packed_elements)


def _constants(laid: Layout) -> tuple[tuple[str, Constant], ...]:
    """What the kernel and its packing share."""
    problem = laid.problem
    begins = tuple(itertools.accumulate((0, *map(len, laid.slots))))
    return (
        ("Index", _index(laid)),
        ("Element", family.ELEMENT_TYPES[problem.dtype]),
        ("groups", problem.groups),
        ("rows", laid.rows),
        ("group_rows", laid.group_rows),
        ("block_rows", laid.block_rows),
        ("reduced", laid.reduced),
        ("line_bytes", laid.line_bytes),
        ("strict", laid.strict),
        ("raw", laid.tile.raw),
        ("packs_image", laid.packs_image),
        *fold.constants(laid.call, laid.tile.folded),
        ("set_begin", begins),
        ("all_slots", begins[-1]),
    )


def _source(stem: str, laid: Layout, arguments: dict[str, Argument], share: int) -> KernelSource:
    problem = laid.problem
    slots = [slot for of_set in laid.slots for slot in of_set]
    kinds = laid.kinds
    step = (problem.height.stride, problem.width.stride) if laid.forward else (1, 1)
    return KernelSource(
        stem=stem,
        constants=(
            *_constants(laid),
            ("bfloat", problem.dtype == "bfloat16"),
            ("bias", problem.bias),
            ("share", share),
            ("columns", laid.tile.columns),
            ("positions_are_rows", laid.tile.positions_are_rows),
            ("tile_groups", laid.tile_groups),
            ("contiguous", laid.contiguous),
            ("row_phases", laid.row_phases),
            ("column_sums", laid.column_sums if laid.interleaved else (0,)),
            ("resident", laid.resident),
            ("maps_weights", laid.maps_weights),
            ("rows_adjacent", laid.rows_adjacent),
            ("weight_line", laid.weight_line),
            ("turned", laid.tile.turned),
            ("flat", laid.flat),
            ("swizzled", laid.tile.raw and laid.swizzled),
            ("raw_grain", laid.raw_grain),
            ("raw_margin", laid.raw_margin),
            ("raw_first", laid.raw_first),
            ("raw_end", laid.raw_end),
            ("stage_slots", laid.stage_slots),
            (
                "stage_end",
                tuple(
                    bisect.bisect_right([s.stage for s in slots], i)
                    for i in range(len(laid.stages))
                ),
            ),
            ("raw_pixels", tuple(sorted({x for x, _ in laid.raw_slots}))),
            ("raw_slot_pixel", tuple(x for x, _ in laid.raw_slots)),
            ("raw_slot_result", tuple(result for _, result in laid.raw_slots)),
            ("raw_last", max(x for x, _ in laid.raw_slots)),
            ("turning_warps", laid.turning_warps),
            ("raw_pieces", laid.raw_pieces),
            ("raw_bytes", laid.raw_bytes),
            ("vector", laid.vector),
            ("unfolds", laid.unfolds),
            ("maps_result", laid.maps_result),
            ("part_line", laid.part_line),
            ("part_bytes", -(-laid.part_lines * laid.part_line // 1024) * 1024),
            ("piece_bytes", laid.piece_bytes),
            ("fixed_bytes", laid.fixed_bytes),
            ("most_patch_stages", MOST_PATCH_STAGES),
            ("most_weight_stages", laid.most_weight_stages),
            ("sources", laid.map_count),
            ("results", laid.result_count),
            ("tile_results", laid.tile_results),
            ("tile_sums", laid.tile_sums),
            ("results_x", len(laid.results[1])),
            ("result_y", tuple(view.first for view in laid.results[0])),
            ("result_x", tuple(view.first for view in laid.results[1])),
            ("step_y", step[0]),
            ("step_x", step[1]),
            ("stages", len(laid.stages)),
            ("stage_source", tuple(stage.source for stage in laid.stages)),
            (
                "stage_y",  # a flat map's are pixels
                tuple(
                    laid.sources[s.source][0].first + laid.source_step[0] * s.y for s in laid.stages
                )
                if laid.flat
                else tuple(stage.y for stage in laid.stages),
            ),
            ("stage_x", tuple(stage.x for stage in laid.stages)),
            ("kind_begin", tuple(itertools.accumulate((0, *map(len, kinds))))),
            ("kind_stages", tuple(stage for kind in kinds for stage in kind) or (0,)),
            ("kind_x", tuple(laid.stages[i].x for kind in kinds for i in kind) or (0,)),
            ("source_step_y", laid.source_step[0]),
            ("source_step_x", laid.source_step[1]),
            ("slots", max(1, len(slots))),
            (
                "slot_number",
                tuple(slot.stage * laid.tile_sums + slot.result for slot in slots) or (0,),
            ),
            ("slot_y", tuple(slot.y for slot in slots) or (0,)),
            ("slot_x", tuple(slot.x for slot in slots) or (0,)),
            *_tap_constants(laid),
            *_exact_constants(laid),
        ),
        arguments=fields(arguments, _index(laid), written="destination shared_sums"),
        shared_bytes=laid.shared_bytes,
        threads=128 * (1 + CONSUMERS),
    )


def _tap_constants(laid: Layout) -> tuple[tuple[str, Constant], ...]:
    """Which weight each slot has."""
    slots = [slot for of_set in laid.slots for slot in of_set]
    return (
        ("kernel_x", laid.problem.width.kernel),
        ("slot_tap", tuple(slot.tap for slot in slots) or (0,)),
    )


def _exact_constants(laid: Layout) -> tuple[tuple[str, Constant], ...]:
    """The layer as it is called, of which <engine/exact_value.cuh> computes a value.

    Of every kernel: in exported files no template hides that they are missing.
    """
    call = laid.call
    channels = call.in_channels if laid.forward else call.out_channels
    return (
        ("exact_forward", laid.forward),
        ("exact_reduced", channels // call.groups),
        *((f"exact_{name}", value) for name, value in family.axis_constants(call)),
    )


def _exact_arguments(laid: Layout) -> dict[str, Argument]:
    """Its operands."""
    if not laid.strict:
        return {}
    read: Operand = "x" if laid.forward else "y"
    y, x = laid.call.height, laid.call.width
    sizes = (y.size, x.size) if laid.forward else (y.output_size, x.output_size)
    return {
        "exact_source": Address(read),
        "exact_height": sizes[0],
        "exact_width": sizes[1],
        **strides("exact", "n c h w", read),
        **weights(),
    }


def _pack_source(laid: Layout) -> KernelSource:
    problem = laid.problem
    return KernelSource(
        stem=PACK_STEM,
        constants=(
            *_constants(laid),
            ("turned", not laid.forward),
            ("kernel_y", problem.height.kernel),
            ("part_taps", laid.part_taps),
            ("item_rows", laid.item_rows),
            ("slot_bytes", laid.slot_bytes),
            ("slot_set", tuple(i for i, of_set in enumerate(laid.slots) for _ in of_set) or (0,)),
            *_tap_constants(laid),
            ("channels_last", laid.read_layout == "channels_last"),
            ("folds", laid.folds),
            *read_pixels(problem, "x" if laid.forward else "y", "source"),
        ),
        arguments=fields(_pack_arguments(laid), _index(laid), written="packed image"),
        shared_bytes=laid.pack_bytes,
        threads=PACK_THREADS,
    )


def _pack_arguments(laid: Layout) -> dict[str, Argument]:
    problem = laid.problem
    found: dict[str, Argument] = {"packed": Address("packed"), **weights()}
    if laid.packs_image:
        read: Operand = "x" if laid.forward else "y"
        shape = laid.call.x_shape if laid.forward else laid.call.y_shape
        found |= {
            "image": Address("packed", _image_offset(laid)),
            "source": Address(read),
            **strides("source", "n c h w", read),
            "batch": problem.batch,
            "source_height": shape[2],
            "source_width": shape[3],
        }
    if laid.folds:
        found |= {
            "image_height": problem.height.output_size,
            "image_width": problem.width.output_size,
        }
    return found


def _image_offset(laid: Layout) -> int:
    """Bytes of the workspace before the packed image."""
    return laid.weight_pieces * laid.weight_bytes


def _arguments(laid: Layout, target: Target) -> dict[str, Argument]:
    problem = laid.problem
    read: Operand = "x" if laid.forward else "y"
    made: Operand = "y" if laid.forward else "x"
    y, x = laid.call.height, laid.call.width
    sizes = (y.output_size, x.output_size) if laid.forward else (y.size, x.size)
    patch_stages, weight_stages = laid.rings(target)
    box_n, box_y, box_x = laid.box
    pitch, pitch_x = hopper.division(laid.pitch), hopper.division(laid.pitch_x)
    return {
        **(
            _turned_image(laid)
            if laid.tile.turned
            else _raw_image(laid, read)
            if laid.tile.raw
            else {f"source_{i}": _map(laid, i, read) for i in range(len(laid.sources))}
        ),
        **({"weights": _weight_map(laid)} if laid.maps_weights else {"packed": Address("packed")}),
        **(_result_maps(laid, made) if laid.maps_result else {}),
        "bias": Address("bias"),
        "destination": Address(made),
        **(_shares(laid) if laid.tile.shared else {}),
        "tiles": laid.tiles * laid.shares,
        "tiles_y": laid.tile_counts[1],
        "tiles_x": laid.tile_counts[2],
        "box_n": box_n,
        "box_y": box_y,
        "box_x": box_x,
        **dict(zip(("part_n", "part_y", "part_x"), laid.part_steps, strict=True)),
        "parts": laid.parts,
        "part_lines": math.prod(laid.part),
        "part_positions": laid.part_positions,
        "pitch": laid.pitch,
        "pitch_multiplier": pitch[0],
        "pitch_shift": pitch[1],
        "pitch_x": laid.pitch_x,
        "pitch_x_multiplier": pitch_x[0],
        "pitch_x_shift": pitch_x[1],
        "first_patch": laid.first_patch,
        "patch_bytes": (
            laid.stage_bytes
            if laid.tile.raw
            else laid.value_parts * laid.patch_positions * laid.line_bytes
        ),
        "stage_bytes": laid.stage_bytes,
        "patch_stages": patch_stages,
        "weight_stages": weight_stages,
        "lead": laid.lead(target),
        "keeps_patches": int(laid.keeps_patches(target)),
        "batch": problem.batch,
        "destination_height": sizes[0],
        "destination_width": sizes[1],
        "destination_stride_n": Stride(made, 0),
        "destination_stride_c": Stride(made, 1),
        "destination_stride_h": Stride(made, 2),
        "destination_stride_w": Stride(made, 3),
        **_exact_arguments(laid),
    }


def _shares(laid: Layout) -> dict[str, Argument]:
    """The sums of blocks that share a tile."""
    return {"shared_sums": Address("packed", laid.share_offset), "shares": laid.shares}


def _turned_image(laid: Layout) -> dict[str, Argument]:
    """The x that a kernel turns: rows by a map; those of a patch, and the pieces of a stage."""
    rows, octets = laid.piece
    bands, blocks, pieces = laid.pieces
    of_bands, of_blocks = hopper.division(bands), hopper.division(blocks)
    box = (8 * octets, laid.depth, rows, 1, 1)
    return {
        "source_0": contiguous_map(laid.problem, "x", laid.sources[0][0], 1, box),
        "source_rows": laid.box[1] + laid.reach[0],
        "source_octets": laid.row_octets,
        "source_piece_rows": rows,
        "source_piece_octets": octets,
        "source_piece_bytes": 2 * math.prod(box),
        "source_bands": bands,
        "source_bands_multiplier": of_bands[0],
        "source_bands_shift": of_bands[1],
        "source_blocks": blocks,
        "source_blocks_multiplier": of_blocks[0],
        "source_blocks_shift": of_blocks[1],
        "source_pieces": pieces,
    }


def _raw_image(laid: Layout, operand: Operand) -> dict[str, Argument]:
    """The image that a kernel reads as it lies, and the lines of a patch."""
    problem, n, depth = laid.problem, laid.box[0], laid.depth
    lines = laid.raw_lines(laid.box)
    line = laid.pixel_bytes * lines.pixels
    # Bytes of a stage from one to the next.
    if laid.flat:
        classes = flat.classes(problem, operand)
        image = depth // classes * line
        of_class, row, copy = n * image, classes * n * image, n * image
        source = flat.flat_map(problem, operand, lines.pixels, depth // classes, n)
        maps = {"source_0": source, **flat.arguments(problem, operand)}
    else:
        classes, of_class, row = 1, 0, depth * line
        image = lines.rows * row
        copy = n * image
        box = (lines.pixels, depth, lines.rows, n, 1)
        maps = {
            f"source_{i}": contiguous_map(
                problem, operand, view, laid.source_step[0], box, not laid.swizzled
            )
            for i, view in enumerate(laid.row_views)
        }
    return {
        **maps,
        "source_rows": lines.rows,
        "source_segments": lines.segments,
        "source_segment_x": lines.columns,
        "source_copy_bytes": copy,
        "source_segment_bytes": n * lines.rows * depth * line,
        "source_image_bytes": image,
        "source_row_bytes": row,
        "source_class_bytes": of_class,
        "source_class_channels": depth // classes,
        "source_line_bytes": line,
        "source_second": of_class if classes > 1 else line,
        "source_eight_bytes": 8 // classes * line,
    }


def contiguous_map(
    problem: Problem,
    operand: Operand,
    view: View,
    step: int,
    box: tuple[int, ...],
    plain: bool = False,
    packed: int | None = None,
) -> TensorMap:
    """A contiguous image: columns, channels, rows, images, groups.

    Args:
        problem: the call's.
        operand: "x" or "y".
        view, step: the pixels of height.
        box: of one copy. Lines of 32, 64 or 128 bytes are swizzled by their length.
        plain: no line is.
        packed: where its lines lie in the workspace, in bytes, if it is packed.
    """
    shape = problem.x_shape if operand == "x" else problem.y_shape
    of_group = shape[1] // problem.groups
    splits = packed is not None and operand == "x"  # parts are groups
    parts = value_parts(problem) if splits else 1
    dims = (shape[3], of_group, view.size, problem.batch, problem.groups * parts)
    item = operand_bytes(problem) if splits else ITEM_BYTES[problem.dtype]
    swizzle = box[0] * item if box[0] * item in (32, 64, 128) and not plain else 0
    if packed is not None:
        line = line_bytes(shape[3], item)
        plane = shape[2] * line
        address = Address("packed", packed + view.first * line)
        of_bytes = (plane, step * line, parts * shape[1] * plane, of_group * plane)
        kind = "bfloat16" if parts > 1 else read_type(problem)
        return TensorMap(address, dims, of_bytes, box, swizzle, kind)
    of_strides = (
        Stride(operand, 1),
        Stride(operand, 2, step),
        Stride(operand, 0),
        Stride(operand, 1, of_group),
    )
    begin = (Stride(operand, 2, view.first),)
    return TensorMap(Address(operand), dims, of_strides, box, swizzle, read_type(problem), begin)


def _map(laid: Layout, source: int, read: Operand) -> TensorMap:
    """A view of what is read: channels, columns, rows, images, groups."""
    problem = laid.problem
    view_y, view_x = laid.sources[source]
    step = laid.source_step
    box_n, box_y, _ = laid.box
    packed = _image_offset(laid) if laid.packs_image else None
    return image_map(
        problem,
        read,
        (view_y, view_x),
        step,
        (laid.depth, laid.pitch_x, box_y + laid.reach[0], box_n, 1),
        packed,
    )


def _result_maps(laid: Layout, made: Operand) -> dict[str, Argument]:
    """Views of what is made, by parts of a box."""
    problem = laid.problem
    step = (problem.height.stride, problem.width.stride) if laid.forward else (1, 1)
    n, y, x = laid.part
    return {
        f"result_{i}": image_map(problem, made, views, step, (laid.group_rows, x, y, n, 1), None)
        for i, views in enumerate(itertools.product(*laid.results))
    }


def _weight_map(laid: Layout) -> TensorMap:
    """A layer's weight: output channels, columns, rows, input channels, groups."""
    problem = laid.problem
    in_channels = problem.in_channels_per_group
    rows, depth = laid.group_rows, laid.depth
    dims = (problem.out_channels_per_group, problem.width.kernel, problem.height.kernel)
    of_strides = (Stride("w", 3), Stride("w", 2), Stride("w", 0), Stride("w", 0, in_channels))
    return TensorMap(
        Address("w"),
        (*dims, in_channels, problem.groups),
        of_strides,
        (rows, 1, 1, depth, 1) if laid.forward else (depth, 1, 1, rows, 1),
        laid.weight_line,
        read_type(problem),
    )


def image_map(
    problem: Problem,
    operand: Operand,
    views: tuple[View, View],
    step: tuple[int, int],
    box: tuple[int, ...],
    packed: int | None,
) -> TensorMap:
    """A view of an image: channels, columns, rows, images, groups.

    Args:
        problem: the call's.
        operand: "x" or "y".
        views, step: the pixels of height and width.
        box: of one copy, whose lines take the span of a swizzle.
        packed: where the image lies in the workspace, in bytes, if it is packed.
    """
    shape = problem.x_shape if operand == "x" else problem.y_shape
    item, groups = operand_bytes(problem), problem.groups * value_parts(problem)
    view_y, view_x = views
    of_group = shape[1] // problem.groups
    dims = (of_group, view_x.size, view_y.size, problem.batch, groups)
    swizzle = max(32, 1 << (box[0] * item - 1).bit_length())
    if packed is None:
        of_strides = (
            Stride(operand, 3, step[1]),
            Stride(operand, 2, step[0]),
            Stride(operand, 0),
            of_group * item,
        )
        begin = (Stride(operand, 2, view_y.first), Stride(operand, 3, view_x.first))
        kind = read_type(problem)
        return TensorMap(Address(operand), dims, of_strides, box, swizzle, kind, begin)
    line = -(-of_group // chunk_values(problem)) * 16
    height, width = packed_size(problem, operand)
    pixel, row = groups * line, groups * line * width
    first = view_y.first, view_x.first
    if operand == "y":
        axes = (problem.height, problem.width)
        first = read_before(axes[0], first[0]), read_before(axes[1], first[1])
        step = len(read_phases(axes[0])), len(read_phases(axes[1]))
    address = Address("packed", packed + first[0] * row + first[1] * pixel)
    of_bytes = (step[1] * pixel, step[0] * row, row * height, line)
    kind = "bfloat16" if is_strict(problem) else read_type(problem)
    return TensorMap(address, dims, of_bytes, box, swizzle, kind)
