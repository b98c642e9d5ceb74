// max of floats that propagates NaN (sm_80).
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

// NaN if either is NaN. fmaxf gives the other.
TCONV_DEVICE float max_nan_f32(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

}  // namespace ptx
