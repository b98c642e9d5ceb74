// What Hopper's kernels on staged patches share: the walk through the tiles.
//
// The kernel that includes this defines `multiply`, the products of one tile, and `prepare`, and calls
// `run_block`.
#pragma once

#include <common/sm90_patch_order.cuh>
#include <common/sm90_patch_outputs.cuh>
#include <common/sm90_patch_producers.cuh>
#include <common/sm90_patch_repairs.cuh>
#include <common/sm90_patch_tiles.cuh>
#include <common/sm90_patch_weights.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/setmaxnreg.cuh>
#include <ptx/wgmma.cuh>

namespace {

// Where consumers need more than a third of the registers.
constexpr int producer_registers = Layer::tensor_map ? 88 : 104;
constexpr int consumer_registers = (3 * 168 - producer_registers) / consumers;
static_assert(producer_registers + consumers * consumer_registers == 3 * 168, "what 384 threads get");

// The patch's row of a pair's first pixel.
TCONV_DEVICE constexpr int pair_row(int pair) {
    return Layer::pair_pixel[pair] / Layer::patch_columns;
}

// What the kernel that includes this brings: the products of one tile, and what may begin before it.
template <int row_class>
TCONV_DEVICE void multiply(const Arguments& arguments, Shared& shared, const Position& at, int warp,
                           Turns& turns, Sums& sums);
template <int row_class>
TCONV_DEVICE void prepare(const uint32_t* weights, Shared& shared, int warp, const Turns& turns);

template <int row_class>
TCONV_DEVICE void multiply_class(const Arguments& arguments, Shared& shared, const Position& at,
                                 int warp, Turns& turns, Sums& sums) {
    if constexpr (row_class < Layer::classes) {
        if (Layer::classes == 1 || Layer::m_class[at.m_group] == row_class) {
            multiply<row_class>(arguments, shared, at, warp, turns, sums);
        } else {
            multiply_class<row_class + 1>(arguments, shared, at, warp, turns, sums);
        }
    }
}

template <int row_class>
TCONV_DEVICE void prepare_class(int m_group, const uint32_t* weights, Shared& shared, int warp,
                                const Turns& turns) {
    if constexpr (row_class < Layer::classes) {
        if (Layer::classes == 1 || Layer::m_class[m_group] == row_class) {
            prepare<row_class>(weights, shared, warp, turns);
        } else {
            prepare_class<row_class + 1>(m_group, weights, shared, warp, turns);
        }
    }
}

TCONV_DEVICE void consume(const Arguments& arguments, Shared& shared, int warp) {
    int consumer = warp / 4 - 1;
    bool aligned = (arguments.destination_stride_n | arguments.destination_stride_c |
                    arguments.destination_stride_h) %
                           Layer::vector ==
                       0 &&
                   reinterpret_cast<uintptr_t>(arguments.destination) % (4 * Layer::vector) == 0;
    if constexpr (Layer::resident) ptx::mbarrier_wait_parity(&shared.weights_full, 0);
    Turns turns;
    Tiles tiles(arguments, shared, consumer % rings);
    auto begin = [&](Index tile) {
        if (!staged || warp % 4 != 0 || tile >= arguments.tiles) return;
        int m_group = int(tile % Layer::m_groups);
        int group = int(tile / Layer::m_groups % Layer::groups);
        prepare_class<0>(m_group, packed_weights(m_group, group, arguments), shared, warp, turns);
    };
    begin(tiles.next());
    while (tiles.now() < arguments.tiles) {
        Position at(tiles.now(), arguments, rings == 1 ? consumer : 0);
        tiles.enter(turns.pixels);
        Sums sums;
#pragma unroll
        for (int m = 0; m < Layer::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < Layer::tile_rows; ++r) {
#pragma unroll
                for (int j = 0; j < columns / 2; ++j) sums[m][r][j] = 0.0f;
            }
        }
        multiply_class<0>(arguments, shared, at, warp, turns, sums);
        begin(tiles.next());
#pragma unroll
        for (int m = 0; m < Layer::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < Layer::tile_rows; ++r) ptx::fence_registers(sums[m][r]);
        }
        if (aligned) {
            store<Layer::vector>(arguments, shared, at, warp, sums);
        } else {
            store<1>(arguments, shared, at, warp, sums);
        }
    }
}

// The kernel, from its first line to its last.
TCONV_DEVICE void run_block(const Arguments& arguments, unsigned char* memory) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    // The launch that repairs has nothing to do as a rule: let it look as soon as a block is over.
    if constexpr (Layer::half) ptx::griddepcontrol_launch_dependents();
    if constexpr (Layer::repair) {
        if (!find_repairs(arguments, shared)) return;
    }
    if (threadIdx.x == 0) {
        for (int ring = 0; ring < rings; ++ring) {
            for (int slot = 0; slot < Layer::raw_stages; ++slot) {
                ptx::mbarrier_init(&shared.raw_full[ring][slot], 1);
            }
            for (int stage = 0; stage < stages; ++stage) {
                ptx::mbarrier_init(&shared.full[ring][stage], producers / 32);
                ptx::mbarrier_init(&shared.empty[ring][stage], patch_consumers * warpgroup / 32);
            }
            for (uint64_t& told : shared.order[ring].told) ptx::mbarrier_init(&told, 1);
        }
        ptx::mbarrier_init(&shared.weights_full, 1);
        for (int consumer = 0; consumer < consumers; ++consumer) {
            for (int slot = 0; slot < weight_slots; ++slot) {
                ptx::mbarrier_init(&shared.slot_full[consumer][slot], 1);
                ptx::mbarrier_init(&shared.slot_empty[consumer][slot], warpgroup);
            }
        }
        ptx::fence_mbarrier_init();
        for (uint32_t& word : shared.zeros) word = 0;
    }
    __syncthreads();
    // NOTE: the same in all lanes, and known to be so before roles part: what follows from it then
    // stays in uniform registers, where wgmma takes its descriptors from.
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp < warpgroup / 32) {
        if constexpr (Layer::shares) ptx::setmaxnreg_dec<producer_registers>();
        produce<Layer::tensor_map>(arguments, shared, warp);
    } else {
        if constexpr (Layer::shares) ptx::setmaxnreg_inc<consumer_registers>();
        // The packing may still run; only these threads read what it writes, or ask for copies of it.
        ptx::griddepcontrol_wait();
        if constexpr (Layer::half && !Layer::repair) {
            if (warp == Layer::threads / 32 - 1) note_weights(arguments);
        }
        if constexpr (Layer::resident) {
            if (threadIdx.x == warpgroup) load_weights(arguments, shared);
        }
        consume(arguments, shared, warp);
    }
}

}  // namespace
