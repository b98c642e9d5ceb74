// out[n, co, oy, ox] of layers with few output channels and many taps, on Hopper's tensor cores
// with TF32 operands rounded to nearest: every input pixel is multiplied by all taps at once, and
// outputs add up what overlaps, in registers.
//
//   row     one of 64 neighbouring pixels of an input row, 16 to a warp; from registers
//   column  (out channel, tap in y, tap in x); from shared memory, the same for all rows of an
// image
//   depth   the input channels
//
// With g = lane / 4 and t = lane % 4, a thread has rows g and g + 8 of its warp's 16, which are the
// neighbours 2g and 2g + 1, and of every 8 columns 2t and 2t + 1. Columns are dealt so that a
// thread has all taps of a unit, which is an out channel and a phase in y: unit 4 * slot + t.
//
// Warps do not meet: their pixels overlap by `reach` pairs, and a warp's outputs lack those of its
// first `reach` pairs. Pixel c stands for the outputs x = c * stride_x + r - offset_x, r <
// stride_x, of which tap k is in pixel c - (k + lead) / stride_x, phase r = (k + lead) % stride_x.
// So what crosses threads goes from a pair to the next.
//
// A warpgroup walks down a strip of an image, an input row a step. Products with row y go to the
// output rows q * stride_y + phase - padding_y, q = y + tap / stride_y, of which q = y is complete
// then; sums of the others wait in registers, what the thread adds to its own outputs and to those
// of the next pairs apart: they are passed on once, when a row is complete.
//
// All rows of all strips, of an image from the first that its input reaches on, are in one line, or
// `abreast` strips side by side in lines of their own, and the warpgroups share them out evenly. A
// share, and each strip in it, begins with those input rows above it that reach into it. Each
// warpgroup copies its own rows, by cp.async, `stages` - 1 stages of `depth` channels ahead, in
// whole sectors; it asks for them, and writes the last row, during the products. Warpgroups meet
// when the weights are in place.
#include <common/element.cuh>
#include <common/exact_output.cuh>
#include <ptx/barrier.cuh>
#include <ptx/bulk.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/memory.cuh>
#include <ptx/registers.cuh>
#include <ptx/wgmma.cuh>

