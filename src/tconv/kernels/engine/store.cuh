// Store: a consumer's sums go through shared memory, which turns them where rows are not what is
// adjacent in the result. They are written as whole lines of channels; or, if the result is
// contiguous, as vectors of neighbouring positions of a channel, as long as all addresses allow.
// Positions that do not exist are left out.
//
// If columns of a contiguous result are of several phases in turn, and a tile has them all
// (`row_phases`), its lines have a pixel of each phase for each position. Else values of several
// phases are written one by one.
#pragma once

#include <common/division.cuh>
#include <common/element.cuh>
#include <engine/multiply_taps.cuh>
#include <engine/stages.cuh>
#include <engine/unfold.cuh>
#include <ptx/barrier.cuh>
#include <ptx/ldmatrix.cuh>

namespace {

constexpr int phases = Layer::row_phases;  // whose pixels a line of a piece has in turn
constexpr bool interleaved = phases > 1;
constexpr int step_x = Layer::step_x / phases;  // from a value of a line to the next, in pixels

// A result's pixels that a consumer writes of a tile.
struct Destination {
    Element* first;  // the row group's first channel of the result's first pixel
    int channels;  // that exist
    int height, width;  // of the result; the width of all phases, if interleaved

    TCONV_DEVICE Destination(const Arguments& arguments, const Position& at, int row_group,
                             int of_set) {
        int result = row_group % sets * tile_results + of_set, block = row_group / sets;
        int y = result / Layer::results_x, x = result - y * Layer::results_x;
        int channel = at.group * Layer::rows + block * group_rows;
        y = entry(Layer::result_y, y);
        x = interleaved ? 0 : entry(Layer::result_x, x);
        first = static_cast<Element*>(arguments.destination) +
                Index(y) * arguments.destination_stride_h +
                Index(x) * arguments.destination_stride_w +
                Index(channel) * arguments.destination_stride_c;
        channels = min(group_rows, Layer::rows - block * group_rows);
        height = (arguments.destination_height - y + Layer::step_y - 1) / Layer::step_y;
        width = (arguments.destination_width - x + step_x - 1) / step_x;
    }
};

// Where the result has a position of a tile, which is among the patch's: elements from its first
// pixel. Negative where it has none.
//
// Without a branch, so that those of several positions are found at once.
TCONV_DEVICE Index offset_of(const Arguments& arguments, const Position& at, const Destination& to,
                             unsigned position, int phase = 0) {
    Place place(arguments, position);
    int n = at.image + place.n, y = at.y + place.y, x = (at.x + place.x) * phases + phase;
    bool exists =
        place.in_box(arguments) & (n < arguments.batch) & (y < to.height) & (x < to.width);
    Index offset = Index(n) * arguments.destination_stride_n +
                   Index(y) * (Layer::step_y * arguments.destination_stride_h) +
                   Index(x) * (step_x * arguments.destination_stride_w);
    return exists ? offset : Index(-1);
}

// Where 8 values of a line lie in a piece: a line has the channels of a position, or the positions
// of a channel if the result is contiguous. Chunks of 16 bytes are exchanged by the line, so that
// neither side has bank conflicts. Lines of a number of phases that is no power of two are a chunk
// apart instead: two lanes conflict at most.
constexpr int apart = (phases & (phases - 1)) == 0 ? 0 : 16;
constexpr int line_pitch = phases * piece_line + apart;

TCONV_DEVICE unsigned char* chunk_of(unsigned char* lines, int line, int chunk) {
    if constexpr (apart > 0) return lines + line * line_pitch + chunk * 16;
    if constexpr (interleaved) {
        // Of four lines that follow each other, or are two apart, each has chunks of its own.
        return lines + line * line_pitch + (chunk ^ (line + line / 4) % 4 * 2) * 16;
    }
    return lines + line * line_pitch + (chunk ^ line % 8) * 16;
}

// The bias of a thread's channels: of two rows; or of two columns among 8, for all.
struct Biases {
    float of[positions_are_rows ? group_rows / 4 : 2] = {};

