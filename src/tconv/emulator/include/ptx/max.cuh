// max on the host.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

inline float max_nan_f32(float a, float b) {
    bool number = a == a && b == b;
    return !number ? __uint_as_float(0x7fffffffu) : a < b ? b : a;
}

}  // namespace ptx
