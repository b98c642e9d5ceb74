// Packed weights on their way to a consumer's registers. Staged weights are copied into shared
// memory piece by piece; resident weights stay there.
#pragma once

#include <common/sm90_patch_tiles.cuh>
#include <ptx/bulk.cuh>
#include <ptx/memory.cuh>

namespace {

// A row group's packed weights, in the order of use.
TCONV_DEVICE const uint32_t* packed_weights(int m_group, int group, const Arguments& arguments) {
    // NOTE: constant arrays lie in device memory, whose latency is long.
    int first = Layer::classes == 1 ? m_group * Layer::class_begin[1] : Layer::m_begin[m_group];
    return static_cast<const uint32_t*>(arguments.packed) + Layer::packed_begin +
           (Index(group) * Layer::group_pairs + first) * chunks * pair_words;
}

// Staged weights. One copy holds `pairs` pairs.
template <int pairs, int copies>
struct StagedWeights {
    static constexpr int first_copies = copies < weight_slots ? copies : weight_slots;

    Shared& shared;
    Turn<weight_slots>& turn;  // of the copy that is read
    Turn<weight_slots> used;   // of the oldest not yet handed back
    const uint32_t* rest;      // copies that are not yet issued
    int left;                  // their number
    int warp;

    TCONV_DEVICE StagedWeights(const Position& at, const Arguments& arguments, Shared& shared,
                               int warp, Turn<weight_slots>& turn)
        : shared(shared),
          turn(turn),
          used(turn),
          rest(packed_weights(at.m_group, at.group, arguments) + first_copies * pairs * pair_words),
          left(copies - first_copies),
          warp(warp) {}

    // Starts a tile's first copies, before its products begin.
    TCONV_DEVICE static void ask_first(const uint32_t* from, Shared& shared, int warp,
                                       Turn<weight_slots> turn) {
        for (int i = 0; i < first_copies; ++i) {
            ask(shared, warp, turn.stage, turn.parity ^ 1, from + i * pairs * pair_words);
            turn.advance();
        }
    }

    TCONV_DEVICE void wait() const {
        ptx::mbarrier_wait_parity(&shared.slot_full[warp / 4 - 1][turn.stage], turn.parity);
    }

    TCONV_DEVICE uint4 load(int pair) const {
        return ptx::ld_shared_v4(shared.slots[warp / 4 - 1][turn.stage] +
                                 (pair % pairs * pair_words + threadIdx.x % warpgroup * 4));
    }

    // NOTE: call this only after the products of the copy's last pair were issued. An arrival does
    // not wait for loads under way, and behind another warp's stores these may take long.
    // Each lane arrives for its own loads, as compute-sanitizer does not count on a warp's
    // synchronisation. Tiles of 120 and more sums took no longer.
    TCONV_DEVICE void hand_back() {
        ptx::mbarrier_arrive(&shared.slot_empty[warp / 4 - 1][used.stage]);
        if (left > 0) {
            if (warp % 4 == 0) ask(shared, warp, used.stage, used.parity, rest);
            rest += pairs * pair_words;
            --left;
        }
        used.advance();
    }

private:
    // Called by the consumer's first warp. The copy starts when all threads have read the slot for
    // the last time.
    TCONV_DEVICE static void ask(Shared& shared, int warp, int slot, uint32_t parity,
                                 const uint32_t* from) {
        int consumer = warp / 4 - 1;
        ptx::mbarrier_wait_parity(&shared.slot_empty[consumer][slot], parity);
        if (threadIdx.x % 32 == 0) {
            uint64_t* full = &shared.slot_full[consumer][slot];
            ptx::mbarrier_arrive_expect_tx(full, pairs * pair_words * 4);
            ptx::cp_async_bulk_global_to_shared(shared.slots[consumer][slot], from,
                                                pairs * pair_words * 4, full);
        }
        __syncwarp();
    }
};

// Resident weights, addressed by pair and chunk.
template <int unroll>
struct ResidentWeights {
    const uint32_t* base[Layer::m_tiles];  // of the warp's rows: of its phase's reach at slot 0
    int phase[Layer::m_tiles];
    const uint32_t* zeros;
    int here = 0;  // words from the first chunk to those that are multiplied, and to the next ones
    int following = unroll < chunks ? unroll * chunk_words : 0;

    TCONV_DEVICE ResidentWeights(const Position& at, const Arguments&, const Shared& shared,
                                 int warp)
        : zeros(shared.zeros) {
#pragma unroll
        for (int m = 0; m < Layer::m_tiles; ++m) {
            int warp_tile = (at.m_group * Layer::m_tiles + m) * 4 + warp % 4;
            int phase_y = warp_tile / phase_tiles;
            int channels = warp_tile - phase_y * phase_tiles;
            phase[m] = phase_y < phases_y ? phase_y : 0;  // no row at all: any weights will do
            base[m] = shared.weights + at.group * (chunks * chunk_words) + phase[m] * phase_words +
                      channels * fragment + threadIdx.x % 32 * 4;
        }
    }

    // Loads the weights of a pair, offset by `chunk` chunks and by `slots` slots of y.
    TCONV_DEVICE uint4 load(int pair, int chunk, int part = 0, int slots = 0) const {
        int m = Layer::pair_m_tile[pair];
        int reach = (Layer::pair_slot_y[pair] + slots) * Layer::stride_y;  // of phase 0
        bool of_all = reach >= 0 && reach + phases_y <= Layer::reaches;
        bool exists = of_all | (unsigned(reach + phase[m]) < unsigned(Layer::reaches));
        const uint32_t* from = base[m] + (chunk < unroll ? here : following) +
                               chunk % unroll * chunk_words +
                               Layer::pair_fragment[pair] * fragment + part * part_words +
                               slots * (Layer::stride_y * phase_words);
        return ptx::ld_shared_v4(exists ? from : zeros);
    }

    // Goes on to the next `unroll` chunks. `others`: whether more follow them.
    TCONV_DEVICE void advance(bool others) {
        here = following;
        if (others) following += unroll * chunk_words;
    }
};

// Starts the copies of all chunks' weights. Called by one thread.
TCONV_DEVICE void load_weights(const Arguments& arguments, Shared& shared) {
    ptx::mbarrier_arrive_expect_tx(&shared.weights_full, resident_words * 4);
    for (int first = 0; first < resident_words; first += chunk_words) {
        ptx::cp_async_bulk_global_to_shared(
            shared.weights + first,
            static_cast<const uint32_t*>(arguments.packed) + Layer::packed_begin + first,
            chunk_words * 4, &shared.weights_full);
    }
}

}  // namespace
