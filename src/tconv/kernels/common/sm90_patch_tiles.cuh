// Tiles of Hopper's kernels on staged patches: sizes, shared memory and positions.
#pragma once

#include <common/element.cuh>
#include <common/float16_operands.cuh>
#include <common/ring.cuh>
#include <ptx/mbarrier.cuh>

namespace {

using Index = Layer::Index;

// A stage is as deep as one wgmma: 8 channels of TF32, 8 of bfloat16 with two parts of each, or 16
// of float16. A patch is loaded 8 channels at a time, into one or two parts of the stage.
constexpr int part_channels = 8;
constexpr int parts = Layer::half ? 2 : 1;
constexpr int channels_per_stage = part_channels * parts;
constexpr int pixel_bytes = 32;  // of a stage
constexpr int warpgroup = 128;
constexpr int consumers = 2;        // warpgroups that multiply
// Rings of stages. Each consumer has a ring, or both share the patches of one. Then their rows lie
// one above the other's.
constexpr int rings = Layer::rings;
constexpr int patch_consumers = consumers / rings;
constexpr int producers = warpgroup / rings;  // threads that fill one ring
constexpr int stages = Layer::stages;

constexpr int columns = Layer::tile_columns;
constexpr int patch_pixels = Layer::patch_rows * Layer::patch_columns;
constexpr int patch_bytes = (patch_pixels * pixel_bytes + 255) / 256 * 256;
// Split float16 has a patch of high parts and one of low parts. Split bfloat16 has a patch of high
// and middle parts and one of low and high parts.
constexpr int stage_bytes = (Layer::split ? 2 : 1) * patch_bytes;
constexpr int thread_pixels = (patch_pixels + producers - 1) / producers;

// With a tensor map, the raw patch is [8 channels][patch rows][patch columns], as in the image. The
// patch then begins at a 16-byte boundary. Its pixels have the same order in the raw patch and in
// the stage.
constexpr int raw_bytes = part_channels * patch_pixels * 4;
static_assert(!Layer::tensor_map || Layer::patch_columns % 4 == 0, "a box of whole 16 bytes");
static_assert(columns % 4 == 0, "tiles keep the skew");

constexpr int chunks = (Layer::in_channels + channels_per_stage - 1) / channels_per_stage;

// The epilogue gathers a warp's 16 rows 8 at a time where 8 rows hold whole channels, else all at
// once. It gathers each channel's pixels with all phases, padded so that the fragments' rows start
// 8 or 24 banks apart.
constexpr int passes = 8 % Layer::stride_x == 0 ? 2 : 1;
constexpr int pass_channels = Layer::warp_channels / passes;
constexpr int out_columns = columns * Layer::stride_x;

// Tiles may overlap in x. Of each row a tile then writes whole sectors of device memory: the first
// that begins in the tile, and as many as its step is long. Its neighbours write what lies before
// and behind. Where it has no neighbour, it writes that itself.
constexpr int sector = 8;  // outputs
constexpr bool overlapped = Layer::tile_step < columns;
constexpr int own_columns = Layer::tile_step * Layer::stride_x;
static_assert(Layer::tile_step % 4 == 0, "tiles keep the skew");
static_assert(!overlapped || (own_columns % sector == 0 && own_columns + sector - 1 <= out_columns),
              "a tile has all sectors that begin in its step");

// The column of a row's first output modulo a vector, in device memory. The row is gathered at the
// same place, so that vectors are aligned in both. In tiles that overlap each row finds its own.
constexpr int out_first = Layer::first_q_x * Layer::stride_x - Layer::padding_x;
constexpr int out_shift = (out_first % Layer::vector + Layer::vector) % Layer::vector;
constexpr int most_shift = overlapped ? 3 : out_shift;
static_assert(columns % 4 == 0, "tiles keep the shift");
static_assert(Layer::stride_x > 1 || out_shift == 0, "pairs of sums are stored together");
constexpr int out_pitch =
    Layer::stride_x == 1 ? most_shift + columns + (24 - (most_shift + columns) % 16) % 16
                         : most_shift + out_columns + (40 - (most_shift + out_columns) % 32) % 32;

// Resident weights: [group][chunk][reach in y][slot in x][channels of a warp][part][thread][4]. A
// fragment is the weights of one warp for one product. It has one part, or in split float16 two,
// high and low.
// Here a reach is slot * stride + phase. Phases that share a tap share its fragments.
constexpr int weight_parts = Layer::split && Layer::half ? 2 : 1;
constexpr int part_words = 32 * 4;
constexpr int fragment = weight_parts * part_words;
constexpr int phases_y = Layer::stride_y * Layer::row_step;
constexpr int phase_tiles = (Layer::out_channels + Layer::warp_channels - 1) / Layer::warp_channels;
constexpr int phase_words = Layer::slots_x * phase_tiles * fragment;  // from a reach to the next
constexpr int chunk_words = Layer::reaches * phase_words;
constexpr int resident_words = Layer::resident ? Layer::groups * chunks * chunk_words : 4;
static_assert(resident_words * 4 < 1 << 20, "what an mbarrier can count");

// Staged weights: each consumer has a ring of bulk copies from L2, in the order of use. A copy has
// the pairs whose weights a thread holds at a time. A pair is one fragment for each warp.
constexpr bool staged = Layer::weight_slots > 0;
constexpr int weight_slots = staged ? Layer::weight_slots : 1;
constexpr int pair_words = 4 * fragment;
constexpr int slot_words = staged ? Layer::slot_pairs * pair_words : 4;

static_assert(columns % 8 == 0 && columns <= 256, "wgmma's N");
static_assert(Layer::m_tiles * Layer::tile_rows * columns / 2 <= 160, "the sums fit the registers");

// The heads of a block's two chains of tiles (<common/sm90_patch_repairs.cuh>). 0 is an empty
// chain. The block recomputes the first.
struct Repairs {
    uint32_t unfit;   // those with pixels that do not fit
    uint32_t others;  // the rest
};

// Barriers by which a block goes on to its repair.
struct Handover {
    uint64_t done;      // all threads have come
    uint64_t prepared;  // one thread has prepared shared memory
    uint32_t repairs;   // the chain of what is computed again
};

// The next tiles of a ring, in order: as many as its producers work ahead, and some more.
constexpr int order_size = 16;
static_assert(stages + Layer::raw_stages + 2 <= order_size,
              "a thread that has not received a tile is not overtaken");

struct Order {
    Index tiles[order_size];
    uint64_t full[order_size];
    uint32_t count;  // of those that the first producer has published: here it costs no register
};

struct Shared {
    alignas(1024) unsigned char pixels[rings][stages][stage_bytes];
    alignas(128) unsigned char raw[rings][Layer::raw_stages]
                                  [Layer::tensor_map ? (raw_bytes + 127) / 128 * 128 : 128];
    alignas(128) uint32_t weights[resident_words];
    alignas(128) uint32_t slots[consumers][weight_slots][slot_words];
    alignas(16) float outputs[consumers * 4][pass_channels][out_pitch];
    alignas(16) uint32_t zeros[4];
    Index offsets[rings][Layer::tensor_map ? 1 : thread_pixels * producers];
    uint64_t raw_full[rings][Layer::raw_stages];
    uint64_t full[rings][stages];
    uint64_t empty[rings][stages];
    uint64_t weights_full;
    Repairs repairs;
    uint32_t last_unfit
        [rings]
        [4];  // tiles that were chained up last for what does not fit, from 1 on, by tile % 4
    uint32_t unfit_weights[4];  // as each warp of producers has read of them
    // `units`: for a ring's tiles in turn, the power of two by which the sums are too large.
    // `scaled`: how many tiles have theirs. `written`: how many tiles each consumer warp has
    // written. `weight_unit` is the unit of the weights, and `unit` that of both.
    float units[rings][order_size];
    uint32_t scaled[rings];
    uint32_t sampled[rings][producers / 32];
    uint32_t written[consumers * 4];
    float weight_unit[consumers * 4], unit[consumers * 4];
    Order order[rings];
    uint64_t slot_full[consumers][weight_slots];
    uint64_t slot_empty[consumers][weight_slots];
    Handover handover;  // at the end
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

// Arrives once for a warp, after all of its lanes have come here.
TCONV_DEVICE void arrive(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// A consumer's turn in each of its rings.
struct Turns {
    Turn<stages> pixels;
    Turn<weight_slots> weights;
};

struct Position {
    int m_group, group, tile_x, tile_y;
    Index image;
    int own;  // of the consumers that the patch serves

    // Row groups are innermost, as they share their pixels.
    TCONV_DEVICE Position(Index tile, const Arguments& arguments, int own = 0) : own(own) {
        Index rest = tile / Layer::m_groups;
        m_group = int(tile - rest * Layer::m_groups);
        Index next = rest / Layer::groups;
        group = int(rest - next * Layer::groups);
        rest = next / arguments.tiles_x;
        tile_x = int(next - rest * arguments.tiles_x);
        image = rest / arguments.tiles_y;
        tile_y = int(rest - image * arguments.tiles_y);
    }

    TCONV_DEVICE int first_q_y() const {
        return Layer::first_q_y + (tile_y * patch_consumers + own) * Layer::tile_rows;
    }

    TCONV_DEVICE int first_q_x() const { return Layer::first_q_x + tile_x * Layer::tile_step; }
};

using Sums = float[Layer::m_tiles][Layer::tile_rows][columns / 2];

}  // namespace
