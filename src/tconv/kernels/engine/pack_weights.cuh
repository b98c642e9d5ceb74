// Packs the weights of an engine kernel: [group][block of rows][set][chunk][slot] pieces of
// `group_rows` rows and the channels of a stage, swizzled. Zeros stand behind the last row and
// channel.
//
// An item is a block of rows and 16 reduced channels with some taps of both axes.
#pragma once

#include <common/constant_tables.cuh>
#include <common/element.cuh>

namespace {

namespace weights {

using Index = Layer::Index;
using Element = Layer::Element;

constexpr int group_rows = Layer::group_rows, item_depth = 16;
constexpr int octets = Layer::line_bytes / 16;  // of a line
constexpr int depth = octets * 8;
constexpr int row_blocks = (Layer::rows + group_rows - 1) / group_rows;
constexpr int chunks = (Layer::reduced + depth - 1) / depth;
constexpr int taps = Layer::kernel_y * Layer::kernel_x;
constexpr int part_taps = Layer::part_taps;
constexpr int tap_parts = (taps + part_taps - 1) / part_taps;
constexpr int tap_pitch = group_rows * item_depth + 2;  // elements; a bank further
constexpr int batch = 8;  // loads under way at a time

// The weight of a tap of an item; zero where there is none. Taps are innermost, as they are
// adjacent in memory, then the weight's second axis.
TCONV_DEVICE Element weight_of(const Arguments& arguments, int row, int channel, int group,
                               int tap) {
    if (row >= Layer::rows || channel >= Layer::reduced || tap >= taps) return {};
    int in =
        group * (Layer::turned ? Layer::rows : Layer::reduced) + (Layer::turned ? row : channel);
    int out = Layer::turned ? channel : row;
    int y = tap / Layer::kernel_x, x = tap - y * Layer::kernel_x;
    return static_cast<const Element*>(arguments.weight)[Index(in) * arguments.weight_stride_in +
                                                         Index(out) * arguments.weight_stride_out +
                                                         Index(y) * arguments.weight_stride_h +
                                                         Index(x) * arguments.weight_stride_w];
}

constexpr int item_depths = chunks * (depth / item_depth);
constexpr int items = Layer::groups * row_blocks * item_depths * tap_parts;

TCONV_DEVICE void pack(const Arguments& arguments, Element* staged, int item) {
    int rest = item / tap_parts;
    int first_tap = (item - rest * tap_parts) * part_taps;
    int next = rest / item_depths, first_channel = (rest - next * item_depths) * item_depth;
    int group = next / row_blocks, block = next - group * row_blocks;
    __syncthreads();
    constexpr int count = part_taps * group_rows * item_depth;
    for (int first = threadIdx.x; first < count; first += batch * Layer::threads) {
        Element values[batch];
        int places[batch];
#pragma unroll
        for (int k = 0; k < batch; ++k) {
            int i = first + k * Layer::threads, of_taps = i / part_taps;
            int tap = i - of_taps * part_taps;
            int inner = Layer::turned ? item_depth : group_rows, outer = of_taps / inner;
            int row = Layer::turned ? outer : of_taps - outer * inner;
            int channel = Layer::turned ? of_taps - outer * inner : outer;
            places[k] = i < count ? tap * tap_pitch + row * item_depth + channel : -1;
            if (i < count) {
                values[k] = weight_of(arguments, block * group_rows + row, first_channel + channel,
                                      group, first_tap + tap);
            }
        }
#pragma unroll
        for (int k = 0; k < batch; ++k) {
            if (places[k] >= 0) staged[places[k]] = values[k];
        }
    }
    __syncthreads();
    int chunk = first_channel / depth, first_octet = first_channel % depth / 8;
    for (int i = threadIdx.x; i < Layer::all_slots * group_rows * 2; i += Layer::threads) {
        int octet = i % 2, row = i / 2 % group_rows, slot = i / (2 * group_rows);
        int tap = Layer::slot_tap[slot] - first_tap;
        if (tap < 0 || tap >= part_taps) continue;
        int set = 0;
        while (slot >= entry(Layer::set_begin, set + 1)) ++set;
        int begin = entry(Layer::set_begin, set);
        int slots = entry(Layer::set_begin, set + 1) - begin;
        Index piece = (Index(group * row_blocks + block) * Layer::all_slots + begin) * chunks +
                      chunk * slots + slot - begin;
        const auto* from = reinterpret_cast<const uint32_t*>(staged + tap * tap_pitch +
                                                             row * item_depth + octet * 8);
        uint4 values = {from[0], from[1], from[2], from[3]};
        int at = (first_octet + octet) ^ (octets == 8 ? row % 8 : row / 2 % 4);
        static_cast<uint4*>(arguments.packed)[(piece * group_rows + row) * octets + at] = values;
    }
}

}  // namespace weights

}  // namespace
