// Bring: boxes of the source as patches. Zeros take the place of what lies outside the image or
// behind the last channel of a group. One thread has tensor maps do it; or warps turn an image that
// is contiguous (<engine/turn.cuh>).
//
// Promises: stage after stage of `patches_full` holds the positions of `kind_stages`, chunk by
// chunk.
#pragma once

#include <engine/stages.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/tensor_map.cuh>

namespace {

// Each map by a lane of warp 1, while barriers are made. Templates, as each has its fields only
// where it is used.
template <typename Fields>
TCONV_DEVICE void prefetch_maps(const Fields& arguments) {
    int map = int(threadIdx.x) - 32;
    if (0 <= map && map < Layer::sources) ptx::prefetch_tensormap(&arguments.source_0 + map);
    if constexpr (Layer::maps_weights) {
        if (map == Layer::sources) ptx::prefetch_tensormap(&arguments.weights);
    }
    if constexpr (Layer::maps_result) {
        if (0 <= map && map < Layer::results) ptx::prefetch_tensormap(&arguments.result_0 + map);
    }
}

template <typename Fields>
TCONV_DEVICE void bring_patches(const Fields& arguments, Shared& shared) {
    CountedTurn turn;
    if constexpr (Layer::packs_image) ptx::griddepcontrol_wait();
    const ptx::TensorMap* maps = &arguments.source_0;
    Tiles tiles(arguments);
    for (int tile = tiles.first; tile < tiles.end; tile += tiles.step) {
        Position at(arguments, tiles, tile);
        if (!at.loads) continue;
        int first = at.first_stage(), end = at.end_stage();
        for (int chunk = at.first_chunk; chunk < at.end_chunk; ++chunk) {
            for (int i = first; i < end; ++i) {
                int stage = entry(Layer::kind_stages, i);
                uint64_t* full = &shared.patches_full[turn.stage];
                ptx::mbarrier_wait_parity(&shared.patches_empty[turn.stage], turn.parity ^ 1);
                ptx::mbarrier_arrive_expect_tx(full, arguments.patch_bytes);
#pragma unroll
                for (int part = 0; part < value_parts; ++part) {
                    ptx::cp_async_bulk_tensor_5d_global_to_shared(
                        patch_of(arguments, shared, turn.stage) +
                            part * (arguments.stage_bytes / value_parts),
                        maps + entry(Layer::stage_source, stage), chunk * depth,
                        at.x + entry(Layer::stage_x, stage), at.y + entry(Layer::stage_y, stage),
                        at.image, at.group * value_parts + part, full);
                }
                turn.advance(arguments.patch_stages);
            }
        }
    }
}

}  // namespace