namespace {

using Index = Layer::Index;

constexpr int warpgroup = 128;
constexpr int warps = Layer::threads / 32;
constexpr int warpgroups = Layer::threads / warpgroup;
constexpr int stride_x = Layer::stride_x;
constexpr int stride_y = Layer::stride_y;
constexpr int kernel_x = Layer::kernel_x;
constexpr int taps = Layer::kernel_y * kernel_x;
constexpr int elements = Layer::out_channels * taps;

constexpr int stages = Layer::stages;
constexpr int depth = Layer::depth;
constexpr int chunks = (Layer::in_channels + depth - 1) / depth;
constexpr int last_depth = (Layer::in_channels - (chunks - 1) * depth + 7) / 8 * 8;
constexpr int wgmma_depth = 8;
static_assert(depth % wgmma_depth == 0 && stages >= 2, "whole products, and copies beside them");

// [depth][pitch]: pixels from `skew` before the strip's first on, which is even.
// NOTE: 8 modulo 16: pairs of pixels of four channels by four neighbours lie in all 32 banks.
constexpr int pitch = Layer::pitch;
constexpr int stage_floats = depth * pitch;
static_assert(pitch % 16 == 8 && Layer::columns <= pitch, "whole rows in 8 or 24 banks' distance");

// --- how columns are dealt

constexpr int units = stride_y * Layer::out_channels;  // [phase in y][out channel]
constexpr int unit_slots = (units + 3) / 4;

TCONV_DEVICE constexpr int phase_taps(int phase) {
    return phase < Layer::kernel_y ? (Layer::kernel_y - phase + stride_y - 1) / stride_y : 0;
}

// Taps in y of a slot's units: of its first, which has most.
TCONV_DEVICE constexpr int slot_taps(int slot) {
    return phase_taps(slot * 4 / Layer::out_channels);
}

// A thread's first column of a slot.
// NOTE: from an array: where a function counts, the products are indexed too late to be registers.
TCONV_DEVICE constexpr int slot_begin(int slot) { return Layer::slot_begin[slot]; }

constexpr int lane_columns = slot_begin(unit_slots);
constexpr int columns = (lane_columns + 1) / 2 * 8;
static_assert(columns >= 8 && columns <= 256, "wgmma's columns");
using Products = float[columns / 2];

// A thread's column as the product's.
TCONV_DEVICE constexpr int product_column(int lane_column, int t) {
    return lane_column / 2 * 8 + 2 * t + lane_column % 2;
}

// Output rows that an input row reaches.
constexpr int window = phase_taps(0);
// Pairs before its own that a pair's outputs reach back to.
constexpr int reach = ((kernel_x - 1 + Layer::lead) / stride_x + 1) / 2;

// A thread's sums of an output row of a unit. [r][o][h]: phase r in x of the first or second of a
// pair of pixels, the thread's own or h pairs on.
using Sums = float[stride_x][2][reach + 1];

// The tap by which the thread's pixel e is in such a sum; outside 0 to kernel_x - 1 if by none.
TCONV_DEVICE constexpr int tap_of(int r, int o, int h, int e) {
    return (2 * h + o - e) * stride_x + r - Layer::lead;
}

TCONV_DEVICE constexpr bool is_tap(int tap) { return tap >= 0 && tap < kernel_x; }

TCONV_DEVICE constexpr bool has_sum(int r, int o, int h) {
    return is_tap(tap_of(r, o, h, 0)) || is_tap(tap_of(r, o, h, 1));
}

// --- shared memory

constexpr int line_bytes = 128;  // 32 channels of a column
constexpr int block_bytes = columns * line_bytes;
constexpr int lines = ((chunks - 1) * depth + last_depth + 31) / 32;

// Outputs that are written at a time, of a row of a warp.
constexpr int vector = Layer::store_vector;
constexpr int useful = 16 - 2 * reach;  // pixels of a warp that have outputs
constexpr int row_outputs = useful * stride_x;
static_assert(2 * stride_x % vector == 0, "a pair's outputs are whole vectors");
static_assert(2 * stride_x <= 32, "a word says which exist");

// A pair's outputs are neighbours, but where they are several vectors, a store would write parts of
// sectors. A warp gathers them then: [unit][row_outputs].
constexpr bool gathers = Layer::gathers;
constexpr int gathered = gathers ? (units * row_outputs + 3) / 4 * 4 : 4;
constexpr int row_vectors = row_outputs / vector;
constexpr int rounds = (units * row_vectors + 31) / 32;
constexpr int places = gathers ? rounds : unit_slots;  // where a thread writes
static_assert(!gathers || rounds <= 32, "a word says which exist");

struct Shared {
    // [32 channels][column][channel], swizzled.
    alignas(1024) unsigned char weights[lines * block_bytes];
    alignas(16) float pixels[warpgroups][stages][stage_floats];
    alignas(16) float outputs[warps][gathered];
    // Of an input channel's weights, (out channel, tap in y, tap in x): where each lies, and its
    // column.
    Index weight_offsets[elements];
    int weight_columns[elements];
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

// --- where a warpgroup is

// The rows of a strip that belong to a warpgroup's share, and the input row of this step.
struct Walk {
    Index line, end;  // of the strip's rows in its line of rows; of the share
    int first_strip;  // of the line
    Index image;
    int strip;
    int y;
    int first_q, last_q;  // rows that are written, the last not included

    TCONV_DEVICE Walk(const Arguments& arguments, Index begin, Index end, int first_strip)
        : line(begin), end(end), first_strip(first_strip) {
        enter(arguments);
    }

    TCONV_DEVICE bool exists() const { return line < end; }

