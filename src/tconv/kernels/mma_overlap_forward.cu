// out[n, co, oy, ox] of layers with few output channels and many taps, on mma.sync with TF32 operands:
// every input pixel is multiplied by all taps at once, and outputs add up what overlaps.
//
//   row     (out channel, tap in y, tap in x), 16 to a fragment
//   column  one of 8 pixels of an input row
//   depth   8 input channels
//
// A pixel and its 8 channels are so read from shared memory once for all taps; the products go to
// shared memory, and each output gathers its own from there, always in the same order. Weights are
// fragments in registers, as long as the block stays with their group.
//
// A block walks down a strip of an image, `step_rows` input rows at a time:
//
//   copy      the rows of all input channels of a step, by cp.async, `stages` steps ahead
//   multiply  warps divide the rows of the product, the input channels and the pixels among them
//   gather    in x, output stride_x*m + r of the strip takes its taps' products of pixels m + offset.
//             In y, pixel q stands for the outputs q*stride_y + phase - padding_y, tap t is of phase
//             t*dilation % stride_y and reads input q - t*dilation / stride_y. A warp's unit is 32
//             pixels m of an out channel and a phase in y; of each it keeps the sums of the rows that
//             are not complete yet, and writes the row that is
//
// A tile is a strip of so many rows q that all SMs are busy; it begins with those input rows above it
// that reach into it. A strip's first columns are computed in the strip before as well.
#include <common/exact_output.cuh>
#include <common/image_tiles.cuh>
#include <ptx/mma.cuh>

namespace {

using Index = Layer::Index;
using image_tiles::own_thread;

constexpr int threads = Layer::threads;
constexpr int warps = threads / 32;
constexpr int stages = Layer::stages;
constexpr int stride_x = Layer::stride_x;
constexpr int stride_y = Layer::stride_y;

// Pixels that are multiplied: `columns` of each of a step's rows.
constexpr int step_rows = Layer::step_rows;
constexpr int columns = Layer::columns;
constexpr int step_fragments = step_rows * columns / 8;
constexpr int m_tiles = Layer::m_tiles;
constexpr int k_steps = Layer::k_steps;
constexpr int depth = Layer::k_groups * k_steps * 8;
static_assert(columns % 8 == 0, "a fragment is 8 pixels of one row");
static_assert(Layer::m_groups * Layer::k_groups * Layer::n_groups <= warps, "warps for all products");

// Rows of the product: [out channel][tap in y][tap in x].
constexpr int taps = Layer::kernel_y * Layer::kernel_x;
constexpr int rows = Layer::out_channels * taps;
constexpr int stored_rows = Layer::m_groups * m_tiles * 16;

// [depth][step_rows][columns]
// NOTE: 8 modulo 16: four channels by eight neighbouring pixels lie in all 32 banks.
constexpr int patch_channel = step_rows * columns + (24 - step_rows * columns % 16) % 16;

// [share of the input channels][row][step_rows][row_columns]: the products. A row's column `guard` is
// the first that is multiplied; columns around those that are stay zero.
// NOTE: 8 modulo 16: half a warp stores two pixels of four rows by four, which are all 32 banks.
constexpr int guard = Layer::guard;
constexpr int row_columns = Layer::row_columns;
constexpr int pitch = step_rows * row_columns + (24 - step_rows * row_columns % 16) % 16;
constexpr int share = stored_rows * pitch;
static_assert(guard % 2 == 0 && row_columns % 2 == 0, "pairs of pixels are stored together");

// Units: 32 pixels of a strip, innermost, of a phase in y and an out channel.
constexpr int strip = Layer::strip;
constexpr int lines = (strip + 31) / 32;
constexpr int units = lines * stride_y * Layer::out_channels;
constexpr int unit_slots = (units + warps - 1) / warps;
constexpr int window = (Layer::most_taps_y - 1) * Layer::shift_step_y + 1;

// Stores straight from registers where a lane's outputs of a row are a vector that is aligned.
constexpr bool direct = Layer::store_vector % stride_x == 0;
constexpr int stored = Layer::store_vector;
constexpr int staged = direct ? 4 : 32 * stride_x;

struct PatchShape {
    static constexpr int rows = step_rows;
    static constexpr int vectors = columns / 4;
    static constexpr int channels = depth;
    static constexpr int channel_pitch = patch_channel;
    static constexpr int unrolled = 4;
    TCONV_DEVICE static int place(int row, int column) { return row * columns + column; }
};

// A step of a tile: the input rows from y on.
struct Step : image_tiles::Position<1, Layer::out_channels> {
    int first_q, last_q;  // rows of pixels that the tile writes, the last not included
    int y;
    int begin, end;  // input rows of the tile that exist

