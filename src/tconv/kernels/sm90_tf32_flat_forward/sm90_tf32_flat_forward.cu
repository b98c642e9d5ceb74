// out[n, co, oy, ox] on Hopper's tensor cores, for layers with many channels: TF32 operands rounded
// to nearest, float32 sums.
//
// sm90_tf32_flat_pack has laid all pixels out in one line, [32 channels][position][channel]. Zeros
// separate rows and images, so that a slot (one shift of both axes) is a constant distance between
// positions. A tile is `columns` consecutive positions. Rows of the matrix product are (phase,
// output channel, phases in x), 64 to a row group. Its depth is (32 channels, slot, channel).
//
// Layer::half: operands are float16, which has TF32's significand, and a stage has 64 channels. The
// packing has noted what float16 cannot hold. A further launch, Layer::repair, packs weights and
// pixels in TF32 and recomputes those images, or all. If all values fit, it ends at once
// (sm90_tf32_flat_forward/repair.cuh).
//
//   warp 0:           pixels: the tile's positions with the slots' reach, 32 channels at a time;
//                     stage_rows > 1: with the reach of one shift in y, one after another
//   warps 1, 2:       weights of each consumer, 64 rows x 32 channels at a time
//   warp 3:           where each position's outputs lie; what the packing has noted
//   warpgroups 1, 2:  consumers, each with a row group of its own on the same pixels
//   warpgroup 3:      storers, where there are some
//
// Both operands lie in shared memory with 128-byte swizzle; a slot is a start address. Outputs pass
// through shared memory, which interleaves their phases, and are written as pieces of whole rows.
// Storers write them beside the next tile's products, a slice of channels at a time. Without
// storers the consumers write them, some columns at a time, which leaves more shared memory to the
// operands. The second consumer starts `lead` stages of pixels after the first, where a block has
// several tiles: in step both would wait at the same time.
//
// Layer::paired: the two consumers have two phases in y of the same channels, and a tile is whole
// rows of positions. The storers write both phases' rows in the order of memory: where a row ends
// within a sector, the store of the next follows at once.
#include <common/float16_operands.cuh>
#include <common/ring.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/registers.cuh>
#include <ptx/setmaxnreg.cuh>
#include <ptx/wgmma.cuh>
#include <sm90_tf32_flat_forward/outputs.cuh>
#include <sm90_tf32_flat_forward/produce.cuh>
#include <sm90_tf32_flat_forward/repair.cuh>
#include <sm90_tf32_flat_forward/rows.cuh>
#include <sm90_tf32_flat_forward/stages.cuh>
#include <sm90_tf32_flat_forward/status.cuh>