    // To the next input row; true where that is of another strip, or there is none.
    TCONV_DEVICE bool advance(const Arguments& arguments) {
        if (++y < last_q) return false;
        line += last_q - first_q;
        enter(arguments);
        return true;
    }

private:
    TCONV_DEVICE void enter(const Arguments& arguments) {
        Index number = line / arguments.rows;
        int row = int(line - number * arguments.rows);
        image = number / arguments.strips;
        strip = first_strip + int(number - image * arguments.strips);
        Index left = end - line;
        int count = left < arguments.rows - row ? int(left) : arguments.rows - row;
        first_q = Layer::first_q + row;
        last_q = first_q + count;
        y = first_q - (window - 1) > 0 ? first_q - (window - 1) : 0;
    }
};

// --- copies

TCONV_DEVICE int after(int stage) { return stage + 1 < stages ? stage + 1 : 0; }

constexpr int copied = Layer::source_vectors ? 4 : 1;
constexpr int row_copies = Layer::columns / copied;
// Threads side by side on a channel; each copies the same columns of every so many channels.
constexpr int copy_lanes =
    Layer::source_vectors ? (row_copies <= 8 ? 8 : 16) : (row_copies <= 32 ? 32 : 64);
constexpr int lane_copies = (row_copies + copy_lanes - 1) / copy_lanes;
constexpr int channel_lanes = warpgroup / copy_lanes;
constexpr int lane_channels = (depth + channel_lanes - 1) / channel_lanes;
static_assert(Layer::columns % copied == 0 && Layer::columns % 2 == 0, "whole copies and pairs");
// Whether copies are asked for during the products.
// NOTE: where threads part, or go on to further products, ptxas would wait for each product by
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

    // The stages after the first that there is room for.
    TCONV_DEVICE void fill() {
#pragma unroll 1
        for (int i = 1; i < stages - 1; ++i) {
            advance();
            load(i);
        }
        advance();
    }

    // Until this stage's copies are visible, and no thread reads the last stage any more.
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
    // The next stage's copies, zeros where there is none. Always a group, so that groups of copies
    // are stages.
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
                // NOTE: channels beyond the last are zero, so that nothing meets their weights.
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

    // To the stage after.
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

// --- weights

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

// All weights of a group, rounded, by the whole block; zeros where a column has no tap. `beside` is
// done while the first come.
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
        // time, and ask for all before the first is there.
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

// --- products

// One chunk's. `pixels`: the thread's first pair in the first of its channels. `beside` is done
// during the products.
template <int count, typename Action>
TCONV_DEVICE void multiply(const float* pixels, uint64_t weights, int chunk, Products& products,
                           Action beside) {
    uint32_t a[count / wgmma_depth][4];
#pragma unroll
    for (int k = 0; k < count / wgmma_depth; ++k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float2 pair =
                *reinterpret_cast<const float2*>(pixels + (k * wgmma_depth + half * 4) * pitch);
            a[k][2 * half] = __float_as_uint(pair.x);
            a[k][2 * half + 1] = __float_as_uint(pair.y);
        }
    }
#pragma unroll
    for (int k = 0; k < count / wgmma_depth; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[k][i] = tf32_bits(__uint_as_float(a[k][i]));
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < count / wgmma_depth; ++k) {
        int in = chunk * depth + k * wgmma_depth;
        ptx::wgmma_m64k8_tf32<columns>(products, a[k],
                                       ptx::advance(weights, in / 32 * block_bytes + in % 32 * 4),
                                       chunk > 0 || k > 0);
    }
    ptx::wgmma_commit_group();
    beside();
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(
        products);  // NOTE: here, before any branch, else ptxas waits for each by itself.
}

// --- outputs

// Writes neighbouring outputs, where they exist.
TCONV_DEVICE void store(float* destination, const float* v, bool exist) {
    if constexpr (vector == 4) {
        ptx::st_global_cs_v4_if(destination, make_float4(v[0], v[1], v[2], v[3]), exist);
    } else if constexpr (vector == 2) {
        ptx::st_global_cs_v2_if(destination, make_float2(v[0], v[1]), exist);
    } else {
        ptx::st_global_cs_if(destination, v[0], exist);
    }
}

struct Outputs {
    const Arguments& arguments;
    float* staged;  // of the warp
    float waiting[unit_slots][window > 1 ? window - 1 : 1][stride_x][2][reach + 1];
    float bias[unit_slots];
    Index offset[places];  // from the first unit's
    int row[places];  // of the outputs, less q * stride_y
    float* to;  // of output row y * stride_y, in the first out channel
    int first_row;  // y * stride_y, both of the last row that was added
    uint32_t live;  // a bit for each of the pair's outputs in x, or for each place
    uint32_t pending = 0;  // of these, what of that row is gathered and not yet written

