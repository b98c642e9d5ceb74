// cvta.to.shared on the host: addresses as in the window of a block on a GPU.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

inline uint32_t cvta_to_shared(const void* pointer,
                               emulator::Location at = emulator::Location::here()) {
    return emulator::shared_address(pointer, at);
}

}  // namespace ptx
