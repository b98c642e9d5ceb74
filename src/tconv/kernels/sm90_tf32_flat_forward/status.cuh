// What the launches of one float16 call of sm90_tf32_flat_forward tell each other. The packing
// clears it.
#pragma once

#include <ptx/cuda.cuh>

namespace flat {

struct Status {
    int weight_exponent;     // of the power of two that weights are multiplied by
    uint32_t unfit_weights;  // octets
    uint32_t unfit_images;
    uint32_t reported;  // blocks of the kernel that have read their part of the packing's notes
    uint32_t packing;  // items that some block of the launch that repairs packs or has packed
    uint32_t packed;  // has packed
};

}  // namespace flat
