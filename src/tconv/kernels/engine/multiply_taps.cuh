// Multiply: sums[rows][positions] += weights[rows][64 channels] * patch[positions + shift][64
// channels], over chunks, stages and slots. A slot is a tap of a result: a shift within a stage's
// patch, which is a start address.
#pragma once

#include <engine/stages.cuh>
#include <ptx/bulk.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/registers.cuh>
#include <ptx/wgmma.cuh>

namespace {

using Sums = float[columns / 2];

// The slots of a row group: its result's, the first and the end.
struct Slots {
    int begin, end;

    TCONV_DEVICE explicit Slots(int row_group) {
        if (row_group >= row_groups) {
            begin = end = 0;
            return;
        }
        int result = row_group % Layer::results;
        begin = entry(Layer::result_begin, result);
        end = entry(Layer::result_begin, result + 1);
    }
};

TCONV_DEVICE void find_starts(const Arguments& arguments, Shared& shared) {
    for (int slot = threadIdx.x; slot < Layer::slots; slot += Layer::threads) {
        int position = entry(Layer::slot_y, slot) * arguments.pitch_x + entry(Layer::slot_x, slot);
        shared.starts[slot] = position * line_bytes + entry(Layer::slot_stage, slot);
    }
}

// Loads a consumer's weights, a piece for each slot of each chunk.
TCONV_DEVICE void bring_weights(const Arguments& arguments, Shared& shared, int consumer) {
    Turn turn;
    ptx::griddepcontrol_wait();  // the packing may still run
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(arguments, tile);
        int row_group = at.row_group(consumer);
        Slots slots(row_group);
        int block = row_group / Layer::results;
        Index pieces = Index(at.group * row_blocks + block) * Layer::result_slots + slots.begin;
        const auto* from =
            static_cast<const unsigned char*>(arguments.packed) + pieces * chunks * weight_bytes;
        for (int left = (slots.end - slots.begin) * chunks; left > 0; --left) {
            uint64_t* full = &shared.weights_full[consumer][turn.stage];
            ptx::mbarrier_wait_parity(&shared.weights_empty[consumer][turn.stage], turn.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, weight_bytes);
            ptx::cp_async_bulk_global_to_shared(
                weights_of(arguments, shared, consumer) + turn.stage * weight_bytes, from,
                weight_bytes, full);
            from += weight_bytes;
            turn.advance(arguments.weight_stages);
        }
    }
}

// A consumer's rings and descriptors.
struct Multiplier {
    Turn patches, weights;
    uint64_t patch_matrix, weight_matrix;
    int consumer;

    TCONV_DEVICE Multiplier(const Arguments& arguments, Shared& shared, int consumer)
        : consumer(consumer) {
        int first = Layer::split ? consumer * columns * line_bytes : 0;
        patch_matrix = ptx::matrix_descriptor(patch_of(arguments, shared, 0) + first, 16,
                                              8 * line_bytes, ptx::Swizzle::bytes_128);
        weight_matrix = ptx::matrix_descriptor(weights_of(arguments, shared, consumer), 16,
                                               8 * line_bytes, ptx::Swizzle::bytes_128);
    }

    // The sums of a tile. `until_lead`: stages after which the other consumer may begin.
    TCONV_DEVICE void multiply(const Arguments& arguments, Shared& shared, const Position& at,
                               Sums& sums, int& until_lead) {
#pragma unroll
        for (float& sum : sums) sum = 0.0f;
        Slots slots(at.row_group(consumer));
        int first = at.first_stage(), end = at.end_stage();
        // The stages that the newest finished products were the last to read, to be handed back.
        uint64_t* used_patch = nullptr;
        uint64_t* used_weights = nullptr;
#pragma unroll 1
        for (int turns = chunks * (end - first), i = first, slot = slots.begin; turns > 0;
             --turns) {
            if (consumer == 0 && until_lead-- == 0) hand_back(&shared.leading);
            int stage = entry(Layer::kind_stages, i);
            if (i == first) slot = slots.begin;
            if (++i == end) i = first;
            ptx::mbarrier_wait_parity(&shared.patches_full[patches.stage], patches.parity);
            // If no products follow, no lane may still wait when the stage is handed back: the
            // barrier could be a turn further by then.
            __syncwarp();
            uint64_t patch = ptx::advance(patch_matrix, patches.stage * arguments.stage_bytes);
            int start = shared.starts[slot < Layer::slots ? slot : 0];
            bool has_products = false;
#pragma unroll 1
            for (; slot < slots.end && start % line_bytes == stage; ++slot) {
                ptx::mbarrier_wait_parity(&shared.weights_full[consumer][weights.stage],
                                          weights.parity);
                uint64_t a = ptx::advance(weight_matrix, weights.stage * weight_bytes);
                uint64_t b = ptx::advance(patch, start & -line_bytes);
                if (slot + 1 < slots.end) start = shared.starts[slot + 1];
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < line_bytes; k += 32) {
                    if constexpr (Layer::bfloat) {
                        ptx::wgmma_m64k16_bf16<columns>(sums, ptx::advance(a, k),
                                                        ptx::advance(b, k), true);
                    } else {
                        ptx::wgmma_m64k16_f16<columns>(sums, ptx::advance(a, k), ptx::advance(b, k),
                                                       true);
                    }
                }
                ptx::wgmma_commit_group();
                ptx::wgmma_wait_group<1>();
                if (used_weights != nullptr) hand_back(used_weights);
                if (!has_products && used_patch != nullptr) hand_back(used_patch);
                has_products = true;
                used_weights = &shared.weights_empty[consumer][weights.stage];
                weights.advance(arguments.weight_stages);
            }
            uint64_t* empty = &shared.patches_empty[patches.stage];
            if (has_products) {
                used_patch = empty;
            } else {
                // The stage before may be needed for the next products.
                ptx::wgmma_wait_group<0>();
                if (used_patch != nullptr) hand_back(used_patch);
                used_patch = nullptr;
                hand_back(empty);
            }
            patches.advance(arguments.patch_stages);
        }
        ptx::wgmma_wait_group<0>();
        ptx::fence_registers(sums);
        if (used_weights != nullptr) hand_back(used_weights);
        if (used_patch != nullptr) hand_back(used_patch);
    }
};

}  // namespace
