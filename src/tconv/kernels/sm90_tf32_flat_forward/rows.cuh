// The matrix rows of sm90_tf32_flat_forward, as sm90_tf32_flat_pack lays out their weights.
//
// By default phases in x lie side by side: a warp's 16 rows are (output channel, phase in x). The
// warps' tiles follow each other through (phase in y, channels), and four make a row group.
//
// `apart`, for a stride of 2: a row group is 64 channels of one phase in x. The two groups of the
// same channels follow each other.
//
// `paired`: a row group has one phase in y. The groups of the same channels in a phase and in the
// next follow each other.
#pragma once

#include <common/constant_tables.cuh>

namespace flat {

constexpr bool apart = Layer::apart;
constexpr bool paired = Layer::paired;
static_assert(!apart || !paired, "two groups follow each other for one reason");
constexpr int group_step = apart || paired ? 2 : 1;  // to the next channels of the same phases
constexpr int row_phases = apart ? 1 : Layer::stride_x;
constexpr int warp_channels = 16 / row_phases;
constexpr int channel_tiles = (Layer::out_channels + warp_channels - 1) / warp_channels;
constexpr int channel_groups = (channel_tiles + 3) / 4;
constexpr int group_channels = 4 * warp_channels;
[[maybe_unused]] constexpr int shares_x =
    Layer::stride_x / row_phases;  // row groups among which phases are shared

// The rows of one warp. Rows of a phase in y beyond the last do not exist.
struct WarpRows {
    int phase_y, phase_x, channel;  // the first of each

    TCONV_DEVICE WarpRows(int row_group, int warp) {
        if (apart) {
            int pair = row_group / 2;
            phase_x = row_group % 2;
            phase_y = pair / channel_groups;
            channel = (pair % channel_groups * 4 + warp) * warp_channels;
        } else if (paired) {
            int pair = row_group / 2;
            phase_x = 0;
            phase_y = pair / channel_groups * 2 + row_group % 2;
            channel = (pair % channel_groups * 4 + warp) * warp_channels;
        } else {
            int tile = row_group * 4 + warp;
            phase_x = 0;
            phase_y = tile / channel_tiles;
            channel = tile % channel_tiles * warp_channels;
        }
    }
};

// The warp tile of a channel, within its phase where that has groups of its own.
TCONV_DEVICE int warp_tile(int phase_y, int channel) {
    int first = group_step == 2 ? 0 : phase_y * channel_tiles;
    return first + channel / warp_channels;
}

// The row group of a channel, a phase in y and a share of the phases in x.
TCONV_DEVICE int row_group(int phase_y, int share_x, int channel) {
    int channels = channel / group_channels;
    if (apart) return (phase_y * channel_groups + channels) * 2 + share_x;
    if (paired) return (phase_y / 2 * channel_groups + channels) * 2 + phase_y % 2;
    return warp_tile(phase_y, channel) / 4;
}

// The first row of a channel in its group.
TCONV_DEVICE int first_row(int phase_y, int channel) {
    return warp_tile(phase_y, channel) % 4 * 16 + channel % warp_channels * row_phases;
}

// The slots of a row group: the first and the end among all classes' slots, and the first among the
// slots of all row groups.
struct RowSlots {
    int begin, end, packed;

    TCONV_DEVICE explicit RowSlots(int row_group) {
        int row_class = entry(Layer::row_class, row_group);
        begin = entry(Layer::class_begin, row_class);
        end = entry(Layer::class_begin, row_class + 1);
        packed =
            Layer::classes == 1 ? row_group * (end - begin) : entry(Layer::row_begin, row_group);
    }
};

}  // namespace flat
