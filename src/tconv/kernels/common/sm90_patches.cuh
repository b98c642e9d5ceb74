// The block of Hopper's kernels on staged patches: its roles and their walk through the tiles.
//
// The kernel that includes this defines `multiply_unrolled`, `multiply_rolled` and `prepare`, and
// calls `run_block`.
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

// Registers of a producer thread, where consumers need more than a third of all. Producers without
// a tensor map need more too.
constexpr int producer_registers = Layer::tensor_map ? 88 : 104;
constexpr int consumer_registers = (3 * 168 - producer_registers) / consumers;
static_assert(producer_registers + consumers * consumer_registers == 3 * 168,
              "what 384 threads get");

// The patch row of a pair's first pixel.
[[maybe_unused]] TCONV_DEVICE constexpr int pair_row(int pair) {
    return Layer::pair_pixel[pair] / Layer::patch_columns;
}

// The kernel that includes this defines the products of one tile, unrolled and as loops, and what
// may begin before them.
template <int row_class>
TCONV_DEVICE void multiply_unrolled(const Arguments& arguments, Shared& shared, const Position& at,
                                    int warp, Turns& turns, Sums& sums);
template <int row_class>
TCONV_DEVICE void multiply_rolled(const Arguments& arguments, Shared& shared, const Position& at,
                                  int warp, Turns& turns, Sums& sums);
template <int row_class>
TCONV_DEVICE void prepare(const uint32_t* weights, Shared& shared, int warp, const Turns& turns);

template <int row_class>
TCONV_DEVICE void multiply_class(const Arguments& arguments, Shared& shared, const Position& at,
                                 int warp, Turns& turns, Sums& sums) {
    if constexpr (row_class < Layer::classes) {
        if (Layer::classes == 1 || Layer::m_class[at.m_group] == row_class) {
            if constexpr (Layer::rolled) {
                multiply_rolled<row_class>(arguments, shared, at, warp, turns, sums);
            } else {
                multiply_unrolled<row_class>(arguments, shared, at, warp, turns, sums);
            }
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

// Finds the scale of the sums of a warp's next tile.
// NOTE: everything stays in shared memory, as the products need the registers. Producers are fewer
// tiles ahead than there are units.
TCONV_DEVICE void find_unit(Shared& shared, int warp) {
    int own = warp - 4;
    if (threadIdx.x % 32 == 0) {
        float of_pixels = shared.units[own / 4 % rings][shared.written[own]++ % order_size];
        shared.unit[own] = of_pixels * shared.weight_unit[own];
    }
    __syncwarp();
}

TCONV_DEVICE void consume(const Arguments& arguments, Shared& shared, int warp) {
    int consumer = warp / 4 - 1;
    TCONV_CHECK((arguments.destination_stride_n | arguments.destination_stride_c |
                 arguments.destination_stride_h) %
                        Layer::vector ==
                    0 &&
                reinterpret_cast<uintptr_t>(arguments.destination) % (4 * Layer::vector) == 0);
    if constexpr (Layer::resident) ptx::mbarrier_wait_parity(&shared.weights_full, 0);
    if constexpr (Layer::half) {
        int exponent = static_cast<const int*>(arguments.status)[1];
        if (threadIdx.x % 32 == 0)
            shared.weight_unit[warp - 4] = float16_operands::power_of_two(-exponent);
    }
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
        Index tile = tiles.now();
        Position at(tile, arguments, rings == 1 ? consumer : 0);
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
        if constexpr (Layer::half) find_unit(shared, warp);
        bool wrong = store<Layer::vector>(arguments, shared, at, warp, sums);
        if constexpr (!Layer::half) {
            if (__any_sync(~0u, wrong)) {
                Position same(ptx::opaque(tile), arguments, rings == 1 ? consumer : 0);
                repair_outputs(arguments, same, warp);
            }
        }
    }
}

// Calls `action` with each mbarrier and the number of its arrivals.
// NOTE: loops stay rolled where this rarely runs. With unrolled loops behind the loop over tiles,
// ptxas 13.0 moves the products' descriptors out of uniform registers: kb57 and kb69 took 4% longer
// without TF32.
template <int unrolled, typename Action>
TCONV_DEVICE void each_mbarrier(Shared& shared, Action action) {
#pragma unroll unrolled
    for (int ring = 0; ring < rings; ++ring) {
#pragma unroll unrolled
        for (uint64_t& full : shared.raw_full[ring]) action(&full, 1);
#pragma unroll unrolled
        for (int stage = 0; stage < stages; ++stage) {
            action(&shared.full[ring][stage], producers / 32);
            action(&shared.empty[ring][stage], patch_consumers * warpgroup / 32);
        }
#pragma unroll unrolled
        for (uint64_t& full : shared.order[ring].full) action(&full, 1);
    }
    action(&shared.weights_full, 1);
#pragma unroll unrolled
    for (int consumer = 0; consumer < consumers; ++consumer) {
#pragma unroll unrolled
        for (int slot = 0; slot < weight_slots; ++slot) {
            action(&shared.slot_full[consumer][slot], 1);
            action(&shared.slot_empty[consumer][slot], warpgroup);
        }
    }
}

// By one thread, before all others go on.
TCONV_DEVICE void prepare_block(Shared& shared, Repairs repairs) {
    each_mbarrier<Layer::repair ? 1 : 64>(
        shared, [](uint64_t* barrier, int arrivals) { ptx::mbarrier_init(barrier, arrivals); });
    ptx::fence_mbarrier_init();
    for (uint32_t& word : shared.zeros) word = 0;
    shared.repairs = repairs;
    for (int i = 0; i < 4 * rings; ++i) shared.last_unfit[i / 4][i % 4] = 0;
    for (uint32_t& count : shared.scaled) count = 0;
    for (uint32_t& count : shared.written) count = 0;
}

#ifdef TCONV_REPAIR
// The handover lies in the shared memory that a block's two parts share, at a place that neither
// uses otherwise.
TCONV_DEVICE Handover& handover_of(unsigned char* memory) {
    auto* of_this = reinterpret_cast<unsigned char*>(&reinterpret_cast<Shared*>(memory)->handover);
    auto* of_next =
        reinterpret_cast<unsigned char*>(&reinterpret_cast<repair::Shared*>(memory)->handover);
    return *reinterpret_cast<Handover*>(of_this > of_next ? of_this : of_next);
}

// By one thread, before all others go on.
TCONV_DEVICE void prepare_handover(unsigned char* memory) {
    Handover& handover = handover_of(memory);
    ptx::mbarrier_init(&handover.done, Layer::threads);
    ptx::mbarrier_init(&handover.prepared, 1);
}

// Called by one thread when all are done.
TCONV_DEVICE void prepare_repairs(const Arguments& arguments, unsigned char* memory) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    uint32_t repairs = shared.repairs.unfit;
    if (weights_are_unfit(shared)) repairs = joined(arguments, shared.repairs);
    handover_of(memory).repairs = repairs;
    if (repairs == 0) return;
    each_mbarrier<1>(shared, [](uint64_t* barrier, int) { ptx::mbarrier_inval(barrier); });
    ptx::fence_proxy_async_shared();  // what was stored there, before copies are
    repair::prepare_block(*reinterpret_cast<repair::Shared*>(memory), {repairs, 0});
}

// Called by a role's threads when their own part is done. Returns whether there is anything to
// recompute. A producer then prepares shared memory for it: with that code in consumers, ptxas 13.0
// spills kb65's registers.
// NOTE: all lanes arrive and wait at an mbarrier. With a bar, compute-sanitizer reports hazards or
// a divergent block.
template <bool producer>
TCONV_DEVICE bool repairs_follow(const Arguments& arguments, unsigned char* memory) {
    Handover& handover = handover_of(memory);
    ptx::mbarrier_arrive(&handover.done);
    ptx::mbarrier_wait_parity(&handover.done, 0);
    if (producer && threadIdx.x == 0) {
        prepare_repairs(arguments, memory);
        ptx::mbarrier_arrive(&handover.prepared);
    }
    ptx::mbarrier_wait_parity(&handover.prepared, 0);
    return handover.repairs != 0;
}
#endif

TCONV_DEVICE void produce_all(const Arguments& arguments, unsigned char* memory, int warp) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    produce<Layer::tensor_map>(arguments, shared, warp);
    if constexpr (Layer::half) look_at_weights(arguments, shared, warp);
}

