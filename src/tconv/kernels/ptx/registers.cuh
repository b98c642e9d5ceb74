// Compiler fences for registers that an asynchronous instruction uses.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

// Call it after the wait for a wgmma. Its results are not read earlier.
template <int count>
TCONV_DEVICE void fence_registers(float (&values)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Hides the value from the compiler. What depends on it is computed after this point, and not
// hoisted out of a loop, where it would occupy registers.
template <typename T>
TCONV_DEVICE T opaque(T value) {
    if constexpr (sizeof(T) == 8) {
        asm volatile("" : "+l"(value));
    } else {
        asm volatile("" : "+r"(value));
    }
    return value;
}

}  // namespace ptx
