// What Hopper's kernels on staged patches share: tiles, producers, weights, and the way out.
//
// The kernel that includes this defines `multiply`, the products of one tile, and calls `run_block`.
#pragma once

#include <common/element.cuh>
#include <ptx/barrier.cuh>
#include <ptx/bulk.cuh>
#include <ptx/convert.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/registers.cuh>
#include <ptx/setmaxnreg.cuh>
#include <ptx/tensor_map.cuh>
#include <ptx/wgmma.cuh>

namespace {

using Index = Layer::Index;

constexpr int channels_per_stage = 8;  // the depth of a TF32 wgmma
constexpr int pixel_bytes = channels_per_stage * 4;
constexpr int warpgroup = 128;
constexpr int rings = 2;
constexpr int producers = warpgroup / rings;  // threads that fill one ring
constexpr int stages = Layer::stages;

// Where consumers need more than a third of the registers.
constexpr int producer_registers = Layer::tensor_map ? 88 : 104;
constexpr int consumer_registers = (3 * 168 - producer_registers) / 2;
static_assert(producer_registers + rings * consumer_registers == 3 * 168, "what 384 threads get");

constexpr int columns = Layer::tile_columns;
constexpr int patch_pixels = Layer::patch_rows * Layer::patch_columns;
constexpr int part_bytes = (patch_pixels * pixel_bytes + 255) / 256 * 256;
constexpr int stage_bytes = (Layer::split ? 2 : 1) * part_bytes;  // split: high parts, low parts
constexpr int thread_pixels = (patch_pixels + producers - 1) / producers;

// With a tensor map, first as it lies in the image, [8 channels][patch rows][patch columns]: the
// patch then begins at a 16-byte boundary, and its pixels have the same order in both.
constexpr int raw_bytes = channels_per_stage * patch_pixels * 4;
static_assert(!Layer::tensor_map || Layer::patch_columns % 4 == 0, "a box of whole 16 bytes");
static_assert(columns % 4 == 0, "tiles keep the skew");

constexpr int chunks = (Layer::in_channels + channels_per_stage - 1) / channels_per_stage;

// The epilogue gathers a warp's rows 8 at a time where these hold whole channels, else all 16: each
// channel's pixels with all phases, padded so that the fragments' rows start 8 or 24 banks apart.
constexpr int passes = 8 % Layer::stride_x == 0 ? 2 : 1;
constexpr int pass_channels = Layer::warp_channels / passes;
constexpr int out_columns = columns * Layer::stride_x;
// Columns of a row's first output behind the last multiple of a vector: there it is gathered too, so
// that vectors lie on their size in both.
constexpr int out_first = Layer::first_q_x * Layer::stride_x - Layer::padding_x;
constexpr int out_shift = (out_first % Layer::vector + Layer::vector) % Layer::vector;
static_assert(columns % 4 == 0, "tiles keep the shift");
static_assert(Layer::stride_x > 1 || out_shift == 0, "pairs of sums are stored together");
constexpr int out_pitch = Layer::stride_x == 1
                              ? columns + (columns % 16 == 8 ? 0 : 8)
                              : out_shift + out_columns + (40 - (out_shift + out_columns) % 32) % 32;

// Resident weights: [group][chunk][reach in y][slot in x][channels of a warp][thread][4], a fragment
// being the weights of one warp for one product. A reach is slot * stride + phase: the phases that
// share a tap share its fragments.
constexpr int fragment = 32 * 4;
constexpr int phases_y = Layer::stride_y * Layer::row_step;
constexpr int phase_tiles = (Layer::out_channels + Layer::warp_channels - 1) / Layer::warp_channels;
constexpr int phase_words = Layer::slots_x * phase_tiles * fragment;  // from a reach to the next
constexpr int chunk_words = Layer::reaches * phase_words;
constexpr int resident_words = Layer::resident ? Layer::groups * chunks * chunk_words : 4;
static_assert(resident_words * 4 < 1 << 20, "what an mbarrier can count");

// Staged weights: for each consumer a ring of bulk copies from L2, in the order of use, each of the
// pairs whose weights a thread holds at a time. A pair is one fragment for each warp.
constexpr bool staged = Layer::weight_slots > 0;
constexpr int weight_slots = staged ? Layer::weight_slots : 1;
constexpr int pair_words = 4 * fragment;
constexpr int slot_words = staged ? Layer::slot_pairs * pair_words : 4;

static_assert(columns % 8 == 0 && columns <= 256, "wgmma's N");
static_assert(Layer::m_tiles * Layer::tile_rows * columns / 2 <= 160, "the sums fit the registers");

struct Shared {
    alignas(1024) unsigned char pixels[rings][stages][stage_bytes];
    alignas(128) unsigned char raw[rings][Layer::raw_stages]
                                  [Layer::tensor_map ? (raw_bytes + 127) / 128 * 128 : 128];
    alignas(128) uint32_t weights[resident_words];
    alignas(128) uint32_t slots[rings][weight_slots][slot_words];
    alignas(16) float outputs[rings * 4][pass_channels][out_pitch];
    alignas(16) uint32_t zeros[4];
    Index offsets[rings][Layer::tensor_map ? 1 : thread_pixels * producers];
    uint64_t raw_full[rings][Layer::raw_stages];
    uint64_t full[rings][stages];
    uint64_t empty[rings][stages];
    uint64_t weights_full;
    uint64_t slot_full[rings][weight_slots];
    uint64_t slot_empty[rings][weight_slots];
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

// One arrival for a warp whose lanes have all come here.
TCONV_DEVICE void arrive(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// A ring's next stage, and the parity of its turn.
template <int size>
struct Turn {
    int stage = 0;
    uint32_t parity = 0;

    TCONV_DEVICE void advance() {
        if (++stage == size) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Where a consumer is in its rings.
struct Turns {
    Turn<stages> pixels;
    Turn<weight_slots> weights;
};

struct Position {
    int m_group, group, tile_x, tile_y;
    Index image;

    // Row groups innermost: they share their pixels.
    TCONV_DEVICE Position(Index tile, const Arguments& arguments) {
        Index rest = tile / Layer::m_groups;
        m_group = int(tile - rest * Layer::m_groups);
        Index next = rest / Layer::groups;
        group = int(rest - next * Layer::groups);
        rest = next / arguments.tiles_x;
        tile_x = int(next - rest * arguments.tiles_x);
        image = rest / arguments.tiles_y;
        tile_y = int(rest - image * arguments.tiles_y);
    }

    TCONV_DEVICE int first_q_y() const { return Layer::first_q_y + tile_y * Layer::tile_rows; }
    TCONV_DEVICE int first_q_x() const { return Layer::first_q_x + tile_x * columns; }
};

// A value as the sum of two operands. What is not finite, or would be rounded to infinity, is a low
// part alone: the other operand's low part would bring the opposite infinity, or a zero.
//
// The low part has 12 bits where an operand holds 11: cutting the last one off, as the tensor core
// does, errs as much as rounding it.
struct Split {
    uint32_t high, low;

    TCONV_DEVICE explicit Split(float value) {
        bool rounds = fabsf(value) < __uint_as_float(0x7f7ff000u);
        high = __float_as_uint(value) + 0x1000u & (rounds ? 0xffffe000u : 0);
        low = __float_as_uint(value - __uint_as_float(high));
    }
};

// Rounds or splits one pixel's channels into the stage, with 32-byte swizzle: bit 4 of the address
// is exclusive-ored with bit 7.
TCONV_DEVICE void store_pixel(unsigned char* stage, int pixel,
                              const float (&values)[channels_per_stage]) {
    int swapped = pixel >> 2 & 1;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float* v = values + 4 * h;
        auto* to = reinterpret_cast<uint32_t*>(stage + pixel * pixel_bytes + ((h ^ swapped) * 16));
        if constexpr (Layer::split) {
            Split a(v[0]), b(v[1]), c(v[2]), d(v[3]);
            ptx::st_shared_v4(to, make_uint4(a.high, b.high, c.high, d.high));
            ptx::st_shared_v4(to + part_bytes / 4, make_uint4(a.low, b.low, c.low, d.low));
        } else {
            ptx::st_shared_v4(to, make_uint4(tf32_bits(v[0]), tf32_bits(v[1]),
                                             tf32_bits(v[2]), tf32_bits(v[3])));
        }
    }
}

// Where a tile's patch lies in the source.
struct Patch {
    const float* channels;  // of the tile's image and group
    int top;
    int left;

    TCONV_DEVICE Patch(const Position& at, const Arguments& arguments)
        : channels(static_cast<const float*>(arguments.source) +
                   at.image * arguments.source_stride_n +
                   Index(at.group) * Layer::in_channels * arguments.source_stride_c),
          top(Layer::row_step * at.first_q_y() - Layer::shift_bottom),
          left(at.first_q_x() - Layer::shift_right - Layer::skew) {}
};

// Any strides: through registers, the next batch of loads under way while one is stored.
template <typename Fields>
TCONV_DEVICE void produce_by_loads(const Fields& arguments, Shared& shared, int warp) {
    constexpr Index outside = -1;
    // Pixels of a thread under way, in two buffers of 8 values each.
    constexpr int most_batch = 4;
    constexpr int batches = (thread_pixels + most_batch - 1) / most_batch;
    constexpr int batch_pixels = (thread_pixels + batches - 1) / batches;
    int ring = warp * 32 / producers;
    int thread = threadIdx.x % producers;
    Turn<stages> turn;
    Index step = Index(gridDim.x) * rings;
    for (Index tile = Index(blockIdx.x) * rings + ring; tile < arguments.tiles; tile += step) {
        Position at(tile, arguments);
        Patch patch(at, arguments);
        // Where each of this thread's pixels lies in a channel; in shared memory, which no other
        // thread reads, to keep the registers for loads.
        Index* offsets = shared.offsets[ring] + thread;
        for (int i = 0; i < thread_pixels; ++i) {
            int pixel = thread + i * producers;
            int y = patch.top + pixel / Layer::patch_columns;
            int x = patch.left + pixel % Layer::patch_columns;
            bool inside = pixel < patch_pixels && y >= 0 && y < arguments.source_height && x >= 0 &&
                          x < arguments.source_width;
            offsets[i * producers] =
                inside ? Index(y * arguments.source_stride_h + x * arguments.source_stride_w)
                       : outside;
        }
        float values[2][batch_pixels][channels_per_stage];
        auto load = [&](float(&into)[batch_pixels][channels_per_stage], int chunk, int batch) {
            const float* base =
                patch.channels + Index(chunk) * channels_per_stage * arguments.source_stride_c;
#pragma unroll
            for (int b = 0; b < batch_pixels; ++b) {
                int i = batch * batch_pixels + b;
                Index offset = i < thread_pixels ? offsets[i * producers] : outside;
#pragma unroll
                for (int c = 0; c < channels_per_stage; ++c) {
                    bool inside = offset != outside &&
                                  (Layer::in_channels % channels_per_stage == 0 ||
                                   chunk * channels_per_stage + c < Layer::in_channels);
                    into[b][c] = inside ? base[offset + c * arguments.source_stride_c] : 0.0f;
                }
            }
        };
        load(values[0], 0, 0);
        for (int chunk = 0; chunk < chunks; chunk += 2) {
            // Two chunks a turn, so that which buffer a batch is in is known when it is compiled.
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (chunk + half >= chunks) break;
                unsigned char* stage = shared.pixels[ring][turn.stage];
#pragma unroll
                for (int batch = 0; batch < batches; ++batch) {
                    constexpr int both = 2;
                    int now = (half * batches + batch) % both;
                    if (batch + 1 < batches) {
                        load(values[now ^ 1], chunk + half, batch + 1);
                    } else if (chunk + half + 1 < chunks) {
                        load(values[now ^ 1], chunk + half + 1, 0);
                    }
                    if (batch == 0) {
                        ptx::mbarrier_wait_parity(&shared.empty[ring][turn.stage], turn.parity ^ 1);
                    }
#pragma unroll
                    for (int b = 0; b < batch_pixels; ++b) {
                        int pixel = thread + (batch * batch_pixels + b) * producers;
                        if (pixel < patch_pixels) store_pixel(stage, pixel, values[now][b]);
                    }
                }
                ptx::fence_proxy_async_shared();
                arrive(&shared.full[ring][turn.stage]);
                turn.advance();
            }
        }
    }
}

// Rows on 16 bytes: the copy engine brings raw patches, raw_stages of them ahead, and the threads
// only transpose them.
template <typename Fields>
TCONV_DEVICE void produce_by_map(const Fields& arguments, Shared& shared, int warp) {
    constexpr int most_batch = 3;
    constexpr int batches = (thread_pixels + most_batch - 1) / most_batch;
    constexpr int batch_pixels = (thread_pixels + batches - 1) / batches;
    int ring = warp * 32 / producers;
    int thread = threadIdx.x % producers;
    Index step = Index(gridDim.x) * rings;
    Index first = Index(blockIdx.x) * rings + ring;

    // What thread 0 has still to ask for.
    Index asked_tile = first;
    int asked_chunk = 0;
    auto ask = [&](int slot) {
        if (thread != 0 || asked_tile >= arguments.tiles) return;
        Position at(asked_tile, arguments);
        uint64_t* barrier = &shared.raw_full[ring][slot];
        ptx::mbarrier_arrive_expect_tx(barrier, raw_bytes);
        ptx::cp_async_bulk_tensor_4d_global_to_shared(
            shared.raw[ring][slot], &arguments.source_map,
            at.first_q_x() - Layer::shift_right - Layer::skew,
            Layer::row_step * at.first_q_y() - Layer::shift_bottom,
            at.group * Layer::in_channels + asked_chunk * channels_per_stage, int(at.image),
            barrier);
        if (++asked_chunk == chunks) {
            asked_chunk = 0;
            asked_tile += step;
        }
    };
    for (int slot = 0; slot < Layer::raw_stages; ++slot) ask(slot);

    Turn<stages> turn;
    int slot = 0;
    uint32_t raw_parity = 0;
    for (Index tile = first; tile < arguments.tiles; tile += step) {
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const float* raw = reinterpret_cast<const float*>(shared.raw[ring][slot]);
            unsigned char* stage = shared.pixels[ring][turn.stage];
            ptx::mbarrier_wait_parity(&shared.raw_full[ring][slot], raw_parity);
            ptx::mbarrier_wait_parity(&shared.empty[ring][turn.stage], turn.parity ^ 1);
            // A store is a barrier to the compiler: loads that are to overlap precede it.
            float values[2][batch_pixels][channels_per_stage];
            auto load = [&](float(&into)[batch_pixels][channels_per_stage], int batch) {
#pragma unroll
                for (int b = 0; b < batch_pixels; ++b) {
                    int pixel = thread + (batch * batch_pixels + b) * producers;
                    const float* from = raw + min(pixel, patch_pixels - 1);
#pragma unroll
                    for (int c = 0; c < channels_per_stage; ++c) {
                        // Beyond the group's channels lie the next group's.
                        bool exists = Layer::in_channels % channels_per_stage == 0 ||
                                      chunk * channels_per_stage + c < Layer::in_channels;
                        into[b][c] = exists ? from[c * patch_pixels] : 0.0f;
                    }
                }
            };
            load(values[0], 0);
#pragma unroll
            for (int batch = 0; batch < batches; ++batch) {
                if (batch + 1 < batches) load(values[(batch + 1) % 2], batch + 1);
#pragma unroll
                for (int b = 0; b < batch_pixels; ++b) {
                    int pixel = thread + (batch * batch_pixels + b) * producers;
                    if (pixel < patch_pixels) store_pixel(stage, pixel, values[batch % 2][b]);
                }
            }
            ptx::fence_proxy_async_shared();
            arrive(&shared.full[ring][turn.stage]);
            turn.advance();
            ptx::bar_sync(1 + ring, producers);  // the raw patch has been read
            ask(slot);
            if (++slot == Layer::raw_stages) {
                slot = 0;
                raw_parity ^= 1;
            }
        }
    }
}

template <bool tensor_map, typename Fields>
TCONV_DEVICE void produce(const Fields& arguments, Shared& shared, int warp) {
    if constexpr (tensor_map) {
        produce_by_map(arguments, shared, warp);
    } else {
        produce_by_loads(arguments, shared, warp);
    }
}

using Sums = float[Layer::m_tiles][Layer::tile_rows][columns / 2];

// A row group's packed weights, in the order of use.
TCONV_DEVICE const uint32_t* packed_weights(int m_group, int group, const Arguments& arguments) {
    // NOTE: constant arrays lie in device memory, which answers late.
    int first = Layer::classes == 1 ? m_group * Layer::class_begin[1] : Layer::m_begin[m_group];
    return static_cast<const uint32_t*>(arguments.packed) +
           (Index(group) * Layer::group_pairs + first) * chunks * pair_words;
}

// Weights straight from L2, which the first level of the cache handles twice as often as staged ones.
template <int unroll>
struct StreamedWeights {
    const uint32_t* next;

