// cp.async and tensor stores. A thread waits for them in groups.
#include <cstring>
#include <utility>

#include "copies.h"
#include "tensor_map.h"

namespace emulator {
namespace {

// A bulk or tensor store, from shared to global memory.
struct Store {
    const unsigned char* source;
    uint64_t bytes;
    const TensorMapRecord* map;  // or of a tensor store, to these coordinates
    int32_t coordinates[5];
    uint32_t group;
    bool read;
    std::vector<unsigned char> contents;
    Location at;
};

struct ThreadCopies {
    std::vector<Copy> copies;
    uint32_t copy_group = 0;  // the open group
    std::vector<Store> stores;
    uint32_t store_group = 0;
};

std::vector<ThreadCopies> all_copies;

ThreadCopies& own() { return all_copies[current->linear]; }

void read_source(Store& store) {
    if (store.read) return;
    store.contents.resize(store.bytes);
    read_stored_box(*store.map, store.source, store.contents.data(), store.at);
    store.read = true;
}

void write_destination(Store& store) {
    store_box(*store.map, store.coordinates, store.source, store.contents.data(), store.at);
}

}  // namespace

void land(const Copy& copy) {
    mark_delivered(copy.destination, copy.bytes);
    if (copy.source_bytes > 0) std::memcpy(copy.destination, copy.source, copy.source_bytes);
    std::memset(copy.destination + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
}

void copy_async(void* destination, const void* source, uint32_t bytes, uint32_t source_bytes,
                Location at) {
    check_shared(destination, bytes, bytes, "cp.async's destination", at);
    if (source_bytes > bytes) {
        fail(at, "cp.async: %u bytes to read for %u to write", source_bytes, bytes);
    }
    if (source_bytes > 0) check_global(source, source_bytes, bytes, "cp.async's source", at);
    auto* target = static_cast<unsigned char*>(destination);
    mark_pending(target, bytes);
    ThreadCopies& copies = own();
    copies.copies.push_back({target, static_cast<const unsigned char*>(source), bytes, source_bytes,
                             copies.copy_group});
}

void copy_async_commit() { ++own().copy_group; }

// Delivers all groups but the last `left`. Copies without a commit stay in flight, unless `all`.
void copy_async_wait(uint32_t left, bool all) {
    ThreadCopies& copies = own();
    std::size_t kept = 0;
    for (const Copy& copy : copies.copies) {
        if (all || copy.group + left < copies.copy_group) {
            land(copy);
        } else {
            copies.copies[kept++] = copy;
        }
    }
    copies.copies.resize(kept);
}

void copy_async_mbarrier_arrive(uint64_t* barrier, Location at) {
    std::vector<Copy> copies;
    copies.swap(own().copies);
    queue_arrival(barrier, std::move(copies), at);
}

void tensor_store(const void* map, unsigned rank, const int* coordinates, const void* source,
                  Location at) {
    auto* record = static_cast<const TensorMapRecord*>(map);
    check_tensor_map(*record, rank, "a tensor store", at);
    Store store = {};
    store.source = static_cast<const unsigned char*>(source);
    store.bytes = box_footprint(*record);
    check_tensor_store(*record, coordinates, at);
    check_shared(source, store.bytes, 128, "a tensor store's source", at);
    store.map = record;
    std::memcpy(store.coordinates, coordinates, rank * sizeof *coordinates);
    store.group = own().store_group;
    store.at = at;
    own().stores.push_back(store);
}

void bulk_commit() { ++own().store_group; }

// `read`: waits only until the shared memory may be overwritten.
void bulk_wait(uint32_t left, bool read) {
    ThreadCopies& copies = own();
    std::vector<Store> kept;
    for (Store& store : copies.stores) {
        bool covered = store.group + left < copies.store_group;
        if (covered) read_source(store);
        if (covered && !read) {
            write_destination(store);
        } else {
            kept.push_back(store);
        }
    }
    copies.stores.swap(kept);
}

void finish_thread_copies(Thread& thread) {
    ThreadCopies& copies = all_copies[thread.linear];
    for (Store& store : copies.stores) {
        if (!store.read) {
            fail(store.at,
                 "a tensor store whose shared memory may be gone before it is read: the thread "
                 "ended without cp.async.bulk.wait_group for it");
        }
        write_destination(store);
    }
    copies.stores.clear();
}

void reset_copies() {
    all_copies.resize(block.thread_count);
    for (ThreadCopies& copies : all_copies) {
        copies.copies.clear();
        copies.stores.clear();
        copies.copy_group = copies.store_group = 0;
    }
}

}  // namespace emulator
