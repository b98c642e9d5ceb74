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
// 32 above. The packing has noted what float16 cannot hold. If there is any, another launch,
// Layer::repair, lays weights and pixels out in TF32 and computes these images' outputs again, or
// all; otherwise that ends at once (sm90_tf32_flat_forward/repair.cuh).
//
//   warp 0:           pixels: the tile's positions with the slots' reach, 32 channels at a time
//   warps 1, 2:       weights of each consumer, 64 rows x 32 channels at a time; Layer::resident:
//                     all of a row group, which stay as long as tiles are of this group
//   warp 3:           where each position's outputs lie; what the packing has noted
//   warpgroups 1, 2:  consumers, each with a row group of its own on the same pixels
//   warpgroup 3:      storers, where there are some
//
// Both operands lie in shared memory with 128-byte swizzle; a slot is a start address. Outputs go
// through shared memory too, where phases are interleaved, to be written as pieces of whole rows:
// by storers beside the next tile's products, some channels after the other, or by the consumers,
// some columns after the other, which leaves the shared memory to the operands. Where tiles follow
// each other the second consumer starts `lead` stages of pixels after the first: in step they would
// wait at the same time.
//
// Layer::paired: the two consumers have two phases in y of the same channels, which are every other
// row of the output, and a tile is whole rows of positions. The storers write both rows' pieces in
// the order of memory: where a row ends within a sector, the next one's store follows at once.
#include <common/constant_tables.cuh>
#include <common/division.cuh>
#include <common/exact_output.cuh>
#include <common/float16_operands.cuh>
#include <common/ring.cuh>
#include <sm90_tf32_flat_forward/repair.cuh>
#include <sm90_tf32_flat_forward/rows.cuh>
#include <sm90_tf32_flat_forward/status.cuh>
#include <ptx/barrier.cuh>
#include <ptx/bulk.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/registers.cuh>
#include <ptx/setmaxnreg.cuh>
#include <ptx/tensor_map.cuh>
#include <ptx/wgmma.cuh>

namespace {

using Index = Layer::Index;

constexpr int warpgroup = 128;
constexpr int consumers = 2;
constexpr int line_bytes = 128;
constexpr int depth = line_bytes / (Layer::half ? 2 : 4);  // channels of a stage
constexpr int wgmma_bytes = 32;  // its depth
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
constexpr int out_columns = part * phases + Layer::shift;
// Rows start 8 banks apart, or one. Then two lanes of a warp store to the same bank, and none where
// those whose number has this bit store the second of their two columns first.
constexpr int bank_step = flat::apart ? 1 : 8;
constexpr int out_pitch = out_columns + (32 + bank_step - out_columns % 32) % 32;
constexpr int swap_bit = flat::apart                  ? -1
                         : phases == 1                ? 4
                         : phases == 2 || phases == 8 ? 1
                         : phases == 4                ? 0
                                                      : -1;
// Beside storers a thread has 128 registers, of which the consumers need more.
[[maybe_unused]] constexpr int producer_registers = 64;
[[maybe_unused]] constexpr int storer_registers = 96;
[[maybe_unused]] constexpr int consumer_registers = 168;
static_assert(producer_registers + storer_registers + consumers * consumer_registers <= 4 * 128,
              "what 512 threads get");
constexpr int out_groups = flat::apart ? 1 : consumers;
constexpr int width = Layer::vector;  // outputs written at a time
static_assert(!flat::paired || storers, "who writes has the outputs of both consumers");

// Slices of the outputs go to the storers and come back on their own, so that these write one while
// the other is filled: those of a consumer, or of both where they are written together; of these
// the first or second half of each warp's rows, where no channel lies in both and several in each.
constexpr int slice_sets = flat::apart || flat::paired ? 1 : consumers;
constexpr int halves = 8 % flat::row_phases == 0 && flat::row_phases <= 4 ? 2 : 1;
constexpr int slice_channels = flat::warp_channels / halves;  // of a warp

// Where a position's outputs lie (of a row's first position, where tiles are whole rows): the
// offset of the first phase of both axes within a channel, and its coordinates. Those of a position
// that is none lie outside.
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
    // Of each slot: where a tile's first position lies in the patch, in bytes. The constants that
    // it follows from lie in device memory, where each step of the products would wait for them.
    int starts[Layer::slots];
    float units[consumers * 4];  // of each warp, what its sums are multiplied by
    bool wrong[consumers][2]
              [4];  // whether some of the outputs of a warp's half rows are not finite
    uint64_t pixels_full[Layer::pixel_stages];
    uint64_t pixels_empty[Layer::pixel_stages];
    uint64_t weights_full[consumers][Layer::weight_stages];
    uint64_t weights_empty[consumers][Layer::weight_stages];
    uint64_t places_full[2];
    uint64_t places_empty[2];
    uint64_t slices_full[slice_sets][halves];  // of the outputs, for the storers
    uint64_t slices_empty[slice_sets][halves];
    uint64_t leading;
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

// The tiles of a block: every gridDim.x-th, or neighbours, as many as any other block but for one.
struct Tiles {
    int first, end, step;

