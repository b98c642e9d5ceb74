// Tiles whose chunks several blocks share, where there are fewer tiles than SMs. Each block writes
// its sums, as float32. A second kernel adds them in their order, and stores the tile.
//
// Promises: sums as <engine/multiply_taps.cuh>, whatever the order in which blocks run.
#pragma once

#include <engine/multiply_taps.cuh>
#include <engine/stages.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

constexpr int share_vectors = sizeof(Sums) / sizeof(float4);
using FlatSums = float[share_vectors * 4];

// A thread's first vector of a share of a tile; shares are numbered through all tiles. Vectors of a
// thread are a warpgroup apart, so that a warp's follow each other.
template <typename Fields>
TCONV_DEVICE float4* share_of(const Fields& arguments, int share, int consumer) {
    Index first = (Index(share) * consumers + consumer) * (share_vectors * warpgroup);
    return static_cast<float4*>(arguments.shared_sums) + first + threadIdx.x % warpgroup;
}

template <typename Fields>
TCONV_DEVICE void write_share(const Fields& arguments, int share, int consumer, Sums& sums) {
    auto& flat = reinterpret_cast<FlatSums&>(sums);
    float4* to = share_of(arguments, share, consumer);
#pragma unroll
    for (int i = 0; i < share_vectors; ++i) {
        to[i * warpgroup] = {flat[4 * i], flat[4 * i + 1], flat[4 * i + 2], flat[4 * i + 3]};
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
        auto& flat = reinterpret_cast<FlatSums&>(sums);
        for (int share = 0; share < arguments.shares; ++share) {
            auto* from = share_of(arguments, at.tile * arguments.shares + share, consumer);
#pragma unroll
            for (int i = 0; i < share_vectors; ++i) {
                float4 more = from[i * warpgroup];
                float of[4] = {more.x, more.y, more.z, more.w};
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    flat[4 * i + k] = (share == 0 ? 0.0f : flat[4 * i + k]) + of[k];
                }
            }
        }
    }
};

}  // namespace
