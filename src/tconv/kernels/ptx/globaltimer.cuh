// %globaltimer: nanoseconds, the same on all SMs.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

// NOTE: on some GPUs it advances in steps of a microsecond.
TCONV_DEVICE uint64_t globaltimer() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

}  // namespace ptx