    TCONV_DEVICE Outputs(const Arguments& arguments, Index group, float* staged)
        : arguments(arguments), staged(staged) {
        const float* biases =
            static_cast<const float*>(arguments.bias) + group * Layer::out_channels;
#pragma unroll
        for (int slot = 0; slot < unit_slots; ++slot) {
            int unit = slot * 4 + threadIdx.x % 4;
            int channel = unit < units ? unit % Layer::out_channels : 0;
            bias[slot] = Layer::bias ? ptx::ld_global_nc(biases + channel) : 0;
        }
#pragma unroll
        for (int i = 0; i < places; ++i) {
            int unit = gathers ? vector_of(i) / row_vectors : i * 4 + threadIdx.x % 4;
            bool exists = unit < units;
            int phase = exists ? unit / Layer::out_channels : 0;
            int channel = exists ? unit % Layer::out_channels : 0;
            // NOTE: a row that never exists.
            row[i] = exists ? phase - Layer::padding_y : -(1 << 30) * 2;
            offset[i] = channel * arguments.destination_stride_c +
                        (phase - Layer::padding_y) * arguments.destination_stride_h +
                        (gathers ? column_of(i) : 0);
        }
    }

    TCONV_DEVICE void enter(const Walk& at, Index group) {
        int pair = threadIdx.x % 32 / 4;
        int pixel = Layer::first_pixel + at.strip * Layer::strip +
                    threadIdx.x % warpgroup / 32 * useful + 2 * (gathers ? reach : pair);
        int x = pixel * stride_x - Layer::offset_x;
        live = 0;
#pragma unroll
        for (int i = 0; i < (gathers ? places : 2 * stride_x); i += gathers ? 1 : vector) {
            int column = x + (gathers ? column_of(i) : i);
            bool exists = (gathers || pair >= reach) &&
                          unsigned(column) < unsigned(arguments.destination_width);
            live |= uint32_t(exists) << i;
        }
        first_row = (at.y - 1) * stride_y;
        to = static_cast<float*>(arguments.destination) +
             (at.image * arguments.destination_stride_n +
              group * Layer::out_channels * arguments.destination_stride_c +
              first_row * arguments.destination_stride_h + x);
        each_sum([&](int slot, int i, int r, int o, int h) {
            if (i + 1 < slot_taps(slot)) waiting[slot][i][r][o][h] = 0;
        });
    }

    // Of every sum of the thread: its slot, row, phase, pixel and pair.
    template <typename Action>
    TCONV_DEVICE static void each_sum(Action action) {
#pragma unroll
        for (int slot = 0; slot < unit_slots; ++slot) {
#pragma unroll
            for (int i = 0; i < window; ++i) {
#pragma unroll
                for (int r = 0; r < stride_x; ++r) {
#pragma unroll
                    for (int o = 0; o < 2; ++o) {
#pragma unroll
                        for (int h = 0; h <= reach; ++h) {
                            if (i < slot_taps(slot) && has_sum(r, o, h)) action(slot, i, r, o, h);
                        }
                    }
                }
            }
        }
    }

    // Adds the products with the walk's input row, and writes the rows that are complete if they
    // are its own.
    TCONV_DEVICE void add(const Products& products, const Walk& at, Index group) {
        Sums complete[unit_slots];
        each_sum([&](int slot, int i, int r, int o, int h) {
            bool begun = i + 1 < slot_taps(slot);
            float sum = begun ? waiting[slot][i][r][o][h] : 0.0f;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                int tap = tap_of(r, o, h, e);
                if (!is_tap(tap)) continue;
                int column = slot_begin(slot) + i * kernel_x + tap;
                float product = products[column / 2 * 4 + 2 * e + column % 2];
                sum = begun ? sum + product : product;
                begun = true;
            }
            if (i == 0) {
                complete[slot][r][o][h] = sum;
            } else {
                waiting[slot][i - 1][r][o][h] = sum;
            }
        });
        to += stride_y * arguments.destination_stride_h;
        first_row += stride_y;
        pending = 0;
        if (at.y >= at.first_q) {
            NotFinite<float> not_finite;
            if (gathers) __syncwarp();  // the last row has been read
#pragma unroll
            for (int slot = 0; slot < unit_slots; ++slot) {
                float values[2 * stride_x];
                finish(slot, complete[slot], values);
#pragma unroll
                for (int i = 0; i < 2 * stride_x; ++i) not_finite.note(values[i]);
                if (gathers) {
                    stage(slot, values);
                } else {
                    write(slot, values);
                }
            }
            if (not_finite.any()) repair(at, group);
            if (gathers) {
                __syncwarp();
                pending = live;
            }
        }
    }

