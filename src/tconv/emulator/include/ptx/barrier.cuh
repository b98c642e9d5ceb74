// Named barriers on the host.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

inline void bar_sync(int id, int threads, emulator::Location at = emulator::Location::here()) {
    emulator::barrier_sync(static_cast<unsigned>(id), static_cast<unsigned>(threads), at);
}

}  // namespace ptx
