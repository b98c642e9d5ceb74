// Loads and stores that C++ cannot express: read-only, streaming, with a cache hint, vectors.
//
// NOTE: `nc` loads are for memory that nothing writes while the kernel runs. The compiler may move
// them freely. A vector's address is a multiple of its size.
#pragma once

#include <ptx/shared_address.cuh>

namespace ptx {

#define TCONV_LOAD_1(name, instruction, scalar, letter)                   \
    TCONV_DEVICE scalar name(const scalar* address) {                     \
        scalar value;                                                     \
        asm(instruction " %0, [%1];" : "=" letter(value) : "l"(address)); \
        return value;                                                     \
    }
#define TCONV_LOAD_2(name, instruction, scalar, vector, letter) \
    TCONV_DEVICE vector name(const scalar* address) {           \
        vector value;                                           \
        asm(instruction " {%0, %1}, [%2];"                      \
            : "=" letter(value.x), "=" letter(value.y)          \
            : "l"(address));                                    \
        return value;                                           \
    }
#define TCONV_LOAD_4(name, instruction, scalar, vector, letter)                                  \
    TCONV_DEVICE vector name(const scalar* address) {                                            \
        vector value;                                                                            \
        asm(instruction " {%0, %1, %2, %3}, [%4];"                                               \
            : "=" letter(value.x), "=" letter(value.y), "=" letter(value.z), "=" letter(value.w) \
            : "l"(address));                                                                     \
        return value;                                                                            \
    }

TCONV_LOAD_1(ld_global_nc, "ld.global.nc.f32", float, "f")
TCONV_LOAD_1(ld_global_nc, "ld.global.nc.f64", double, "d")
TCONV_LOAD_1(ld_global_nc, "ld.global.nc.b32", uint32_t, "r")
TCONV_LOAD_1(ld_global_nc, "ld.global.nc.b16", uint16_t, "h")
TCONV_LOAD_2(ld_global_nc_v2, "ld.global.nc.v2.f32", float, float2, "f")
TCONV_LOAD_2(ld_global_nc_v2, "ld.global.nc.v2.f64", double, double2, "d")
TCONV_LOAD_2(ld_global_nc_v2, "ld.global.nc.v2.b32", uint32_t, uint2, "r")
TCONV_LOAD_4(ld_global_nc_v4, "ld.global.nc.v4.f32", float, float4, "f")
TCONV_LOAD_4(ld_global_nc_v4, "ld.global.nc.v4.b32", uint32_t, uint4, "r")

// Loads if `exists`, by a predicate, else zeros. A branch would keep loads from being issued
// together.
TCONV_DEVICE uint16_t ld_global_nc_if(const uint16_t* address, bool exists) {
    uint16_t value;
    asm("{\n"
        ".reg .pred exists;\n"
        "setp.ne.u32 exists, %2, 0;\n"
        "mov.b16 %0, 0;\n"
        "@exists ld.global.nc.b16 %0, [%1];\n"
        "}"
        : "=&h"(value)
        : "l"(address), "r"(uint32_t(exists)));
    return value;
}

TCONV_DEVICE uint32_t ld_global_nc_if(const uint32_t* address, bool exists) {
    uint32_t value;
    asm("{\n"
        ".reg .pred exists;\n"
        "setp.ne.u32 exists, %2, 0;\n"
        "mov.b32 %0, 0;\n"
        "@exists ld.global.nc.b32 %0, [%1];\n"
        "}"
        : "=&r"(value)
        : "l"(address), "r"(uint32_t(exists)));
    return value;
}

TCONV_DEVICE uint2 ld_global_nc_v2_if(const uint32_t* address, bool exists) {
    uint2 value;
    asm("{\n"
        ".reg .pred exists;\n"
        "setp.ne.u32 exists, %3, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "@exists ld.global.nc.v2.b32 {%0, %1}, [%2];\n"
        "}"
        : "=&r"(value.x), "=&r"(value.y)
        : "l"(address), "r"(uint32_t(exists)));
    return value;
}

TCONV_DEVICE uint4 ld_global_nc_v4_if(const uint32_t* address, bool exists) {
    uint4 value;
    asm("{\n"
        ".reg .pred exists;\n"
        "setp.ne.u32 exists, %5, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "mov.b32 %2, 0;\n"
        "mov.b32 %3, 0;\n"
        "@exists ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
        : "l"(address), "r"(uint32_t(exists)));
    return value;
}

// For data that is read once: does not evict other data from L1.
TCONV_LOAD_4(ld_global_nc_L1_no_allocate_v4, "ld.global.nc.L1::no_allocate.v4.f32", float, float4,
             "f")
TCONV_LOAD_4(ld_global_nc_L1_no_allocate_v4, "ld.global.nc.L1::no_allocate.v4.b32", uint32_t, uint4,
             "r")

// sm_80: also fetches the rest of the 256 bytes around it into L2.
TCONV_LOAD_4(ld_global_nc_L2_256B_v4, "ld.global.nc.L2::256B.v4.f32", float, float4, "f")
TCONV_LOAD_4(ld_global_nc_L2_256B_v4, "ld.global.nc.L2::256B.v4.b32", uint32_t, uint4, "r")

#undef TCONV_LOAD_1
#undef TCONV_LOAD_2
#undef TCONV_LOAD_4

// sm_80: an L2 policy for the functions that take one.
TCONV_DEVICE uint64_t createpolicy_fractional_L2_evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

TCONV_DEVICE uint64_t createpolicy_fractional_L2_evict_last() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

TCONV_DEVICE float4 ld_global_nc_L2_hint_v4(const float* address, uint64_t policy) {
    float4 value;
    asm("ld.global.nc.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
        : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
        : "l"(address), "l"(policy));
    return value;
}

TCONV_DEVICE uint4 ld_global_nc_L2_hint_v4(const uint32_t* address, uint64_t policy) {
    uint4 value;
    asm("ld.global.nc.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
        : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
        : "l"(address), "l"(policy));
    return value;
}

#define TCONV_STORE_1(name, instruction, scalar, letter)                                 \
    TCONV_DEVICE void name(scalar* address, scalar value) {                              \
        asm volatile(instruction " [%0], %1;" ::"l"(address), letter(value) : "memory"); \
    }
#define TCONV_STORE_2(name, instruction, scalar, vector, letter)                     \
    TCONV_DEVICE void name(scalar* address, vector value) {                          \
        asm volatile(instruction " [%0], {%1, %2};" ::"l"(address), letter(value.x), \
                     letter(value.y)                                                 \
                     : "memory");                                                    \
    }
#define TCONV_STORE_4(name, instruction, scalar, vector, letter)                             \
    TCONV_DEVICE void name(scalar* address, vector value) {                                  \
        asm volatile(instruction " [%0], {%1, %2, %3, %4};" ::"l"(address), letter(value.x), \
                     letter(value.y), letter(value.z), letter(value.w)                       \
                     : "memory");                                                            \
    }

TCONV_STORE_2(st_global_v2, "st.global.v2.f32", float, float2, "f")
TCONV_STORE_4(st_global_v4, "st.global.v4.f32", float, float4, "f")

// Streaming: for data that this kernel does not read again.
TCONV_STORE_1(st_global_cs, "st.global.cs.f32", float, "f")
TCONV_STORE_1(st_global_cs, "st.global.cs.f64", double, "d")
TCONV_STORE_1(st_global_cs, "st.global.cs.b32", uint32_t, "r")
TCONV_STORE_1(st_global_cs, "st.global.cs.b16", uint16_t, "h")
TCONV_STORE_2(st_global_cs_v2, "st.global.cs.v2.f32", float, float2, "f")
TCONV_STORE_2(st_global_cs_v2, "st.global.cs.v2.f64", double, double2, "d")
TCONV_STORE_2(st_global_cs_v2, "st.global.cs.v2.b32", uint32_t, uint2, "r")
TCONV_STORE_4(st_global_cs_v4, "st.global.cs.v4.f32", float, float4, "f")
TCONV_STORE_4(st_global_cs_v4, "st.global.cs.v4.b32", uint32_t, uint4, "r")

#undef TCONV_STORE_1
#undef TCONV_STORE_2
#undef TCONV_STORE_4

// Stores if `exists`, by a predicate. There must be no branch while asynchronous products run.
TCONV_DEVICE void st_global_cs_if(float* address, float value, bool exists) {
    asm volatile(
        "{\n"
        ".reg .pred exists;\n"
        "setp.ne.u32 exists, %2, 0;\n"
        "@exists st.global.cs.f32 [%0], %1;\n"
        "}" ::"l"(address),
        "f"(value), "r"(uint32_t(exists))
        : "memory");
}

TCONV_DEVICE void st_global_cs_v2_if(float* address, float2 value, bool exists) {
    asm volatile(
        "{\n"
        ".reg .pred exists;\n"
        "setp.ne.u32 exists, %3, 0;\n"
        "@exists st.global.cs.v2.f32 [%0], {%1, %2};\n"
        "}" ::"l"(address),
        "f"(value.x), "f"(value.y), "r"(uint32_t(exists))
        : "memory");
}

TCONV_DEVICE void st_global_cs_v4_if(float* address, float4 value, bool exists) {
    asm volatile(
        "{\n"
        ".reg .pred exists;\n"
        "setp.ne.u32 exists, %5, 0;\n"
        "@exists st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};\n"
        "}" ::"l"(address),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(uint32_t(exists))
        : "memory");
}

TCONV_DEVICE void st_global_L2_hint_v4(float* address, float4 value, uint64_t policy) {
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(address),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "l"(policy)
                 : "memory");
}

TCONV_DEVICE float4 ld_shared_v4(const float* address) {
    float4 value;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(cvta_to_shared(address))
                 : "memory");
    return value;
}

TCONV_DEVICE uint4 ld_shared_v4(const uint32_t* address) {
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(cvta_to_shared(address))
                 : "memory");
    return value;
}

TCONV_DEVICE void st_shared_v4(float* address, float4 value) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(cvta_to_shared(address)),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
                 : "memory");
}

TCONV_DEVICE void st_shared_v4(uint32_t* address, uint4 value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(cvta_to_shared(address)),
                 "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

}  // namespace ptx