    // The last row, where it is gathered: from shared memory and to its place.
    TCONV_DEVICE void load_pending(Vector<float, vector> (&parts)[places]) const {
#pragma unroll
        for (int i = 0; i < places; ++i) {
            int place = min(vector_of(i), units * row_vectors - 1);
            parts[i] = *reinterpret_cast<const Vector<float, vector>*>(staged + place * vector);
        }
    }

    TCONV_DEVICE void write_pending(const Vector<float, vector> (&parts)[places]) const {
#pragma unroll
        for (int i = 0; i < places; ++i) {
            store(to + offset[i], parts[i].values, (pending >> i & 1) && has_row(i));
        }
    }

    // Before another strip is entered, or none.
    TCONV_DEVICE void finish_rows() {
        if (!gathers || pending == 0) return;
        Vector<float, vector> parts[places];
        load_pending(parts);
        write_pending(parts);
        pending = 0;
    }

private:
    // Where gathered: which of the warp's vectors a thread writes, and where that is in its row.
    TCONV_DEVICE static int vector_of(int place) { return place * 32 + threadIdx.x % 32; }
    TCONV_DEVICE static int column_of(int place) { return vector_of(place) % row_vectors * vector; }

    TCONV_DEVICE bool has_row(int place) const {
        return unsigned(first_row + row[place]) < unsigned(arguments.destination_height);
    }

    // The pair's outputs of a unit: sums of other pairs added, and the bias.
    TCONV_DEVICE void finish(int slot, const Sums& sums, float (&values)[2 * stride_x]) const {
#pragma unroll
        for (int r = 0; r < stride_x; ++r) {
#pragma unroll
            for (int o = 0; o < 2; ++o) {
                float sum = 0;
                bool any = false;
                if (slot_taps(slot) > 0) {
#pragma unroll
                    for (int h = reach; h >= 0; --h) {
                        if (has_sum(r, o, h)) {
                            sum = any ? sum + sums[r][o][h] : sums[r][o][h];
                            any = true;
                        }
                        if (any && h > 0) sum = __shfl_up_sync(0xffffffffu, sum, 4);
                    }
                }
                values[o * stride_x + r] = Layer::bias ? sum + bias[slot] : sum;
            }
        }
    }

    TCONV_DEVICE void write(int slot, const float (&values)[2 * stride_x]) const {
        if (!has_row(slot)) return;
        float* destination = to + offset[slot];
#pragma unroll
        for (int i = 0; i < 2 * stride_x; i += vector) {
            store(destination + i, values + i, live >> i & 1);
        }
    }

    // What the thread has staged, or written, of this row and is not finite.
    TCONV_DEVICE void repair(const Walk& at, Index group) const {
        int pair = threadIdx.x % 32 / 4;
        if (pair < reach) return;
        int pixel = Layer::first_pixel + at.strip * Layer::strip +
                    threadIdx.x % warpgroup / 32 * useful + 2 * pair;
#pragma unroll 1
        for (int i = 0; i < unit_slots * 2 * stride_x; ++i) {
            int unit = i / (2 * stride_x) * 4 + threadIdx.x % 4, column = i % (2 * stride_x);
            if (unit >= units) break;
            int channel = unit % Layer::out_channels;
            int y = first_row + unit / Layer::out_channels - Layer::padding_y;
            int x = pixel * stride_x - Layer::offset_x + column;
            if (unsigned(y) >= unsigned(arguments.destination_height) ||
                unsigned(x) >= unsigned(arguments.destination_width)) {
                continue;
            }
            float* place =
                gathers ? staged + unit * row_outputs + (pair - reach) * (2 * stride_x) + column
                        : static_cast<float*>(arguments.destination) +
                              (at.image * arguments.destination_stride_n +
                               (group * Layer::out_channels + channel) *
                                   arguments.destination_stride_c +
                               y * arguments.destination_stride_h + x);
            if (is_finite(*place)) continue;
            *place = exact::output<true>(arguments, at.image, group, channel, y, x);
        }
    }

