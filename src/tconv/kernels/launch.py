"""`Launch`: a kernel, its blocks, and what each of its arguments is.

A kernel family describes its launches in symbols. Binding replaces the symbols by strides and
addresses. An exported file holds the same description.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tconv.kernels.source import TENSOR_MAP, TENSOR_MAP_BYTES, KernelSource
from tconv.problem import ITEM_BYTES, DType, Problem

Operand = Literal["x", "w", "y", "bias", "packed", "partial"]

OPERANDS: tuple[Operand, ...] = ("x", "w", "y", "bias", "packed", "partial")
"""The tensors that a launch may read or write. Lists of addresses have this order, 0 for none.

- x, w, y: the layer's input, weight and output, or their gradients.
- bias: [Cout], contiguous.
- packed: the float32 workspace that the launches of a call share.
- partial: partial results [splits, Cin, Cout/groups, kH, kW] of float32, or of float64 for float64
  tensors; in memory in that order, or with the taps before the channels (`Launch.taps_first`).
"""

_INDEX = {operand: index for index, operand in enumerate(OPERANDS)}

Strides = Mapping[str, tuple[int, ...]]
"""Of x, w and y, in elements."""

EncodeTensorMap = Callable[..., bytes]
"""`tconv.jit.tensor_map.encode`, or the emulator's."""

READ_AS_TF32: Literal["tfloat32"] = "tfloat32"
"""The type of a tensor map whose copies round float32 to TF32."""

OUTPUT_BYTES = 16
"""Alignment of the output's address, for launches that need one (`Launch.aligned`)."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an operand's first element, plus `offset` bytes."""

    operand: Operand
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Stride:
    """A tensor's stride along an axis, in elements, or a multiple of it."""

    operand: Operand
    axis: int
    times: int = 1


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor map (TMA descriptor) of a tensor, its innermost dimension first.

    Attributes:
        address: the address of its first element, less `first`.
        dims, box, swizzle, dtype: as `tconv.jit.tensor_map.encode` takes them.
        strides: the strides of all dimensions but the innermost. A number is in bytes, a `Stride`
            in elements.
        first: what to add to the address, in elements.
    """

    address: Address
    dims: tuple[int, ...]
    strides: tuple[int | Stride, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    dtype: DType | Literal["tfloat32"] = "float32"
    first: tuple[Stride, ...] = ()


def _item_bytes(argument: TensorMap) -> int:
    return 4 if argument.dtype == READ_AS_TF32 else ITEM_BYTES[argument.dtype]


def read_type(problem: Problem) -> DType | Literal["tfloat32"]:
    """The type of a tensor map of an operand: of a TF32 product, the copy rounds to nearest."""
    return READ_AS_TF32 if problem.math == "tf32" else problem.dtype


Argument = int | float | Address | Stride | TensorMap

Role = Literal["packing", "kernel", "repair", "addition"]


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a call.

    Attributes:
        role: "packing" writes the workspace that the kernel reads. "kernel" is the family's own
            kernel. "repair" recomputes the outputs that the kernel could not compute. "addition"
            adds partial results (`Plan.addition`), or the sums of blocks that share a tile.
        source: the kernel.
        grid: number of blocks.
        arguments: the value of each field of `struct Arguments`, by name.
        does: what a packing does, for printing behind its name.
        packed: size of the workspace in float32 values, if this launch is the first to write it.
        splits: number of partial results that it writes; 0 if it writes the result.
        taps_first: whether partial results lie in memory as [splits, kH, kW, Cin, Cout/groups].
        aligned: whether the output must start on 16 bytes.
        whole_rows: whether the rows of the output must follow each other without a gap.
    """

    role: Role
    source: KernelSource
    grid: int
    arguments: dict[str, Argument]
    does: str = ""
    packed: int = 0
    splits: int = 0
    taps_first: bool = False
    aligned: bool = False
    whole_rows: bool = False

    def bind(self, strides: Strides) -> BoundLaunch:
        """The launch for tensors of these strides.

        Raises:
            ValueError: the kernel cannot write an output of these strides.
        """
        if self.whole_rows:
            width = self.arguments["destination_width"]
            if strides["y"][2:] != (width, 1):
                raise ValueError(
                    f"{self.source.stem} writes rows of {width} without a gap, "
                    f"got strides {strides['y']}"
                )
        # With zeros in place of addresses and tensor maps.
        values: dict[str, int | float | bytes] = {}
        addresses: list[int] = []
        maps, offsets = [], self.source.offsets
        for name, argument in self.arguments.items():
            if type(argument) is int:  # most are
                values[name] = argument
            elif isinstance(argument, Stride):
                values[name] = _elements(argument, strides)
            elif isinstance(argument, Address):
                values[name] = 0
                addresses += (offsets[name], _INDEX[argument.operand], argument.offset)
            elif isinstance(argument, TensorMap):
                values[name] = _NO_MAP
                address, item = argument.address, _item_bytes(argument)
                in_bytes = [
                    item * _elements(stride, strides) if isinstance(stride, Stride) else stride
                    for stride in argument.strides
                ]
                first = address.offset + item * sum([_elements(s, strides) for s in argument.first])
                begin = (offsets[name], _INDEX[address.operand], first)
                extent = (argument.dims, tuple(in_bytes), argument.box)
                maps.append((*begin, argument.dtype, *extent, argument.swizzle))
            else:
                values[name] = argument
        template = self.source.pack(**values)
        return BoundLaunch(
            self.source.stem, self.grid, self.aligned, template, tuple(addresses), tuple(maps)
        )


