// Few output channels, a long kernel and stride along x: an inverse STFT.
//
// Along x, out[q * stride + phase - padding] = sum over slots s and channels of
// w[channel][s * stride + phase] * x[channel][q - s]. The phases of an output channel are the rows
// of a matrix product, pixels q its columns:
//
//     rows     64 phases of one output channel; neighbours in memory, of weights and of outputs
//     columns  pixels of a row of the image
//     depth    (slot, input channel); a slot is another start in the same staged pixels
//
// A block computes one tile: 2 x 2 warps of 32 phases and half of the pixels each, twice, for
// either half of a stage's 16 channels. Tiles are few and long, so more warps share one. Stages
// come by cp.async, two ahead. At the end the second half's sums are added to the first's.
#include <common/element.cuh>
#include <common/exact_output.cuh>
#include <common/not_finite.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/mma.cuh>

namespace {

using Index = Layer::Index;

constexpr int threads = Layer::threads;
constexpr int depth = Layer::depth;
constexpr int slots = Layer::slots;
constexpr int phases = Layer::phases;
constexpr int phase_tiles = (Layer::stride_x + phases - 1) / phases;
constexpr int row_tiles = Layer::groups * Layer::out_channels * phase_tiles;
constexpr int columns = Layer::pixels + slots - 1;
constexpr int fragments = Layer::pixels / 16;  // of 8 pixels, of a warp
constexpr int chunks = (Layer::in_channels + depth - 1) / depth;

static_assert(threads == 256 && phases == 64, "twice 2 x 2 warps of 32 phases");
static_assert(depth == 16 && Layer::pixels % 16 == 0, "a warp's products have 8 channels");

// Pitches are 8 more than a multiple of 16: the 8 x 4 operands of a product are in 32 banks.
struct Stage {
    float weights[slots][depth][phases + 8];
    float pixels[depth][Layer::source_pitch];
};
static_assert(Layer::stages * sizeof(Stage) <= Layer::shared_bytes, "the host allots enough");

struct Position {
    int group, channel, first_phase, first_q, y;
    Index image;

    TCONV_DEVICE Position(Index tile, const Arguments& arguments) {
        Index rest = tile / row_tiles;
        int row_tile = int(tile - rest * row_tiles);
        first_phase = row_tile % phase_tiles * phases;
        channel = row_tile / phase_tiles % Layer::out_channels;
        group = row_tile / phase_tiles / Layer::out_channels;
        Index line = rest / arguments.tiles_x;
        first_q = Layer::first_q + int(rest - line * arguments.tiles_x) * Layer::pixels;
        image = line / arguments.tiles_y;
        y = int(line - image * arguments.tiles_y);
    }
};

// Asks for a stage's weights, so many neighbouring phases at a time. What does not exist is zero.
template <int width>
TCONV_DEVICE void copy_weights(const Arguments& arguments, const Position& at, int chunk,
                               Stage& stage) {
    constexpr int vectors = phases / width;
    int own = int(threadIdx.x) % vectors * width;
    int phase = at.first_phase + own;
    const float* weight = static_cast<const float*>(arguments.weight);
    Index first_channel = Index(at.group) * Layer::in_channels;
#pragma unroll 8
    for (int i = threadIdx.x / vectors; i < slots * depth; i += threads / vectors) {
        int slot = i / depth, k = i % depth;
        int channel = chunk * depth + k, tap = slot * Layer::stride_x + phase;
        bool exists =
            channel < Layer::in_channels && phase < Layer::stride_x && tap < Layer::kernel_x;
        Index offset = (first_channel + channel) * arguments.weight_stride_in +
                       at.channel * arguments.weight_stride_out + tap * arguments.weight_stride_w;
        ptx::cp_async_ca<4 * width>(&stage.weights[slot][k][own], exists ? weight + offset : weight,
                                    exists);
    }
}

// Whether each vector of 4 weights is aligned, and exists whole or not at all.
TCONV_DEVICE bool has_vectors(const Arguments& arguments) {
    return Layer::kernel_x % 4 == 0 && Layer::stride_x % 4 == 0 && arguments.weight_stride_w == 1 &&
           arguments.weight_stride_in % 4 == 0 && arguments.weight_stride_out % 4 == 0 &&
           reinterpret_cast<uintptr_t>(arguments.weight) % 16 == 0;
}

// Asks for a stage's weights and pixels.
TCONV_DEVICE void copy(const Arguments& arguments, const Position& at, int chunk, Stage& stage) {
    if (has_vectors(arguments)) {
        copy_weights<4>(arguments, at, chunk, stage);
    } else {
        copy_weights<1>(arguments, at, chunk, stage);
    }
    Index first_channel = Index(at.group) * Layer::in_channels;
    const float* source = static_cast<const float*>(arguments.source);
    Index line = at.image * arguments.source_stride_n + at.y * arguments.source_stride_h;
#pragma unroll 4
    for (int i = threadIdx.x; i < depth * columns; i += threads) {
        int k = i / columns, column = i % columns;
        int channel = chunk * depth + k, x = at.first_q - (slots - 1) + column;
        bool exists = channel < Layer::in_channels && x >= 0 && x < arguments.source_width;
        Index offset = line + (first_channel + channel) * arguments.source_stride_c +
                       x * arguments.source_stride_w;
        ptx::cp_async_ca<4>(&stage.pixels[k][column], exists ? source + offset : source, exists);
    }
}

using Sums = float[2][fragments][4];

// Adds the products of the 8 channels from `first` on.
TCONV_DEVICE void multiply(const Stage& stage, int first, int first_row, int first_column,
                           Sums& sums) {
    int g = threadIdx.x % 32 / 4, k = first + threadIdx.x % 4;
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
        uint32_t a[2][4], b[fragments][2];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int row = first_row + i / 4 * 16 + g + i % 2 * 8;
            a[i / 4][i % 4] = tf32_bits(stage.weights[slot][k + i / 2 % 2 * 4][row]);
        }
#pragma unroll
        for (int i = 0; i < 2 * fragments; ++i) {
            int column = first_column + i / 2 * 8 + g + slots - 1 - slot;
            b[i / 2][i % 2] = tf32_bits(stage.pixels[k + i % 2 * 4][column]);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int n = 0; n < fragments; ++n) ptx::mma_m16n8k8_tf32(sums[m][n], a[m], b[n]);
        }
    }
}

