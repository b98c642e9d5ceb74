// An engine kernel: the roles of a block's warps.
//
//   warp 0            bring: patches by tensor maps
//   warps 1, 2        weights of each consumer, or of both
//   warpgroups 1, 2   consumers: multiply, then store
//   warpgroup 3       bring: patches of a source that is turned
//
// The second consumer starts `lead` slots after the first: in step both would wait and write at
// the same time.
#pragma once

#include <ptx/setmaxnreg.cuh>

namespace {

TCONV_DEVICE void consume(const Arguments& arguments, Shared& shared, int consumer) {
    Multiplier multiplier(arguments, shared, consumer);
    if (consumer == 1 && arguments.lead > 0) ptx::mbarrier_wait_parity(&shared.leading, 0);
    int until_lead = arguments.lead;
    Tiles tiles(arguments);
    for (int tile = tiles.first; tile < tiles.end; tile += tiles.step) {
        Position at(arguments, tiles, tile);
        Sums sums;
        multiplier.multiply(arguments, shared, at, sums, until_lead);
        store(arguments, shared, at, consumer, sums);
    }
    if (consumer == 0 && until_lead >= 0) hand_back(&shared.leading);
    if constexpr (Layer::maps_result) ptx::cp_async_bulk_wait_group<0>();
}

// Registers of a thread. With a warpgroup more, 128 on the average, else 168.
constexpr int bringing_registers = Layer::turned ? 24 : 40;
constexpr int turning_registers = 104;
constexpr int consuming_registers = Layer::turned ? 192 : 232;

// A template, so that only one of both ways to bring is compiled.
template <typename Fields>
TCONV_DEVICE void run(const Fields& arguments, unsigned char* memory) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    prefetch_maps(arguments);
    init_barriers(arguments, shared);
    find_starts(arguments, shared);
    __syncthreads();
    int role = threadIdx.x / warpgroup;
    // NOTE: setmaxnreg takes effect only in branches that do not join again.
    if (role == 0) {
        ptx::setmaxnreg_dec<bringing_registers>();
        int warp = threadIdx.x / 32;
        if constexpr (!Layer::turned) {
            if (threadIdx.x % 32 == 0 && warp == 0) bring_patches(arguments, shared);
        }
        if (threadIdx.x % 32 == 0 && warp >= 1 && warp <= weight_rings) {
            bring_weights(arguments, shared, warp - 1);
        }
    } else if (Layer::turned && role > consumers) {
        if constexpr (Layer::turned) {
            ptx::setmaxnreg_dec<turning_registers>();
            turn_patches(arguments, shared);
        }
    } else {
        ptx::setmaxnreg_inc<consuming_registers>();
        consume(arguments, shared, role - 1);
    }
}

}  // namespace