    TCONV_DEVICE Biases(const Arguments& arguments, const Position& at, int row_group) {
        if constexpr (!Layer::bias) return;
        int lane = threadIdx.x % 32, warp = threadIdx.x % warpgroup / 32, i = 0;
#pragma unroll
        for (float& value : of) {
            int own = positions_are_rows ? i / 2 * 8 + lane % 4 * 2 + i % 2
                                         : warp * 16 + i * 8 + lane / 4;
            int channel = row_group / sets * group_rows + own;
            if (channel < Layer::rows) {
                channel += at.group * Layer::rows;
                value = widen(static_cast<const Element*>(arguments.bias)[channel]);
            }
            ++i;
        }
    }
};

// Lays a piece of the sums out as lines. `chunk_at(position, channel)` says where 8 values go from
// there on, `skips(position)` whether none of 16 positions do.
template <int piece, typename ChunkAt, typename Skips>
TCONV_DEVICE void stage_piece(const Biases& bias, const Block (&sums)[blocks], ChunkAt chunk_at,
                              Skips skips) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % warpgroup / 32;
    constexpr int first = piece * piece_positions;
    if constexpr (positions_are_rows) {
        const Block& of_piece = sums[piece];
        if (skips(first + warp * 16)) return;
#pragma unroll
        for (int channel = 0; channel < group_rows; channel += 16) {
            uint32_t values[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int octet = channel / 8 + i / 2, from = octet * 4 + i % 2 * 2;
                if (octet * 8 < group_rows) {
                    values[i] = narrowed(of_piece[from] + bias.of[octet * 2],
                                         of_piece[from + 1] + bias.of[octet * 2 + 1]);
                }
            }
            if constexpr (Layer::contiguous) {
                int own = channel + lane / 16 * 8 + lane % 8;
                ptx::stmatrix_x4_trans(chunk_at(first + warp * 16 + lane / 8 % 2 * 8, own), values);
            } else {
                int position = first + warp * 16 + lane % 16;
                ptx::stmatrix_x4(chunk_at(position, channel + lane / 16 * 8), values);
            }
        }
    } else {
#pragma unroll
        for (int column = 0; column < piece_positions && first + column < columns; column += 16) {
            if (skips(first + column)) continue;
            uint32_t values[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int from = (first + column) / 2 + i / 2 * 4 + i % 2 * 2;
                if (first + column + i / 2 * 8 < columns) {
                    values[i] = narrowed(sums[0][from] + bias.of[i % 2],
                                         sums[0][from + 1] + bias.of[i % 2]);
                }
            }
            if constexpr (Layer::contiguous) {
                int channel = warp * 16 + lane % 16;
                ptx::stmatrix_x4(chunk_at(first + column + lane / 16 * 8, channel), values);
            } else {
                int position = first + column + lane / 16 * 8 + lane % 8;
                ptx::stmatrix_x4_trans(chunk_at(position, warp * 16 + lane / 8 % 2 * 8), values);
            }
        }
    }
}

// Channels of a piece of several phases: lines that both outputs hold. Of columns those of all do.
// Of a raw tile one output does.
constexpr int room_channels = (Layer::raw ? 1 : 2) * piece_bytes / line_pitch / 8 * 8;
constexpr bool parts_channels = Layer::raw || (interleaved && positions_are_rows);
constexpr int part_channels = room_channels > 0 ? room_channels : group_rows;  // float32: no room
constexpr int channel_parts = parts_channels ? (group_rows + part_channels - 1) / part_channels : 1;
constexpr int piece_channels = (group_rows + 8 * channel_parts - 1) / (8 * channel_parts) * 8;
constexpr int row_sums = tile_sums / (tile_results / phases);  // of all phases of a row

