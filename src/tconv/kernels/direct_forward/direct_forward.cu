// out[n, co, oy, ox] of memory-bound layers, by fused multiply-adds.
//
// Pixel m of an axis stands for the outputs o = m*stride + r, r in 0..stride-1: the phases are
// those of o, not of o + padding, so that pixels start where output rows do. The outputs of r use
// the taps t with (r + padding - t*dilation) divisible by the stride, each reads input
// m + offset(t), offset(t) = (r + padding - t*dilation) / stride. Which taps those are, the host
// has tabulated; everything below unrolls over them, and a phase without taps costs its store.
//
// A block owns tile_rows x tile_columns pixels of one image and tile_channels output channels of
// one group, with all their phases, so it writes contiguous pieces of output rows. A thread
// accumulates thread_channels channels x thread_pixels neighbouring pixels x all phases in x x
// some phases in y. Blocks are persistent and walk the tiles:
//
//   step      a patch of `depth` input channels with its halo, by cp.async, zero outside the
//             image; the next step's patch, of this or the next tile, is copied meanwhile
//   weights   of all input channels, [in channel][tap in y][thread along o][tap in x][channel];
//             kept until a tile of another group or of other channels comes up
//   store     a warp gathers its outputs in shared memory in the order of the rows, one channel of
//             each thread at a time, then writes whole pieces of rows
#include <common/exact_output.cuh>
#include <common/image_tiles.cuh>

namespace {

using Index = Layer::Index;
using image_tiles::own_thread;
using image_tiles::store;

constexpr int threads = Layer::threads;
constexpr int threads_x = Layer::threads_x;
constexpr int threads_o = Layer::threads_o;
constexpr int threads_y = threads / (threads_x * threads_o);
constexpr int pixels = Layer::thread_pixels;
constexpr int channels = Layer::thread_channels;
constexpr int stride_x = Layer::stride_x;

constexpr int tile_columns = threads_x * pixels;
constexpr int tile_rows = threads_y * Layer::thread_rows;
constexpr int tile_channels = threads_o * channels;
constexpr int channel_tiles = (Layer::out_channels + tile_channels - 1) / tile_channels;

constexpr int depth = Layer::depth;
constexpr int chunks = (Layer::in_channels + depth - 1) / depth;
constexpr int groups_y = (Layer::slots_y + Layer::group_slots - 1) / Layer::group_slots;

static_assert(32 % threads_x == 0 || threads_x % 32 == 0, "rows of threads are whole or warps");
static_assert(threads_y * threads_x * threads_o == threads, "every thread owns a part of the tile");
static_assert(pixels % 4 == 0, "a thread's pixels are whole vectors");
static_assert(chunks == 1 || Layer::thread_rows == 1, "sums live through a tile's steps");

// A swizzle of 16-byte vectors in shared memory, for lanes whose vectors are `step` apart.
// Exclusive-or within each 8 vectors spreads them over all banks.
template <int step>
struct Swizzle {
    static constexpr int mask = step % 8 == 0 ? 7 : step % 4 == 0 ? 3 : step % 2 == 0 ? 1 : 0;
    TCONV_DEVICE static int of(int vector) { return vector ^ (vector >> 3 & mask); }
};

// The patch: [depth][patch_rows][patch_pitch]. Its column `skew` is the least input column that the
// tile's first pixel reads.
using PatchSwizzle = Swizzle<pixels / 4>;
constexpr int skew = Layer::skew;
constexpr int patch_rows = tile_rows + Layer::span_y;
constexpr int used_vectors = Layer::patch_vectors;
static_assert(4 * used_vectors >= skew + tile_columns + Layer::span_x,
              "a patch has what tiles read");
constexpr int patch_vectors =
    (used_vectors + PatchSwizzle::mask) / (PatchSwizzle::mask + 1) * (PatchSwizzle::mask + 1);
constexpr int patch_pitch = 4 * patch_vectors;
constexpr int patch_channel = patch_rows * patch_pitch;

// What a thread reads of a row of the patch.
constexpr int window_vectors = (skew + pixels + Layer::span_x + 3) / 4;

constexpr int row_weights = (Layer::kernel_x * channels + 3) / 4 * 4;  // of a thread and tap in y
constexpr int channel_weights = Layer::kernel_y * threads_o * row_weights;

// A warp's outputs of one pass: a piece of an output row for each of its rows of threads. A longer
// row of threads is several warps, each with a piece of its own.
using OutputSwizzle = Swizzle<pixels * stride_x / 4>;
constexpr int thread_outputs = pixels * stride_x;
constexpr int row_lanes = threads_x < 32 ? threads_x : 32;
constexpr int row_warps = threads_x / row_lanes;
constexpr int row_outputs = row_lanes * thread_outputs;
constexpr int warp_segments = 32 / row_lanes;

// The first row of threads of the thread's warp.
TCONV_DEVICE int row_of_threads(int thread) { return thread / 32 * warp_segments / row_warps; }

struct Weights {
    alignas(16) float values[Layer::in_channels * channel_weights];
    float bias[tile_channels];
};

using Position = image_tiles::Position<channel_tiles, tile_channels>;

struct Shared {
    alignas(16) float patch[2][depth * patch_channel];
    alignas(16) float outputs[threads / 32][warp_segments * row_outputs];
    Weights weights[Layer::weight_buffers];
    Position positions[2];  // of this tile and the next: here they cost no registers
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

// The widest store that output rows are aligned for.
using Stored = Vector<float, Layer::store_vector>;
constexpr int stored = Layer::store_vector;
static_assert(tile_columns % 4 == 0, "tiles start on a vector of an aligned row");

TCONV_DEVICE void round_to_tf32(float& value) { value = operand<true>(value); }

struct Block : image_tiles::Block<Block, Shared, Position> {
    int weight_buffer = 0;

