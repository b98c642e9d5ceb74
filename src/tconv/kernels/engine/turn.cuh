// Bring, of an x that is contiguous, which no tensor map turns. A map copies pieces of it as they
// lie, and warps turn each into a patch.
//
//   octet   8 neighbouring pixels of a row of the image
//   piece   some octets, 8 at most, of a row or of several, of all channels of a stage: lines of a
//           channel's octets, swizzled
//
// Pieces go round among the warps. Each has some of its own under way, in memory that no other warp
// reads. A matrix of 8 channels and the pixels of an octet is read turned by ldmatrix, and stmatrix
// writes each of its pixels to the patch.
#pragma once

#include <engine/stages.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/registers.cuh>
#include <ptx/tensor_map.cuh>

namespace {

// Where a piece begins: an image and a row of the patch, an octet of the row.
struct Piece {
    int image, row, octet;

    template <typename Fields>
    TCONV_DEVICE Piece(const Fields& arguments, int number) {
        int rows =
            divide(number, arguments.source_blocks_multiplier, arguments.source_blocks_shift);
        octet = (number - rows * arguments.source_blocks) * arguments.source_piece_octets;
        image = divide(rows, arguments.source_bands_multiplier, arguments.source_bands_shift);
        row = (rows - image * arguments.source_bands) * arguments.source_piece_rows;
    }
};

// A warp's copies, by one lane. In shared memory: registers are for what is turned.
template <typename Fields>
struct Copying {
    const Fields& arguments;
    Shared& shared;
    int warp;
    NextPiece& next;

    TCONV_DEVICE Copying(const Fields& arguments, Shared& shared, int warp)
        : arguments(arguments), shared(shared), warp(warp), next(shared.next[warp]) {}

    TCONV_DEVICE void begin() {
        Tiles tiles(arguments);
        next.tile = tiles.first - tiles.step;
        next.piece = warp;
        next_tile(tiles);
    }

    // The next tile whose patches are loaded.
    TCONV_DEVICE void next_tile(const Tiles& tiles) {
        next.chunk = 0;
        while ((next.tile += tiles.step) < tiles.end) {
            Position at(arguments, tiles, next.tile);
            next.place = at.first_stage();
            if (!at.loads || next.place == at.end_stage()) continue;
            enter(at);
            return;
        }
    }

    TCONV_DEVICE void next_stage(const Tiles& tiles) {
        Position at(arguments, tiles, next.tile);
        if (++next.place == at.end_stage()) {
            next.place = at.first_stage();
            if (++next.chunk == chunks) {
                next_tile(tiles);
                return;
            }
        }
        enter(at);
    }

    // Finds a stage's first pixel, rounded down to an octet.
    TCONV_DEVICE void enter(const Position& at) {
        next.image = at.image;
        next.group = at.group;
        next.y = at.y + entry(Layer::stage_y, entry(Layer::kind_stages, next.place));
        next.x = (at.x + entry(Layer::kind_x, next.place)) & -8;
    }

    // Starts the copy of the next piece, if there is one.
    TCONV_DEVICE void copy(int ring) {
        Tiles tiles(arguments);
        while (next.piece >= arguments.source_pieces && next.tile < tiles.end) {
            next.piece -= arguments.source_pieces;
            next_stage(tiles);
        }
        if (next.tile >= tiles.end) return;
        Piece of(arguments, next.piece);
        uint64_t* full = &shared.raw_full[warp][ring];
        ptx::mbarrier_arrive_expect_tx(full, arguments.source_piece_bytes);
        ptx::cp_async_bulk_tensor_5d_global_to_shared(
            shared.raw[warp][ring], &arguments.source_0, next.x + of.octet * 8, next.chunk * depth,
            next.y + of.row, next.image + of.image, next.group, full);
        next.piece += turning_warps;
    }
};

template <typename Fields>
struct Turning {
    const Fields& arguments;
    Shared& shared;
    int lane = threadIdx.x % 32;

    // Of the four matrices that a warp turns together, those of an octet, whose channels differ.
    static constexpr int of_octet = depth / 8 < 4 ? depth / 8 : 4, abreast = 4 / of_octet;
    static constexpr int groups = depth / 8 / of_octet;

    // Where 8 of a position's channels lie in its line: swizzled.
    TCONV_DEVICE static unsigned chunk_of(unsigned position, unsigned channels) {
        return (channels ^ position / (128 / line_bytes)) % (line_bytes / 16);
    }

