"""wgmma in every type, with A from registers and from shared memory, in every layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from cpu.emulator.inline_kernel import (
    Case,
    InlineSource,
    aligned,
    aligned_copy,
    bits_of_bfloat16,
    inline_source,
)

SHARED_BYTES = 64 * 1024
DEPTH_BYTES = 32
SWIZZLE_CODES = {0: 0, 128: 1, 64: 2, 32: 3}

CODE = """
#include <ptx/bulk.cuh>
#include <ptx/wgmma.cuh>
TCONV_KERNEL(test, 128, 1) {
    TCONV_DYNAMIC_SHARED(memory);
    int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4, q = t % 4;
    for (int i = t; i < arguments.bytes; i += 128) memory[i] = arguments.image[i];
    ptx::fence_proxy_async_shared();
    __syncthreads();
    uint64_t a_shared = ptx::matrix_descriptor(memory + arguments.a_start, arguments.a_leading,
                                               arguments.a_stride,
                                               static_cast<ptx::Swizzle>(arguments.a_swizzle),
                                               arguments.a_base);
    uint64_t b = ptx::matrix_descriptor(memory + arguments.b_start, arguments.b_leading,
                                        arguments.b_stride,
                                        static_cast<ptx::Swizzle>(arguments.b_swizzle),
                                        arguments.b_base);
    uint32_t a[4];
    for (int i = 0; i < 4; ++i) {
        a[i] = arguments.a[(row + i % 2 * 8) * 8 + q + i / 2 * 4];
    }
    float d[N / 2], first[N / 2];
    for (int j = 0; j < N / 8; ++j) {
        for (int i = 0; i < 4; ++i) {
            d[4 * j + i] = arguments.c[(row + i / 2 * 8) * N + 8 * j + 2 * q + i % 2];
            first[4 * j + i] = 1e9f;
        }
    }
    ptx::wgmma_fence();
    switch (arguments.mode) {
        MODES
    }
    ptx::wgmma_wait_group<0>();
    for (int j = 0; j < N / 8; ++j) {
        for (int i = 0; i < 4; ++i) {
            int at = (row + i / 2 * 8) * N + 8 * j + 2 * q + i % 2;
            arguments.out[at] = d[4 * j + i];
            arguments.first[at] = first[4 * j + i];
        }
    }
}
"""

# One product that forgets what was there, then two in a row in another group.
MODE = """
        case {number}:
            ptx::{name}<{flags}>(first, {a}, b, false);
            ptx::wgmma_commit_group();
            ptx::{name}<{flags}>(d, {a}, b, true);
            ptx::{name}<{flags}>(d, {a}, b, true);
            ptx::wgmma_commit_group();
            break;
