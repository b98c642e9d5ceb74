// out[n, co, oy, ox] on Hopper's tensor cores, for layers with many channels: TF32 operands rounded
// to nearest, float32 sums.
//
// sm90_tf32_flat_pack has laid all pixels out in one line, [32 channels][position][channel], with
// zeros between rows and between images, so that a slot (one shift of both axes) is a constant
// distance between positions, whatever the image. A tile is `columns` consecutive positions;
// rows of the matrix product are (phase, output channel, phases in x), 64 to a row group, depth is
// (32 channels, slot, channel).
//
// Layer::half: operands are float16 instead, with TF32's significand, and 64 channels are what is
// 32 above. The packing has noted what float16 cannot hold. If there is any, blocks lay weights and
// pixels out in TF32 when their tiles are over, and another launch, Layer::repair, computes all
// outputs again; otherwise that ends at once.
//
//   warp 0:           pixels: the tile's positions with the slots' reach, 32 channels at a time
//   warps 1, 2:       weights of each consumer, 64 rows x 32 channels at a time
//   warp 3:           where each position's outputs lie; what the packing has noted
//   warpgroups 1, 2:  consumers, each with a row group of its own on the same pixels
//   warpgroup 3:      storers, where there are some
//
// Both operands lie in shared memory with 128-byte swizzle; a slot is a start address. Outputs go
// through shared memory too, where phases are interleaved, to be written as pieces of whole rows:
// by storers beside the next tile's products, or, some columns after the other, by the consumers,
// which leaves the shared memory to the operands. The second consumer starts `lead` stages of pixels
// after the first: in step they would wait at the same time.
#include <common/float16_operands.cuh>
#include <common/sm90_tf32_flat_packing.cuh>
#include <common/sm90_tf32_flat_rows.cuh>
#include <ptx/barrier.cuh>
#include <ptx/bulk.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/registers.cuh>
#include <ptx/tensor_map.cuh>
#include <ptx/wgmma.cuh>

namespace {

using Index = Layer::Index;

constexpr int warpgroup = 128;
constexpr int consumers = 2;
constexpr int line_bytes = 128;
constexpr int depth = line_bytes / (Layer::half ? 2 : 4);  // channels of a stage
constexpr int wgmma_bytes = 32;                            // its depth
constexpr int chunks = (Layer::in_channels + depth - 1) / depth;
constexpr int columns = Layer::columns;

constexpr int pixel_bytes = Layer::patch_positions * line_bytes;
constexpr int weight_bytes = 64 * line_bytes;
constexpr int box_positions = Layer::patch_positions / Layer::boxes;
static_assert(Layer::lead < Layer::pixel_stages, "the first consumer must not meet the ring's end");
static_assert(Layer::patch_positions % (8 * Layer::boxes) == 0 && box_positions <= 256,
              "whole swizzle patterns in boxes that a tensor map allows");

// Outputs in shared memory: a row is one channel's positions, some at a time, with all phases. The
// consumers' rows follow each other; where phases are apart, both fill the same ones.
constexpr bool storers = Layer::storers;
constexpr int part = storers ? columns : 32;
constexpr int phases = Layer::stride_x;
constexpr int out_channels = 4 * flat::warp_channels;  // of a row group
constexpr int out_columns = part * phases;
constexpr int out_pitch = out_columns + (40 - out_columns % 32) % 32;  // rows start 8 banks apart
constexpr int out_groups = flat::apart ? 1 : consumers;
constexpr int width = Layer::quads ? 4 : 1;  // outputs written at a time

// Where a position's outputs lie: the offset of the first phase of both axes within a channel, and
// its coordinates. Those of a position that is none lie outside.
struct alignas(16) Place {
    Index offset;
    int y, x;
};
constexpr int none = -(1 << 30);

struct Shared {
    alignas(1024) unsigned char pixels[Layer::pixel_stages][pixel_bytes];
    alignas(1024) unsigned char weights[consumers][Layer::weight_stages][weight_bytes];
    Place places[2][columns];
    float outputs[out_groups][out_channels][out_pitch];
    uint64_t pixels_full[Layer::pixel_stages];
    uint64_t pixels_empty[Layer::pixel_stages];
    uint64_t weights_full[consumers][Layer::weight_stages];
    uint64_t weights_empty[consumers][Layer::weight_stages];
    uint64_t places_full[2];
    uint64_t places_empty[2];
    uint64_t leading;
    uint64_t outputs_full;
    uint64_t outputs_empty;
    int fits;
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

// A ring's next stage, and the parity of its turn.
template <int stages>
struct Turn {
    int stage = 0;
    uint32_t parity = 0;

