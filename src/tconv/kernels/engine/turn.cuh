// Bring, of an image that is contiguous, which no tensor map turns. A warp copies pieces of it, and
// turns each into patches.
//
//   octet   8 neighbouring pixels of a row of the image
//   piece   of up to 8 octets, of all channels of a stage: some octets of a row; or, of short rows,
//           all octets of some
//   run     patches of the same rows: of the phases of y along x, whose pixels follow each other in
//           turn. A run's pixels are read once.
//
// Pieces go round among the warps. Each has some of its own under way, in memory that no other warp
// reads, so that it waits for nobody before a piece is turned. A matrix of 8 channels and the
// pixels of an octet is read turned by ldmatrix, and stmatrix writes each of its pixels to the
// patch of its phase.
#pragma once

#include <engine/stages.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/ldmatrix.cuh>

namespace {

template <typename Fields>
struct Turning {
    using Element = Layer::Element;

    static constexpr int step_y = Layer::source_step_y, step_x = Layer::source_step_x;
    static constexpr int octets = 8;  // of a piece, at most
    static constexpr int raw_line = octets * 16;

    const Fields& arguments;
    Shared& shared;
    Tiles tiles;
    int warp, lane;
    int longest;  // pixels of the longest vectors
    int of_line;  // 256 / octets of a piece's line, rounded up

    // What is copied next: a piece of a run of a tile's chunk, to a place of the ring.
    int tile, chunk = 0, place = 0, end = 0, piece, ring = 0;
    int image, y, x;  // the run's first
    const Element* first;  // its address

    TCONV_DEVICE Turning(const Fields& arguments, Shared& shared, int warp)
        : arguments(arguments),
          shared(shared),
          tiles(arguments),
          warp(warp),
          lane(threadIdx.x % 32),
          of_line(255 / arguments.source_piece_octets + 1),
          tile(tiles.first - tiles.step),
          piece(warp) {
        auto aligned = reinterpret_cast<uint64_t>(arguments.source) / sizeof(Element) |
                       arguments.source_stride_n | arguments.source_stride_c |
                       arguments.source_stride_h | arguments.source_width | 8;
        longest = arguments.source_stride_w == 1 ? int(aligned & -aligned) : 1;
        next_tile();
    }

    TCONV_DEVICE unsigned char* raw() const { return shared.raw[warp][ring]; }

    // The next tile whose patches are loaded.
    TCONV_DEVICE void next_tile() {
        chunk = 0;
        while ((tile += tiles.step) < tiles.end) {
            Position at(arguments, tiles, tile);
            place = at.first_stage(), end = at.end_stage();
            if (!at.loads || place == end) continue;
            enter(at);
            return;
        }
    }

    TCONV_DEVICE void next_run() {
        place += entry(Layer::run_length, place);
        Position at(arguments, tiles, tile);
        if (place == end) {
            place = at.first_stage();
            if (++chunk == chunks) {
                next_tile();
                return;
            }
        }
        enter(at);
    }

    // Finds a run's first pixel, rounded down to an octet.
    TCONV_DEVICE void enter(const Position& at) {
        image = at.image;
        y = at.y * step_y + entry(Layer::stage_pixel_y, entry(Layer::kind_stages, place));
        x = (at.x * step_x + entry(Layer::run_x, place)) & -8;
        first = static_cast<const Element*>(arguments.source) +
                Index(image) * arguments.source_stride_n + Index(y) * arguments.source_stride_h +
                Index(x) * arguments.source_stride_w +
                Index(at.group * Layer::reduced + chunk * depth) * arguments.source_stride_c;
    }