    float sums[Layer::group_slots][channels][stride_x][pixels];
    NotFinite<float> not_finite;  // of the outputs that the thread has written in a step

    using image_tiles::Block<Block, Shared, Position>::Block;

    struct PatchShape {
        static constexpr int rows = patch_rows;
        static constexpr int vectors = used_vectors;
        static constexpr int channels = depth;
        static constexpr int channel_pitch = patch_channel;
        // NOTE: sums live through the steps of deep tiles, so that unrolling further would spill.
        static constexpr int unrolled = chunks > 1 ? 1 : 4;
        TCONV_DEVICE static int place(int row, int column) {
            return row * patch_pitch + 4 * PatchSwizzle::of(column / 4) + column % 4;
        }
    };
    using Patch = image_tiles::Patch<threads, PatchShape>;

    TCONV_DEVICE void load_patch(float* patch, const Position& of, int first_channel) const {
        int top = of.tile_y * tile_rows + Layer::first_offset_y;
        int left = of.tile_x * tile_columns + Layer::first_offset_x - skew;
        Patch::load(patch, arguments, of, first_channel, top, left, arguments.source_height);
    }

    // The place of weight i of a tile, counted [in channel][out channel][tap].
    TCONV_DEVICE static int weight_place(int i) {
        constexpr int taps = Layer::kernel_y * Layer::kernel_x;
        int tap = i % taps;
        int out = i / taps % tile_channels;
        int in = i / (taps * tile_channels);
        return in * channel_weights +
               (tap / Layer::kernel_x * threads_o + out / channels) * row_weights +
               tap % Layer::kernel_x * channels + out % channels;
    }

    static constexpr int weight_count =
        Layer::in_channels * tile_channels * Layer::kernel_y * Layer::kernel_x;

    TCONV_DEVICE void load_weights(Weights& weights, const Position& of) const {
        const float* source = static_cast<const float*>(arguments.weight) +
                              of.group() * Layer::in_channels * arguments.weight_stride_in;
        int first = of.first_channel();
#pragma unroll 1
        for (int i = own_thread(); i < weight_count; i += threads) {
            constexpr int taps = Layer::kernel_y * Layer::kernel_x;
            int tap = i % taps;
            int out = first + i / taps % tile_channels;
            int in = i / (taps * tile_channels);
            bool inside = out < Layer::out_channels;
            Index offset = in * arguments.weight_stride_in + out * arguments.weight_stride_out +
                           tap / Layer::kernel_x * arguments.weight_stride_h +
                           tap % Layer::kernel_x * arguments.weight_stride_w;
            ptx::cp_async_ca<4>(&weights.values[weight_place(i)], source + (inside ? offset : 0),
                                inside);
        }
        const float* bias = static_cast<const float*>(arguments.bias);
        for (int i = own_thread(); i < tile_channels; i += threads) {
            if constexpr (Layer::bias) {
                bool inside = first + i < Layer::out_channels;
                Index offset = of.group() * Layer::out_channels + first + i;
                ptx::cp_async_ca<4>(&weights.bias[i], bias + (inside ? offset : 0), inside);
            } else {
                weights.bias[i] = 0;
            }
        }
    }

