// The macros of a kernel: first include of every `.cu`. The emulator has a file of the same name,
// which defines the same macros for a host compiler.
#pragma once

#include <ptx/integers.cuh>

// NOTE: declare static shared memory in the kernel itself, never in a function that it calls. The
// emulator finds the arrays by their linker section.
#define TCONV_SHARED __shared__
#define TCONV_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#define TCONV_DEVICE __device__ __forceinline__

#define TCONV_KERNEL(name, threads, blocks)                       \
    extern "C" __global__ void __launch_bounds__(threads, blocks) \
        name(const __grid_constant__ Arguments arguments)

// A run-time assertion. Only the emulator checks it; on the device it has no code.
#define TCONV_CHECK(condition) static_cast<void>(0)
