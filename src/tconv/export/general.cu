// The layer and its gradients for any parameters: all of them are arguments here, so that one
// compilation serves every layer. Sums are float (double for double), in a fixed order.

// `round_to_tf32` is only ever set for float.
TCONV_DEVICE float rounded(float value, bool round_to_tf32) {
    return round_to_tf32 ? __uint_as_float(ptx::cvt_rna_tf32_f32(value)) : value;
}
TCONV_DEVICE double rounded(double value, bool) { return value; }

// --- the output, and the gradient of the input
//
// Both are dense correlations. Along one axis, with stride s, padding p and dilation d:
//
//     output:          the outputs o with (o + p) % s == phase form a phase; with q = (o + p) / s
//                      out[o] = sum of x[q - (t*d - phase)/s] * w[t]  over t with t*d % s == phase
//     input gradient:  gx[i]  = sum of gy[i*s - p + t*d] * w[t]       over all t
//
// A pixel is a q of one phase, or an i. A block computes block_rows channels of block_pixels pixels
// of one phase and one group; it walks the taps, and at each the channels to be summed over.
namespace correlation {

struct Arguments {
    const void* source;  // [batch, groups * channels, source_height, source_width]
    const void* weight;  // [groups, row, channel, kernel_y, kernel_x], in any order in memory
    const void* bias;    // [groups * rows], or null
    void* destination;   // [batch, groups * rows, destination_height, destination_width]
    long long source_stride_n, source_stride_c, source_stride_h, source_stride_w;
    long long weight_stride_group, weight_stride_row, weight_stride_channel;
    long long weight_stride_h, weight_stride_w;
    long long destination_stride_n, destination_stride_c, destination_stride_h,
        destination_stride_w;
    long long tiles;
    int batch, groups, rows, channels;
    int source_height, source_width, destination_height, destination_width;
    int kernel_y, kernel_x, stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x;
    int pixels_y, pixels_x;  // of one phase
    int phases_y, phases_x;  // with outputs: the first output's, and those that follow
    int round_to_tf32;
};

constexpr int threads = 256;
constexpr int depth = 16;  // channels staged in one step

// The pixels and taps of one phase along one axis: of the index-th from the first output's on,
// where 0 follows the last. Tap i of the phase is first_tap + i * tap_step.
struct Axis {
    int taps, first_tap, tap_step;
    int source_first, source_pixel, source_tap;  // source = first + pixel * .. + tap * ..
    int destination_first, destination_pixel;

    template <bool output>
    TCONV_DEVICE static Axis of_phase(int index, int kernel, int stride, int padding,
                                      int dilation) {
        if (!output) return {kernel, 0, 1, -padding, stride, dilation, 0, 1};
        int before_0 = stride - padding % stride;
        int phase = index < before_0 ? padding % stride + index : index - before_0;
        Axis axis{0, 0, 1, 0, 1, 0, 0, stride};
        // The taps of a phase lie equally far apart; the second shows how far.
        for (int t = 0; t < kernel; ++t) {
            if (static_cast<long long>(t) * dilation % stride != phase) continue;
            if (axis.taps == 0) axis.first_tap = t;
            if (axis.taps == 1) axis.tap_step = t - axis.first_tap;
            ++axis.taps;
        }
        long long reach = static_cast<long long>(axis.first_tap) * dilation;
        int first_q = padding / stride;
        axis.source_first = first_q - static_cast<int>((reach - phase) / stride);
        axis.source_tap =
            -static_cast<int>(static_cast<long long>(axis.tap_step) * dilation / stride);
        axis.destination_first = first_q * stride + phase - padding;
        return axis;
    }
};

template <typename Real, int block_rows, int block_pixels>
struct Shared {
    alignas(32) Real source[depth][block_pixels];
    alignas(32) Real weight[depth][block_rows];
};

// Threads lie row_threads x pixel_threads, each with thread_rows x thread_pixels sums.
template <typename Element, bool output, int row_threads, int thread_rows, int thread_pixels>
struct Tile {
    using Real = typename Accumulator<Element>::type;
    static constexpr int pixel_threads = threads / row_threads;
    static constexpr int block_rows = row_threads * thread_rows;
    static constexpr int block_pixels = pixel_threads * thread_pixels;
    static constexpr int own_sources = depth * block_pixels / threads;
    static constexpr int own_weights = (depth * block_rows + threads - 1) / threads;
    static_assert(threads % block_pixels == 0 || block_pixels == threads,
                  "a thread stages values of one pixel");

