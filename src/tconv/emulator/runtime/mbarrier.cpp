// mbarriers: arrivals and bytes of the current phase, and the threads that wait for its end.
//
// A transfer lands as late as the rules allow: when a thread tests a barrier whose arrivals are
// complete. Until then its destination holds NaN.
#include <cstdio>
#include <cstring>
#include <utility>

#include "copies.h"

namespace emulator {
namespace {

constexpr uint32_t most_count = (1u << 20) - 1;

struct Mbarrier {
    uint64_t* address;
    uint32_t expected;  // arrivals of each phase
    uint32_t missing;   // arrivals of this phase
    int64_t bytes;      // still to come in this phase
    uint32_t phase;
    std::vector<Transfer> transfers;
    std::vector<Thread*> waiting;
    std::vector<std::vector<Copy>> arriving;  // arrivals, each after a thread's copies
};

std::vector<Mbarrier*> barriers;

// Stands in shared memory for the hardware's state. A kernel must not change it.
uint64_t seal(const uint64_t* address) {
    return 0x6d62617272696572ull ^ reinterpret_cast<uintptr_t>(address) * 0x9e3779b97f4a7c15ull;
}

Mbarrier* find(const uint64_t* address) {
    for (Mbarrier* barrier : barriers) {
        if (barrier->address == address) return barrier;
    }
    return nullptr;
}

Mbarrier& get(uint64_t* address, const char* what, Location at) {
    check_shared(address, 8, 8, what, at);
    Mbarrier* barrier = find(address);
    if (barrier == nullptr) {
        fail(at, "%s: the mbarrier at shared address 0x%x is not initialised", what,
             shared_address(address, at));
    }
    if (*address != seal(address)) {
        fail(at, "%s: something wrote over the mbarrier at shared address 0x%x", what,
             shared_address(address, at));
    }
    return *barrier;
}

void complete_phase(Mbarrier& barrier) {
    if (barrier.missing > 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.missing = barrier.expected;
    ++block.progress;
    release_in_order(barrier.waiting);
}

// A thread tests the barrier: ends the phase if it can end.
void observe(Mbarrier& barrier) {
    if (!barrier.arriving.empty()) {
        for (const std::vector<Copy>& copies : barrier.arriving) {
            for (const Copy& copy : copies) land(copy);
        }
        barrier.missing -= static_cast<uint32_t>(barrier.arriving.size());
        barrier.arriving.clear();
        ++block.progress;
        if (barrier.transfers.empty()) complete_phase(barrier);
    }
    if (barrier.missing > 0) return;
    if (!barrier.transfers.empty()) {
        std::vector<Transfer> landing;
        landing.swap(barrier.transfers);
        for (const Transfer& transfer : landing) {
            deliver(transfer);
            barrier.bytes -= static_cast<int64_t>(transfer.bytes);
        }
        ++block.progress;
    }
    complete_phase(barrier);
}

// Arrivals that wait for copies are reserved.
uint32_t free_arrivals(const Mbarrier& barrier) {
    return barrier.missing - static_cast<uint32_t>(barrier.arriving.size());
}

void arrive(Mbarrier& barrier, uint32_t count, const char* what, Location at) {
    if (count > free_arrivals(barrier)) {
        fail(at,
             "%s: more arrivals than the %u of a phase; the mbarrier at shared address 0x%x has "
             "%lld bytes still to come, and nobody has waited for this phase",
             what, barrier.expected, shared_address(barrier.address, at),
             static_cast<long long>(barrier.bytes));
    }
    barrier.missing -= count;
    if (barrier.missing == 0) {
        if (barrier.transfers.empty()) {
            complete_phase(barrier);
        } else if (!barrier.waiting.empty()) {
            observe(barrier);
        }
    }
}

void expect(Mbarrier& barrier, uint32_t bytes, const char* what, Location at) {
    barrier.bytes += bytes;
    if (bytes > most_count || barrier.bytes > most_count) {
        fail(at, "%s: an mbarrier counts up to %u bytes a phase, got %lld", what, most_count,
             static_cast<long long>(barrier.bytes));
    }
}

bool is_over(const Mbarrier& barrier, uint32_t parity) { return (barrier.phase & 1u) != parity; }

}  // namespace

void mbarrier_init(uint64_t* address, uint32_t count, Location at) {
    check_shared(address, 8, 8, "mbarrier.init", at);
    if (count == 0 || count > most_count) {
        fail(at, "mbarrier.init: 1 to %u arrivals, got %u", most_count, count);
    }
    if (find(address) != nullptr) {
        fail(at, "mbarrier.init: there is one already at shared address 0x%x",
             shared_address(address, at));
    }
    barriers.push_back(new Mbarrier{address, count, count, 0, 0, {}, {}, {}});
    *address = seal(address);
}

void mbarrier_inval(uint64_t* address, Location at) {
    Mbarrier* barrier = &get(address, "mbarrier.inval", at);
    if (!barrier->waiting.empty()) fail(at, "mbarrier.inval: threads wait for it");
    for (Mbarrier*& place : barriers) {
        if (place == barrier) {
            place = barriers.back();
            barriers.pop_back();
            break;
        }
    }
    delete barrier;
    raw_fill(address, 0xff, 8);
}

void mbarrier_arrive(uint64_t* address, uint32_t count, Location at) {
    arrive(get(address, "mbarrier.arrive", at), count, "mbarrier.arrive", at);
}

void mbarrier_arrive_expect_tx(uint64_t* address, uint32_t bytes, Location at) {
    const char* what = "mbarrier.arrive.expect_tx";
    Mbarrier& barrier = get(address, what, at);
    expect(barrier, bytes, what, at);
    arrive(barrier, 1, what, at);
}

bool mbarrier_try_wait(uint64_t* address, uint32_t parity, Location at) {
    const char* what = "mbarrier.try_wait";
    Mbarrier& barrier = get(address, what, at);
    if (parity > 1) fail(at, "%s: a parity is 0 or 1, got %u", what, parity);
    observe(barrier);
    if (is_over(barrier, parity)) return true;
    poll(what, at);
    Mbarrier& again = get(address, what, at);
    observe(again);
    return is_over(again, parity);
}

void mbarrier_wait(uint64_t* address, uint32_t parity, Location at) {
    const char* what = "mbarrier.try_wait";
    if (parity > 1) fail(at, "%s: a parity is 0 or 1, got %u", what, parity);
    for (;;) {
        Mbarrier& barrier = get(address, what, at);
        observe(barrier);
        if (is_over(barrier, parity)) return;
        barrier.waiting.push_back(current);
        wait(what, at);
    }
}

void queue_transfer(uint64_t* address, const Transfer& transfer) {
    Mbarrier& barrier = get(address, "an asynchronous copy", transfer.at);
    begin_transfer(transfer);
    barrier.transfers.push_back(transfer);
    if (!barrier.waiting.empty()) observe(barrier);
}

void queue_arrival(uint64_t* address, std::vector<Copy> copies, Location at) {
    const char* what = "cp.async.mbarrier.arrive";
    Mbarrier& barrier = get(address, what, at);
    if (free_arrivals(barrier) == 0) {
        fail(at, "%s: more arrivals than the %u of a phase; the mbarrier at shared address 0x%x",
             what, barrier.expected, shared_address(address, at));
    }
    barrier.arriving.push_back(std::move(copies));
    if (!barrier.waiting.empty()) observe(barrier);
}

// For the report of a deadlock: what the barriers still lack.
void describe_mbarriers(char* text, uint64_t bytes) {
    uint64_t used = 0;
    text[0] = 0;
    for (const Mbarrier* barrier : barriers) {
        if (barrier->waiting.empty() && barrier->bytes == 0) continue;
        int count = std::snprintf(
            text + used, bytes - used,
            "; the mbarrier at shared address 0x%x (phase %u) lacks %u of %u arrivals and %lld "
            "bytes",
            shared_address(barrier->address, {}), barrier->phase, barrier->missing,
            barrier->expected, static_cast<long long>(barrier->bytes));
        if (count < 0 || (used += static_cast<uint64_t>(count)) >= bytes) break;
    }
}

void reset_mbarriers() {
    for (Mbarrier* barrier : barriers) delete barrier;
    barriers.clear();
}

}  // namespace emulator
