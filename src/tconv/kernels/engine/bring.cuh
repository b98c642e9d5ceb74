// Bring: boxes of the source as patches. Zeros take the place of what lies outside the image or
// behind the last channel of a group. One thread has tensor maps do it; or a warpgroup turns an
// image that is contiguous.
//
// Promises: stage after stage of `patches_full` holds the positions of `kind_stages`, chunk by
// chunk.
#pragma once

#include <engine/stages.cuh>
#include <engine/turn.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/tensor_map.cuh>

namespace {

// Each map by a lane of warp 1, while barriers are made. Templates, as each has its fields only
// where it is used.
template <typename Fields>
TCONV_DEVICE void prefetch_maps(const Fields& arguments) {
    int map = int(threadIdx.x) - 32;
    if constexpr (!Layer::turned) {
        if (0 <= map && map < Layer::sources) ptx::prefetch_tensormap(&arguments.source_0 + map);
    }
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

template <typename Fields>
TCONV_DEVICE void turn_patches(const Fields& arguments, Shared& shared) {
    constexpr int step_y = Layer::source_step_y, step_x = Layer::source_step_x;
    // Offsets of 64 bits leave no registers for two units.
    constexpr int units = sizeof(Index) == 4 ? 2 : 1;
    using Turned = Turning<Layer::reduced, depth / 8, line_bytes, step_y, step_x, units>;
    TurnedImage image = {static_cast<const Layer::Element*>(arguments.source),
                         arguments.source_stride_n,
                         arguments.source_stride_c,
                         arguments.source_stride_h,
                         arguments.source_stride_w,
                         arguments.batch,
                         arguments.source_height,
                         arguments.source_width,
                         arguments.source_lines,
                         arguments.source_rows,
                         arguments.source_rows_multiplier,
                         arguments.source_rows_shift,
                         arguments.source_vectors,
                         arguments.source_vectors_multiplier,
                         arguments.source_vectors_shift,
                         arguments.pitch_x};
    CountedTurn turn;
    int longest = image.longest();
    // A tile's chunk, of the run that begins at place `i`.
    Tiles tiles(arguments);
    auto bring = [&](int tile, int chunk, int i, int length) {
        // NOTE: found again for each run, as the loads leave no registers to remember it.
        Position at(arguments, tiles, ptx::opaque(tile));
        int first_x = entry(Layer::run_x, i), first_channel = chunk * depth;
        int y = entry(Layer::stage_pixel_y, entry(Layer::kind_stages, i));
        TurnedBox box = {at.image, at.y * step_y + y, at.x * step_x + first_x,
                         at.group * Layer::reduced + first_channel, Layer::reduced - first_channel};
        Turned::bring(
            image, box, longest, length,
            [&] {
                CountedTurn next = turn;
                for (int k = 0; k < length; ++k) {
                    ptx::mbarrier_wait_parity(&shared.patches_empty[next.stage], next.parity ^ 1);
                    next.advance(arguments.patch_stages);
                }
            },
            [&](int k) {
                int stage = turn.stage + k;
                if (stage >= arguments.patch_stages) stage -= arguments.patch_stages;
                return patch_of(arguments, shared, stage);
            },
            [&](int k) {
                return entry(Layer::stage_pixel_x, entry(Layer::kind_stages, i + k)) - first_x;
            });
        ptx::fence_proxy_async_shared();
        __syncwarp();
        for (int k = 0; k < length; ++k) {
            hand_back(&shared.patches_full[turn.stage]);
            turn.advance(arguments.patch_stages);
        }
    };
    for (int tile = tiles.first; tile < tiles.end; tile += tiles.step) {
        Position at(arguments, tiles, tile);
        if (!at.loads) continue;
        int end = at.end_stage();
        for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll 1
            for (int i = at.first_stage(); i < end;) {
                int length = entry(Layer::run_length, i);
                bring(tile, chunk, i, length);
                i += length;
            }
        }
    }
}

}  // namespace
