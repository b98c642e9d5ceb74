// Elements of matrices as the tensor cores see them.
#pragma once

#include "../include/emulator/formats.h"
#include "../include/emulator/runtime.h"

namespace emulator {

inline unsigned element_bytes(MatrixType type) { return type == MatrixType::tf32 ? 4 : 2; }

// Element `index` of a register (or of any 32 bits): the lower half first.
inline float element(MatrixType type, uint32_t bits, unsigned index) {
    // The hardware ignores the low 13 bits of a TF32 operand.
    if (type == MatrixType::tf32) return float_of(bits & 0xffffe000u);
    auto half = static_cast<uint16_t>(bits >> (16 * index));
    return type == MatrixType::f16 ? float_of_f16(half) : float_of_bf16(half);
}

}  // namespace emulator