    using Shared = correlation::Shared<Real, block_rows, block_pixels>;

    const Arguments& a;
    Shared& shared;
    Axis axis_y, axis_x;
    int group, first_row;
    int batch, y, x;  // the pixel that this thread stages; batch is -1 beyond the last
    long long source_offset;
    bool inside;
    Element sources[own_sources];
    Element weights[own_weights];
    Real sums[thread_rows][thread_pixels];

    TCONV_DEVICE void number_pixel(long long pixel, int& n, int& row, int& column) const {
        long long line = pixel / a.pixels_x;
        column = static_cast<int>(pixel - line * a.pixels_x);
        long long image = line / a.pixels_y;
        row = static_cast<int>(line - image * a.pixels_y);
        n = image < a.batch ? static_cast<int>(image) : -1;
    }

    // The source value under this thread's pixel at a tap: channel 0 of the group.
    TCONV_DEVICE void at_tap(int tap_y, int tap_x) {
        int row = axis_y.source_first + y * axis_y.source_pixel + tap_y * axis_y.source_tap;
        int column = axis_x.source_first + x * axis_x.source_pixel + tap_x * axis_x.source_tap;
        inside = batch >= 0 && row >= 0 && row < a.source_height && column >= 0 &&
                 column < a.source_width;
        source_offset = batch * a.source_stride_n +
                        static_cast<long long>(group) * a.channels * a.source_stride_c +
                        row * a.source_stride_h + column * a.source_stride_w;
    }

    TCONV_DEVICE void load(int tap_y, int tap_x, int channel) {
        const Element* source = static_cast<const Element*>(a.source);
        const Element* weight = static_cast<const Element*>(a.weight);
#pragma unroll
        for (int i = 0; i < own_sources; ++i) {
            int c = channel + threadIdx.x / block_pixels + i * (threads / block_pixels);
            sources[i] = inside && c < a.channels ? source[source_offset + c * a.source_stride_c]
                                                  : Element{};
        }
        long long tap = (axis_y.first_tap + tap_y * axis_y.tap_step) * a.weight_stride_h +
                        (axis_x.first_tap + tap_x * axis_x.tap_step) * a.weight_stride_w;
#pragma unroll
        for (int i = 0; i < own_weights; ++i) {
            int e = threadIdx.x + i * threads;
            int row = first_row + e % block_rows;
            int c = channel + e / block_rows;
            bool exists = e < depth * block_rows && row < a.rows && c < a.channels;
            weights[i] = exists ? weight[group * a.weight_stride_group + row * a.weight_stride_row +
                                         c * a.weight_stride_channel + tap]
                                : Element{};
        }
    }

    TCONV_DEVICE void store() {
        bool tf32 = a.round_to_tf32 != 0;
#pragma unroll
        for (int i = 0; i < own_sources; ++i) {
            shared.source[threadIdx.x / block_pixels + i * (threads / block_pixels)]
                         [threadIdx.x % block_pixels] = rounded(widen(sources[i]), tf32);
        }
#pragma unroll
        for (int i = 0; i < own_weights; ++i) {
            int e = threadIdx.x + i * threads;
            if (e < depth * block_rows) {
                shared.weight[e / block_rows][e % block_rows] = rounded(widen(weights[i]), tf32);
            }
        }
    }

