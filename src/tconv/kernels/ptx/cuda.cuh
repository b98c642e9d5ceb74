// The few words that a kernel is written in beside CUDA's own: first include of every `.cu`.
// The emulator has a file of the same name, which gives the same words to a host compiler.
#pragma once

#include <ptx/integers.cuh>

// NOTE: static shared memory only at a kernel's own scope, never in a function that it calls:
// the emulator finds the arrays by their linker section.
#define TCONV_SHARED __shared__
#define TCONV_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#define TCONV_DEVICE __device__ __forceinline__

#define TCONV_KERNEL(name, threads, blocks)                       \
    extern "C" __global__ void __launch_bounds__(threads, blocks) \
        name(const __grid_constant__ Arguments arguments)

// What must hold while the kernel runs; checked by the emulator alone, no code on the device.
#define TCONV_CHECK(condition) static_cast<void>(0)
