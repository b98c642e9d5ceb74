// Tiles whose values float16 cannot hold. The kernel that multiplies in float16 notes them; a launch of
// the one that multiplies in TF32, Layer::repair, comes after it and computes those again.
//
// arguments.status: a word that counts tiles (<common/sm90_patch_order.cuh>), one that is not 0 if anything
// does not fit, one for each warp of the packing, the bits of the largest weight that it has seen, then a
// byte for each tile and warp that brings its pixels: not 0 if some do not fit.
//
// NOTE: the launch that repairs reads the second word alone, as a rule: to read all took kb71 1.3 us longer.
#pragma once

#include <common/sm90_patch_tiles.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

constexpr int tile_warps = producers / 32;  // that bring a tile's pixels

TCONV_DEVICE uint8_t* tile_status(const Arguments& arguments) {
    return static_cast<uint8_t*>(arguments.status) + 4 * (2 + Layer::weight_words);
}

TCONV_DEVICE uint32_t* any_status(const Arguments& arguments) {
    return static_cast<uint32_t*>(arguments.status) + 1;
}

// Something does not fit.
TCONV_DEVICE void note_any(const Arguments& arguments) {
    ptx::griddepcontrol_wait();  // the packing clears the word
    *any_status(arguments) = 1;
}

// The largest weight that these lanes of a warp have in their words, every `step`-th from `first` on.
TCONV_DEVICE uint32_t largest_weight(const Arguments& arguments, int first, int step) {
    const uint32_t* words = static_cast<const uint32_t*>(arguments.status) + 2;
    uint32_t largest = 0;
    for (int i = first; i < Layer::weight_words; i += step) largest = max(largest, words[i]);
    return float16_operands::largest_of_warp(largest);
}

// By a warp of each block, behind the packing: notes if the weights that it looks at do not fit. Others may
// be larger; then the launch that repairs finds nothing to do.
template <typename Fields>
TCONV_DEVICE void note_weights(const Fields& arguments) {
    int lane = threadIdx.x % 32;
    uint32_t largest = largest_weight(arguments, blockIdx.x * 32 + lane, gridDim.x * 32);
    if (lane == 0 && !float16_operands::fit(largest, Layer::weight_scale, least)) note_any(arguments);
}

TCONV_DEVICE bool is_noted(Index tile, const Arguments& arguments) {
    const uint8_t* noted = tile_status(arguments) + tile_warps * tile;
    uint8_t any = 0;
#pragma unroll
    for (int warp = 0; warp < tile_warps; ++warp) any |= noted[warp];
    return any != 0;
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
    ptx::griddepcontrol_wait();
    if (*any_status(arguments) == 0) return false;
    if (threadIdx.x == 0) repairs = {};
    __syncthreads();
    uint32_t largest = largest_weight(arguments, threadIdx.x, Layer::threads);
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