    TCONV_DEVICE void advance() {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

struct Position {
    int row_set, group;
    int first;  // position among the outputs' q

    // Row sets innermost: they share their pixels.
    TCONV_DEVICE explicit Position(int tile) {
        int rest = tile / Layer::row_sets;
        row_set = tile - rest * Layer::row_sets;
        int next = rest / Layer::groups;
        group = rest - next * Layer::groups;
        first = next * columns;
    }

    // The row group of a consumer; beyond the last there is nothing to do.
    TCONV_DEVICE int row_group(int consumer) const { return row_set * consumers + consumer; }
};

// A stage is handed back by each warp whose products have read it.
TCONV_DEVICE void hand_back(uint64_t* empty) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty);
}

template <typename Fields>
TCONV_DEVICE int reach(const Fields& arguments) {
    return Layer::most_slot_y * arguments.pitch + Layer::most_slot_x;
}

template <typename Fields>
TCONV_DEVICE void produce_pixels(const Fields& arguments, Shared& shared) {
    Turn<Layer::pixel_stages> turn;
    int origin = Layer::first_q_y * arguments.pitch + Layer::first_q_x - reach(arguments);
    ptx::prefetch_tensormap(&arguments.pixel_map);
    ptx::griddepcontrol_wait();  // the packing may still run
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(tile);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            uint64_t* full = &shared.pixels_full[turn.stage];
            ptx::mbarrier_wait_parity(&shared.pixels_empty[turn.stage], turn.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, pixel_bytes);
#pragma unroll
            for (int box = 0; box < Layer::boxes; ++box) {
                ptx::cp_async_bulk_tensor_3d_global_to_shared(
                    shared.pixels[turn.stage] + box * box_positions * line_bytes,
                    &arguments.pixel_map, 0, origin + at.first + box * box_positions,
                    at.group * chunks + chunk, full);
            }
            turn.advance();
        }
    }
}

template <typename Fields>
TCONV_DEVICE void produce_weights(const Fields& arguments, Shared& shared, int consumer) {
    Turn<Layer::weight_stages> turn;
    ptx::griddepcontrol_wait();  // the packing may still run
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(tile);
        int row_group = at.row_group(consumer);
        if (row_group >= Layer::row_groups) continue;
        int row_class = Layer::row_class[row_group];
        int count = (Layer::class_begin[row_class + 1] - Layer::class_begin[row_class]) * chunks;
        const unsigned char* from =
            static_cast<const unsigned char*>(arguments.packed) +
            (Index(at.group) * Layer::group_slots + Layer::row_begin[row_group]) * chunks *
                weight_bytes;
        for (int i = 0; i < count; ++i) {
            uint64_t* full = &shared.weights_full[consumer][turn.stage];
            ptx::mbarrier_wait_parity(&shared.weights_empty[consumer][turn.stage], turn.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, weight_bytes);
            ptx::cp_async_bulk_global_to_shared(shared.weights[consumer][turn.stage], from,
                                                weight_bytes, full);
            from += weight_bytes;
            turn.advance();
        }
    }
}

template <typename Fields>
TCONV_DEVICE void produce_places(const Fields& arguments, Shared& shared) {
    Turn<2> turn;
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(tile);
        ptx::mbarrier_wait_parity(&shared.places_empty[turn.stage], turn.parity ^ 1);
        for (int column = threadIdx.x % 32; column < columns; column += 32) {
            unsigned position = at.first + column;
            unsigned image = position / unsigned(arguments.image_positions);
            unsigned rest = position - image * arguments.image_positions;
            unsigned row = rest / unsigned(arguments.pitch);
            Place place;
            place.y = int(row + Layer::first_q_y) * Layer::stride_y - Layer::padding_y;
            place.x = int(rest - row * arguments.pitch + Layer::first_q_x) * Layer::stride_x -
                      Layer::padding_x;
            place.offset = Index(image) * arguments.destination_stride_n +
                           place.y * arguments.destination_stride_h + place.x;
            if (image >= unsigned(arguments.batch)) place.y = none;
            shared.places[turn.stage][column] = place;
        }
        ptx::mbarrier_arrive(&shared.places_full[turn.stage]);
        turn.advance();
    }
}