    TCONV_DEVICE void multiply() {
        using Pixels = Vector<Real, thread_pixels>;
        using Rows = Vector<Real, thread_rows>;
        int own_row = threadIdx.x / pixel_threads * thread_rows;
        int own_pixel = threadIdx.x % pixel_threads * thread_pixels;
#pragma unroll
        for (int k = 0; k < depth; ++k) {
            Pixels pixels = *reinterpret_cast<const Pixels*>(&shared.source[k][own_pixel]);
            Rows rows = *reinterpret_cast<const Rows*>(&shared.weight[k][own_row]);
#pragma unroll
            for (int i = 0; i < thread_rows; ++i) {
#pragma unroll
                for (int j = 0; j < thread_pixels; ++j) {
                    sums[i][j] += rows.values[i] * pixels.values[j];
                }
            }
        }
    }

    TCONV_DEVICE void accumulate() {
#pragma unroll
        for (int i = 0; i < thread_rows; ++i) {
#pragma unroll
            for (int j = 0; j < thread_pixels; ++j) sums[i][j] = 0;
        }
        // While one step is multiplied, the next is on its way in registers.
        int steps = (a.channels + depth - 1) / depth;
        int taps = axis_y.taps * axis_x.taps;
        int tap_y = 0, tap_x = 0, step = 0;
        if (taps == 0) return;  // an empty phase: the bias alone
        at_tap(0, 0);
        load(0, 0, 0);
        while (true) {
            store();
            __syncthreads();
            if (++step == steps) {
                step = 0;
                if (++tap_x == axis_x.taps) {
                    tap_x = 0;
                    ++tap_y;
                }
                at_tap(tap_y, tap_x);
            }
            bool more = tap_y < axis_y.taps;
            if (more) load(tap_y, tap_x, step * depth);
            multiply();
            __syncthreads();
            if (!more) return;
        }
    }

    TCONV_DEVICE void write(long long first_pixel) const {
        Element* destination = static_cast<Element*>(a.destination);
        int own_row = first_row + threadIdx.x / pixel_threads * thread_rows;
#pragma unroll
        for (int j = 0; j < thread_pixels; ++j) {
            int n, pixel_y, pixel_x;
            number_pixel(first_pixel + threadIdx.x % pixel_threads * thread_pixels + j, n, pixel_y,
                         pixel_x);
            int row = axis_y.destination_first + pixel_y * axis_y.destination_pixel;
            int column = axis_x.destination_first + pixel_x * axis_x.destination_pixel;
            if (n < 0 || row < 0 || row >= a.destination_height || column < 0 ||
                column >= a.destination_width) {
                continue;
            }
            long long offset = n * a.destination_stride_n + row * a.destination_stride_h +
                               column * a.destination_stride_w;
#pragma unroll
            for (int i = 0; i < thread_rows; ++i) {
                if (own_row + i >= a.rows) break;
                long long channel = static_cast<long long>(group) * a.rows + own_row + i;
                Real value = sums[i][j];
                if (a.bias) value += widen(static_cast<const Element*>(a.bias)[channel]);
                narrow(value, destination[offset + channel * a.destination_stride_c]);
            }
        }
    }

