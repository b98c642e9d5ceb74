// Store of a folded result: a position's columns are the values of all phases, or of some lines of
// them (<engine/fold.cuh>). They go through shared memory, where a line's values of 64 positions
// follow each other as they do in a row of y.
#pragma once

#include <common/division.cuh>
#include <common/element.cuh>
#include <engine/fold.cuh>
#include <engine/multiply_taps.cuh>
#include <engine/stages.cuh>
#include <ptx/barrier.cuh>

namespace {

constexpr int block_lines = Layer::block_rows / fold_run;
constexpr int folded_vector = 4;  // values of a row of y that a thread writes at a time

// Lays a piece of the sums out as lines.
TCONV_DEVICE void stage_lines(const Arguments& arguments, const Position& at, int row_block,
                              Layer::Element* lines, const Block& sums) {
    constexpr int pair = fold_run % 2 == 0 ? 2 : 1;  // columns of one line, written as a word
    int lane = threadIdx.x % 32, warp = threadIdx.x % warpgroup / 32;
#pragma unroll
    for (int from = 0; from < group_rows / 2; from += pair) {
        int column = from / 4 * 8 + lane % 4 * 2 + from % 2;
        int position = warp * 16 + from % 4 / 2 * 8 + lane / 4;
        int line = column / fold_run;
        if (column >= Layer::block_rows) continue;
        Vector<Layer::Element, pair> values;
#pragma unroll
        for (int i = 0; i < pair; ++i) {
            float sum = sums[from + i];
            if constexpr (Layer::bias) {
                int row = row_block * Layer::block_rows + column + i;
                int channel = at.group * Layer::fold_channels + Unfolded(row).channel;
                if (row < Layer::rows) {
                    sum += widen(static_cast<const Layer::Element*>(arguments.bias)[channel]);
                }
            }
            narrow(sum, values.values[i]);
        }
        int place = (line * piece_positions + position) * fold_run + column - line * fold_run;
        *reinterpret_cast<Vector<Layer::Element, pair>*>(lines + place) = values;
    }
}

// A run of a tile's positions that are neighbours in a row of the result.
struct Run {
    int image, y, x;  // of the first
    int count;
};

// Writes the values of a run, which begin at `lines`, for each line.
TCONV_DEVICE void write_run(const Arguments& arguments, const Position& at, int row_block,
                            const Layer::Element* lines, const Run& run) {
    using Values = Vector<Layer::Element, folded_vector>;
    constexpr int of_pixel = Layer::fold_channels_last ? Layer::fold_channels : 1;
    constexpr int threads = block_lines == 1 ? 128 : block_lines == 2 ? 64 : 32;  // of a line
    // Whether a line's values have no gaps in memory.
    bool dense = arguments.destination_stride_w == of_pixel &&
                 (of_pixel == 1 || arguments.destination_stride_c == 1);
    int pixel = run.x * Layer::fold_x - Layer::cut_x;
    int low = max(0, -pixel) * of_pixel;
    int high = min(run.count * Layer::fold_x, arguments.destination_width - pixel) * of_pixel;
    int thread = threadIdx.x % warpgroup;
#pragma unroll 1
    for (int line = thread / threads; line < block_lines; line += warpgroup / threads) {
        int row = (row_block * block_lines + line) * fold_run;
        if (row >= Layer::rows) break;
        Unfolded of(row);
        int y = run.y * Layer::fold_y - Layer::cut_y + of.y;
        if (y < 0 || y >= arguments.destination_height) continue;
        auto* to =
            static_cast<Layer::Element*>(arguments.destination) +
            Index(run.image) * arguments.destination_stride_n +
            Index(y) * arguments.destination_stride_h +
            Index(pixel) * arguments.destination_stride_w +
            Index(at.group * Layer::fold_channels + of.channel) * arguments.destination_stride_c;
        const auto* from = lines + line * (piece_positions * fold_run);
        // Vectors start on multiples of their size in memory, the first perhaps before the line.
        int before = reinterpret_cast<uint64_t>(to) / sizeof(*to) % folded_vector;
        bool likewise = reinterpret_cast<uint64_t>(from - before) % sizeof(Values) == 0;
        for (int value = thread % threads * folded_vector - before; value < high;
             value += threads * folded_vector) {
            if (dense && value >= low && value + folded_vector <= high) {
                Values values;
                if (likewise) {
                    values = *reinterpret_cast<const Values*>(from + value);
                } else {
#pragma unroll
                    for (int k = 0; k < folded_vector; ++k) values.values[k] = from[value + k];
                }
                *reinterpret_cast<Values*>(to + value) = values;
                continue;
            }
#pragma unroll
            for (int k = 0; k < folded_vector; ++k) {
                if (value + k < low || value + k >= high) continue;
                int of_row = (value + k) / of_pixel, channel = value + k - of_row * of_pixel;
                to[Index(of_row) * arguments.destination_stride_w +
                   Index(channel) * arguments.destination_stride_c] = from[value + k];
            }
        }
    }
}

// Writes the positions of a piece, from `place` on among those of the patch.
TCONV_DEVICE void write_runs(const Arguments& arguments, const Position& at, int row_block,
                             const Layer::Element* lines, int place) {
    for (int begin = place, end = place + piece_positions; begin < end;) {
        int n = divide(begin, arguments.pitch_multiplier, arguments.pitch_shift);
        int rest = begin - n * arguments.pitch;
        int y = divide(rest, arguments.pitch_x_multiplier, arguments.pitch_x_shift);
        int x = rest - y * arguments.pitch_x;
        int next = min(end, begin + arguments.pitch_x - x);
        Run run = {at.image + n, at.y + y, at.x + x, min(next - begin, arguments.box_x - x)};
        if (n < arguments.box_n && run.image < arguments.batch && y < arguments.box_y) {
            write_run(arguments, at, row_block, lines + (begin - place) * fold_run, run);
        }
        begin = next;
    }
}

template <int piece = 0>
TCONV_DEVICE void unfold_pieces(const Arguments& arguments, Shared& shared, const Position& at,
                                int consumer, int row_block, const Block (&sums)[blocks]) {
    if constexpr (piece < blocks) {
        auto* lines = reinterpret_cast<Layer::Element*>(shared.outputs[consumer][piece % 2]);
        stage_lines(arguments, at, row_block, lines, sums[piece]);
        // Nobody writes the other piece's lines again before all have read them.
        ptx::bar_sync(1 + consumer, warpgroup);
        int place = consumer * columns + piece * piece_positions;
        write_runs(arguments, at, row_block, lines, place);
        unfold_pieces<piece + 1>(arguments, shared, at, consumer, row_block, sums);
    }
}

}  // namespace
