// The emulator's threads keep their registers in memory: nothing moves.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

template <int count>
TCONV_DEVICE void fence_registers(float (&)[count]) {}

TCONV_DEVICE uint32_t opaque(uint32_t value) { return value; }
TCONV_DEVICE int opaque(int value) { return value; }
TCONV_DEVICE long long opaque(long long value) { return value; }

template <typename T>
TCONV_DEVICE T* opaque(T* pointer) {
    return pointer;
}

}  // namespace ptx
