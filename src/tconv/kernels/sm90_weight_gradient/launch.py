"""The launch of `sm90_weight_gradient`."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.engine.layout import View
from tconv.kernels.launch import Address, Argument, Launch, Operand, Stride, TensorMap
from tconv.kernels.sm90_weight_gradient.layout import LINE_BYTES, MOST_STAGES, Layout, layout
from tconv.kernels.sm90_weight_gradient.tiles import CONSUMERS, Tile
from tconv.kernels.source import TENSOR_MAP, KernelSource
from tconv.problem import ITEM_BYTES, Problem

STEM = "sm90_weight_gradient"
THREADS = 128 * (1 + CONSUMERS)


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel, whose partial sums are added in the order of the splits."""
    laid = layout(problem, tile)
    splits = laid.splits(target)
    n, y, x = laid.box
    pitch_y, pitch_x = laid.pitch
    whole = View(0, 0, problem.height.size), View(0, 0, problem.width.size)
    arguments: dict[str, Argument] = {
        "x": _map(laid, "x", whole, (1, 1), (y, x)),
        **{
            f"y_{i}": _map(laid, "y", views, _strides(problem), laid.pitch)
            for i, views in enumerate(laid.sources)
        },
        "partial": Address("partial"),
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
        "patch_bytes": laid.patch_bytes,
        "patch_stride": laid.patch_stride,
        "stage_bytes": laid.stage_bytes,
        "stages": laid.stages(target),
        "splits": splits,
    }
    source = KernelSource(
        stem=STEM,
        constants=(
            ("Index", family.index_type(problem, splits * problem.in_channels * _columns(problem))),
            ("bfloat", problem.dtype == "bfloat16"),
            ("groups", problem.groups),
            ("in_channels", problem.in_channels_per_group),
            ("out_channels", problem.out_channels_per_group),
            ("taps", problem.taps),
            ("positions", tile.positions),
            ("out_block", laid.out_block),
            ("consumer_taps", laid.consumer_taps),
            ("most_stages", MOST_STAGES),
            ("sets", laid.sets),
            ("set_tap", laid.set_taps),
            ("set_source", tuple(sources.start for sources in laid.set_sources)),
            ("set_sources", tuple(map(len, laid.set_sources))),
            ("source_y", tuple(y for y, _ in laid.origins)),
            ("source_x", tuple(x for _, x in laid.origins)),
            ("tap_source", tuple(tap.source for tap in laid.taps)),
            ("tap_y", tuple(tap.y for tap in laid.taps)),
            ("tap_x", tuple(tap.x for tap in laid.taps)),
            ("tap_index", tuple(tap.weight for tap in laid.taps)),
        ),
        arguments=tuple(
            (
                name,
                TENSOR_MAP
                if isinstance(argument, TensorMap)
                else "void*"
                if isinstance(argument, Address)
                else "int",
            )
            for name, argument in arguments.items()
        ),
        shared_bytes=1024 + laid.stages(target) * laid.stage_bytes,
        threads=THREADS,
    )
    return (Launch("kernel", source, laid.units * splits, arguments, splits=splits),)


def _strides(problem: Problem) -> tuple[int, int]:
    return problem.height.stride, problem.width.stride


def _columns(problem: Problem) -> int:
    return problem.out_channels_per_group * problem.taps


def _map(
    laid: Layout,
    operand: Operand,
    views: tuple[View, View],
    step: tuple[int, int],
    box: tuple[int, int],
) -> TensorMap:
    """A view of a tensor: channels, columns, rows, images, groups."""
    problem = laid.problem
    of_group = problem.in_channels_per_group if operand == "x" else problem.out_channels_per_group
    view_y, view_x = views
    return TensorMap(
        Address(operand),
        dims=(of_group, view_x.size, view_y.size, problem.batch, problem.groups),
        strides=(
            Stride(operand, 3, step[1]),
            Stride(operand, 2, step[0]),
            Stride(operand, 0),
            of_group * ITEM_BYTES[problem.dtype],
        ),
        box=(LINE_BYTES // 2, box[1], box[0], laid.box[0], 1),
        swizzle=LINE_BYTES,
        dtype=problem.dtype,
        first=(Stride(operand, 2, view_y.first), Stride(operand, 3, view_x.first)),
    )
