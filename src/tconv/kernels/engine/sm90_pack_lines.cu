// Packs x, y or both of float32 as [image][group][channel][row][column], with rows on
// 16 bytes, so that tensor maps can describe their lines. y may be folded (<engine/fold.cuh>):
// with zeros where there is no pixel.
//
// A unit is 4 channels of 4 columns, which one thread turns in registers. A thread's loads are all
// under way together.
#include <common/split.cuh>
#include <engine/fold.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

using Index = Layer::Index;

struct Lines {
    const float* source;
    float* destination;
    Index stride_n, stride_c, stride_h, stride_w;
    int batch, source_height, source_width, height, width;
};

// Of `channels` channels of a group, those of a folded image if `folds`.
template <int channels, bool channels_last, bool folds, bool splits = false>
struct LinePacking {
    static constexpr int quads = (channels + 3) / 4;  // of a group
    static constexpr int source_channels = folds ? Layer::fold_channels : channels;
    // Neighbouring threads have so many quads of columns before the next channels: they write 32
    // bytes of a line, and read as many channels of a pixel as they can.
    static constexpr int run = channels_last ? 2 : 1;

    TCONV_DEVICE static void pack(const Lines& image) {
        if constexpr (channels_last && source_channels % 4 == 0) {
            Index aligned = Index(reinterpret_cast<uint64_t>(image.source) / sizeof(float) % 4) |
                            image.stride_n | image.stride_h | image.stride_w;
            if (image.stride_c == 1 && aligned % 4 == 0) {
                pack_units<true>(image);
                return;
            }
        }
        pack_units<false>(image);
    }

    template <bool vectors>
    TCONV_DEVICE static void pack_units(const Lines& image) {
        int of_row = (image.width + 3) / 4, runs = (of_row + run - 1) / run;
        Index rows = Index(image.batch) * image.height;
        constexpr int all_quads = quads * Layer::groups;
        Index count = rows * runs * (run * all_quads);
        for (Index unit = Index(blockIdx.x) * Layer::threads + threadIdx.x; unit < count;
             unit += Index(gridDim.x) * Layer::threads) {
            int x, y, quad;
            Index n;
            if constexpr (channels_last) {
                Index rest = unit / run, row = rest / all_quads;
                quad = int(rest - row * all_quads);
                n = row / runs;
                x = int(row - n * runs) * run + int(unit % run);
                row = n;
                n = row / image.height;
                y = int(row - n * image.height);
            } else {
                Index row = unit / of_row, rest = row / image.height;
                x = int(unit - row * of_row);
                y = int(row - rest * image.height);
                n = rest / all_quads;
                quad = int(rest - n * all_quads);
            }
            if (x >= of_row) continue;
            int group = quad / quads, channel = (quad - group * quads) * 4;
            float values[4][4] = {};  // of a channel, columns
            const float* from =
                image.source + n * image.stride_n + Index(group * source_channels) * image.stride_c;
            load<vectors>(image, from, y, x * 4, channel, values);
            if constexpr (splits) {
                write_parts(image, n * Layer::groups + group, channel, y, x, values);
                continue;
            }
            Index of_line = Index(of_row) * 4, of_channel = image.height * of_line;
            Index line = (n * Layer::groups + group) * channels + channel;
            float* to = image.destination + line * of_channel + y * of_line + x * 4;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (channels % 4 != 0 && channel + i >= channels) continue;
                const float (&of)[4] = values[i];
                *reinterpret_cast<float4*>(to + i * of_channel) = {of[0], of[1], of[2], of[3]};
            }
        }
    }

    // In strict float32: each of a group's three parts has planes of its own.
    TCONV_DEVICE static void write_parts(const Lines& image, Index group, int channel, int y,
                                         int quad, const float (&values)[4][4]) {
        // Rows are on 16 bytes: of 8 values.
        Index of_line = (image.width + 7) / 8 * 2, of_channel = image.height * of_line;  // quads
        Index of_part = channels * of_channel;
        auto* to = reinterpret_cast<uint2*>(image.destination) + group * (3 * of_part) +
                   channel * of_channel + y * of_line + quad;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (channels % 4 != 0 && channel + i >= channels) continue;
            const float (&of)[4] = values[i];
            auto first = Split::scaled(of[0], of[1]), second = Split::scaled(of[2], of[3]);
            to[i * of_channel] = {first.high, second.high};
            to[i * of_channel + of_part] = {first.middle, second.middle};
            to[i * of_channel + 2 * of_part] = {first.low, second.low};
        }
    }

    // Zeros where there is no pixel. With vectors, four channels are those of one pixel.
    template <bool vectors>
    TCONV_DEVICE static void load(const Lines& image, const float* from, int row, int column,
                                  int channel, float (&values)[4][4]) {
        constexpr int step = folds ? Layer::fold_x : 1;
#pragma unroll
        for (int i = 0; i < 4; i += vectors ? 4 : 1) {
            if (channels % 4 != 0 && channel + i >= channels) continue;
            int y = row, x = column, of = channel + i;
            if constexpr (folds) {
                Unfolded unfolded(of);
                y = row * Layer::fold_y - Layer::cut_y + unfolded.y;
                x = column * Layer::fold_x - Layer::cut_x + unfolded.x;
                of = unfolded.channel;
            }
            bool exists = unsigned(y) < unsigned(image.source_height);
            const float* line = from + of * image.stride_c + y * image.stride_h;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                int at = x + k * step;
                if (!exists || unsigned(at) >= unsigned(image.source_width)) continue;
                const float* pixel = line + at * image.stride_w;
                if constexpr (vectors) {
                    float4 found = *reinterpret_cast<const float4*>(pixel);
                    values[0][k] = found.x;
                    values[1][k] = found.y;
                    values[2][k] = found.z;
                    values[3][k] = found.w;
                } else {
                    values[i][k] = *pixel;
                }
            }
        }
    }
};

// A template, as the fields are there only of what is packed.
template <typename Fields>
TCONV_DEVICE void pack_lines(const Fields& arguments) {
    if constexpr (Layer::packs_x) {
        LinePacking<Layer::in_channels, Layer::x_channels_last, false, Layer::strict>::pack(
            {static_cast<const float*>(arguments.x), static_cast<float*>(arguments.packed_x),
             arguments.x_stride_n, arguments.x_stride_c, arguments.x_stride_h, arguments.x_stride_w,
             arguments.batch, arguments.x_height, arguments.x_width, arguments.x_height,
             arguments.x_width});
    }
    if constexpr (Layer::packs_y) {
        LinePacking<Layer::out_channels, Layer::fold_channels_last, is_folded>::pack(
            {static_cast<const float*>(arguments.y), static_cast<float*>(arguments.packed_y),
             arguments.y_stride_n, arguments.y_stride_c, arguments.y_stride_h, arguments.y_stride_w,
             arguments.batch, arguments.y_height, arguments.y_width, arguments.image_height,
             arguments.image_width});
    }
}

}  // namespace

TCONV_KERNEL(sm90_pack_lines, Layer::threads, 3) {
    ptx::griddepcontrol_launch_dependents();
    pack_lines(arguments);
}
