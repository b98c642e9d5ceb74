// Copies that the hardware makes on its own time: what they share.
#pragma once

#include "state.h"

namespace emulator {

// Copies bytes whatever the sanitizer thinks of them: shared memory has red zones inside.
void raw_copy(void* to, const void* from, uint64_t bytes);
void raw_fill(void* to, unsigned char value, uint64_t bytes);

// shared.cpp
struct Region {
    unsigned char* begin;
    uint64_t bytes;
};
Region dynamic_region();
Region static_region();

// The destination of a copy that is under way: whoever reads it gets NaN, or a report.
void mark_pending(unsigned char* pointer, uint64_t bytes);
void mark_delivered(unsigned char* pointer, uint64_t bytes);

// Reads and writes of shared memory by the async proxy.
void async_read(void* to, const unsigned char* from, uint64_t bytes, const char* what, Location at);
void async_write(unsigned char* to, const void* from, uint64_t bytes);
void reset_views();

// A copy into shared memory whose bytes an mbarrier counts.
struct Transfer {
    unsigned char* destination;
    uint64_t bytes;
    const unsigned char* source;  // of a bulk copy
    const struct TensorMapRecord* map;  // or of a tensor copy, from these coordinates
    int32_t coordinates[5];
    Location at;
};
void begin_transfer(const Transfer& transfer);
void deliver(const Transfer& transfer);

// A thread's copy into shared memory, which the thread waits for or an mbarrier arrives for.
struct Copy {
    unsigned char* destination;
    const unsigned char* source;
    uint32_t bytes;
    uint32_t source_bytes;  // the rest becomes zero
    uint32_t group;
};
void land(const Copy& copy);

// mbarrier.cpp: the transfer lands when somebody sees the barrier's phase complete, the copies and
// their arrival come when somebody looks at it.
void queue_transfer(uint64_t* barrier, const Transfer& transfer);
void queue_arrival(uint64_t* barrier, std::vector<Copy> copies, Location at);
void reset_mbarriers();

// tensor_map.cpp
void check_tensor_map(const struct TensorMapRecord& map, unsigned rank, const char* what,
                      Location at);

void reset_copies();

}  // namespace emulator
