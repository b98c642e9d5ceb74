// Multiply: sums[channels][positions] += weights[channels][depth] * patch[positions + shift][depth]
// over chunks, stages and slots. A slot is a tap of a result: a shift within a stage's patch, which
// is a start address.
//
// Promises: each thread holds sums[result of the set][64 positions or all][registers], laid out as
// ptx/wgmma.cuh says; rows are channels, or positions if `positions_are_rows`.
#pragma once

#include <common/element.cuh>
#include <common/split.cuh>
#include <engine/stages.cuh>
#include <ptx/bulk.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/registers.cuh>
#include <ptx/wgmma.cuh>

namespace {

constexpr int blocks = positions_are_rows ? columns / 64 : 1;  // of wgmma rows
constexpr int products_columns = positions_are_rows ? group_rows : columns;
using Block = float[products_columns / 2];
using Sums = Block[tile_sums][blocks];

using Element = Layer::Element;

TCONV_DEVICE uint32_t narrowed(float low, float high) {
    return Layer::bfloat ? ptx::cvt_rn_bf16x2_f32(low, high) : ptx::cvt_rn_f16x2_f32(low, high);
}

// The slots of a row group: its set's, the first and the end.
struct Slots {
    int begin, end;

    TCONV_DEVICE explicit Slots(int row_group) {
        if (row_group >= row_groups) {
            begin = end = 0;
            return;
        }
        begin = entry(Layer::set_begin, row_group % sets);
        end = entry(Layer::set_begin, row_group % sets + 1);
    }
};

// A consumer's first position in a patch.
TCONV_DEVICE int first_position(const Arguments& arguments, int consumer) {
    if (tile_groups > 1) return 0;
    return consumer * (Layer::maps_result ? arguments.parts * arguments.part_positions : columns);
}

TCONV_DEVICE void find_starts(const Arguments& arguments, Shared& shared) {
    for (int slot = threadIdx.x; slot < Layer::slots; slot += Layer::threads) {
        int position = entry(Layer::slot_y, slot) * arguments.pitch_x + entry(Layer::slot_x, slot);
        shared.starts[slot] = position * line_bytes + entry(Layer::slot_number, slot);
    }
    for (int position = threadIdx.x; position < boxed_positions; position += Layer::threads) {
        Place place(arguments, position);
        int boxed = (place.n * arguments.box_y + place.y) * arguments.box_x + place.x;
        shared.boxed[position] = place.in_box(arguments) && position < columns ? boxed : 0xffff;
    }
}

// Loads a ring's weights, a piece for each slot of each chunk. Resident ones are loaded once.
//
// A template, as fields differ.
template <typename Fields>
TCONV_DEVICE void bring_weights(const Fields& arguments, Shared& shared, int ring) {
    CountedTurn turn;
    ptx::griddepcontrol_wait();  // the packing may still run
    Tiles tiles(arguments);
    for (int tile = tiles.first; tile < tiles.end; tile += tiles.step) {
        Position at(arguments, tiles, tile);
        int row_group = at.row_group(ring);
        Slots slots(row_group);
        int block = row_group / sets;
        Index piece =
            (Index(at.group * row_blocks + block) * Layer::all_slots + slots.begin) * chunks;
        int slot = slots.begin, chunk = at.first_chunk, of_chunk = slots.end - slots.begin;
        piece += chunk * of_chunk;
        for (int left = of_chunk * (at.end_chunk - chunk); left > 0; left -= stage_slots) {
            uint64_t* full = &shared.weights_full[ring][turn.stage];
            auto* to = weights_of(arguments, shared, ring) + turn.stage * weight_stage_bytes;
            ptx::mbarrier_wait_parity(&shared.weights_empty[ring][turn.stage], turn.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(full,
                                           value_parts * stage_slots * group_rows * line_bytes);
            if constexpr (Layer::maps_weights) {
                for (int i = 0; i < stage_slots; ++i) {
                    int tap = entry(Layer::slot_tap, slot + i), y = tap / Layer::kernel_x;
                    int row = block * group_rows, channel = chunk * depth;
                    ptx::cp_async_bulk_tensor_5d_global_to_shared(
                        to + i * weight_bytes, &arguments.weights,
                        Layer::rows_adjacent ? row : channel, tap - y * Layer::kernel_x, y,
                        Layer::rows_adjacent ? channel : row, at.group, full);
                }
            } else {
                ptx::cp_async_bulk_global_to_shared(
                    to, static_cast<const unsigned char*>(arguments.packed) + piece * weight_bytes,
                    weight_stage_bytes, full);
            }
            piece += stage_slots;
            slot += stage_slots;
            if (slot == slots.end) {
                slot = slots.begin;
                ++chunk;
            }
            turn.advance(arguments.weight_stages);
        }
        if (Layer::resident) break;
    }
}

// Whether the stages of each row set follow each other.
TCONV_DEVICE constexpr bool stages_in_turn() {
    constexpr int count = sizeof(Layer::kind_begin) / sizeof(int) - 1;
    for (int kind = 0; kind < count; ++kind) {
        for (int i = Layer::kind_begin[kind] + 1; i < Layer::kind_begin[kind + 1]; ++i) {
            if (Layer::kind_stages[i] != Layer::kind_stages[i - 1] + 1) return false;
        }
    }
    return true;
}

// The stage at a place of a row set's list, whose first is at `first`.
TCONV_DEVICE int stage_of(int first, int place) {
    if constexpr (stages_in_turn()) return entry(Layer::kind_stages, first) + place - first;
    return entry(Layer::kind_stages, place);
}

// A consumer's rings and descriptors.
struct Multiplier {
    CountedTurn patches, kept, weights;  // `kept`: where a tile's patches begin
    uint64_t patch_matrix, weight_matrix;
    int consumer, ring;
    int part_bytes;  // of a patch
    bool loaded = false;  // resident weights

    TCONV_DEVICE Multiplier(const Arguments& arguments, Shared& shared, int consumer)
        : consumer(consumer),
          ring(consumer % weight_rings),
          part_bytes(arguments.stage_bytes / value_parts) {
        int first = first_position(arguments, consumer) * line_bytes;
        patch_matrix = ptx::matrix_descriptor(patch_of(arguments, shared, 0) + first, 16,
                                              8 * line_bytes, swizzle_of(line_bytes));
        weight_matrix = ptx::matrix_descriptor(weights_of(arguments, shared, ring), 16,
                                               8 * weight_line, swizzle_of(weight_line));
    }

    TCONV_DEVICE static void fence(Block (&sums)[blocks]) {
#pragma unroll
        for (auto& of_block : sums) ptx::fence_registers(of_block);
    }

    // The products of a slot.
    TCONV_DEVICE void multiply(Block (&sums)[blocks], uint64_t weight, uint64_t patch) {
#pragma unroll
        for (int block = 0; block < blocks; ++block) {
            uint64_t of_block = ptx::advance(patch, block * 64 * line_bytes);
            constexpr bool a_turned = Layer::rows_adjacent && !positions_are_rows;
            constexpr bool b_turned = Layer::rows_adjacent && positions_are_rows;
#pragma unroll
            for (int byte = 0; byte < line_bytes; byte += 32) {
                uint64_t of_k =
                    ptx::advance(weight, Layer::rows_adjacent ? byte / 2 * weight_line : byte);
                uint64_t pixels = ptx::advance(of_block, byte);
                uint64_t a = positions_are_rows ? pixels : of_k;
                uint64_t b = positions_are_rows ? of_k : pixels;
                if constexpr (sizeof(Element) == 4) {
                    ptx::wgmma_m64k8_tf32<products_columns>(sums[block], a, b, true);
                } else {
                    ptx::wgmma_m64k16<Layer::bfloat, products_columns, a_turned, b_turned>(
                        sums[block], a, b, true);
                }
            }
        }
    }

    // The same in strict float32. The products have ended.
    //
    // The tensor cores cut a sum after each product. So those of a slot go to a temporary sum, the
    // small ones first, while there is little to cut. It is then added in float32.
    TCONV_DEVICE void multiply_parts(Block (&sums)[blocks], uint64_t weight, uint64_t patch) {
        static_assert(!Layer::strict || positions_are_rows, "a block's sums are added at a time");
#pragma unroll
        for (int block = 0; block < blocks; ++block) {
            uint64_t of_block = ptx::advance(patch, block * 64 * line_bytes);
            Block partial;
#pragma unroll
            for (float& sum : partial) sum = 0.0f;
            ptx::wgmma_fence();
#pragma unroll
            for (int product = 0; product < Split::products; ++product) {
                uint64_t pixels = ptx::advance(of_block, Split::part_of_a(product) * part_bytes);
                uint64_t rows = ptx::advance(weight, Split::part_of_b(product) * part_weight_bytes);
#pragma unroll
                for (int byte = 0; byte < line_bytes; byte += 32) {
                    ptx::wgmma_m64k16<true, products_columns>(partial, ptx::advance(pixels, byte),
                                                              ptx::advance(rows, byte),
                                                              product > 0 || byte > 0);
                }
            }
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group<0>();
            ptx::fence_registers(partial);
#pragma unroll
            for (int i = 0; i < products_columns / 2; ++i) {
                sums[block][i] = fmaf(partial[i], Split::rescale, sums[block][i]);
            }
        }
    }

    // The sums of a tile. `until_lead`: slots after which the other consumer may begin.
    TCONV_DEVICE void multiply(const Arguments& arguments, Shared& shared, const Position& at,
                               Sums& sums, int& until_lead) {
#pragma unroll
        for (auto& of_result : sums) {
#pragma unroll
            for (auto& of_block : of_result) {
#pragma unroll
                for (float& sum : of_block) sum = 0.0f;
            }
        }
        Slots slots(at.row_group(consumer));
        int first = at.first_stage(), end = at.end_stage();
        // The stages that the newest finished products were the last to read, to be handed back.
        // NOTE: pointers would be generic, which take a special register for each.
        int used_patch = -1, used_weights = -1;
        auto hand_back_patch = [&](int stage) {
            if (stage >= 0) hand_back(&shared.patches_empty[stage]);
        };
        auto hand_back_weights = [&](int stage) {
            if (stage >= 0) hand_back(&shared.weights_empty[ring][stage]);
        };
        if (Layer::resident) weights.stage = 0;
        if (at.loads) kept = patches;
        patches = kept;
        uint32_t start = 0;
        auto find_start = [&](int slot) {
            // NOTE: as uniform as the role (<engine/kernel.cuh>).
            start = __shfl_sync(0xffffffffu, shared.starts[slot < Layer::slots ? slot : 0], 0);
        };
#pragma unroll 1
        for (int turns = (at.end_chunk - at.first_chunk) * (end - first), i = first,
                 slot = slots.begin;
             turns > 0; --turns) {
            uint32_t number = stage_of(first, i) * tile_sums;
            if (i == first) slot = slots.begin, find_start(slot);
            if (++i == end) i = first;
            ptx::mbarrier_wait_parity(&shared.patches_full[patches.stage], patches.parity);
            // If no products follow, no lane may still wait when the stage is handed back: the
            // barrier could be a turn further by then.
            __syncwarp();
            uint64_t patch = ptx::advance(patch_matrix, patches.stage * arguments.stage_bytes);
            int first_slot = slot;
#pragma unroll
            for (int result = 0; result < tile_sums; ++result) {
#pragma unroll 1
                for (; slot < slots.end && start % line_bytes == number + result; ++slot) {
                    if (until_lead-- == 0) hand_back(&shared.leading);
                    if (!Layer::resident || !loaded) {
                        ptx::mbarrier_wait_parity(&shared.weights_full[ring][weights.stage],
                                                  weights.parity);
                        __syncwarp();
                    }
                    uint64_t weight =
                        ptx::advance(weight_matrix, weights.stage * weight_stage_bytes);
                    uint64_t shifted = ptx::advance(patch, start / line_bytes * line_bytes);
                    find_start(slot + 1);
                    if constexpr (Layer::strict) {
                        multiply_parts(sums[result], weight, shifted);
                        if constexpr (!Layer::resident) used_weights = weights.stage;
                    } else {
                        ptx::wgmma_fence();
                        multiply(sums[result], weight, shifted);
                        ptx::wgmma_commit_group();
                    }
                    if (!Layer::resident || tile_sums > 1 || used_patch >= 0) {
                        ptx::wgmma_wait_group<1>();
                        hand_back_weights(used_weights);
                        hand_back_patch(used_patch);
                        used_patch = -1;
                    }
                    if constexpr (Layer::resident) {
                        ++weights.stage;
                    } else {
                        used_weights = Layer::strict ? -1 : weights.stage;
                        weights.advance(arguments.weight_stages);
                    }
                }
                if constexpr (tile_sums > 1 && chunks * Layer::stages == 1) {
                    // NOTE: else ptxas serialises all products (C7515), as the next result's
                    // registers are moved while this one's products run. In a loop over stages they
                    // are not.
                    ptx::wgmma_wait_group<0>();
                    fence(sums[result]);
                }
            }
            if (!at.hands_back) {
                // The next tile has the same patches.
            } else if (slot > first_slot && !Layer::strict) {
                used_patch = patches.stage;
            } else {
                // The stage before may be needed for the next products.
                ptx::wgmma_wait_group<0>();
                hand_back_patch(used_patch);
                used_patch = -1;
                hand_back_patch(patches.stage);
            }
            patches.advance(arguments.patch_stages);
        }
        ptx::wgmma_wait_group<0>();
#pragma unroll
        for (auto& of_result : sums) fence(of_result);
        hand_back_weights(used_weights);
        hand_back_patch(used_patch);
        loaded = true;
    }
};

}  // namespace
