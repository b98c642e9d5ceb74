// What threads of a block and of a warp do together: barriers, shuffles, votes.
#pragma once

#include <emulator/arithmetic.h>
#include <emulator/runtime.h>

inline void __syncthreads(emulator::Location at = emulator::Location::here()) {
    emulator::block_barrier(at);
}

inline void __syncwarp(unsigned mask = 0xffffffffu,
                       emulator::Location at = emulator::Location::here()) {
    emulator::warp_barrier(mask, at);
}

// Blocks run one after another and a thread runs alone, so that every store is seen at once.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

inline void __nanosleep(unsigned, emulator::Location at = emulator::Location::here()) {
    emulator::poll("__nanosleep", at);
}

[[noreturn]] inline void __trap(emulator::Location at = emulator::Location::here()) {
    emulator::fail(at, "__trap() was called");
}

namespace emulator {

template <typename T>
inline T shuffle_value(Shuffle kind, uint32_t mask, T value, uint32_t lane, int width,
                       Location at) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 32 or 64 bits");
    if constexpr (sizeof(T) == 4) {
        uint64_t bits = shuffle(kind, mask, bits_as<uint32_t>(value), lane, width, at);
        return bits_as<T>(static_cast<uint32_t>(bits));
    } else {
        return bits_as<T>(shuffle(kind, mask, bits_as<uint64_t>(value), lane, width, at));
    }
}

}  // namespace emulator

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32,
                     emulator::Location at = emulator::Location::here()) {
    return emulator::shuffle_value(emulator::Shuffle::index, mask, value,
                                   static_cast<unsigned>(lane), width, at);
}

template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                        emulator::Location at = emulator::Location::here()) {
    return emulator::shuffle_value(emulator::Shuffle::up, mask, value, delta, width, at);
}

template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                          emulator::Location at = emulator::Location::here()) {
    return emulator::shuffle_value(emulator::Shuffle::down, mask, value, delta, width, at);
}

template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32,
                         emulator::Location at = emulator::Location::here()) {
    return emulator::shuffle_value(emulator::Shuffle::exclusive_or, mask, value,
                                   static_cast<unsigned>(lanes), width, at);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              emulator::Location at = emulator::Location::here()) {
    return emulator::ballot("__ballot_sync", mask, predicate != 0, at);
}

inline int __any_sync(unsigned mask, int predicate,
                      emulator::Location at = emulator::Location::here()) {
    return emulator::ballot("__any_sync", mask, predicate != 0, at) != 0;
}

inline int __all_sync(unsigned mask, int predicate,
                      emulator::Location at = emulator::Location::here()) {
    return emulator::ballot("__all_sync", mask, predicate == 0, at) == 0;
}

// Atomics: nothing runs between the read and the write.
template <typename T>
inline T atomicAdd(T* address, T value) {
    T old = *address;
    *address = old + value;
    return old;
}
template <typename T>
inline T atomicMax(T* address, T value) {
    T old = *address;
    if (old < value) *address = value;
    return old;
}
template <typename T>
inline T atomicExch(T* address, T value) {
    T old = *address;
    *address = value;
    return old;
}
template <typename T>
inline T atomicCAS(T* address, T compare, T value) {
    T old = *address;
    if (old == compare) *address = value;
    return old;
}