    TCONV_DEVICE void round_weights(Weights& weights) const {
#pragma unroll 1
        for (int i = own_thread(); i < weight_count; i += threads) {
            round_to_tf32(weights.values[weight_place(i)]);
        }
    }

    TCONV_DEVICE void round_step() {
        if constexpr (Layer::round_to_tf32) {
            Patch::round(shared.patch[stage]);
            if (new_weights) round_weights(shared.weights[weight_buffer]);
        }
    }

    TCONV_DEVICE void prefetch_weights(const Position& next) {
        if (Layer::weight_buffers > 1 && new_weights) {
            load_weights(shared.weights[weight_buffer ^ 1], next);
        }
    }

    TCONV_DEVICE void clear_sums() {
#pragma unroll
        for (int slot = 0; slot < Layer::group_slots; ++slot) {
#pragma unroll
            for (int i = 0; i < channels; ++i) {
#pragma unroll
                for (int phase = 0; phase < stride_x; ++phase) {
#pragma unroll
                    for (int q = 0; q < pixels; ++q) sums[slot][i][phase][q] = 0;
                }
            }
        }
    }

    TCONV_DEVICE static bool has_tap(int group, int row) {
        bool any = false;
#pragma unroll
        for (int t = 0; t < Layer::kernel_y; ++t) {
            any |= Layer::tap_row[t] == row && Layer::tap_slot[t] / Layer::group_slots == group;
        }
        return any;
    }

    TCONV_DEVICE static bool has_tap_x(int phase) {
        bool any = false;
#pragma unroll
        for (int t = 0; t < Layer::kernel_x; ++t) any |= Layer::tap_phase[t] == phase;
        return any;
    }

    TCONV_DEVICE void load_window(float (&values)[4 * window_vectors], const float* row,
                                  const int (&window)[window_vectors]) const {
#pragma unroll
        for (int k = 0; k < window_vectors; ++k) {
            const float* from = row + window[k];
            int begin = skew - 4 * k;
            int end = skew + pixels + Layer::span_x - 4 * k;
            if (begin >= 3) {
                values[4 * k + 3] = from[3];
            } else if (end <= 1) {
                values[4 * k] = from[0];
            } else {
                using Four = Vector<float, 4>;
                Four part = *reinterpret_cast<const Four*>(from);
#pragma unroll
                for (int v = 0; v < 4; ++v) values[4 * k + v] = part.values[v];
            }
        }
    }

    // Adds the products of `count` channels of the patch to the sums of the step's row of pixels.
    template <int group>
    TCONV_DEVICE void multiply(const float* patch, int first_channel, int count, int step) {
        int thread = own_thread();
        int thread_o = thread / threads_x % threads_o;
        int row = step * threads_y + thread / (threads_x * threads_o);
        int window[window_vectors];
#pragma unroll
        for (int k = 0; k < window_vectors; ++k) {
            window[k] = 4 * PatchSwizzle::of(thread % threads_x * (pixels / 4) + k);
        }
        const float* source = patch + row * patch_pitch;
        const float* weight = shared.weights[weight_buffer].values +
                              first_channel * channel_weights + thread_o * row_weights;
        // Two channels together if one has few products, to hide the loads' latency.
        constexpr int together = Layer::group_products <= 64 ? 2 : 1;
#pragma unroll together
        for (int channel = 0; channel < count; ++channel) {
#pragma unroll
            for (int r = 0; r <= Layer::span_y; ++r) {
                if (!has_tap(group, r)) continue;
                float values[4 * window_vectors];
                load_window(values, source + r * patch_pitch, window);
#pragma unroll
                for (int t = 0; t < Layer::kernel_y; ++t) {
                    constexpr int slots = Layer::group_slots;
                    if (Layer::tap_row[t] != r || Layer::tap_slot[t] / slots != group) continue;
                    int slot = Layer::tap_slot[t] % Layer::group_slots;
                    float taps[row_weights];
#pragma unroll
                    for (int k = 0; k < row_weights; k += 4) {
                        using Four = Vector<float, 4>;
                        Four part = *reinterpret_cast<const Four*>(
                            weight + t * (threads_o * row_weights) + k);
#pragma unroll
                        for (int v = 0; v < 4; ++v) taps[k + v] = part.values[v];
                    }
#pragma unroll
                    for (int u = 0; u < Layer::kernel_x; ++u) {
#pragma unroll
                        for (int i = 0; i < channels; ++i) {
#pragma unroll
                            for (int q = 0; q < pixels; ++q) {
                                float value = values[skew + Layer::tap_column[u] + q];
                                sums[slot][i][Layer::tap_phase[u]][q] +=
                                    taps[u * channels + i] * value;
                            }
                        }
                    }
                }
            }
            source += patch_channel;
            weight += channel_weights;
        }
    }

