// out[n, co, oy, ox] = bias[co] + sum over taps of x[n, ci, iy, ix] * weight[ci, co, ty, tx], where
// ci is the one input channel of co's group: memory-bound. See depthwise/strips.cuh.
//
// A thread has output channels, and the outputs o = stride*strip*j - lead + r for all r below
// stride*strip. Input i = strip*j + k reaches output r by the tap t with
//
//     t*dilation = r + padding - lead - k*stride
//
// so that which products there are is known when this is compiled. Phases without a tap have none.
#include <depthwise/weights.cuh>

namespace {

constexpr int out_columns = strip * Layer::stride_x;
constexpr int reach_y = Layer::padding_y - Layer::lead_y;
constexpr int reach_x = Layer::padding_x - Layer::lead_x;
// Inputs that some output of a strip reads.
constexpr int first_y =
    ceil_div(reach_y - (Layer::kernel_y - 1) * Layer::dilation_y, Layer::stride_y);
constexpr int last_y = floor_div(Layer::stride_y - 1 + reach_y, Layer::stride_y);
constexpr int first_x =
    ceil_div(reach_x - (Layer::kernel_x - 1) * Layer::dilation_x, Layer::stride_x);
constexpr int last_x = floor_div(out_columns - 1 + reach_x, Layer::stride_x);
constexpr int columns = last_x >= first_x ? last_x - first_x + 1 : 1;

// Rows of inputs at once: with a stride of 1 a longer kernel needs no more registers.
constexpr int rows_at_once = Layer::stride_y == 1 && Layer::kernel_y > 4 ? 1 : last_y - first_y + 1;

template <bool fast>
TCONV_DEVICE void strips_of(const Arguments& a, const Thread& thread, const ImageX& x,
                            const ImageY& y, const float* weights, const float (&bias)[vector]) {
#pragma unroll 1
    for (int position = thread.share; position < a.positions; position += thread.shares) {
        Place place(position, a);
        if (!place.exists) continue;
        float sums[Layer::stride_y][out_columns][vector];
#pragma unroll
        for (int i = 0; i < Layer::stride_y * out_columns * vector; ++i) {
            sums[i / (out_columns * vector)][i / vector % out_columns][i % vector] =
                bias[i % vector];
        }
        int base = place.column * strip;
#pragma unroll rows_at_once
        for (int k = first_y; k <= last_y; ++k) {
            int in_y = place.row + k;
            bool row_exists = unsigned(in_y) < unsigned(x.height);
            float row[columns][vector];
            x.template load_row<fast, first_x>(x.row(place.image, in_y), row_exists, base, row);
#pragma unroll
            for (int out_y = 0; out_y < Layer::stride_y; ++out_y) {
                int tap_y = out_y + reach_y - k * Layer::stride_y;
                if (tap_y < 0 || tap_y % Layer::dilation_y != 0) continue;
                tap_y /= Layer::dilation_y;
                if (tap_y >= Layer::kernel_y) continue;
#pragma unroll
                for (int tap_x = 0; tap_x < Layer::kernel_x; ++tap_x) {
                    float weight[vector];
                    weights_of(weights, tap_y * Layer::kernel_x + tap_x, weight);
#pragma unroll
                    for (int out_x = 0; out_x < out_columns; ++out_x) {
                        int reach = out_x + reach_x - tap_x * Layer::dilation_x;
                        int column = floor_div(reach, Layer::stride_x);
                        if (column * Layer::stride_x != reach) continue;
#pragma unroll
                        for (int v = 0; v < vector; ++v) {
                            float& sum = sums[out_y][out_x][v];
                            sum = fmaf(row[column - first_x][v], weight[v], sum);
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < Layer::stride_y; ++r) {
            int out_y = place.row * Layer::stride_y - Layer::lead_y + r;
            if (unsigned(out_y) >= unsigned(y.height)) continue;
            y.template store_row<fast, -Layer::lead_x>(y.row(place.image, out_y),
                                                       place.column * out_columns, sums[r]);
        }
    }
}

// The same one output at a time, of the products that exist: where a weight is not finite, no zero
// may stand for a pixel that does not.
TCONV_DEVICE void outputs_of(const Arguments& a, const Thread& thread, const ImageX& x,
                             const ImageY& y, const float* weights, const float (&bias)[vector]) {
#pragma unroll 1
    for (int position = thread.share; position < a.positions; position += thread.shares) {
        Place place(position, a);
        if (!place.exists) continue;
#pragma unroll 1
        for (int i = 0; i < Layer::stride_y * out_columns; ++i) {
            int out_y = place.row * Layer::stride_y - Layer::lead_y + i / out_columns;
            int out_x = place.column * out_columns - Layer::lead_x + i % out_columns;
            if (unsigned(out_y) >= unsigned(y.height) || !y.has_column(out_x)) continue;
            float sums[1][vector];
#pragma unroll
            for (int v = 0; v < vector; ++v) sums[0][v] = bias[v];
#pragma unroll 1
            for (int tap = 0; tap < taps; ++tap) {
                int reached_y =
                    out_y + Layer::padding_y - tap / Layer::kernel_x * Layer::dilation_y;
                int reached_x =
                    out_x + Layer::padding_x - tap % Layer::kernel_x * Layer::dilation_x;
                if (reached_y % Layer::stride_y != 0 || reached_x % Layer::stride_x != 0) continue;
                int in_y = reached_y / Layer::stride_y, in_x = reached_x / Layer::stride_x;
                if (unsigned(in_y) >= unsigned(x.height) || !x.has_column(in_x)) continue;
                float pixel[1][vector], weight[vector];
                x.template load_row<false, 0>(x.row(place.image, in_y), true, in_x, pixel);
                weights_of(weights, tap, weight);
#pragma unroll
                for (int v = 0; v < vector; ++v) {
                    sums[0][v] = fmaf(pixel[0][v], weight[v], sums[0][v]);
                }
            }
            y.template store_row<false, 0>(y.row(place.image, out_y), out_x, sums);
        }
    }
}

}  // namespace

TCONV_KERNEL(depthwise_forward, Layer::threads, Layer::blocks) {
    TCONV_SHARED float weights[taps * block_channels];
    TCONV_SHARED int not_finite;
    Thread thread(int(blockIdx.x) % arguments.chunks, int(blockIdx.x) / arguments.chunks,
                  arguments.shares);
    bool finite = load_weights<1>(arguments, thread, weights, not_finite, [&](int, int channel) {
        return channel / Layer::multiple * arguments.w_stride_in +
               channel % Layer::multiple * arguments.w_stride_out;
    });
    if (!thread.exists) return;
    ImageX x =
        thread.x_image(arguments, [&](int v) { return (thread.channel + v) / Layer::multiple; });
    ImageY y = thread.y_image(arguments, [&](int v) { return thread.channel + v; });
    float bias[vector];
#pragma unroll
    for (int v = 0; v < vector; ++v) {
        bias[v] = 0;
        if constexpr (Layer::bias) {
            bias[v] = widen(static_cast<const Element*>(arguments.bias)[thread.channel + v]);
        }
    }
    if (!finite) {
        outputs_of(arguments, thread, x, y, weights, bias);
    } else if (x.aligned() && y.aligned()) {
        strips_of<true>(arguments, thread, x, y, weights, bias);
    } else {
        strips_of<false>(arguments, thread, x, y, weights, bias);
    }
}