    TCONV_DEVICE StreamedWeights(const Position& at, const Arguments& arguments, const Shared&, int)
        : next(packed_weights(at.m_group, at.group, arguments) + threadIdx.x % warpgroup * 4) {}

    TCONV_DEVICE uint4 load(int, int) {
        uint4 loaded = *reinterpret_cast<const uint4*>(next);
        next += pair_words;
        return loaded;
    }

    TCONV_DEVICE void advance(bool) {}
};

// Staged weights, `pairs` to a copy.
template <int pairs, int copies>
struct StagedWeights {
    static constexpr int first_copies = copies < weight_slots ? copies : weight_slots;

    Shared& shared;
    Turn<weight_slots>& turn;  // of the copy that is read
    Turn<weight_slots> used;   // of the oldest that has not been handed back
    const uint32_t* rest;      // copies that have not been asked for
    int left;                  // their number
    int warp;

    TCONV_DEVICE StagedWeights(const Position& at, const Arguments& arguments, Shared& shared,
                               int warp, Turn<weight_slots>& turn)
        : shared(shared), turn(turn), used(turn),
          rest(packed_weights(at.m_group, at.group, arguments) +
               first_copies * pairs * pair_words),
          left(copies - first_copies), warp(warp) {}

    // A tile's first copies, before its products begin.
    TCONV_DEVICE static void ask_first(const uint32_t* from, Shared& shared, int warp,
                                       Turn<weight_slots> turn) {
        for (int i = 0; i < first_copies; ++i) {
            ask(shared, warp, turn.stage, turn.parity ^ 1, from + i * pairs * pair_words);
            turn.advance();
        }
    }

