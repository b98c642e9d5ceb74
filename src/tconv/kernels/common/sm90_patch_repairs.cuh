// Tiles whose values float16 cannot hold. The kernel that multiplies in float16 notes them; a launch of
// the one that multiplies in TF32, Layer::repair, comes after it and computes those again.
//
// arguments.status: a word that counts tiles (<common/sm90_patch_order.cuh>), one for each warp of the
// packing, the bits of the largest weight that it has seen, then two bytes for each tile, one of each warp
// that brings its pixels: not 0 if some do not fit.
#pragma once

#include <common/sm90_patch_tiles.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

TCONV_DEVICE uint8_t* tile_status(const Arguments& arguments) {
    return static_cast<uint8_t*>(arguments.status) + 4 * (1 + Layer::weight_words);
}

TCONV_DEVICE bool is_noted(Index tile, const Arguments& arguments) {
    const uint8_t* noted = tile_status(arguments) + 2 * tile;
    return (noted[0] | noted[1]) != 0;
}

// The first tile from `tile` on, in a ring's steps, that this launch computes. A template, since others have
// no use for it, and the compiler would warn of that.
template <typename Fields>
TCONV_DEVICE Index to_do(Index tile, const Fields& arguments, const Shared& shared) {
    if constexpr (Layer::repair) {
        while (tile < arguments.tiles && !shared.repairs.every() && !is_noted(tile, arguments)) {
            tile += Index(gridDim.x) * rings;
        }
    }
    return tile;
}

// Whether this block has anything to do; for all its threads.
TCONV_DEVICE bool find_repairs(const Arguments& arguments, Shared& shared) {
    auto& repairs = shared.repairs;
    if (threadIdx.x == 0) repairs = {};
    __syncthreads();
    ptx::griddepcontrol_wait();
    const uint32_t* words = static_cast<const uint32_t*>(arguments.status) + 1;
    uint32_t largest = 0;
    for (int i = threadIdx.x; i < Layer::weight_words; i += Layer::threads) {
        largest = max(largest, words[i]);
    }
    largest = float16_operands::largest_of_warp(largest);
    Index first = Index(blockIdx.x) * rings + threadIdx.x % rings;
    Index step = Index(gridDim.x) * rings;
    bool noted = false;
    for (Index tile = first + threadIdx.x / rings * step; tile < arguments.tiles;
         tile += Layer::threads / rings * step) {
        noted |= is_noted(tile, arguments);
    }
    bool some = __any_sync(0xffffffffu, noted);
    if (threadIdx.x % 32 == 0) {
        atomicMax(&repairs.largest_weight, largest);
        if (some) atomicMax(&repairs.some, 1);
    }
    __syncthreads();
    return repairs.some || repairs.every();
}

}  // namespace
