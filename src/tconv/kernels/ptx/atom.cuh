// atom: one addition.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

// What was there before 1 was added; 2^31 - 1 becomes 0.
// NOTE: of `atom.add`, as of CUDA's atomicAdd, the compiler makes one for all lanes that may execute it
// together, and has them wait for its result at once.
TCONV_DEVICE uint32_t atom_global_inc_u32(uint32_t* address) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;"
                 : "=r"(before)
                 : "l"(address)
                 : "memory");
    return before;
}

}  // namespace ptx