    template <typename Fields>
    TCONV_DEVICE explicit Tiles(const Fields& arguments) {
        int tiles = arguments.tiles;
        if constexpr (Layer::resident) {
            int share = tiles / gridDim.x, rest = tiles - share * gridDim.x, block = blockIdx.x;
            first = block * share + min(block, rest);
            end = first + share + (block < rest);
            step = 1;
        } else {
            first = blockIdx.x;
            end = tiles;
            step = gridDim.x;
        }
    }
};

struct Position {
    int row_set, group;
    int first;  // position among the outputs' q
    int left;  // tiles of the same row set and group that follow; of resident weights

    template <typename Fields>
    TCONV_DEVICE Position(int tile, const Fields& arguments) {
        int next;
        if constexpr (Layer::resident) {
            // Row sets outermost: their weights stay.
            int positions = arguments.tiles / (Layer::row_sets * Layer::groups);
            int rest = tile / positions;
            next = tile - rest * positions;
            group = rest / Layer::row_sets;
            row_set = rest - group * Layer::row_sets;
            left = positions - 1 - next;
        } else {
            // Row sets innermost: they share their pixels.
            int rest = tile / Layer::row_sets;
            row_set = tile - rest * Layer::row_sets;
            // Some have more slots than others. Where a block would always get the same, each of
            // its turns begins with the next.
            if (gridDim.x % Layer::row_sets == 0) {
                row_set = (row_set + tile / int(gridDim.x)) % Layer::row_sets;
            }
            if constexpr (Layer::groups_outermost) {
                // A turn of the blocks then reads few groups' weights.
                int positions = arguments.tiles / (Layer::row_sets * Layer::groups);
                group = rest / positions;
                next = rest - group * positions;
            } else {
                next = rest / Layer::groups;
                group = rest - next * Layer::groups;
            }
            left = 0;
        }
        if constexpr (flat::paired) {
            first = next * arguments.rows * arguments.pitch;
        } else {
            first = next * columns;
        }
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
TCONV_DEVICE void find_starts(const Fields& arguments, Shared& shared) {
    for (int slot = threadIdx.x; slot < Layer::slots; slot += Layer::threads) {
        int back = entry(Layer::slot_y, slot) * arguments.pitch + entry(Layer::slot_x, slot);
        shared.starts[slot] = (reach(arguments) - back) * line_bytes;
    }
}

template <typename Fields>
TCONV_DEVICE void produce_pixels(const Fields& arguments, Shared& shared) {
    Turn<Layer::pixel_stages> turn;
    int origin = Layer::first_q_y * arguments.pitch + Layer::first_q_x - reach(arguments);
    ptx::prefetch_tensormap(&arguments.pixel_map);
    ptx::griddepcontrol_wait();  // the packing may still run
    Tiles own(arguments);
    for (int tile = own.first; tile < own.end; tile += own.step) {
        Position at(tile, arguments);
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

// Where the weights of a row group begin, and how many pieces they are: none beyond the last group.
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
    Turn<Layer::weight_stages> turn;
    ptx::griddepcontrol_wait();  // the packing may still run
    Tiles own(arguments);
    for (int tile = own.first; tile < own.end; tile += own.step) {
        Position at(tile, arguments);
        Weights weights(arguments, at.group, at.row_group(consumer));
        for (int i = 0; i < weights.count; ++i) {
            uint64_t* full = &shared.weights_full[consumer][turn.stage];
            ptx::mbarrier_wait_parity(&shared.weights_empty[consumer][turn.stage], turn.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, weight_bytes);
            ptx::cp_async_bulk_global_to_shared(shared.weights[consumer][turn.stage], weights.from,
                                                weight_bytes, full);
            weights.from += weight_bytes;
            turn.advance();
        }
    }
}

// A stage for each piece of a row group. Those that a group lacks turn with the others; one barrier
// hands all of them back.
template <typename Fields>
TCONV_DEVICE void produce_resident_weights(const Fields& arguments, Shared& shared, int consumer) {
    uint32_t parity = 0;
    ptx::griddepcontrol_wait();  // the packing may still run
    Tiles own(arguments);
    for (int tile = own.first; tile < own.end;) {
        Position at(tile, arguments);
        Weights weights(arguments, at.group, at.row_group(consumer));
        ptx::mbarrier_wait_parity(&shared.weights_empty[consumer][0], parity ^ 1);
        for (int piece = 0; piece < Layer::weight_stages; ++piece) {
            uint64_t* full = &shared.weights_full[consumer][piece];
            if (piece < weights.count) {
                ptx::mbarrier_arrive_expect_tx(full, weight_bytes);
                ptx::cp_async_bulk_global_to_shared(shared.weights[consumer][piece],
                                                    weights.from + piece * weight_bytes,
                                                    weight_bytes, full);
            } else {
                ptx::mbarrier_arrive(full);
            }
        }
        parity ^= 1;
        tile += at.left + 1;
    }
}

// Whether float16 holds the weights, and which images' pixels, from what the packing has noted. By
// a warp of each block, which all have a part of it; then `Status::reported`.
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
    // 16 positions at a time, nearly all of them zeros.
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
            // No more than tells the verdict.
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

// By a warp: where each tile's outputs lie.
template <typename Fields>
TCONV_DEVICE void produce_places(const Fields& arguments, Shared& shared) {
    Turn<2> turn;
    Tiles own(arguments);
    for (int tile = own.first; tile < own.end; tile += own.step) {
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

using Sums = float[columns / 2];

// Columns from `first` on of a half of a warp's rows, into shared memory.
template <int first, int half>
TCONV_DEVICE void stage_outputs(Shared& shared, const flat::WarpRows& rows, int consumer,
                                const float (&bias)[2], const Sums& sums,
                                NotFinite<float>& not_finite) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % warpgroup / 32;
    int row = lane / 4 + 8 * half;
    if (row >= flat::warp_channels * flat::row_phases) return;
    int channel = warp * flat::warp_channels + row / flat::row_phases;
    float* to = shared.outputs[flat::apart ? 0 : consumer][channel] + rows.phase_x + Layer::shift +
                row % flat::row_phases + lane % 4 * 2 * phases;
    bool swap = swap_bit >= 0 && (lane >> (swap_bit & 31)) % 2 == 1;
    float* to_first = to + (swap ? phases : 0);
    float* to_second = to + (swap ? 0 : phases);
    float unit = Layer::half ? shared.units[consumer * 4 + warp] : 1.0f;
#pragma unroll
    for (int j = 0; j < part / 8 && first + j * 8 < columns; ++j) {
        const float* pair = sums + first / 2 + 4 * j + 2 * half;
        float at_first = (swap ? pair[1] : pair[0]) * unit + bias[half];
        float at_second = (swap ? pair[0] : pair[1]) * unit + bias[half];
        to_first[8 * j * phases] = at_first;
        to_second[8 * j * phases] = at_second;
        if constexpr (!Layer::half) not_finite.note(at_first), not_finite.note(at_second);
    }
}

// Tells who writes a warp's outputs whether some are not finite. In float16 no image is written for
// good that has any.
TCONV_DEVICE void report(Shared& shared, int consumer, int half,
                         const NotFinite<float>& not_finite) {
    if constexpr (!Layer::half) {
        bool wrong = __any_sync(~0u, not_finite.any());
        if (threadIdx.x % 32 == 0)
            shared.wrong[consumer][half][threadIdx.x % warpgroup / 32] = wrong;
    }
}

// Of those of a consumer, or where their rows are written together, of both.
TCONV_DEVICE bool is_wrong(const Shared& shared, int consumer, int half, int warp) {
    return shared.wrong[consumer][half][warp] ||
           (slice_sets == 1 && shared.wrong[consumers - 1 - consumer][half][warp]);
}

// All of a warp's outputs, slice by slice, to the storers; `parity`: of the tile. A row group that
// does not exist has none, but its slices turn with the others.
// NOTE: by mbarriers, at which all lanes arrive: compute-sanitizer's racecheck does not know that
// bar.arrive orders what comes before it.
template <int half = 0>
TCONV_DEVICE void hand_over(Shared& shared, const flat::WarpRows& rows, bool exists, int consumer,
                            const float (&bias)[2], const Sums& sums, uint32_t parity) {
    if constexpr (half < halves) {
        int set = consumer % slice_sets;
        ptx::mbarrier_wait_parity(&shared.slices_empty[set][half], parity ^ 1);
        NotFinite<float> not_finite;
        if (exists) {
            stage_outputs<0, half>(shared, rows, consumer, bias, sums, not_finite);
            if constexpr (halves == 1)
                stage_outputs<0, 1>(shared, rows, consumer, bias, sums, not_finite);
        }
        report(shared, consumer, half, not_finite);
        ptx::mbarrier_arrive(&shared.slices_full[set][half]);
        hand_over<half + 1>(shared, rows, exists, consumer, bias, sums, parity);
    }
}

// What is done with `width` outputs, in device memory and in shared memory: they are copied, or
// where some of the part are not finite, computed again.
struct Copying {
    static constexpr bool rolled = false;

    TCONV_DEVICE void operator()(float* to, const float* from) const {
        if constexpr (width == 4) {
            *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
        } else if constexpr (width == 2) {
            *reinterpret_cast<float2*>(to) = *reinterpret_cast<const float2*>(from);
        } else {
            *to = *from;
        }
    }
};

template <typename Fields>
struct Repairing {
    static constexpr bool rolled = true;
    const Fields& arguments;

    TCONV_DEVICE void operator()(float* to, const float*) const {
#pragma unroll 1
        for (int i = 0; i < width; ++i) exact::repair<true>(arguments, to + i);
    }
};

// Some channels' outputs, of which `channel_count` are real, in shared memory; `destination` is
// where the first channel and phase in y begin.
struct Part {
    const float (*outputs)[out_pitch];
    const Place* places;
    int first;  // column
    int phase_y;
    int channel_count;
    float* destination;
};

// Columns from the part's first on of the rows of `channels` channels.
template <int channels, typename Fields, typename Action>
TCONV_DEVICE void each_column(const Fields& arguments, const Part& of, const Action& action) {
    constexpr int unroll = Action::rolled ? 1 : channels < 4 ? 4 : 2;  // stores under way
    constexpr int unrolled = Action::rolled ? 1 : channels;
    int lane = threadIdx.x % 32;
#pragma unroll unroll
    for (int element = lane * width; element < out_columns; element += 32 * width) {
        int column = of.first + element / phases;
        if (columns % part != 0 && column >= columns) break;
        int phase = element % phases;
        Place place = of.places[column];
        int y = place.y + of.phase_y, x = place.x + phase;
        if (y < 0 || y >= arguments.destination_height || x < 0 ||
            x >= arguments.destination_width) {
            continue;
        }
        float* to = of.destination + place.offset + phase;
        const float* from = *of.outputs + element;
#pragma unroll unrolled
        for (int channel = 0; channel < channels; ++channel) {
            if (channel < of.channel_count) action(to, from + channel * out_pitch);
            to += arguments.destination_stride_c;
        }
    }
}

// The rows of `channels` channels, of phase_y and, in the second consumer's outputs, the next: in
// the order of memory.
template <int channels, typename Fields, typename Action>
TCONV_DEVICE void each_row(const Fields& arguments, const Part& of, const Action& action) {
    constexpr int first = Layer::padding_x % phases;  // output of a row of positions that exists
    constexpr int unroll = Action::rolled ? 1 : channels < 4 ? 4 : 2;
    constexpr int unrolled = Action::rolled ? 1 : channels;
    int lane = threadIdx.x % 32;
    int pieces = arguments.destination_width / width;
    int row = lane / pieces, piece = lane - row * pieces;
    int rows_on = 32 / pieces, pieces_on = 32 - rows_on * pieces;
#pragma unroll unroll
    while (row < 2 * arguments.rows) {
        Place place = of.places[row / 2];
        int second = row % 2;
        int y = place.y + of.phase_y + second;
        if (y >= 0 && y < arguments.destination_height) {
            float* to = of.destination + place.offset + second * arguments.destination_stride_h +
                        first + piece * width;
            const float* from = of.outputs[second * out_channels] +
                                row / 2 * arguments.pitch * phases + Layer::shift + first +
                                piece * width;
#pragma unroll unrolled
            for (int channel = 0; channel < channels; ++channel) {
                if (channel < of.channel_count) action(to, from + channel * out_pitch);
                to += arguments.destination_stride_c;
            }
        }
        row += rows_on;
        piece += pieces_on;
        if (piece >= pieces) {
            piece -= pieces;
            ++row;
        }
    }
}

template <int channels, typename Fields, typename Action>
TCONV_DEVICE void each(const Fields& arguments, const Part& of, const Action& action) {
    if constexpr (flat::paired) {
        each_row<channels>(arguments, of, action);
    } else {
        each_column<channels>(arguments, of, action);
    }
}

// By a warp.
template <int channels, typename Fields>
TCONV_DEVICE void write(const Fields& arguments, const Part& of, bool wrong) {
    each<channels>(arguments, of, Copying{});
    if constexpr (!Layer::half) {
        if (wrong) each<channels>(arguments, of, Repairing<Fields>{arguments});
    }
}

TCONV_DEVICE float* destination_of(const Arguments& arguments, int group, int channel,
                                   int phase_y) {
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
TCONV_DEVICE void stage_and_write(const Arguments& arguments, Shared& shared, const Place* places,
                                  const flat::WarpRows& rows, int group, int consumer,
                                  const float (&bias)[2], const Sums& sums) {
    if constexpr (first < columns) {
        // Of the channels that two warps gather, each writes half.
        constexpr int channels = flat::apart ? flat::warp_channels / 2 : flat::warp_channels;
        int own = flat::apart ? consumer * channels : 0;
        int warp = threadIdx.x % warpgroup / 32;
        NotFinite<float> not_finite;
        stage_outputs<first, 0>(shared, rows, consumer, bias, sums, not_finite);
        stage_outputs<first, 1>(shared, rows, consumer, bias, sums, not_finite);
        report(shared, consumer, 0, not_finite);
        gatherers_sync();
        write<channels>(
            arguments,
            {shared.outputs[flat::apart ? 0 : consumer] + warp * flat::warp_channels + own, places,
             first, rows.phase_y, Layer::out_channels - rows.channel - own,
             destination_of(arguments, group, rows.channel + own, rows.phase_y)},
            is_wrong(shared, consumer, 0, warp));
        gatherers_sync();
        stage_and_write<first + part>(arguments, shared, places, rows, group, consumer, bias, sums);
    }
}

TCONV_DEVICE void store(const Arguments& arguments, Shared& shared) {
    int warp = threadIdx.x % warpgroup / 32;
    Turn<2> places;
    uint32_t parity = 0;
    Tiles own(arguments);
    for (int tile = own.first; tile < own.end; tile += own.step) {
        Position at(tile, arguments);
        ptx::mbarrier_wait_parity(&shared.places_full[places.stage], places.parity);
        const Place* positions = shared.places[places.stage];
#pragma unroll 1
        for (int slice = 0; slice < slice_sets * halves; ++slice) {
            int set = slice / halves, half = slice % halves;
            ptx::mbarrier_wait_parity(&shared.slices_full[set][half], parity);
            flat::WarpRows rows(at.row_group(set), warp);
            rows.channel += half * slice_channels;
            if (at.row_group(set) < Layer::row_groups && rows.phase_y < Layer::stride_y) {
                const float (*outputs)[out_pitch] =
                    shared.outputs[set] + warp * flat::warp_channels + half * slice_channels;
                write<slice_channels>(
                    arguments,
                    {outputs, positions, 0, rows.phase_y, Layer::out_channels - rows.channel,
                     destination_of(arguments, at.group, rows.channel, rows.phase_y)},
                    is_wrong(shared, set, half, warp));
            }
            ptx::mbarrier_arrive(&shared.slices_empty[set][half]);
        }
        parity ^= 1;
        ptx::mbarrier_arrive(&shared.places_empty[places.stage]);
        places.advance();
    }
}

// Of a slot, or where it is the only one, what is known when this is compiled.
TCONV_DEVICE int start_of(const Shared& shared, int slot) {
    return Layer::slots == 1 ? 0 : shared.starts[slot];
}

// What a consumer computes of a tile: its rows and their slots.
struct Work {
    Position at;
    bool exists;
    int begin, end;  // slots
    flat::WarpRows rows;
    float bias[2];

    template <typename Fields>
    TCONV_DEVICE Work(const Fields& arguments, int tile, int consumer)
        : at(tile, arguments),
          rows(at.row_group(consumer), threadIdx.x % warpgroup / 32),
          bias{0.0f, 0.0f} {
        int row_group = at.row_group(consumer);
        exists = Layer::row_groups % consumers == 0 || row_group < Layer::row_groups;
        flat::RowSlots slots(exists ? row_group : 0);
        begin = slots.begin;
        end = exists ? slots.end : begin;
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
    }
};

// What a consumer's sums are multiplied by. By each of its warps.
template <typename Fields>
TCONV_DEVICE void find_unit(const Fields& arguments, Shared& shared) {
    if constexpr (Layer::half) {
        ptx::griddepcontrol_wait();  // the packing tells the weights' scale
        int exponent = static_cast<const flat::Status*>(arguments.status)->weight_exponent;
        if (threadIdx.x % 32 == 0) {
            shared.units[threadIdx.x / 32 - warpgroup / 32] =
                float16_operands::power_of_two(-exponent - Layer::pixel_exponent);
        }
        __syncwarp();
    }
}

TCONV_DEVICE void consume(const Arguments& arguments, Shared& shared) {
    int consumer = threadIdx.x / warpgroup - 1;
    Turn<Layer::pixel_stages> pixels;
    Turn<Layer::weight_stages> weights;
    Turn<2> places;  // where the consumers write
    uint32_t slice_parity = 0;  // where they do not
    uint64_t pixel_matrix =
        ptx::matrix_descriptor(shared.pixels[0], 16, 8 * line_bytes, ptx::Swizzle::bytes_128);
    uint64_t weight_matrix = ptx::matrix_descriptor(shared.weights[consumer][0], 16, 8 * line_bytes,
                                                    ptx::Swizzle::bytes_128);
    find_unit(arguments, shared);
    if (consumer == 1) ptx::mbarrier_wait_parity(&shared.leading, 0);
    int until_lead = Layer::lead;
    bool fresh = true;  // resident weights that may still be on their way
    Tiles own(arguments);
    Work work(arguments, own.first, consumer);
    for (int tile = own.first; tile < own.end; tile += own.step) {
        if (tile != own.first) {
            if (!Layer::resident || fresh) {
                work = Work(arguments, tile, consumer);
            } else {
                --work.at.left;
            }
        }
        Sums sums;
#pragma unroll
        for (int i = 0; i < columns / 2; ++i) sums[i] = 0.0f;
        if constexpr (Layer::resident) weights.stage = 0;
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
            int start = start_of(shared, work.begin < Layer::slots ? work.begin : 0);
#pragma unroll 1
            for (int slot = work.begin; slot < work.end; ++slot) {
                if (!Layer::resident || fresh) {
                    ptx::mbarrier_wait_parity(&shared.weights_full[consumer][weights.stage],
                                              weights.parity);
                }
                uint64_t a = ptx::advance(weight_matrix, weights.stage * weight_bytes);
                uint64_t b = ptx::advance(patch, start);
                if (slot + 1 < work.end) start = start_of(shared, slot + 1);
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
                if (slot == work.begin && used_pixels != nullptr) hand_back(used_pixels);
                if constexpr (Layer::resident) {
                    ++weights.stage;
                } else {
                    used_weights = &shared.weights_empty[consumer][weights.stage];
                    weights.advance();
                }
            }
            uint64_t* empty = &shared.pixels_empty[pixels.stage];
            if (work.begin == work.end) {  // no row group, or one of empty phases
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
        if constexpr (Layer::resident) {
            fresh = work.at.left == 0;
            if (fresh) {
                hand_back(&shared.weights_empty[consumer][0]);
                weights.parity ^= 1;
            }
        }
        if constexpr (storers) {
            hand_over(shared, work.rows, work.exists, consumer, work.bias, sums, slice_parity);
            slice_parity ^= 1;
        } else {
            ptx::mbarrier_wait_parity(&shared.places_full[places.stage], places.parity);
            if (work.exists && work.rows.phase_y < Layer::stride_y) {
                stage_and_write(arguments, shared, shared.places[places.stage], work.rows,
                                work.at.group, consumer, work.bias, sums);
            }
            ptx::mbarrier_arrive(&shared.places_empty[places.stage]);
            places.advance();
        }
    }
    if (consumer == 0 && until_lead >= 0) hand_back(&shared.leading);
}

}  // namespace

TCONV_KERNEL(sm90_tf32_flat_forward, Layer::threads, 1) {
    TCONV_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    constexpr int warps = warpgroup / 32;
    if constexpr (Layer::repair) {
        if (!flat::repair::is_needed(arguments)) return;
        flat::repair::pack(arguments, memory);
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
        for (int set = 0; set < slice_sets; ++set) {
            for (int half = 0; half < halves; ++half) {
                ptx::mbarrier_init(&shared.slices_full[set][half],
                                   consumers / slice_sets * warpgroup);
                ptx::mbarrier_init(&shared.slices_empty[set][half], warpgroup);
            }
        }
        ptx::mbarrier_init(&shared.leading, warps);
        ptx::fence_mbarrier_init();
    }
    find_starts(arguments, shared);
    __syncthreads();
    int role = threadIdx.x / warpgroup;
    // NOTE: setmaxnreg counts in branches that do not join again: what follows belongs into one of
    // them.
    if (role == 0) {
        if constexpr (storers) ptx::setmaxnreg_dec<producer_registers>();
        int warp = threadIdx.x / 32;
        if (warp == 3) {
            if constexpr (Layer::half) {
                ptx::griddepcontrol_wait();
                // NOTE: not before the packing is over: it clears the status that the launch that
                // repairs looks at.
                ptx::griddepcontrol_launch_dependents();
                read_notes(arguments);
            }
            produce_places(arguments, shared);
        } else if (threadIdx.x % 32 == 0) {
            if (warp == 0) {
                produce_pixels(arguments, shared);
            } else if constexpr (Layer::resident) {
                produce_resident_weights(arguments, shared, warp - 1);
            } else {
                produce_weights(arguments, shared, warp - 1);
            }
        }
    } else if (role <= consumers) {
        if constexpr (storers) ptx::setmaxnreg_inc<consumer_registers>();
        consume(arguments, shared);
    } else if constexpr (storers) {
        ptx::setmaxnreg_dec<storer_registers>();
        store(arguments, shared);
    }
}
