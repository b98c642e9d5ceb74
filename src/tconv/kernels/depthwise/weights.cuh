// The weights of a block's channels, for the two kernels that multiply by them.
#pragma once

#include <depthwise/strips.cuh>

namespace {

// All weights of the block's channels as float, [tap][channel] for each of `sets` sets; whether
// all are finite. `offset(set, channel)` is that of a channel's first weight.
template <int sets, typename Offset>
TCONV_DEVICE bool load_weights(const Arguments& a, const Thread& thread, float* weights,
                               int& not_finite, Offset offset) {
    if (threadIdx.x == 0) not_finite = 0;
    __syncthreads();
    auto from = static_cast<const Element*>(a.w);
    bool finite = true;
    for (int i = int(threadIdx.x); i < sets * taps * block_channels; i += Layer::threads) {
        int channel = thread.first_channel + i % block_channels;
        int tap = i / block_channels % taps;
        float weight = 0;
        if (channel < Layer::channels) {
            weight = widen(
                from[offset(i / (taps * block_channels), channel) +
                     tap / Layer::kernel_x * a.w_stride_h + tap % Layer::kernel_x * a.w_stride_w]);
        }
        weights[i] = weight;
        finite &= fabsf(weight) < __uint_as_float(0x7f800000u);
    }
    if (!finite) not_finite = 1;
    __syncthreads();
    return not_finite == 0;
}

// The weights of a tap and the thread's channels.
TCONV_DEVICE void weights_of(const float* weights, int tap, float (&of_tap)[vector]) {
    const float* at = weights + tap * block_channels + int(threadIdx.x) % Layer::threads_c * vector;
#pragma unroll
    for (int v = 0; v < vector; ++v) of_tap[v] = at[v];
}

}  // namespace