    // A vector of each channel for some lanes. Zeros take the place of what does not exist.
    template <int vector>
    TCONV_DEVICE void copy_vectors(int line, int octet) {
        constexpr int vectors = 8 * octets / vector;  // of a channel
        constexpr int lanes = vectors < 32 ? vectors : 32, abreast = 32 / lanes;
        int exist = Layer::reduced - chunk * depth, channel = lane / lanes;
#pragma unroll 1
        for (int begin = 0; begin < vectors; begin += lanes) {
            int pixel = (begin + lane % lanes) * vector, slot = pixel / 8;
            int of_piece = slot * of_line / 256, of_image = line + of_piece;
            int n = divide(of_image, arguments.source_rows_multiplier, arguments.source_rows_shift);
            int row = (of_image - n * arguments.source_rows) * step_y;
            int column = (octet + slot - of_piece * arguments.source_piece_octets) * 8 + pixel % 8;
            bool exists = of_piece < arguments.source_piece_lines &&
                          of_image < arguments.source_lines && image + n < arguments.batch &&
                          unsigned(y + row) < unsigned(arguments.source_height) &&
                          unsigned(x + column) < unsigned(arguments.source_width);
            const Element* from = first + Index(n) * arguments.source_stride_n +
                                  Index(row) * arguments.source_stride_h +
                                  Index(column) * (vector == 1 ? arguments.source_stride_w : 1) +
                                  Index(channel) * arguments.source_stride_c;
            auto* to = raw() + channel * raw_line + pixel % 8 * 2;
#pragma unroll 4
            for (int i = 0; i < depth; i += abreast) {
                bool valid = exists && (Layer::reduced % depth == 0 || i + channel < exist);
                auto* value = to + i * raw_line + (slot ^ (i + channel) % 8) * 16;
                if constexpr (vector == 8) {
                    ptx::cp_async_cg_16(value, from, valid);
                } else if constexpr (vector > 1) {
                    ptx::cp_async_ca<2 * vector>(value, from, valid);
                } else {
                    *reinterpret_cast<uint16_t*>(value) =
                        valid ? *reinterpret_cast<const uint16_t*>(from) : 0;
                }
                from += abreast * arguments.source_stride_c;
            }
        }
    }

    // The first of a piece's lines, and its first octet.
    struct Piece {
        int line, octet;

        TCONV_DEVICE Piece(const Fields& arguments, int number) {
            int block =
                divide(number, arguments.source_blocks_multiplier, arguments.source_blocks_shift);
            line = block * arguments.source_piece_lines;
            octet = (number - block * arguments.source_blocks) * arguments.source_piece_octets;
        }
    };

    // Starts the copy of the next piece, if there is one.
    TCONV_DEVICE void copy() {
        while (piece >= arguments.source_pieces && tile < tiles.end) {
            piece -= arguments.source_pieces;
            next_run();
        }
        if (tile < tiles.end) {
            Piece of(arguments, piece);
            if (longest == 8) {
                copy_vectors<8>(of.line, of.octet);
            } else if (longest == 4) {
                copy_vectors<4>(of.line, of.octet);
            } else if (longest == 2) {
                copy_vectors<2>(of.line, of.octet);
            } else {
                copy_vectors<1>(of.line, of.octet);
            }
            piece += turning_warps;
        }
        ptx::cp_async_commit_group();
    }

    // Where a lane's pixels go: one that is `offset` from the run's first is position `x` of a
    // patch. Null if it is none.
    struct Phase {
        unsigned char* patch = nullptr;
        int x = 0;
    };

    // `length`: patches of the run, the first of which is `stage`.
    TCONV_DEVICE Phase phase_of(int place, int length, int stage, int offset) const {
        Phase found;
        if constexpr (step_x == 1) {
            found.patch = patch_of(arguments, shared, stage);
            found.x = offset;
        } else {
#pragma unroll 1
            for (int i = 0; i < length; ++i) {
                int first = entry(Layer::stage_pixel_x, entry(Layer::kind_stages, place + i)) -
                            entry(Layer::run_x, place);
                // Rounded down: an offset is -7 at the least.
                int more = offset - first + 8 * step_x, whole = more / step_x;
                int of_ring = stage + i;
                if (of_ring >= arguments.patch_stages) of_ring -= arguments.patch_stages;
                if (more == whole * step_x) {
                    found.patch = patch_of(arguments, shared, of_ring);
                    found.x = whole - 8;
                }
            }
        }
        return found;
    }

    static constexpr bool same_phase = 8 % step_x == 0;  // a lane has the same in all octets
    // Of the four matrices that a warp turns together, those of an octet, whose channels differ;
    // and octets whose matrices are under way together.
    static constexpr int of_octet = depth / 8 < 4 ? depth / 8 : 4, abreast = 4 / of_octet;
    static constexpr int together = 4;

