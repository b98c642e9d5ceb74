// Two bfloat16 numbers on the host.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

inline uint32_t abs_bf16x2(uint32_t values) { return values & 0x7fff7fffu; }

}  // namespace ptx
