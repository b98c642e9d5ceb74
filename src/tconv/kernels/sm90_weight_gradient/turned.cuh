// Images in channels_last of float32, for `sm90_weight_gradient`. The tensor cores take positions
// adjacent, of both operands; here channels are.
//
// y goes to registers: a thread has two neighbouring channels of a position in a word of 8 bytes,
// and any distance of a tap is an address. x is turned by warps that have nothing else to do, from
// [position][channel] to lines of 32 positions of a channel. Both are rounded to TF32 on the way.
//
// A product's eight positions come in the order 0, 2, 4, 6, 1, 3, 5, 7. In a swizzled line, an even
// and an odd octet of bytes change places with the position's lowest bit, so that four positions
// that a warp loads at a time meet all banks two apart, and half of them one apart. In boxes of 4
// columns two of the four are of the next row, and may meet half of them too.
//
// Only for <sm90_weight_gradient.cu>.
#pragma once

#include <common/element.cuh>
#include <ptx/registers.cuh>
#include <sm90_weight_gradient/raw.cuh>

namespace {

constexpr int line_channels = 32;  // of a position, in 128 bytes
constexpr int x_lines = (Layer::in_block + line_channels - 1) / line_channels;
constexpr int y_lines = (Layer::out_block + line_channels - 1) / line_channels;
constexpr int x_line_bytes = Layer::positions * 128;  // of all positions

// From a patch's first channels to its next: a field of turned tiles alone.
template <typename Fields>
TCONV_DEVICE int line_stride(const Fields& arguments) {
    if constexpr (Layer::turned) return arguments.line_stride;
    return 0;
}

// A position's place in the order of products.
TCONV_DEVICE int turned_place(int position) {
    return (position & ~7) | (position & 1) << 2 | (position & 6) >> 1;
}

// An address of [position][128 bytes], swizzled.
TCONV_DEVICE int swizzled_line(int at) { return at ^ (at >> 3 & 0x70); }

// x of a stage by a warp of `warps`: of each unit a lane has two positions, 16 apart, of a quad of
// channels. Loads and stores of a warp meet all banks.
//
// NOTE: what a lane adds to an address is the same for all units, and a lane has several loads
// under way. With neither, the turning took longer than the products.
TCONV_DEVICE void turn_positions(const unsigned char* from, unsigned char* to, unsigned warp,
                                 unsigned warps) {
    constexpr unsigned blocks = Layer::positions / 32, units = blocks * (Layer::in_block / 8);
    constexpr unsigned together = units > 6 ? 2 : 1;  // fewer registers, where little waits
    unsigned position = threadIdx.x % 16, quad = threadIdx.x % 32 / 16;
    unsigned of_load = swizzled_line(position * 128 + quad * 16);
    unsigned of_store = swizzled_line(quad * 4 * 128 + turned_place(position) * 4);
#pragma unroll 1
    for (unsigned first = warp; first < units; first += together * warps) {
        float4 found[together][2];
#pragma unroll
        for (unsigned k = 0; k < together; ++k) {
            unsigned unit = min(first + k * warps, units - 1);
            unsigned channel = unit / blocks * 8, line = channel / line_channels;
            unsigned at = line * x_line_bytes + unit % blocks * 32 * 128;
            at += of_load ^ channel % line_channels * 4;
            found[k][0] = *reinterpret_cast<const float4*>(from + at);
            found[k][1] = *reinterpret_cast<const float4*>(from + at + 16 * 128);
        }
#pragma unroll
        for (unsigned k = 0; k < together; ++k) {
            unsigned unit = first + k * warps;
            if (k > 0 && unit >= units) break;
            unsigned char* lines = to + unit % blocks * x_row_bytes + unit / blocks * 8 * 128;
#pragma unroll
            for (unsigned half = 0; half < 2; ++half) {
                float4 of = found[k][half];
                float values[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
                for (unsigned i = 0; i < 4; ++i) {
                    *reinterpret_cast<uint32_t*>(lines + i * 128 +
                                                 (of_store ^ (i * 16 + half * 64))) =
                        tf32_of<rounds_x>(values[i]);
                }
            }
        }
    }
}

// Where a taker's y and x lie in a stage.
template <typename Fields>
struct TurnedPlaces {
    int of_half[2], of_step[Layer::positions / step_positions], starts[Layer::row_taps];

    // `first`: of `count` taps of a taker, whose patches begin at `from`. Those beyond are others'.
    TCONV_DEVICE TurnedPlaces(const Fields& arguments, int from, int first, int count, int other,
                              int first_source) {
        int channel = raw_channel(0, 1), line = channel / line_channels;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int i = threadIdx.x % 4 * 2 + half, row = i / arguments.box_x;
            of_half[half] = (row * arguments.pitch_x + i - row * arguments.box_x) * 128 +
                            line * arguments.line_stride + channel % line_channels * 4;
        }
#pragma unroll
        for (int step = 0; step < Layer::positions / step_positions; ++step) {
            int row = step * step_positions / arguments.box_x;
            int x = step * step_positions - row * arguments.box_x, image = row / arguments.box_y;
            row += image * (arguments.pitch_y - arguments.box_y);
            of_step[step] = (row * arguments.pitch_x + x) * 128;
        }
#pragma unroll
        for (int tap = 0; tap < Layer::row_taps; ++tap) {
            int at = tap < count ? first + tap : other;
            int position = Layer::tap_y[at] * arguments.pitch_x + Layer::tap_x[at];
            int source = Layer::tap_source[at] - first_source;
            starts[tap] = from + source * arguments.patch_stride + position * 128;
        }
    }

    TCONV_DEVICE void begin(const Fields&, int) {}  // rows are not flat

    // y of some steps of a box.
    template <int count>
    TCONV_DEVICE void load(const Fields&, const unsigned char* stage, int first,
                           uint32_t (&a)[count][Layer::row_taps][4]) const {
#pragma unroll
        for (int step = 0; step < count; ++step) {
#pragma unroll
            for (int tap = 0; tap < Layer::row_taps; ++tap) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    // NOTE: opaque, so that no registers remember each tap's place in each step.
                    int tap_at = ptx::opaque(starts[tap]) + of_half[half];
                    int at = swizzled_line(tap_at + of_step[first + step]);
                    float2 pair = *reinterpret_cast<const float2*>(stage + at);
                    a[step][tap][2 * half] = tf32_of<rounds_y>(pair.x);
                    a[step][tap][2 * half + 1] = tf32_of<rounds_y>(pair.y);
                }
            }
        }
    }

    // Where a step begins in x.
    TCONV_DEVICE int x_step(int step) const {
        int position = step * step_positions;
        return position / 32 * x_row_bytes + position % 32 * value_bytes;
    }
};

}  // namespace