    TCONV_DEVICE void wait() const {
        ptx::mbarrier_wait_parity(&shared.slot_full[warp / 4 - 1][turn.stage], turn.parity);
    }

    TCONV_DEVICE uint4 load(int pair) const {
        return ptx::ld_shared_v4(shared.slots[warp / 4 - 1][turn.stage] +
                                 (pair % pairs * pair_words + threadIdx.x % warpgroup * 4));
    }

    // NOTE: only after products of the copy's last pair have been asked for: loads that are still on
    // their way do not hold an arrival back, and behind another warp's stores they may be long. Each
    // lane arrives for its own loads, which costs nothing measurable, and compute-sanitizer does not
    // count on a warp's synchronisation.
    TCONV_DEVICE void hand_back() {
        ptx::mbarrier_arrive(&shared.slot_empty[warp / 4 - 1][used.stage]);
        if (left > 0) {
            if (warp % 4 == 0) ask(shared, warp, used.stage, used.parity, rest);
            rest += pairs * pair_words;
            --left;
        }
        used.advance();
    }

private:
    // The consumer's first warp, when all threads have read the slot for the last time.
    TCONV_DEVICE static void ask(Shared& shared, int warp, int slot, uint32_t parity,
                                 const uint32_t* from) {
        int ring = warp / 4 - 1;
        ptx::mbarrier_wait_parity(&shared.slot_empty[ring][slot], parity);
        if (threadIdx.x % 32 == 0) {
            uint64_t* full = &shared.slot_full[ring][slot];
            ptx::mbarrier_arrive_expect_tx(full, pairs * pair_words * 4);
            ptx::cp_async_bulk_global_to_shared(shared.slots[ring][slot], from,
                                                pairs * pair_words * 4, full);
        }
        __syncwarp();
    }
};

// Resident weights, found by pair and chunk.
template <int unroll>
struct ResidentWeights {
    const uint32_t* base[Layer::m_tiles];  // of the warp's rows: of its phase's reach at slot 0
    int phase[Layer::m_tiles];
    const uint32_t* zeros;
    int here = 0;  // words from the first chunk to those that are multiplied, and to the next ones
    int following = unroll < chunks ? unroll * chunk_words : 0;

