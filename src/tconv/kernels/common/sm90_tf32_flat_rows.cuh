// Where sm90_tf32_flat_forward keeps its matrix rows, and sm90_tf32_flat_pack puts their weights.
//
// Phases in x side by side: a warp's 16 rows are (output channel, phase in x), the warps' tiles
// follow each other through (phase in y, channels), and four make a row group. Apart, for a stride
// of 2: a row group is 64 channels of one phase in x, and the two groups of the same channels
// follow each other.
#pragma once

#include <ptx/cuda.cuh>

namespace flat {

constexpr bool apart = Layer::apart;
constexpr int row_phases = apart ? 1 : Layer::stride_x;
constexpr int warp_channels = 16 / row_phases;
constexpr int channel_tiles = (Layer::out_channels + warp_channels - 1) / warp_channels;
constexpr int channel_groups = (channel_tiles + 3) / 4;
[[maybe_unused]] constexpr int shares_x = Layer::stride_x / row_phases;  // row groups among which phases are shared

// The rows of one warp: those of a phase in y beyond the last are none.
struct WarpRows {
    int phase_y, phase_x, channel;  // the first of each

    TCONV_DEVICE WarpRows(int row_group, int warp) {
        if (apart) {
            int pair = row_group / 2;
            phase_x = row_group % 2;
            phase_y = pair / channel_groups;
            channel = (pair % channel_groups * 4 + warp) * warp_channels;
        } else {
            int tile = row_group * 4 + warp;
            phase_x = 0;
            phase_y = tile / channel_tiles;
            channel = tile % channel_tiles * warp_channels;
        }
    }
};

TCONV_DEVICE int warp_tile(int phase_y, int channel) {
    return phase_y * channel_tiles + channel / warp_channels;
}

// The row group of a channel, of a phase in y and a share of the phases in x.
TCONV_DEVICE int row_group(int phase_y, int share_x, int channel) {
    return apart ? (phase_y * channel_groups + channel / 64) * 2 + share_x
                 : warp_tile(phase_y, channel) / 4;
}

// The first row of a channel in its group.
TCONV_DEVICE int first_row(int phase_y, int channel) {
    return apart ? channel % 64
                 : warp_tile(phase_y, channel) % 4 * 16 + channel % warp_channels * row_phases;
}

}  // namespace flat
