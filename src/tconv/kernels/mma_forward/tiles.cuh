// The units and weights of a tile of mma_forward, on mma.sync with TF32 operands.
//
// Pixel q of an axis stands for the outputs o = q*stride + phase - padding, phase in 0..stride-1.
// Tap t is of phase t*dilation % stride and reads input q - shift, shift = t*dilation / stride. At
// one slot, a shift of each axis, all phases that have a tap there read the same inputs: they are
// stacked, with the channels, into the rows of one product.
//
//   row     (phase in y, phase in x, out channel), 16 to a fragment; those without a tap are zero
//   column  one of 8 pixels of a row
//   depth   8 input channels of a slot
//
// A unit is what a warp accumulates at a time: unit_channels out channels with all their phases in
// x and unit_phases of those in y, of 8*fragments pixels of a row. A block computes a tile at a
// time, some units that share their inputs:
//
//   step      a patch of `depth` input channels with its halo, by cp.async, zero outside the
//             image; the next step's patch, of this or the next tile, is copied meanwhile
//   weights   of all input channels, as fragments, one vector a lane; kept until a tile of another
//             group or of other channels comes up
//
// Layer::split: strict float32, six products for one (<common/split.cuh>). Weights lie in shared
// memory as parts, pixels are split in registers, and the products of 8 channels of a slot go to a
// temporary: the tensor cores cut their sums after every product, and an ordinary addition, which
// rounds, takes it to the unit's sums.
//
// Layer::team: the warps of a row gather it together and each writes whole rows of some channels,
// from lines of 128 bytes on: fewer sectors are partial.
#pragma once

#include <common/constant_tables.cuh>
#include <common/image_tiles.cuh>
#include <common/split.cuh>

namespace mma_tiles {

using Index = Layer::Index;
using image_tiles::own_thread;

constexpr int threads = Layer::threads;
constexpr int warps = threads / 32;
constexpr int fragments = Layer::fragments;
constexpr int stride_x = Layer::stride_x;

constexpr int part_columns = 8 * fragments;
constexpr int tile_columns = Layer::parts * part_columns;
constexpr int tile_rows = Layer::row_groups;
constexpr int tile_channels = Layer::channel_blocks * Layer::unit_channels;
constexpr int channel_tiles = (Layer::out_channels + tile_channels - 1) / tile_channels;

constexpr int kinds = Layer::channel_blocks * Layer::phase_groups;  // units with other weights
constexpr int units = Layer::parts * Layer::row_groups * kinds;
constexpr int unit_rows = Layer::unit_phases * Layer::phases_x * Layer::unit_channels;
constexpr int row_fragments = (unit_rows + 15) / 16;

constexpr int depth = Layer::depth;
constexpr int chunks = (Layer::in_channels + depth - 1) / depth;
constexpr int steps_8 = (Layer::in_channels + 7) / 8;

static_assert(depth % 8 == 0, "a step is whole fragments");
static_assert(chunks == 1 || units <= warps, "sums live through a tile's steps");

// The patch: [depth][patch_rows][patch_pitch]. Its column `skew` is the least input column that
// the tile's first pixel reads; column 0 lies on a multiple of 4 of the image's columns.
constexpr int skew = Layer::skew;
constexpr int patch_rows = tile_rows + Layer::span_y;
constexpr int used_vectors = Layer::patch_vectors;
static_assert(4 * used_vectors >= skew + tile_columns + Layer::span_x,
              "a patch has what tiles read");
constexpr int patch_pitch = 4 * used_vectors;
// NOTE: 8 modulo 16: four channels by eight neighbouring pixels lie in all 32 banks.
constexpr int patch_channel = patch_rows * patch_pitch + (24 - patch_rows * patch_pitch % 16) % 16;

// [kind][8 input channels][slot in y][slot in x][fragment of rows][lane][word]. Split: high, middle
// and low parts. Each has row g and row g + 8, with channels t and t + 4 together.
constexpr int lane_weights = Layer::split ? 6 : 4;
constexpr int fragment_weights = 32 * lane_weights;
// NOTE: a vector more, so that a channel's taps, which lanes copy side by side, meet more banks.
constexpr int slot_weights = row_fragments * fragment_weights + 4;
constexpr int step_weights = Layer::slots_y * Layer::slots_x * slot_weights;
constexpr int kind_weights = steps_8 * step_weights;

// Warps that gather their outputs together: those with the same rows and channels.
constexpr int team_warps = Layer::team ? Layer::parts : 1;
constexpr int teams = warps / team_warps;
static_assert(warps % team_warps == 0, "a warp's units are all of the same part");
struct Weights {
    alignas(16) float values[kinds * kind_weights];
    float bias[tile_channels];
};

using Position = image_tiles::Position<channel_tiles, tile_channels>;

// The part of the tile that a warp accumulates.
struct Unit {
    int part, row, phase_group, channel_block;

    TCONV_DEVICE explicit Unit(int unit) {
        // NOTE: parts are innermost, so that neighbouring warps write neighbouring pieces of the
        // same rows.
        part = unit % Layer::parts;
        int rest = unit / Layer::parts;
        channel_block = rest % Layer::channel_blocks;
        rest /= Layer::channel_blocks;
        phase_group = rest % Layer::phase_groups;
        row = rest / Layer::phase_groups;
    }

    TCONV_DEVICE int kind() const { return channel_block * Layer::phase_groups + phase_group; }
};

// The place in shared memory of a tile's weight of a tap and the first input channel.
TCONV_DEVICE int weight_place(int out, int tap_y, int tap_x) {
    int phase_y = entry(Layer::tap_phase_y, tap_y), phase_x = entry(Layer::tap_phase_x, tap_x);
    int kind = unsigned(out) / Layer::unit_channels * Layer::phase_groups +
               unsigned(phase_y) / Layer::unit_phases;
    unsigned row = (unsigned(phase_y) % Layer::unit_phases * Layer::phases_x + phase_x) *
                       Layer::unit_channels +
                   unsigned(out) % Layer::unit_channels;
    int slot = entry(Layer::tap_slot_y, tap_y) * Layer::slots_x + entry(Layer::tap_slot_x, tap_x);
    return kind * kind_weights + slot * slot_weights + row / 16 * fragment_weights +
           row % 8 * 4 * lane_weights + row / 8 % 2;
}

}  // namespace mma_tiles
