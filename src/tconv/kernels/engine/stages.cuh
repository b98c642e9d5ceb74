// What the parts of an engine kernel share: sizes, shared memory, and the walk through the tiles.
//
// Patches are [position][channels], lines of 128, 64 or 32 bytes, swizzled. A tile
// is a box of images, rows and columns of the result. Its positions follow each other in the patch,
// with those between two rows of the box. A result is one phase of the large side (forward), or the
// small side (input gradient); a source likewise.
//
//   bring      fills stages of patches and of packed weights
//   multiply   sums of a consumer, over channels, sources and taps
//   store      writes the sums of the positions that exist
#pragma once

#include <common/constant_tables.cuh>
#include <common/counted_ring.cuh>
#include <common/division.cuh>
#include <ptx/matrix_descriptor.cuh>
#include <ptx/mbarrier.cuh>

namespace {

using Index = Layer::Index;

constexpr int warpgroup = 128;
constexpr int consumers = 2;
constexpr int line_bytes = Layer::line_bytes;  // of a position, or of a row of weights
// In strict float32 a value is three of bfloat16 (<common/split.cuh>), each with lines of its own.
constexpr int value_parts = Layer::strict ? 3 : 1;
constexpr int operand_bytes = Layer::strict ? 2 : int(sizeof(Layer::Element));
constexpr int depth = line_bytes / operand_bytes;  // channels of a stage
constexpr int chunks = (Layer::reduced + depth - 1) / depth;
TCONV_DEVICE constexpr ptx::Swizzle swizzle_of(int line) {
    return line == 128  ? ptx::Swizzle::bytes_128
           : line == 64 ? ptx::Swizzle::bytes_64
                        : ptx::Swizzle::bytes_32;
}

// Positions of a consumer. Either they are the wgmma's columns, and its 64 rows are channels; or
// they are its rows, 64 at a time, and channels its columns. Each consumer has a row group of its
// own; or both have the same and other positions.
constexpr int columns = Layer::columns;
constexpr bool positions_are_rows = Layer::positions_are_rows;
constexpr int group_rows = Layer::group_rows;  // channels of a row group
// A line of a piece of weights has the channels of a row; or the rows of a channel, of weights that
// a tensor map copies as they lie (`rows_adjacent`).
constexpr int weight_line = Layer::weight_line;
constexpr int part_weight_bytes = (Layer::rows_adjacent ? depth : group_rows) * weight_line;
constexpr int weight_bytes = value_parts * part_weight_bytes;
// Slots whose weights are a stage: of raw tiles a row of taps.
constexpr int stage_slots = Layer::stage_slots;
constexpr int weight_stage_bytes = stage_slots * weight_bytes;
constexpr int row_blocks = (Layer::rows + Layer::block_rows - 1) / Layer::block_rows;

// A row group is a block of channels of a set: of `tile_results` results.
constexpr int tile_results = Layer::tile_results;
constexpr int tile_sums = Layer::tile_sums;  // of these, the results that have sums
constexpr int sets = Layer::results / tile_results;
constexpr int row_groups = row_blocks * sets;
constexpr int tile_groups = Layer::tile_groups;  // row groups of a tile
constexpr int row_sets = (row_groups + tile_groups - 1) / tile_groups;
constexpr int kinds = sets % tile_groups == 0 ? sets / tile_groups : sets;  // row sets repeat them
constexpr int weight_rings = tile_groups;

constexpr int piece_positions = 64;  // written at a time
constexpr int piece_line = 128;
constexpr int piece_bytes = Layer::piece_bytes;

constexpr int boxed_positions = Layer::maps_result ? (columns + 15) / 16 * 16 : 0;
constexpr int beside_bytes = Layer::maps_result || Layer::turned ? 128 : 16;

// Of a source that is turned: the warps that do it, and the pieces that each has under way.
constexpr int turning_warps = Layer::turning_warps;
constexpr int raw_pieces = Layer::raw_pieces;
constexpr int raw_bytes = Layer::raw_bytes;

// What a warp that turns copies next: a piece of a stage of a tile's chunk; its first pixel.
struct NextPiece {
    int tile, chunk, place, piece;
    int image, group, y, x;
};

// The stages of both consumers' weights follow it in shared memory, then those of patches.
struct alignas(1024) Shared {
    unsigned char outputs[consumers][2][piece_bytes];
    // NOTE: on a multiple of 1024 bytes, where swizzles begin.
    unsigned char raw[turning_warps][raw_pieces][raw_bytes];
    uint64_t raw_full[turning_warps][raw_pieces];
    NextPiece next[turning_warps];
    // For each slot, where a tile's first position lies in the patch, in bytes, and a number of the
    // stage that has it and of its result in the set: the constants that give them answer late.
    uint32_t starts[Layer::slots];
    uint64_t patches_full[Layer::most_patch_stages];
    uint64_t patches_empty[Layer::most_patch_stages];
    uint64_t weights_full[weight_rings][Layer::most_weight_stages];
    uint64_t weights_empty[weight_rings][Layer::most_weight_stages];
    uint64_t leading;
    // If tensor maps write the result: where a consumer's positions are in its box.
    uint16_t boxed[boxed_positions + 1];
    // Where those go that do not exist.
    alignas(16) unsigned char beside[beside_bytes];
};
static_assert(sizeof(Shared) <= Layer::fixed_bytes, "the host allots enough");
static_assert(Layer::stages * tile_sums <= line_bytes, "`starts` holds numbers beside bytes");

TCONV_DEVICE unsigned char* weights_of(const Arguments& arguments, Shared& shared, int ring) {
    auto* first = reinterpret_cast<unsigned char*>(&shared) + Layer::fixed_bytes;
    return first + ring * arguments.weight_stages * weight_stage_bytes;
}

// NOTE: on a multiple of 1024 bytes, where swizzles begin.
TCONV_DEVICE unsigned char* patch_of(const Arguments& arguments, Shared& shared, int stage) {
    auto* first = reinterpret_cast<unsigned char*>(&shared) + arguments.first_patch;
    return first + stage * arguments.stage_bytes;
}

// What a kernel does with tiles: all of them; or, if blocks share a tile's chunks, a part of its
// sums, or their addition behind that (<engine/share_sums.cuh>).
constexpr bool shares_tiles = Layer::share == 1, adds_shares = Layer::share == 2;

// The tiles of a block: every n-th; or, if it keeps patches, some that follow each other.
struct Tiles {
    int first, end, step;

