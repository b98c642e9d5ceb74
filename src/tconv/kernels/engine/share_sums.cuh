// Tiles whose chunks several blocks share, where there are fewer tiles than SMs. Each block writes
// its sums, as float32. A second kernel adds them in their order, and stores the tile.
//
// Promises: sums as <engine/multiply_taps.cuh>, whatever the order in which blocks run.
#pragma once

#include <engine/multiply_taps.cuh>
#include <engine/stages.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

constexpr int block_vectors = products_columns / 8;  // of four sums
constexpr int share_vectors = tile_sums * blocks * block_vectors;

// A thread's first vector of a share of a tile; shares are numbered through all tiles. Vectors of a
// thread are a warpgroup apart, so that a warp's follow each other.
template <typename Fields>
TCONV_DEVICE float4* share_of(const Fields& arguments, int share, int consumer) {
    Index first = (Index(share) * consumers + consumer) * (share_vectors * warpgroup);
    return static_cast<float4*>(arguments.shared_sums) + first + threadIdx.x % warpgroup;
}

template <typename Fields>
TCONV_DEVICE void write_share(const Fields& arguments, int share, int consumer, const Sums& sums) {
    float4* to = share_of(arguments, share, consumer);
#pragma unroll
    for (auto& of_result : sums) {
#pragma unroll
        for (auto& of_block : of_result) {
#pragma unroll
            for (int i = 0; i < products_columns / 2; i += 4, to += warpgroup) {
                *to = {of_block[i], of_block[i + 1], of_block[i + 2], of_block[i + 3]};
            }
        }
    }
}

// In the place of a multiplier.
template <typename Fields>
struct Adder {
    int consumer;

    TCONV_DEVICE Adder(const Fields&, Shared&, int consumer) : consumer(consumer) {
        ptx::griddepcontrol_wait();
    }

    TCONV_DEVICE void multiply(const Fields& arguments, Shared&, const Position& at, Sums& sums,
                               int&) {
        const float4* from = share_of(arguments, at.tile * arguments.shares, consumer);
        for (int share = 0; share < arguments.shares; ++share) {
#pragma unroll
            for (auto& of_result : sums) {
#pragma unroll
                for (auto& of_block : of_result) {
#pragma unroll
                    for (int i = 0; i < products_columns / 2; i += 4, from += warpgroup) {
                        float4 added = *from;
                        const float of_vector[4] = {added.x, added.y, added.z, added.w};
#pragma unroll
                        for (int k = 0; k < 4; ++k) {
                            of_block[i + k] = (share == 0 ? 0.0f : of_block[i + k]) + of_vector[k];
                        }
                    }
                }
            }
            from += (consumers - 1) * (share_vectors * warpgroup);
        }
    }
};

}  // namespace