    Step() = default;

    TCONV_DEVICE Step(Index tile, const Arguments& arguments)
        : image_tiles::Position<1, Layer::out_channels>(tile, arguments) {
        int bottom = (arguments.destination_height - 1 + Layer::padding_y) / stride_y + 1;
        first_q = Layer::padding_y / stride_y + tile_y * arguments.tile_rows;
        last_q = first_q + arguments.tile_rows < bottom ? first_q + arguments.tile_rows : bottom;
        begin = first_q - Layer::span_y > 0 ? first_q - Layer::span_y : 0;
        end = last_q < arguments.source_height ? last_q : arguments.source_height;
        // A phase writes row q at the step of the first input that its taps read.
        y = first_q - Layer::most_first_shift_y;
        if (begin < y) y = begin;
    }

    TCONV_DEVICE bool exists(const Arguments& arguments) const { return tile < arguments.tiles; }
    // Whether some of the step's input rows exist.
    TCONV_DEVICE bool has_pixels() const { return y < end && y + step_rows > begin; }

    TCONV_DEVICE int first_column() const { return tile_x * strip + Layer::first_column; }

    TCONV_DEVICE Step next(const Arguments& arguments) const {
        if (y + step_rows >= last_q) return Step(tile + Index(gridDim.x), arguments);
        Step same = *this;
        same.y += step_rows;
        return same;
    }
};

// What a warp gathers: 32 pixels of a strip, of a phase in y and an out channel.
struct alignas(16) Unit {
    int place;        // of the first tap's products in y
    int pixel;        // the first, of the strip
    int first_shift;  // of the taps in y
    int tap_count;
    int row;          // of the outputs, less q*stride_y
    float bias;
    Index destination;

    Unit() = default;

    TCONV_DEVICE Unit(int number, const Arguments& arguments, const float* group_bias) {
        int phase = number / lines % stride_y;
        int channel = number / (lines * stride_y);
        pixel = number % lines * 32;
        row = phase - Layer::padding_y;
        bias = Layer::bias ? group_bias[channel] : 0;
        destination = channel * arguments.destination_stride_c + pixel * stride_x;
        int first_tap = first_shift = tap_count = 0;
#pragma unroll
        for (int k = 0; k < stride_y; ++k) {
            if (k != phase) continue;
            first_tap = Layer::first_tap_y[k];
            first_shift = Layer::first_shift_y[k];
            tap_count = Layer::tap_count_y[k];
        }
        place = (channel * taps + first_tap * Layer::kernel_x) * pitch + pixel;
    }
};

struct Shared {
    alignas(16) float patch[stages][depth * patch_channel];
    alignas(16) float products[Layer::k_groups * share];
    alignas(16) float outputs[warps][staged];
    Unit unit[units];
    // Of this step and those whose copies are under way: here they cost no registers.
    Step steps[stages + 1];
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

struct Block {
    const Arguments& arguments;
    Shared& shared;

    uint32_t weights[m_tiles][k_steps][4];
    float sums[unit_slots][window][stride_x];

    TCONV_DEVICE Block(const Arguments& arguments, Shared& shared)
        : arguments(arguments), shared(shared) {}

    // The part of a step's products that is a warp's.
    struct Share {
        int m_group, k_group, n_group;

        TCONV_DEVICE Share() {
            int warp = own_thread() / 32;
            n_group = warp % Layer::n_groups;
            k_group = warp / Layer::n_groups % Layer::k_groups;
            m_group = warp / (Layer::n_groups * Layer::k_groups);
        }

        TCONV_DEVICE bool is_any() const { return m_group < Layer::m_groups; }
    };

    // --- copies ---------------------------------------------------------------------------------

