// Barriers of a block: __syncthreads and the named ones, which share the hardware's sixteen.
#include <cstring>

#include "state.h"

namespace emulator {
namespace {

struct Barrier {
    unsigned threads = 0;  // expected; 0 before the first arrival
    unsigned arrived = 0;
    bool block_wide = false;
    Location first{};
    std::vector<Thread*> waiting;
};

Barrier barriers[16];

const char* const block_wide_name = "__syncthreads()";
const char* const names[16] = {"bar.sync 0",  "bar.sync 1",  "bar.sync 2",  "bar.sync 3",
                               "bar.sync 4",  "bar.sync 5",  "bar.sync 6",  "bar.sync 7",
                               "bar.sync 8",  "bar.sync 9",  "bar.sync 10", "bar.sync 11",
                               "bar.sync 12", "bar.sync 13", "bar.sync 14", "bar.sync 15"};

void arrive(unsigned id, unsigned count, bool block_wide, Location at) {
    const char* name = block_wide ? block_wide_name : names[id];
    Barrier& barrier = barriers[id];
    if (barrier.arrived == 0) {
        barrier.threads = count;
        barrier.block_wide = block_wide;
        barrier.first = at;
    } else if (barrier.threads != count) {
        fail(at, "%s is for %u threads here and for %u at %s:%d", name, count, barrier.threads,
             barrier.first.file, barrier.first.line);
    } else if (block_wide && barrier.block_wide &&
               (barrier.first.line != at.line || std::strcmp(barrier.first.file, at.file) != 0)) {
        fail(at,
             "divergent barrier: this thread is at another __syncthreads() than those that wait "
             "at %s:%d",
             barrier.first.file, barrier.first.line);
    }
    barrier.waiting.push_back(current);
    if (++barrier.arrived == barrier.threads) {
        barrier.arrived = 0;
        current->what = name;
        current->at = at;
        release_in_order(barrier.waiting);
        take_turn();
    } else {
        wait(name, at);
    }
}

void check_named(unsigned id, unsigned count, Location at) {
    if (id > 15) fail(at, "a named barrier is 0 to 15, got %u", id);
    if (count == 0 || count % 32 != 0 || count > block.thread_count) {
        fail(at, "a named barrier takes whole warps of this block's %u threads, got %u threads",
             block.thread_count, count);
    }
}

}  // namespace

void block_barrier(Location at) { arrive(0, block.thread_count, true, at); }

void barrier_sync(unsigned id, unsigned count, Location at) {
    check_named(id, count, at);
    arrive(id, count, false, at);
}

void reset_barriers() {
    for (Barrier& barrier : barriers) {
        barrier.arrived = 0;
        barrier.waiting.clear();
    }
}

}  // namespace emulator
