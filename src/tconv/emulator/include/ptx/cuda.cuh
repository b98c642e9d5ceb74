// The macros of <ptx/cuda.cuh> for a host compiler, and the CUDA built-ins that kernels use.
#pragma once

#include <emulator/arithmetic.h>
#include <emulator/runtime.h>
#include <emulator/threads.h>
#include <emulator/types.h>

// NOTE: `used`: the runtime fills these arrays. A compiler that sees no store must not assume
// zeros.
#define TCONV_SHARED static __attribute__((section("tconv_shared"), used))
#define TCONV_DYNAMIC_SHARED(name) unsigned char* const name = emulator::dynamic_shared()
#define TCONV_DEVICE inline
#define TCONV_KERNEL(name, threads, blocks) extern "C" void name(const Arguments& arguments)
#define TCONV_CHECK(condition)          \
    ((condition) ? static_cast<void>(0) \
                 : emulator::fail({__FILE__, __LINE__}, "does not hold: %s", #condition))

#define __device__
#define __host__
#define __global__
#define __constant__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__
#define __launch_bounds__(...)

#define threadIdx (emulator::thread_index)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_dim)
#define gridDim (emulator::grid_dim)

constexpr int warpSize = 32;

extern "C" int printf(const char* format, ...);

// Cached and streaming accesses are plain ones here.
template <typename T>
inline T __ldg(const T* address) {
    return *address;
}
template <typename T>
inline T __ldcs(const T* address) {
    return *address;
}
template <typename T>
inline T __ldcg(const T* address) {
    return *address;
}
template <typename T>
inline void __stcs(T* address, T value) {
    *address = value;
}
template <typename T>
inline void __stcg(T* address, T value) {
    *address = value;
}
