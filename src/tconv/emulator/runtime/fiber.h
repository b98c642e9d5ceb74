// Cooperative threads: one stack each, switched without a system call.
#pragma once

#include <cstddef>

namespace emulator {

struct Fiber {
    void* stack_pointer = nullptr;   // where it stopped; null before its first run
    unsigned char* stack = nullptr;  // lowest usable byte; null for the thread's own stack
    std::size_t stack_bytes = 0;
    void* sanitizer_state = nullptr;
};

// Makes `fiber` start in `entry` at its next switch. Its stack is kept from an earlier use.
void prepare(Fiber& fiber, void (*entry)());

// Runs `to` until something switches back to `from`.
void switch_fiber(Fiber& from, Fiber& to);

// To be called first of all in a fiber's entry.
void entered(const Fiber& fiber);

}  // namespace emulator
