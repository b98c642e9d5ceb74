// out[n, co, oy, ox] of layers with a kernel of 1x1, or with small images and few output channels,
// on mma.sync with TF32 operands, in one launch:
//
//     product[n, co, tap, iy, ix] = sum over ci of x[n, ci, iy, ix] * weight[ci, co, tap]
//     out[n, co, oy, ox] = bias[co] + sum over the taps that reach it of their pixel's product
//
// A block has pixels of an image, and rows of products: all taps of some output channels. With a
// kernel of 1x1 the pixels are a run of them, else all of the image.
//
//   load      all input channels of its pixels, by cp.async to shared memory, at once. Who copied a
//             pixel also rounds it, if many warps read it
//   multiply  a warp has 32 rows, a part of the pixels and every `splits`-th 8 input channels. A
//             weight is needed by few warps, so it goes to registers as it lies
//   store     for each output channel the run of outputs of these pixels: whole rows of an image,
//             so vectors, with the outputs that no tap reaches. See common/plane_vectors.cuh. The
//             warps' sums come from shared memory, and are added in the order of the splits
//
// Only products of a pixel and a weight that exist are added: what is not finite needs no care.
// Channels behind the last are zeros in both operands.
#include <common/element.cuh>
#include <common/plane_vectors.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/mma.cuh>

namespace {

using Index = Layer::Index;

constexpr int threads = Layer::threads;
constexpr int pixels = Layer::pixels;
constexpr int warp_pixels = pixels / Layer::pixel_warps;
constexpr int fragments = warp_pixels / 8;
constexpr int row_warps = Layer::rows / 32;
constexpr int splits = Layer::splits;
constexpr int taps = Layer::kernel_y * Layer::kernel_x;
constexpr int tile_channels = Layer::rows / taps;
constexpr int steps = (Layer::in_channels + 7) / 8;
constexpr int ahead = Layer::ahead;  // steps whose weights are under way
// Whether pixels are rounded before they are multiplied: it pays where several warps read them.
constexpr bool rounds_first = row_warps > 2;

// Lanes of 4 channels and 8 pixels then meet all banks, and those of 4 channels and 4 pairs.
constexpr int pitch = Layer::pitch;
static_assert(pitch % 16 == 8 && pitch >= pixels, "channels are 8 banks apart");
static_assert(threads == 32 * row_warps * Layer::pixel_warps * splits, "a warp for each part");

// The block's pixels and output channels.
struct Tile {
    int image, group, first_channel, first_pixel, count;

    TCONV_DEVICE explicit Tile(const Arguments& a) {
        constexpr int channel_tiles = (Layer::out_channels + tile_channels - 1) / tile_channels;
        int rest = int(blockIdx.x);
        first_channel = rest % channel_tiles * tile_channels;
        rest /= channel_tiles;
        first_pixel = rest % a.tiles * a.tile_pixels;
        rest /= a.tiles;
        group = rest % Layer::groups;
        image = rest / Layer::groups;
        int left = a.source_height * a.source_width - first_pixel;
        count = left < a.tile_pixels ? left : a.tile_pixels;
    }
};

// Calls `of(channel, column, place)` for the vectors of [8 * steps][pitch] that are this thread's.
template <int vector, typename Of>
TCONV_DEVICE void each_vector(float* shared, Of of) {
    constexpr int columns = pixels / vector;
    constexpr int rows = threads / columns;
    static_assert(rows > 0, "a thread has a column");
    int row = int(threadIdx.x) / columns, column = int(threadIdx.x) % columns * vector;
    if (row >= rows) return;
    float* place = shared + row * pitch + column;
#pragma unroll 4
    for (int k = row; k < 8 * steps; k += rows) {
        of(k, column, place);
        place += rows * pitch;
    }
}

// Copies in vectors, zeros for channels and pixels that do not exist.
template <int vector>
TCONV_DEVICE void load_vectors(const Arguments& a, const Tile& tile, const float* source,
                               float* shared) {
    int place = int(threadIdx.x) % (pixels / vector) * vector;
    int pixel = tile.first_pixel + (place < tile.count ? place : 0);
    int y = pixel / a.source_width, x = pixel - y * a.source_width;
    source += y * a.source_stride_h + x * a.source_stride_w;
    each_vector<vector>(shared, [&](int k, int column, float* to) {
        bool valid = column < tile.count && k < Layer::in_channels;
        const float* from = source + (valid ? k * a.source_stride_c : 0);
        if constexpr (vector == 4) {
            ptx::cp_async_cg_16(to, from, valid);
        } else {
            ptx::cp_async_ca<4 * vector>(to, from, valid);
        }
    });
}

// Rounds the values that this thread copied, which no other has read yet.
template <int vector>
TCONV_DEVICE void round_vectors(float* shared) {
    each_vector<vector>(shared, [](int, int, float* place) {
        auto values = *reinterpret_cast<Vector<float, vector>*>(place);
#pragma unroll
        for (float& value : values.values) value = __uint_as_float(tf32_bits(value));
        *reinterpret_cast<Vector<float, vector>*>(place) = values;
    });
}

// Pixels of a copy: the widest vectors that planes without gaps begin and end with.
TCONV_DEVICE int longest_vector(const Arguments& a, const Tile& tile, const float* source) {
    bool whole = a.source_stride_w == 1 && a.source_stride_h == a.source_width;
    auto counts = uint64_t(a.source_height * a.source_width | a.tile_pixels | a.source_stride_c) |
                  reinterpret_cast<uint64_t>(source) / 4;
    if (!whole || counts % 2 != 0) return 1;
    return counts % 4 == 0 ? 4 : 2;
}

template <int length>
struct Length {
    static constexpr int value = length;
};

// Calls `with(Length)`.
template <typename With>
TCONV_DEVICE void with_vector(int vector, With with) {
    if (vector == 4) {
        with(Length<4>());
    } else if (vector == 2) {
        with(Length<2>());
    } else {
        with(Length<1>());
    }
}

// A lane's weights: rows g and g + 8 of two fragments, for input channels t and t + 4 of a step,
// where g = lane / 4 and t = lane % 4. With a kernel of 1x1 a load is four pieces of 32 bytes.
// Rows that do not exist have the first one's weights: nobody reads their sums.
struct Weights {
    const uint32_t* first;  // of all
    Index stride_in;
    Index offsets[4];  // of the lane's rows, in its first channel

