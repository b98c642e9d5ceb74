// Tables that are known when a kernel is compiled, by an index that is not.
#pragma once

#include <ptx/cuda.cuh>

namespace {

// An entry.
//
// NOTE: an array that is indexed lies in device memory, which answers late; so entries of short
// ones are told apart by comparisons, and one that all have in common is known.
template <int count>
[[maybe_unused]] TCONV_DEVICE int entry(const int (&table)[count], int index) {
    bool same = true;
#pragma unroll
    for (int i = 1; i < count; ++i) same &= table[i] == table[0];
    if (same) return table[0];
    if constexpr (count <= 32) {
        int value = table[0];
#pragma unroll
        for (int i = 1; i < count; ++i) value = i == index ? table[i] : value;
        return value;
    }
    return table[index];
}

}  // namespace
