// wgmma: products of a warpgroup. They read shared memory and compute at the wait for their group.
// Until then the accumulators hold NaN.
#include <cstring>

#include "copies.h"
#include "matrix.h"

namespace emulator {
namespace {

constexpr unsigned most_columns = 256;
constexpr unsigned most_depth = 16;

// One set of accumulators: the kernel's array, and its future values.
struct Accumulators {
    float* place;
    unsigned count;
    unsigned pending;  // products in flight
    float values[most_columns / 2];
};

struct Issued {
    WarpgroupProduct product;
    uint32_t a[4];
    float* d;
    uint32_t group;
    Location at;
};

struct ThreadProducts {
    std::vector<Issued> issued;
    std::vector<Accumulators> accumulators;
    uint32_t group = 0;  // the open group
    bool fenced = false;
};

std::vector<ThreadProducts> all_products;

Accumulators* find(ThreadProducts& products, const float* place) {
    for (Accumulators& accumulators : products.accumulators) {
        if (accumulators.place == place) return &accumulators;
    }
    return nullptr;
}

void check_untouched(const Accumulators& accumulators, Location at) {
    for (unsigned i = 0; i < accumulators.count; ++i) {
        if (bits_of(accumulators.place[i]) != 0xffffffffu) {
            fail(at, "accumulator %u of a wgmma was written while the wgmma was under way", i);
        }
    }
}

// A matrix descriptor, field by field as in the PTX ISA.
struct Descriptor {
    uint32_t start, leading, stride, base, swizzle;

    explicit Descriptor(uint64_t bits)
        : start(static_cast<uint32_t>(bits & 0x3fffu) << 4),
          leading(static_cast<uint32_t>(bits >> 16 & 0x3fffu) << 4),
          stride(static_cast<uint32_t>(bits >> 32 & 0x3fffu) << 4),
          base(static_cast<uint32_t>(bits >> 49 & 7u)),
          swizzle(static_cast<uint32_t>(bits >> 62)) {}

