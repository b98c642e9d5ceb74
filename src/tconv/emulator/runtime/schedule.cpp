// The scheduler: which thread of the block runs next, and the report of a deadlock.
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "state.h"

namespace emulator {

uint3 thread_index, block_index, block_dim, grid_dim;

Block block;
std::vector<Thread> threads;
Thread* current = nullptr;

namespace {

constexpr unsigned stale_polls = 256;  // rounds without progress that count as a livelock

Fiber main_fiber;
std::vector<Thread*> ready;  // a ring with a place for each thread
std::size_t ready_first, ready_count;
std::vector<Thread*> pollers;
unsigned stale_rounds;
uint64_t stale_progress;
uint64_t random_state;

Schedule schedule() { return static_cast<Schedule>(block.launch->schedule); }

uint64_t next_random() {  // xorshift64*
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 0x2545f4914f6cdd1dull;
}

void push_ready(Thread& thread) {
    thread.state = State::ready;
    ready[(ready_first + ready_count++) % ready.size()] = &thread;
}

Thread* pop_ready() {
    if (schedule() == Schedule::random) {
        std::size_t pick = (ready_first + next_random() % ready_count) % ready.size();
        Thread* other = ready[ready_first];
        ready[ready_first] = ready[pick];
        ready[pick] = other;
    }
    Thread* thread = ready[ready_first];
    ready_first = (ready_first + 1) % ready.size();
    --ready_count;
    return thread;
}

const char* base_name(const char* path) {
    const char* slash = std::strrchr(path, '/');
    return slash != nullptr ? slash + 1 : path;
}

bool same_situation(const Thread& a, const Thread& b) {
    if (a.state == State::finished || b.state == State::finished) return a.state == b.state;
    return a.at.line == b.at.line && std::strcmp(a.what, b.what) == 0 &&
           std::strcmp(a.at.file, b.at.file) == 0;
}

// "threads 0-31, 64-95 wait for X at file:line; threads ... have exited"
void describe(char* text, std::size_t bytes) {
    std::vector<bool> told(block.thread_count, false);
    std::size_t used = 0;
    auto add = [&](const char* format, auto... values) {
        if (used >= bytes) return;
        int count = std::snprintf(text + used, bytes - used, format, values...);
        used += count > 0 ? static_cast<std::size_t>(count) : 0;
    };
    for (unsigned first = 0; first < block.thread_count; ++first) {
        if (told[first]) continue;
        add(used ? "; threads" : "threads");
        const char* comma = " ";
        for (unsigned begin = first; begin < block.thread_count; ++begin) {
            if (told[begin] || !same_situation(threads[first], threads[begin])) continue;
            unsigned end = begin;
            while (end + 1 < block.thread_count &&
                   same_situation(threads[first], threads[end + 1])) {
                ++end;
            }
            for (unsigned i = begin; i <= end; ++i) told[i] = true;
            if (begin == end) {
                add("%s%u", comma, begin);
            } else {
                add("%s%u-%u", comma, begin, end);
            }
            comma = ", ";
            begin = end;
        }
        if (threads[first].state == State::finished) {
            add(" have exited");
        } else {
            add(" wait for %s at %s:%d", threads[first].what, base_name(threads[first].at.file),
                threads[first].at.line);
        }
    }
}

void record(const Thread* culprit, Location at, const char* message) {
    Report& report = *block.report;
    report.failed = 1;
    report.thread = culprit != nullptr ? static_cast<int32_t>(culprit->linear) : -1;
    report.line = at.line;
    std::snprintf(report.file, sizeof report.file, "%s", at.file != nullptr ? at.file : "");
    std::snprintf(report.message, sizeof report.message, "%s", message);
}

// The threads stop where they are. The next launch restarts them.
[[noreturn]] void abandon() {
    Fiber nowhere;
    switch_fiber(nowhere, main_fiber);
    __builtin_unreachable();
}

[[noreturn]] void report_stuck() {
    const Thread* culprit = nullptr;
    bool barrier = false;
    bool only_barriers = true;
    for (const Thread& thread : threads) {
        if (thread.linear >= block.thread_count || thread.state == State::finished) continue;
        if (culprit == nullptr) culprit = &thread;
        bool at_barrier = std::strstr(thread.what, "__sync") != nullptr ||
                          std::strstr(thread.what, "bar.sync") != nullptr;
        barrier |= at_barrier;
        only_barriers &= at_barrier;
    }
    char where[2000], lacking[1000];
    describe(where, sizeof where);
    describe_mbarriers(lacking, sizeof lacking);
    char message[sizeof Report::message];
    const char* kind = barrier && only_barriers
                           ? "divergent barrier: not all of its threads can reach it"
                           : "deadlock: no thread can go on";
    std::snprintf(message, sizeof message, "%s: %s%s", kind, where, lacking);
    record(culprit, culprit->at, message);
    abandon();
}

// Lets polling threads run again, unless all have polled too often without progress.
void wake_pollers() {
    if (block.progress != stale_progress) {
        stale_progress = block.progress;
        stale_rounds = 0;
    } else if (++stale_rounds > stale_polls) {
        report_stuck();
    }
    for (Thread* thread : pollers) push_ready(*thread);
    pollers.clear();
}

// Switches from the running thread to the next. Returns when the thread runs again.
void reschedule() {
    if (ready_count == 0) {
        if (pollers.empty()) report_stuck();
        wake_pollers();
    }
    Thread* from = current;
    Thread* to = pop_ready();
    if (to == from) return;
    current = to;
    block.report->thread = static_cast<int32_t>(to->linear);
    thread_index = to->index;
    switch_fiber(from->fiber, to->fiber);
}

void thread_main() {
    entered(current->fiber);
    for (;;) {
        block.kernel->entry(block.launch->arguments);
        Thread& self = *current;
        self.at = {};
        finish_thread_copies(self);
        finish_thread_products(self);
        self.state = State::finished;
        ++block.finished;
        ++block.progress;
        thread_left_warp(self);
        if (block.finished == block.thread_count) {
            current = nullptr;
            switch_fiber(self.fiber, main_fiber);
        } else {
            reschedule();
        }
        // The next block begins here.
    }
}

}  // namespace

void fail(Location at, const char* format, ...) {
    char message[sizeof Report::message];
    va_list values;
    va_start(values, format);
    std::vsnprintf(message, sizeof message, format, values);
    va_end(values);
    record(current, at, message);
    abandon();
}

void fail_at_thread(const char* format, ...) {
    char message[sizeof Report::message];
    va_list values;
    va_start(values, format);
    std::vsnprintf(message, sizeof message, format, values);
    va_end(values);
    record(current, {nullptr, 0}, message);
}

void wait(const char* what, Location at) {
    current->state = State::waiting;
    current->what = what;
    current->at = at;
    reschedule();
}

void release(Thread& thread) {
    ++block.progress;
    push_ready(thread);
}

void release_in_order(std::vector<Thread*>& waiting) {
    ++block.progress;
    // Threads arrive in any order. The schedule decides in which order they continue.
    std::vector<Thread*>& order = waiting;
    for (std::size_t i = 1; i < order.size(); ++i) {
        Thread* thread = order[i];
        std::size_t j = i;
        for (; j > 0 && order[j - 1]->linear > thread->linear; --j) order[j] = order[j - 1];
        order[j] = thread;
    }
    if (schedule() == Schedule::reverse) {
        for (std::size_t i = order.size(); i-- > 0;) push_ready(*order[i]);
    } else {
        for (Thread* thread : order) push_ready(*thread);
    }
    waiting.clear();
}

void poll(const char* what, Location at) {
    current->state = State::polling;
    current->what = what;
    current->at = at;
    current->polled_at = block.progress;
    pollers.push_back(current);
    reschedule();
}

void run_block() {
    block.finished = block.free_registers = 0;
    block.progress = 0;
    ready_first = ready_count = 0;
    stale_rounds = 0;
    pollers.clear();
    std::vector<Thread*> order;
    for (unsigned i = 0; i < block.thread_count; ++i) {
        threads[i].registers = 0;
        order.push_back(&threads[i]);
    }
    release_in_order(order);
    current = pop_ready();
    block.report->thread = static_cast<int32_t>(current->linear);
    thread_index = current->index;
    switch_fiber(main_fiber, current->fiber);
    current = nullptr;
}

void prepare_threads(unsigned count) {
    // NOTE: threads keep their addresses and stacks between launches.
    if (threads.capacity() < 1024) threads.reserve(1024);
    while (threads.size() < count) threads.emplace_back();
    ready.assign(count, nullptr);
    random_state = block.launch->seed * 0x9e3779b97f4a7c15ull + 0x1234567ull;
    for (unsigned i = 0; i < count; ++i) {
        Thread& thread = threads[i];
        thread.index = {i, 0, 0};
        thread.linear = i;
        thread.warp = i / 32;
        thread.lane = i % 32;
        prepare(thread.fiber, thread_main);
    }
}

void take_turn() { reschedule(); }

unsigned lane_index() { return current->lane; }

}  // namespace emulator
