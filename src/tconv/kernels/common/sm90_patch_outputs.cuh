// A consumer's epilogue: it gathers a tile's sums in shared memory and writes pieces of whole rows.
#pragma once

#include <common/exact_output.cuh>
#include <common/sm90_patch_tiles.cuh>
#include <ptx/memory.cuh>
#include <ptx/registers.cuh>

namespace {

using Gathered = float[pass_channels][out_pitch];

// NOTE: values that follow from the lane would fill the registers beside this many sums, if they
// were kept from row to row. Computing them anew costs KernelBench's layers 2 to 10%. There is less
// room where weights have two parts or producers keep more registers.
constexpr int most_beside = !Layer::split         ? 128
                            : !Layer::tensor_map  ? 64
                            : Layer::stride_x > 1 ? 88
                                                  : 128;
constexpr bool keeps_places = Layer::m_tiles * Layer::tile_rows * columns / 2 <= most_beside;

// Not every kernel uses each of these.
[[maybe_unused]] TCONV_DEVICE void write_vector(float* to, const Vector<float, 1>& value) {
    *to = value.values[0];
}

[[maybe_unused]] TCONV_DEVICE void write_vector(float* to, const Vector<float, 2>& value) {
    ptx::st_global_v2(to, make_float2(value.values[0], value.values[1]));
}

[[maybe_unused]] TCONV_DEVICE void write_vector(float* to, const Vector<float, 4>& value) {
    ptx::st_global_v4(
        to, make_float4(value.values[0], value.values[1], value.values[2], value.values[3]));
}

// Writes the rows that a warp has gathered: `channels` rows of the output. `line` is the first
// element, in column `left` of the first row. Each lane writes vectors of `width`, for which rows
// are aligned. The columns before the first whole vector and behind the last are written one by
// one.
template <int width>
struct RowWriter {
    static constexpr int front = (width - out_shift % width) % width;
    static constexpr int row_vectors = (out_columns - front) / width;
    static constexpr int edges = out_columns - row_vectors * width;

    const Arguments& arguments;
    int left;

    TCONV_DEVICE void write(const Gathered& rows, float* line, int channels) const {
        // NOTE: otherwise the compiler adds the offsets to the line's own, in 64 bits, for each
        // piece.
        line = ptx::opaque(line);
        // Short rows follow each other in a piece. Long rows have pieces of their own: with many
        // pieces, offsets that differ for each lane would fill the registers.
        constexpr bool joined = row_vectors <= (width == 4 ? 12 : 32);
        constexpr int row_lanes = joined ? row_vectors : (row_vectors + 31) / 32 * 32;
        constexpr int pieces = (pass_channels * row_lanes + 31) / 32;
        constexpr int batch = pieces < 6 ? pieces : 4;  // loads under way
        constexpr bool keeps = keeps_places;
        int lane = keeps ? threadIdx.x % 32 : ptx::opaque(threadIdx.x % 32);
        constexpr int unrolled = Layer::rolled ? 1 : pieces;
#pragma unroll unrolled
        for (int first = 0; first < pieces; first += batch) {
            Vector<float, width> values[batch];
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                int place = min(32 * (first + i) + lane, pass_channels * row_lanes - 1);
                int column = front + min(place % row_lanes, row_vectors - 1) * width;
                values[i] = *reinterpret_cast<const Vector<float, width>*>(
                    &rows[place / row_lanes][out_shift + column]);
            }
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                int channel = (32 * (first + i) + lane) / row_lanes;
                int vector = (32 * (first + i) + lane) % row_lanes;
                int column = front + vector * width;
                if (channel < channels && vector < row_vectors && exists(column)) {
                    write_vector(line + (channel * arguments.destination_stride_c + column),
                                 values[i]);
                }
            }
        }
        if constexpr (edges > 0) {
#pragma unroll
            for (int first = 0; first < pass_channels * edges; first += 32) {
                int channel = (first + lane) / edges;
                int edge = (first + lane) % edges;
                int column = edge < front ? edge : out_columns - edges + edge;
                if (channel < channels && exists(column)) {
                    line[channel * arguments.destination_stride_c + column] =
                        rows[channel][out_shift + column];
                }
            }
        }
    }

    // Whether the tile writes a column of its row.
    TCONV_DEVICE bool owns(const float*, int, int column) const { return exists(column); }

private:
    // Whether a column of the tile's row lies in the image. All columns of a vector do, or none.
    TCONV_DEVICE bool exists(int column) const {
        return static_cast<unsigned>(left + column) <
               static_cast<unsigned>(arguments.destination_width);
    }
};

// The same for tiles that overlap. A row is gathered as far behind a multiple of 4 as it lies in
// device memory. It is written in vectors of 4 from its first whole sector on.
// NOTE: a template, as other tiles have no use for it and the compiler would warn.
template <int width>
struct SectorWriter {
    const Arguments& arguments;
    int left;
    bool first, last;  // of the tiles along x

