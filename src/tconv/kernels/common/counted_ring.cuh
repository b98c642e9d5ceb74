// A ring of stages in shared memory whose number depends on the image.
#pragma once

#include <ptx/cuda.cuh>

namespace {

// `Turn` (common/ring.cuh), of stages that are counted at run time.
struct CountedTurn {
    int stage = 0;
    uint32_t parity = 0;

    TCONV_DEVICE void advance(int stages) {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

}  // namespace
