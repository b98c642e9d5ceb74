// The 64 bits by which wgmma finds a matrix in shared memory; the same file serves the emulator.
//
// A matrix is cut in pieces of 8 rows of 16, 32, 64 or 128 bytes (no swizzle, or its span). With
// K-major operands the 8 rows are rows of A (or columns of B), and `stride` leads from one piece to
// the next eight rows; without swizzle `leading` leads to the next 16 bytes of k, with swizzle it
// is not used. With MN-major operands ("transposed", 16-bit types alone) the 8 rows are steps of k:
// without swizzle `leading` leads to the next eight of k and `stride` to the next 16 bytes of rows;
// with swizzle `stride` leads to the next eight of k and `leading` to the next span of rows.
//
// The swizzle acts on the absolute shared address: its bits 4 to 6 (128 bytes), 4 to 5 (64) or 4
// (32) are exclusive-ored with the bits three places above, from which the base offset is taken off
// first. So with base offset 0 a start address anywhere in the pattern is right, as long as the
// data was laid out by absolute addresses too, as tensor copies do.
#pragma once

#include <ptx/shared_address.cuh>

namespace ptx {

enum class Swizzle : uint32_t { none = 0, bytes_128 = 1, bytes_64 = 2, bytes_32 = 3 };

// All in bytes, multiples of 16.
TCONV_DEVICE uint64_t matrix_descriptor(const void* start, uint32_t leading, uint32_t stride,
                                        Swizzle swizzle, uint32_t base_offset = 0) {
    uint32_t address = cvta_to_shared(start);
    return static_cast<uint64_t>((address & 0x3ffffu) >> 4) |
           static_cast<uint64_t>((leading & 0x3ffffu) >> 4) << 16 |
           static_cast<uint64_t>((stride & 0x3ffffu) >> 4) << 32 |
           static_cast<uint64_t>(base_offset & 7u) << 49 | static_cast<uint64_t>(swizzle) << 62;
}

// The same matrix `bytes` further on.
TCONV_DEVICE uint64_t advance(uint64_t descriptor, uint32_t bytes) {
    // NOTE: no carry leaves the 14 bits of the address: shared memory ends before 2^18.
    return descriptor + (bytes >> 4);
}

}  // namespace ptx
