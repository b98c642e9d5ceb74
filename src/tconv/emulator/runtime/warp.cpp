// Collectives of a warp. Each lane brings an operand, and the last to arrive computes.
#include <cstring>

#include "state.h"

namespace emulator {
namespace {

struct Meeting {
    uint32_t mask = 0;  // 0: free
    uint32_t arrived = 0;
    const char* what = "";
    Compute compute = nullptr;
    Location at{};
    void* operands[32];
};

struct Warp {
    uint32_t exited = 0;
    std::vector<Meeting> meetings;
    std::vector<Thread*> leaving;
};

std::vector<Warp> warps;

// All lanes have arrived: computes, and lets them continue.
void hold(Warp& warp, Meeting& meeting, unsigned warp_index, Location at) {
    uint32_t lanes = meeting.arrived;
    for (unsigned lane = 0; lane < 32; ++lane) {
        if ((lanes >> lane & 1u) == 0) meeting.operands[lane] = nullptr;
    }
    if (meeting.compute != nullptr) meeting.compute(meeting.operands, lanes, at);
    meeting.mask = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (lanes >> lane & 1u) warp.leaving.push_back(&threads[warp_index * 32 + lane]);
    }
    release_in_order(warp.leaving);
}

}  // namespace

void collective(uint32_t mask, const char* what, void* operand, Compute compute, Location at) {
    Warp& warp = warps[current->warp];
    if ((mask >> current->lane & 1u) == 0) {
        fail(at, "%s: lane %u is not in its own mask 0x%08x", what, current->lane, mask);
    }
    // NOTE: overlapping masks are no error yet: a lane that waits elsewhere may still arrive.
    Meeting* meeting = nullptr;
    Meeting* spare = nullptr;
    for (Meeting& other : warp.meetings) {
        if (other.mask == 0) {
            if (spare == nullptr) spare = &other;
        } else if (other.mask == mask) {
            meeting = &other;
            break;
        }
    }
    if (meeting == nullptr) {
        if (spare == nullptr) {
            fail(at, "%s: more groups of lanes wait than a warp has lanes", what);
        }
        meeting = spare;
        meeting->mask = mask;
        meeting->arrived = 0;
        meeting->what = what;
        meeting->compute = compute;
        meeting->at = at;
    } else if (std::strcmp(meeting->what, what) != 0) {
        fail(at, "%s, but other lanes of the warp wait in %s at %s:%d", what, meeting->what,
             meeting->at.file, meeting->at.line);
    }
    meeting->operands[current->lane] = operand;
    meeting->arrived |= 1u << current->lane;
    if (meeting->arrived == (mask & ~warp.exited)) {
        current->what = what;
        current->at = at;
        hold(warp, *meeting, current->warp, at);
        take_turn();
    } else {
        wait(what, at);
    }
}

void thread_left_warp(const Thread& thread) {
    Warp& warp = warps[thread.warp];
    warp.exited |= 1u << thread.lane;
    for (Meeting& meeting : warp.meetings) {
        if (meeting.mask != 0 && meeting.arrived == (meeting.mask & ~warp.exited)) {
            hold(warp, meeting, thread.warp, meeting.at);
        }
    }
}

void reset_warps() {
    warps.resize((block.thread_count + 31) / 32);
    for (Warp& warp : warps) {
        warp.exited = 0;
        warp.meetings.assign(32, Meeting());
        warp.leaving.clear();
    }
    if (block.thread_count % 32 != 0) {
        warps.back().exited = ~((1u << block.thread_count % 32) - 1u);
    }
}

uint32_t exited_lanes(unsigned warp) { return warps[warp].exited; }

void warp_barrier(uint32_t mask, Location at) {
    collective(mask, "__syncwarp()", nullptr, nullptr, at);
}

namespace {

struct Vote {
    bool predicate;
    uint32_t result;
};

void compute_vote(void* const (&operands)[32], uint32_t, Location) {
    uint32_t result = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
        auto* vote = static_cast<Vote*>(operands[lane]);
        if (vote != nullptr && vote->predicate) result |= 1u << lane;
    }
    for (void* operand : operands) {
        if (operand != nullptr) static_cast<Vote*>(operand)->result = result;
    }
}

struct ShuffleOperand {
    uint64_t value;
    int source;  // a lane
    uint64_t result;
};

void compute_shuffle(void* const (&operands)[32], uint32_t, Location) {
    for (void* operand : operands) {
        if (operand == nullptr) continue;
        auto* own = static_cast<ShuffleOperand*>(operand);
        auto* source = static_cast<ShuffleOperand*>(operands[own->source]);
        // A lane that does not take part has an undefined value.
        own->result = source != nullptr ? source->value : ~uint64_t{0};
    }
}

}  // namespace

uint32_t ballot(const char* what, uint32_t mask, bool predicate, Location at) {
    Vote vote = {predicate, 0};
    collective(mask, what, &vote, compute_vote, at);
    return vote.result;
}

uint64_t shuffle(Shuffle kind, uint32_t mask, uint64_t value, uint32_t operand, int width,
                 Location at) {
    static const char* const names[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_down_sync",
                                        "__shfl_xor_sync"};
    const char* name = names[static_cast<int>(kind)];
    if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
        fail(at, "%s: the width is a power of two up to 32, got %d", name, width);
    }
    int lane = static_cast<int>(current->lane), first = lane & ~(width - 1);
    int last = first + width - 1;
    int source = lane;
    int delta = static_cast<int>(operand & 31u);
    switch (kind) {
        case Shuffle::index:
            source = first | (delta & (width - 1));
            break;
        case Shuffle::up:
            source = lane - delta >= first ? lane - delta : lane;
            break;
        case Shuffle::down:
            source = lane + delta <= last ? lane + delta : lane;
            break;
        case Shuffle::exclusive_or:
            source = (lane ^ delta) <= last ? lane ^ delta : lane;
            break;
    }
    ShuffleOperand own = {value, source, 0};
    collective(mask, name, &own, compute_shuffle, at);
    return own.result;
}

}  // namespace emulator