    // Starts a step's copies, and remembers the step for when they are used, which is after the next
    // barrier. All threads' copies of it are the same.
    TCONV_DEVICE void load(int stage, int turn, const Step& step) {
        if (threadIdx.x == 0) shared.steps[turn] = step;
        if (step.exists(arguments) && step.has_pixels()) {
            image_tiles::Patch<threads, PatchShape>::load(shared.patch[stage], arguments, step, 0,
                                                          step.y, step.first_column(), step.end);
        }
        // NOTE: also where there is nothing to copy, so that groups of copies are steps.
        ptx::cp_async_commit_group();
    }

    TCONV_DEVICE void load_weights(Index group) {
        Share own;
        int lane = own_thread() % 32;
        const float* source = static_cast<const float*>(arguments.weight) +
                              group * Layer::in_channels * arguments.weight_stride_in;
        int first_in = own.k_group * (k_steps * 8) + lane % 4;
        Index step = 4 * arguments.weight_stride_in;
#pragma unroll
        for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int row = (own.m_group * m_tiles + i) * 16 + h * 8 + lane / 4;
                bool used = row < rows;
                int tap = row % taps;
                const float* from = source + first_in * arguments.weight_stride_in +
                                    row / taps * arguments.weight_stride_out +
                                    tap / Layer::kernel_x * arguments.weight_stride_h +
                                    tap % Layer::kernel_x * arguments.weight_stride_w;
#pragma unroll
                for (int k = 0; k < 2 * k_steps; ++k) {
                    int in = first_in + 4 * k;
                    constexpr bool whole = Layer::in_channels == depth;
                    bool inside = used && (whole || in < Layer::in_channels);
                    float value = 0;
                    if (inside) value = ptx::ld_global_nc(from);
                    weights[i][k / 2][k % 2 * 2 + h] = tf32_bits(value);
                    // NOTE: multiples of the step, kept for all rows, would spill.
                    from = ptx::opaque(from + step);
                }
            }
        }
        const float* bias = static_cast<const float*>(arguments.bias);
        for (int i = own_thread(); i < units; i += threads) {
            shared.unit[i] = Unit(i, arguments, bias + group * Layer::out_channels);
        }
    }

    // --- products -------------------------------------------------------------------------------

    // Where a row's products of a fragment start.
    TCONV_DEVICE static int place_of(int fragment) {
        constexpr int row_fragments = columns / 8;
        return fragment / row_fragments * row_columns + guard + fragment % row_fragments * 8;
    }

    TCONV_DEVICE void multiply(const float* patch) {
        constexpr int fragments = Layer::fragments;
        constexpr bool even = step_fragments == Layer::n_groups * Layer::passes * fragments;
        Share own;
        if (Layer::m_groups * Layer::k_groups * Layer::n_groups < warps && !own.is_any()) return;
        int lane = own_thread() % 32;
        const float* source =
            patch + (own.k_group * (k_steps * 8) + lane % 4) * patch_channel + lane / 4;
        float* to = shared.products + own.k_group * share +
                    (own.m_group * (m_tiles * 16) + lane / 4) * pitch + lane % 4 * 2;
#pragma unroll 1
        for (int pass = 0; pass < Layer::passes; ++pass) {
            int first = (own.n_group * Layer::passes + pass) * fragments;
            if (!even && first >= step_fragments) break;
            float products[fragments][m_tiles][4] = {};
#pragma unroll
            for (int k = 0; k < k_steps; ++k) {
#pragma unroll
                for (int n = 0; n < fragments; ++n) {
                    // NOTE: beyond the last fragment, the first once more.
                    int fragment = even || first + n < step_fragments ? first + n : first;
                    const float* from = source + k * (8 * patch_channel) + fragment * 8;
                    uint32_t b[2] = {tf32_bits(from[0]), tf32_bits(from[4 * patch_channel])};
#pragma unroll
                    for (int i = 0; i < m_tiles; ++i) {
                        ptx::mma_m16n8k8_tf32(products[n][i], weights[i][k], b);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < fragments; ++n) {
                if (!even && first + n >= step_fragments) continue;
                float* place = to + place_of(first + n);
#pragma unroll
                for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        using Pair = Vector<float, 2>;
                        *reinterpret_cast<Pair*>(place + (16 * i + 8 * h) * pitch) =
                            Pair{products[n][i][2 * h], products[n][i][2 * h + 1]};
                    }
                }
            }
        }
    }

