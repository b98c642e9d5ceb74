"""The launches of `sm90_weight_gradient`: a packing where it is needed, and the kernel."""

from __future__ import annotations

import itertools

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.engine import fold
from tconv.kernels.engine.launch import image_map, turned_image
from tconv.kernels.engine.layout import PACK_THREADS, View, image_pack_grid
from tconv.kernels.launch import Address, Argument, Launch, Operand, Stride, TensorMap, strides
from tconv.kernels.sm90_weight_gradient.layout import LINE_BYTES, MOST_STAGES, Layout, layout
from tconv.kernels.sm90_weight_gradient.tiles import CONSUMERS, Tile
from tconv.kernels.source import TENSOR_MAP, Constant, KernelSource
from tconv.problem import Problem

STEM = "sm90_weight_gradient"
PACK_STEM = "sm90_pack_images"
THREADS = 128 * (1 + CONSUMERS)


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel, whose partial sums are added in the order of the splits."""
    laid = layout(problem, tile)
    problem = laid.problem
    splits = laid.splits(target)
    n, y, x = laid.box
    pitch_y, pitch_x = laid.pitch
    arguments: dict[str, Argument] = {
        **(_turned(laid) if tile.turned else _maps(laid)),
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
    index = family.index_type(problem, problem.in_channels * _columns(problem))
    source = KernelSource(
        stem=STEM,
        constants=(
            ("Index", index),
            ("Element", problem.dtype),
            ("bfloat", problem.dtype == "bfloat16"),
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
            ("source_y", tuple(y for y, _ in laid.origins)),
            ("source_x", tuple(x for _, x in laid.origins)),
            ("tap_source", tuple(tap.source for tap in laid.taps)),
            ("tap_y", tuple(tap.y for tap in laid.taps)),
            ("tap_x", tuple(tap.x for tap in laid.taps)),
            ("tap_index", tuple(tap.weight for tap in laid.taps)),
            *_turning(laid),
        ),
        arguments=tuple(
            (
                name,
                TENSOR_MAP
                if isinstance(argument, TensorMap)
                else ("void*" if name == "partial" else "const void*")
                if isinstance(argument, Address)
                else index
                if isinstance(argument, Stride)
                else "int",
            )
            for name, argument in arguments.items()
        ),
        shared_bytes=hopper.TARGET.shared_per_block - 1024,  # whatever the image
        threads=THREADS,
    )
    kernel = Launch(
        "kernel", source, laid.units * splits, arguments, splits=splits, taps_first=True
    )
    return (_pack(laid), kernel) if laid.packed[2] else (kernel,)


def _maps(laid: Layout) -> dict[str, Argument]:
    """Tensor maps of x, and of the phases of y."""
    problem = laid.problem
    whole = View(0, 0, problem.height.size), View(0, 0, problem.width.size)
    of_y = _box(laid.box[0], *laid.pitch)
    return {
        "x": image_map(problem, "x", whole, (1, 1), _box(*laid.box), laid.packed[0]),
        **{
            f"y_{i}": image_map(problem, "y", views, _strides(problem), of_y, laid.packed[1])
            for i, views in enumerate(laid.sources)
        },
    }


def _turned(laid: Layout) -> dict[str, Argument]:
    """The images that the kernel turns."""
    n, y, x = laid.box
    pitch_y = laid.pitch[0]
    return {
        **turned_image(laid.problem, "x", "x", n * y, y, x // 8),
        **turned_image(laid.problem, "y", "y", n * pitch_y, pitch_y, laid.run_vectors),
        "batch": laid.problem.batch,
    }


def _turning(laid: Layout) -> tuple[tuple[str, Constant], ...]:
    """What turning knows of the sources: runs of all sets."""
    pixels = laid.source_pixels or ((0, 0),)
    runs = [run for of_set in laid.runs for run in of_set]
    return (
        ("turned", laid.tile.turned),
        ("step_y", laid.problem.height.stride),
        ("step_x", laid.problem.width.stride),
        ("source_pixel_x", tuple(x for _, x in pixels)),
        ("set_run", tuple(itertools.accumulate(map(len, laid.runs), initial=0))),
        ("run_source", tuple(run.start for run in runs)),
        ("run_length", tuple(map(len, runs))),
        ("run_y", tuple(pixels[run.start][0] for run in runs)),
        ("run_x", tuple(min(pixels[source][1] for source in run) for run in runs)),
    )


def _box(n: int, y: int, x: int) -> tuple[int, ...]:
    return LINE_BYTES // 2, x, y, n, 1


def _strides(problem: Problem) -> tuple[int, int]:
    return problem.height.stride, problem.width.stride


def _columns(problem: Problem) -> int:
    return problem.out_channels_per_group * problem.taps


def _pack(laid: Layout) -> Launch:
    """The packing of what no tensor map can describe."""
    problem = laid.problem
    arguments: dict[str, Argument] = {"batch": problem.batch}
    operands: tuple[Operand, Operand] = ("x", "y")
    shapes = (laid.call.x_shape, laid.call.y_shape)
    for operand, shape, at in zip(operands, shapes, laid.packed[:2], strict=True):
        if at is not None:
            arguments |= {
                operand: Address(operand),
                f"packed_{operand}": Address("packed", at),
                **strides(operand, "n c h w", operand),
                f"{operand}_height": shape[2],
                f"{operand}_width": shape[3],
            }
    if laid.tile.folded:
        arguments |= {
            "image_height": problem.height.output_size,
            "image_width": problem.width.output_size,
        }
    # NOTE: of rows of one pixel, the packing counts as many units as there are bytes.
    index = family.index_type(problem, laid.packed[2])
    source = KernelSource(
        stem=PACK_STEM,
        constants=(
            ("Index", index),
            ("Element", problem.dtype),
            ("groups", problem.groups),
            ("in_channels", problem.in_channels_per_group),
            ("out_channels", problem.out_channels_per_group),
            ("packs_x", laid.packed[0] is not None),
            ("packs_y", laid.packed[1] is not None),
            ("folds", laid.tile.folded),
            *fold.constants(laid.call, laid.tile.folded),
            ("x_channels_last", problem.x_layout == "channels_last"),
            ("y_channels_last", problem.y_layout == "channels_last"),
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
    blocks = image_pack_grid(laid.packed[2] // 2)
    does = "lays images out"
    words = -(-laid.packed[2] // 4)
    return Launch("packing", source, blocks, arguments, does, packed=words)
