// Bulk and tensor copies into shared memory, and boxes of tensors.
#include "tensor_map.h"

#include <cstring>

#include "../include/emulator/formats.h"
#include "copies.h"

namespace emulator {
namespace {

// Elements of the box along one dimension that are copied.
uint64_t box_count(const TensorMapRecord& map, unsigned dimension) {
    // The innermost dimension ignores the element stride.
    unsigned stride = dimension == 0 ? 1 : map.element_strides[dimension];
    return (map.box[dimension] + stride - 1) / stride;
}

// The hardware exchanges 16-byte chunks by bits of the absolute shared address.
uint64_t swizzled_offset(const TensorMapRecord& map, uint32_t base, uint64_t offset) {
    uint64_t address = base + offset;
    uint64_t chunk = address >> 7 & ((1u << map.swizzle) - 1u);
    return (address ^ chunk << 4) - base;
}

// Bytes from one row of the box to the next in shared memory. A swizzled row takes its whole span,
// even if it is shorter. The bytes after the row stay unchanged.
uint64_t row_pitch(const TensorMapRecord& map) {
    uint64_t bytes = static_cast<uint64_t>(map.box[0]) * map.element_bytes;
    return map.swizzle == 0 ? bytes : 16u << map.swizzle;
}

uint64_t row_bytes(const TensorMapRecord& map) {
    return static_cast<uint64_t>(map.box[0]) * map.element_bytes;
}

uint64_t box_rows(const TensorMapRecord& map) {
    uint64_t rows = 1;
    for (unsigned d = 1; d < map.rank; ++d) rows *= box_count(map, d);
    return rows;
}

// Calls visit(offset in the shared box, bytes) for each piece that the copy touches.
template <typename Visit>
void for_each_piece(const TensorMapRecord& map, uint32_t base, Visit visit) {
    uint64_t pitch = row_pitch(map), bytes = row_bytes(map), rows = box_rows(map);
    if (pitch == bytes) {
        visit(0, rows * pitch);
        return;
    }
    for (uint64_t row = 0; row < rows; ++row) {
        for (uint64_t chunk = 0; chunk < bytes; chunk += 16) {
            visit(swizzled_offset(map, base, row * pitch + chunk), 16);
        }
    }
}

// Calls visit(row of the box, address of its first element, first and last element of it that
// are inside the tensor), with null for an address where no element is.
template <typename Visit>
void for_each_row(const TensorMapRecord& map, const int32_t* coordinates, Visit visit) {
    uint64_t rows = box_rows(map);
    int64_t inner = coordinates[0];
    int64_t size = static_cast<int64_t>(map.sizes[0]);
    int64_t first = inner < 0 ? -inner : 0;
    int64_t last = size - inner < map.box[0] ? size - inner : map.box[0];
    for (uint64_t row = 0; row < rows; ++row) {
        uint64_t rest = row, address = map.address;
        bool inside = first < last;
        for (unsigned d = 1; d < map.rank; ++d) {
            uint64_t count = box_count(map, d);
            int64_t at =
                coordinates[d] + static_cast<int64_t>(rest % count) * map.element_strides[d];
            rest /= count;
            inside = inside && at >= 0 && static_cast<uint64_t>(at) < map.sizes[d];
            address += static_cast<uint64_t>(at) * map.strides[d - 1];
        }
        address += static_cast<uint64_t>(inner * map.element_bytes);
        visit(row, reinterpret_cast<unsigned char*>(address), inside ? first : 0,
              inside ? last : 0);
    }
}

}  // namespace

uint64_t box_bytes(const TensorMapRecord& map) { return box_rows(map) * row_bytes(map); }

uint64_t box_footprint(const TensorMapRecord& map) { return box_rows(map) * row_pitch(map); }

// Rules found on an H200, which stops with an illegal instruction otherwise.
static void check_coordinates(const TensorMapRecord& map, const int* coordinates, bool store,
                              Location at) {
    const char* what = store ? "a tensor store" : "a tensor load";
    if (coordinates[0] * map.element_bytes % 16 != 0) {
        fail(at,
             "%s's innermost coordinate is a multiple of 16 bytes, or a GPU stops; got %d "
             "elements of %d bytes",
             what, coordinates[0], map.element_bytes);
    }
    for (unsigned d = 0; store && d < map.rank; ++d) {
        if (coordinates[d] < 0) {
            fail(at, "%s's coordinates are not negative, or a GPU stops; got %d in dimension %u",
                 what, coordinates[d], d);
        }
    }
}

void check_tensor_map(const TensorMapRecord& map, unsigned rank, const char* what, Location at) {
    if (reinterpret_cast<uintptr_t>(&map) % 64 != 0) {
        fail(at, "%s: a tensor map's address is a multiple of 64, got %p", what,
             static_cast<const void*>(&map));
    }
    if (map.magic != tensor_map_magic) fail(at, "%s: there is no tensor map of the emulator", what);
    if (map.rank != rank) {
        fail(at, "%s of %u dimensions with a tensor map of %u", what, rank, map.rank);
    }
}

// The box in its shared memory layout, before it is written there.
static void read_box(const TensorMapRecord& map, const int32_t* coordinates, uint32_t base,
                     unsigned char* image, Location at) {
    uint64_t bytes = row_bytes(map), pitch = row_pitch(map);
    std::vector<unsigned char> row_image(bytes);
    for_each_row(map, coordinates,
                 [&](uint64_t row, unsigned char* address, int64_t first, int64_t last) {
                     // Out of bounds is zero, or the hardware's NaN: 0x7ff7 in every 16 bits of
                     // any type.
                     for (uint64_t i = 0; i < bytes; i += 2) {
                         row_image[i] = map.fill ? 0xf7 : 0;
                         row_image[i + 1] = map.fill ? 0x7f : 0;
                     }
                     if (first < last) {
                         uint64_t lead = static_cast<uint64_t>(first) * map.element_bytes;
                         uint64_t inside = static_cast<uint64_t>(last - first) * map.element_bytes;
                         check_global(address + lead, inside, 1, "a tensor load", at);
                         std::memcpy(row_image.data() + lead, address + lead, inside);
                         for (int64_t i = first; map.rounding == 1 && i < last; ++i) {
                             float value;
                             std::memcpy(&value, row_image.data() + 4 * i, 4);
                             uint32_t rounded = tf32_even_of(value);
                             std::memcpy(row_image.data() + 4 * i, &rounded, 4);
                         }
                     }
                     for (uint64_t chunk = 0; chunk < bytes; chunk += 16) {
                         std::memcpy(image + swizzled_offset(map, base, row * pitch + chunk),
                                     row_image.data() + chunk, 16);
                     }
                 });
}

void read_stored_box(const TensorMapRecord& map, const unsigned char* shared, unsigned char* image,
                     Location at) {
    for_each_piece(map, shared_address(shared, at), [&](uint64_t offset, uint64_t bytes) {
        check_shared(shared + offset, bytes, 16, "a tensor store", at);
        async_read(image + offset, shared + offset, bytes, "a tensor store", at);
    });
}

void store_box(const TensorMapRecord& map, const int32_t* coordinates, const unsigned char* shared,
               const unsigned char* image, Location at) {
    uint64_t bytes = row_bytes(map), pitch = row_pitch(map);
    uint32_t base = shared_address(shared, at);
    std::vector<unsigned char> row_image(bytes);
    for_each_row(map, coordinates,
                 [&](uint64_t row, unsigned char* address, int64_t first, int64_t last) {
                     if (first >= last) return;  // out of bounds: not written
                     for (uint64_t chunk = 0; chunk < bytes; chunk += 16) {
                         std::memcpy(row_image.data() + chunk,
                                     image + swizzled_offset(map, base, row * pitch + chunk), 16);
                     }
                     uint64_t lead = static_cast<uint64_t>(first) * map.element_bytes;
                     uint64_t inside = static_cast<uint64_t>(last - first) * map.element_bytes;
                     check_global(address + lead, inside, 1, "a tensor store", at);
                     std::memcpy(address + lead, row_image.data() + lead, inside);
                 });
}

// The destination of a transfer is in flight from its issue to its delivery.
void begin_transfer(const Transfer& transfer) {
    if (transfer.map == nullptr) {
        mark_pending(transfer.destination, transfer.bytes);
        return;
    }
    for_each_piece(*transfer.map, shared_address(transfer.destination, transfer.at),
                   [&](uint64_t offset, uint64_t bytes) {
                       mark_pending(transfer.destination + offset, bytes);
                   });
}

void deliver(const Transfer& transfer) {
    if (transfer.map == nullptr) {
        mark_delivered(transfer.destination, transfer.bytes);
        async_write(transfer.destination, transfer.source, transfer.bytes);
        return;
    }
    const TensorMapRecord& map = *transfer.map;
    uint32_t base = shared_address(transfer.destination, transfer.at);
    std::vector<unsigned char> image(box_footprint(map));
    read_box(map, transfer.coordinates, base, image.data(), transfer.at);
    for_each_piece(map, base, [&](uint64_t offset, uint64_t bytes) {
        mark_delivered(transfer.destination + offset, bytes);
        async_write(transfer.destination + offset, image.data() + offset, bytes);
    });
}

void bulk_load(void* destination, const void* source, uint32_t bytes, uint64_t* barrier,
               Location at) {
    if (bytes == 0 || bytes % 16 != 0) {
        fail(at, "a bulk copy's size is a multiple of 16 bytes, got %u", bytes);
    }
    check_shared(destination, bytes, 16, "a bulk copy's destination", at);
    check_global(source, bytes, 16, "a bulk copy's source", at);
    Transfer transfer = {};
    transfer.destination = static_cast<unsigned char*>(destination);
    transfer.bytes = bytes;
    transfer.source = static_cast<const unsigned char*>(source);
    transfer.at = at;
    queue_transfer(barrier, transfer);
}

void tensor_load(void* destination, const void* map, unsigned rank, const int* coordinates,
                 uint64_t* barrier, Location at) {
    auto* record = static_cast<const TensorMapRecord*>(map);
    check_tensor_map(*record, rank, "a tensor load", at);
    check_coordinates(*record, coordinates, false, at);
    Transfer transfer = {};
    transfer.destination = static_cast<unsigned char*>(destination);
    transfer.bytes = box_bytes(*record);
    check_shared(destination, box_footprint(*record), 128, "a tensor load's destination", at);
    transfer.map = record;
    std::memcpy(transfer.coordinates, coordinates, rank * sizeof *coordinates);
    transfer.at = at;
    queue_transfer(barrier, transfer);
}

void check_tensor_store(const TensorMapRecord& map, const int* coordinates, Location at) {
    check_coordinates(map, coordinates, true, at);
}

void check_tensor_map_prefetch(const void* map, Location at) {
    auto* record = static_cast<const TensorMapRecord*>(map);
    check_tensor_map(*record, record->rank, "prefetch.tensormap", at);
}

}  // namespace emulator