    // --- outputs --------------------------------------------------------------------------------

    TCONV_DEVICE void clear_sums() {
#pragma unroll
        for (int slot = 0; slot < unit_slots; ++slot) {
            int number = own_thread() / 32 + slot * warps;
            float bias = shared.unit[number < units ? number : 0].bias;
#pragma unroll
            for (int i = 0; i < window; ++i) {
#pragma unroll
                for (int r = 0; r < stride_x; ++r) sums[slot][i][r] = bias;
            }
        }
    }

    // Adds the step's products to the outputs that they reach, and writes the rows that are complete.
    TCONV_DEVICE void gather(const Step& step) {
        NotFinite<float> not_finite;  // of what the thread's sums became
#pragma unroll
        for (int slot = 0; slot < unit_slots; ++slot) {
            int number = own_thread() / 32 + slot * warps;
            if (units % warps != 0 && number >= units) break;
            const Unit& unit = shared.unit[number];
            int lane = own_thread() % 32;
            // NOTE: lanes beyond the strip's last pixel read that one's, and write nothing.
            if (strip % 32 != 0 && unit.pixel + lane >= strip) lane = strip - 1 - unit.pixel;
            const float* from = shared.products + (unit.place + lane);
            float bias = unit.bias;
            int tap_count = unit.tap_count;
            constexpr int loads = Layer::most_taps_y * Layer::kernel_x * Layer::k_groups;
            constexpr int unrolled = step_rows * loads <= 64 ? step_rows : 1;
#pragma unroll unrolled
            for (int row = 0; row < step_rows; ++row) {
                int y = step.y + row;
                if (y >= step.begin && y < step.end) {
                    add(sums[slot], from + row * row_columns, tap_count);
                }
                if (is_complete(step, unit, y)) {
#pragma unroll
                    for (int r = 0; r < stride_x; ++r) not_finite.note(sums[slot][0][r]);
                    write(step, unit, output_row(unit, y), sums[slot][0]);
                }
#pragma unroll
                for (int i = 0; i < window; ++i) {
#pragma unroll
                    for (int r = 0; r < stride_x; ++r) {
                        sums[slot][i][r] = i + 1 < window ? sums[slot][i + 1][r] : bias;
                    }
                }
            }
        }
        if (__any_sync(~0u, not_finite.any())) {
            __syncwarp();  // each lane repairs what another may have written
            repair(step);
        }
    }

    // The output row of a unit whose first tap reads input row y.
    TCONV_DEVICE static int output_row(const Unit& unit, int y) {
        return (y + unit.first_shift) * stride_y + unit.row;
    }

    // Whether that exists and is complete with input row y.
    TCONV_DEVICE bool is_complete(const Step& step, const Unit& unit, int y) const {
        int q = y + unit.first_shift;
        return q >= step.first_q && q < step.last_q &&
               unsigned(output_row(unit, y)) < unsigned(arguments.destination_height);
    }

    // What the warp has written in a step and is not finite.
    TCONV_DEVICE void repair(const Step& step) const {
#pragma unroll 1
        for (int i = 0; i < unit_slots * step_rows * stride_x; ++i) {
            int number = own_thread() / 32 + i / (step_rows * stride_x) * warps;
            if (number >= units) break;
            const Unit& unit = shared.unit[number];
            int y = step.y + i / stride_x % step_rows;
            int column = own_thread() % 32 * stride_x + i % stride_x;
            if (is_complete(step, unit, y) && column < columns_left(step, unit)) {
                exact::repair<true>(arguments, line(step, unit, output_row(unit, y)) + column);
            }
        }
    }

    // Where a unit's outputs of a row begin, and how many columns the image has from there on.
    TCONV_DEVICE float* line(const Step& step, const Unit& unit, int out_y) const {
        return static_cast<float*>(arguments.destination) +
               (step.image * arguments.destination_stride_n +
                step.group() * Layer::out_channels * arguments.destination_stride_c +
                out_y * arguments.destination_stride_h + step.tile_x * (strip * stride_x) +
                unit.destination);
    }