    TCONV_DEVICE ResidentWeights(const Position& at, const Arguments&, const Shared& shared,
                                 int warp)
        : zeros(shared.zeros) {
#pragma unroll
        for (int m = 0; m < Layer::m_tiles; ++m) {
            int warp_tile = (at.m_group * Layer::m_tiles + m) * 4 + warp % 4;
            int phase_y = warp_tile / phase_tiles;
            int channels = warp_tile - phase_y * phase_tiles;
            phase[m] = phase_y < phases_y ? phase_y : 0;  // no row at all: any weights will do
            base[m] = shared.weights + at.group * (chunks * chunk_words) +
                      phase[m] * phase_words + channels * fragment + threadIdx.x % 32 * 4;
        }
    }

    // The weights of a pair, `chunk` chunks further on.
    TCONV_DEVICE uint4 load(int pair, int chunk) const {
        int m = Layer::pair_m_tile[pair];
        int reach = Layer::pair_slot_y[pair] * Layer::stride_y;  // of phase 0
        bool exists = (reach >= 0 || phase[m] >= -reach) &&
                      (reach + phases_y <= Layer::reaches || phase[m] < Layer::reaches - reach);
        const uint32_t* from = base[m] + (chunk < unroll ? here : following) +
                               chunk % unroll * chunk_words + Layer::pair_fragment[pair] * fragment;
        return ptx::ld_shared_v4(exists ? from : zeros);
    }

