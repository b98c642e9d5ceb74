// gw[ci, co, ty, tx] = sum over n and the pixels of x of
//     x[n, ci, iy, ix] * gy[n, co, iy*stride - padding + ty*dilation, ...]
// where a group has one input channel: memory-bound. See depthwise/strips.cuh.
//
// A thread sums the taps of `tap_rows` rows over every `shares`-th strip, a block adds its threads'
// sums in their order, and the caller adds the blocks' in theirs.
#include <depthwise/strips.cuh>

namespace {

constexpr int columns =
    (strip - 1) * Layer::stride_x + (Layer::kernel_x - 1) * Layer::dilation_x + 1;
constexpr int block_taps = Layer::tap_rows * Layer::kernel_x;

template <bool fast>
TCONV_DEVICE void sum_strips(const Arguments& a, const Thread& thread, const ImageX& x,
                             const ImageY& y, int first_tap, float (&sums)[block_taps][vector]) {
#pragma unroll 1
    for (int position = thread.share; position < a.positions; position += thread.shares) {
        Place place(position, a);
        if (!place.exists) continue;
        float pixels[strip][vector];
        x.template load_row<fast, 0>(x.row(place.image, place.row), true, place.column * strip,
                                     pixels);
        int base = place.column * strip * Layer::stride_x;
#pragma unroll
        for (int r = 0; r < Layer::tap_rows; ++r) {
            int tap_y = first_tap + r;
            int out_y = place.row * Layer::stride_y - Layer::padding_y + tap_y * Layer::dilation_y;
            bool row_exists = tap_y < Layer::kernel_y && unsigned(out_y) < unsigned(y.height);
            float row[columns][vector];
            y.template load_row<fast, -Layer::padding_x>(y.row(place.image, out_y), row_exists,
                                                         base, row);
#pragma unroll
            for (int tap_x = 0; tap_x < Layer::kernel_x; ++tap_x) {
#pragma unroll
                for (int i = 0; i < strip; ++i) {
                    int column = i * Layer::stride_x + tap_x * Layer::dilation_x;
#pragma unroll
                    for (int v = 0; v < vector; ++v) {
                        float& sum = sums[r * Layer::kernel_x + tap_x][v];
                        sum = fmaf(pixels[i][v], row[column][v], sum);
                    }
                }
            }
        }
    }
}

// The same sums one product at a time, of those that exist.
TCONV_DEVICE void sum_products(const Arguments& a, const Thread& thread, const ImageX& x,
                               const ImageY& y, int first_tap, float (&sums)[block_taps][vector]) {
#pragma unroll
    for (int i = 0; i < block_taps * vector; ++i) sums[i / vector][i % vector] = 0;
#pragma unroll 1
    for (int position = thread.share, i = 0; position < a.positions;) {
        Place place(position, a);
        int in_x = place.column * strip + i;
        if (++i == strip) i = 0, position += thread.shares;
        if (!place.exists || !x.has_column(in_x)) continue;
        float pixel[1][vector];
        x.template load_row<false, 0>(x.row(place.image, place.row), true, in_x, pixel);
#pragma unroll
        for (int tap = 0; tap < block_taps; ++tap) {
            int tap_y = first_tap + tap / Layer::kernel_x;
            int out_y = place.row * Layer::stride_y - Layer::padding_y + tap_y * Layer::dilation_y;
            int out_x = in_x * Layer::stride_x - Layer::padding_x +
                        tap % Layer::kernel_x * Layer::dilation_x;
            bool exists = tap_y < Layer::kernel_y && unsigned(out_y) < unsigned(y.height);
            if (!exists || !y.has_column(out_x)) continue;
            float other[1][vector];
            y.template load_row<false, 0>(y.row(place.image, out_y), true, out_x, other);
#pragma unroll
            for (int v = 0; v < vector; ++v) {
                sums[tap][v] = fmaf(pixel[0][v], other[0][v], sums[tap][v]);
            }
        }
    }
}

}  // namespace

TCONV_KERNEL(depthwise_weight_gradient, Layer::threads, Layer::blocks) {
    TCONV_SHARED float totals[block_taps * block_channels];
    constexpr int tap_sets = (Layer::kernel_y + Layer::tap_rows - 1) / Layer::tap_rows;
    int unit = int(blockIdx.x) % arguments.units;
    int split = int(blockIdx.x) / arguments.units;
    int first_tap = unit % tap_sets * Layer::tap_rows;
    Thread thread(unit / tap_sets, split, arguments.shares);
    float sums[block_taps][vector] = {};
    if (thread.exists) {
        ImageX x = thread.x_image(arguments,
                                  [&](int v) { return (thread.channel + v) / Layer::multiple; });
        ImageY y = thread.y_image(arguments, [&](int v) { return thread.channel + v; });
        if (x.aligned() && y.aligned()) {
            sum_strips<true>(arguments, thread, x, y, first_tap, sums);
        } else {
            sum_strips<false>(arguments, thread, x, y, first_tap, sums);
        }
        // A finite sum has met no product of a zero with an infinity.
        bool finite = true;
#pragma unroll
        for (int i = 0; i < block_taps * vector; ++i) {
            finite &= fabsf(sums[i / vector][i % vector]) < __uint_as_float(0x7f800000u);
        }
        if (!finite) sum_products(arguments, thread, x, y, first_tap, sums);
    }
    // Lanes of the same channels, then warps, one after another.
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
#pragma unroll
    for (int step = 16; step >= Layer::threads_c; step /= 2) {
#pragma unroll
        for (int i = 0; i < block_taps * vector; ++i) {
            float& value = sums[i / vector][i % vector];
            value += __shfl_xor_sync(0xffffffffu, value, step);
        }
    }
    for (int turn = 0; turn < Layer::threads / 32; ++turn) {
        if (warp == turn && lane < Layer::threads_c) {
#pragma unroll
            for (int i = 0; i < block_taps * vector; ++i) {
                float& total = totals[i * Layer::threads_c + lane];
                total =
                    turn == 0 ? sums[i / vector][i % vector] : total + sums[i / vector][i % vector];
            }
        }
        __syncthreads();
    }
    auto partial = static_cast<float*>(arguments.partial);
    for (int i = int(threadIdx.x); i < block_taps * block_channels; i += Layer::threads) {
        int of_block = i / block_taps, tap = i % block_taps;
        int channel = thread.first_channel + of_block;
        if (channel >= Layer::channels || first_tap * Layer::kernel_x + tap >= taps) continue;
        int cell = tap * vector + of_block % vector;
        partial[(Index(split) * Layer::channels + channel) * taps + first_tap * Layer::kernel_x +
                tap] = totals[cell * Layer::threads_c + of_block / vector];
    }
}
