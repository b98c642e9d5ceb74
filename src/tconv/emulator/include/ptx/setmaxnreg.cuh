// setmaxnreg on the host: does nothing, registers are not limited.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

template <int registers>
inline void setmaxnreg_inc() {
    static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0,
                  "setmaxnreg takes a multiple of 8 from 24 to 256");
}

template <int registers>
inline void setmaxnreg_dec() {
    static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0,
                  "setmaxnreg takes a multiple of 8 from 24 to 256");
}

}  // namespace ptx