    // To the next `unroll` chunks, after which there are others or not.
    TCONV_DEVICE void advance(bool others) {
        here = following;
        if (others) following += unroll * chunk_words;
    }
};

template <bool resident, int unroll>
struct WeightsOf {
    using Type = StreamedWeights<unroll>;
};

template <int unroll>
struct WeightsOf<true, unroll> {
    using Type = ResidentWeights<unroll>;
};

// The patch's row of a pair's first pixel.
TCONV_DEVICE constexpr int pair_row(int pair) {
    return Layer::pair_pixel[pair] / Layer::patch_columns;
}

// What the kernel that includes this brings: the products of one tile, and what may begin before it.
template <int row_class>
TCONV_DEVICE void multiply(const Arguments& arguments, Shared& shared, const Position& at, int warp,
                           Turns& turns, Sums& sums);
template <int row_class>
TCONV_DEVICE void prepare(const uint32_t* weights, Shared& shared, int warp, const Turns& turns);

template <int row_class>
TCONV_DEVICE void multiply_class(const Arguments& arguments, Shared& shared, const Position& at,
                                 int warp, Turns& turns, Sums& sums) {
    if constexpr (row_class < Layer::classes) {
        if (Layer::classes == 1 || Layer::m_class[at.m_group] == row_class) {
            multiply<row_class>(arguments, shared, at, warp, turns, sums);
        } else {
            multiply_class<row_class + 1>(arguments, shared, at, warp, turns, sums);
        }
    }
}

template <int row_class>
TCONV_DEVICE void prepare_class(int m_group, const uint32_t* weights, Shared& shared, int warp,
                                const Turns& turns) {
    if constexpr (row_class < Layer::classes) {
        if (Layer::classes == 1 || Layer::m_class[m_group] == row_class) {
            prepare<row_class>(weights, shared, warp, turns);
        } else {
            prepare_class<row_class + 1>(m_group, weights, shared, warp, turns);
        }
    }
}

using Gathered = float[pass_channels][out_pitch];

TCONV_DEVICE void write_vector(float* to, const Vector<float, 1>& value) { *to = value.values[0]; }

TCONV_DEVICE void write_vector(float* to, const Vector<float, 2>& value) {
    ptx::st_global_v2(to, make_float2(value.values[0], value.values[1]));
}

TCONV_DEVICE void write_vector(float* to, const Vector<float, 4>& value) {
    ptx::st_global_v4(
        to, make_float4(value.values[0], value.values[1], value.values[2], value.values[3]));
}

// How a warp writes the rows that it has gathered: `channels` rows of the output, from `line` on,
// which is column `left` of the first. Each lane writes vectors of the width for which rows are
// aligned; the columns before the first whole one and behind the last are written one by one.
template <int width>
struct RowWriter {
    static constexpr int front = (width - out_shift % width) % width;
    static constexpr int row_vectors = (out_columns - front) / width;
    static constexpr int edges = out_columns - row_vectors * width;

