// Lays weights and pixels out for sm90_tf32_flat_forward (common/sm90_tf32_flat_packing.cuh). In
// float16, each block notes what it has seen of what that cannot hold.
#include <common/sm90_tf32_flat_packing.cuh>
#include <common/sm90_tf32_flat_status.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

using Index = Layer::Index;

struct Shared {
    flat::packing::Shared staged;
    uint32_t noted[flat::packing::warps];
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

// The bits of the block's largest weight, or that a pixel does not fit.
template <typename Fields>
TCONV_DEVICE void note(const Fields& arguments, Shared& shared, uint32_t noted) {
    noted = float16_operands::largest_of_warp(noted);
    if (threadIdx.x % 32 == 0) shared.noted[threadIdx.x / 32] = noted;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (uint32_t other : shared.noted) noted = max(noted, other);
        auto* notes = static_cast<uint32_t*>(arguments.notes);
        notes[blockIdx.x] = noted;
        if (blockIdx.x == 0) *static_cast<flat::Status*>(arguments.status) = {};
    }
}

constexpr int blocks_of_sm = 5;
constexpr unsigned few_blocks = blocks_of_sm * 132;  // which an H100 or H200 runs at a time

}  // namespace

TCONV_KERNEL(sm90_tf32_flat_pack, Layer::threads, blocks_of_sm) {
    TCONV_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    // The kernel's blocks come when all of these have said so or are over: at once where these are
    // few, and then they find what room is left. Where they are many, at the end: maskrcnn takes
    // 0.121 ms so and 0.138 at once, why is not known, and no other layer measured differs.
    bool few = gridDim.x <= few_blocks;
    if (few) ptx::griddepcontrol_launch_dependents();
    auto* packed = static_cast<uint32_t*>(arguments.packed);
    uint32_t noted = 0;
    for (Index item = blockIdx.x; item < arguments.items; item += gridDim.x) {
        noted = max(noted, flat::packing::pack_item(arguments, packed, shared.staged, item));
    }
    if constexpr (Layer::half) note(arguments, shared, noted);
    if (!few) ptx::griddepcontrol_launch_dependents();
}
