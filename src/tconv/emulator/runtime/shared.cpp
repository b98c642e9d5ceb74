// Shared memory of the running block: its address, its first contents, and the bounds of accesses.
#include <cstdlib>
#include <cstring>

#include "copies.h"

#ifdef TCONV_SANITIZE
#include <sanitizer/asan_interface.h>
#endif

namespace emulator {
namespace {

constexpr uint64_t shared_limit = 227 * 1024;  // of the largest GPU
constexpr uint64_t alignment = 1024;           // the period of a 128-byte swizzle
constexpr uint64_t guard_bytes = 4096;
constexpr uint64_t guard_word = 0x5ca1ab1e0ddba11ull;

// On a GPU both lie in one window of 18-bit addresses. The system reserves its first 1024 bytes.
constexpr uint32_t dynamic_address = 1024;
constexpr uint64_t anchor_bytes = 16;  // reserved for the emulator, see emulator/entry.h

unsigned char* memory = nullptr;  // with a guard before and after, where there is no sanitizer
unsigned char* dynamic = nullptr;
uint64_t dynamic_bytes = 0;
unsigned char* static_begin = nullptr;
uint64_t static_bytes = 0;
uint32_t static_address = 0;

bool inside(const unsigned char* pointer, uint64_t bytes, const unsigned char* begin,
            uint64_t size) {
    return pointer >= begin && bytes <= size &&
           static_cast<uint64_t>(pointer - begin) <= size - bytes;
}

}  // namespace

void allocate_shared(const Kernel& kernel, uint64_t bytes) {
    release_shared();
    static_begin = kernel.static_begin;
    static_bytes = static_cast<uint64_t>(kernel.static_end - kernel.static_begin);
    dynamic_bytes = bytes;
#ifdef TCONV_SANITIZE
    void* pointer = nullptr;
    if (posix_memalign(&pointer, alignment, bytes ? bytes : 1) != 0) std::abort();
    memory = dynamic = static_cast<unsigned char*>(pointer);
    if (bytes == 0) __asan_poison_memory_region(dynamic, 1);
#else
    uint64_t padded = (bytes + alignment - 1) / alignment * alignment;
    memory = static_cast<unsigned char*>(std::aligned_alloc(alignment, padded + 2 * guard_bytes));
    if (memory == nullptr) std::abort();
    dynamic = memory + guard_bytes;
    for (uint64_t i = 0; i < guard_bytes; i += 8) {
        std::memcpy(memory + i, &guard_word, 8);
        std::memcpy(dynamic + padded + i, &guard_word, 8);
    }
    std::memset(dynamic + bytes, 0x5c, padded - bytes);
#endif
    static_address = (dynamic_address + static_cast<uint32_t>(bytes) + 1023u) / 1024u * 1024u;
#ifndef TCONV_SANITIZE  // red zones make the static part longer
    if (static_bytes - anchor_bytes + bytes > shared_limit) {
        fail_at_thread(
            "%llu bytes of static and %llu of dynamic shared memory are more than any GPU's %llu",
            (unsigned long long)(static_bytes - anchor_bytes), (unsigned long long)bytes,
            (unsigned long long)shared_limit);
    }
#endif
}

void poison_shared() {
    raw_fill(static_begin, 0xff, static_bytes);
#ifdef TCONV_SANITIZE
    __asan_unpoison_memory_region(dynamic, dynamic_bytes);
#endif
    raw_fill(dynamic, 0xff, dynamic_bytes);
}

void check_shared_guards() {
#ifndef TCONV_SANITIZE
    uint64_t padded = (dynamic_bytes + alignment - 1) / alignment * alignment;
    for (uint64_t i = dynamic_bytes; i < padded; ++i) {
        if (dynamic[i] != 0x5c) {
            fail_at_thread(
                "out of bounds: a thread wrote at byte %llu of %llu bytes of "
                "dynamic shared memory",
                (unsigned long long)i, (unsigned long long)dynamic_bytes);
        }
    }
    for (uint64_t i = 0; i < guard_bytes; i += 8) {
        if (std::memcmp(memory + i, &guard_word, 8) != 0) {
            fail_at_thread(
                "out of bounds: a thread wrote %llu bytes before dynamic shared "
                "memory",
                (unsigned long long)(guard_bytes - i));
        }
        if (std::memcmp(dynamic + padded + i, &guard_word, 8) != 0) {
            fail_at_thread(
                "out of bounds: a thread wrote at byte %llu of %llu bytes of "
                "dynamic shared memory",
                (unsigned long long)(padded + i), (unsigned long long)dynamic_bytes);
        }
    }
#endif
}

void release_shared() {
    std::free(memory);
    memory = dynamic = nullptr;
}

bool is_poisoned([[maybe_unused]] const void* pointer, [[maybe_unused]] uint64_t bytes) {
#ifdef TCONV_SANITIZE
    return __asan_region_is_poisoned(const_cast<void*>(pointer), bytes) != nullptr;
#else
    return false;
#endif
}

Region dynamic_region() { return {dynamic, dynamic_bytes}; }
Region static_region() { return {static_begin, static_bytes}; }

unsigned char* dynamic_shared() { return dynamic; }

uint32_t shared_address(const void* pointer, Location at) {
    auto* byte = static_cast<const unsigned char*>(pointer);
    if (inside(byte, 0, dynamic, dynamic_bytes)) {
        return dynamic_address + static_cast<uint32_t>(byte - dynamic);
    }
    if (inside(byte, 0, static_begin, static_bytes)) {
        return static_address + static_cast<uint32_t>(byte - static_begin);
    }
    fail(at, "%p does not point into shared memory", pointer);
}

unsigned char* shared_pointer(uint32_t address) {
    if (address >= dynamic_address && address - dynamic_address < dynamic_bytes) {
        return dynamic + (address - dynamic_address);
    }
    if (address >= static_address && address - static_address < static_bytes) {
        return static_begin + (address - static_address);
    }
    return nullptr;
}

void check_shared(const void* pointer, uint64_t bytes, unsigned align, const char* what,
                  Location at) {
    auto* byte = static_cast<const unsigned char*>(pointer);
    if (inside(byte, 0, dynamic, dynamic_bytes)) {
        if (!inside(byte, bytes, dynamic, dynamic_bytes)) {
            fail(at, "%s out of bounds: bytes %llu to %llu of %llu bytes of dynamic shared memory",
                 what, (unsigned long long)(byte - dynamic),
                 (unsigned long long)(byte - dynamic) + bytes, (unsigned long long)dynamic_bytes);
        }
    } else if (!inside(byte, bytes, static_begin, static_bytes)) {
        fail(at, "%s out of bounds: %p is not in shared memory", what, pointer);
    }
    if (reinterpret_cast<uintptr_t>(pointer) % align != 0) {
        fail(at, "%s misaligned: shared address 0x%x is no multiple of %u bytes", what,
             shared_address(pointer, at), align);
    }
    if (is_poisoned(pointer, bytes)) {
        fail(at,
             "%s out of bounds of a shared array, or of bytes that an asynchronous copy has "
             "not delivered yet: %llu bytes at shared address 0x%x",
             what, (unsigned long long)bytes, shared_address(pointer, at));
    }
}

void check_global(const void* pointer, uint64_t bytes, unsigned align, const char* what,
                  Location at) {
    uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (address % align != 0) {
        fail(at, "%s misaligned: global address %p is no multiple of %u bytes", what, pointer,
             align);
    }
    const Launch& launch = *block.launch;
    if (launch.allocation_count == 0) return;
    const Allocation* nearest = nullptr;
    for (uint64_t i = 0; i < launch.allocation_count; ++i) {
        const Allocation& allocation = launch.allocations[i];
        if (address >= allocation.address && bytes <= allocation.bytes &&
            address - allocation.address <= allocation.bytes - bytes) {
            return;
        }
        if (nearest == nullptr ||
            (allocation.address <= address &&
             (nearest->address > address || allocation.address > nearest->address))) {
            nearest = &allocation;
        }
    }
    fail(at, "%s out of bounds: %llu bytes at byte %lld of an allocation of %llu bytes", what,
         (unsigned long long)bytes, (long long)(address - nearest->address),
         (unsigned long long)nearest->bytes);
}

}  // namespace emulator
