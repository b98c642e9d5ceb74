"""Kernels whose text stands in the test itself, and cases that run here and on a GPU alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tconv.emulator import EmulatedKernel, tensor_map
from tconv.kernels.source import KernelSource


@dataclass(frozen=True)
class InlineSource(KernelSource):
    code: str = ""

    def text(self) -> str:
        includes = "#include <ptx/cuda.cuh>\n"
        if any("TensorMap" in type_ for _, type_ in self.arguments):
            includes += "#include <ptx/tensor_map.cuh>\n"
        fields = "".join(f"    {type_} {name};\n" for name, type_ in self.arguments)
        return f"{includes}struct Arguments {{\n{fields}}};\n{self.code}"


def inline_source(
    code: str, arguments: dict[str, str], *, threads: int, shared_bytes: int = 0
) -> InlineSource:
    """A kernel named `test` with these fields of `Arguments`: name -> C type."""
    return InlineSource("test", (), tuple(arguments.items()), shared_bytes, threads, code)


@dataclass(frozen=True)
class Map:
    """A tensor map of an array; the fields are `encode`'s arguments."""

    array: np.ndarray
    dtype: str
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] | None = None
    swizzle: int = 0
    oob_fill: str = "zeros"

    def encode(self, encode: Callable[..., bytes], address: int) -> bytes:
        return encode(
            address,
            self.dtype,
            self.dims,
            self.strides_bytes,
            self.box,
            self.element_strides,
            self.swizzle,
            self.oob_fill,
        )


@dataclass
class Case:
    """A launch whose results are known: `expected` names the arguments that it writes."""

    name: str
    source: KernelSource
    values: dict[str, Any]
    expected: dict[str, np.ndarray]
    grid: int = 1
    arch: str = "sm_75"
    tolerance: float = 0.0
    notes: list[str] = field(default_factory=list)

    def check(self) -> None:
        for name, expected in self.expected.items():
            np.testing.assert_allclose(
                self.values[name],
                expected,
                rtol=self.tolerance,
                atol=self.tolerance,
                err_msg=f"{self.name}: {name}",
            )


def launch(
    source: KernelSource,
    grid: int = 1,
    *,
    sanitize: bool = False,
    schedule: str = "forward",
    checked: bool = True,
    **values: Any,
) -> None:
    """Launch with arrays as pointers; `checked` tells the emulator where they end."""
    arrays = []
    packed = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            arrays.append(value)
            packed[name] = value.ctypes.data
        elif isinstance(value, Map):
            arrays.append(value.array)
            packed[name] = value.encode(tensor_map.encode, value.array.ctypes.data)
        else:
            packed[name] = value
    allocations = [(array.ctypes.data, array.nbytes) for array in arrays] if checked else None
    kernel = EmulatedKernel(source, sanitize=sanitize, schedule=schedule)
    kernel.launch(grid, source.pack(**packed), allocations=allocations)


def aligned(shape: int | tuple[int, ...], dtype: Any = np.float32, alignment: int = 128) -> Any:
    """Zeros at an aligned address, as device memory has."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + size].view(dtype).reshape(shape)


def aligned_copy(values: np.ndarray) -> np.ndarray:
    copy = aligned(values.shape, values.dtype)
    copy[...] = values
    return copy


rng = np.random.default_rng(20240229)


def small_integers(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return aligned_copy(rng.integers(-4, 5, shape).astype(dtype))


def bits_of_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, 0x7FFF, rounded).astype(np.uint16)