// Lays channels, from `first_channel` on, of a piece of the sums of all phases of a row out.
template <int row, int piece, int first_channel>
TCONV_DEVICE void stage_phases(const Biases& bias, unsigned char* lines, const Sums& sums) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % warpgroup / 32;
    // A phase without a tap has no sums.
    auto value = [&](int column, int block, int from, float more) {
        int of_row = Layer::column_sums[column];
        return of_row < 0 ? more : sums[row * row_sums + of_row][block][from] + more;
    };
    if constexpr (positions_are_rows) {
        // A position's neighbours that are written at a time; or one, of two channels.
        constexpr int unit = phases % 8 == 0 ? 8 : phases % 4 == 0 ? 4 : phases % 2 == 0 ? 2 : 1;
        constexpr int left = (group_rows - first_channel) / 2, most = piece_channels / 2;
#pragma unroll
        for (int i = 0; i < (left < most ? left : most); i += 2) {
            int from = first_channel / 2 + i, octet = from / 4;
            int channel = i / 4 * 8 + lane % 4 * 2;
            // Of a raw tile the thread's two positions are neighbours.
            int half = i / 2 % 2, of_warp = Layer::raw ? lane / 4 * 2 + half : half * 8 + lane / 4;
            int pixel = (warp * 16 + of_warp) * phases;
            float more[2] = {bias.of[octet * 2], bias.of[octet * 2 + 1]};
            auto place = [&](int own, int column) {
                return chunk_of(lines, channel + own, (pixel + column) / 8) +
                       (pixel + column) % 8 * sizeof(Element);
            };
#pragma unroll
            for (int column = 0; column < phases; column += unit) {
                if constexpr (unit == 1) {
                    uint32_t both = narrowed(value(column, piece, from, more[0]),
                                             value(column, piece, from + 1, more[1]));
                    *reinterpret_cast<uint16_t*>(place(0, column)) = uint16_t(both);
                    *reinterpret_cast<uint16_t*>(place(1, column)) = uint16_t(both >> 16);
                } else {
#pragma unroll
                    for (int own = 0; own < 2; ++own) {
                        Vector<uint32_t, (unit + 1) / 2> words;
#pragma unroll
                        for (int k = 0; k < unit / 2; ++k) {
                            int low = column + 2 * k;
                            words.values[k] =
                                narrowed(value(low, piece, from + own, more[own]),
                                         value(low + 1, piece, from + own, more[own]));
                        }
                        *reinterpret_cast<decltype(words)*>(place(own, column)) = words;
                    }
                }
            }
        }
    } else {
        static_assert(positions_are_rows || phases <= 2, "words of two phases");
        constexpr int first = piece * piece_positions / 2;
#pragma unroll
        for (int from = first; from < first + piece_positions / 2 && from < columns / 2;
             from += 2) {
            float more = bias.of[from / 2 % 2];
            int channel = warp * 16 + from / 2 % 2 * 8 + lane / 4;
            int position = (from - first) / 4 * 8 + lane % 4 * 2;
            auto* chunk = reinterpret_cast<uint2*>(chunk_of(lines, channel, position / 4));
            chunk[position / 2 % 2] = {
                narrowed(value(0, 0, from, more), value(1, 0, from, more)),
                narrowed(value(0, 0, from + 1, more), value(1, 0, from + 1, more))};
        }
    }
}

// Lays channels, from `first_channel` on, of a piece of a raw tile out: two neighbouring positions
// are rows of a thread.
template <int first_channel>
TCONV_DEVICE void stage_pairs(const Biases& bias, unsigned char* lines,
                              const float (&sums)[products_columns / 2]) {
    int lane = threadIdx.x % 32, pair = threadIdx.x % warpgroup / 32 * 8 + lane / 4;
    constexpr int left = group_rows - first_channel;
#pragma unroll
    for (int channel = 0; channel < (left < piece_channels ? left : piece_channels); channel += 8) {
        constexpr int first = first_channel / 2;
#pragma unroll
        for (int own = 0; own < 2; ++own) {
            int from = first + channel / 2 + own;
            float more = bias.of[from / 4 * 2 + own];
            auto* chunk = chunk_of(lines, channel + lane % 4 * 2 + own, pair / 4);
            reinterpret_cast<uint32_t*>(chunk)[pair % 4] =
                narrowed(sums[from] + more, sums[from + 2] + more);
        }
    }
}

// Vectors of a length that divides this start on multiples of it in memory and in the lines, and
// are in one row of the result and of the box.
TCONV_DEVICE unsigned alignment_of(const Arguments& arguments) {
    auto aligned = reinterpret_cast<uint64_t>(arguments.destination) / sizeof(Element) |
                   arguments.destination_stride_n | arguments.destination_stride_c |
                   arguments.destination_stride_h | arguments.destination_width |
                   phases * arguments.pitch_x;
    if (arguments.tiles_x > 1) aligned |= phases * arguments.box_x;
    if (arguments.destination_stride_w != 1) aligned |= 1;
    return unsigned(aligned);
}

