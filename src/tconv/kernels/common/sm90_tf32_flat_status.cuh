// What the launches of one call of sm90_tf32_flat_forward in float16 tell each other. The packing sets
// all of it back.
#pragma once

#include <ptx/cuda.cuh>

namespace flat {

// In the order in which one takes another's place, whoever comes first.
enum Verdict : uint32_t {
    none,
    fits,   // float16 holds all values
    unfit,  // it does not, or kept weights are not the layer's any more
};

struct Status {
    uint32_t verdict;
    uint32_t changed;   // kept weights are not the layer's any more
    uint32_t taken;     // pieces of kept weights that some warp compares or has compared
    uint32_t compared;  // has compared
    uint32_t packing;   // items that some block of the launch that repairs packs or has packed
    uint32_t packed;    // has packed
};

}  // namespace flat
