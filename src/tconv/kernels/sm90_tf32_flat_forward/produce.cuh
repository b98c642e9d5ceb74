// The producers of sm90_tf32_flat_forward: they load pixels and weights, and find where outputs
// lie.
#pragma once

#include <common/division.cuh>
#include <common/ring.cuh>
#include <ptx/bulk.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/redux.cuh>
#include <ptx/tensor_map.cuh>
#include <sm90_tf32_flat_forward/repair.cuh>
#include <sm90_tf32_flat_forward/rows.cuh>
#include <sm90_tf32_flat_forward/stages.cuh>
#include <sm90_tf32_flat_forward/status.cuh>

namespace {

template <typename Fields>
TCONV_DEVICE int reach(const Fields& arguments) {
    return Layer::most_slot_y * arguments.pitch + Layer::most_slot_x;
}

template <typename Fields>
TCONV_DEVICE void find_starts(const Fields& arguments, Shared& shared) {
    for (int slot = threadIdx.x; slot < Layer::slots; slot += Layer::threads) {
        int slot_x = entry(Layer::slot_x, slot), slot_y = entry(Layer::slot_y, slot);
        if constexpr (stage_rows == 1) {
            int back = slot_y * arguments.pitch + slot_x;
            shared.starts[slot] = (reach(arguments) - back) * line_bytes;
        } else {
            int row = 0;
            while (entry(Layer::slot_rows, row) != slot_y) ++row;
            shared.starts[slot] = (Layer::most_slot_x - slot_x) * line_bytes + row;
        }
    }
}

template <typename Fields>
TCONV_DEVICE void produce_pixels(const Fields& arguments, Shared& shared) {
    CountedTurn turn;
    int origin = Layer::first_q_y * arguments.pitch + Layer::first_q_x - reach(arguments);
    ptx::prefetch_tensormap(&arguments.pixel_map);
    ptx::griddepcontrol_wait();  // the packing may still run
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(tile, arguments);
        for (int stage = 0; stage < tile_stages; ++stage) {
            int from = origin + at.first;
            if constexpr (stage_rows > 1) {
                int row = entry(Layer::slot_rows, stage % stage_rows);
                from += (Layer::most_slot_y - row) * arguments.pitch;
            }
            uint64_t* full = &shared.pixels_full[turn.stage];
            ptx::mbarrier_wait_parity(&shared.pixels_empty[turn.stage], turn.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, arguments.pixel_bytes);
#pragma unroll 1
            for (int position = 0; position * line_bytes < arguments.pixel_bytes;
                 position += arguments.box_positions) {
                ptx::cp_async_bulk_tensor_3d_global_to_shared(
                    pixels_of(arguments, shared, turn.stage) + position * line_bytes,
                    &arguments.pixel_map, 0, from + position,
                    at.group * chunks + stage / stage_rows, full);
            }
            turn.advance(arguments.pixel_stages);
        }
    }
}

// Where the weights of a row group begin, and how many pieces they have: none beyond the last
// group.
struct Weights {
    const unsigned char* from;
    int count;

    template <typename Fields>
    TCONV_DEVICE Weights(const Fields& arguments, int group, int row_group) {
        if (row_group >= Layer::row_groups) {
            from = nullptr;
            count = 0;
            return;
        }
        flat::RowSlots slots(row_group);
        count = (slots.end - slots.begin) * chunks;
        from = static_cast<const unsigned char*>(arguments.packed) +
               (Index(group) * Layer::group_slots + slots.packed) * chunks * weight_bytes;
    }
};

template <typename Fields>
TCONV_DEVICE void produce_weights(const Fields& arguments, Shared& shared, int consumer) {
    CountedTurn turn;
    ptx::griddepcontrol_wait();  // the packing may still run
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(tile, arguments);
        Weights weights(arguments, at.group, at.row_group(consumer));
        for (int i = 0; i < weights.count; ++i) {
            uint64_t* full = &shared.weights_full[consumer][turn.stage];
            ptx::mbarrier_wait_parity(&shared.weights_empty[consumer][turn.stage], turn.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, weight_bytes);
            ptx::cp_async_bulk_global_to_shared(
                weights_of(arguments, shared, consumer) + turn.stage * weight_bytes, weights.from,
                weight_bytes, full);
            weights.from += weight_bytes;
            turn.advance(arguments.weight_stages);
        }
    }
}

