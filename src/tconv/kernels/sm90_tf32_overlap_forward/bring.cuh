// Loads of sm90_tf32_overlap_forward: pixels and weights from device memory into shared memory.
#pragma once

#include <ptx/barrier.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/memory.cuh>
#include <ptx/registers.cuh>
#include <sm90_tf32_overlap_forward/strips.cuh>

namespace {

TCONV_DEVICE int after(int stage) { return stage + 1 < stages ? stage + 1 : 0; }

constexpr int copied = Layer::source_vectors ? 4 : 1;
constexpr int row_copies = Layer::columns / copied;
// Neighbouring threads that copy one channel. Each copies the same columns of every so many
// channels.
constexpr int copy_lanes =
    Layer::source_vectors ? (row_copies <= 8 ? 8 : 16) : (row_copies <= 32 ? 32 : 64);
constexpr int lane_copies = (row_copies + copy_lanes - 1) / copy_lanes;
constexpr int channel_lanes = warpgroup / copy_lanes;
constexpr int lane_channels = (depth + channel_lanes - 1) / channel_lanes;
static_assert(Layer::columns % copied == 0 && Layer::columns % 2 == 0, "whole copies and pairs");
// Whether copies are issued during the products.
// NOTE: where threads diverge, or go on to further products, ptxas would wait for each product by
// itself.
constexpr bool copies_beside =
    chunks == 1 && row_copies % copy_lanes == 0 && depth % channel_lanes == 0;

struct Copies {
    const Arguments& arguments;
    Walk at;
    const float* row[lane_copies];  // of input row y, in the first of the thread's channels
    bool inside[lane_copies];  // is this column of the image?
    int chunk = 0;
    Index group;
    int own;
    float* pixels;
    float* place;
    int stage = 0, filled = stages - 1;

    TCONV_DEVICE Copies(const Arguments& arguments, const Walk& at, Index group, Shared& shared,
                        int own)
        : arguments(arguments), at(at), group(group), own(own), pixels(shared.pixels[own][0]) {
        int thread = threadIdx.x % warpgroup;
        place = pixels + thread / copy_lanes * pitch + thread % copy_lanes * copied;
        if (at.exists()) enter();
    }

    TCONV_DEVICE void begin() { load(0); }

    // Starts the copies of the stages after the first that there is room for.
    TCONV_DEVICE void fill() {
#pragma unroll 1
        for (int i = 1; i < stages - 1; ++i) {
            advance();
            load(i);
        }
        advance();
    }

    // Waits until this stage's copies are visible and no thread still reads the last stage.
    TCONV_DEVICE void wait() const {
        ptx::cp_async_wait_group<stages - 2>();
        ptx::bar_sync(1 + own, warpgroup);
    }

    TCONV_DEVICE const float* staged() const { return pixels + stage * stage_floats; }

    TCONV_DEVICE void before_products() {
        if (copies_beside) return;
        load(filled);
        advance();
    }

    TCONV_DEVICE void beside_products() {
        if (copies_beside) load(filled);
    }

    TCONV_DEVICE void after_products() {
        if (copies_beside) advance();
        filled = stage;
        stage = after(stage);
    }

    TCONV_DEVICE void end() const { ptx::cp_async_wait_all(); }

private:
    // Starts the next stage's copies; copies zeros where there is no next stage. Each call commits
    // a group, so that groups of copies are stages.
    TCONV_DEVICE void load(int stage) {
        bool exists = at.exists() && at.y < arguments.source_height;
        float* to = place + stage * stage_floats;
        int own_channel = threadIdx.x % warpgroup / copy_lanes;
        int left = Layer::in_channels - own_channel - chunk * depth;
        Index step = channel_lanes * arguments.source_stride_c;
#pragma unroll
        for (int i = 0; i < lane_copies; ++i) {
            bool last = (i + 1) * copy_lanes > row_copies;
            if (last && threadIdx.x % copy_lanes + i * copy_lanes >= row_copies) continue;
            const float* from = row[i] + chunk * (depth * arguments.source_stride_c);
            bool valid = exists && inside[i];
#pragma unroll
            for (int k = 0; k < lane_channels; ++k) {
                if (depth % channel_lanes != 0 && own_channel + k * channel_lanes >= depth) break;
                // NOTE: channels beyond the last are zeroed, so that their weights add nothing.
                constexpr bool whole = Layer::in_channels % depth == 0;
                bool copies = valid && (whole || k * channel_lanes < left);
                float* target = to + (k * channel_lanes * pitch + i * copy_lanes * copied);
                if constexpr (Layer::source_vectors) {
                    ptx::cp_async_cg_16(target, from, copies);
                } else {
                    ptx::cp_async_ca<4>(target, from, copies);
                }
                from += step;
            }
        }
        ptx::cp_async_commit_group();
    }