    TCONV_DEVICE Weights(const Arguments& a, const Tile& tile, int first_row)
        : first(static_cast<const uint32_t*>(a.weight)), stride_in(a.weight_stride_in) {
        int lane = int(threadIdx.x) % 32;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int row = first_row + 8 * i + lane / 4;
            int of_row = tile.first_channel + row / taps, tap = row % taps;
            bool exists = row < tile_channels * taps && of_row < Layer::out_channels;
            if (!exists) of_row = tile.first_channel, tap = 0;
            offsets[i] = (tile.group * Layer::in_channels + lane % 4) * stride_in +
                         of_row * a.weight_stride_out + tap / Layer::kernel_x * a.weight_stride_h +
                         tap % Layer::kernel_x * a.weight_stride_w;
        }
    }

    TCONV_DEVICE void load(int step, uint32_t (&values)[2][4]) const {
        if (step >= steps) return;
        Index from = 8 * step * stride_in;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int k = 8 * step + i % 4 / 2 * 4 + int(threadIdx.x) % 4;
            // NOTE: one offset: more than one addition to a pointer takes two instructions each.
            Index offset = from + i % 4 / 2 * 4 * stride_in + offsets[i / 4 * 2 + i % 2];
            bool exists = Layer::in_channels % 8 == 0 || k < Layer::in_channels;
            values[i / 4][i % 4] = ptx::ld_global_nc_if(first + offset, exists);
        }
    }
};

TCONV_DEVICE void multiply(const float* shared, const uint32_t (&weights)[2][4],
                           float (&sums)[2][fragments][4]) {
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        a[i / 4][i % 4] = tf32_bits(__uint_as_float(weights[i / 4][i % 4]));
    }
#pragma unroll
    for (int j = 0; j < fragments; ++j) {
        float found[2] = {shared[8 * j], shared[8 * j + 4 * pitch]};
        uint32_t b[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            b[i] = rounds_first ? __float_as_uint(found[i]) : tf32_bits(found[i]);
        }
        ptx::mma_m16n8k8_tf32(sums[0][j], a[0], b);
        ptx::mma_m16n8k8_tf32(sums[1][j], a[1], b);
    }
}

// The sum of the splits' sums, [split][row][pitch].
template <int vector = 1>
TCONV_DEVICE Vector<float, vector> added(const float* of_first) {
    auto sum = *reinterpret_cast<const Vector<float, vector>*>(of_first);
#pragma unroll
    for (int s = 1; s < splits; ++s) {
        auto other =
            *reinterpret_cast<const Vector<float, vector>*>(of_first + s * Layer::rows * pitch);
#pragma unroll
        for (int v = 0; v < vector; ++v) sum.values[v] += other.values[v];
    }
    return sum;
}

// The sum of the products that reach an output, whose taps have a row each.
TCONV_DEVICE float gathered(const Arguments& a, const float* of_channel, Output at) {
    float sum = 0;
#pragma unroll 1
    for (int tap_y = 0; tap_y < Layer::kernel_y; ++tap_y) {
        int reach_y = int(at.y) + Layer::padding_y - tap_y * Layer::dilation_y;
        int y = reach_y / Layer::stride_y;
        if (reach_y < 0 || y * Layer::stride_y != reach_y || y >= a.source_height) continue;
#pragma unroll 1
        for (int tap_x = 0; tap_x < Layer::kernel_x; ++tap_x) {
            int reach_x = int(at.x) + Layer::padding_x - tap_x * Layer::dilation_x;
            int x = reach_x / Layer::stride_x;
            if (reach_x < 0 || x * Layer::stride_x != reach_x || x >= a.source_width) continue;
            int tap = tap_y * Layer::kernel_x + tap_x;
            sum += added(of_channel + tap * pitch + y * a.source_width + x).values[0];
        }
    }
    return sum;
}

