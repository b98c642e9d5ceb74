// A ring of stages in shared memory that mbarriers guard.
#pragma once

#include <ptx/cuda.cuh>

namespace {

// The next stage of a ring, and the parity of the phase that its mbarriers complete then.
template <int stages>
struct Turn {
    int stage = 0;
    uint32_t parity = 0;

    Turn() = default;

    // After so many stages.
    TCONV_DEVICE explicit Turn(uint32_t number)
        : stage(number % stages), parity(number / stages % 2) {}

    TCONV_DEVICE void advance() {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

}  // namespace
