// Store of a folded result: a position's columns are the values of all phases, or of some lines of
// them (<engine/fold.cuh>). They go through shared memory, where a line's values of a consumer's
// positions follow each other as they do in a row of y.
#pragma once

#include <common/division.cuh>
#include <common/element.cuh>
#include <engine/fold.cuh>
#include <engine/multiply_taps.cuh>
#include <engine/stages.cuh>
#include <ptx/barrier.cuh>

namespace {

constexpr int block_lines = Layer::unfolds ? Layer::block_rows / fold_run : 1;
constexpr int folded_vector = 4;  // values of a row of y that a thread writes at a time

// Lays 64 positions of the sums out, from `first` on.
TCONV_DEVICE void stage_lines(const Arguments& arguments, const Position& at, int row_block,
                              Element* lines, int first, const Block& sums) {
    constexpr bool pairs = fold_run % 2 == 0;  // both columns of a lane are of one line
    int lane = threadIdx.x % 32, warp = threadIdx.x % warpgroup / 32;
#pragma unroll
    for (int from = 0; from < group_rows / 2; from += 4) {
        float values[2][2];  // of two positions, eight apart, and two columns
        int column = from / 4 * 8 + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i / 2][i % 2] = sums[from + i];
        if constexpr (Layer::bias) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int row = row_block * Layer::block_rows + column + i;
                int channel = at.group * Layer::fold_channels + Unfolded(row).channel;
                if (column + i < Layer::block_rows && row < Layer::rows) {
                    float bias = widen(static_cast<const Element*>(arguments.bias)[channel]);
                    values[0][i] += bias;
                    values[1][i] += bias;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // NOTE: two of which both or none is written: ptxas serialises all products (C7514) if
            // one value is converted alone.
            uint32_t word =
                pairs ? narrowed(values[i][0], values[i][1]) : narrowed(values[0][i], values[1][i]);
            int of_word = pairs ? column : column + i;
            // Where lines are whole octets, all lanes have columns of the same: a constant.
            int of_line = fold_run % 8 == 0 ? from / 4 * 8 : of_word, line = of_line / fold_run;
            if (of_line >= Layer::block_rows) continue;
            int position = first + warp * 16 + lane / 4 + (pairs ? i * 8 : 0);
            auto* to = lines + (line * columns + position - line) * fold_run + of_word;
            if constexpr (pairs) {
                *reinterpret_cast<uint32_t*>(to) = word;
            } else {
                *reinterpret_cast<uint16_t*>(to) = uint16_t(word);
                *reinterpret_cast<uint16_t*>(to + 8 * fold_run) = uint16_t(word >> 16);
            }
        }
    }
}

// A run of a tile's positions that are neighbours in a row of the result.
struct Run {
    int image, y, x;  // of the first
    int count;
};

constexpr int run_positions = 64;  // at most
// Threads that write a line of a run: half a warp, or where there are few of both, several warps.
constexpr int run_lines = block_lines * (columns / run_positions);
constexpr int line_threads = run_lines >= 4 ? 16 : run_lines >= 2 ? 64 : 128;