    // Where a warp writes. Its segments are the pieces of rows of its rows of threads. They lie a
    // fixed distance apart, channels first. These are the rows of one step, of the first phase in
    // y.
    struct Rows {
        float* first;  // this lane's first element of segment 0's first channel
        int channel;
        int y;
        int width;  // outputs from the first element to the row's end
        Index channel_step;
        Index row_step;
        int height;

        TCONV_DEVICE Rows(const Arguments& arguments, const Position& at, int thread, int step)
            : channel_step(arguments.destination_stride_c),
              row_step(arguments.destination_stride_h),
              height(arguments.destination_height) {
            int row = row_of_threads(thread);
            int piece = at.tile_x * row_warps + thread / 32 % row_warps;
            int x = piece * row_outputs + thread % 32 * stored;
            channel = at.first_channel() + row % threads_o * channels;
            y = (at.tile_y * tile_rows + step * threads_y + row / threads_o) * Layer::stride_y;
            width = arguments.destination_width - x;
            float* destination = static_cast<float*>(arguments.destination);
            first = ptx::opaque(destination + at.image * arguments.destination_stride_n +
                                (at.group() * Layer::out_channels + channel) * channel_step +
                                y * row_step + x);
        }

        // Writes the row of channel i of a segment's threads. value(e) gives the values from
        // element e on, of the row's row_outputs.
        template <typename Value>
        TCONV_DEVICE void write(int segment, int i, int phase_y, Value value) const {
            constexpr bool whole = Layer::out_channels % tile_channels == 0;
            int o = segment % threads_o * channels + i;
            int down = segment / threads_o * Layer::stride_y + phase_y;
            bool inside = y + down < height && (whole || channel + o < Layer::out_channels);
            float* row = ptx::opaque(first + (o * channel_step + down * row_step));
            int lane = int(threadIdx.x) % 32 * stored;
            int behind = image_tiles::behind_line<stored>(row - lane);
            row -= behind;
            constexpr int most = image_tiles::most_behind<stored>;
#pragma unroll
            for (int k = 0; k < row_outputs + most; k += 32 * stored) {
                int e = k + lane - behind;
                bool used =
                    (k >= most || e >= 0) && (k + 32 * stored <= row_outputs || e < row_outputs);
                if (used && inside && k - behind < width) store(row + k, value(e));
            }
        }
    };

    TCONV_DEVICE void store_sums(int group, int step) {
        int thread = own_thread();
        float* outputs = shared.outputs[thread / 32];
        float* own = outputs + thread % 32 / row_lanes * row_outputs;
        Rows rows(arguments, position(), thread, step);
        int thread_o = thread / threads_x % threads_o;
        const float* bias = shared.weights[weight_buffer].bias + thread_o * channels;
#pragma unroll
        for (int slot = 0; slot < Layer::group_slots; ++slot) {
            int slot_y = group * Layer::group_slots + slot;
            if (slot_y >= Layer::slots_y) continue;
#pragma unroll
            for (int i = 0; i < channels; ++i) {
                // NOTE: without a bias this zero comes from memory: ptxas spills around vectors
                // that hold constants, those of the phases in x without taps.
                float added = Layer::bias ? bias[i] : 0;
                __syncwarp();  // the last pass has been read
                int thread_x = own_thread() % row_lanes;
#pragma unroll
                for (int e = 0; e < thread_outputs; e += 4) {
                    Vector<float, 4> part;
#pragma unroll
                    for (int v = 0; v < 4; ++v) {
                        int phase = (e + v) % stride_x;
                        float sum = sums[slot][i][phase][(e + v) / stride_x];
                        part.values[v] = !has_tap_x(phase) ? added
                                         : Layer::bias     ? sum + added
                                                           : sum;
                    }
                    int vector = OutputSwizzle::of(thread_x * (thread_outputs / 4) + e / 4);
                    *reinterpret_cast<Vector<float, 4>*>(own + 4 * vector) = part;
                }
                __syncwarp();
#pragma unroll
                for (int segment = 0; segment < warp_segments; ++segment) {
                    rows.write(segment, i, Layer::slot_phase[slot_y], [&](int e) {
                        const float* from =
                            outputs + segment * row_outputs + 4 * OutputSwizzle::of(e / 4) + e % 4;
                        // NOTE: noted here, as it comes from memory: noted beside the sums, ptxas
                        // spills.
                        Stored value = *reinterpret_cast<const Stored*>(from);
#pragma unroll
                        for (int v = 0; v < stored; ++v) not_finite.note(value.values[v]);
                        return value;
                    });
                }
            }
        }
    }

