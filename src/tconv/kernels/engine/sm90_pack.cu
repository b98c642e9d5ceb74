// Packs the weights of an engine kernel: [group][64 rows][result][chunk][slot] pieces of 64 rows and
// 64 reduced channels, 128 bytes a row, swizzled. Zeros stand behind the last row and channel.
//
// An item is 64 rows and 16 reduced channels with some taps of both axes.
#include <common/constant_tables.cuh>
#include <common/element.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

using Index = Layer::Index;
using Element = Layer::Element;

constexpr int group_rows = 64, depth = 64, item_depth = 16;
constexpr int row_blocks = (Layer::rows + group_rows - 1) / group_rows;
constexpr int chunks = (Layer::reduced + depth - 1) / depth;
constexpr int taps = Layer::kernel_y * Layer::kernel_x;
constexpr int tap_pitch = group_rows * item_depth + 2;  // elements; a bank further

}  // namespace

TCONV_KERNEL(sm90_pack, Layer::threads, 2) {
    TCONV_DYNAMIC_SHARED(memory);
    ptx::griddepcontrol_launch_dependents();
    auto* staged = reinterpret_cast<Element*>(memory);
    constexpr int item_depths = chunks * (depth / item_depth);
    constexpr int tap_parts = (taps + Layer::part_taps - 1) / Layer::part_taps;
    constexpr int items = Layer::groups * row_blocks * item_depths * tap_parts;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        int rest = item / tap_parts;
        int first_tap = (item - rest * tap_parts) * Layer::part_taps;
        int next = rest / item_depths, first_channel = (rest - next * item_depths) * item_depth;
        int group = next / row_blocks, block = next - group * row_blocks;
        int count = min(Layer::part_taps, taps - first_tap);
        __syncthreads();
        for (int i = threadIdx.x; i < count * group_rows * item_depth; i += Layer::threads) {
            // Taps innermost, as they are adjacent in memory, then the weight's second axis.
            int of_taps = i / count, tap = i - of_taps * count;
            int row, channel;
            if (Layer::turned) {
                row = of_taps / item_depth, channel = of_taps % item_depth;
            } else {
                channel = of_taps / group_rows, row = of_taps % group_rows;
            }
            int of_row = block * group_rows + row, of_channel = first_channel + channel;
            Element value = {};
            if (of_row < Layer::rows && of_channel < Layer::reduced) {
                int in = Layer::turned ? group * Layer::rows + of_row
                                       : group * Layer::reduced + of_channel;
                int out = Layer::turned ? of_channel : of_row;
                int y = (first_tap + tap) / Layer::kernel_x;
                int x = first_tap + tap - y * Layer::kernel_x;
                value = static_cast<const Element*>(
                    arguments.weight)[Index(in) * arguments.weight_stride_in +
                                      Index(out) * arguments.weight_stride_out +
                                      Index(y) * arguments.weight_stride_h +
                                      Index(x) * arguments.weight_stride_w];
            }
            staged[tap * tap_pitch + row * item_depth + channel] = value;
        }
        __syncthreads();
        int chunk = first_channel / depth, first_octet = first_channel % depth / 8;
        for (int i = threadIdx.x; i < Layer::result_slots * group_rows * 2; i += Layer::threads) {
            int octet = i % 2, row = i / 2 % group_rows, slot = i / (2 * group_rows);
            int tap = Layer::slot_tap[slot] - first_tap;
            if (tap < 0 || tap >= count) continue;
            int result = 0;
            while (slot >= entry(Layer::result_begin, result + 1)) ++result;
            int begin = entry(Layer::result_begin, result);
            int slots = entry(Layer::result_begin, result + 1) - begin;
            Index piece =
                (Index(group * row_blocks + block) * Layer::result_slots + begin) * chunks +
                chunk * slots + slot - begin;
            const auto* from = reinterpret_cast<const uint32_t*>(staged + tap * tap_pitch +
                                                                 row * item_depth + octet * 8);
            uint4 values = {from[0], from[1], from[2], from[3]};
            int at = (first_octet + octet) ^ row % 8;
            static_cast<uint4*>(arguments.packed)[piece * (group_rows * 8) + row * 8 + at] = values;
        }
    }
}
