// An engine kernel: the roles of a block's warps.
//
//   warp 0            bring: patches by tensor maps
//   warps 1, 2        weights of each consumer, or of both
//   warpgroups 1, 2   consumers: multiply, then store
//
// If the source is turned, the first warp or two have the weights, and the others bring.
//
// The second consumer starts `lead` slots after the first: in step both would wait and write at
// the same time.
#pragma once

#include <engine/raw_rows.cuh>
#include <engine/share_sums.cuh>
#include <engine/store_float32.cuh>
#include <engine/turn.cuh>
#include <ptx/setmaxnreg.cuh>

namespace {

template <typename Chosen, typename Fields>
TCONV_DEVICE void consume(const Fields& arguments, Shared& shared, int consumer) {
    Chosen multiplier(arguments, shared, consumer);
    if (consumer == 1 && arguments.lead > 0) ptx::mbarrier_wait_parity(&shared.leading, 0);
    int until_lead = consumer == 0 ? arguments.lead : -1;
    Tiles tiles(arguments);
    for (int tile = tiles.first; tile < tiles.end; tile += tiles.step) {
        Position at(arguments, tiles, tile);
        Sums sums;
        multiplier.multiply(arguments, shared, at, sums, until_lead);
        if constexpr (shares_tiles) {
            write_share(arguments, tile, consumer, sums);
        } else if constexpr (sizeof(Element) == 4) {
            store_values<float>(arguments, at, consumer, sums);
        } else {
            store(arguments, shared, at, consumer, sums);
        }
    }
    if (until_lead >= 0) hand_back(&shared.leading);
    if constexpr (Layer::maps_result) ptx::cp_async_bulk_wait_group<0>();
}

// Registers of a thread: 168 on the average.
constexpr int bringing_registers = Layer::turned ? 88 : 40;
constexpr int consuming_registers = Layer::turned ? 208 : 232;

// A template, so that only one of both ways to bring is compiled.
template <typename Fields>
TCONV_DEVICE void run(const Fields& arguments, unsigned char* memory) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if constexpr (shares_tiles) ptx::griddepcontrol_launch_dependents();
    prefetch_maps(arguments);
    init_barriers(arguments, shared);
    find_starts(arguments, shared);
    __syncthreads();
    // NOTE: from one lane, so that ptxas takes it, and what follows from it, for uniform.
    int role = __shfl_sync(0xffffffffu, threadIdx.x / warpgroup, 0);
    // NOTE: setmaxnreg takes effect only in branches that do not join again.
    if (role == 0) {
        ptx::setmaxnreg_dec<bringing_registers>();
        if constexpr (adds_shares) return;
        int warp = threadIdx.x / 32, ring = Layer::turned ? warp : warp - 1;
        if (threadIdx.x % 32 == 0 && ring >= 0 && ring < weight_rings) {
            bring_weights(arguments, shared, ring);
        }
        if constexpr (Layer::turned) {
            if (warp >= weight_rings) turn_patches(arguments, shared, warp - weight_rings);
        } else if constexpr (Layer::raw) {
            if (threadIdx.x < (Layer::flat ? 32 : 1)) bring_lines(arguments, shared);
        } else {
            if (threadIdx.x == 0) bring_patches(arguments, shared);
        }
    } else {
        ptx::setmaxnreg_inc<consuming_registers>();
        if constexpr (adds_shares) {
            consume<Adder<Fields>>(arguments, shared, role - 1);
        } else if constexpr (Layer::raw) {
            consume<RawMultiplier<Fields>>(arguments, shared, role - 1);
        } else {
            consume<Multiplier>(arguments, shared, role - 1);
        }
    }
}

}  // namespace
