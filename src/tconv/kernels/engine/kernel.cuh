// An engine kernel: the roles of a block's warps.
//
//   warp 0            bring: patches
//   warps 1, 2        weights of each consumer, or of both
//   warpgroups 1, 2   consumers: multiply, then store
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
}

TCONV_DEVICE void run(const Arguments& arguments, unsigned char* memory) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    prefetch_maps(arguments);
    init_barriers(arguments, shared);
    find_starts(arguments, shared);
    __syncthreads();
    int role = threadIdx.x / warpgroup;
    // NOTE: setmaxnreg takes effect only in branches that do not join again.
    if (role == 0) {
        ptx::setmaxnreg_dec<40>();
        int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0 && warp == 0) bring_patches(arguments, shared);
        if (threadIdx.x % 32 == 0 && warp >= 1 && warp <= weight_rings) {
            bring_weights(arguments, shared, warp - 1);
        }
    } else {
        ptx::setmaxnreg_inc<232>();
        consume(arguments, shared, role - 1);
    }
}

}  // namespace
