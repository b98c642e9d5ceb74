// Shared memory as its two proxies see it, and the bytes of copies in flight.
//
// Ordinary stores use the generic proxy. Bulk copies, tensor copies and wgmma read through the
// async proxy, which sees a store for certain only after a fence.proxy.async. So the async proxy
// has its own image of shared memory, which a fence updates. If the two differ when the async proxy
// reads, a fence is missing.
#include <cstring>
#include <utility>

#include "copies.h"

#ifdef TCONV_SANITIZE
#include <sanitizer/asan_interface.h>
#endif

namespace emulator {
namespace {

std::vector<unsigned char> image;  // of dynamic, then of static shared memory
std::vector<uint32_t> fenced;  // for each warp: lanes whose fence is pending
std::vector<std::pair<unsigned char*, uint64_t>> pending;

unsigned char* in_image(const unsigned char* pointer) {
    Region dynamic = dynamic_region();
    if (pointer >= dynamic.begin && pointer < dynamic.begin + dynamic.bytes) {
        return image.data() + (pointer - dynamic.begin);
    }
    return image.data() + dynamic.bytes + (pointer - static_region().begin);
}

void publish() {
    Region dynamic = dynamic_region(), fixed = static_region();
    raw_copy(image.data(), dynamic.begin, dynamic.bytes);
    raw_copy(image.data() + dynamic.bytes, fixed.begin, fixed.bytes);
}

}  // namespace

// NOTE: not memcpy and memset: a sanitizer replaces them by functions that check red zones.
void raw_copy(void* to, const void* from, uint64_t bytes) {
    auto* target = static_cast<volatile unsigned char*>(to);
    auto* source = static_cast<const volatile unsigned char*>(from);
    uint64_t i = 0;
    if (((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) & 7u) == 0) {
        for (; i + 8 <= bytes; i += 8) {
            *reinterpret_cast<volatile uint64_t*>(target + i) =
                *reinterpret_cast<const volatile uint64_t*>(source + i);
        }
    }
    for (; i < bytes; ++i) target[i] = source[i];
}

void raw_fill(void* to, unsigned char value, uint64_t bytes) {
    auto* target = static_cast<volatile unsigned char*>(to);
    uint64_t word = value * 0x0101010101010101ull, i = 0;
    if ((reinterpret_cast<uintptr_t>(to) & 7u) == 0) {
        for (; i + 8 <= bytes; i += 8) *reinterpret_cast<volatile uint64_t*>(target + i) = word;
    }
    for (; i < bytes; ++i) target[i] = value;
}

void mark_pending(unsigned char* pointer, uint64_t bytes) {
    raw_fill(pointer, 0xff, bytes);
    raw_fill(in_image(pointer), 0xff, bytes);
#ifdef TCONV_SANITIZE
    // The sanitizer poisons granules of eight bytes. Only NaN marks smaller copies.
    if (reinterpret_cast<uintptr_t>(pointer) % 8 == 0 && bytes % 8 == 0) {
        __asan_poison_memory_region(pointer, bytes);
        pending.push_back({pointer, bytes});
    }
#endif
}

void mark_delivered([[maybe_unused]] unsigned char* pointer, [[maybe_unused]] uint64_t bytes) {
#ifdef TCONV_SANITIZE
    if (reinterpret_cast<uintptr_t>(pointer) % 8 == 0 && bytes % 8 == 0) {
        __asan_unpoison_memory_region(pointer, bytes);
        for (auto& region : pending) {
            if (region.first == pointer) {
                region = pending.back();
                pending.pop_back();
                break;
            }
        }
    }
#endif
}

void async_read(void* to, const unsigned char* from, uint64_t bytes, const char* what,
                Location at) {
    for (uint32_t& lanes : fenced) {
        if (lanes != 0) {
            publish();
            for (uint32_t& all : fenced) all = 0;
            break;
        }
    }
    raw_copy(to, in_image(from), bytes);
    if (std::memcmp(to, from, bytes) != 0) {
        uint64_t first = 0;
        while (static_cast<unsigned char*>(to)[first] == from[first]) ++first;
        fail(at,
             "%s reads shared address 0x%x, which a thread has written without a "
             "fence.proxy.async after it (or writes while the copy is under way)",
             what, shared_address(from + first, at) & ~3u);
    }
}

void async_write(unsigned char* to, const void* from, uint64_t bytes) {
    std::memcpy(to, from, bytes);
    std::memcpy(in_image(to), from, bytes);
}

// A copy of the whole memory for each thread would be slow. The lanes of a warp fence together, so
// they copy once. The fence of a part of a warp takes effect at the next read.
void fence_proxy_async() {
    uint32_t& lanes = fenced[current->warp];
    lanes |= 1u << current->lane;
    if ((lanes | exited_lanes(current->warp)) == all_lanes) {
        lanes = 0;
        publish();
    }
}

void reset_views() {
#ifdef TCONV_SANITIZE
    for (auto& region : pending) __asan_unpoison_memory_region(region.first, region.second);
#endif
    pending.clear();
    Region dynamic = dynamic_region(), fixed = static_region();
    // NOTE: the image starts as the memory does, at the start of a block.
    image.assign(dynamic.bytes + fixed.bytes, 0xff);
    fenced.assign((block.thread_count + 31) / 32, 0);
}

}  // namespace emulator
