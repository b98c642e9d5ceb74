// Tiles whose values float16 cannot hold. A block that multiplies in float16 links its tiles into
// two chains: those that do not fit, and the others. At its end it recomputes the first chain, or
// if weights do not fit both, in TF32 or (Layer::split) in bfloat16. It does so by the same
// functions, with Layer::repair, in `namespace repair`. So the block that wrote a tile repairs it.
//
// arguments.status has a word that counts tiles (<common/sm90_patch_order.cuh>); the exponent of
// the weights' scale; for each warp of the packing a count of weights that do not fit; then for
// each tile and warp that loads its pixels the next tile of the chain. A tile that fits is linked
// by its first warp, one that does not by the warp that finds it first.
#pragma once

#include <common/sm90_patch_tiles.cuh>
#include <ptx/barrier.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

constexpr int tile_warps = producers / 32;  // that bring a tile's pixels

TCONV_DEVICE uint32_t* chain(const Arguments& arguments) {
    return static_cast<uint32_t*>(arguments.status) + 1 + Layer::weight_words;
}

// Links a tile into a chain. Called by a lane of a warp that has loaded a part of the tile.
[[maybe_unused]] TCONV_DEVICE void chain_up(const Arguments& arguments, uint32_t& head, Index tile,
                                            int warp) {
    uint32_t node = uint32_t(tile_warps * tile + warp % tile_warps);
    ptx::griddepcontrol_wait();  // whoever wrote there before
    chain(arguments)[node] = atomicExch(&head, node + 1);
}

// Whether this warp is the first to find that the tile does not fit. A tile linked twice would be
// computed twice.
[[maybe_unused]] TCONV_DEVICE bool finds_first(Shared& shared, Index tile, int warp) {
    uint32_t mark = uint32_t(tile) + 1;
    return atomicExch(&shared.last_unfit[warp / tile_warps][mark % 4], mark) != mark;
}

// Counts the weights that do not fit. Called by the producers when nothing is left to load; each
// warp takes a part of the weights.
template <typename Fields>
TCONV_DEVICE void look_at_weights(const Fields& arguments, Shared& shared, int warp) {
    ptx::griddepcontrol_wait();  // the packing writes the words
    const uint32_t* words = static_cast<const uint32_t*>(arguments.status) + 2;
    uint32_t unfit = 0;
#pragma unroll 4
    for (int i = threadIdx.x % warpgroup; i < Layer::weight_words - 1; i += warpgroup)
        unfit += words[i];
    unfit = ptx::redux_sync_add_u32(unfit);
    if (threadIdx.x % 32 == 0) shared.unfit_weights[warp] = unfit;
}

#ifdef TCONV_REPAIR
// Joins both chains.
TCONV_DEVICE uint32_t joined(const Arguments& arguments, const Repairs& repairs) {
    volatile uint32_t* next = chain(arguments);
    if (repairs.unfit == 0) return repairs.others;
    uint32_t last = repairs.unfit;
    while (next[last - 1] != 0) last = next[last - 1];
    next[last - 1] = repairs.others;
    return repairs.unfit;
}

// Whether more weights do not fit than chance brings.
TCONV_DEVICE bool weights_are_unfit(const Shared& shared) {
    const uint32_t* of = shared.unfit_weights;
    return of[0] + of[1] + of[2] + of[3] > Layer::most_unfit_weights;
}
#endif

}  // namespace
