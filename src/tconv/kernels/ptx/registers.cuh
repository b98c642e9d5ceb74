// Keeps the compiler from moving registers that an asynchronous instruction works on.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

// After the wait for a wgmma: its results are read no earlier than here.
template <int count>
TCONV_DEVICE void fence_registers(float (&values)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// The value as the compiler cannot foresee it: what is derived from it is derived after this point,
// not ahead of a loop, where it would occupy registers.
TCONV_DEVICE uint32_t opaque(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

TCONV_DEVICE int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

TCONV_DEVICE long long opaque(long long value) {
    asm volatile("" : "+l"(value));
    return value;
}

template <typename T>
TCONV_DEVICE T* opaque(T* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
}

}  // namespace ptx
