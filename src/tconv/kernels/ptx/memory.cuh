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
#define TCONV_LOAD_IF(name, type, values, flag, zeros, instruction, ...)      \
    TCONV_DEVICE type name(const values* address, bool exists) {              \
        type value;                                                           \
        asm("{\n.reg .pred exists;\nsetp.ne.u32 exists, " flag ", 0;\n" zeros \
            "@exists ld.global.nc." instruction ";\n}"                        \
            : __VA_ARGS__                                                     \
            : "l"(address), "r"(uint32_t(exists)));                           \
        return value;                                                         \
    }
#define TCONV_ZERO(n) "mov.b32 %" #n ", 0;\n"

TCONV_LOAD_IF(ld_global_nc_if, uint16_t, uint16_t, "%2", "mov.b16 %0, 0;\n", "b16 %0, [%1]",
              "=&h"(value))
TCONV_LOAD_IF(ld_global_nc_if, uint32_t, uint32_t, "%2", TCONV_ZERO(0), "b32 %0, [%1]",
              "=&r"(value))
TCONV_LOAD_IF(ld_global_nc_v2_if, uint2, uint32_t, "%3", TCONV_ZERO(0) TCONV_ZERO(1),
              "v2.b32 {%0, %1}, [%2]", "=&r"(value.x), "=&r"(value.y))
TCONV_LOAD_IF(ld_global_nc_v4_if, uint4, uint32_t, "%5",
              TCONV_ZERO(0) TCONV_ZERO(1) TCONV_ZERO(2) TCONV_ZERO(3),
              "v4.b32 {%0, %1, %2, %3}, [%4]", "=&r"(value.x), "=&r"(value.y), "=&r"(value.z),
              "=&r"(value.w))

#undef TCONV_LOAD_IF
#undef TCONV_ZERO

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
#define TCONV_STORE_IF(name, type, flag, instruction, ...)                            \
    TCONV_DEVICE void name(float* address, type value, bool exists) {                 \
        asm volatile("{\n.reg .pred exists;\nsetp.ne.u32 exists, " flag               \
                     ", 0;\n@exists st.global.cs." instruction ";\n}" ::"l"(address), \
                     __VA_ARGS__, "r"(uint32_t(exists))                               \
                     : "memory");                                                     \
    }

TCONV_STORE_IF(st_global_cs_if, float, "%2", "f32 [%0], %1", "f"(value))
TCONV_STORE_IF(st_global_cs_v2_if, float2, "%3", "v2.f32 [%0], {%1, %2}", "f"(value.x),
               "f"(value.y))
TCONV_STORE_IF(st_global_cs_v4_if, float4, "%5", "v4.f32 [%0], {%1, %2, %3, %4}", "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w))

#undef TCONV_STORE_IF

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
