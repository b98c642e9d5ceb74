// What the runtime's own files share: the running launch, its block, its threads.
#pragma once

#include <cstdint>
#include <vector>

#include "../include/emulator/runtime.h"
#include "fiber.h"

namespace emulator {

constexpr uint32_t all_lanes = 0xffffffffu;

enum class State { ready, waiting, polling, finished };

struct Thread {
    Fiber fiber;
    uint3 index{};
    unsigned linear = 0, warp = 0, lane = 0;
    State state = State::ready;
    const char* what = "";  // it waits for, or polls
    Location at{};
    uint64_t polled_at = 0;  // progress when it last polled
    unsigned registers = 0;  // of setmaxnreg; 0: as at the launch
};

// What the launcher and this library tell each other; laid out alike in records.py.
struct Report {
    int32_t failed;
    int32_t block;
    int32_t thread;
    int32_t line;
    char file[512];
    char message[3572];
};
static_assert(sizeof(Report) == 4100, "records.py has the same layout");

struct Allocation {
    uint64_t address;
    uint64_t bytes;
};

struct Launch {
    uint32_t grid[3];
    uint32_t threads;
    uint64_t shared_bytes;
    const void* arguments;
    uint64_t argument_bytes;
    uint64_t allocation_count;
    const Allocation* allocations;
    uint32_t schedule;  // a Schedule
    uint32_t seed;
};
static_assert(sizeof(Launch) == 64, "records.py has the same layout");

enum class Schedule : uint32_t { forward, reverse, random };

struct Block {
    const Kernel* kernel = nullptr;
    const Launch* launch = nullptr;
    Report* report = nullptr;
    unsigned thread_count = 0;
    unsigned linear = 0;
    unsigned finished = 0;
    unsigned free_registers = 0;
    uint64_t progress = 0;  // grows with whatever may let a waiting thread go on
};

extern Block block;
extern std::vector<Thread> threads;
extern Thread* current;  // null while no thread runs

// schedule.cpp
void prepare_threads(unsigned count);
void run_block();
// Notes an error at the running thread, if one runs, and returns: for who is not on its stack.
void fail_at_thread(const char* format, ...) __attribute__((format(printf, 1, 2)));
void wait(const char* what, Location at);  // until release
void release(Thread& thread);              // the caller goes on running
void release_in_order(std::vector<Thread*>& waiting);
void take_turn();  // after a release that named the running thread too

// warp.cpp, barrier.cpp: forget the last block; what to do when a thread ends.
void reset_warps();
void reset_barriers();
void reset_products();
void thread_left_warp(const Thread& thread);
uint32_t exited_lanes(unsigned warp);
void describe_mbarriers(char* text, uint64_t bytes);
void finish_thread_copies(Thread& thread);
void finish_thread_products(Thread& thread);

// shared.cpp
void allocate_shared(const Kernel& kernel, uint64_t dynamic_bytes);
void poison_shared();
void check_shared_guards();
void release_shared();
unsigned char* shared_pointer(uint32_t address);  // null where nothing lies

// Is any of these bytes forbidden? Always false in a build without sanitizers.
bool is_poisoned(const void* pointer, uint64_t bytes);

}  // namespace emulator