// Whether float16 holds all weights and pixels: from what the packing's blocks have noted.
template <typename Fields>
TCONV_DEVICE void read_notes(const Fields& arguments, Shared& shared) {
    ptx::griddepcontrol_wait();
    const auto* notes = static_cast<const uint32_t*>(arguments.notes);
    uint32_t largest = 0;
#pragma unroll 8
    for (int i = threadIdx.x % 32; i < arguments.note_count; i += 32) {
        largest = max(largest, notes[i]);
    }
    largest = float16_operands::largest_of_warp(largest);
    if (threadIdx.x % 32 == 0) {
        shared.fits = float16_operands::fit(largest, Layer::weight_scale);
        if (blockIdx.x == 0) *static_cast<int*>(arguments.verdict) = shared.fits;
    }
}

// After a block's last tile, for all its threads: TF32 operands for the launch that repairs.
template <typename Fields>
TCONV_DEVICE void pack_again(const Fields& arguments, Shared& shared) {
    using Staged = flat::packing::Shared;
    static_assert(sizeof(Staged) <= Layer::shared_bytes, "the host allots enough");
    __syncthreads();
    if (shared.fits) return;
    __syncthreads();
    if (threadIdx.x < flat::packing::threads) {
        // Where stages, barriers and all else lay.
        flat::packing::pack_items(arguments, static_cast<uint32_t*>(arguments.packed_again),
                                  reinterpret_cast<Staged&>(shared));
    }
}

// Whether the launch that repairs has anything to do.
template <typename Fields>
TCONV_DEVICE bool is_needed(const Fields& arguments) {
    ptx::griddepcontrol_wait();
    return *static_cast<const int*>(arguments.verdict) == 0;
}

using Sums = float[columns / 2];

// Columns from `first` on of a warp's outputs, into shared memory.
template <int first>
TCONV_DEVICE void leave(Shared& shared, const flat::WarpRows& rows, int consumer,
                        const float (&bias)[2], const Sums& sums) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % warpgroup / 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = lane / 4 + 8 * half;
        if (row >= flat::warp_channels * flat::row_phases) continue;
        int channel = warp * flat::warp_channels + row / flat::row_phases;
        float* to = shared.outputs[flat::apart ? 0 : consumer][channel] + rows.phase_x +
                    row % flat::row_phases + lane % 4 * 2 * phases;
#pragma unroll
        for (int j = 0; j < part / 8 && first + j * 8 < columns; ++j) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                float sum = sums[first / 2 + 4 * j + 2 * half + k];
                if constexpr (Layer::half) sum *= 1.0f / Layer::weight_scale;
                to[(8 * j + k) * phases] = sum + bias[half];
            }
        }
    }
}

// Columns from `first` on of the rows of `channels` channels, from shared memory. `destination` is
// where the first channel and phase in y begin, of which `channel_count` are real.
template <int channels>
TCONV_DEVICE void write_out(const Arguments& arguments, const float (*outputs)[out_pitch],
                            const Place* places, int first, int phase_y, int channel_count,
                            float* destination) {
    int lane = threadIdx.x % 32;
#pragma unroll 2
    for (int element = lane * width; element < out_columns; element += 32 * width) {
        int column = first + element / phases;
        if (columns % part != 0 && column >= columns) break;
        int phase = element % phases;
        Place place = places[column];
        int y = place.y + phase_y, x = place.x + phase;
        if (y < 0 || y >= arguments.destination_height || x < 0 ||
            x >= arguments.destination_width) {
            continue;
        }
        float* to = destination + place.offset + phase;
        const float* from = *outputs + element;
#pragma unroll
        for (int channel = 0; channel < channels; ++channel) {
            if (channel < channel_count) {
                if constexpr (width == 4) {
                    *reinterpret_cast<float4*>(to) =
                        *reinterpret_cast<const float4*>(from + channel * out_pitch);
                } else {
                    *to = from[channel * out_pitch];
                }
            }
            to += arguments.destination_stride_c;
        }
    }
}

TCONV_DEVICE float* destination_of(const Arguments& arguments, int group, int channel, int phase_y) {
    return static_cast<float*>(arguments.destination) +
           (Index(group) * Layer::out_channels + channel) * arguments.destination_stride_c +
           phase_y * arguments.destination_stride_h;
}

// Before and after a warp's outputs are gathered: of the warp, or of the two that hold its phases.
[[maybe_unused]] TCONV_DEVICE void gatherers_sync() {
    if (flat::apart) {
        ptx::bar_sync(1 + threadIdx.x % warpgroup / 32, 2 * 32);
    } else {
        __syncwarp();
    }
}

