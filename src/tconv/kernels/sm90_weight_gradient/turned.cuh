// Images in channels_last of float32, for `sm90_weight_gradient`. The tensor cores take positions
// adjacent, of both operands; here channels are.
//
// y goes to registers: a thread has two neighbouring channels of a position in a word of 8 bytes,
// and any distance of a tap is an address. x is turned by warps that have nothing else to do, from
// [position][channel] to lines of 32 positions of a channel.
//
// A thread that turns has four positions of an octet, every second one, and a quad of channels: as
// many vectors are loaded as stored. Of octet `o` of a box it begins with the o-th of the four, so
// that eight threads meet all banks, and products have positions in that order:
// 0, 2, 4, 6, 1, 3, 5, 7, then 2, 4, 6, 0, 3, 5, 7, 1, and so on. Four positions of y that a warp
// loads at a time meet all banks two apart, and half of them one apart. In boxes of 4 columns two
// of the four are of the next row, and may meet half of them too.
//
// Only for <sm90_weight_gradient.cu>.
#pragma once

#include <ptx/registers.cuh>
#include <sm90_weight_gradient/raw.cuh>

namespace {

constexpr int line_channels = 32;  // of a position, in 128 bytes
constexpr int x_lines = (Layer::in_block + line_channels - 1) / line_channels;
constexpr int y_lines = (Layer::out_block + line_channels - 1) / line_channels;
constexpr int x_line_bytes = Layer::positions * 128;  // of all positions

// From a patch's first channels, or its values' first part, to the next: a field of such tiles
// alone.
template <typename Fields>
TCONV_DEVICE int line_stride(const Fields& arguments) {
    if constexpr (Layer::turned || Layer::strict) return arguments.line_stride;
    return 0;
}

// An address of [position][128 bytes], swizzled.
TCONV_DEVICE int swizzled_line(int at) { return at ^ (at >> 3 & 0x70); }

// The position of a place among four of an octet.
TCONV_DEVICE int turned_position(int place, int octet) { return (place + octet) % 4 * 2; }

// x of a stage by a warp of `warps`: of each unit a lane has four positions and a quad of channels.
TCONV_DEVICE void turn_positions(const unsigned char* from, unsigned char* to, unsigned warp,
                                 unsigned warps) {
    constexpr unsigned quads = Layer::in_block / 4, of_unit = 4, blocks = Layer::positions / 32;
    constexpr unsigned units = blocks * ((quads + of_unit - 1) / of_unit);
    unsigned own = threadIdx.x % 8, octet = own / 2, odd = own % 2, quad = threadIdx.x % 32 / 8;
    int of_load[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        of_load[i] = swizzled_line((octet * 8 + turned_position(i, octet) + odd) * 128);
    }
#pragma unroll 1
    for (unsigned unit = warp; unit < units; unit += warps) {
        unsigned of_quad = unit / blocks * of_unit + quad, block = unit % blocks;
        if (quads % of_unit != 0 && of_quad >= quads) continue;
        const unsigned char* line = from + of_quad / 8 * x_line_bytes + block * 32 * 128;
        float4 found[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            found[i] = *reinterpret_cast<const float4*>(line + (of_load[i] ^ of_quad % 8 * 16));
        }
        unsigned char* lines = to + block * x_row_bytes + of_quad * 4 * 128;
        float4 turned[4] = {{found[0].x, found[1].x, found[2].x, found[3].x},
                            {found[0].y, found[1].y, found[2].y, found[3].y},
                            {found[0].z, found[1].z, found[2].z, found[3].z},
                            {found[0].w, found[1].w, found[2].w, found[3].w}};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int at = i * 128 + ((own ^ (of_quad % 2 * 4 + i)) * 16);
            *reinterpret_cast<float4*>(lines + at) = turned[i];
        }
    }
}

// Where a taker's y and x lie in a stage.
template <typename Fields>
struct TurnedPlaces {
    int of_half[4][2];  // of every fourth step
    int of_step[Layer::positions / step_positions], starts[Layer::row_taps];

    // `first`: of `count` taps of a taker, whose patches begin at `from`. Those beyond are others'.
    TCONV_DEVICE TurnedPlaces(const Fields& arguments, int from, int first, int count, int other,
                              int first_source) {
        int channel = raw_channel(0, 1), line = channel / line_channels;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int i = turned_position(threadIdx.x, step) + half, row = i / arguments.box_x;
                of_half[step][half] = (row * arguments.pitch_x + i - row * arguments.box_x) * 128 +
                                      line * arguments.line_stride + channel % line_channels * 4;
            }
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
                    int tap_at = ptx::opaque(starts[tap]) + of_half[(first + step) % 4][half];
                    int at = swizzled_line(tap_at + of_step[first + step]);
                    float2 pair = *reinterpret_cast<const float2*>(stage + at);
                    a[step][tap][2 * half] = __float_as_uint(pair.x);
                    a[step][tap][2 * half + 1] = __float_as_uint(pair.y);
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
