// setmaxnreg on the host: a block's registers are counted, as one that asks for more than are free
// waits.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

template <int registers>
inline void setmaxnreg_inc(emulator::Location at = emulator::Location::here()) {
    static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0,
                  "setmaxnreg takes a multiple of 8 from 24 to 256");
    emulator::take_registers(registers, at);
}

template <int registers>
inline void setmaxnreg_dec(emulator::Location at = emulator::Location::here()) {
    static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0,
                  "setmaxnreg takes a multiple of 8 from 24 to 256");
    emulator::release_registers(registers, at);
}

}  // namespace ptx
