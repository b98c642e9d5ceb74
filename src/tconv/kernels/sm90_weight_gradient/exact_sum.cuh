// A weight's sum over a share of the boxes in strict float32, of exactly its products.
//
// NOTE: rolled loops, and nothing is called: this code stands behind a main loop, whose registers
// and cached instructions it must not take.
//
// Only for <sm90_weight_gradient.cu>.
#pragma once

#include <ptx/cuda.cuh>

namespace {

using Index = Layer::Index;

// Of channels `in` of x and `out` of y, every `splits`-th box from `split` on.
template <typename Fields>
TCONV_DEVICE float exact_sum(const Fields& arguments, int split, int in, int out, int tap) {
    int tap_y = tap / Layer::exact_kernel_x, tap_x = tap - tap_y * Layer::exact_kernel_x;
    int of_tap_y = tap_y * Layer::exact_dilation_y - Layer::exact_padding_y;
    int of_tap_x = tap_x * Layer::exact_dilation_x - Layer::exact_padding_x;
    const auto* x =
        static_cast<const float*>(arguments.exact_x) + Index(in) * arguments.exact_x_stride_c;
    const auto* y =
        static_cast<const float*>(arguments.exact_y) + Index(out) * arguments.exact_y_stride_c;
    float sum = 0;
    // NOTE: a sum that is not a number stays so.
#pragma unroll 1
    for (int box = split; box < arguments.boxes && sum == sum; box += arguments.splits) {
        int rest = box / arguments.boxes_x, first_x = box - rest * arguments.boxes_x;
        int image = rest / arguments.boxes_y, first_y = rest - image * arguments.boxes_y;
#pragma unroll 1
        for (int i = 0; i < Layer::positions; ++i) {
            int row = i / arguments.box_x, plane = row / arguments.box_y;
            int n = image * arguments.box_n + plane;
            int x_y = first_y * arguments.box_y + row - plane * arguments.box_y;
            int x_x = first_x * arguments.box_x + i - row * arguments.box_x;
            int y_y = x_y * Layer::exact_stride_y + of_tap_y;
            int y_x = x_x * Layer::exact_stride_x + of_tap_x;
            bool exists = n < arguments.exact_batch && x_y < arguments.exact_x_height &&
                          x_x < arguments.exact_x_width &&
                          unsigned(y_y) < unsigned(arguments.exact_y_height) &&
                          unsigned(y_x) < unsigned(arguments.exact_y_width);
            if (!exists) continue;
            float pixel = x[n * arguments.exact_x_stride_n + x_y * arguments.exact_x_stride_h +
                            x_x * arguments.exact_x_stride_w];
            float other = y[n * arguments.exact_y_stride_n + y_y * arguments.exact_y_stride_h +
                            y_x * arguments.exact_y_stride_w];
            sum = fmaf(pixel, other, sum);
        }
    }
    return sum;
}

}  // namespace