    // 16-byte chunks in a row of the pattern.
    uint32_t chunks() const { return swizzle == 0 ? 1 : 16u >> swizzle; }
};

// Shared address of the 16-byte chunk that starts at row or column `outer`, depth `k`.
uint32_t chunk_address(const Descriptor& matrix, bool outer_major, uint32_t outer, uint32_t k,
                       uint32_t chunk_elements) {
    uint32_t chunks = matrix.chunks(), row = 16 * chunks, offset;
    if (!outer_major) {
        uint32_t chunk = k / chunk_elements;
        offset = outer % 8 * row + outer / 8 * matrix.stride +
                 chunk * (matrix.swizzle == 0 ? matrix.leading : 16);
    } else {
        uint32_t chunk = outer / chunk_elements;
        offset = k % 8 * row + chunk % chunks * 16;
        offset += matrix.swizzle == 0 ? k / 8 * matrix.leading + chunk * matrix.stride
                                      : k / 8 * matrix.stride + chunk / chunks * matrix.leading;
    }
    uint32_t address = (matrix.start + offset) & 0x3ffffu;
    return address ^ (((address >> 7) - matrix.base) & (chunks - 1)) << 4;
}

// Rows (or columns) `first` to `first + count` of a matrix in shared memory, as [k][row].
void read_matrix(float (*to)[most_columns], uint64_t bits, MatrixType type, bool outer_major,
                 uint32_t first, uint32_t count, const char* what, Location at) {
    Descriptor matrix(bits);
    uint32_t bytes = element_bytes(type), depth = 32 / bytes, chunk_elements = 16 / bytes;
    uint32_t k_step = outer_major ? 1 : chunk_elements;
    uint32_t outer_step = outer_major ? chunk_elements : 1;
    for (uint32_t k = 0; k < depth; k += k_step) {
        for (uint32_t outer = 0; outer < count; outer += outer_step) {
            uint32_t address = chunk_address(matrix, outer_major, first + outer, k, chunk_elements);
            const unsigned char* pointer = shared_pointer(address);
            if (pointer == nullptr) {
                fail(at, "%s out of bounds: nothing lies at shared address 0x%x", what, address);
            }
            check_shared(pointer, 16, 16, what, at);
            uint32_t words[4];
            async_read(words, pointer, 16, what, at);
            for (uint32_t e = 0; e < chunk_elements; ++e) {
                uint32_t word = words[e * bytes / 4];
                float value = element(type, word, bytes == 4 ? 0 : e % 2);
                to[k + (outer_major ? 0 : e)][outer + (outer_major ? e : 0)] = value;
            }
        }
    }
}

void check_alike(const Issued& one, const Issued& other, Location at) {
    const WarpgroupProduct &a = one.product, &b = other.product;
    if (a.type != b.type || a.columns != b.columns || a.a_descriptor != b.a_descriptor ||
        a.b_descriptor != b.b_descriptor || a.accumulate != b.accumulate ||
        a.a_transposed != b.a_transposed || a.b_transposed != b.b_transposed ||
        (a.a_registers == nullptr) != (b.a_registers == nullptr)) {
        fail(at, "the lanes of a warp bring different descriptors or shapes to one wgmma");
    }
}

// The warp's 16 rows of one product, for all lanes.
void compute_one(ThreadProducts* const (&lanes)[32], std::size_t index, unsigned warp) {
    static float a[most_depth][most_columns], b[most_depth][most_columns];
    const Issued& first = lanes[0]->issued[index];
    const WarpgroupProduct& product = first.product;
    unsigned pair = product.type == MatrixType::tf32 ? 1 : 2;
    unsigned depth = 8 * pair, columns = static_cast<unsigned>(product.columns);
    if (product.a_registers == nullptr) {
        read_matrix(a, product.a_descriptor, product.type, product.a_transposed, warp % 4 * 16, 16,
                    "wgmma's A", first.at);
    } else {
        for (unsigned lane = 0; lane < 32; ++lane) {
            const Issued& own = lanes[lane]->issued[index];
            for (unsigned i = 0; i < 4; ++i) {
                unsigned row = lane / 4 + i % 2 * 8, k = (lane % 4 + i / 2 * 4) * pair;
                for (unsigned e = 0; e < pair; ++e) {
                    a[k + e][row] = element(product.type, own.a[i], e);
                }
            }
        }
    }
    read_matrix(b, product.b_descriptor, product.type, product.b_transposed, 0, columns,
                "wgmma's B", first.at);
    Accumulators* accumulators[32];
    for (unsigned lane = 0; lane < 32; ++lane) {
        const Issued& own = lanes[lane]->issued[index];
        check_alike(first, own, own.at);
        accumulators[lane] = find(*lanes[lane], own.d);
    }
    for (unsigned row = 0; row < 16; ++row) {
        double sums[most_columns] = {};
        for (unsigned k = 0; k < depth; ++k) {
            double factor = a[k][row];
            for (unsigned n = 0; n < columns; ++n) sums[n] += factor * b[k][n];
        }
        for (unsigned n = 0; n < columns; ++n) {
            unsigned lane = row % 8 * 4 + n % 8 / 2;
            float& value = accumulators[lane]->values[n / 8 * 4 + row / 8 * 2 + n % 2];
            double before = product.accumulate ? static_cast<double>(value) : 0.0;
            value = static_cast<float>(before + sums[n]);
        }
    }
}

struct Wait {
    ThreadProducts* products;
    uint32_t left;
    unsigned warp;
};

std::size_t covered(const ThreadProducts& products, uint32_t left) {
    std::size_t count = 0;
    while (count < products.issued.size() && products.issued[count].group + left < products.group) {
        ++count;
    }
    return count;
}

void compute_wait(void* const (&operands)[32], uint32_t lanes, Location at) {
    if (lanes != all_lanes) {
        fail(at, "wgmma.wait_group: all lanes of the warp take part, only 0x%08x are left", lanes);
    }
    ThreadProducts* products[32];
    auto& any = *static_cast<Wait*>(operands[0]);
    std::size_t count = covered(*any.products, any.left);
    for (unsigned lane = 0; lane < 32; ++lane) {
        products[lane] = static_cast<Wait*>(operands[lane])->products;
        if (covered(*products[lane], any.left) != count) {
            fail(at, "the lanes of a warp have issued different numbers of wgmma");
        }
    }
    for (std::size_t i = 0; i < count; ++i) compute_one(products, i, any.warp);
    if (count == 0) return;
    for (ThreadProducts* own : products) {
        for (std::size_t i = 0; i < count; ++i) {
            Accumulators& accumulators = *find(*own, own->issued[i].d);
            if (--accumulators.pending > 0) continue;
            check_untouched(accumulators, at);
            std::memcpy(accumulators.place, accumulators.values,
                        accumulators.count * sizeof(float));
        }
        own->issued.erase(own->issued.begin(),
                          own->issued.begin() + static_cast<std::ptrdiff_t>(count));
        own->fenced = false;
    }
}

}  // namespace

void wgmma_issue(const WarpgroupProduct& product, float* d, Location at) {
    ThreadProducts& products = all_products[current->linear];
    if (current->linear / 128 * 128 + 128 > block.thread_count) {
        fail(at, "wgmma takes a warpgroup of 128 threads, this thread's has fewer");
    }
    unsigned count = static_cast<unsigned>(product.columns) / 2;
    Accumulators* accumulators = find(products, d);
    if (accumulators == nullptr) {
        products.accumulators.push_back({d, 0, 0, {}});
        accumulators = &products.accumulators.back();
    }
    if (accumulators->pending > 0) {
        check_untouched(*accumulators, at);
    } else {
        bool unchanged = accumulators->count == count &&
                         std::memcmp(accumulators->values, d, count * sizeof(float)) == 0;
        if (!products.fenced && !unchanged) {
            fail(at, "wgmma: its accumulators were written and no wgmma.fence followed");
        }
        std::memcpy(accumulators->values, d, count * sizeof(float));
        accumulators->count = count;
        std::memset(d, 0xff, count * sizeof(float));
    }
    ++accumulators->pending;
    Issued issued = {product, {}, d, products.group, at};
    if (product.a_registers != nullptr) std::memcpy(issued.a, product.a_registers, sizeof issued.a);
    products.issued.push_back(issued);
}

void wgmma_fence() { all_products[current->linear].fenced = true; }

void wgmma_commit() { ++all_products[current->linear].group; }

void wgmma_wait(uint32_t left, Location at) {
    Wait wait = {&all_products[current->linear], left, current->warp};
    collective(all_lanes, "wgmma.wait_group", &wait, compute_wait, at);
}

void finish_thread_products(Thread& thread) {
    ThreadProducts& products = all_products[thread.linear];
    if (!products.issued.empty()) {
        fail(products.issued[0].at, "the thread ended and never waited for this wgmma");
    }
}

void reset_products() {
    all_products.resize(block.thread_count);
    for (ThreadProducts& products : all_products) {
        products.issued.clear();
        products.accumulators.clear();
        products.group = 0;
        products.fenced = false;
    }
}

}  // namespace emulator