    TCONV_DEVICE static void run(const Arguments& a, Shared& shared) {
        int row_tiles = (a.rows + block_rows - 1) / block_rows;
        int variants = a.phases_y * a.phases_x;
        for (long long tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
            long long rest = tile / variants;
            int variant = static_cast<int>(tile - rest * variants);
            int row_tile = static_cast<int>(rest % row_tiles);
            rest /= row_tiles;
            int group = static_cast<int>(rest % a.groups);
            long long first_pixel = rest / a.groups * block_pixels;
            Tile work{a,
                      shared,
                      Axis::of_phase<output>(variant / a.phases_x, a.kernel_y, a.stride_y,
                                             a.padding_y, a.dilation_y),
                      Axis::of_phase<output>(variant % a.phases_x, a.kernel_x, a.stride_x,
                                             a.padding_x, a.dilation_x),
                      group,
                      row_tile * block_rows};
            work.number_pixel(first_pixel + threadIdx.x % block_pixels, work.batch, work.y, work.x);
            work.accumulate();
            work.write(first_pixel);
        }
    }
};

// Wide tiles, 64 channels x 64 pixels, and narrow ones for few channels in a group, 4 x 256.
template <typename Element, bool output>
using Wide = Tile<Element, output, 16, 4, 4>;
template <typename Element, bool output>
using Narrow = Tile<Element, output, 1, 4, 1>;

#define TCONV_CORRELATION(name, Element, output, Shape) \
    TCONV_KERNEL(name, threads, 2) {                    \
        using Work = Shape<Element, output>;            \
        TCONV_SHARED Work::Shared shared;               \
        Work::run(arguments, shared);                   \
    }
#define TCONV_CORRELATIONS(dtype, Element)                               \
    TCONV_CORRELATION(any_forward_##dtype, Element, true, Wide)          \
    TCONV_CORRELATION(any_forward_narrow_##dtype, Element, true, Narrow) \
    TCONV_CORRELATION(any_input_gradient_##dtype, Element, false, Wide)  \
    TCONV_CORRELATION(any_input_gradient_narrow_##dtype, Element, false, Narrow)

TCONV_CORRELATIONS(float32, float)
TCONV_CORRELATIONS(float64, double)
TCONV_CORRELATIONS(float16, float16)
TCONV_CORRELATIONS(bfloat16, bfloat16)

}  // namespace correlation

// --- the gradient of the weight
//
//     gw[ci, co, ty, tx] = sum over (n, iy, ix) of
//         x[n, ci, iy, ix] * gy[n, co, iy*stride - padding + ty*dilation, ...]
//
// A matrix product over the pixels: rows are input channels, columns are (tap, output channel). A
// block owns one tile and one share of the pixels (a split); the shares are added in order later.
namespace reduction {

struct Arguments {
    const void* x;  // [batch, groups * rows, height, width]
    const void* y;  // [batch, groups * channels, out_height, out_width]
    void* partial;  // [splits, groups * rows, channels, kernel_y, kernel_x], float or double
    long long x_stride_n, x_stride_c, x_stride_h, x_stride_w;
    long long y_stride_n, y_stride_c, y_stride_h, y_stride_w;
    long long tiles, pixels, split_pixels;
    int groups, rows, channels;
    int height, width, out_height, out_width;
    int kernel_y, kernel_x, stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x;
    int round_to_tf32;
};

constexpr int threads = 256;
constexpr int depth = 16;  // pixels staged in one step
constexpr int block = 64;  // rows, and columns, of a tile
constexpr int own = block * depth / threads;

template <typename Real>
struct Shared {
    // + 4: lanes write 16 pixels of 2 channels to different banks, but for pairs.
    alignas(32) Real x[depth][block + 4];
    alignas(32) Real y[depth][block + 4];
};

template <typename Element>
TCONV_DEVICE void run(const Arguments& a, Shared<typename Accumulator<Element>::type>& shared) {
    using Real = typename Accumulator<Element>::type;
    const Element* source_x = static_cast<const Element*>(a.x);
    const Element* source_y = static_cast<const Element*>(a.y);
    bool tf32 = a.round_to_tf32 != 0;
    long long columns = static_cast<long long>(a.channels) * a.kernel_y * a.kernel_x;
    int row_tiles = (a.rows + block - 1) / block;
    long long column_tiles = (columns + block - 1) / block;
    int slot = threadIdx.x % depth;
    int own_row = threadIdx.x / 16 * 4, own_column = threadIdx.x % 16 * 4;

    for (long long tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
        long long first_column = tile % column_tiles * block;
        long long rest = tile / column_tiles;
        int first_row = static_cast<int>(rest % row_tiles) * block;
        rest /= row_tiles;
        int group = static_cast<int>(rest % a.groups);
        long long split = rest / a.groups;
        long long pixel = split * a.split_pixels;
        long long last = pixel + a.split_pixels < a.pixels ? pixel + a.split_pixels : a.pixels;

        // The columns that this thread stages.
        int dy[own], dx[own];
        long long offsets[own];
        bool exists[own];
#pragma unroll
        for (int i = 0; i < own; ++i) {
            long long column = first_column + threadIdx.x / depth + i * (threads / depth);
            long long tap = column / a.channels;
            exists[i] = column < columns;
            dy[i] = static_cast<int>(tap / a.kernel_x) * a.dilation_y - a.padding_y;
            dx[i] = static_cast<int>(tap % a.kernel_x) * a.dilation_x - a.padding_x;
            offsets[i] = (static_cast<long long>(group) * a.channels + column - tap * a.channels) *
                         a.y_stride_c;
        }
        Real sums[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][j] = 0;
        }
        for (; pixel < last; pixel += depth) {
            long long line = (pixel + slot) / a.width;
            int x = static_cast<int>(pixel + slot - line * a.width);
            long long n = line / a.height;
            int y = static_cast<int>(line - n * a.height);
            bool counts = pixel + slot < last;
#pragma unroll
            for (int i = 0; i < own; ++i) {
                int r = threadIdx.x / depth + i * (threads / depth);
                Element value{};
                if (counts && first_row + r < a.rows) {
                    value = source_x[n * a.x_stride_n +
                                     (static_cast<long long>(group) * a.rows + first_row + r) *
                                         a.x_stride_c +
                                     y * a.x_stride_h + x * a.x_stride_w];
                }
                shared.x[slot][r] = rounded(widen(value), tf32);
                int out_y = y * a.stride_y + dy[i], out_x = x * a.stride_x + dx[i];
                Element gradient{};
                if (counts && exists[i] && out_y >= 0 && out_y < a.out_height && out_x >= 0 &&
                    out_x < a.out_width) {
                    gradient = source_y[n * a.y_stride_n + offsets[i] + out_y * a.y_stride_h +
                                        out_x * a.y_stride_w];
                }
                shared.y[slot][r] = rounded(widen(gradient), tf32);
            }
            __syncthreads();
#pragma unroll
            for (int k = 0; k < depth; ++k) {
                using Four = Vector<Real, 4>;
                Four rows = *reinterpret_cast<const Four*>(&shared.x[k][own_row]);
                Four gradients = *reinterpret_cast<const Four*>(&shared.y[k][own_column]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        sums[i][j] += rows.values[i] * gradients.values[j];
                    }
                }
            }
            __syncthreads();
        }
        Real* partial = static_cast<Real*>(a.partial);
        long long taps = static_cast<long long>(a.kernel_y) * a.kernel_x;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int row = first_row + own_row + i;
            if (row >= a.rows) break;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                long long column = first_column + own_column + j;
                if (column >= columns) break;
                long long tap = column / a.channels;
                long long channel = column - tap * a.channels;
                long long in_channel = (split * a.groups + group) * a.rows + row;
                partial[(in_channel * a.channels + channel) * taps + tap] = sums[i][j];
            }
        }
    }
}

#define TCONV_REDUCTION(dtype, Element)                         \
    TCONV_KERNEL(any_weight_gradient_##dtype, threads, 2) {     \
        TCONV_SHARED Shared<Accumulator<Element>::type> shared; \
        run<Element>(arguments, shared);                        \
    }

TCONV_REDUCTION(float32, float)
TCONV_REDUCTION(float64, double)
TCONV_REDUCTION(float16, float16)
TCONV_REDUCTION(bfloat16, bfloat16)

}  // namespace reduction