def _elements(stride: Stride, strides: Strides) -> int:
    return stride.times * strides[stride.operand][stride.axis]


_NO_MAP = bytes(TENSOR_MAP_BYTES)
_POINTER = struct.Struct("=Q")


@dataclass(frozen=True, slots=True)
class BoundLaunch:
    """A launch for tensors of given strides, at any addresses.

    Attributes:
        stem: the kernel.
        grid: number of blocks.
        aligned: whether the output must start on 16 bytes.
        template: the bytes of its arguments, with zeros in place of addresses.
        addresses: three numbers for each pointer, one after the other: its offset in `template`,
            the index of its operand in `OPERANDS`, and the bytes to add to the operand's address.
        maps: for each tensor map these three, then `encode`'s arguments from `dtype` to `box`, and
            `swizzle`.

    NOTE: all in few tuples: objects of each new size bring the garbage collector's next run nearer.
    """

    stem: str
    grid: int
    aligned: bool
    template: bytes
    addresses: tuple[int, ...]
    maps: tuple[tuple[Any, ...], ...]

    def arguments(self, operands: Sequence[int], encode: EncodeTensorMap) -> bytes:
        """The bytes of the kernel's one parameter, for operands at these addresses.

        Args:
            operands: addresses in the order of `OPERANDS`.
            encode: makes the 128 bytes of a tensor map.

        Raises:
            ValueError: the kernel needs an output that starts on 16 bytes, and it does not.
        """
        if self.aligned and operands[_Y] % OUTPUT_BYTES:
            raise ValueError(
                f"{self.stem} writes from a multiple of {OUTPUT_BYTES} on, got {operands[_Y]:#x}"
            )
        filled = bytearray(self.template)
        numbers = iter(self.addresses)
        for offset, operand, shift in zip(numbers, numbers, numbers, strict=True):
            _POINTER.pack_into(filled, offset, operands[operand] + shift)
        for offset, operand, shift, dtype, dims, strides, box, swizzle in self.maps:
            address = operands[operand] + shift
            encoded = encode(address, dtype, dims, strides, box, swizzle=swizzle)
            filled[offset : offset + TENSOR_MAP_BYTES] = encoded
        return bytes(filled)


_Y = _INDEX["y"]


START: Mapping[Operand, Address] = {operand: Address(operand) for operand in OPERANDS}
"""The address of each operand: one object, as each new size has it in many arguments."""


@functools.cache
def strides(prefix: str, names: str, operand: Operand) -> Mapping[str, Argument]:
    """The fields `prefix_stride_<name>` of a tensor, for its first axes."""
    return {
        f"{prefix}_stride_{name}": Stride(operand, axis) for axis, name in enumerate(names.split())
    }


def input_image(problem: Problem) -> dict[str, Argument]:
    """Fields of an input: address, size and strides."""
    return {
        "source": START["x"],
        "source_height": problem.height.size,
        "source_width": problem.width.size,
        **strides("source", "n c h w", "x"),
    }


def weights() -> dict[str, Argument]:
    """Fields of the layer's weight: address and strides."""
    return {"weight": START["w"], **strides("weight", "in out h w", "w")}


def output_rows(problem: Problem) -> dict[str, Argument]:
    """Fields of an output that is written in rows: bias, address, size and strides.

    The stride along x is 1 and has no field.
    """
    return {
        "bias": START["bias"],
        "destination": START["y"],
        "destination_height": problem.height.output_size,
        "destination_width": problem.width.output_size,
        **strides("destination", "n c h", "y"),
    }


def fields(
    arguments: Mapping[str, Argument],
    index: str,
    wide: Sequence[str] = (),
    written: str = "destination",
) -> tuple[tuple[str, str], ...]:
    """Name and C type of each argument: tensor maps, addresses, numbers, then strides.

    Args:
        arguments: the values.
        index: the C type of strides, and of the numbers named in `wide`; others are int.
        wide: numbers that may be as large as an offset.
        written: the addresses that the kernel writes to.
    """

    def type_of(name: str, argument: Argument) -> str:
        if isinstance(argument, TensorMap):
            return TENSOR_MAP
        if isinstance(argument, Address):
            return "void*" if name in written.split() else "const void*"
        return index if isinstance(argument, Stride) or name in wide else "int"

    return tuple(
        (name, type_of(name, argument))
        for kind in (TensorMap, Address, int, Stride)
        for name, argument in arguments.items()
        if isinstance(argument, kind)
    )
