"""Tensor copies: ranks, swizzle, element type and way to be out of bounds."""

from __future__ import annotations

import numpy as np

from cpu.emulator.inline_kernel import (
    Case,
    Map,
    aligned,
    aligned_copy,
    inline_source,
    rng,
    small_integers,
)

LOAD_BOX = """
#include <ptx/mbarrier.cuh>
TCONV_KERNEL(test, 32, 1) {
    TCONV_SHARED uint64_t full;
    TCONV_DYNAMIC_SHARED(memory);
    unsigned char* box = memory + arguments.offset;
    const ptx::TensorMap* map = &arguments.map;
    int t = threadIdx.x, c0 = arguments.c0, c1 = arguments.c1, c2 = arguments.c2;
    int c3 = arguments.c3, c4 = arguments.c4;
    for (int i = t; i < arguments.footprint; i += 32) box[i] = 0xee;
    ptx::fence_proxy_async_shared();
    if (t == 0) {
        ptx::prefetch_tensormap(map);
        ptx::mbarrier_init(&full, 1);
        ptx::fence_mbarrier_init();
    }
    __syncwarp();
    if (t == 0) {
        ptx::mbarrier_arrive_expect_tx(&full, arguments.bytes);
        switch (arguments.rank) {
            case 3:
                ptx::cp_async_bulk_tensor_3d_global_to_shared(box, map, c0, c1, c2, &full);
                break;
            case 4:
                ptx::cp_async_bulk_tensor_4d_global_to_shared(box, map, c0, c1, c2, c3, &full);
                break;
            default:
                ptx::cp_async_bulk_tensor_5d_global_to_shared(box, map, c0, c1, c2, c3, c4, &full);
        }
    }
    ptx::mbarrier_wait_parity(&full, 0);
    for (int i = t; i < arguments.footprint; i += 32) arguments.out[i] = box[i];
}
"""

STORE_BOX = """
TCONV_KERNEL(test, 32, 1) {
    TCONV_DYNAMIC_SHARED(memory);
    unsigned char* box = memory + arguments.offset;
    const ptx::TensorMap* map = &arguments.map;
    int t = threadIdx.x, c0 = arguments.c0, c1 = arguments.c1, c2 = arguments.c2;
    int c3 = arguments.c3, c4 = arguments.c4;
    for (int i = t; i < arguments.footprint; i += 32) box[i] = arguments.out[i];
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (t == 0) {
        ptx::cp_async_bulk_tensor_5d_shared_to_global(map, c0, c1, c2, c3, c4, box);
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group<0>();
    }
}
"""

BOX_FIELDS = {
    "map": "ptx::TensorMap",
    "out": "unsigned char*",
    "bytes": "int",
    "footprint": "int",
    "offset": "int",
    "rank": "int",
    **{f"c{i}": "int" for i in range(5)},
}


LOAD_ONLY = {"2d_tf32", "2d_nan", "2d_nan16", "2d_nanb"}