    // Goes on to the following stage.
    TCONV_DEVICE void advance() {
        if (!at.exists()) return;
        if (chunks > 1 && ++chunk < chunks) return;
        chunk = 0;
        if (at.advance(arguments)) {
            if (at.exists()) enter();
        } else {
#pragma unroll
            for (int i = 0; i < lane_copies; ++i) row[i] += arguments.source_stride_h;
        }
    }

    TCONV_DEVICE void enter() {
        int thread = threadIdx.x % warpgroup;
        const float* source =
            static_cast<const float*>(arguments.source) + at.image * arguments.source_stride_n +
            (group * Layer::in_channels + thread / copy_lanes) * arguments.source_stride_c +
            at.y * arguments.source_stride_h;
        int first = Layer::first_column + at.strip * Layer::strip + thread % copy_lanes * copied;
        Index step_x = Layer::source_vectors ? Index(1) : Index(arguments.source_stride_w);
#pragma unroll
        for (int i = 0; i < lane_copies; ++i) {
            int x = first + i * copy_lanes * copied;
            inside[i] = unsigned(x) < unsigned(arguments.source_width);
            row[i] = source + (inside[i] ? x : 0) * step_x;
        }
    }
};

// Where channel `in` of a product's column lies.
TCONV_DEVICE int weight_place(int column, int in) {
    return in / 32 * block_bytes + column * line_bytes + (in % 32 * 4 ^ column % 8 * 16);
}

// The column of an element of an input channel's weights.
TCONV_DEVICE int column_of(int element) {
    int channel = element / taps;
    int tap_y = element % taps / kernel_x, tap_x = element % kernel_x;
    int unit = tap_y % stride_y * Layer::out_channels + channel;
    int begin = 0;
#pragma unroll
    for (int slot = 1; slot < unit_slots; ++slot) {
        if (unit / 4 == slot) begin = slot_begin(slot);
    }
    return product_column(begin + tap_y / stride_y * kernel_x + tap_x, unit % 4);
}

// Loads and rounds all weights of a group, by the whole block; zeros where a column has no tap.
// `beside` runs while the first loads are under way.
template <typename Action>
TCONV_DEVICE void load_weights(const Arguments& arguments, Index group, Shared& shared,
                               Action beside) {
    constexpr int threads = Layer::threads;
    constexpr int count = Layer::in_channels * elements;
    constexpr int own = (count + threads - 1) / threads;  // of a thread
    constexpr int batches = (own + 15) / 16;
    constexpr int batch = (own + batches - 1) / batches;
    int thread = int(threadIdx.x);
    for (int element = thread; element < elements; element += threads) {
        shared.weight_offsets[element] = element / taps * arguments.weight_stride_out +
                                         element % taps / kernel_x * arguments.weight_stride_h +
                                         element % kernel_x * arguments.weight_stride_w;
        shared.weight_columns[element] = column_of(element);
    }
    __syncthreads();
    const float* source = static_cast<const float*>(arguments.weight) +
                          group * Layer::in_channels * arguments.weight_stride_in;
#pragma unroll 1
    for (int b = 0; b < batches; ++b) {
        // NOTE: neighbouring threads take neighbours in memory, which all blocks read at the same
        // time. They issue all loads before the first returns.
        int first = b * batch * threads + thread;
        float values[batch];
#pragma unroll
        for (int k = 0; k < batch; ++k) {
            int i = first + k * threads;
            values[k] = 0;
            if (i < count) {
                values[k] = ptx::ld_global_nc(source + (i / elements * arguments.weight_stride_in +
                                                        shared.weight_offsets[i % elements]));
            }
        }
        ptx::fence_registers(values);  // asked for before what follows
        if (b == 0) {
            beside();
            constexpr int bytes = lines * block_bytes;
            for (int at = thread * 16; at < bytes; at += threads * 16) {
                ptx::st_shared_v4(reinterpret_cast<float*>(shared.weights + at),
                                  make_float4(0, 0, 0, 0));
            }
            __syncthreads();
        }
#pragma unroll
        for (int k = 0; k < batch; ++k) {
            int i = first + k * threads;
            if (i >= count) continue;
            int place = weight_place(shared.weight_columns[i % elements], i / elements);
            *reinterpret_cast<uint32_t*>(shared.weights + place) = tf32_bits(values[k]);
        }
    }
}

}  // namespace
