// What the launches of one call of sm90_tf32_flat_forward in float16 tell each other. The packing sets
// all of it back.
#pragma once

#include <ptx/cuda.cuh>

namespace flat {

enum Verdict : uint32_t {
    none,
    fits,   // float16 holds all values
    unfit,  // it does not
};

struct Status {
    Verdict verdict;
    uint32_t packing;  // items that some block of the launch that repairs packs or has packed
    uint32_t packed;   // has packed
};

}  // namespace flat
