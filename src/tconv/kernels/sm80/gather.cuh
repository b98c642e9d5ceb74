// Forward and input gradient: sums[position][channel] over taps and channels.
//
//   bring     pixels of the source at a tap's distance, gathered by cp.async, zeros beside it; and
//             the weights of the same taps and channels
//   multiply  <sm80/multiply.cuh>
//   store     sum and bias rounded once, turned in shared memory, written by vectors
//
// A block has positions of one phase of the result, and channels of a group. What it sums over is
// in octets of channels: those of the first tap, of the second, and so on, without a gap. A thread
// brings the same octet of each stage, for several positions.
#pragma once

#include <sm80/multiply.cuh>

namespace {

constexpr bool forward = Layer::forward;
constexpr int reduced = forward ? Layer::in_channels : Layer::out_channels;
constexpr int channels = forward ? Layer::out_channels : Layer::in_channels;  // that are made
constexpr int octets = (reduced + 7) / 8;  // of a tap
constexpr int column_blocks = (channels + tile_columns - 1) / tile_columns;
constexpr int lines = Layer::threads / 8;  // that all threads bring at a time

constexpr int common(int a, int b) { return b == 0 ? a : common(b, a % b); }

// An axis, for a phase of the result. Each further position and tap lies steps on.
template <int kernel, int stride, int padding, int dilation>
struct Axis {
    static constexpr int phases = forward ? stride : 1, factor = common(stride, dilation);
    static constexpr int source_step = forward ? 1 : stride, result_step = phases;
    static constexpr int tap_step = forward ? stride / factor : 1;
    static constexpr int tap_distance = forward ? -dilation / factor : dilation;
    int first = 0, source = -padding;  // pixels of the first position: of the result, and at `tap`
    int tap = 0, taps = kernel;

    TCONV_DEVICE explicit Axis(int phase) {
        if constexpr (forward) {
            while (tap < kernel && tap * dilation % stride != phase) ++tap;
            taps = (kernel - tap + tap_step - 1) / tap_step;
            first = (phase + stride - padding % stride) % stride;
            source = (first + padding - tap * dilation) / stride;
        }
    }
};
using Y = Axis<Layer::kernel_y, Layer::stride_y, Layer::padding_y, Layer::dilation_y>;
using X = Axis<Layer::kernel_x, Layer::stride_x, Layer::padding_x, Layer::dilation_x>;

struct alignas(sizeof(Index) == 4 ? 16 : 8) Pixel {
    Index from, to;  // in the source, at the phase's first tap; in the result, negative if none
    int y, x;  // of the source
};
static_assert(tile_rows * sizeof(Pixel) <= Layer::table_bytes, "stages begin there");

// Where an octet lies: among a tap's, and its tap among those of the phase.
struct Octet {
    int octet = 0, y = 0, x = 0;

    TCONV_DEVICE void advance(int count, int taps_x) {
        for (octet += count; octet >= octets; octet -= octets) {
            if (++x < taps_x) continue;
            x = 0;
            ++y;
        }
    }
};

// A block's part.
struct Share {
    int channel, group, tile;
    Y y;
    X x;

