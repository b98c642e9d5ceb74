// The emulator's threads keep their registers in memory: nothing moves.
#pragma once

#include <type_traits>

#include <ptx/cuda.cuh>

namespace ptx {

template <int count>
TCONV_DEVICE void fence_registers(float (&)[count]) {}

template <typename T>
TCONV_DEVICE T opaque(T value) {
    static_assert(std::is_integral_v<T> || std::is_pointer_v<T>);
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    return value;
}

}  // namespace ptx