// Writes the lines of a piece, `positions` from `place` on.
template <int vector = step_x == 1 ? 8 : 1>
TCONV_DEVICE void write_lines(const Arguments& arguments, const Position& at, const Destination& to,
                              unsigned char* lines, int place, int positions, int channels,
                              unsigned aligned) {
    if constexpr (vector > 1) {
        if (aligned % vector != 0) {
            write_lines<vector / 2>(arguments, at, to, lines, place, positions, channels, aligned);
            return;
        }
    }
    // Neighbouring threads write neighbouring vectors of a line. A thread's are at some places,
    // the same in all of its channels.
    using Values = Vector<Element, vector>;
    constexpr int vectors = piece_positions * phases / vector, even = vectors & -vectors;
    constexpr int line_threads = even < warpgroup ? even : warpgroup;
    constexpr int lines_at_a_time = warpgroup / line_threads;
    constexpr int places = vectors / line_threads, batches = (places + 3) / 4;
    constexpr int together = (places + batches - 1) / batches;
    int thread = threadIdx.x % warpgroup, own = thread / line_threads;
#pragma unroll 1
    for (int batch = 0; batch < batches; ++batch) {
        int first = (batch * together * line_threads + thread % line_threads) * vector;
        auto value_of = [&](int i) { return first + i * (line_threads * vector); };
        Element* pixels[together];
        bool exists[together], some = false;
#pragma unroll
        for (int i = 0; i < together; ++i) {
            int value = value_of(i), position = value / phases;
            Index offset = offset_of(arguments, at, to, place + position, value % phases);
            exists[i] = offset >= 0 && position < positions;
            some |= exists[i];
            pixels[i] = to.first + offset + Index(own) * arguments.destination_stride_c;
        }
        if (!some) continue;
#pragma unroll together> 1 ? 2 : 4
        for (int channel = own; channel < channels; channel += lines_at_a_time) {
#pragma unroll
            for (int i = 0; i < together; ++i) {
                if (together == 1 || exists[i]) {
                    const unsigned char* from = chunk_of(lines, channel, value_of(i) / 8);
                    *reinterpret_cast<Values*>(pixels[i]) =
                        *reinterpret_cast<const Values*>(from + value_of(i) % 8 * sizeof(Element));
                }
                pixels[i] += lines_at_a_time * arguments.destination_stride_c;
            }
        }
    }
}

// Writes the lines of a piece, each the channels of a position.
TCONV_DEVICE void write_channels(const Arguments& arguments, const Position& at,
                                 const Destination& to, unsigned char* lines, int place,
                                 int positions) {
    constexpr int vector = Layer::vector;
    constexpr int vectors = (group_rows + vector - 1) / vector;  // of a line
#pragma unroll 4
    for (int i = threadIdx.x % warpgroup; i < positions * vectors; i += warpgroup) {
        int position = i / vectors, channel = i % vectors * vector;
        if (channel >= to.channels) continue;
        Index offset = offset_of(arguments, at, to, place + position);
        if (offset < 0) continue;
        offset += Index(channel) * arguments.destination_stride_c;
        using Values = Vector<Element, vector>;
        *reinterpret_cast<Values*>(to.first + offset) = *reinterpret_cast<const Values*>(
            chunk_of(lines, position, channel / 8) + channel % 8 * 2);
    }
}

constexpr int pieces = (columns + piece_positions - 1) / piece_positions;  // of a result, or row

// Stores from piece `number` of all results' on.
template <int number = 0>
TCONV_DEVICE void store_pieces(const Arguments& arguments, Shared& shared, const Position& at,
                               int consumer, int row_group, const Biases& bias, const Sums& sums,
                               unsigned aligned) {
    constexpr int parts = channel_parts;
    if constexpr (number < parts * pieces * (tile_results / phases)) {
        constexpr int row = number / (parts * pieces), piece = number / parts % pieces;
        constexpr int first_channel = number % parts * piece_channels;
        constexpr int left = columns - piece * piece_positions;
        constexpr int positions = left < piece_positions ? left : piece_positions;
        Destination to(arguments, at, row_group, row * phases);
        // A piece of several phases takes both outputs.
        unsigned char* lines = shared.outputs[consumer][interleaved ? 0 : number % 2];
        if constexpr (interleaved) {
            if (number > 0) ptx::bar_sync(1 + consumer, warpgroup);
            stage_phases<row, piece, first_channel>(bias, lines, sums);
        } else if constexpr (Layer::raw) {
            stage_pairs<first_channel>(bias, lines, sums[row][piece]);
        } else {
            auto chunk_at = [&](int position, int channel) {
                position -= piece * piece_positions;
                return Layer::contiguous ? chunk_of(lines, channel, position / 8)
                                         : chunk_of(lines, position, channel / 8);
            };
            stage_piece<piece>(bias, sums[row], chunk_at, [](int) { return false; });
        }
        if constexpr (parts > 1) {
            to.first += Index(first_channel) * arguments.destination_stride_c;
            to.channels = min(piece_channels, to.channels - first_channel);
        }
        // Nobody writes the other piece's lines again before all have read them.
        ptx::bar_sync(1 + consumer, warpgroup);
        int place = first_position(arguments, consumer) + piece * piece_positions;
        if constexpr (Layer::contiguous) {
            write_lines(arguments, at, to, lines, place, positions, to.channels, aligned);
        } else {
            write_channels(arguments, at, to, lines, place, positions);
        }
        store_pieces<number + 1>(arguments, shared, at, consumer, row_group, bias, sums, aligned);
    }
}