    // The column of a row's first output modulo `size`, a power of 2, in device memory.
    TCONV_DEVICE int shift(const float* line, int channel, int size) const {
        auto place = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(line) / sizeof(float));
        place += channel * static_cast<uint32_t>(arguments.destination_stride_c);
        return int(place) & (size - 1);
    }

    TCONV_DEVICE void write(const Gathered& rows, float* line, int channels) const {
        line = ptx::opaque(line);  // as above
        constexpr int row_vectors = own_columns / width;
        constexpr int edges = overlapped ? out_columns - own_columns : 1;
        constexpr int pieces = (pass_channels * row_vectors + 31) / 32;
        constexpr int batch = pieces < 6 ? pieces : 4;  // loads under way
        constexpr bool keeps = keeps_places;
        int lane = keeps ? threadIdx.x % 32 : ptx::opaque(threadIdx.x % 32);
        constexpr int unrolled = Layer::rolled ? 1 : pieces;
#pragma unroll unrolled
        for (int start = 0; start < pieces; start += batch) {
            Vector<float, width> values[batch];
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                int place = min(32 * (start + i) + lane, pass_channels * row_vectors - 1);
                int channel = place / row_vectors;
                int column = before(line, channel) + place % row_vectors * width;
                values[i] = *reinterpret_cast<const Vector<float, width>*>(
                    &rows[channel][shift(line, channel, width) + column]);
            }
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                int place = 32 * (start + i) + lane;
                int channel = place / row_vectors;
                int column = before(line, channel) + place % row_vectors * width;
                if (channel >= channels) continue;
                float* to = line + (channel * arguments.destination_stride_c + column);
                if (exists(column) && exists(column + width - 1)) {
                    write_vector(to, values[i]);
                } else {
#pragma unroll
                    for (int k = 0; k < width; ++k) {
                        if (exists(column + k)) to[k] = values[i].values[k];
                    }
                }
            }
        }
        if (!first && !last) return;
#pragma unroll
        for (int start = 0; start < pass_channels * edges; start += 32) {
            int channel = (start + lane) / edges;
            int edge = (start + lane) % edges;
            bool in_front = edge < before(line, channel);
            int column = in_front ? edge : own_columns + edge;
            if (channel < channels && (in_front ? first : last) && exists(column)) {
                line[channel * arguments.destination_stride_c + column] =
                    rows[channel][shift(line, channel, width) + column];
            }
        }
    }

    // Whether the tile writes a column of a row. If not, a neighbouring tile does.
    TCONV_DEVICE bool owns(const float* line, int channel, int column) const {
        int begin = before(line, channel);
        return exists(column) && (column >= begin || first) &&
               (column < begin + own_columns || last);
    }

private:
    // Columns before a row's first whole sector.
    TCONV_DEVICE int before(const float* line, int channel) const {
        return (sector - shift(line, channel, sector)) & (sector - 1);
    }

    TCONV_DEVICE bool exists(int column) const {
        return static_cast<unsigned>(left + column) <
               static_cast<unsigned>(arguments.destination_width);
    }
};

// The writer of a tile whose rows begin in column `left`.
template <int width>
TCONV_DEVICE auto writer_of(const Arguments& arguments, const Position& at, int left) {
    if constexpr (overlapped) {
        return SectorWriter<4>{arguments, left, at.tile_x == 0, at.tile_x == arguments.tiles_x - 1};
    } else {
        return RowWriter<width>{arguments, left};
    }
}