TCONV_DEVICE void consume_all(const Arguments& arguments, unsigned char* memory, int warp) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if constexpr (Layer::resident) {
        if (threadIdx.x == warpgroup) load_weights(arguments, shared);
    }
    consume(arguments, shared, warp);
}

#ifndef TCONV_INNER
// NOTE: the compiler must know, before the roles branch, that the value is the same in all lanes.
// Values derived from it then stay in uniform registers, from which wgmma takes its descriptors.
// Producers by tensor map compute it anew for the repair rather than keep it. sm90_split_forward
// and other producers keep it: otherwise registers of fcn8s without TF32 (NVRTC 13.0) or of 2x2 s2
// (13.5) spilled.
TCONV_DEVICE int own_warp() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }

// The kernel, from its first line to its last.
TCONV_DEVICE void run_block(const Arguments& arguments, unsigned char* memory) {
    if (threadIdx.x == 0) {
#ifdef TCONV_REPAIR
        prepare_handover(memory);
#endif
        prepare_block(*reinterpret_cast<Shared*>(memory), {});
    }
    __syncthreads();
    int warp = own_warp();
    if (warp < warpgroup / 32) {
        if constexpr (Layer::shares) ptx::setmaxnreg_dec<producer_registers>();
        produce_all(arguments, memory, warp);
#ifdef TCONV_REPAIR
        if (repairs_follow<true>(arguments, memory)) {
            repair::produce_all(arguments, memory,
                                Layer::tensor_map && !Layer::split ? own_warp() : warp);
        }
#endif
    } else {
        if constexpr (Layer::shares) ptx::setmaxnreg_inc<consumer_registers>();
        // The packing may still run. Only these threads read or copy what it writes.
        ptx::griddepcontrol_wait();
        consume_all(arguments, memory, warp);
#ifdef TCONV_REPAIR
        if (repairs_follow<false>(arguments, memory)) repair::consume_all(arguments, memory, warp);
#endif
    }
}
#endif

}  // namespace
