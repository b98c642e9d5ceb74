// A value of a result of strict float32 by its definition: the sum of exactly its products.
//
// NOTE: one rolled loop, and nothing is called: this code stands behind main loops, whose registers
// and cached instructions it must not take.
#pragma once

#include <engine/stages.cuh>

namespace {

// Computes the result's pixel (y, x) of an image. `channel` is of the group.
template <typename Fields>
TCONV_DEVICE float exact_value(const Fields& arguments, Index image, int group, int channel, int y,
                               int x) {
    const auto* source = static_cast<const float*>(arguments.exact_source);
    const auto* weight = static_cast<const float*>(arguments.weight);
    constexpr int reduced = Layer::exact_reduced, kernel_x = Layer::exact_kernel_x;
    constexpr bool forward = Layer::exact_forward;
    float sum = 0;
    // NOTE: a sum that is not a number stays so.
#pragma unroll 1
    for (int k = 0; k < Layer::exact_kernel_y * kernel_x * reduced && sum == sum; ++k) {
        int tap_y = k / (kernel_x * reduced), tap_x = k / reduced % kernel_x, other = k % reduced;
        int at_y, at_x;
        if constexpr (forward) {
            // NOTE: a quotient is cut towards zero, so that of a negative one may be 0.
            int of_y = y + Layer::exact_padding_y - tap_y * Layer::exact_dilation_y;
            int of_x = x + Layer::exact_padding_x - tap_x * Layer::exact_dilation_x;
            at_y = of_y / Layer::exact_stride_y;
            at_x = of_x / Layer::exact_stride_x;
            if (of_y < 0 || of_x < 0 || of_y != at_y * Layer::exact_stride_y ||
                of_x != at_x * Layer::exact_stride_x) {
                continue;
            }
        } else {
            at_y = y * Layer::exact_stride_y - Layer::exact_padding_y +
                   tap_y * Layer::exact_dilation_y;
            at_x = x * Layer::exact_stride_x - Layer::exact_padding_x +
                   tap_x * Layer::exact_dilation_x;
        }
        if (unsigned(at_y) >= unsigned(arguments.exact_height) ||
            unsigned(at_x) >= unsigned(arguments.exact_width)) {
            continue;
        }
        constexpr int ins = forward ? reduced : Layer::rows;
        int in = group * ins + (forward ? other : channel), out = forward ? channel : other;
        float pixel =
            source[image * arguments.exact_stride_n +
                   Index(group * reduced + other) * arguments.exact_stride_c +
                   Index(at_y) * arguments.exact_stride_h + Index(at_x) * arguments.exact_stride_w];
        float factor = weight[Index(in) * arguments.weight_stride_in +
                              Index(out) * arguments.weight_stride_out +
                              Index(tap_y) * arguments.weight_stride_h +
                              Index(tap_x) * arguments.weight_stride_w];
        sum = fmaf(pixel, factor, sum);
    }
    if constexpr (Layer::bias) {
        sum += static_cast<const float*>(arguments.bias)[group * Layer::rows + channel];
    }
    return sum;
}

}  // namespace
