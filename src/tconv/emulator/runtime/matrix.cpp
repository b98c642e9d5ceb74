// ldmatrix, stmatrix and mma.sync.
#include "matrix.h"

#include <cstring>

#include "state.h"

namespace emulator {
namespace {

struct MatrixMove {
    const char* what;
    unsigned char* row;
    uint32_t* registers;
    int count;
    bool transposed;
};

void need_all_lanes(uint32_t lanes, const char* what, Location at) {
    if (lanes != all_lanes) {
        fail(at, "%s: all lanes of the warp take part, only 0x%08x are left", what, lanes);
    }
}

// The two elements of a matrix that a lane holds. `row` gives the shared row of each.
void element_place(const MatrixMove& move, unsigned lane, unsigned half, unsigned& row,
                   unsigned& column) {
    row = lane / 4;
    column = 2 * (lane % 4) + half;
    if (move.transposed) {
        unsigned swap = row;
        row = column;
        column = swap;
    }
}

template <bool load>
void compute_move(void* const (&operands)[32], uint32_t lanes, Location at) {
    auto& any = *static_cast<MatrixMove*>(operands[__builtin_ctz(lanes)]);
    need_all_lanes(lanes, any.what, at);
    for (int matrix = 0; matrix < any.count; ++matrix) {
        unsigned char* rows[8];
        for (int row = 0; row < 8; ++row) {
            rows[row] = static_cast<MatrixMove*>(operands[8 * matrix + row])->row;
            check_shared(rows[row], 16, 16, any.what, at);
        }
        for (unsigned lane = 0; lane < 32; ++lane) {
            auto& move = *static_cast<MatrixMove*>(operands[lane]);
            uint32_t& bits = move.registers[matrix];
            if (load) bits = 0;
            for (unsigned half = 0; half < 2; ++half) {
                unsigned row, column;
                element_place(move, lane, half, row, column);
                uint16_t value;
                if (load) {
                    std::memcpy(&value, rows[row] + 2 * column, 2);
                    bits |= static_cast<uint32_t>(value) << (16 * half);
                } else {
                    value = static_cast<uint16_t>(bits >> (16 * half));
                    std::memcpy(rows[row] + 2 * column, &value, 2);
                }
            }
        }
    }
}

struct Product {
    MatrixType type;
    int depth;
    float* d;
    const uint32_t* a;
    const uint32_t* b;
};

void compute_product(void* const (&operands)[32], uint32_t lanes, Location at) {
    auto& any = *static_cast<Product*>(operands[__builtin_ctz(lanes)]);
    need_all_lanes(lanes, "mma.sync", at);
    unsigned pair = any.type == MatrixType::tf32 ? 1 : 2;  // elements of a register
    unsigned depth = static_cast<unsigned>(any.depth);
    double a[16][16], b[16][8];
    for (unsigned lane = 0; lane < 32; ++lane) {
        auto& own = *static_cast<Product*>(operands[lane]);
        unsigned g = lane / 4, t = lane % 4;
        for (unsigned i = 0; i < depth / pair / 2; ++i) {
            unsigned row = g + (i % 2) * 8;
            unsigned k = (t + i / 2 * 4) * pair;
            for (unsigned e = 0; e < pair; ++e) a[row][k + e] = element(own.type, own.a[i], e);
        }
        for (unsigned i = 0; i < depth / pair / 4; ++i) {
            unsigned k = (t + i * 4) * pair;
            for (unsigned e = 0; e < pair; ++e) b[k + e][g] = element(own.type, own.b[i], e);
        }
    }
    for (unsigned lane = 0; lane < 32; ++lane) {
        auto& own = *static_cast<Product*>(operands[lane]);
        for (unsigned i = 0; i < 4; ++i) {
            unsigned row = lane / 4 + (i / 2) * 8, column = 2 * (lane % 4) + i % 2;
            double sum = own.d[i];
            for (unsigned k = 0; k < depth; ++k) sum += a[row][k] * b[k][column];
            own.d[i] = static_cast<float>(sum);
        }
    }
}

}  // namespace

void load_matrices(const char* what, uint32_t* destination, const void* row, int count,
                   bool transposed, Location at) {
    auto* place = static_cast<unsigned char*>(const_cast<void*>(row));
    MatrixMove move = {what, place, destination, count, transposed};
    collective(all_lanes, what, &move, compute_move<true>, at);
}

void store_matrices(const char* what, void* row, const uint32_t* source, int count, bool transposed,
                    Location at) {
    MatrixMove move = {what, static_cast<unsigned char*>(row), const_cast<uint32_t*>(source), count,
                       transposed};
    collective(all_lanes, what, &move, compute_move<false>, at);
}

void multiply(MatrixType type, int depth, float* d, const uint32_t* a, const uint32_t* b,
              Location at) {
    Product product = {type, depth, d, a, b};
    collective(all_lanes, "mma.sync", &product, compute_product, at);
}

}  // namespace emulator