    TCONV_DEVICE Share(int tiles, int number)
        : channel(blockIdx.x % column_blocks * tile_columns),
          group(number / (Y::phases * X::phases) / tiles),
          tile(number / (Y::phases * X::phases) % tiles),
          y(number / X::phases % Y::phases),
          x(number % X::phases) {}
};

// Whether the tile has any.
TCONV_DEVICE bool find_pixels(const Arguments& of, const Share& share, Pixel* pixels) {
    int height = ((forward ? of.y_height : of.x_height) - share.y.first + Y::result_step - 1) /
                 Y::result_step;
    int width =
        ((forward ? of.y_width : of.x_width) - share.x.first + X::result_step - 1) / X::result_step;
    Index first = Index(share.tile) * tile_rows, count = Index(of.batch) * height * width;
    if (height <= 0 || width <= 0 || first >= count) return false;
    for (int i = threadIdx.x; i < tile_rows; i += Layer::threads) {
        Index row = (first + i) / width, n = row / height;
        int x = first + i - row * width, y = row - n * height;
        Index to = n * of.destination_stride_n +
                   (share.y.first + y * Y::result_step) * of.destination_stride_h +
                   (share.x.first + x * X::result_step) * of.destination_stride_w;
        y = share.y.source + y * Y::source_step;
        x = share.x.source + x * X::source_step;
        bool exists = first + i < count;
        pixels[i] = {n * of.source_stride_n + y * of.source_stride_h + x * of.source_stride_w,
                     exists ? to : Index(-1), exists ? y : int(0x80000000), x};
    }
    return true;
}

TCONV_DEVICE void bring_pixels(const Arguments& of, const Share& share, const Pixel* pixels,
                               unsigned char* to, const Octet& at, int part) {
    unsigned y = at.y * Y::tap_distance, x = at.x * X::tap_distance;
    unsigned height = forward ? of.x_height : of.y_height;
    unsigned width = forward ? of.x_width : of.y_width;
    auto* source = static_cast<const Element*>(of.source) +
                   (share.group * of.source_stride_group + int(y) * of.source_stride_h +
                    int(x) * of.source_stride_w + at.octet * 8);
    for_lines<tile_rows, lines>(threadIdx.x / 8, part, [&](int i) {
        Pixel pixel = pixels[i];
        bool inside = (at.y < share.y.taps) & (pixel.y + y < height) & (pixel.x + x < width);
        ptx::cp_async_cg_16(to + chunk_at<8>(i, threadIdx.x % 8), source + pixel.from, inside);
    });
}

TCONV_DEVICE void bring_weights(const Arguments& of, const Share& share, unsigned char* to,
                                const Octet& at, int part) {
    auto* weight = static_cast<const Element*>(of.other) +
                   (share.group * of.other_stride_group +
                    (share.y.tap + at.y * Y::tap_step) * of.other_stride_h +
                    (share.x.tap + at.x * X::tap_step) * of.other_stride_w);
    bool exists = at.y < share.y.taps;
    if constexpr (Layer::weight_turned) {
        // As it lies, [in][tap][out]: neighbours bring a line's octets of output channels, then the
        // next line.
        constexpr int chunks = tile_columns / 8;
        for_lines<tile_columns, lines>(threadIdx.x % lines, part, [&](int i) {
            int line = i / chunks, chunk = i % chunks, channel = share.channel + chunk * 8;
            int from = at.octet * 8 + line;
            ptx::cp_async_cg_16(to + chunk_at<chunks>(threadIdx.x / lines * 8 + line, chunk),
                                weight + (from * of.other_stride_n + channel),
                                exists & (from < reduced) & (channel < channels));
        });
    } else {
        for_lines<tile_columns, lines>(threadIdx.x / 8, part, [&](int i) {
            int channel = share.channel + i;
            ptx::cp_async_cg_16(to + chunk_at<8>(i, threadIdx.x % 8),
                                weight + (channel * of.other_stride_n + at.octet * 8),
                                exists & (channel < channels));
        });
    }
}

// The rounded result: a line has the channels of a position, or the positions of a channel.
constexpr int pitch = (Layer::contiguous ? tile_rows : tile_columns) + 8;

TCONV_DEVICE void round(const Arguments& of, const Share& share, const Sums& sums,
                        unsigned short* rounded) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < warp_columns / 8; ++j) {
        int column = first_column() + j * 8 + lane % 4 * 2, channel = share.channel + column;
        float bias[2] = {};
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            if (!Layer::bias || channel + k >= channels) continue;
            auto* found = static_cast<const Element*>(of.bias);
            bias[k] = widen(found[share.group * channels + channel + k]);
        }