TCONV_DEVICE void store_outputs(const Arguments& a, const Tile& tile, const float* sums) {
    constexpr bool dense = Layer::pointwise && Layer::stride_y == 1 && Layer::stride_x == 1;
    int first_row = tile.first_pixel / a.source_width;
    int rest = a.destination_height - first_row * Layer::stride_y;
    int rows = (tile.count + a.source_width - 1) / a.source_width * Layer::stride_y;
    if (!Layer::pointwise || rows > rest) rows = rest;
    int length = dense ? tile.count : rows * a.destination_width;
    Index begin =
        dense ? tile.first_pixel : Index(first_row) * Layer::stride_y * a.destination_width;
    // Threads side by side along the runs of each of `together` channels.
    constexpr int least = dense && pixels <= 64 ? 16 : 32;
    constexpr int most = threads / least, together = tile_channels < most ? tile_channels : most;
    constexpr int side_by_side = threads / together / least * least;
    int own = int(threadIdx.x) / side_by_side, place = int(threadIdx.x) % side_by_side * 4;
    if (own >= together) return;
    for (int c = own; c < tile_channels; c += together) {
        int of_group = tile.first_channel + c;
        if (of_group >= Layer::out_channels) break;
        int channel = tile.group * Layer::out_channels + of_group;
        Index first =
            tile.image * a.destination_stride_n + channel * a.destination_stride_c + begin;
        float* run = static_cast<float*>(a.destination) + first;
        const float* of_channel = sums + c * (taps * pitch);
        float bias = 0;
        if constexpr (Layer::bias) bias = static_cast<const float*>(a.bias)[channel];
#pragma unroll 2
        for (int e = place - behind_vector(first); e < length; e += 4 * side_by_side) {
            float values[4];
            if (dense && behind_vector(first) == 0 && e + 4 <= length) {
                auto sums = added<4>(of_channel + e);
#pragma unroll
                for (int v = 0; v < 4; ++v) values[v] = bias + sums.values[v];
                store_vector(run, e, length, values);
                continue;
            }
            Output at(dense ? 0 : e, a);
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                values[v] = bias;
                if (unsigned(e + v) < unsigned(length)) {
                    if constexpr (dense) {
                        values[v] += added(of_channel + e + v).values[0];
                    } else if constexpr (!Layer::pointwise) {
                        values[v] += gathered(a, of_channel, at);
                    } else if (at.has_pixel()) {
                        values[v] += added(of_channel + at.y / Layer::stride_y * a.source_width +
                                           at.x / Layer::stride_x)
                                         .values[0];
                    }
                }
                if constexpr (!dense) at.advance(a.destination_width);
            }
            store_vector(run, e, length, values);
        }
    }
}

}  // namespace

TCONV_KERNEL(pointwise_mma_forward, Layer::threads, Layer::blocks) {
    TCONV_DYNAMIC_SHARED(memory);
    auto shared = reinterpret_cast<float*>(memory);
    Tile tile(arguments);
    const float* source = static_cast<const float*>(arguments.source) +
                          tile.image * arguments.source_stride_n +
                          Index(tile.group) * Layer::in_channels * arguments.source_stride_c;
    int vector = longest_vector(arguments, tile, source);
    with_vector(vector,
                [&](auto length) { load_vectors<length.value>(arguments, tile, source, shared); });

    int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    int split = warp / (row_warps * Layer::pixel_warps);
    int first_row = warp % row_warps * 32;
    int first_pixel = warp / row_warps % Layer::pixel_warps * warp_pixels;
    Weights weights(arguments, tile, first_row);
    uint32_t next[ahead][2][4] = {};
#pragma unroll
    for (int u = 0; u < ahead; ++u) weights.load(split + u * splits, next[u]);
    float sums[2][fragments][4] = {};
    ptx::cp_async_wait_all();
    if constexpr (rounds_first) {
        with_vector(vector, [&](auto length) { round_vectors<length.value>(shared); });
    }
    __syncthreads();
    const float* of_lane = shared + lane % 4 * pitch + first_pixel + lane / 4;
#pragma unroll 1
    for (int step = split; step < steps; step += ahead * splits) {
#pragma unroll
        for (int u = 0; u < ahead; ++u) {
            uint32_t now[2][4];
#pragma unroll
            for (int i = 0; i < 8; ++i) now[i / 4][i % 4] = next[u][i / 4][i % 4];
            int own = step + u * splits;
            weights.load(own + ahead * splits, next[u]);
            if (own < steps) multiply(of_lane + own * (8 * pitch), now, sums);
        }
    }

    __syncthreads();  // the pixels have been read
    float* of_warp = shared + (split * Layer::rows + first_row) * pitch + first_pixel;
#pragma unroll
    for (int j = 0; j < fragments; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float* to = of_warp + (8 * i + lane / 4) * pitch + 8 * j + lane % 4 * 2;
            *reinterpret_cast<Vector<float, 2>*>(to) = {
                {sums[i / 2][j][i % 2 * 2], sums[i / 2][j][i % 2 * 2 + 1]}};
        }
    }
    __syncthreads();
    store_outputs(arguments, tile, shared);
}