// Sums up the packing's notes: whether float16 holds the weights, and which images' pixels it
// holds. One warp of each block takes a part, and then counts its block in `Status::reported`.
template <typename Fields>
TCONV_DEVICE void read_notes(const Fields& arguments) {
    int lane = threadIdx.x % 32;
    auto& status = *static_cast<flat::Status*>(arguments.status);
    const auto* notes = static_cast<const uint32_t*>(arguments.notes);
    uint32_t unfit = 0;
    for (int i = blockIdx.x * 32 + lane; i < arguments.note_count; i += gridDim.x * 32)
        unfit += notes[i];
    unfit = ptx::redux_sync_add_u32(unfit);
    if (lane == 0 && unfit > 0) atomicAdd(&status.unfit_weights, unfit);
    // Reads 16 positions at a time; nearly all are zeros.
    const auto* slight = static_cast<const uint4*>(arguments.slight);
    constexpr int positions = 64, planes = Layer::groups * chunks;
    uint32_t most_slight = arguments.most_slight;
#pragma unroll 4
    for (Index i = Index(blockIdx.x) * 32 + lane; i < arguments.slight_vectors;
         i += gridDim.x * 32) {
        uint4 bytes = slight[i];
        if ((bytes.x | bytes.y | bytes.z | bytes.w) == 0) continue;
        auto first = unsigned(i / (positions / 16) / planes) * positions +
                     unsigned(i % (positions / 16)) * 16;
#pragma unroll 1
        for (int k = 0; k < 16; ++k) {
            uint32_t word = k < 8 ? k < 4 ? bytes.x : bytes.y : k < 12 ? bytes.z : bytes.w;
            uint32_t byte = word >> k % 4 * 8 & 0xff;
            uint32_t count = byte < 16 ? byte : most_slight + 1;
            unsigned image = divide(first + k, arguments.image_multiplier, arguments.image_shift);
            uint32_t* of_image = static_cast<uint32_t*>(arguments.images) + image;
            // Counting ends where the verdict is known.
            if (count == 0 || *static_cast<volatile uint32_t*>(of_image) > most_slight) continue;
            uint32_t before = atomicAdd(of_image, count);
            if (before <= most_slight && before + count > most_slight) {
                atomicAdd(&status.unfit_images, 1u);
            }
        }
    }
    __threadfence();
    __syncwarp();
    if (lane == 0) atomicAdd(&status.reported, 1u);
}

// Finds where each tile's outputs lie. Called by a warp.
template <typename Fields>
TCONV_DEVICE void produce_places(const Fields& arguments, Shared& shared) {
    Turn<2> turn;
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(tile, arguments);
        ptx::mbarrier_wait_parity(&shared.places_empty[turn.stage], turn.parity ^ 1);
        int count = columns, spacing = 1;
        if constexpr (flat::paired) {
            count = arguments.rows;
            spacing = arguments.pitch;
        }
        for (int i = threadIdx.x % 32; i < count; i += 32) {
            unsigned position = at.first + i * spacing;
            unsigned image = divide(position, arguments.image_multiplier, arguments.image_shift);
            unsigned rest = position - image * arguments.image_positions;
            unsigned row = divide(rest, arguments.pitch_multiplier, arguments.pitch_shift);
            Place place;
            place.y = int(row + Layer::first_q_y) * Layer::stride_y - Layer::padding_y;
            place.x = int(rest - row * arguments.pitch + Layer::first_q_x) * Layer::stride_x -
                      Layer::padding_x;
            place.offset = Index(image) * arguments.destination_stride_n +
                           place.y * arguments.destination_stride_h + place.x;
            bool exists = image < unsigned(arguments.batch);
            if constexpr (Layer::repair) exists = exists && flat::repair::repairs(arguments, image);
            if (!exists) place.y = none;
            shared.places[turn.stage][i] = place;
        }
        ptx::mbarrier_arrive(&shared.places_full[turn.stage]);
        turn.advance();
    }
}

}  // namespace
