// The scale of a call's weights in float16, a power of two. Each block of a packing finds it from
// the same sample of all weights: 256 in 32 runs of neighbours, each a sector or two.
#pragma once

#include <common/float16_operands.cuh>

namespace float16_operands {

// As many weights that do not fit as make float16 take none.
[[maybe_unused]] constexpr uint32_t too_many = Layer::most_unfit_weights + 1;

struct OfWeights {
    Scale scale;
    bool sparse;  // seven of eight are zero: an output may be one product
};

// Called by all threads of a block.
template <int threads, typename Fields>
TCONV_DEVICE OfWeights sample_weights(const Fields& arguments) {
    using Index = Layer::Index;
    constexpr int run = 8, runs = 32;
    static_assert(run * runs % threads == 0, "a thread takes as many as any other");
    constexpr int taps = Layer::kernel_y * Layer::kernel_x;
    constexpr long long all = 1ll * Layer::groups * Layer::in_channels * Layer::out_channels * taps;
    constexpr long long all_runs = (all + run - 1) / run;
    constexpr auto spread = uint32_t(all_runs < 1 << 30 ? all_runs : 1 << 30);
    TCONV_SHARED uint32_t of_warps[threads / 32], zeros_of_warps[threads / 32];
    uint32_t largest = 0, zeros = 0;
#pragma unroll
    for (int i = 0; i < runs * run / threads; ++i) {
        uint32_t number = (i * threads + threadIdx.x) / run;
        // Runs are spread by the golden ratio, or follow each other where there are few.
        uint32_t from = spread <= runs ? number : __umulhi(number * 0x9e3779b9u, spread);
        Index place = Index(from) * run + threadIdx.x % run;
        if (place >= Index(all)) continue;  // of few weights: they count as others
        int tap = int(place % taps);
        Index rest = place / taps;
        Index in_channel = rest / Layer::out_channels;
        auto out_channel = int(rest - in_channel * Layer::out_channels);
        float value = static_cast<const float*>(
            arguments.weight)[in_channel * arguments.weight_stride_in +
                              out_channel * arguments.weight_stride_out +
                              tap / Layer::kernel_x * arguments.weight_stride_h +
                              tap % Layer::kernel_x * arguments.weight_stride_w];
        largest = max(largest, __float_as_uint(fabsf(value)));
        zeros += value == 0;
    }
    largest = largest_of_warp(largest);
    zeros = ptx::redux_sync_add_u32(zeros);
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = largest;
        zeros_of_warps[threadIdx.x / 32] = zeros;
    }
    __syncthreads();
    zeros = 0;
    for (uint32_t other : of_warps) largest = max(largest, other);
    for (uint32_t other : zeros_of_warps) zeros += other;
    constexpr uint32_t sampled = all < run * runs ? uint32_t(all) : run * runs;
    return {Scale::of_sample(largest, 13), zeros > sampled * 7 / 8};
}

// How many of these values do not fit, at most `too_many`. A value that is too large or not a
// number counts `too_many`.
template <int count>
TCONV_DEVICE uint32_t unfit(const float (&values)[count], Scale scale, bool parts) {
    uint32_t unfit = 0;
#pragma unroll
    for (float value : values) {
        unfit += order(value) < scale.least(parts);
        if (!scale.holds(fabsf(value))) unfit = too_many;
    }
    return min(unfit, too_many);
}

}  // namespace float16_operands