    const Arguments& arguments;
    int left;

    TCONV_DEVICE void write(const Gathered& rows, float* line, int channels) const {
        // NOTE: else the compiler adds the offsets to the line's own, in 64 bits, for each piece.
        line = ptx::opaque(line);
        // Short rows one after the other, long ones in pieces of their own: the lanes' offsets of
        // many pieces that all differ would fill the registers.
        constexpr bool joined = row_vectors <= (width == 4 ? 12 : 32);
        constexpr int row_lanes = joined ? row_vectors : (row_vectors + 31) / 32 * 32;
        constexpr int pieces = (pass_channels * row_lanes + 31) / 32;
        constexpr int batch = pieces < 6 ? pieces : 4;  // loads under way
        // NOTE: beside so many sums, what follows from the lane would fill the registers if it was
        // kept from row to row; to compute it anew costs KernelBench's layers 2 to 10%.
        constexpr bool keeps = Layer::m_tiles * Layer::tile_rows * columns / 2 <= 128;
        int lane = keeps ? threadIdx.x % 32 : ptx::opaque(threadIdx.x % 32);
#pragma unroll
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

private:
    // Whether an output of the tile's row is one of the image: a vector's are all alike.
    TCONV_DEVICE bool exists(int column) const {
        return static_cast<unsigned>(left + column) <
               static_cast<unsigned>(arguments.destination_width);
    }
};

// Each warp interleaves its channels' phases in shared memory and writes pieces of whole rows.
template <int width>
TCONV_DEVICE void store(const Arguments& arguments, Shared& shared, const Position& at, int warp,
                        const Sums& sums) {
    int lane = threadIdx.x % 32;
    auto& outputs = shared.outputs[warp - 4];
    int left = at.first_q_x() * Layer::stride_x - Layer::padding_x;
    RowWriter<width> writer{arguments, left};
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
#pragma unroll
        for (int r = 0; r < Layer::tile_rows; ++r) {
            int out_y = (at.first_q_y() + r) * phases_y + phase_y - Layer::padding_y;
            if (out_y < 0 || out_y >= arguments.destination_height) continue;
#pragma unroll
            for (int pass = 0; pass < passes; ++pass) {
#pragma unroll
                for (int i = 0; i < 2 / passes; ++i) {
                    int half = pass + i;
                    int row = lane / 4 + 8 * i;
                    int channel = row / Layer::stride_x;
                    if (channel >= pass_channels) continue;
                    float* to =
                        outputs[channel] + out_shift + row % Layer::stride_x +
                        lane % 4 * 2 * Layer::stride_x;
#pragma unroll
                    for (int j = 0; j < columns / 8; ++j) {
                        float even = sums[m][r][4 * j + 2 * half];
                        float odd = sums[m][r][4 * j + 2 * half + 1];
                        if constexpr (Layer::bias) even += bias[half], odd += bias[half];
                        if constexpr (Layer::stride_x == 1) {
                            *reinterpret_cast<float2*>(to + 8 * j) = make_float2(even, odd);
                        } else {
                            to[8 * j * Layer::stride_x] = even;
                            to[(8 * j + 1) * Layer::stride_x] = odd;
                        }
                    }
                }
                __syncwarp();
                int channel = first_channel + pass * pass_channels;
                float* line = static_cast<float*>(arguments.destination) +
                              at.image * arguments.destination_stride_n +
                              (Index(at.group) * Layer::out_channels + channel) *
                                  arguments.destination_stride_c +
                              out_y * arguments.destination_stride_h + left;
                writer.write(outputs, line,
                             Layer::out_channels % Layer::warp_channels == 0
                                 ? pass_channels
                                 : min(pass_channels, Layer::out_channels - channel));
                __syncwarp();
            }
        }
    }
}

TCONV_DEVICE void consume(const Arguments& arguments, Shared& shared, int warp) {
    int ring = warp / 4 - 1;
    bool aligned = (arguments.destination_stride_n | arguments.destination_stride_c |
                    arguments.destination_stride_h) %
                           Layer::vector ==
                       0 &&
                   reinterpret_cast<uintptr_t>(arguments.destination) % (4 * Layer::vector) == 0;
    if constexpr (Layer::resident) ptx::mbarrier_wait_parity(&shared.weights_full, 0);
    Turns turns;
    Index step = Index(gridDim.x) * rings;
    auto begin = [&](Index tile) {
        if (!staged || warp % 4 != 0 || tile >= arguments.tiles) return;
        int m_group = int(tile % Layer::m_groups);
        int group = int(tile / Layer::m_groups % Layer::groups);
        prepare_class<0>(m_group, packed_weights(m_group, group, arguments), shared, warp, turns);
    };
    Index first = Index(blockIdx.x) * rings + ring;
    begin(first);
    for (Index tile = first; tile < arguments.tiles; tile += step) {
        Position at(tile, arguments);
        Sums sums;
#pragma unroll
        for (int m = 0; m < Layer::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < Layer::tile_rows; ++r) {
#pragma unroll
                for (int j = 0; j < columns / 2; ++j) sums[m][r][j] = 0.0f;
            }
        }
        multiply_class<0>(arguments, shared, at, warp, turns, sums);
        begin(tile + step);
#pragma unroll
        for (int m = 0; m < Layer::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < Layer::tile_rows; ++r) ptx::fence_registers(sums[m][r]);
        }
        if (aligned) {
            store<Layer::vector>(arguments, shared, at, warp, sums);
        } else {
            store<1>(arguments, shared, at, warp, sums);
        }
    }
}

