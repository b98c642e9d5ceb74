// What the headers of the emulated side need of its runtime (../../runtime), no more.
//
// Every function that can fail takes the caller's place in the source, so that a report names the
// kernel's line and not one in here.
#pragma once

#include <emulator/types.h>
#include <ptx/integers.cuh>

#define EMULATOR_API __attribute__((visibility("default")))

namespace emulator {

struct Location {
    const char* file;
    int line;

    static constexpr Location here(const char* file = __builtin_FILE(),
                                   int line = __builtin_LINE()) {
        return {file, line};
    }
};

// The running thread's place; threadIdx and its like are these.
extern EMULATOR_API uint3 thread_index, block_index, block_dim, grid_dim;

// Ends the launch with an error at the running thread.
[[noreturn]] EMULATOR_API void fail(Location at, const char* format, ...)
    __attribute__((format(printf, 2, 3)));

// Lets other threads run first. A thread that only ever polls is seen to be stuck.
EMULATOR_API void poll(const char* what, Location at);

// setmaxnreg: the running thread keeps so many registers, or has so many when there are enough.
EMULATOR_API void release_registers(unsigned count, Location at);
EMULATOR_API void take_registers(unsigned count, Location at);

EMULATOR_API void block_barrier(Location at);
EMULATOR_API void barrier_sync(unsigned id, unsigned threads, Location at);

// A step that the lanes of `mask` take together. Each brings an operand; the last to arrive runs
// `compute` on all of them, which also writes the results. Absent lanes are null.
using Compute = void (*)(void* const (&operands)[32], uint32_t lanes, Location at);
EMULATOR_API void collective(uint32_t mask, const char* what, void* operand, Compute compute,
                             Location at);

enum class Shuffle { index, up, down, exclusive_or };
EMULATOR_API uint64_t shuffle(Shuffle kind, uint32_t mask, uint64_t value, uint32_t lane, int width,
                              Location at);
EMULATOR_API uint32_t ballot(const char* what, uint32_t mask, bool predicate, Location at);
EMULATOR_API void warp_barrier(uint32_t mask, Location at);
EMULATOR_API unsigned lane_index();

// Shared memory: the block's dynamic array, and the 32-bit addresses that descriptors hold.
EMULATOR_API unsigned char* dynamic_shared();
EMULATOR_API uint32_t shared_address(const void* pointer, Location at);

// Refuse an access that is not wholly inside shared memory (or inside one of the launch's
// allocations, where the launcher was told them), or not aligned.
EMULATOR_API void check_shared(const void* pointer, uint64_t bytes, unsigned alignment,
                               const char* what, Location at);
EMULATOR_API void check_global(const void* pointer, uint64_t bytes, unsigned alignment,
                               const char* what, Location at);

// cp.async, in groups of the thread.
EMULATOR_API void copy_async(void* destination, const void* source, uint32_t bytes,
                             uint32_t source_bytes, Location at);
EMULATOR_API void copy_async_commit();
EMULATOR_API void copy_async_wait(uint32_t left, bool all);
EMULATOR_API void copy_async_mbarrier_arrive(uint64_t* barrier, Location at);

EMULATOR_API void mbarrier_init(uint64_t* barrier, uint32_t count, Location at);
EMULATOR_API void mbarrier_inval(uint64_t* barrier, Location at);
EMULATOR_API void mbarrier_arrive(uint64_t* barrier, uint32_t count, Location at);
EMULATOR_API void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes, Location at);
EMULATOR_API bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity, Location at);
EMULATOR_API void mbarrier_wait(uint64_t* barrier, uint32_t parity, Location at);

EMULATOR_API void fence_proxy_async();

// Bulk and tensor copies; stores are waited for in groups of the thread.
EMULATOR_API void bulk_load(void* destination, const void* source, uint32_t bytes,
                            uint64_t* barrier, Location at);
EMULATOR_API void bulk_commit();
EMULATOR_API void bulk_wait(uint32_t left, bool read);
EMULATOR_API void tensor_load(void* destination, const void* map, unsigned rank,
                              const int* coordinates, uint64_t* barrier, Location at);
EMULATOR_API void tensor_store(const void* map, unsigned rank, const int* coordinates,
                               const void* source, Location at);
EMULATOR_API void check_tensor_map_prefetch(const void* map, Location at);

// Steps of a whole warp on matrices.
EMULATOR_API void load_matrices(const char* what, uint32_t* destination, const void* row, int count,
                                bool transposed, Location at);
EMULATOR_API void store_matrices(const char* what, void* row, const uint32_t* source, int count,
                                 bool transposed, Location at);

enum class MatrixType { tf32, f16, bf16 };
EMULATOR_API void multiply(MatrixType type, int depth, float* d, const uint32_t* a,
                           const uint32_t* b, Location at);

// wgmma: m64nNkK, K being 32 bytes. `a_registers` is null where A lies in shared memory.
struct WarpgroupProduct {
    MatrixType type;
    int columns;
    bool a_transposed, b_transposed;  // as in MN-major
    const uint32_t* a_registers;
    uint64_t a_descriptor, b_descriptor;
    bool accumulate;
};
EMULATOR_API void wgmma_issue(const WarpgroupProduct& product, float* d, Location at);
EMULATOR_API void wgmma_fence();
EMULATOR_API void wgmma_commit();
EMULATOR_API void wgmma_wait(uint32_t left, Location at);

// What a compiled kernel tells the launcher about itself; see emulator/entry.h.
enum class FieldKind : int { value, pointer, tensor_map };

struct Field {
    const char* name;
    uint64_t offset;
    FieldKind kind;
};

struct Kernel {
    const char* name;
    void (*entry)(const void* arguments);
    unsigned char* static_begin;
    unsigned char* static_end;
    uint64_t argument_bytes;
    uint64_t field_count;
    const Field* fields;
};

}  // namespace emulator
