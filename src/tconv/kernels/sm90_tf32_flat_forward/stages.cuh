// What the roles of sm90_tf32_flat_forward share: sizes, shared memory and the walk through the
// tiles.
#pragma once

#include <common/counted_ring.cuh>
#include <ptx/mbarrier.cuh>
#include <sm90_tf32_flat_forward/rows.cuh>

namespace {

using Index = Layer::Index;

constexpr int warpgroup = 128;
constexpr int consumers = 2;
constexpr int line_bytes = 128;
constexpr int depth = line_bytes / (Layer::half ? 2 : 4);  // channels of a stage
constexpr int wgmma_bytes = 32;  // its depth
constexpr int chunks = (Layer::in_channels + depth - 1) / depth;
constexpr int columns = Layer::columns;

// Stages of pixels of a tile. One serves all slots of a chunk, or those of one shift in y.
constexpr int stage_rows = Layer::stage_rows;
constexpr int tile_stages = chunks * stage_rows;
static_assert(stage_rows <= line_bytes, "`Shared::starts` holds a row's number beside a line's");

constexpr int weight_bytes = 64 * line_bytes;

// Outputs in shared memory. A row is one channel's positions, some at a time, with all phases. The
// second consumer's rows follow the first's. Where phases are apart, both consumers fill the same
// rows.
constexpr bool storers = Layer::storers;
constexpr int part = storers ? columns : 32;
constexpr int phases = Layer::stride_x;
constexpr int out_channels = 4 * flat::warp_channels;  // of a row group
constexpr int out_columns = part * phases + Layer::shift;
// Rows start 8 banks apart, or one where phases are apart. Two lanes of a warp would then store to
// the same bank. None do if lanes whose number has `swap_bit` store the second of their two columns
// first.
constexpr int bank_step = flat::apart ? 1 : 8;
constexpr int out_pitch = out_columns + (32 + bank_step - out_columns % 32) % 32;
constexpr int swap_bit = flat::apart                  ? -1
                         : phases == 1                ? 4
                         : phases == 2 || phases == 8 ? 1
                         : phases == 4                ? 0
                                                      : -1;
// With storers a thread has 128 registers, and the consumers need more than that.
[[maybe_unused]] constexpr int producer_registers = 64;
[[maybe_unused]] constexpr int storer_registers = 96;
[[maybe_unused]] constexpr int consumer_registers = 168;
static_assert(producer_registers + storer_registers + consumers * consumer_registers <= 4 * 128,
              "what 512 threads get");
constexpr int out_groups = flat::apart ? 1 : consumers;
constexpr int width = Layer::vector;  // outputs written at a time
static_assert(!flat::paired || storers, "who writes has the outputs of both consumers");

// Slices of the outputs go to the storers and come back one by one, so that storers write one while
// consumers fill another. A slice set is one consumer's outputs, or both consumers' where they are
// written together. A slice is half of each warp's rows if each half holds several whole channels,
// else all of them.
constexpr int slice_sets = flat::apart || flat::paired ? 1 : consumers;
constexpr int halves = 8 % flat::row_phases == 0 && flat::row_phases <= 4 ? 2 : 1;
constexpr int slice_channels = flat::warp_channels / halves;  // of a warp

// Where a position's outputs lie, or those of a row's first position where tiles are whole rows:
// the offset of the first phase of both axes within a channel, and its coordinates. The coordinates
// of a position that does not exist lie outside the image.
struct alignas(16) Place {
    Index offset;
    int y, x;
};
constexpr int none = -(1 << 30);

// The stages of both consumers' weights follow it in shared memory, then those of pixels. Their
// numbers, and the size of a stage of pixels, depend on the image.
struct alignas(1024) Shared {
    Place places[2][columns];
    float outputs[out_groups][out_channels][out_pitch];
    // For each slot, where a tile's first position lies in the patch, in bytes. The constants that
    // give it lie in device memory, and each step of the products would wait for them. Where a
    // stage serves one shift in y, that shift's number is added.
    int starts[Layer::slots];
    float units[consumers * 4];  // of each warp, what its sums are multiplied by
    bool wrong[consumers][2]
              [4];  // whether some of the outputs of a warp's half rows are not finite
    uint64_t pixels_full[Layer::most_pixel_stages];
    uint64_t pixels_empty[Layer::most_pixel_stages];
    uint64_t weights_full[consumers][Layer::most_weight_stages];
    uint64_t weights_empty[consumers][Layer::most_weight_stages];
    uint64_t places_full[2];
    uint64_t places_empty[2];
    uint64_t slices_full[slice_sets][halves];  // of the outputs, for the storers
    uint64_t slices_empty[slice_sets][halves];
    uint64_t leading;
};
static_assert(sizeof(Shared) <= Layer::fixed_bytes, "the host allots enough");

// Where a consumer's weights start.
template <typename Fields>
TCONV_DEVICE unsigned char* weights_of(const Fields& arguments, Shared& shared, int consumer) {
    auto* first = reinterpret_cast<unsigned char*>(&shared + 1);
    return first + consumer * arguments.weight_stages * weight_bytes;
}

// Where a stage of pixels starts.
template <typename Fields>
TCONV_DEVICE unsigned char* pixels_of(const Fields& arguments, Shared& shared, int stage) {
    return weights_of(arguments, shared, consumers) + stage * arguments.pixel_bytes;
}

struct Position {
    int row_set, group;
    int first;  // position among the outputs' q

    template <typename Fields>
    TCONV_DEVICE Position(int tile, const Fields& arguments) {
        // Row sets are innermost, as they share their pixels.
        int rest = tile / Layer::row_sets;
        row_set = tile - rest * Layer::row_sets;
        // Some row sets have more slots than others. Where a block would always get the same row
        // set, each of its turns begins with the next.
        if (gridDim.x % Layer::row_sets == 0) {
            row_set = (row_set + tile / int(gridDim.x)) % Layer::row_sets;
        }
        int next;
        if constexpr (Layer::groups_outermost) {
            // Then a turn of the blocks reads few groups' weights.
            int positions = arguments.tiles / (Layer::row_sets * Layer::groups);
            group = rest / positions;
            next = rest - group * positions;
        } else {
            next = rest / Layer::groups;
            group = rest - next * Layer::groups;
        }
        if constexpr (flat::paired) {
            first = next * arguments.rows * arguments.pitch;
        } else {
            first = next * columns;
        }
    }

    // The row group of a consumer. One beyond the last has nothing to compute.
    TCONV_DEVICE int row_group(int consumer) const { return row_set * consumers + consumer; }
};

// Hands a stage back. Called by each warp whose products have read it.
TCONV_DEVICE void hand_back(uint64_t* empty) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty);
}

}  // namespace
