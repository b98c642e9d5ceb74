"""Tensor maps for the emulator: the rules of the real ones, in its own format."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from tconv.jit import tensor_map as device

# runtime/tensor_map.h: magic, address, sizes, strides, box, element strides, rank, element bytes,
# swizzle, fill, rounding.
_RECORD = struct.Struct("<8sQ5Q4Q5H5BBBBBB20x")
_MAGIC = b"conv_map"
_FLUSHING = ("float32_ftz", "tfloat32_ftz")


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
    """The emulator's tensor map. Arguments are those of `tconv.jit.tensor_map.encode`.

    Returns:
        128 bytes, for a `ptx::TensorMap` among a kernel's arguments.

    Raises:
        ValueError: the hardware cannot describe this, or the emulator does not support it.
    """
    rank = len(dims)
    steps = (1,) * rank if element_strides is None else tuple(element_strides)
    device.check(data_ptr, dtype, dims, strides_bytes, box, steps, swizzle, oob_fill, l2_promotion)
    if dtype in _FLUSHING:
        raise ValueError(f"the emulator does not flush subnormal numbers, got dtype={dtype!r}")

    def padded(values: Sequence[int], length: int, filler: int) -> tuple[int, ...]:
        return tuple(values) + (filler,) * (length - len(values))

    return _RECORD.pack(
        _MAGIC,
        data_ptr,
        *padded(dims, 5, 1),
        *padded(strides_bytes, 4, 0),
        *padded(box, 5, 1),
        *padded(steps, 5, 1),
        rank,
        device.DTYPES[dtype][1],
        device.SWIZZLES[swizzle],
        device.OOB_FILLS[oob_fill],
        int(dtype == "tfloat32"),
    )