// All columns of a warp's outputs, some after the other.
template <int first = 0>
TCONV_DEVICE void leave_and_write_out(const Arguments& arguments, Shared& shared,
                                      const Place* places, const flat::WarpRows& rows, int group,
                                      int consumer, const float (&bias)[2], const Sums& sums) {
    if constexpr (first < columns) {
        // Of the channels that two warps gather, each writes half.
        constexpr int channels = flat::apart ? flat::warp_channels / 2 : flat::warp_channels;
        int own = flat::apart ? consumer * channels : 0;
        int warp = threadIdx.x % warpgroup / 32;
        leave<first>(shared, rows, consumer, bias, sums);
        gatherers_sync();
        write_out<channels>(
            arguments,
            shared.outputs[flat::apart ? 0 : consumer] + warp * flat::warp_channels + own, places,
            first, rows.phase_y, Layer::out_channels - rows.channel - own,
            destination_of(arguments, group, rows.channel + own, rows.phase_y));
        gatherers_sync();
        leave_and_write_out<first + part>(arguments, shared, places, rows, group, consumer, bias,
                                          sums);
    }
}

TCONV_DEVICE void store(const Arguments& arguments, Shared& shared) {
    int warp = threadIdx.x % warpgroup / 32;
    Turn<2> places;
    uint32_t parity = 0;
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(tile);
        ptx::mbarrier_wait_parity(&shared.places_full[places.stage], places.parity);
        ptx::mbarrier_wait_parity(&shared.outputs_full, parity);
        parity ^= 1;
#pragma unroll 1
        for (int group = 0; group < out_groups; ++group) {
            int row_group = at.row_group(group);
            if (row_group >= Layer::row_groups) break;
            flat::WarpRows rows(row_group, warp);
            if (rows.phase_y >= Layer::stride_y) break;
            write_out<flat::warp_channels>(
                arguments, shared.outputs[group] + warp * flat::warp_channels,
                shared.places[places.stage], 0, rows.phase_y, Layer::out_channels - rows.channel,
                destination_of(arguments, at.group, rows.channel, rows.phase_y));
        }
        ptx::mbarrier_arrive(&shared.outputs_empty);
        ptx::mbarrier_arrive(&shared.places_empty[places.stage]);
        places.advance();
    }
}

TCONV_DEVICE void consume(const Arguments& arguments, Shared& shared) {
    int consumer = threadIdx.x / warpgroup - 1;
    Turn<Layer::pixel_stages> pixels;
    Turn<Layer::weight_stages> weights;
    Turn<storers ? 1 : 2> places;
    uint64_t pixel_matrix = ptx::matrix_descriptor(shared.pixels[0], 16, 8 * line_bytes,
                                                   ptx::Swizzle::bytes_128);
    uint64_t weight_matrix = ptx::matrix_descriptor(shared.weights[consumer][0], 16,
                                                    8 * line_bytes, ptx::Swizzle::bytes_128);
    int origin = reach(arguments);
    if (consumer == 1) ptx::mbarrier_wait_parity(&shared.leading, 0);
    int until_lead = Layer::lead;
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(tile);
        int row_group = at.row_group(consumer);
        bool exists = row_group < Layer::row_groups;
        int row_class = Layer::row_class[exists ? row_group : 0];
        int begin = Layer::class_begin[row_class];
        int end = exists ? Layer::class_begin[row_class + 1] : begin;
        flat::WarpRows rows(row_group, threadIdx.x % warpgroup / 32);
        float bias[2] = {0.0f, 0.0f};
        if constexpr (Layer::bias) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int row = threadIdx.x % 32 / 4 + 8 * half;
                int channel = rows.channel + row / flat::row_phases;
                if (exists && channel < Layer::out_channels) {
                    bias[half] = static_cast<const float*>(
                        arguments.bias)[at.group * Layer::out_channels + channel];
                }
            }
        }
        Sums sums;
#pragma unroll
        for (int i = 0; i < columns / 2; ++i) sums[i] = 0.0f;
        // What the newest finished products were the last to read, to be handed back.
        uint64_t* used_pixels = nullptr;
        uint64_t* used_weights = nullptr;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            if (consumer == 0 && until_lead-- == 0) hand_back(&shared.leading);
            ptx::mbarrier_wait_parity(&shared.pixels_full[pixels.stage], pixels.parity);
            // Where no products follow, which hold the lanes together, none may still wait when the
            // stage is handed back: the barrier could be a turn further by then.
            __syncwarp();
            uint64_t patch = ptx::advance(pixel_matrix, pixels.stage * pixel_bytes);
