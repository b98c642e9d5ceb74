// redux.sync on the host.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

inline uint32_t redux_sync_max_u32(uint32_t value) {
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        uint32_t other = __shfl_xor_sync(0xffffffffu, value, lanes);
        value = value < other ? other : value;
    }
    return value;
}

inline uint32_t redux_sync_add_u32(uint32_t value) {
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
    return value;
}

}  // namespace ptx
