// The launch that repairs a kernel in float16: whether it is needed, and the packing of its
// operands.
//
// It then recomputes in TF32 the images that do not fit, or all. A counter hands out the items of
// the packing to blocks that run, so that no block waits for one that cannot start.
#pragma once

#include <sm90_tf32_flat_forward/packing.cuh>
#include <sm90_tf32_flat_forward/status.cuh>
#include <ptx/bulk.cuh>
#include <ptx/griddepcontrol.cuh>

namespace flat::repair {

using Index = Layer::Index;

// Waits until a counter that other blocks increment reaches `end`.
TCONV_DEVICE void wait_for(const uint32_t& counter, uint32_t end) {
    if (threadIdx.x == 0) {
        while (static_cast<const volatile uint32_t&>(counter) != end) {
        }
        __threadfence();
    }
    __syncthreads();
}

// Whether all images are recomputed, or only those that do not fit.
template <typename Fields>
TCONV_DEVICE bool repairs_all(const Fields& arguments) {
    return static_cast<const volatile flat::Status*>(arguments.status)->unfit_weights >
           Layer::most_unfit_weights;
}

// Called after the kernel in front has ended.
template <typename Fields>
TCONV_DEVICE bool repairs(const Fields& arguments, unsigned image) {
    return repairs_all(arguments) || static_cast<const volatile uint32_t*>(
                                         arguments.images)[image] > unsigned(arguments.most_slight);
}

// Whether the launch has anything to compute.
//
// Most blocks know it while the kernel in front still runs, and exit before its end. One waits, so
// that this launch does not end first.
// NOTE: blocks that start early, where the kernel in front leaves room, poll until it has reported.
// If they waited for its end, further blocks would start only then: 4% of hifigan_k16s8. They give
// up after some polls: the result does not depend on it.
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

// Packs weights and pixels in TF32, by all blocks of the launch. They may be copied afterwards.
// NOTE: only threads that pack synchronise after each item. With all threads at __syncthreads, and
// these at a barrier of their own in between, compute-sanitizer's racecheck reports that the item
// is written while it is read.
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
        auto* packed = static_cast<uint32_t*>(arguments.repair_packed);
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