#pragma unroll 1
            for (int slot = begin; slot < end; ++slot) {
                ptx::mbarrier_wait_parity(&shared.weights_full[consumer][weights.stage],
                                          weights.parity);
                int start =
                    origin - (Layer::slot_y[slot] * arguments.pitch + Layer::slot_x[slot]);
                uint64_t a = ptx::advance(weight_matrix, weights.stage * weight_bytes);
                uint64_t b = ptx::advance(patch, start * line_bytes);
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < line_bytes; k += wgmma_bytes) {
                    if constexpr (Layer::half) {
                        ptx::wgmma_m64k16_f16<columns>(sums, ptx::advance(a, k), ptx::advance(b, k),
                                                       true);
                    } else {
                        ptx::wgmma_m64k8_tf32<columns>(sums, ptx::advance(a, k), ptx::advance(b, k),
                                                       true);
                    }
                }
                ptx::wgmma_commit_group();
                ptx::wgmma_wait_group<1>();
                if (used_weights != nullptr) hand_back(used_weights);
                if (slot == begin && used_pixels != nullptr) hand_back(used_pixels);
                used_weights = &shared.weights_empty[consumer][weights.stage];
                weights.advance();
            }
            uint64_t* empty = &shared.pixels_empty[pixels.stage];
            if (begin == end) {  // no row group, or one of empty phases
                hand_back(empty);
            } else {
                used_pixels = empty;
            }
            pixels.advance();
        }
        ptx::wgmma_wait_group<0>();
        ptx::fence_registers(sums);
        if (used_weights != nullptr) hand_back(used_weights);
        if (used_pixels != nullptr) hand_back(used_pixels);
        if constexpr (storers) {
            ptx::mbarrier_wait_parity(&shared.outputs_empty, places.parity ^ 1);
            if (exists) leave<0>(shared, rows, consumer, bias, sums);
            ptx::mbarrier_arrive(&shared.outputs_full);
        } else {
            ptx::mbarrier_wait_parity(&shared.places_full[places.stage], places.parity);
            if (exists && rows.phase_y < Layer::stride_y) {
                leave_and_write_out(arguments, shared, shared.places[places.stage], rows, at.group,
                                    consumer, bias, sums);
            }
            ptx::mbarrier_arrive(&shared.places_empty[places.stage]);
        }
        places.advance();
    }
    if (consumer == 0 && until_lead >= 0) hand_back(&shared.leading);
}

}  // namespace

TCONV_KERNEL(sm90_tf32_flat_forward, Layer::threads, 1) {
    TCONV_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    constexpr int warps = warpgroup / 32;
    // The launch that repairs has nothing to do as a rule: let it look as soon as a block is over.
    if constexpr (Layer::half) ptx::griddepcontrol_launch_dependents();
    if constexpr (Layer::repair) {
        if (!is_needed(arguments)) return;
    }
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Layer::pixel_stages; ++stage) {
            ptx::mbarrier_init(&shared.pixels_full[stage], 1);
            ptx::mbarrier_init(&shared.pixels_empty[stage], consumers * warps);
        }
        for (int consumer = 0; consumer < consumers; ++consumer) {
            for (int stage = 0; stage < Layer::weight_stages; ++stage) {
                ptx::mbarrier_init(&shared.weights_full[consumer][stage], 1);
                ptx::mbarrier_init(&shared.weights_empty[consumer][stage], warps);
            }
        }
        for (int stage = 0; stage < 2; ++stage) {
            ptx::mbarrier_init(&shared.places_full[stage], 32);
            ptx::mbarrier_init(&shared.places_empty[stage], (storers ? 1 : consumers) * warpgroup);
        }
        ptx::mbarrier_init(&shared.leading, warps);
        ptx::mbarrier_init(&shared.outputs_full, consumers * warpgroup);
        ptx::mbarrier_init(&shared.outputs_empty, warpgroup);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    int role = threadIdx.x / warpgroup;
    if (role == 0) {
        int warp = threadIdx.x / 32;
        if (warp == 3) {
            produce_places(arguments, shared);
            if constexpr (Layer::half) read_notes(arguments, shared);
        } else if (threadIdx.x % 32 == 0) {
            if (warp == 0) {
                produce_pixels(arguments, shared);
            } else {
                produce_weights(arguments, shared, warp - 1);
            }
        }
    } else if (role <= consumers) {
        consume(arguments, shared);
    } else if constexpr (storers) {
        store(arguments, shared);
    }
    if constexpr (Layer::half) pack_again(arguments, shared);
}
