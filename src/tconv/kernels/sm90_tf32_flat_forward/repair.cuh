// What the launch behind sm90_tf32_flat_forward in float16 does before it computes outputs again in
// TF32, of those images that do not fit or of all: it asks whether that is needed, and lays the
// operands out.
//
// Items are handed out by a counter, and only a block that runs holds any, so that none waits for
// one that cannot start.
#pragma once

#include <sm90_tf32_flat_forward/packing.cuh>
#include <sm90_tf32_flat_forward/status.cuh>
#include <ptx/bulk.cuh>
#include <ptx/griddepcontrol.cuh>

namespace flat::repair {

using Index = Layer::Index;

// Until a counter that others count has come to its end.
TCONV_DEVICE void wait_for(const uint32_t& counter, uint32_t end) {
    if (threadIdx.x == 0) {
        while (static_cast<const volatile uint32_t&>(counter) != end) {
        }
        __threadfence();
    }
    __syncthreads();
}

// Whether all images are computed again, or only those that do not fit.
template <typename Fields>
TCONV_DEVICE bool repairs_all(const Fields& arguments) {
    return static_cast<const volatile flat::Status*>(arguments.status)->unfit_weights >
           Layer::most_unfit_weights;
}

// After the kernel in front.
template <typename Fields>
TCONV_DEVICE bool repairs(const Fields& arguments, unsigned image) {
    return repairs_all(arguments) || static_cast<const volatile uint32_t*>(
                                         arguments.images)[image] > unsigned(arguments.most_slight);
}

// Whether the launch has anything to compute.
//
// Most blocks know while the kernel in front still runs, and are gone before its end; one waits, so
// that this launch is not over first.
// NOTE: blocks that come early, where the kernel in front leaves room, look until it has reported,
// which it is about to. If they waited for its end instead, the others would only come behind that:
// 4% of hifigan_k16s8. They do not look for ever: it is no condition of the result.
template <typename Fields>
TCONV_DEVICE bool is_needed(const Fields& arguments) {
    const auto& status = *static_cast<const volatile flat::Status*>(arguments.status);
    auto all_fit = [&] { return !repairs_all(arguments) && status.unfit_images == 0; };
    constexpr int most_looks = 64;  // each takes what L2 takes to answer
    for (int i = 0; blockIdx.x != 0 && i < most_looks; ++i) {
        if (status.reported == arguments.blocks_in_front) {
            __threadfence();
            if (all_fit()) return false;
            break;
        }
    }
    ptx::griddepcontrol_wait();
    return !all_fit();
}

// Weights and pixels in TF32, by all blocks of the launch; then they may be copied.
// NOTE: only those that pack meet after each item: with all threads at __syncthreads, and these at
// their own barrier between, compute-sanitizer's racecheck takes the item for written while it is
// read.
template <typename Fields>
TCONV_DEVICE void pack(const Fields& arguments, void* memory) {
    struct Shared {
        flat::packing::Shared staged;
        uint32_t item;
    };
    static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");
    Shared& shared = *static_cast<Shared*>(memory);
    flat::Status& status = *static_cast<flat::Status*>(arguments.status);
    if (flat::packing::packs()) {
        auto* packed = static_cast<uint32_t*>(arguments.packed_again);
        bool leads = flat::packing::own_thread() == 0;
        uint32_t count = 0;
        while (true) {
            if (leads) shared.item = atomicAdd(&status.packing, 1u);
            flat::packing::sync();
            uint32_t item = shared.item;
            if (item >= arguments.items) break;
            flat::packing::Seen of_none;
            flat::packing::pack_item(arguments, packed, shared.staged, {0}, of_none, item);
            ++count;
        }
        ptx::fence_proxy_async_global();
        ptx::fence_proxy_async_shared();
        __threadfence();
        flat::packing::sync();
        if (leads) atomicAdd(&status.packed, count);
    }
    __syncthreads();  // with what this block is to count, counted
    wait_for(status.packed, uint32_t(arguments.items));
    ptx::fence_proxy_async_global();
}

}  // namespace flat::repair