// If tensor maps write the result, a consumer's positions are a box, cut into parts. A part's lines
// have the channels of a position, and a few of them go by turns through a consumer's outputs.
constexpr int areas = 2 * piece_bytes / Layer::part_bytes;

template <int piece = 0>
TCONV_DEVICE void stage_part(const Arguments& arguments, Shared& shared, unsigned char* lines,
                             int part, const Biases& bias, const Block (&sums)[blocks]) {
    if constexpr (piece < pieces) {
        int first = part * arguments.part_positions, end = first + arguments.part_positions;
        auto chunk_at = [&](int position, int channel) -> unsigned char* {
            unsigned line = shared.boxed[position] - part * arguments.part_lines;
            if (line >= unsigned(arguments.part_lines)) return shared.beside + threadIdx.x % 8 * 16;
            unsigned chunk = (channel / 8 ^ line / (128 / Layer::part_line));
            return lines + line * Layer::part_line + chunk % (Layer::part_line / 16) * 16;
        };
        stage_piece<piece>(bias, sums, chunk_at,
                           [&](int position) { return position + 16 <= first || position >= end; });
        stage_part<piece + 1>(arguments, shared, lines, part, bias, sums);
    }
}

template <typename Fields>
TCONV_DEVICE void store_parts(const Fields& arguments, Shared& shared, const Position& at,
                              int consumer, int row_group, const Biases& bias, const Sums& sums) {
    bool copies = threadIdx.x % warpgroup == 0;
    int step = 0;
#pragma unroll
    for (int result = 0; result < tile_results; ++result) {
        const ptx::TensorMap* map =
            &arguments.result_0 + (row_group % sets * tile_results + result);
#pragma unroll 1
        for (int part = 0; part < arguments.parts; ++part, ++step) {
            // Until copies have read what was there.
            if (step == 0 || step >= areas) {
                if (copies && step == 0) ptx::cp_async_bulk_wait_group_read<0>();
                if (copies && step > 0) ptx::cp_async_bulk_wait_group_read<areas - 1>();
                ptx::bar_sync(1 + consumer, warpgroup);
            }
            unsigned char* lines = shared.outputs[consumer][0] + step % areas * Layer::part_bytes;
            stage_part(arguments, shared, lines, part, bias, sums[result]);
            ptx::fence_proxy_async_shared();
            ptx::bar_sync(1 + consumer, warpgroup);
            if (copies) {
                int number = part + (tile_groups == 1 ? consumer * arguments.parts : 0);
                ptx::cp_async_bulk_tensor_5d_shared_to_global(
                    map, row_group / sets * group_rows, at.x + number * arguments.part_x,
                    at.y + number * arguments.part_y, at.image + number * arguments.part_n,
                    at.group, lines);
                ptx::cp_async_bulk_commit_group();
            }
        }
    }
}

// A template, so that there are the pieces of one way alone.
template <bool unfolds = Layer::unfolds>
TCONV_DEVICE void store(const Arguments& arguments, Shared& shared, const Position& at,
                        int consumer, const Sums& sums) {
    int row_group = at.row_group(consumer);
    if (row_group >= row_groups) return;
    if constexpr (unfolds) {
        unfold(arguments, shared, at, consumer, row_group, sums[0]);
    } else {
        Biases bias(arguments, at, row_group);
        if constexpr (Layer::maps_result) {
            store_parts(arguments, shared, at, consumer, row_group, bias, sums);
            return;
        }
        unsigned aligned = Layer::contiguous ? alignment_of(arguments) : 0;
        store_pieces(arguments, shared, at, consumer, row_group, bias, sums, aligned);
    }
    ptx::bar_sync(1 + consumer, warpgroup);  // the next tile's first piece has the same lines
}

}  // namespace
