// Integers of fixed width, for NVRTC and for the host. Neither includes a standard header.
#pragma once

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;

// The same types as in <stdint.h>, in case a file includes that too.
#ifdef __UINT64_TYPE__
typedef __INT64_TYPE__ int64_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __UINTPTR_TYPE__ uintptr_t;
#else
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
#endif

static_assert(sizeof(int64_t) == 8 && sizeof(uintptr_t) == sizeof(void*) && sizeof(void*) == 8,
              "tconv needs a 64-bit machine whose long has 64 bits");
