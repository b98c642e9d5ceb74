// ldmatrix and stmatrix on the host.
#pragma once

#include <ptx/shared_address.cuh>

namespace ptx {

#define EMULATOR_LDMATRIX(name, count, transposed)                         \
    inline void name(uint32_t (&d)[count], const void* row,                \
                     emulator::Location at = emulator::Location::here()) { \
        emulator::load_matrices(#name, d, row, count, transposed, at);     \
    }

EMULATOR_LDMATRIX(ldmatrix_x4, 4, false)
EMULATOR_LDMATRIX(ldmatrix_x4_trans, 4, true)

#undef EMULATOR_LDMATRIX

inline void stmatrix_x4(void* row, const uint32_t (&s)[4],
                        emulator::Location at = emulator::Location::here()) {
    emulator::store_matrices("stmatrix_x4", row, s, 4, false, at);
}

inline void stmatrix_x4_trans(void* row, const uint32_t (&s)[4],
                              emulator::Location at = emulator::Location::here()) {
    emulator::store_matrices("stmatrix_x4_trans", row, s, 4, true, at);
}

}  // namespace ptx
