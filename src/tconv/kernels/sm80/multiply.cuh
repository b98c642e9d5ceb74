// Products of a block with operands of 16 bits in shared memory, for all kernels of sm_80.
//
// An operand of a stage is lines of chunks of 16 bytes, exchanged by the line, so that neither who
// fills them nor ldmatrix has bank conflicts. A line has the 64 values of a row that are summed
// over; or, if the operand is `turned`, one such value of all rows.
#pragma once

#include <common/element.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/mma.cuh>

namespace {

using Element = Layer::Element;
using Index = Layer::Index;

constexpr int depth = 64, steps = depth / 16;  // values of a stage that are summed over
constexpr int stages = Layer::stages;
constexpr int tile_rows = Layer::tile_rows, tile_columns = Layer::tile_columns;
constexpr int warp_rows = Layer::warp_rows, warp_columns = Layer::warp_columns;
constexpr int warps_down = tile_rows / warp_rows;
constexpr int a_bytes = tile_rows * depth * 2, stage_bytes = (tile_rows + tile_columns) * depth * 2;

// A warp's: thread (g, t) = (lane / 4, lane % 4) has rows g and g + 8 of each 16, columns 2t and
// 2t + 1 of each 8.
using Sums = float[warp_rows / 16][warp_columns / 8][4];

// Bytes to a chunk, from the operand's begin.
template <int chunks>
TCONV_DEVICE unsigned chunk_at(unsigned line, unsigned chunk) {
    unsigned exchanged = chunks >= 8 ? line % 8 : line % 8 / (8 / chunks);
    return (line * chunks + (chunk ^ exchanged)) * 16;
}

// A step's 16 values of 16 rows at a time, as mma takes them: of a the second register has the
// later rows, of b the later values.
template <bool is_a, bool turned, int count>
TCONV_DEVICE void load(uint32_t (&fragments)[count][4], const unsigned char* operand, unsigned row,
                       unsigned step) {
    constexpr int chunks = !turned ? depth / 8 : is_a ? tile_rows / 8 : tile_columns / 8;
    unsigned lane = threadIdx.x % 32, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
    unsigned value = step * 16 + (is_a ? third : second);
    row += is_a ? second : third;
#pragma unroll
    for (int i = 0; i < count; ++i, row += 16) {
        unsigned line = (turned ? value : row) + lane % 8, chunk = (turned ? row : value) / 8;
        const unsigned char* from = operand + chunk_at<chunks>(line, chunk);
        turned ? ptx::ldmatrix_x4_trans(fragments[i], from) : ptx::ldmatrix_x4(fragments[i], from);
    }
}

TCONV_DEVICE unsigned first_row() { return threadIdx.x / 32 % warps_down * warp_rows; }
TCONV_DEVICE unsigned first_column() { return threadIdx.x / 32 / warps_down * warp_columns; }

// Adds the products of a stage. Beside a step's products, the next step's operands are loaded and
// `bring(step)` is called.
template <bool a_turned, bool b_turned, typename Bring>
TCONV_DEVICE void multiply(const unsigned char* stage, Sums& sums, Bring bring) {
    uint32_t a[2][warp_rows / 16][4], b[2][warp_columns / 16][4];
#pragma unroll
    for (int step = -1; step < steps; ++step) {
        int next = (step + 1) % 2, now = 1 - next;
        if (step + 1 < steps) {
            load<true, a_turned>(a[next], stage, first_row(), step + 1);
            load<false, b_turned>(b[next], stage + a_bytes, first_column(), step + 1);
        }
        if (step < 0) continue;
        bring(step);
#pragma unroll
        for (int i = 0; i < warp_rows / 16; ++i) {
#pragma unroll
            for (int j = 0; j < warp_columns / 8; ++j) {
                const auto& two = b[now][j / 2];
                const uint32_t pair[2] = {two[j % 2 * 2], two[j % 2 * 2 + 1]};
                if constexpr (Layer::bfloat) {
                    ptx::mma_m16n8k16_bf16(sums[i][j], a[now][i], pair);
                } else {
                    ptx::mma_m16n8k16_f16(sums[i][j], a[now][i], pair);
                }
            }
        }
    }
}

// Adds those of all stages, of which `bring(stage, number, part)` issues the copies, a fourth for
// each part. A barrier of all threads stands between two stages.
template <bool a_turned, bool b_turned, typename Bring>
TCONV_DEVICE void sum_up(unsigned char* memory, int count, Sums& sums, Bring bring) {
    int free = 0;
#pragma unroll 1
    for (int i = 1 - stages; i < count; ++i) {
        ptx::cp_async_wait_group<stages - 2>();
        __syncthreads();  // all copies of stage i are there, and the one before it is read
        int next = i + stages - 1;
        unsigned char* to = memory + free * stage_bytes;
        free = free + 1 == stages ? 0 : free + 1;
        auto bring_part = [&](int part) {
            if (next < count) bring(to, next, part);
        };
        if (i >= 0) {
            multiply<a_turned, b_turned>(memory + free * stage_bytes, sums, bring_part);
        } else {
#pragma unroll
            for (int part = 0; part < steps; ++part) bring_part(part);
        }
        ptx::cp_async_commit_group();
    }
    __syncthreads();
}

// The lines from `first` on, `by` apart, of which a part takes every fourth.
template <int count, int by, typename Copy>
TCONV_DEVICE void for_lines(int first, int part, Copy copy) {
#pragma unroll
    for (int i = 0; i < count / by; ++i) {
        if (i % steps == part) copy(first + i * by);
    }
}

}  // namespace