// Each warp interleaves its channels' phases in shared memory and writes pieces of whole rows.
// Vectors of `width` outputs are aligned to their size; in tiles that overlap, pairs of them are.
// Returns whether some of the lane's outputs are wrong, or may be.
template <int width>
TCONV_DEVICE bool store(const Arguments& arguments, Shared& shared, const Position& at, int warp,
                        const Sums& sums) {
    // Float16 notes nothing: no float16 tile that has wrong outputs is final. What repairs looks at
    // outputs where they were written, as it has no register for the flag.
    constexpr bool notes = !Layer::half && !Layer::rolled;
    int lane = threadIdx.x % 32;
    auto& outputs = shared.outputs[warp - 4];
    int left = at.first_q_x() * Layer::stride_x - Layer::padding_x;
    auto writer = writer_of<width>(arguments, at, left);
    [[maybe_unused]] NotFinite<float> not_finite;
    // Stores the sums of one row and pass in shared memory.
    auto gather = [&](const float (&of_row)[columns / 2], int pass, const float (&bias)[2],
                      [[maybe_unused]] const float* line) {
        [[maybe_unused]] float unit = Layer::half ? shared.unit[warp - 4] : 1.0f;
#pragma unroll
        for (int i = 0; i < 2 / passes; ++i) {
            int half = pass + i;
            int row = lane / 4 + 8 * i;
            int channel = row / Layer::stride_x;
            if (channel >= pass_channels) continue;
            int shift = out_shift;
            if constexpr (overlapped) shift = writer.shift(line, channel, 4);
            float* to =
                outputs[channel] + shift + row % Layer::stride_x + lane % 4 * 2 * Layer::stride_x;
#pragma unroll
            for (int j = 0; j < columns / 8; ++j) {
                float even = of_row[4 * j + 2 * half];
                float odd = of_row[4 * j + 2 * half + 1];
                if constexpr (Layer::half) even *= unit, odd *= unit;
                if constexpr (Layer::bias) even += bias[half], odd += bias[half];
                if constexpr (notes) not_finite.note(even), not_finite.note(odd);
                if constexpr (Layer::stride_x == 1 && (width > 1 || !overlapped)) {
                    *reinterpret_cast<float2*>(to + 8 * j) = make_float2(even, odd);
                } else {
                    to[8 * j * Layer::stride_x] = even;
                    to[(8 * j + 1) * Layer::stride_x] = odd;
                }
            }
        }
    };
#pragma unroll
    for (int m = 0; m < Layer::m_tiles; ++m) {
        int warp_tile = (at.m_group * Layer::m_tiles + m) * 4 + warp % 4;
        int phase_y = warp_tile / phase_tiles;
        int first_channel = (warp_tile - phase_y * phase_tiles) * Layer::warp_channels;
        if (phase_y >= phases_y) continue;
        float bias[2] = {};
        if constexpr (Layer::bias) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int channel = first_channel + (lane / 4 + 8 * half) / Layer::stride_x;
                if (channel < Layer::out_channels) {
                    bias[half] = static_cast<const float*>(
                        arguments.bias)[at.group * Layer::out_channels + channel];
                }
            }
        }
        auto out_y = [&](int r) {
            return (at.first_q_y() + r) * phases_y + phase_y - Layer::padding_y;
        };
        auto line_of = [&](int r, int pass) {
            return static_cast<float*>(arguments.destination) +
                   at.image * arguments.destination_stride_n +
                   (Index(at.group) * Layer::out_channels + first_channel + pass * pass_channels) *
                       arguments.destination_stride_c +
                   out_y(r) * arguments.destination_stride_h + left;
        };
        auto write = [&](float* line, int pass) {
            __syncwarp();
            writer.write(outputs, line,
                         Layer::out_channels % Layer::warp_channels == 0
                             ? pass_channels
                             : min(pass_channels,
                                   Layer::out_channels - (first_channel + pass * pass_channels)));
            __syncwarp();
        };
        if constexpr (Layer::rolled) {
#pragma unroll 1
            for (int place = 0; place < Layer::tile_rows * passes; ++place) {
                int r = place / passes, pass = place % passes;
                if (out_y(r) < 0 || out_y(r) >= arguments.destination_height) continue;
                float* line = line_of(r, pass);
                // NOTE: registers need constant indices, so each place has a branch of its own.
#pragma unroll
                for (int known = 0; known < Layer::tile_rows * passes; ++known) {
                    if (place == known) gather(sums[m][known / passes], known % passes, bias, line);
                }
                write(line, pass);
            }
        } else {
#pragma unroll
            for (int r = 0; r < Layer::tile_rows; ++r) {
                if (out_y(r) < 0 || out_y(r) >= arguments.destination_height) continue;
#pragma unroll
                for (int pass = 0; pass < passes; ++pass) {
                    float* line = line_of(r, pass);
                    gather(sums[m][r], pass, bias, line);
                    write(line, pass);
                }
            }
        }
    }
    return !notes || not_finite.any();
}

// Recomputes the wrong outputs that a warp has written of a tile.
// NOTE: it works its places out anew. If it took them from `store`, they would be kept in registers
// beside the sums, and spill.
TCONV_DEVICE void repair_outputs(const Arguments& arguments, const Position& at, int warp) {
    int left = at.first_q_x() * Layer::stride_x - Layer::padding_x;
    auto writer = writer_of<Layer::vector>(arguments, at, left);
    constexpr int tile_lines = Layer::tile_rows * Layer::warp_channels;
#pragma unroll 1
    for (int i = 0; i < Layer::m_tiles * tile_lines; ++i) {
        int warp_tile = (at.m_group * Layer::m_tiles + i / tile_lines) * 4 + warp % 4;
        int phase_y = warp_tile / phase_tiles;
        int channel =
            (warp_tile - phase_y * phase_tiles) * Layer::warp_channels + i % Layer::warp_channels;
        int row = at.first_q_y() + i % tile_lines / Layer::warp_channels;
        int y = row * phases_y + phase_y - Layer::padding_y;
        if (phase_y >= phases_y || channel >= Layer::out_channels) continue;
        if (y < 0 || y >= arguments.destination_height) continue;
        float* line =
            static_cast<float*>(arguments.destination) + at.image * arguments.destination_stride_n +
            (Index(at.group) * Layer::out_channels + channel) * arguments.destination_stride_c +
            y * arguments.destination_stride_h + left;
#pragma unroll 1
        for (int column = threadIdx.x % 32; column < out_columns; column += 32) {
            if (writer.owns(line, 0, column))
                exact::repair<!Layer::split, Layer::split>(arguments, line + column);
        }
    }
}

}  // namespace
