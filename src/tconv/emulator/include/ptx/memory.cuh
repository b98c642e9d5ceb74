// Loads and stores on the host: hints do nothing, bounds and alignment are checked.
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

#define EMULATOR_LOAD(name, scalar, vector)                                  \
    inline vector name(const scalar* address,                                \
                       emulator::Location at = emulator::Location::here()) { \
        return emulator::load_global<vector>(address, #name, at);            \
    }

EMULATOR_LOAD(ld_global_nc, float, float)
EMULATOR_LOAD(ld_global_nc, double, double)
EMULATOR_LOAD(ld_global_nc, uint32_t, uint32_t)
EMULATOR_LOAD(ld_global_nc, uint16_t, uint16_t)
EMULATOR_LOAD(ld_global_nc_v2, float, float2)
EMULATOR_LOAD(ld_global_nc_v2, double, double2)
EMULATOR_LOAD(ld_global_nc_v2, uint32_t, uint2)
EMULATOR_LOAD(ld_global_nc_v4, float, float4)
EMULATOR_LOAD(ld_global_nc_v4, uint32_t, uint4)
EMULATOR_LOAD(ld_global_nc_L1_no_allocate_v4, float, float4)
EMULATOR_LOAD(ld_global_nc_L1_no_allocate_v4, uint32_t, uint4)
EMULATOR_LOAD(ld_global_nc_L2_256B_v4, float, float4)
EMULATOR_LOAD(ld_global_nc_L2_256B_v4, uint32_t, uint4)

#undef EMULATOR_LOAD

#define EMULATOR_LOAD_IF(name, load, scalar, vector)                         \
    inline vector name(const scalar* address, bool exists,                   \
                       emulator::Location at = emulator::Location::here()) { \
        return exists ? load(address, at) : vector{};                        \
    }

EMULATOR_LOAD_IF(ld_global_nc_if, ld_global_nc, uint16_t, uint16_t)
EMULATOR_LOAD_IF(ld_global_nc_if, ld_global_nc, uint32_t, uint32_t)
EMULATOR_LOAD_IF(ld_global_nc_v2_if, ld_global_nc_v2, uint32_t, uint2)
EMULATOR_LOAD_IF(ld_global_nc_v4_if, ld_global_nc_v4, uint32_t, uint4)

#undef EMULATOR_LOAD_IF

inline uint64_t createpolicy_fractional_L2_evict_first() { return 0; }
inline uint64_t createpolicy_fractional_L2_evict_last() { return 0; }

inline float4 ld_global_nc_L2_hint_v4(const float* address, uint64_t,
                                      emulator::Location at = emulator::Location::here()) {
    return emulator::load_global<float4>(address, "ld_global_nc_L2_hint_v4", at);
}

inline uint4 ld_global_nc_L2_hint_v4(const uint32_t* address, uint64_t,
                                     emulator::Location at = emulator::Location::here()) {
    return emulator::load_global<uint4>(address, "ld_global_nc_L2_hint_v4", at);
}

#define EMULATOR_STORE(name, scalar, vector)                               \
    inline void name(scalar* address, vector value,                        \
                     emulator::Location at = emulator::Location::here()) { \
        emulator::store_global<vector>(address, value, #name, at);         \
    }

EMULATOR_STORE(st_global_v2, float, float2)
EMULATOR_STORE(st_global_v4, float, float4)
EMULATOR_STORE(st_global_cs, float, float)
EMULATOR_STORE(st_global_cs, double, double)
EMULATOR_STORE(st_global_cs, uint32_t, uint32_t)
EMULATOR_STORE(st_global_cs, uint16_t, uint16_t)
EMULATOR_STORE(st_global_cs_v2, float, float2)
EMULATOR_STORE(st_global_cs_v2, double, double2)
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

inline void st_global_L2_hint_v4(float* address, float4 value, uint64_t,
                                 emulator::Location at = emulator::Location::here()) {
    emulator::store_global<float4>(address, value, "st_global_L2_hint_v4", at);
}

#define EMULATOR_LOAD_SHARED(name, scalar, vector)                                  \
    inline vector name(const scalar* address,                                       \
                       emulator::Location at = emulator::Location::here()) {        \
        emulator::check_shared(address, sizeof(vector), sizeof(vector), #name, at); \
        return *reinterpret_cast<const vector*>(address);                           \
    }
#define EMULATOR_STORE_SHARED(name, scalar, vector)                                 \
    inline void name(scalar* address, vector value,                                 \
                     emulator::Location at = emulator::Location::here()) {          \
        emulator::check_shared(address, sizeof(vector), sizeof(vector), #name, at); \
        *reinterpret_cast<vector*>(address) = value;                                \
    }

EMULATOR_LOAD_SHARED(ld_shared_v4, float, float4)
EMULATOR_LOAD_SHARED(ld_shared_v4, uint32_t, uint4)
EMULATOR_STORE_SHARED(st_shared_v4, float, float4)
EMULATOR_STORE_SHARED(st_shared_v4, uint32_t, uint4)

#undef EMULATOR_LOAD_SHARED
#undef EMULATOR_STORE_SHARED

}  // namespace ptx