// Writes a line's values of a run, which begin at `from`.
TCONV_DEVICE void write_line(const Arguments& arguments, const Position& at, int row_block,
                             int line, const Element* from, const Run& run) {
    using Values = Vector<Element, folded_vector>;
    constexpr int of_pixel = Layer::fold_channels_last ? Layer::fold_channels : 1;
    int row = (row_block * block_lines + line) * fold_run;
    Unfolded of(row);
    int y = run.y * Layer::fold_y - Layer::cut_y + of.y;
    if (row >= Layer::rows || y < 0 || y >= arguments.destination_height) return;
    int pixel = run.x * Layer::fold_x - Layer::cut_x;
    auto* to = static_cast<Element*>(arguments.destination) +
               Index(run.image) * arguments.destination_stride_n +
               Index(y) * arguments.destination_stride_h +
               Index(pixel) * arguments.destination_stride_w +
               Index(at.group * Layer::fold_channels + of.channel) * arguments.destination_stride_c;
    // The values that exist, and of these the vectors that lie on multiples of their size.
    int low = max(0, -pixel) * of_pixel;
    int high = min(run.count * Layer::fold_x, arguments.destination_width - pixel) * of_pixel;
    int before = reinterpret_cast<uint64_t>(to + low) / sizeof(*to) % folded_vector;
    int first = low + (folded_vector - before) % folded_vector, end = first;
    // Whether a line's values have no gaps in memory.
    bool dense = arguments.destination_stride_w == of_pixel &&
                 (of_pixel == 1 || arguments.destination_stride_c == 1);
    if (dense && first < high) end = high - (high - first) % folded_vector;
    if (end <= first) first = end = low;
    int thread = threadIdx.x % line_threads;
    bool likewise = reinterpret_cast<uint64_t>(from + first) % sizeof(Values) == 0;
#pragma unroll 4
    for (int value = first + thread * folded_vector; value < end;
         value += line_threads * folded_vector) {
        Values values;
        if (likewise) {
            values = *reinterpret_cast<const Values*>(from + value);
        } else {
#pragma unroll
            for (int k = 0; k < folded_vector; ++k) values.values[k] = from[value + k];
        }
        *reinterpret_cast<Values*>(to + value) = values;
    }
    // Those beside the vectors.
    int left = first - low;
#pragma unroll 1
    for (int i = thread; i < left + high - end; i += line_threads) {
        int value = i < left ? low + i : end + i - left;
        int of_row = value / of_pixel, channel = value - of_row * of_pixel;
        to[Index(of_row) * arguments.destination_stride_w +
           Index(channel) * arguments.destination_stride_c] = from[value];
    }
}

// Writes a consumer's positions, from `first` on among those of the patch: lines of runs in turn.
TCONV_DEVICE void write_runs(const Arguments& arguments, const Position& at, int row_block,
                             const Element* lines, int first) {
    constexpr int together = warpgroup / line_threads;
    int own = threadIdx.x % warpgroup / line_threads, end = first + columns;
    int first_row = divide(first, arguments.pitch_x_multiplier, arguments.pitch_x_shift);
    int last_row = divide(end - 1, arguments.pitch_x_multiplier, arguments.pitch_x_shift);
    for (int x = 0; x < arguments.box_x; x += run_positions) {
#pragma unroll 1
        for (int i = own; i < (last_row + 1 - first_row) * block_lines; i += together) {
            int of_first = i / block_lines, line = i - of_first * block_lines;
            int row = (first_row + of_first) * arguments.pitch_x;  // its first position
            int n = divide(row, arguments.pitch_multiplier, arguments.pitch_shift);
            int rest = row - n * arguments.pitch;
            int y = divide(rest, arguments.pitch_x_multiplier, arguments.pitch_x_shift);
            int begin = max(first, row + x);
            int count = min(end, row + min(x + run_positions, arguments.box_x)) - begin;
            Run run = {at.image + n, at.y + y, at.x + begin - row, count};
            if (count <= 0 || n >= arguments.box_n || run.image >= arguments.batch ||
                y >= arguments.box_y) {
                continue;
            }
            const auto* from = lines + (line * columns + begin - first) * fold_run;
            write_line(arguments, at, row_block, line, from, run);
        }
    }
}

TCONV_DEVICE void unfold(const Arguments& arguments, Shared& shared, const Position& at,
                         int consumer, int row_block, const Block (&sums)[blocks]) {
    static_assert(!Layer::unfolds || columns * group_rows <= piece_bytes, "two pieces have all");
    auto* lines = reinterpret_cast<Element*>(shared.outputs[consumer][0]);
#pragma unroll
    for (int block = 0; block < blocks; ++block) {
        stage_lines(arguments, at, row_block, lines, block * 64, sums[block]);
    }
    ptx::bar_sync(1 + consumer, warpgroup);
    write_runs(arguments, at, row_block, lines, consumer * columns);
}

}  // namespace
