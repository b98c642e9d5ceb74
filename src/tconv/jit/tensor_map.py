"""Descriptors ("tensor maps") for the bulk tensor copies of sm_90 and newer.

`check` has the rules. It needs no driver, so the emulator refuses the same descriptors as a GPU.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from tconv.jit import libraries

TENSOR_MAP_BYTES = 128

DTYPES: dict[str, tuple[int, int]] = {
    # name -> CUtensorMapDataType, bytes of an element
    "uint8": (0, 1),
    "uint16": (1, 2),
    "uint32": (2, 4),
    "int32": (3, 4),
    "uint64": (4, 8),
    "int64": (5, 8),
    "float16": (6, 2),
    "float32": (7, 4),
    "float64": (8, 8),
    "bfloat16": (9, 2),
    "float32_ftz": (10, 4),
    "tfloat32": (11, 4),
    "tfloat32_ftz": (12, 4),
}
"""The element types. tfloat32 is float32 in memory, and the copy rounds it."""

SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""Bytes of the swizzle's span -> CUtensorMapSwizzle; 0 is none."""

OOB_FILLS = {"zeros": 0, "nan": 1}
"""The value of elements outside the tensor. "nan" is for floating-point types only."""

L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
"""Bytes fetched into L2 at a time -> CUtensorMapL2promotion."""


def check(
    data_ptr: int,
    dtype: str,
    dims: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int],
    swizzle: int,
    oob_fill: str,
    l2_promotion: int,
) -> None:
    """Refuses what the hardware cannot describe. Arguments are those of `encode`.

    Raises:
        ValueError: the requirement, then the value found.
    """
    for name, value, allowed in (
        ("dtype", dtype, DTYPES),
        ("swizzle", swizzle, SWIZZLES),
        ("oob_fill", oob_fill, OOB_FILLS),
        ("l2_promotion", l2_promotion, L2_PROMOTIONS),
    ):
        if value not in allowed:
            raise ValueError(f"a tensor map's {name} must be in {list(allowed)}, got {value!r}")
    rank = len(dims)
    if not 1 <= rank <= 5:
        raise ValueError(f"a tensor map has 1 to 5 dimensions, got dims={tuple(dims)}")
    if (len(strides_bytes), len(box), len(element_strides)) != (rank - 1, rank, rank):
        raise ValueError(
            f"a tensor map of {rank} dimensions takes {rank - 1} strides, {rank} box sizes and "
            f"{rank} element strides, got strides_bytes={tuple(strides_bytes)}, "
            f"box={tuple(box)}, element_strides={tuple(element_strides)}"
        )
    if data_ptr % 16 != 0:
        raise ValueError(f"a tensor map's address must be a multiple of 16, got {data_ptr:#x}")
    if not all(1 <= size <= 2**32 for size in dims):
        raise ValueError(f"a tensor map's sizes must be 1 to 2**32, got dims={tuple(dims)}")
    if not all(0 <= stride < 2**40 and stride % 16 == 0 for stride in strides_bytes):
        raise ValueError(
            "a tensor map's strides must be multiples of 16 below 2**40 bytes, "
            f"got strides_bytes={tuple(strides_bytes)}"
        )
    if not all(1 <= size <= 256 for size in box):
        raise ValueError(f"a tensor map's box must be 1 to 256 in each size, got {tuple(box)}")
    if not all(1 <= stride <= 8 for stride in element_strides):
        raise ValueError(
            f"a tensor map's element strides must be 1 to 8, got {tuple(element_strides)}"
        )
    element_bytes = DTYPES[dtype][1]
    row_bytes = box[0] * element_bytes
    if row_bytes % 16 != 0:
        raise ValueError(
            "the innermost size of a tensor map's box must take a multiple of 16 bytes, got "
            f"{box[0]} of {dtype} ({row_bytes} bytes)"
        )
    if swizzle and row_bytes > swizzle:
        raise ValueError(
            f"the innermost size of a tensor map's box must fit the swizzle of {swizzle} bytes, "
            f"got {box[0]} of {dtype} ({row_bytes} bytes)"
        )
    if oob_fill == "nan" and "float" not in dtype:
        raise ValueError(f'oob_fill="nan" is for floating-point types, got dtype={dtype!r}')


def encode(
    data_ptr: int,
    dtype: str,
    dims: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int] | None = None,
    swizzle: int = 0,
    oob_fill: str = "zeros",
    l2_promotion: int = 128,
) -> bytes:
    """The tensor map of a tiled tensor, its innermost dimension first in every list.

    Args:
        data_ptr: device address of the first element, a multiple of 16.
        dtype: a key of `DTYPES`.
        dims: the tensor's sizes in elements, 1 to 5 of them.
        strides_bytes: the strides in bytes of all dimensions but the innermost, whose elements are
            adjacent. Multiples of 16.
        box: sizes of the tile that one instruction copies, in elements, each at most 256.
        element_strides: step between copied elements, 1 to 8 in each dimension. By default 1.
        swizzle: span in bytes of the pattern in shared memory: 0 (none), 32, 64 or 128.
        oob_fill: the value of elements outside the tensor, "zeros" or "nan".
        l2_promotion: bytes that L2 fetches at a time: 0, 64, 128 or 256.

    Returns:
        the 128 bytes for a kernel's parameter, which must have an alignment of 64.

    Raises:
        ValueError: the hardware cannot describe this. The message has the rule and the value.
        LaunchError: the driver refuses for another reason.
        MissingDependencyError: no cuda-bindings or no driver.
    """
    if element_strides is None:
        element_strides = (1,) * len(dims)
    check(
        data_ptr,
        dtype,
        dims,
        strides_bytes,
        box,
        element_strides,
        swizzle,
        oob_fill,
        l2_promotion,
    )
    rank = len(dims)
    # NOTE: the driver writes the result to a multiple of 64 bytes.
    buffer = (ctypes.c_char * (TENSOR_MAP_BYTES + 64))()
    address = -(-ctypes.addressof(buffer) // 64) * 64
    interleave_none = 0
    result = _function()(
        address,
        DTYPES[dtype][0],
        rank,
        data_ptr,
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * rank)(*strides_bytes),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*element_strides),
        interleave_none,
        SWIZZLES[swizzle],
        L2_PROMOTIONS[l2_promotion],
        OOB_FILLS[oob_fill],
    )
    if result != 0:
        driver = libraries.driver()
        libraries.check(
            driver,
            (driver.CUresult(result),),
            f"encode a tensor map of {data_ptr=:#x}, {dtype=}, {dims=}, {strides_bytes=}, "
            f"{box=}, {element_strides=}, {swizzle=}, {oob_fill=}, {l2_promotion=}",
        )
    return ctypes.string_at(address, TENSOR_MAP_BYTES)


@functools.cache
def _function() -> Any:
    """`cuTensorMapEncodeTiled`, through ctypes.

    Each new address needs a map. The wrapper of cuda.bindings takes an object for every number, and
    does not guarantee the alignment.
    """
    driver = libraries.driver()
    answer = driver.cuGetProcAddress(
        b"cuTensorMapEncodeTiled",
        12000,
        driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT,
    )
    address, _ = libraries.check(driver, answer, "find cuTensorMapEncodeTiled in the driver")
    pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int,
        pointer,
        ctypes.c_int,
        u32,
        pointer,
        pointer,
        pointer,
        pointer,
        pointer,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
    )
    return prototype(int(address))