    // Writes a piece to the patches of its run. `phase`: of the first octet; `skipped`: pixels of
    // it that are before the run's first.
    TCONV_DEVICE void turn(int number, int place, int length, int stage, int skipped, Phase phase) {
        Piece of(arguments, number);
        int matrix = lane / 8, row = lane % 8, more = matrix / of_octet;
        int octets_of_line = arguments.source_piece_octets;
        const unsigned char* from = raw() + (matrix % of_octet * 8 + row) * raw_line;
#pragma unroll 1
        for (int i = 0; i < arguments.source_piece_lines; ++i) {
            int line = of.line + i;
            if (line >= arguments.source_lines) break;
#pragma unroll 1
            for (int j = more; j < octets_of_line + more; j += together) {
                constexpr int groups = depth / 8 / of_octet, count = together / abreast;
                uint32_t values[count][groups][4];
#pragma unroll
                for (int k = 0; k < count; ++k) {
                    int slot = i * octets_of_line + j + k * abreast;
#pragma unroll
                    for (int group = 0; group < groups; ++group) {
                        ptx::ldmatrix_x4_trans(
                            values[k][group],
                            from + group * (of_octet * 8 * raw_line) + (slot % octets ^ row) * 16);
                    }
                }
#pragma unroll
                for (int k = 0; k < count; ++k) {
                    int of_row = j + k * abreast, octet = of.octet + of_row;
                    Phase to = phase;
                    if constexpr (same_phase) {
                        to.x += octet * (8 / step_x);
                    } else {
                        to = phase_of(place, length, stage, octet * 8 + row - skipped);
                    }
                    bool exists = of_row < octets_of_line && to.patch != nullptr &&
                                  unsigned(to.x) < unsigned(arguments.pitch_x);
                    unsigned position = line * arguments.pitch_x + to.x;
                    unsigned chunk = matrix % of_octet ^ position / (128 / line_bytes);
                    chunk %= line_bytes / 16;
                    unsigned char* at = to.patch + position * line_bytes;
#pragma unroll
                    for (int group = 0; group < groups; ++group) {
                        auto* pixel = at + (chunk ^ group * of_octet) * 16;
                        ptx::stmatrix_x4(exists ? pixel : shared.beside + row * 16,
                                         values[k][group]);
                    }
                }
            }
        }
    }
};

template <typename Fields>
TCONV_DEVICE void turn_patches(const Fields& arguments, Shared& shared, int warp) {
    using Turned = Turning<Fields>;
    Turned turning(arguments, shared, warp);
    for (int i = 0; i < raw_pieces; ++i) {
        turning.ring = i;
        turning.copy();
    }
    turning.ring = 0;
    CountedTurn turn;
    Tiles tiles(arguments);
    int piece = warp;
    for (int tile = tiles.first; tile < tiles.end; tile += tiles.step) {
        Position at(arguments, tiles, tile);
        int first = at.first_stage(), end = at.end_stage();
        if (!at.loads || first == end) continue;
        for (int chunk = 0, place = first; chunk < chunks;) {
            int length = entry(Layer::run_length, place);
            CountedTurn next = turn;
            // NOTE: also by a warp without a piece: it may not promise a stage before the last turn
            // of it is read.
            for (int k = 0; k < length; ++k) {
                ptx::mbarrier_wait_parity(&shared.patches_empty[next.stage], next.parity ^ 1);
                next.advance(arguments.patch_stages);
            }
            int skipped = (at.x * Turned::step_x + entry(Layer::run_x, place)) & 7;
            auto phase = turning.phase_of(place, length, turn.stage, turning.lane % 8 - skipped);
            for (; piece < arguments.source_pieces; piece += turning_warps) {
                ptx::cp_async_wait_group<raw_pieces - 1>();
                __syncwarp();  // other lanes' copies too
                turning.turn(piece, place, length, turn.stage, skipped, phase);
                __syncwarp();
                turning.copy();
                if (++turning.ring == raw_pieces) turning.ring = 0;
            }
            piece -= arguments.source_pieces;
            ptx::fence_proxy_async_shared();
            __syncwarp();
            for (int k = 0; k < length; ++k) {
                hand_back(&shared.patches_full[turn.stage]);
                turn.advance(arguments.patch_stages);
            }
            place += length;
            if (place == end) {
                place = first;
                ++chunk;
            }
        }
    }
}

}  // namespace