    TCONV_DEVICE void stage(int slot, const float (&values)[2 * stride_x]) const {
        int unit = slot * 4 + threadIdx.x % 4, pair = threadIdx.x % 32 / 4;
        if (unit >= units || pair < reach) return;
        float* place = staged + unit * row_outputs + (pair - reach) * (2 * stride_x);
#pragma unroll
        for (int i = 0; i < 2 * stride_x; i += vector) {
            Vector<float, vector> part;
#pragma unroll
            for (int v = 0; v < vector; ++v) part.values[v] = values[i + v];
            *reinterpret_cast<Vector<float, vector>*>(place + i) = part;
        }
    }
};

// --- a warpgroup

TCONV_DEVICE void run(const Arguments& arguments, Shared& shared) {
    // NOTE: the same in all lanes, and known to be so.
    int own = __shfl_sync(0xffffffffu, threadIdx.x / warpgroup, 0);
    Index group = blockIdx.x % Layer::groups;
    Index block = blockIdx.x / Layer::groups;
    Index share = arguments.step == 1 ? block * warpgroups + own : block + own * arguments.step;
    int strip = int(share % arguments.abreast);
    Index begin = share / arguments.abreast * arguments.share;
    Index end =
        begin + arguments.share < arguments.lines ? begin + arguments.share : arguments.lines;

    Walk at(arguments, begin, end, strip);
    Copies copies(arguments, at, group, shared, own);
    copies.begin();
    load_weights(arguments, group, shared, [&] { copies.fill(); });
    ptx::fence_proxy_async_shared();
    __syncthreads();
    if (!at.exists()) return;

    int lane = threadIdx.x % 32;
    int first = Layer::skew + threadIdx.x % warpgroup / 32 * useful + lane / 4 * 2;
    // NOTE: of a narrow image not all were copied; these have no outputs, any others will do.
    if (first > Layer::columns - 2) first = Layer::columns - 2;
    first += lane % 4 * pitch;
    uint64_t weights =
        ptx::matrix_descriptor(shared.weights, 16, 8 * line_bytes, ptx::Swizzle::bytes_128);
    Outputs outputs(arguments, group, shared.outputs[threadIdx.x / 32]);
    // NOTE: here, so that the first product of a row overwrites those of the last: no one clears
    // them.
    Products products = {};
    do {
        outputs.finish_rows();
        outputs.enter(at, group);
        bool over;
        do {
#pragma unroll
            for (int chunk = 0; chunk < chunks; ++chunk) {
                copies.wait();
                copies.before_products();
                auto beside = [&] {
                    Vector<float, vector> parts[places];
                    if (gathers && chunk == 0) outputs.load_pending(parts);
                    copies.beside_products();
                    if (gathers && chunk == 0) outputs.write_pending(parts);
                };
                const float* from = copies.staged() + first;
                if (chunk + 1 < chunks) {
                    multiply<depth>(from, weights, chunk, products, beside);
                } else {
                    multiply<last_depth>(from, weights, chunk, products, beside);
                }
                copies.after_products();
            }
            outputs.add(products, at, group);
            over = at.advance(arguments);
        } while (!over);
    } while (at.exists());
    outputs.finish_rows();
    copies.end();
}

}  // namespace

TCONV_KERNEL(sm90_tf32_overlap_forward, Layer::threads, 1) {
    TCONV_DYNAMIC_SHARED(memory);
    run(arguments, *reinterpret_cast<Shared*>(memory));
}
