// Store, channels_last: a consumer's sums go through shared memory, which turns them, and are
// written as whole lines of channels. Positions that do not exist are left out.
#pragma once

#include <common/division.cuh>
#include <common/element.cuh>
#include <engine/multiply_taps.cuh>
#include <engine/stages.cuh>
#include <ptx/barrier.cuh>
#include <ptx/ldmatrix.cuh>

namespace {

using Element = Layer::Element;

TCONV_DEVICE uint32_t narrowed(float low, float high) {
    return Layer::bfloat ? ptx::cvt_rn_bf16x2_f32(low, high) : ptx::cvt_rn_f16x2_f32(low, high);
}

// What a consumer writes of a tile.
struct Destination {
    Element* first;  // the group's and the row group's first channel of the result's first pixel
    int channels;    // that exist
    int height, width;

    TCONV_DEVICE Destination(const Arguments& arguments, const Position& at, int row_group) {
        int result = row_group % Layer::results, block = row_group / Layer::results;
        int y = result / Layer::results_x, x = result - y * Layer::results_x;
        int channel = at.group * Layer::rows + block * group_rows;
        y = entry(Layer::result_y, y);
        x = entry(Layer::result_x, x);
        first = static_cast<Element*>(arguments.destination) +
                Index(y) * arguments.destination_stride_h +
                Index(x) * arguments.destination_stride_w + channel;
        channels = min(group_rows, Layer::rows - block * group_rows);
        height = (arguments.destination_height - y + Layer::step_y - 1) / Layer::step_y;
        width = (arguments.destination_width - x + Layer::step_x - 1) / Layer::step_x;
    }
};

// A position of a tile among the patch's, as the result's pixel; null where there is none.
TCONV_DEVICE Element* pixel_of(const Arguments& arguments, const Position& at,
                               const Destination& to, unsigned position) {
    unsigned n = divide(position, arguments.pitch_multiplier, arguments.pitch_shift);
    unsigned rest = position - n * arguments.pitch;
    unsigned y = divide(rest, arguments.pitch_x_multiplier, arguments.pitch_x_shift);
    unsigned x = rest - y * arguments.pitch_x;
    bool exists = n < unsigned(arguments.box_n) && y < unsigned(arguments.box_y) &&
                  x < unsigned(arguments.box_x) && at.image + int(n) < arguments.batch &&
                  at.y + int(y) < to.height && at.x + int(x) < to.width;
    if (!exists) return nullptr;
    return to.first + Index(at.image + n) * arguments.destination_stride_n +
           Index(at.y + y) * (Layer::step_y * arguments.destination_stride_h) +
           Index(at.x + x) * (Layer::step_x * arguments.destination_stride_w);
}

// Turns a piece of the sums into lines of channels. Its chunks of 16 bytes are exchanged by the
// position, so that neither side has bank conflicts.
template <int first>
TCONV_DEVICE void turn_piece(unsigned char* lines, const Sums& sums, const float (&bias)[2]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % warpgroup / 32;
#pragma unroll
    for (int column = 0; column < piece_positions && first + column < columns; column += 16) {
        uint32_t values[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int at = (first + column) / 2 + i / 2 * 4 + i % 2 * 2;
            if (first + column + i / 2 * 8 < columns) {
                values[i] = narrowed(sums[at] + bias[i % 2], sums[at + 1] + bias[i % 2]);
            }
        }
        int position = column + lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
        ptx::stmatrix_x4_trans(lines + position * line_bytes + ((chunk ^ position % 8) * 16),
                               values);
    }
}

template <int first = 0>
TCONV_DEVICE void store_pieces(const Arguments& arguments, Shared& shared, const Position& at,
                               int consumer, const Destination& to, const Sums& sums,
                               const float (&bias)[2]) {
    if constexpr (first < columns) {
        constexpr int vector = Layer::vector;
        constexpr int vectors = depth / vector;  // of a line
        unsigned char* lines = shared.outputs[consumer][first / piece_positions % 2];
        turn_piece<first>(lines, sums, bias);
        // Nobody writes the other piece's lines again before all have read them.
        ptx::bar_sync(1 + consumer, warpgroup);
        constexpr int left = columns - first < piece_positions ? columns - first : piece_positions;
#pragma unroll 4
        for (int i = threadIdx.x % warpgroup; i < left * vectors; i += warpgroup) {
            int position = i / vectors, channel = i % vectors * vector;
            if (channel >= to.channels) continue;
            int number = (Layer::split ? consumer * columns : 0) + first + position;
            Element* pixel = pixel_of(arguments, at, to, number);
            if (pixel == nullptr) continue;
            const unsigned char* line = lines + position * line_bytes;
            int byte = channel * 2;
            using Values = Vector<Element, vector>;
            *reinterpret_cast<Values*>(pixel + channel) = *reinterpret_cast<const Values*>(
                line + ((byte / 16 ^ position % 8) * 16 + byte % 16));
        }
        store_pieces<first + piece_positions>(arguments, shared, at, consumer, to, sums, bias);
    }
}

TCONV_DEVICE void store(const Arguments& arguments, Shared& shared, const Position& at,
                        int consumer, const Sums& sums) {
    int row_group = at.row_group(consumer);
    if (row_group >= row_groups) return;
    Destination to(arguments, at, row_group);
    float bias[2] = {0.0f, 0.0f};
    if constexpr (Layer::bias) {
        const auto* values = static_cast<const Element*>(arguments.bias) + at.group * Layer::rows +
                             row_group / Layer::results * group_rows;
        int row = threadIdx.x % warpgroup / 32 * 16 + threadIdx.x % 32 / 4;
        for (int half = 0; half < 2; ++half) {
            if (row + 8 * half < to.channels) bias[half] = widen(values[row + 8 * half]);
        }
    }
    store_pieces(arguments, shared, at, consumer, to, sums, bias);
    ptx::bar_sync(1 + consumer, warpgroup);  // the next tile's first piece has the same lines
}

}  // namespace
