// atom on the host.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

inline uint32_t atom_global_inc_u32(uint32_t* address,
                                    emulator::Location at = emulator::Location::here()) {
    emulator::check_global(address, sizeof(*address), sizeof(*address), "atom_global_inc_u32", at);
    uint32_t before = *address;  // nothing runs between the read and the write
    *address = before >= 0x7fffffffu ? 0 : before + 1;
    return before;
}

}  // namespace ptx
