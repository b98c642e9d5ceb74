// The emulator's own 128 bytes of a tensor map; written by ../tensor_map.py.
#pragma once

#include <cstdint>

#include "../include/emulator/runtime.h"

namespace emulator {

struct TensorMapRecord {
    uint64_t magic;
    uint64_t address;
    uint64_t sizes[5];    // in elements, innermost first
    uint64_t strides[4];  // in bytes, of all dimensions but the innermost
    uint16_t box[5];
    uint8_t element_strides[5];
    uint8_t rank;
    uint8_t element_bytes;
    uint8_t swizzle;  // log2 of the chunks that change places: 0, 1, 2, 3 for none, 32, 64, 128
    uint8_t fill;     // what is out of bounds: 0 zeros, 1 NaN
    uint8_t rounding;  // 1: float32 is rounded to TF32, ties to even, on its way
    uint8_t unused[20];
};
static_assert(sizeof(TensorMapRecord) == 128, "as long as the driver's");

constexpr uint64_t tensor_map_magic = 0x70616d5f766e6f63;  // "conv_map"
constexpr uint64_t tensor_map_address_offset = 8;

uint64_t box_bytes(const TensorMapRecord& map);      // that an mbarrier counts
uint64_t box_footprint(const TensorMapRecord& map);  // in shared memory, with gaps
void check_tensor_store(const TensorMapRecord& map, const int* coordinates, Location at);

// A tensor store in two steps: the box's bytes in shared memory, then those into the tensor.
void read_stored_box(const TensorMapRecord& map, const unsigned char* shared, unsigned char* image,
                     Location at);
void store_box(const TensorMapRecord& map, const int32_t* coordinates, const unsigned char* shared,
               const unsigned char* image, Location at);

}  // namespace emulator