    TCONV_DEVICE int columns_left(const Step& step, const Unit& unit) const {
        return arguments.destination_width - step.tile_x * (strip * stride_x) - unit.pixel * stride_x;
    }

    // Adds an input row's products of a phase in y.
    TCONV_DEVICE static void add(float (&sums)[window][stride_x], const float* from, int tap_count) {
#pragma unroll
        for (int i = 0; i < Layer::most_taps_y; ++i) {
            if (i >= tap_count) break;
            const float* tap_row = from + i * Layer::tap_step_y * Layer::kernel_x * pitch;
#pragma unroll
            for (int r = 0; r < stride_x; ++r) {
                float sum = 0;
                bool any = false;
#pragma unroll
                for (int t = 0; t < Layer::kernel_x; ++t) {
                    if (Layer::tap_phase_x[t] != r) continue;
#pragma unroll
                    for (int k = 0; k < Layer::k_groups; ++k) {
                        float value = tap_row[k * share + t * pitch + Layer::tap_column_x[t]];
                        sum = any ? sum + value : value;
                        any = true;
                    }
                }
                if (any) sums[i * Layer::shift_step_y][r] += sum;
            }
        }
    }

    // Writes a lane's stride_x outputs of row out_y.
    TCONV_DEVICE void write(const Step& step, const Unit& unit, int out_y,
                            const float (&values)[stride_x]) {
        int lane = own_thread() % 32;
        int rest = columns_left(step, unit);
        float* row = line(step, unit, out_y);
        if constexpr (direct) {
            Vector<float, direct ? stride_x : 1> value;
#pragma unroll
            for (int r = 0; r < stride_x; ++r) value.values[r] = values[r];
            if (lane * stride_x < rest) image_tiles::store(row + lane * stride_x, value);
        } else {
            float* outputs = shared.outputs[own_thread() / 32];
            __syncwarp();  // the last row has been read
#pragma unroll
            for (int r = 0; r < stride_x; ++r) outputs[lane * stride_x + r] = values[r];
            __syncwarp();
#pragma unroll
            for (int k = 0; k < 32 * stride_x; k += 32 * stored) {
                int e = k + lane * stored;
                if (e < 32 * stride_x && e < rest) {
                    using Stored = Vector<float, stored>;
                    image_tiles::store(row + e, *reinterpret_cast<const Stored*>(outputs + e));
                }
            }
        }
    }

    // --- tiles ----------------------------------------------------------------------------------

    TCONV_DEVICE static int after(int turn) { return turn < stages ? turn + 1 : 0; }

    TCONV_DEVICE void run() {
        Step first(Index(blockIdx.x), arguments);
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage) {
            load(stage, stage, first);
            first = first.next(arguments);
        }
        for (int i = own_thread(); i < Layer::k_groups * share; i += threads) shared.products[i] = 0;
        __syncthreads();

        Index tile = -1;
        Index group = -1;
        int stage = 0;
        int turn = 0;                // which of the steps is this one
        int last_turn = stages - 1;  // and the last whose copies are under way
        while (true) {
            const Step& step = shared.steps[turn];
            if (step.tile != tile) {
                tile = step.tile;
                if (!step.exists(arguments)) return;
                if (step.group() != group) {
                    __syncthreads();  // no thread still reads the last group's units
                    group = step.group();
                    load_weights(group);
                    __syncthreads();
                }
                clear_sums();
            }
            ptx::cp_async_wait_group<stages - 1>();
            __syncthreads();  // the copies are visible, and the last step's products read
            if (step.has_pixels()) multiply(shared.patch[stage]);
            __syncthreads();
            // NOTE: the turn after the last is the one before this, which no thread reads any more.
            Step next = shared.steps[last_turn].next(arguments);
            last_turn = after(last_turn);
            load(stage, last_turn, next);
            gather(step);
            turn = after(turn);
            stage = stage + 1 < stages ? stage + 1 : 0;
        }
    }
};

}  // namespace

TCONV_KERNEL(mma_overlap_forward, Layer::threads, Layer::blocks) {
    TCONV_DYNAMIC_SHARED(memory);
    Block(arguments, *reinterpret_cast<Shared*>(memory)).run();
}
