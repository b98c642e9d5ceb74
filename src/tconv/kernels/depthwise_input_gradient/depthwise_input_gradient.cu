// gx[n, ci, iy, ix] = sum over the group's output channels co and taps of
//     gy[n, co, iy*stride - padding + ty*dilation, ...] * weight[ci, co, ty, tx]
// where a group has one input channel: memory-bound. See depthwise/strips.cuh.
#include <depthwise/weights.cuh>

namespace {

constexpr int columns =
    (strip - 1) * Layer::stride_x + (Layer::kernel_x - 1) * Layer::dilation_x + 1;

// Rows of outputs at once. A longer kernel needs no more registers.
constexpr int rows_at_once = Layer::kernel_y <= 4 ? Layer::kernel_y : 1;

template <bool fast>
TCONV_DEVICE void strips_of(const Arguments& a, const Thread& thread, const ImageX& x,
                            const ImageY& y, const float* weights) {
#pragma unroll 1
    for (int position = thread.share; position < a.positions; position += thread.shares) {
        Place place(position, a);
        if (!place.exists) continue;
        float sums[strip][vector] = {};
        int base = place.column * strip * Layer::stride_x;
#pragma unroll 1
        for (int m = 0; m < Layer::multiple; ++m) {
#pragma unroll rows_at_once
            for (int tap_y = 0; tap_y < Layer::kernel_y; ++tap_y) {
                int out_y =
                    place.row * Layer::stride_y - Layer::padding_y + tap_y * Layer::dilation_y;
                bool row_exists = unsigned(out_y) < unsigned(y.height);
                float row[columns][vector];
                y.template load_row<fast, -Layer::padding_x>(
                    y.row(place.image, out_y) + m * y.stride_c, row_exists, base, row);
#pragma unroll
                for (int tap_x = 0; tap_x < Layer::kernel_x; ++tap_x) {
                    float weight[vector];
                    weights_of(weights, m * taps + tap_y * Layer::kernel_x + tap_x, weight);
#pragma unroll
                    for (int i = 0; i < strip; ++i) {
                        int column = i * Layer::stride_x + tap_x * Layer::dilation_x;
#pragma unroll
                        for (int v = 0; v < vector; ++v) {
                            sums[i][v] = fmaf(row[column][v], weight[v], sums[i][v]);
                        }
                    }
                }
            }
        }
        x.template store_row<fast, 0>(x.row(place.image, place.row), place.column * strip, sums);
    }
}

// The same one pixel at a time, of the products that exist: where a weight is not finite, no zero
// may stand for an output that does not.
TCONV_DEVICE void pixels_of(const Arguments& a, const Thread& thread, const ImageX& x,
                            const ImageY& y, const float* weights) {
#pragma unroll 1
    for (int position = thread.share; position < a.positions; position += thread.shares) {
        Place place(position, a);
        if (!place.exists) continue;
#pragma unroll 1
        for (int in_x = place.column * strip; in_x < (place.column + 1) * strip; ++in_x) {
            if (!x.has_column(in_x)) continue;
            float sums[1][vector] = {};
#pragma unroll 1
            for (int i = 0; i < Layer::multiple * taps; ++i) {
                int tap = i % taps;
                int out_y = place.row * Layer::stride_y - Layer::padding_y +
                            tap / Layer::kernel_x * Layer::dilation_y;
                int out_x = in_x * Layer::stride_x - Layer::padding_x +
                            tap % Layer::kernel_x * Layer::dilation_x;
                if (unsigned(out_y) >= unsigned(y.height) || !y.has_column(out_x)) continue;
                float pixel[1][vector], weight[vector];
                y.template load_row<false, 0>(y.row(place.image, out_y) + i / taps * y.stride_c,
                                              true, out_x, pixel);
                weights_of(weights, i, weight);
#pragma unroll
                for (int v = 0; v < vector; ++v) {
                    sums[0][v] = fmaf(pixel[0][v], weight[v], sums[0][v]);
                }
            }
            x.template store_row<false, 0>(x.row(place.image, place.row), in_x, sums);
        }
    }
}

}  // namespace

TCONV_KERNEL(depthwise_input_gradient, Layer::threads, Layer::blocks) {
    TCONV_SHARED float weights[Layer::multiple * taps * block_channels];
    TCONV_SHARED int not_finite;
    Thread thread(int(blockIdx.x) % arguments.chunks, int(blockIdx.x) / arguments.chunks,
                  arguments.shares);
    bool finite = load_weights<Layer::multiple>(
        arguments, thread, weights, not_finite, [&](int m, int channel) {
            return channel * arguments.w_stride_in + m * arguments.w_stride_out;
        });
    if (!thread.exists) return;
    ImageX x = thread.x_image(arguments, [&](int v) { return thread.channel + v; });
    ImageY y =
        thread.y_image(arguments, [&](int v) { return (thread.channel + v) * Layer::multiple; });
    if (!finite) {
        pixels_of(arguments, thread, x, y, weights);
    } else if (x.aligned() && y.aligned()) {
        strips_of<true>(arguments, thread, x, y, weights);
    } else {
        strips_of<false>(arguments, thread, x, y, weights);
    }
}
