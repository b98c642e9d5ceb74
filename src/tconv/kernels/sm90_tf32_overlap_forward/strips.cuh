// What the parts of sm90_tf32_overlap_forward share: how columns are dealt to threads, shared
// memory, and a warpgroup's walk down the strips.
#pragma once

#include <common/element.cuh>

namespace {

using Index = Layer::Index;

constexpr int warpgroup = 128;
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

// [depth][pitch]: pixels, beginning `skew`, which is even, before the strip's first.
// NOTE: the pitch is 8 modulo 16, so that pairs of pixels of four channels by four neighbours lie
// in all 32 banks.
constexpr int pitch = Layer::pitch;
constexpr int stage_floats = depth * pitch;
static_assert(pitch % 16 == 8 && Layer::columns <= pitch, "whole rows in 8 or 24 banks' distance");

constexpr int units = stride_y * Layer::out_channels;  // [phase in y][out channel]
constexpr int unit_slots = (units + 3) / 4;

TCONV_DEVICE constexpr int phase_taps(int phase) {
    return phase < Layer::kernel_y ? (Layer::kernel_y - phase + stride_y - 1) / stride_y : 0;
}

// Taps in y of a slot's units: those of its first unit, which has most.
TCONV_DEVICE constexpr int slot_taps(int slot) {
    return phase_taps(slot * 4 / Layer::out_channels);
}

// A thread's first column of a slot.
// NOTE: from an array. If a function counted it, the products would be indexed too late to be
// registers.
TCONV_DEVICE constexpr int slot_begin(int slot) { return Layer::slot_begin[slot]; }

constexpr int lane_columns = slot_begin(unit_slots);
constexpr int columns = (lane_columns + 1) / 2 * 8;
static_assert(columns >= 8 && columns <= 256, "wgmma's columns");
using Products = float[columns / 2];

// The product's column of a thread's column.
TCONV_DEVICE constexpr int product_column(int lane_column, int t) {
    return lane_column / 2 * 8 + 2 * t + lane_column % 2;
}

// The number of output rows that an input row reaches.
constexpr int window = phase_taps(0);
// How many pairs before its own a pair's outputs reach back to.
constexpr int reach = ((kernel_x - 1 + Layer::lead) / stride_x + 1) / 2;

// A thread's sums of an output row of a unit. [r][o][h]: phase r in x of pixel o of a pair, the
// thread's own pair or the one h pairs on.
using Sums = float[stride_x][2][reach + 1];

// The tap by which the thread's pixel e adds to such a sum. It is outside 0 to kernel_x - 1 if
// there is none.
TCONV_DEVICE constexpr int tap_of(int r, int o, int h, int e) {
    return (2 * h + o - e) * stride_x + r - Layer::lead;
}

TCONV_DEVICE constexpr bool is_tap(int tap) { return tap >= 0 && tap < kernel_x; }

TCONV_DEVICE constexpr bool has_sum(int r, int o, int h) {
    return is_tap(tap_of(r, o, h, 0)) || is_tap(tap_of(r, o, h, 1));
}

constexpr int line_bytes = 128;  // 32 channels of a column
constexpr int block_bytes = columns * line_bytes;
constexpr int lines = ((chunks - 1) * depth + last_depth + 31) / 32;

// Outputs that are written at a time.
constexpr int vector = Layer::store_vector;
constexpr int useful = 16 - 2 * reach;  // pixels of a warp that have outputs
static_assert(2 * stride_x % vector == 0, "a pair's outputs are whole vectors");
static_assert(2 * stride_x <= 32, "a word says which exist");

struct Shared {
    // [32 channels][column][channel], swizzled.
    alignas(1024) unsigned char weights[lines * block_bytes];
    alignas(16) float pixels[warpgroups][stages][stage_floats];
    // For an input channel's weights, (out channel, tap in y, tap in x): the offset and the column
    // of each.
    Index weight_offsets[elements];
    int weight_columns[elements];
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

// A warpgroup's share of a strip's rows, and the input row of this step.
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

    // Goes to the next input row. Returns true if that is in another strip, or there is none.
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

}  // namespace
