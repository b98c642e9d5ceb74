// The matrix columns of sm90_tf32_wide_forward, as sm90_tf32_wide_pack lays out their weights.
//
// A tile has `parts` times part_columns columns. Part p holds the phases in x from p * low_phases
// on. Eight columns of every part are a unit: unit_channels output channels of one phase in y, with
// all phases in x. Units follow each other through (phase in y, channels). part_units of them make
// a tile.
#pragma once

#include <ptx/cuda.cuh>

namespace wide {

constexpr int low_phases = Layer::low_phases;  // of a part, neighbouring columns
constexpr int parts = Layer::stride_x / low_phases;
constexpr int unit_channels = 8 / low_phases;
constexpr int phase_units = (Layer::out_channels + unit_channels - 1) / unit_channels;
constexpr int units = Layer::stride_y * phase_units;
constexpr int part_units = Layer::part_columns / 8;
constexpr int column_tiles = (units + part_units - 1) / part_units;

constexpr int depth = 32;  // input channels of a stage
constexpr int line_bytes = depth * 4;
constexpr int part_bytes = Layer::part_columns * line_bytes;
constexpr int weight_bytes = parts * part_bytes;  // of a stage

}  // namespace wide
