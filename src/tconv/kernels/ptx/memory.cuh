// Loads and stores that C++ cannot express: read-only, streaming, by a predicate, vectors.
//
// NOTE: `nc` loads are for memory that nothing writes while the kernel runs. The compiler may move
// them freely. A vector's address is a multiple of its size.
#pragma once

#include <ptx/shared_address.cuh>

namespace ptx {

TCONV_DEVICE float ld_global_nc(const float* address) {
    float value;
    asm("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(address));
    return value;
}

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
TCONV_STORE_1(st_global_cs, "st.global.cs.b32", uint32_t, "r")
TCONV_STORE_1(st_global_cs, "st.global.cs.b16", uint16_t, "h")
TCONV_STORE_2(st_global_cs_v2, "st.global.cs.v2.f32", float, float2, "f")
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
