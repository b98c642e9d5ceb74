// Registers of a block's threads, for setmaxnreg.
//
// A thread begins with as many as an SM has for each of the block's, which is what ptxas compiles a
// kernel for whose launch bounds ask for one block an SM. What a thread gives back others may take.
#include <algorithm>

#include "state.h"

namespace emulator {
namespace {

unsigned at_launch() { return std::min(256u, 65536 / block.thread_count / 8 * 8); }

unsigned& registers_of(Thread& thread) {
    if (thread.registers == 0) thread.registers = at_launch();
    return thread.registers;
}

}  // namespace

void release_registers(unsigned count, Location at) {
    unsigned& own = registers_of(*current);
    if (count > own) fail(at, "setmaxnreg.dec: to %u registers, the thread has %u", count, own);
    block.free_registers += own - count;
    own = count;
    ++block.progress;
}

void take_registers(unsigned count, Location at) {
    unsigned& own = registers_of(*current);
    if (count < own) fail(at, "setmaxnreg.inc: to %u registers, the thread has %u", count, own);
    while (block.free_registers < count - own) poll("setmaxnreg.inc", at);
    block.free_registers -= count - own;
    own = count;
    ++block.progress;
}

}  // namespace emulator
