"""The launches of an engine kernel: the packing of weights, and the kernel."""

from __future__ import annotations

import itertools

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.engine.layout import (
    MOST_PATCH_STAGES,
    PACK_THREADS,
    Layout,
    layout,
)
from tconv.kernels.engine.tiles import CONSUMERS, Tile
from tconv.kernels.launch import (
    Address,
    Argument,
    Launch,
    Operand,
    Stride,
    TensorMap,
    weights,
)
from tconv.kernels.source import TENSOR_MAP, Constant, KernelSource
from tconv.problem import ITEM_BYTES, Problem

PACK_STEM = "sm90_pack"
THREADS = 128 * (1 + CONSUMERS)
PACK_BLOCKS = 2 * 132


def launches(stem: str, problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The packing, and the kernel of one block for each SM, which loops over tiles."""
    laid = layout(problem, tile)
    arguments = _arguments(laid, target)
    return (
        Launch(
            "packing",
            _pack_source(laid),
            min(PACK_BLOCKS, laid.pack_items),
            {"packed": Address("packed"), **weights()},
            "lays weights out",
            packed=laid.packed_elements,
        ),
        Launch(
            "kernel",
            _source(stem, laid, arguments),
            min(target.multiprocessors, laid.tiles),
            arguments,
            aligned=laid.vector > 1,
        ),
    )


def _index(laid: Layout) -> str:
    return family.index_type(laid.problem, 4 * laid.packed_elements)


def _constants(laid: Layout) -> tuple[tuple[str, Constant], ...]:
    """What the kernel and its packing share."""
    problem = laid.problem
    begins = tuple(itertools.accumulate((0, *map(len, laid.slots))))
    return (
        ("Index", _index(laid)),
        ("Element", problem.dtype),
        ("groups", problem.groups),
        ("rows", laid.rows),
        ("group_rows", laid.group_rows),
        ("reduced", laid.reduced),
        ("line_bytes", laid.line_bytes),
        ("set_begin", begins),
        ("all_slots", begins[-1]),
    )


def _source(stem: str, laid: Layout, arguments: dict[str, Argument]) -> KernelSource:
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
            ("columns", laid.tile.columns),
            ("positions_are_rows", laid.tile.positions_are_rows),
            ("resident", laid.resident),
            ("vector", laid.vector),
            ("fixed_bytes", laid.fixed_bytes),
            ("most_patch_stages", MOST_PATCH_STAGES),
            ("most_weight_stages", laid.most_weight_stages),
            ("sources", len(laid.sources)),
            ("results", laid.result_count),
            ("tile_results", laid.tile_results),
            ("results_x", len(laid.results[1])),
            ("result_y", tuple(view.first for view in laid.results[0])),
            ("result_x", tuple(view.first for view in laid.results[1])),
            ("step_y", step[0]),
            ("step_x", step[1]),
            ("stages", len(laid.stages)),
            ("stage_source", tuple(stage.source for stage in laid.stages)),
            ("stage_y", tuple(stage.y for stage in laid.stages)),
            ("stage_x", tuple(stage.x for stage in laid.stages)),
            ("kind_begin", tuple(itertools.accumulate((0, *map(len, kinds))))),
            ("kind_stages", tuple(stage for kind in kinds for stage in kind) or (0,)),
            ("slots", max(1, len(slots))),
            (
                "slot_number",
                tuple(slot.stage * laid.tile_results + slot.result for slot in slots) or (0,),
            ),
            ("slot_y", tuple(slot.y for slot in slots) or (0,)),
            ("slot_x", tuple(slot.x for slot in slots) or (0,)),
        ),
        arguments=tuple(
            (name, _type_of(name, argument, _index(laid))) for name, argument in arguments.items()
        ),
        shared_bytes=laid.shared_bytes,
        threads=THREADS,
    )


def _type_of(name: str, argument: Argument, index: str) -> str:
    if isinstance(argument, TensorMap):
        return TENSOR_MAP
    if isinstance(argument, Address):
        return "void*" if name == "destination" else "const void*"
    return index if isinstance(argument, Stride) else "int"


def _pack_source(laid: Layout) -> KernelSource:
    problem = laid.problem
    slots = [slot for of_set in laid.slots for slot in of_set]
    index = _index(laid)
    return KernelSource(
        stem=PACK_STEM,
        constants=(
            *_constants(laid),
            ("turned", not laid.forward),
            ("kernel_y", problem.height.kernel),
            ("kernel_x", problem.width.kernel),
            ("part_taps", laid.part_taps),
            ("slot_tap", tuple(slot.tap for slot in slots) or (0,)),
        ),
        arguments=(
            ("packed", "void*"),
            ("weight", "const void*"),
            *family.stride_fields("weight", "in out h w", index),
        ),
        shared_bytes=laid.pack_bytes,
        threads=PACK_THREADS,
    )


def _arguments(laid: Layout, target: Target) -> dict[str, Argument]:
    problem = laid.problem
    read: Operand = "x" if laid.forward else "y"
    made: Operand = "y" if laid.forward else "x"
    y, x = problem.height, problem.width
    sizes = (y.output_size, x.output_size) if laid.forward else (y.size, x.size)
    patch_stages, weight_stages = laid.rings(target)
    box_n, box_y, box_x = laid.box
    pitch, pitch_x = hopper.division(laid.pitch), hopper.division(laid.pitch_x)
    return {
        **{f"source_{i}": _map(laid, i, read) for i in range(len(laid.sources))},
        "packed": Address("packed"),
        "bias": Address("bias"),
        "destination": Address(made),
        "tiles": laid.tiles,
        "tiles_y": laid.tile_counts[1],
        "tiles_x": laid.tile_counts[2],
        "box_n": box_n,
        "box_y": box_y,
        "box_x": box_x,
        "pitch": laid.pitch,
        "pitch_multiplier": pitch[0],
        "pitch_shift": pitch[1],
        "pitch_x": laid.pitch_x,
        "pitch_x_multiplier": pitch_x[0],
        "pitch_x_shift": pitch_x[1],
        "first_patch": laid.first_patch,
        "patch_bytes": laid.patch_positions * laid.line_bytes,
        "stage_bytes": laid.stage_bytes,
        "patch_stages": patch_stages,
        "weight_stages": weight_stages,
        "lead": laid.lead(target),
        "batch": problem.batch,
        "destination_height": sizes[0],
        "destination_width": sizes[1],
        "destination_stride_n": Stride(made, 0),
        "destination_stride_h": Stride(made, 2),
        "destination_stride_w": Stride(made, 3),
    }


def _map(laid: Layout, source: int, read: Operand) -> TensorMap:
    """A view of what is read: channels, columns, rows, images, groups."""
    problem = laid.problem
    view_y, view_x = laid.sources[source]
    step = (1, 1) if laid.forward else (problem.height.stride, problem.width.stride)
    item = ITEM_BYTES[problem.dtype]
    box_n, box_y, box_x = laid.box
    return TensorMap(
        Address(read),
        dims=(laid.reduced, view_x.size, view_y.size, problem.batch, problem.groups),
        strides=(
            Stride(read, 3, step[1]),
            Stride(read, 2, step[0]),
            Stride(read, 0),
            laid.reduced * item,
        ),
        box=(laid.depth, box_x + laid.reach[1], box_y + laid.reach[0], box_n, 1),
        swizzle=laid.line_bytes,
        dtype=problem.dtype,
        first=(Stride(read, 2, view_y.first), Stride(read, 3, view_x.first)),
    )
