"""What a call launches: a packing where it is needed, and the kernel."""

from __future__ import annotations

import dataclasses
import math

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.engine.layout import PACK_THREADS, image_pack_grid
from tconv.kernels.launch import Address, Argument, Launch, Operand, Stride, fields
from tconv.kernels.sm80.layout import Tile, layout
from tconv.kernels.source import Constant, KernelSource
from tconv.problem import Problem

PACK_STEM = "sm80_pack"
Arguments = dict[str, Argument]
Constants = dict[str, Constant]


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The packing, if any, and the kernel."""
    laid = layout(problem, target, tile)
    direction, groups = problem.direction, problem.groups
    forward, gathers = direction == "forward", not laid.splits
    read: Operand = "x" if forward else "y"
    made: Operand = "y" if forward else "x" if gathers else "w"
    shapes = {"x": problem.x_shape, "y": problem.y_shape, "w": problem.w_shape}
    of_group = {"x": problem.in_channels_per_group, "y": problem.out_channels_per_group, "w": 1}
    # A group's channels, packed, are a multiple of 8.
    most = max(math.prod(shape) // of_group[o] * (of_group[o] + 7) for o, shape in shapes.items())
    index = family.index_type(problem, most, laid.splits * math.prod(problem.w_shape))
    shared: Constants = {"Index": index, "Element": problem.dtype, "groups": groups}
    packing = _Packing(problem, shared)
    arguments = packing.operand("source", read, (0, 1, 2, 3), groups, packed=laid.packed[0])
    if not gathers:
        arguments |= packing.operand("other", "x", (0, 1, 2, 3), groups, packed=laid.packed[1])
    elif laid.packed[1] and forward:
        arguments |= packing.operand("other", "w", (1, 0, 2, 3), groups, packed=True)
    else:  # a group's weights follow those of the group before it
        arguments |= packing.operand("other", "w", (0, 1, 2, 3), 1, packed=laid.packed[1])
        line, of_w = arguments["other_stride_n"], Stride("w", 0, of_group["x"])
        arguments["other_stride_group"] = line * of_group["x"] if isinstance(line, int) else of_w
    arguments |= {"bias": Address("bias"), "destination": Address(made if gathers else "partial")}
    arguments |= {"tiles": laid.tiles, "split_tiles": int(laid.stages), "batch": problem.batch}
    for name in ("x", "y"):
        arguments |= {f"{name}_height": shapes[name][2], f"{name}_width": shapes[name][3]}
    arguments |= {f"destination_stride_{name}": Stride(made, i) for i, name in enumerate("nchw")}
    if not gathers:  # the positions that are summed over are those of x
        arguments |= {f"destination_stride_{n}": arguments[f"other_stride_{n}"] for n in "nhw"}
    constants: Constants = {
        **shared,
        "bfloat": problem.dtype == "bfloat16",
        "forward": forward,
        "in_channels": of_group["x"],
        "out_channels": of_group["y"],
        **dict(family.axis_constants(problem)),
        "bias": problem.bias,
        "contiguous": (problem.y_layout if forward else problem.x_layout) == "contiguous",
        "weight_turned": forward and not laid.packed[1],
        **dataclasses.asdict(tile),
        "blocks": laid.resident,
        "table_bytes": laid.table_bytes,
    }
    source = _source(f"sm80_{direction}", constants, arguments, laid.shared_bytes, tile.threads)
    splits = laid.splits
    kernel = Launch("kernel", source, laid.blocks, arguments, splits=splits, taps_first=True)
    return (*packing.launch(), kernel)


def _source(
    stem: str, constants: Constants, arguments: Arguments, shared: int, threads: int
) -> KernelSource:
    index = str(constants["Index"])
    wide = [name for name in arguments if "_stride_" in name or "_begin" in name]
    found = fields(arguments, index, wide)
    return KernelSource(stem, tuple(constants.items()), found, shared, threads)


class _Packing:
    """The operands that are packed, one behind the other in the workspace."""

    def __init__(self, problem: Problem, shared: Constants) -> None:
        self.problem, self.values = problem, 0
        self.arguments: Arguments = {"destination": Address("packed")}
        none = {f"second_{name}": 0 for name in ("channels", "groups", "last")}
        self.constants: Constants = {**shared, "every": (0,), **none}

    def operand(
        self, name: str, operand: Operand, axes: tuple[int, ...], groups: int, *, packed: bool
    ) -> Arguments:
        """An operand's address, and its strides of images, rows, columns and groups.

        Its `axes` are read as images, channels, rows and columns.
        """
        problem = self.problem
        shape = {"x": problem.x_shape, "y": problem.y_shape, "w": problem.w_shape}[operand]
        n, channels, height, width = (shape[axis] for axis in axes)
        channels //= groups
        of: tuple[Argument, ...] = (*(Stride(operand, i) for i in (0, 2, 3)), channels)
        address = Address(operand)
        if packed:
            line = -(-channels // 8) * 8
            of = (height * width * groups * line, width * groups * line, groups * line, line)
            address = Address("packed", 2 * self.values)
            place = "second" if self.values else "first"
            layouts = {"x": problem.x_layout, "y": problem.y_layout, "w": "contiguous"}
            last = layouts[operand] == "channels_last"
            found = {"channels": channels, "groups": groups, "last": last}
            sizes = {"begin": self.values, "batch": n, "height": height, "width": width}
            strides = {f"stride_{s}": Stride(operand, i) for s, i in zip("nchw", axes, strict=True)}
            self.constants |= {f"{place}_{key}": value for key, value in found.items()}
            self.arguments |= {f"{place}_{key}": value for key, value in sizes.items()}
            self.arguments |= {f"{place}_{key}": value for key, value in strides.items()}
            self.arguments[place] = Address(operand)
            self.values += n * height * width * groups * line
        names = (f"{name}_stride_{of_axis}" for of_axis in ("n", "h", "w", "group"))
        return {name: address, **dict(zip(names, of, strict=True))}

    def launch(self) -> tuple[Launch, ...]:
        """The launch, if there is something to pack."""
        if not self.values:
            return ()
        source = _source(PACK_STEM, self.constants, self.arguments, 0, PACK_THREADS)
        grid, words = image_pack_grid(self.values), self.values // 2
        does = "lays operands out"
        return (Launch("packing", source, grid, self.arguments, does, packed=words),)
