// setmaxnreg (sm_90a): a warpgroup releases registers, or takes more.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

template <int registers>
TCONV_DEVICE void setmaxnreg_inc() {
    static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0,
                  "setmaxnreg takes a multiple of 8 from 24 to 256");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
TCONV_DEVICE void setmaxnreg_dec() {
    static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0,
                  "setmaxnreg takes a multiple of 8 from 24 to 256");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace ptx