"""

FIELDS = {
    "a": "const unsigned*",
    "image": "const unsigned char*",
    "c": "const float*",
    "out": "float*",
    "first": "float*",
    "bytes": "int",
    "mode": "int",
    **{f"{m}_{f}": "int" for m in "ab" for f in ("start", "leading", "stride", "swizzle", "base")},
}


@dataclass(frozen=True)
class Layout:
    """Where a matrix [rows or columns, k] lies; everything in bytes."""

    swizzle: int = 0
    transposed: bool = False
    start: int = 0
    leading: int = 0
    stride: int = 0
    base: int = 0

    def place(self, image: np.ndarray, matrix: np.ndarray) -> None:
        """Write a matrix of 16- or 32-bit patterns into the bytes of shared memory."""
        width = matrix.itemsize
        span = self.swizzle or 16
        for outer in range(matrix.shape[0]):
            for k in range(matrix.shape[1]):
                if self.transposed:
                    eight, rest = divmod(outer * width, span)
                    far, near = (self.stride, self.leading)
                    if self.swizzle:
                        far, near = near, far
                    offset = eight * far + rest + k % 8 * span + k // 8 * near
                else:
                    chunk, rest = divmod(k * width, 16)
                    offset = outer % 8 * span + outer // 8 * self.stride + rest
                    offset += chunk * (16 if self.swizzle else self.leading)
                address = self.start + offset
                address ^= ((address >> 7) - self.base & span // 16 - 1) << 4
                image[address : address + width] = matrix[outer, k : k + 1].view(np.uint8)

    def arguments(self, name: str) -> dict[str, int]:
        return {
            f"{name}_start": self.start,
            f"{name}_leading": self.leading,
            f"{name}_stride": self.stride,
            f"{name}_swizzle": SWIZZLE_CODES[self.swizzle],
            f"{name}_base": self.base,
        }


@cache
def source(type_: str, columns: int) -> InlineSource:
    name = "wgmma_m64k8_tf32" if type_ == "tf32" else "wgmma_m64k16"
    modes = ""
    for number, (a, a_transposed, b_transposed) in enumerate(MODES[type_]):
        flags = "N"
        if type_ != "tf32":
            flags = f"{type_ == 'bf16':d}, N, " + ("" if a == "a" else f"{a_transposed:d}, ")
            flags += f"{b_transposed:d}"
        modes += MODE.format(number=number, name=name, flags=flags, a=a)
    code = f"constexpr int N = {columns};\n" + CODE.replace("MODES", modes)
    return inline_source(code, FIELDS, threads=128, shared_bytes=SHARED_BYTES)


_WIDE = [("a", 0, 0), ("a", 0, 1), *(("a_shared", a, b) for a in (0, 1) for b in (0, 1))]
MODES = {"tf32": [("a", 0, 0), ("a_shared", 0, 0)], "f16": _WIDE, "bf16": _WIDE}


def k_major(swizzle: int, start: int) -> Layout:
    # Pieces of eight rows, some bytes apart from what would be dense.
    if swizzle == 0:
        return Layout(0, False, start, leading=144, stride=320)
    return Layout(swizzle, False, start, stride=8 * swizzle + 1024)


def mn_major(swizzle: int, start: int) -> Layout:
    if swizzle == 0:
        return Layout(0, True, start, leading=2304, stride=128)
    return Layout(swizzle, True, start, leading=8 * swizzle + 1024, stride=12 * 1024)


def make(type_: str, columns: int, a: Layout | None, b: Layout) -> Case:
    depth = DEPTH_BYTES // (4 if type_ == "tf32" else 2)
    rng = np.random.default_rng(columns)
    left = rng.integers(-4, 5, (64, depth)).astype(np.float32)
    right = rng.integers(-4, 5, (columns, depth)).astype(np.float32)
    before = rng.integers(-4, 5, (64, columns)).astype(np.float32)

    def encoded(values: np.ndarray) -> np.ndarray:
        if type_ == "tf32":
            return values.view(np.uint32) | 0x1FFF  # low bits that the hardware must not see
        if type_ == "f16":
            return values.astype(np.float16).view(np.uint16)
        return bits_of_bfloat16(values)

    image = aligned(SHARED_BYTES, np.uint8)
    image[:] = 0xFF
    b.place(image, encoded(right))
    if a is not None:
        a.place(image, encoded(left))
    mode = ("a", 0, b.transposed) if a is None else ("a_shared", a.transposed, b.transposed)
    product = left @ right.T
    values = {
        "a": aligned_copy(encoded(left).view(np.uint32)),
        "image": image,
        "c": aligned_copy(before),
        "out": aligned((64, columns)),
        "first": aligned((64, columns)),
        "bytes": SHARED_BYTES,
        "mode": MODES[type_].index(mode),
        **(a or Layout()).arguments("a"),
        **b.arguments("b"),
    }
    where = "registers" if a is None else f"{'mn' if a.transposed else 'k'}{a.swizzle}"
    name = f"{type_}_{where}_{'mn' if b.transposed else 'k'}{b.swizzle}_at_{b.start}"
    expected = {"out": before + 2 * product, "first": product}
    return Case(name, source(type_, columns), values, expected, arch="sm_90a")


@cache
def wgmma_cases() -> dict[str, Case]:
    made = []
    second = 40 * 1024  # A lies behind B
    for swizzle in (0, 32, 64, 128):
        made.append(make("tf32", 24, None, k_major(swizzle, 0)))
        made.append(make("tf32", 24, k_major(swizzle, second), k_major(32, 0)))
        made.append(make("f16", 128, k_major(swizzle, second), k_major(swizzle, 1024)))
        made.append(make("f16", 128, None, mn_major(swizzle, 0)))
        made.append(make("f16", 128, mn_major(swizzle, second), k_major(128, 0)))
        made.append(make("f16", 128, k_major(64, second), mn_major(swizzle, 0)))
        made.append(make("bf16", 40, None, k_major(swizzle, 0)))
        made.append(make("bf16", 40, k_major(32, second), k_major(swizzle, 0)))
    # Starts inside the pattern: any pixel of 32 bytes, any step along k.
    for start in (32, 96, 160, 224, 1024 + 7 * 32):
        made.append(make("tf32", 24, None, Layout(32, False, start, stride=256)))
    # Patterns that begin at the start address and not at a multiple of their length.
    for swizzle, base in ((128, 3), (64, 1), (32, 1)):
        pattern = Layout(swizzle, False, 128 * base, stride=1024, base=base)
        made.append(make("tf32", 24, None, pattern))
    made.append(make("tf32", 24, None, k_major(128, 64)))
    made.append(make("tf32", 24, None, k_major(64, 32)))
    made.append(make("f16", 128, mn_major(128, second), mn_major(128, 0)))
    made.append(make("bf16", 40, k_major(128, second + 96), k_major(128, 32)))
    return {case.name: case for case in made}
