// Packs weights and pixels for sm90_tf32_flat_forward (sm90_tf32_flat_forward/packing.cuh). In
// float16 it notes which values float16 cannot hold. Each block has a word for weights: how many
// octets (8 channels of a tap) have such a value.
#include <sm90_tf32_flat_forward/packing.cuh>
#include <sm90_tf32_flat_forward/status.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

using Index = Layer::Index;
using float16_operands::Scale;

struct Shared {
    flat::packing::Shared staged;
    uint32_t unfit[flat::packing::warps];
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

// All blocks clear the kernel's counters. The first block writes the scale.
template <typename Fields>
TCONV_DEVICE void begin_notes(const Fields& arguments, Scale weight_scale) {
    auto* images = static_cast<uint32_t*>(arguments.images);
    for (int i = blockIdx.x * Layer::threads + threadIdx.x; i < arguments.batch;
         i += gridDim.x * Layer::threads) {
        images[i] = 0;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *static_cast<flat::Status*>(arguments.status) = {weight_scale.exponent};
    }
}

// Notes the block's octets of weights that do not fit.
template <typename Fields>
TCONV_DEVICE void note(const Fields& arguments, Shared& shared, Scale scale,
                       const flat::packing::Seen& weights) {
    uint32_t unfit = scale.holds(weights.largest()) ? weights.slight : float16_operands::too_many;
    unfit = ptx::redux_sync_add_u32(min(unfit, float16_operands::too_many));
    if (threadIdx.x % 32 == 0) shared.unfit[threadIdx.x / 32] = unfit;
    __syncthreads();
    if (threadIdx.x == 0) {
        unfit = 0;
        for (uint32_t of_warp : shared.unfit) unfit += of_warp;
        // No more than decides the verdict, so that the sum over all blocks does not overflow.
        static_cast<uint32_t*>(arguments.notes)[blockIdx.x] =
            min(unfit, float16_operands::too_many);
    }
}

constexpr int blocks_of_sm = 5;
constexpr unsigned few_blocks = blocks_of_sm * 132;  // which an H100 or H200 runs at a time

}  // namespace

TCONV_KERNEL(sm90_tf32_flat_pack, Layer::threads, blocks_of_sm) {
    TCONV_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    // The kernel's blocks start when all blocks of this grid have called this or are over. Few
    // blocks call it at once; the kernel's blocks then find what room is left. Many blocks call it
    // at the end: maskrcnn takes 0.121 ms so and 0.138 at once, why is not known, and no other
    // layer measured differs.
    bool few = gridDim.x <= few_blocks;
    if (few) ptx::griddepcontrol_launch_dependents();
    auto* packed = static_cast<uint32_t*>(arguments.packed);
    Scale weight_scale{0};
    if constexpr (Layer::half) {
        if (blockIdx.x < arguments.weight_items) {
            weight_scale = float16_operands::sample_weights<Layer::threads>(arguments).scale;
        }
        begin_notes(arguments, weight_scale);
    }
    flat::packing::Seen weights;
    for (Index item = blockIdx.x; item < arguments.items; item += gridDim.x) {
        flat::packing::pack_item(arguments, packed, shared.staged, weight_scale, weights, item);
    }
    if constexpr (Layer::half) note(arguments, shared, weight_scale, weights);
    if (!few) ptx::griddepcontrol_launch_dependents();
}
