// Tensor copies on the host. The map is the emulator's own description of a tensor.
#pragma once

#include <ptx/bulk.cuh>

namespace ptx {

struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

inline void prefetch_tensormap(const TensorMap* map,
                               emulator::Location at = emulator::Location::here()) {
    emulator::check_tensor_map_prefetch(map, at);
}

inline void cp_async_bulk_tensor_3d_global_to_shared(
    void* destination, const TensorMap* map, int c0, int c1, int c2, uint64_t* barrier,
    emulator::Location at = emulator::Location::here()) {
    const int coordinates[] = {c0, c1, c2};
    emulator::tensor_load(destination, map, 3, coordinates, barrier, at);
}

inline void cp_async_bulk_tensor_4d_global_to_shared(
    void* destination, const TensorMap* map, int c0, int c1, int c2, int c3, uint64_t* barrier,
    emulator::Location at = emulator::Location::here()) {
    const int coordinates[] = {c0, c1, c2, c3};
    emulator::tensor_load(destination, map, 4, coordinates, barrier, at);
}

inline void cp_async_bulk_tensor_5d_global_to_shared(
    void* destination, const TensorMap* map, int c0, int c1, int c2, int c3, int c4,
    uint64_t* barrier, emulator::Location at = emulator::Location::here()) {
    const int coordinates[] = {c0, c1, c2, c3, c4};
    emulator::tensor_load(destination, map, 5, coordinates, barrier, at);
}

inline void cp_async_bulk_tensor_5d_shared_to_global(
    const TensorMap* map, int c0, int c1, int c2, int c3, int c4, const void* source,
    emulator::Location at = emulator::Location::here()) {
    const int coordinates[] = {c0, c1, c2, c3, c4};
    emulator::tensor_store(map, 5, coordinates, source, at);
}

}  // namespace ptx