    // Writes a piece, of lines of so many octets, to a patch, `patch` bytes behind `shared`.
    // `skipped`: pixels of the first octet that are before a row's first position.
    template <int octets>
    TCONV_DEVICE void turn(const Piece& of, unsigned patch, int skipped, const unsigned char* raw) {
        constexpr int raw_line = octets * 16;
        // Octets of a lane's matrices, and those under way together: of 16 registers.
        constexpr int all = (octets + abreast - 1) / abreast, most = 4 / groups;
        constexpr int together = all < most ? all : most;
        int matrix = lane / 8, channel = matrix % of_octet * 8 + lane % 8;
        int more = matrix / of_octet;
        int swizzle = channel * octets / 8 % octets * 16;
        const unsigned char* from = raw + channel * raw_line;
        int x = lane % 8 - skipped + (of.octet + more) * 8;
        int line = of.image * arguments.source_rows + of.row;
        int rows = min(arguments.source_piece_rows, arguments.source_rows - of.row);
        int blocks = arguments.source_octets - of.octet;
        auto* memory = reinterpret_cast<unsigned char*>(&shared);
        unsigned beside = unsigned(shared.beside - memory) + lane % 8 * 16;
#pragma unroll 1
        for (int i = 0; i < rows; ++i, ++line) {
            // NOTE: or NVRTC 13.0 keeps the addresses of all octets, and spills.
            int swizzled = ptx::opaque(swizzle);
            unsigned first = line * arguments.pitch_x + x;
            unsigned chunk = chunk_of(first, matrix % of_octet);
#pragma unroll
            for (int j = 0; j < all; j += together) {
                if (j * abreast >= blocks) break;
                uint32_t values[together][groups][4];
#pragma unroll
                for (int k = 0; k < together; ++k) {
                    int octet = ((j + k) * abreast + more) % octets * 16;
#pragma unroll
                    for (int g = 0; g < groups; ++g) {
                        ptx::ldmatrix_x4_trans(values[k][g], from + g * (of_octet * 8 * raw_line) +
                                                                 (swizzled ^ octet));
                    }
                }
#pragma unroll
                for (int k = 0; k < together; ++k) {
                    int ahead = (j + k) * abreast * 8;
                    bool exists = unsigned(x + ahead) < unsigned(arguments.pitch_x);
                    exists &= abreast == 1 || (j + k) * abreast + more < octets;
                    // NOTE: so many positions ahead, chunks are exchanged by a constant.
                    unsigned own = chunk ^ chunk_of(ahead, 0);
                    unsigned at = (first + ahead) * line_bytes;
#pragma unroll
                    for (int g = 0; g < groups; ++g) {
                        unsigned to = patch + at + (own ^ g * of_octet) * 16;
                        ptx::stmatrix_x4(memory + (exists ? to : beside), values[k][g]);
                    }
                }
            }
            from += depth * raw_line;
        }
    }

    TCONV_DEVICE void turn(int number, unsigned patch, int skipped, const unsigned char* raw) {
        Piece of(arguments, number);
        switch (arguments.source_piece_octets) {
            case 8:
                return turn<8>(of, patch, skipped, raw);
            case 4:
                return turn<4>(of, patch, skipped, raw);
            case 2:
                return turn<2>(of, patch, skipped, raw);
            default:
                return turn<1>(of, patch, skipped, raw);
        }
    }
};

template <typename Fields>
TCONV_DEVICE void turn_patches(const Fields& arguments, Shared& shared, int warp) {
    Turning<Fields> turning = {arguments, shared};
    Copying<Fields> copying(arguments, shared, warp);
    if (turning.lane == 0) {
        copying.begin();
        for (int i = 0; i < raw_pieces; ++i) copying.copy(i);
    }
    CountedTurn turn, raw;
    Tiles tiles(arguments);
    int piece = warp;
    for (int tile = tiles.first; tile < tiles.end; tile += tiles.step) {
        Position at(arguments, tiles, tile);
        int first = at.first_stage(), end = at.end_stage();
        if (!at.loads || first == end) continue;
        for (int chunk = 0, place = first; chunk < chunks;) {
            // NOTE: also by a warp without a piece: it may not promise a stage before the last turn
            // of it is read.
            ptx::mbarrier_wait_parity(&shared.patches_empty[turn.stage], turn.parity ^ 1);
            unsigned patch = arguments.first_patch + turn.stage * arguments.stage_bytes;
            int skipped = (at.x + entry(Layer::kind_x, place)) & 7;
            for (; piece < arguments.source_pieces; piece += turning_warps) {
                ptx::mbarrier_wait_parity(&shared.raw_full[warp][raw.stage], raw.parity);
                turning.turn(piece, patch, skipped, shared.raw[warp][raw.stage]);
                __syncwarp();  // all lanes have read it
                if (turning.lane == 0) copying.copy(raw.stage);
                raw.advance(raw_pieces);
            }
            piece -= arguments.source_pieces;
            ptx::fence_proxy_async_shared();
            __syncwarp();
            hand_back(&shared.patches_full[turn.stage]);
            turn.advance(arguments.patch_stages);
            if (++place == end) {
                place = first;
                ++chunk;
            }
        }
    }
}

}  // namespace