// One thread asks for the weights of all chunks.
TCONV_DEVICE void load_weights(const Arguments& arguments, Shared& shared) {
    ptx::mbarrier_arrive_expect_tx(&shared.weights_full, resident_words * 4);
    for (int first = 0; first < resident_words; first += chunk_words) {
        ptx::cp_async_bulk_global_to_shared(
            shared.weights + first, static_cast<const uint32_t*>(arguments.packed) + first,
            chunk_words * 4, &shared.weights_full);
    }
}

// The kernel, from its first line to its last.
TCONV_DEVICE void run_block(const Arguments& arguments, unsigned char* memory) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        for (int ring = 0; ring < rings; ++ring) {
            for (int slot = 0; slot < Layer::raw_stages; ++slot) {
                ptx::mbarrier_init(&shared.raw_full[ring][slot], 1);
            }
            for (int stage = 0; stage < stages; ++stage) {
                ptx::mbarrier_init(&shared.full[ring][stage], producers / 32);
                ptx::mbarrier_init(&shared.empty[ring][stage], warpgroup / 32);
            }
        }
        ptx::mbarrier_init(&shared.weights_full, 1);
        for (int ring = 0; ring < rings; ++ring) {
            for (int slot = 0; slot < weight_slots; ++slot) {
                ptx::mbarrier_init(&shared.slot_full[ring][slot], 1);
                ptx::mbarrier_init(&shared.slot_empty[ring][slot], warpgroup);
            }
        }
        ptx::fence_mbarrier_init();
        for (uint32_t& word : shared.zeros) word = 0;
    }
    __syncthreads();
    // NOTE: the same in all lanes, and known to be so before roles part: what follows from it then
    // stays in uniform registers, where wgmma takes its descriptors from.
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp < warpgroup / 32) {
        if constexpr (Layer::shares) ptx::setmaxnreg_dec<producer_registers>();
        produce<Layer::tensor_map>(arguments, shared, warp);
    } else {
        if constexpr (Layer::shares) ptx::setmaxnreg_inc<consumer_registers>();
        // The packing may still run; only these threads read what it writes, or ask for copies of it.
        ptx::griddepcontrol_wait();
        if constexpr (Layer::resident) {
            if (threadIdx.x == warpgroup) load_weights(arguments, shared);
        }
        consume(arguments, shared, warp);
    }
}

}  // namespace