namespace {

// Where a tile's first position lies in the patch at a slot. If there is only one slot, this is
// known at compile time.
TCONV_DEVICE int start_of(const Shared& shared, int slot) {
    return Layer::slots == 1 ? 0 : shared.starts[slot];
}

// Whether a stage of this row has the pixels of the slot that starts there.
TCONV_DEVICE bool is_in_row(int start, int row) {
    return stage_rows == 1 || start % line_bytes == row;
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

// What a consumer's sums are multiplied by. Called by each of its warps.
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
    CountedTurn pixels, weights;
    Turn<2> places;  // where the consumers write
    uint32_t slice_parity = 0;  // where they do not
    uint64_t pixel_matrix = ptx::matrix_descriptor(pixels_of(arguments, shared, 0), 16,
                                                   8 * line_bytes, ptx::Swizzle::bytes_128);
    uint64_t weight_matrix = ptx::matrix_descriptor(weights_of(arguments, shared, consumer), 16,
                                                    8 * line_bytes, ptx::Swizzle::bytes_128);
    find_unit(arguments, shared);
    if (consumer == 1) ptx::mbarrier_wait_parity(&shared.leading, 0);
    int until_lead = arguments.lead;
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Work work(arguments, tile, consumer);
        Sums sums;
#pragma unroll
        for (int i = 0; i < columns / 2; ++i) sums[i] = 0.0f;
        // The stages that the newest finished products were the last to read, to be handed back.
        uint64_t* used_pixels = nullptr;
        uint64_t* used_weights = nullptr;
        int slot = work.begin, row = 0;
#pragma unroll 1
        for (int stage = 0; stage < tile_stages; ++stage) {
            if (consumer == 0 && until_lead-- == 0) hand_back(&shared.leading);
            ptx::mbarrier_wait_parity(&shared.pixels_full[pixels.stage], pixels.parity);
            // If products follow, they hold the lanes together. If none do, no lane may still wait
            // when the stage is handed back: the barrier could be a turn further by then.
            __syncwarp();
            uint64_t patch = ptx::advance(pixel_matrix, pixels.stage * arguments.pixel_bytes);
            if (row == 0) slot = work.begin;
            int start = start_of(shared, slot < Layer::slots ? slot : 0);
            int first = slot;
#pragma unroll 1
            for (; slot < work.end && is_in_row(start, row); ++slot) {
                ptx::mbarrier_wait_parity(&shared.weights_full[consumer][weights.stage],
                                          weights.parity);
                uint64_t a = ptx::advance(weight_matrix, weights.stage * weight_bytes);
                uint64_t b = ptx::advance(patch, stage_rows == 1 ? start : start & -line_bytes);
                if (slot + 1 < work.end) start = start_of(shared, slot + 1);
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < line_bytes; k += wgmma_bytes) {
                    if constexpr (Layer::half) {
                        ptx::wgmma_m64k16<false, columns>(sums, ptx::advance(a, k),
                                                          ptx::advance(b, k), true);
                    } else {
                        ptx::wgmma_m64k8_tf32<columns>(sums, ptx::advance(a, k), ptx::advance(b, k),
                                                       true);
                    }
                }
                ptx::wgmma_commit_group();
                ptx::wgmma_wait_group<1>();
                if (used_weights != nullptr) hand_back(used_weights);
                if (slot == first && used_pixels != nullptr) hand_back(used_pixels);
                used_weights = &shared.weights_empty[consumer][weights.stage];
                weights.advance(arguments.weight_stages);
            }
            uint64_t* empty = &shared.pixels_empty[pixels.stage];
            if (slot == first) {  // no row group, or one of empty phases, or no slot in the row
                if constexpr (stage_rows > 1) {
                    // The producer may need the stage before for the next products.
                    ptx::wgmma_wait_group<0>();
                    if (used_pixels != nullptr) hand_back(used_pixels);
                    used_pixels = nullptr;
                }
                hand_back(empty);
            } else {
                used_pixels = empty;
            }
            pixels.advance(arguments.pixel_stages);
            if (stage_rows > 1 && ++row == stage_rows) row = 0;
        }
        ptx::wgmma_wait_group<0>();
        ptx::fence_registers(sums);
        if (used_weights != nullptr) hand_back(used_weights);
        if (used_pixels != nullptr) hand_back(used_pixels);
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
        for (int stage = 0; stage < arguments.pixel_stages; ++stage) {
            ptx::mbarrier_init(&shared.pixels_full[stage], 1);
            ptx::mbarrier_init(&shared.pixels_empty[stage], consumers * warps);
        }
        for (int consumer = 0; consumer < consumers; ++consumer) {
            for (int stage = 0; stage < arguments.weight_stages; ++stage) {
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
    // NOTE: setmaxnreg takes effect only in branches that do not join again, so what follows
    // belongs in one of them.
    if (role == 0) {
        if constexpr (storers) ptx::setmaxnreg_dec<producer_registers>();
        int warp = threadIdx.x / 32;
        if (warp == 3) {
            if constexpr (Layer::half) {
                ptx::griddepcontrol_wait();
                // NOTE: not before the packing is over, as it clears the status that the repair's
                // launch reads.
                ptx::griddepcontrol_launch_dependents();
                read_notes(arguments);
            }
            produce_places(arguments, shared);
        } else if (threadIdx.x % 32 == 0) {
            if (warp == 0) {
                produce_pixels(arguments, shared);
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