def swizzled(image: np.ndarray, offset: int, span: int) -> np.ndarray:
    """A box's bytes as they lie at `offset` from a multiple of 1024: 16-byte chunks change places
    by the bits of their own address."""
    chunks = np.arange(len(image) // 16)
    address = offset // 16 + chunks
    place = address ^ (address >> 3 & (max(span, 16) // 16 - 1))
    result = np.empty_like(image).reshape(-1, 16)
    result[place - offset // 16] = image.reshape(-1, 16)
    return result.ravel()


def box_image(values: np.ndarray, offset: int, swizzle: int) -> np.ndarray:
    """A box's bytes in shared memory; a swizzled row takes the whole span, the rest stays 0xEE."""
    rows = (
        np.ascontiguousarray(values)
        .reshape(-1)
        .view(np.uint8)
        .reshape(-1, values.shape[-1] * values.itemsize)
    )
    padded = np.full((len(rows), swizzle or rows.shape[1]), 0xEE, np.uint8)
    padded[:, : rows.shape[1]] = rows
    return swizzled(padded.ravel(), offset, swizzle)


def box_values(
    tensor: np.ndarray, start: tuple[int, ...], box: tuple[int, ...], steps: tuple[int, ...]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The box of a tensor (outermost dimension first), zero outside, and its inside's indices."""
    indices = []
    for axis in range(tensor.ndim):
        dimension = tensor.ndim - 1 - axis
        step = 1 if dimension == 0 else steps[dimension]
        indices.append(start[dimension] + np.arange(0, box[dimension], step))
    values = np.zeros([len(index) for index in indices], tensor.dtype)
    inside = [
        (index >= 0) & (index < size) for index, size in zip(indices, tensor.shape, strict=True)
    ]
    values[np.ix_(*inside)] = tensor[np.ix_(*(i[m] for i, m in zip(indices, inside, strict=True)))]
    return values, [index[mask] for index, mask in zip(indices, inside, strict=True)]


NAN_FILL = {"float32": 0x7FF77FF7, "float16": 0x7FF7, "bfloat16": 0x7FF7}

# name: type, sizes, box, start (innermost first), swizzle, shared offset, element strides; stores
# take the absolute value of the start
BOXES = {
    "1d": ("float32", (52,), (32,), (32,), 0, 0, None),
    "1d_before": ("float32", (52,), (32,), (-8,), 0, 128, None),
    "2d": ("float32", (20, 9), (16, 5), (8, 6), 0, 0, None),
    "2d_32B": ("float32", (24, 40), (8, 33), (4, -3), 32, 0, None),
    "2d_64B": ("float16", (64, 40), (32, 24), (40, 20), 64, 128, None),
    "2d_128B": ("float32", (64, 40), (32, 24), (16, 4), 128, 0, None),
    "2d_128B_moved": ("bfloat16", (64, 40), (64, 24), (-8, 30), 128, 384, None),
    "2d_128B_narrow": ("float32", (64, 40), (8, 24), (16, 4), 128, 0, None),
    "2d_64B_narrow": ("float32", (64, 40), (4, 24), (16, 4), 64, 0, None),
    "3d": ("float32", (12, 7, 5), (8, 3, 2), (8, -1, 4), 0, 0, None),
    "4d": ("float32", (8, 6, 5, 3), (8, 4, 3, 2), (0, 4, 3, -1), 32, 0, None),
    "4d_steps": ("float32", (16, 11, 9, 3), (8, 7, 5, 1), (4, -2, 1, 2), 0, 0, (1, 2, 3, 1)),
    "5d": ("uint8", (32, 3, 4, 2, 5), (16, 2, 3, 2, 3), (16, 2, -1, 1, 1), 0, 0, None),
    "2d_nan": ("float32", (24, 40), (8, 5), (20, -3), 32, 0, None),
    "2d_nan16": ("float16", (24, 40), (16, 5), (-8, 38), 0, 0, None),
    "2d_nanb": ("bfloat16", (24, 40), (16, 5), (-8, 38), 0, 0, None),
    "2d_tf32": ("tfloat32", (32, 10), (16, 6), (4, 1), 64, 0, None),
    "2d_steps_inner": ("float32", (32, 10), (16, 6), (4, 1), 0, 0, (2, 2)),
}


def positions(
    inside: list[np.ndarray], start: tuple[int, ...], steps: tuple[int, ...] | None
) -> list[np.ndarray]:
    """Where in the box the inside's indices are."""
    found = []
    for axis, index in enumerate(inside):
        dimension = len(inside) - 1 - axis
        step = 1 if dimension == 0 or steps is None else steps[dimension]
        found.append((index - start[dimension]) // step)
    return found


def padded(values: tuple[int, ...], value: int, rank: int) -> tuple[int, ...]:
    return values + (value,) * (rank - len(values))


def box_case(name: str, store: bool) -> Case:
    dtype, sizes, box, start, swizzle, offset, steps = BOXES[name]
    if store:
        start = tuple(map(abs, start))
    # Copies have three dimensions at the least, and stores five.
    rank = 5 if store else max(3, len(sizes))
    sizes, box, start = padded(sizes, 1, rank), padded(box, 1, rank), padded(start, 0, rank)
    steps = steps and padded(steps, 1, rank)
    numpy_type = np.dtype({"bfloat16": "uint16", "tfloat32": "float32"}.get(dtype, dtype))
    tensor = aligned_copy(small_integers(*sizes[::-1], dtype=np.int8).astype(numpy_type))
    if dtype == "tfloat32":
        bits = tensor.view(np.uint32)
        bits[...] = rng.integers(0, 2**32, bits.shape, dtype=np.uint32)
        bits[..., 1, 4:9] = [0x3F801000, 0x3F803000, 0xBF800FFF, 0x7FC00001, 0x7F800001]
    strides = tensor.strides[::-1][1:]
    fill = "nan" if "nan" in name else "zeros"
    spec = Map(tensor, dtype, sizes, strides, box, steps, swizzle, fill)
    values, inside = box_values(tensor, start, box, steps or (1,) * len(sizes))
    if fill == "nan":
        outside = np.ones(values.shape, bool)
        outside[np.ix_(*positions(inside, start, steps))] = False
        values.view(f"u{values.itemsize}")[outside] = NAN_FILL[dtype]
    if dtype == "tfloat32":
        bits = values.view(np.uint32).astype(np.uint64)
        rounded = bits + 0xFFF + (bits >> 13 & 1) & 0xFFFFE000
        rounded = np.where(np.isnan(values), 0x7FFFE000, rounded).astype(np.uint32)
        values = rounded.view(np.float32)
    image = box_image(values, offset, swizzle)
    scalars = {
        "bytes": values.nbytes,
        "footprint": len(image),
        "offset": offset,
        "rank": len(sizes),
        **{f"c{i}": c for i, c in enumerate(padded(start, 0, 5))},
    }
    code = STORE_BOX if store else LOAD_BOX
    source = inline_source(code, BOX_FIELDS, threads=32, shared_bytes=offset + len(image))
    if store:
        fresh = rng.integers(5, 9, values.shape).astype(numpy_type)
        given = box_image(fresh, offset, swizzle)
        expected = tensor.copy()
        keep = positions(inside, start, steps)
        expected[np.ix_(*inside)] = fresh[np.ix_(*keep)]
        launch_values = {"map": spec, "out": aligned_copy(given), **scalars}
        case = Case(f"store_{name}", source, launch_values, {}, arch="sm_90a")
        case.values["tensor"] = tensor
        case.expected["tensor"] = expected
        return case
    launch_values = {"map": spec, "out": aligned(len(image), np.uint8), **scalars}
    return Case(f"load_{name}", source, launch_values, {"out": image}, arch="sm_90a")
