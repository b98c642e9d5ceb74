// Loads and stores on the host: bounds and alignment are checked.
#pragma once

#include <ptx/shared_address.cuh>

namespace emulator {

template <typename Vector>
inline Vector load_global(const void* address, const char* what, Location at) {
    check_global(address, sizeof(Vector), sizeof(Vector), what, at);
    return *static_cast<const Vector*>(address);
}

template <typename Vector>
inline void store_global(void* address, Vector value, const char* what, Location at) {
    check_global(address, sizeof(Vector), sizeof(Vector), what, at);
    *static_cast<Vector*>(address) = value;
}

}  // namespace emulator

namespace ptx {

inline float ld_global_nc(const float* address,
                          emulator::Location at = emulator::Location::here()) {
    return emulator::load_global<float>(address, "ld_global_nc", at);
}

#define EMULATOR_LOAD_IF(name, scalar, vector)                                        \
    inline vector name(const scalar* address, bool exists,                            \
                       emulator::Location at = emulator::Location::here()) {          \
        return exists ? emulator::load_global<vector>(address, #name, at) : vector{}; \
    }

EMULATOR_LOAD_IF(ld_global_nc_if, uint16_t, uint16_t)
EMULATOR_LOAD_IF(ld_global_nc_if, uint32_t, uint32_t)
EMULATOR_LOAD_IF(ld_global_nc_v2_if, uint32_t, uint2)
EMULATOR_LOAD_IF(ld_global_nc_v4_if, uint32_t, uint4)

#undef EMULATOR_LOAD_IF

#define EMULATOR_STORE(name, scalar, vector)                               \
    inline void name(scalar* address, vector value,                        \
                     emulator::Location at = emulator::Location::here()) { \
        emulator::store_global<vector>(address, value, #name, at);         \
    }

EMULATOR_STORE(st_global_v2, float, float2)
EMULATOR_STORE(st_global_v4, float, float4)
EMULATOR_STORE(st_global_cs, float, float)
EMULATOR_STORE(st_global_cs, uint32_t, uint32_t)
EMULATOR_STORE(st_global_cs, uint16_t, uint16_t)
EMULATOR_STORE(st_global_cs_v2, float, float2)
EMULATOR_STORE(st_global_cs_v2, uint32_t, uint2)
EMULATOR_STORE(st_global_cs_v4, float, float4)
EMULATOR_STORE(st_global_cs_v4, uint32_t, uint4)

#undef EMULATOR_STORE

inline void st_global_cs_if(float* address, float value, bool exists,
                            emulator::Location at = emulator::Location::here()) {
    if (exists) st_global_cs(address, value, at);
}

inline void st_global_cs_v2_if(float* address, float2 value, bool exists,
                               emulator::Location at = emulator::Location::here()) {
    if (exists) st_global_cs_v2(address, value, at);
}

inline void st_global_cs_v4_if(float* address, float4 value, bool exists,
                               emulator::Location at = emulator::Location::here()) {
    if (exists) st_global_cs_v4(address, value, at);
}

inline uint4 ld_shared_v4(const uint32_t* address,
                          emulator::Location at = emulator::Location::here()) {
    emulator::check_shared(address, 16, 16, "ld_shared_v4", at);
    return *reinterpret_cast<const uint4*>(address);
}

#define EMULATOR_STORE_SHARED(name, scalar, vector)                                 \
    inline void name(scalar* address, vector value,                                 \
                     emulator::Location at = emulator::Location::here()) {          \
        emulator::check_shared(address, sizeof(vector), sizeof(vector), #name, at); \
        *reinterpret_cast<vector*>(address) = value;                                \
    }

EMULATOR_STORE_SHARED(st_shared_v4, float, float4)
EMULATOR_STORE_SHARED(st_shared_v4, uint32_t, uint4)

#undef EMULATOR_STORE_SHARED

}  // namespace ptx