    // Writes the rows of phases in y that no tap reaches.
    TCONV_DEVICE void store_empty(int step) const {
        if constexpr (Layer::slots_y < Layer::stride_y) {
            int thread = own_thread();
            Rows rows(arguments, position(), thread, step);
            int first_o = row_of_threads(thread) % threads_o;
#pragma unroll
            for (int segment = 0; segment < warp_segments; ++segment) {
                int o = first_o + segment % threads_o;
#pragma unroll
                for (int i = 0; i < channels; ++i) {
                    float bias = shared.weights[weight_buffer].bias[o * channels + i];
                    Stored value;
#pragma unroll
                    for (int v = 0; v < stored; ++v) value.values[v] = bias;
#pragma unroll
                    for (int k = 0; k < Layer::stride_y - Layer::slots_y; ++k) {
                        rows.write(segment, i, Layer::empty_phase[k], [&](int) { return value; });
                    }
                }
            }
        }
    }

    // Recomputes the thread's sums of a step that are not finite, which lanes of its warp have
    // written.
    TCONV_DEVICE void repair(int step) const {
        int thread = own_thread();
        int channel = position().first_channel() + thread / threads_x % threads_o * channels;
        int row =
            position().tile_y * tile_rows + step * threads_y + thread / (threads_x * threads_o);
        int y = row * Layer::stride_y;
        int x = (position().tile_x * threads_x + thread % threads_x) * thread_outputs;
        float* first =
            static_cast<float*>(arguments.destination) +
            (position().image * arguments.destination_stride_n +
             (position().group() * Layer::out_channels + channel) * arguments.destination_stride_c +
             y * arguments.destination_stride_h + x);
#pragma unroll 1
        for (int e = 0; e < channels * Layer::stride_y * thread_outputs; ++e) {
            int right = e % thread_outputs, down = e / thread_outputs % Layer::stride_y;
            int o = e / (thread_outputs * Layer::stride_y);
            if (channel + o < Layer::out_channels && y + down < arguments.destination_height &&
                x + right < arguments.destination_width) {
                exact::repair<Layer::round_to_tf32>(
                    arguments, first + (o * arguments.destination_stride_c +
                                        down * arguments.destination_stride_h + right));
            }
        }
    }

    template <int group>
    TCONV_DEVICE void compute(int step) {
        if constexpr (group < groups_y) {
            clear_sums();
#pragma unroll 1
            for (int first = 0; first < Layer::in_channels; first += depth) {
                if constexpr (chunks > 1) {
                    bool last = first + depth >= Layer::in_channels;
                    begin_step(last && group == groups_y - 1, last ? 0 : first + depth);
                }
                int rest = Layer::in_channels - first;
                multiply<group>(shared.patch[stage ^ 1], first, rest < depth ? rest : depth, step);
            }
            store_sums(group, step);
            compute<group + 1>(step);
        }
    }

    TCONV_DEVICE void run() {
        Position first(blockIdx.x, arguments);
        publish(first, 0);
        load_weights(shared.weights[0], first);
        load_patch(shared.patch[0], first, 0);
        while (true) {
            if constexpr (chunks == 1) begin_step(true, 0);
#pragma unroll 1
            for (int step = 0; step < Layer::thread_rows; ++step) {
                // In a tile that reaches beyond the last row, whole warps have nothing to do.
                int y = position().tile_y * tile_rows + step * threads_y +
                        row_of_threads(int(threadIdx.x)) / threads_o;
                if (chunks == 1 && y * Layer::stride_y >= arguments.destination_height) break;
                not_finite = {};
                compute<0>(step);
                store_empty(step);
                if (__any_sync(~0u, not_finite.any())) {
                    __syncwarp();
                    repair(step);
                }
            }
            if (next_tile() >= arguments.tiles) return;
            turn ^= 1;
            if (new_weights) {
                if constexpr (Layer::weight_buffers > 1) {
                    weight_buffer ^= 1;
                } else {
                    __syncthreads();  // no thread still reads the last tile's weights
                    load_weights(shared.weights[0], position());
                }
            }
        }
    }
};

}  // namespace

TCONV_KERNEL(direct_forward, Layer::threads, Layer::blocks) {
    TCONV_DYNAMIC_SHARED(memory);
    Block(arguments, *reinterpret_cast<Shared*>(memory)).run();
}
