// Bring: boxes of the source, by tensor maps that lay them out as patches. Zeros
// take the place of what lies outside the image or behind the last channel of a group.
//
// Promises: stage after stage of `patches_full` holds the positions of `kind_stages`, chunk by
// chunk.
#pragma once

#include <engine/stages.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/tensor_map.cuh>

namespace {

// A template, as the maps are there only of a source that is not turned.
template <typename Fields>
TCONV_DEVICE void bring_patches(const Fields& arguments, Shared& shared) {
    CountedTurn turn;
    if constexpr (Layer::packs_image) ptx::griddepcontrol_wait();
    const ptx::TensorMap* maps = &arguments.source_0;
    for (int source = 0; source < Layer::sources; ++source) ptx::prefetch_tensormap(maps + source);
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(arguments, tile);
        int first = at.first_stage(), end = at.end_stage();
        for (int chunk = 0; chunk < chunks; ++chunk) {
            for (int i = first; i < end; ++i) {
                int stage = entry(Layer::kind_stages, i);
                uint64_t* full = &shared.patches_full[turn.stage];
                ptx::mbarrier_wait_parity(&shared.patches_empty[turn.stage], turn.parity ^ 1);
                ptx::mbarrier_arrive_expect_tx(full, arguments.patch_bytes);
                ptx::cp_async_bulk_tensor_5d_global_to_shared(
                    patch_of(arguments, shared, turn.stage),
                    maps + entry(Layer::stage_source, stage), chunk * depth,
                    at.x + entry(Layer::stage_x, stage), at.y + entry(Layer::stage_y, stage),
                    at.image, at.group, full);
                turn.advance(arguments.patch_stages);
            }
        }
    }
}

}  // namespace