// Adds the sums of the second four warps to those of the first. `handed` is free for it.
TCONV_DEVICE void join_halves(float* handed, bool second, Sums& sums) {
    float* own = handed + threadIdx.x % 128;
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
        __syncthreads();
        if (second != (pass == 0)) continue;
#pragma unroll
        for (int i = 0; i < 8 * fragments; ++i) {
            float& sum = sums[i / 4 / fragments][i / 4 % fragments][i % 4];
            if (pass == 0) {
                own[i * 128] = sum;
            } else {
                sum += own[i * 128];
            }
        }
    }
}
static_assert(8 * fragments * 128 * sizeof(float) <= Layer::stages * sizeof(Stage),
              "the stages have room for the sums");

// Calls `action` with each of the thread's sums and the output that it is of.
template <typename Action>
TCONV_DEVICE void each_output(const Arguments& arguments, const Position& at, int first_row,
                              int first_column, Action action) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float* line =
        static_cast<float*>(arguments.destination) + at.image * arguments.destination_stride_n +
        (Index(at.group) * Layer::out_channels + at.channel) * arguments.destination_stride_c +
        at.y * arguments.destination_stride_h;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < fragments; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int phase = at.first_phase + first_row + 16 * m + g + i / 2 * 8;
                int q = at.first_q + first_column + 8 * n + 2 * t + i % 2;
                int x = q * Layer::stride_x + phase - Layer::padding_x;
                if (phase < Layer::stride_x && x >= 0 && x < arguments.destination_width) {
                    action(m, n, i, line + x);
                }
            }
        }
    }
}

// Writes the thread's sums, and those again that are not finite.
TCONV_DEVICE void write(const Arguments& arguments, const Position& at, int first_row,
                        int first_column, const Sums& sums) {
    float bias = 0;
    if constexpr (Layer::bias) {
        bias =
            static_cast<const float*>(arguments.bias)[at.group * Layer::out_channels + at.channel];
    }
    NotFinite<float> not_finite;
    each_output(arguments, at, first_row, first_column, [&](int m, int n, int i, float* to) {
        float value = sums[m][n][i] + bias;
        not_finite.note(value);
        *to = value;
    });
    if (!not_finite.any()) return;
    each_output(arguments, at, first_row, first_column,
                [&](int, int, int, float* to) { exact::repair<true>(arguments, to); });
}

}  // namespace

TCONV_KERNEL(mma_frames_forward, Layer::threads, 2) {
    TCONV_DYNAMIC_SHARED(memory);
    auto* stages = reinterpret_cast<Stage*>(memory);
    int warp = threadIdx.x / 32;
    int first_row = warp % 2 * 32, first_column = warp / 2 % 2 * (Layer::pixels / 2);
    bool second = warp >= 4;
    for (Index tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(tile, arguments);
        Sums sums = {};
#pragma unroll
        for (int ahead = 0; ahead < Layer::stages - 1; ++ahead) {
            if (ahead < chunks) copy(arguments, at, ahead, stages[ahead]);
            ptx::cp_async_commit_group();
        }
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            ptx::cp_async_wait_group<Layer::stages - 2>();
            __syncthreads();  // all copies are there, and all have read the stage before
            int next = chunk + Layer::stages - 1;
            if (next < chunks) copy(arguments, at, next, stages[next % Layer::stages]);
            ptx::cp_async_commit_group();
            multiply(stages[chunk % Layer::stages], second * 8, first_row, first_column, sums);
        }
        join_halves(reinterpret_cast<float*>(memory), second, sums);
        if (!second) write(arguments, at, first_row, first_column, sums);
        __syncthreads();  // the next tile's copies
    }
}