    TCONV_DEVICE explicit Tiles(const Arguments& arguments)
        : first(blockIdx.x), end(arguments.tiles), step(gridDim.x) {
        if (row_sets == 1 || !arguments.keeps_patches) return;
        int each = end / step, more = end - each * step;
        first = first * each + min(first, more);
        end = first + each + (int(blockIdx.x) < more ? 1 : 0);
        step = 1;
    }
};

// A tile: which rows, and the first position of its box.
struct Position {
    int row_set, group;
    int image, y, x;
    int tile, first_chunk = 0, end_chunk = chunks;
    // Whether its patches are loaded, and handed back; if not, those of the tile before stay.
    bool loads = true, hands_back = true;

    template <typename Fields>
    TCONV_DEVICE Position(const Fields& arguments, const Tiles& tiles, int tile) : tile(tile) {
        if constexpr (shares_tiles) {
            int share = tile % arguments.shares;
            tile /= arguments.shares;
            first_chunk = chunks * share / arguments.shares;
            end_chunk = chunks * (share + 1) / arguments.shares;
        }
        // Row sets are innermost, as they share their patches.
        int rest = tile / row_sets;
        row_set = tile - rest * row_sets;
        // Some have more slots than others. Where a block would always get the same, each of its
        // turns begins with the next.
        if (row_sets > 1 && arguments.keeps_patches) {
            loads = row_set == 0 || tile == tiles.first;
            hands_back = row_set == row_sets - 1 || tile == tiles.end - 1;
        } else if (Layer::share == 0 && gridDim.x % row_sets == 0) {
            row_set = (row_set + tile / int(gridDim.x)) % row_sets;
        }
        int next = rest / Layer::groups;
        group = rest - next * Layer::groups;
        rest = next / arguments.tiles_x;
        x = (next - rest * arguments.tiles_x) * arguments.box_x;
        image = rest / arguments.tiles_y;
        y = (rest - image * arguments.tiles_y) * arguments.box_y;
        image *= arguments.box_n;
    }

    // The row group of a consumer. One beyond the last has nothing to compute.
    TCONV_DEVICE int row_group(int consumer) const {
        return row_set * tile_groups + consumer % tile_groups;
    }

    // Which stages its results need.
    TCONV_DEVICE int first_stage() const { return entry(Layer::kind_begin, row_set % kinds); }
    TCONV_DEVICE int end_stage() const { return entry(Layer::kind_begin, row_set % kinds + 1); }
};

// A position of a tile: images, rows and columns beyond the first.
struct Place {
    int n, y, x;

    TCONV_DEVICE Place(const Arguments& arguments, int position) {
        n = divide(position, arguments.pitch_multiplier, arguments.pitch_shift);
        int rest = position - n * arguments.pitch;
        y = divide(rest, arguments.pitch_x_multiplier, arguments.pitch_x_shift);
        x = rest - y * arguments.pitch_x;
    }

    // Whether it is none of those between two rows.
    TCONV_DEVICE bool in_box(const Arguments& arguments) const {
        return n < arguments.box_n && y < arguments.box_y && x < arguments.box_x;
    }
};

// Hands a stage back, or on. Called by each warp that has read or written it.
TCONV_DEVICE void hand_back(uint64_t* barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// Each thread those of some stages: one after the other, they take as long as a stage's copy.
TCONV_DEVICE void init_barriers(const Arguments& arguments, Shared& shared) {
    constexpr int warps = warpgroup / 32;
    int first = threadIdx.x;
    for (int stage = first; stage < arguments.patch_stages; stage += Layer::threads) {
        ptx::mbarrier_init(&shared.patches_full[stage], Layer::turned ? turning_warps : 1);
        ptx::mbarrier_init(&shared.patches_empty[stage], consumers * warps);
    }
    for (int ring = 0; ring < weight_rings; ++ring) {
        for (int stage = first; stage < arguments.weight_stages; stage += Layer::threads) {
            ptx::mbarrier_init(&shared.weights_full[ring][stage], 1);
            ptx::mbarrier_init(&shared.weights_empty[ring][stage],
                               consumers / weight_rings * warps);
        }
    }
    if (first == 0) ptx::mbarrier_init(&shared.leading, warps);
    if constexpr (Layer::turned) {
        int warp = first / 32;
        if (first % 32 < raw_pieces && warp < turning_warps) {
            ptx::mbarrier_init(&shared.raw_full[warp][first % 32], 1);
        }
    }
    ptx::fence_mbarrier_init();
}

}  // namespace
