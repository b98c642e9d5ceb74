// Float32 outputs recomputed as the sum of exactly their products, where a kernel's own sum is not
// finite.
//
// Kernels multiply zeros too, for phases without a tap and beside the image. An infinity or NaN
// times zero is a NaN. A finite sum has met no such product.
//
// Read from Layer: kernel, stride, padding and dilation of both axes, in_channels, out_channels,
// bias. From Arguments: source, weight, bias, destination, their strides, source_height and
// source_width.
//
// NOTE: loops are rolled and nothing is called. This code stands behind main loops, whose registers
// and cached instructions it must not take. A call makes ptxas wait for each wgmma by itself.
#pragma once

#include <common/element.cuh>
#include <common/not_finite.cuh>

namespace exact {

using Index = Layer::Index;

// Computes output [image, group * out_channels + channel, y, x].
template <bool round_to_tf32, typename Fields>
TCONV_DEVICE float output(const Fields& arguments, Index image, Index group, int channel, int y,
                          int x) {
    const float* source = static_cast<const float*>(arguments.source);
    const float* weight = static_cast<const float*>(arguments.weight);
    constexpr int channels = Layer::in_channels;
    float sum = 0;
    // One loop over taps and channels keeps little in registers. A sum that is not a number stays
    // so.
#pragma unroll 1
    for (int k = 0; k < Layer::kernel_y * Layer::kernel_x * channels && sum == sum; ++k) {
        int tap_y = k / (Layer::kernel_x * channels), tap_x = k / channels % Layer::kernel_x;
        // The tap's input, times the stride.
        int reach_y = y + Layer::padding_y - tap_y * Layer::dilation_y;
        int reach_x = x + Layer::padding_x - tap_x * Layer::dilation_x;
        int in_y = reach_y / Layer::stride_y, in_x = reach_x / Layer::stride_x;
        // NOTE: a quotient is cut towards zero, so that of a negative reach may be 0.
        bool inside = reach_y >= 0 && reach_y == in_y * Layer::stride_y &&
                      in_y < arguments.source_height && reach_x >= 0 &&
                      reach_x == in_x * Layer::stride_x && in_x < arguments.source_width;
        if (!inside) continue;
        Index in_channel = group * channels + k % channels;
        float pixel =
            source[image * arguments.source_stride_n + in_channel * arguments.source_stride_c +
                   in_y * arguments.source_stride_h + in_x * arguments.source_stride_w];
        float factor =
            weight[in_channel * arguments.weight_stride_in + channel * arguments.weight_stride_out +
                   tap_y * arguments.weight_stride_h + tap_x * arguments.weight_stride_w];
        sum = fmaf(operand<round_to_tf32>(pixel), operand<round_to_tf32>(factor), sum);
    }
    if constexpr (Layer::bias) {
        sum += static_cast<const float*>(arguments.bias)[group * Layer::out_channels + channel];
    }
    return sum;
}

// Recomputes an output that is not finite. The same thread has written it, or another before a
// barrier of both. For destinations whose strides descend.
template <bool round_to_tf32, bool split = false, typename Fields>
TCONV_DEVICE void repair(const Fields& arguments, float* at) {
    if (!is_wrong<split>(*at)) return;
    auto rest = Index(at - static_cast<float*>(arguments.destination));
    Index image = rest / arguments.destination_stride_n;
    rest -= image * arguments.destination_stride_n;
    auto channel = int(rest / arguments.destination_stride_c);
    rest -= channel * arguments.destination_stride_c;
    auto y = int(rest / arguments.destination_stride_h);
    auto x = int(rest - y * arguments.destination_stride_h);
    *at = output<round_to_tf32>(arguments, image, channel / Layer::out_channels,
                                channel % Layer::out_channels, y, x);
}

}  // namespace exact