#pragma unroll
        for (int i = 0; i < warp_rows / 8; ++i) {
            int row = first_row() + i * 8 + lane / 4;
            float low = sums[i / 2][j][i % 2 * 2] + bias[0];
            float high = sums[i / 2][j][i % 2 * 2 + 1] + bias[1];
            uint32_t pair = Layer::bfloat ? ptx::cvt_rn_bf16x2_f32(low, high)
                                          : ptx::cvt_rn_f16x2_f32(low, high);
            if constexpr (Layer::contiguous) {
                rounded[column * pitch + row] = pair;
                rounded[(column + 1) * pitch + row] = pair >> 16;
            } else {
                *reinterpret_cast<uint32_t*>(rounded + row * pitch + column) = pair;
            }
        }
    }
}

// What vectors begin on multiples of; 1 if a line's neighbours are none in the result.
TCONV_DEVICE Index alignment(const Arguments& of) {
    int height = forward ? of.y_height : of.x_height, width = forward ? of.y_width : of.x_width;
    Index every = Index(reinterpret_cast<uint64_t>(of.destination) / 2) | of.destination_stride_n;
    if (!Layer::contiguous) {
        every |= of.destination_stride_h | of.destination_stride_w | channels;
        return of.destination_stride_c == 1 ? every : 1;
    }
    if (Y::result_step * X::result_step > 1 || of.destination_stride_w != 1) return 1;
    // Where rows follow each other without a gap, an image is one row.
    bool joined = of.destination_stride_h == width;
    return every | of.destination_stride_c |
           (joined ? Index(height) * width : of.destination_stride_h | width);
}

template <int vector = 8>
TCONV_DEVICE void store(const Arguments& of, const Share& share, const Pixel* pixels,
                        const unsigned short* rounded, Index aligned) {
    if constexpr (vector > 1) {
        if (aligned % vector) return store<vector / 2>(of, share, pixels, rounded, aligned);
    }
    using Values = Vector<unsigned short, vector>;
    constexpr int length = (Layer::contiguous ? tile_rows : tile_columns) / vector;
    auto* first = static_cast<unsigned short*>(of.destination) +
                  Index(share.group * channels + share.channel) * of.destination_stride_c;
#pragma unroll 4
    for (int i = threadIdx.x; i < tile_rows * tile_columns / vector; i += Layer::threads) {
        int line = i / length, place = i % length * vector;
        int channel = Layer::contiguous ? line : place;
        Index to = pixels[Layer::contiguous ? place : line].to;
        if (to < 0 || share.channel + channel >= channels) continue;
        *reinterpret_cast<Values*>(first + (to + channel * of.destination_stride_c)) =
            *reinterpret_cast<const Values*>(rounded + line * pitch + place);
    }
}

TCONV_DEVICE void gather(const Arguments& of, unsigned char* memory) {
    auto* pixels = reinterpret_cast<Pixel*>(memory);
    Share share(of.tiles, blockIdx.x / column_blocks);
    if (!find_pixels(of, share, pixels)) return;
    memory += Layer::table_bytes;
    int taps_x = share.x.taps, count = (share.y.taps * taps_x * octets + 7) / 8;
    Octet at, of_weights;  // of the octets that the thread brings
    at.advance(threadIdx.x % 8, taps_x);
    of_weights.advance(Layer::weight_turned ? threadIdx.x / lines : threadIdx.x % 8, taps_x);
    Sums sums = {};
    ptx::griddepcontrol_wait();  // the packing may still run
    auto bring = [&](unsigned char* stage, int, int part) {
        bring_pixels(of, share, pixels, stage, at, part);
        bring_weights(of, share, stage + a_bytes, of_weights, part);
        if (part + 1 < steps) return;
        at.advance(8, taps_x);
        of_weights.advance(8, taps_x);
    };
    sum_up<false, Layer::weight_turned>(memory, count, sums, bring);
    auto* rounded = reinterpret_cast<unsigned short*>(memory);
    round(of, share, sums, rounded);
    __syncthreads();
    store(of, share, pixels, rounded, alignment(of));
}

}  // namespace
