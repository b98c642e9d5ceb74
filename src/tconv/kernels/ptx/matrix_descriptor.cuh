// wgmma's matrix descriptor: 64 bits that describe a matrix in shared memory. The emulator includes
// this file too.
//
// A matrix consists of pieces of 8 rows of 16 bytes, or of the swizzle's 32, 64 or 128 bytes.
//
// K-major: the 8 rows are rows of A (columns of B). `stride` is the distance to the next eight
// rows. Without swizzle, `leading` is the distance to the next 16 bytes of k; with swizzle it is
// unused.
//
// MN-major ("transposed", 16-bit types only): the 8 rows are steps of k. Without swizzle, `leading`
// is the distance to the next eight of k and `stride` to the next 16 bytes of rows. With swizzle,
// `stride` is the distance to the next eight of k and `leading` to the next span of rows.
//
// The swizzle acts on the absolute shared address. Its bits 4 to 6 (128 bytes), 4 to 5 (64) or 4
// (32) are XORed with the bits three places above, less the base offset. So with base offset 0 any
// start address in the pattern is right, if the data was laid out by absolute addresses too, as
// tensor copies do.
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

// The descriptor of a matrix `bytes` further on.
TCONV_DEVICE uint64_t advance(uint64_t descriptor, uint32_t bytes) {
    // No carry leaves the 14 bits of the address: shared memory ends before 2^18. The upper word
    // stays as it is, which the compiler does not know.
    return (descriptor & ~uint64_t(0xffffffff)) | uint32_t(uint32_t(descriptor) + (bytes >> 4));
}

}  // namespace ptx
