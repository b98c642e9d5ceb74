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

#include <sm80/pixels.cuh>

namespace {

constexpr int reduced = forward ? Layer::in_channels : Layer::out_channels;
constexpr int channels = forward ? Layer::out_channels : Layer::in_channels;  // that are made
constexpr int octets = (reduced + 7) / 8;  // of a tap
constexpr int column_blocks = (channels + tile_columns - 1) / tile_columns;
constexpr int lines = Layer::threads / 8;  // that all threads bring at a time

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

struct Block {
    const Arguments& of;
    Pixel* pixels;
    unsigned char* stages;  // and then the rounded result
    int channel, group, tile;  // the first channel
    Y y;
    X x;

    TCONV_DEVICE Block(const Arguments& arguments, unsigned char* memory, int number)
        : of(arguments),
          pixels(reinterpret_cast<Pixel*>(memory)),
          stages(memory + Layer::table_bytes),
          channel(blockIdx.x % column_blocks * tile_columns),
          group(number / (Y::phases * X::phases) / of.tiles),
          tile(number / (Y::phases * X::phases) % of.tiles),
          y(number / X::phases % Y::phases),
          x(number % X::phases) {}

    // Of weights that are turned, [in][tap][out], neighbours bring a line's octets of output
    // channels, and then the next line.
    TCONV_DEVICE void bring_weights(unsigned char* to, const Octet& at, int part) const {
        constexpr bool turned = Layer::weight_turned;
        constexpr int chunks = turned ? tile_columns / 8 : 8;
        auto* weight =
            static_cast<const Element*>(of.other) +
            (group * of.other_stride_group + (y.tap + at.y * Y::tap_step) * of.other_stride_h +
             (x.tap + at.x * X::tap_step) * of.other_stride_w);
        int first = turned ? threadIdx.x % lines : threadIdx.x / 8;
        for_lines<tile_columns, lines>(first, part, [&](int i) {
            int line = turned ? threadIdx.x / lines * 8 + i / chunks : i;
            int chunk = turned ? i % chunks : threadIdx.x % 8;
            int made = channel + (turned ? chunk * 8 : i);
            int from = at.octet * 8 + (turned ? i / chunks : 0);
            Index offset =
                turned ? from * of.other_stride_n + made : made * of.other_stride_n + from;
            bool exists = (at.y < y.taps) & (from < reduced) & (made < channels);
            ptx::cp_async_cg_16(to + chunk_at<chunks>(line, chunk), weight + offset, exists);
        });
    }

    // A line has the channels of a position, or the positions of a channel.
    static constexpr int pitch = (Layer::contiguous ? tile_rows : tile_columns) + 8;

    TCONV_DEVICE void round(const Sums& sums) const {
        auto* rounded = reinterpret_cast<unsigned short*>(stages);
        auto bias_of = [&](int made) {
            if (!Layer::bias || made >= channels) return 0.0f;
            return widen(static_cast<const Element*>(of.bias)[group * channels + made]);
        };
#pragma unroll
        for (int j = 0; j < warp_columns / 8; ++j) {
            int column = first_column() + j * 8 + threadIdx.x % 4 * 2;
            float bias[2] = {bias_of(channel + column), bias_of(channel + column + 1)};
#pragma unroll
            for (int i = 0; i < warp_rows / 8; ++i) {
                int row = first_row() + i * 8 + threadIdx.x % 32 / 4;
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
    TCONV_DEVICE Index alignment() const {
        int height = forward ? of.y_height : of.x_height, width = forward ? of.y_width : of.x_width;
        Index every =
            Index(reinterpret_cast<uint64_t>(of.destination) / 2) | of.destination_stride_n;
        if (!Layer::contiguous) {
            every |= of.destination_stride_h | of.destination_stride_w | channels;
            return of.destination_stride_c == 1 ? every : 1;
        }
        if (Y::phases * X::phases > 1 || of.destination_stride_w != 1) return 1;
        // Where rows follow each other without a gap, an image is one row.
        bool joined = of.destination_stride_h == width;
        every |= joined ? Index(height) * width : of.destination_stride_h | width;
        return every | of.destination_stride_c;
    }

    template <int vector = 8>
    TCONV_DEVICE void store(Index aligned) const {
        if constexpr (vector > 1) {
            if (aligned % vector) return store<vector / 2>(aligned);
        }
        using Values = Vector<unsigned short, vector>;
        constexpr int length = (Layer::contiguous ? tile_rows : tile_columns) / vector;
        constexpr int across = length < Layer::threads ? length : Layer::threads;
        auto* rounded = reinterpret_cast<const unsigned short*>(stages);
        auto* first = static_cast<unsigned short*>(of.destination) +
                      Index(group * channels + channel) * of.destination_stride_c;
        for (int place = threadIdx.x % across * vector; place < length * vector;
             place += across * vector) {
            Index own = pixels[Layer::contiguous ? place : 0].to;
#pragma unroll 4
            for (int line = threadIdx.x / across;
                 line < (Layer::contiguous ? tile_columns : tile_rows);
                 line += Layer::threads / across) {
                int made = Layer::contiguous ? line : place;
                Index to = Layer::contiguous ? own : pixels[line].to;
                if ((to < 0) | (channel + made >= channels)) continue;
                *reinterpret_cast<Values*>(first + (to + made * of.destination_stride_c)) =
                    *reinterpret_cast<const Values*>(rounded + line * pitch + place);
            }
        }
    }

    TCONV_DEVICE void run() const {
        if (!find_pixels<tile_rows>(of, y, x, Index(tile) * tile_rows, pixels)) return;
        int count = (y.taps * x.taps * octets + 7) / 8;
        Octet at, of_weights;  // of the octets that the thread brings
        at.advance(threadIdx.x % 8, x.taps);
        of_weights.advance(Layer::weight_turned ? threadIdx.x / lines : threadIdx.x % 8, x.taps);
        Sums sums = {};
        ptx::griddepcontrol_wait();  // the packing may still run
        auto bring = [&](unsigned char* stage, int, int part) {
            bring_pixels<tile_rows, 8>(of, pixels, stage, group, at.octet, at.y * Y::tap_distance,
                                       at.x * X::tap_distance, at.y < y.taps, part);
            bring_weights(stage + a_bytes, of_weights, part);
            if (part + 1 < steps) return;
            at.advance(8, x.taps);
            of_weights.advance(8, x.taps);
        };
        sum_up<false, Layer::weight_turned>(stages, count, sums, bring);
        round(sums);
        __syncthreads();
        store(alignment());
    }
};

}  // namespace
