// out[n, co, oy, ox] on Hopper's tensor cores: TF32 operands rounded to nearest, float32 sums.
//
// Rows of the matrix product are (phase in y, output channel, phase in x), columns are pixels of
// one row of the patch, depth is (slot, input channel): at a slot, one shift of both axes, every
// phase that has a tap there multiplies the same pixels. The 16 rows of a warp are one phase in y
// and warp_channels output channels with all their phases in x, so that a warp writes whole pieces
// of output rows. The phases in y are those of a stride of row_step * stride_y: layers with few
// output channels fill the 64 rows of a wgmma with several output rows.
//
// Weights are the wgmma's A, from registers: sm90_tf32_pack has laid them out as each thread needs
// them, in the order of use. Pixels are B, from shared memory, [pixel][8 channels] with 32-byte
// swizzle: a slot is another start address in the same staged patch.
//
//   warpgroup 0: producers, two warps for each consumer: take the patch's next 8 channels from
//                device memory (zero beyond the image), round, store as [pixel][8 channels]
//   warpgroups 1, 2: consumers, each with tiles and a ring of stages of its own, so that one's
//                epilogue runs beside the other's products
//
// A tile is m_tiles x 64 rows by tile_rows x tile_columns pixels of one image and group.
#include <ptx/barrier.cuh>
#include <ptx/bulk.cuh>
#include <ptx/convert.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/registers.cuh>
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

constexpr int columns = Layer::tile_columns;
constexpr int patch_pixels = Layer::patch_rows * Layer::patch_columns;
constexpr int stage_bytes = (patch_pixels * pixel_bytes + 255) / 256 * 256;
constexpr int thread_pixels = (patch_pixels + producers - 1) / producers;

// With a tensor map: the patch as it lies in the image, from the 16-byte boundary to its left on,
// [8 channels][patch rows][raw columns].
constexpr int skew = ((Layer::first_q_x - Layer::shift_right) % 4 + 4) % 4;
constexpr int raw_columns = (Layer::patch_columns + skew + 3) / 4 * 4;
constexpr int raw_channel = Layer::patch_rows * raw_columns;
constexpr int raw_bytes = channels_per_stage * raw_channel * 4;
static_assert(columns % 4 == 0, "tiles keep the skew");

constexpr int chunks = (Layer::in_channels + channels_per_stage - 1) / channels_per_stage;

// The epilogue's rows: one channel's pixels with all phases, padded so that the fragments' rows
// start 8 banks apart.
constexpr int out_columns = columns * Layer::stride_x;
constexpr int out_pitch = out_columns + (40 - out_columns % 32) % 32;

static_assert(columns % 8 == 0 && columns <= 256, "wgmma's N");
static_assert(Layer::m_tiles * Layer::tile_rows * columns / 2 <= 128, "the sums fit the registers");

struct Shared {
    alignas(1024) unsigned char pixels[rings][stages][stage_bytes];
    alignas(128) unsigned char raw[rings][Layer::raw_stages][(raw_bytes + 127) / 128 * 128];
    float outputs[rings * 4][Layer::warp_channels][out_pitch];
    Index offsets[rings][Layer::tensor_map ? 1 : thread_pixels * producers];
    uint64_t raw_full[rings][Layer::raw_stages];
    uint64_t full[rings][stages];
    uint64_t empty[rings][stages];
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

// The ring's next stage, and the parity of its turn.
struct Turn {
    int stage = 0;
    uint32_t parity = 0;

    TCONV_DEVICE void advance() {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
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

// Rounds one pixel's channels into the stage, with 32-byte swizzle: bit 4 of the address is
// exclusive-ored with bit 7.
TCONV_DEVICE void store_pixel(unsigned char* stage, int pixel,
                              const float (&values)[channels_per_stage]) {
    int swapped = pixel >> 2 & 1;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float* v = values + 4 * h;
        ptx::st_shared_v4(
            reinterpret_cast<uint32_t*>(stage + pixel * pixel_bytes + ((h ^ swapped) * 16)),
            make_uint4(ptx::cvt_rna_tf32_f32(v[0]), ptx::cvt_rna_tf32_f32(v[1]),
                       ptx::cvt_rna_tf32_f32(v[2]), ptx::cvt_rna_tf32_f32(v[3])));
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
          left(at.first_q_x() - Layer::shift_right) {}
};

// Any strides: through registers, the next batch of loads under way while one is stored.
template <typename Fields>
TCONV_DEVICE void produce_by_loads(const Fields& arguments, Shared& shared) {
    constexpr Index outside = -1;
    // Pixels of a thread under way, in two buffers of 8 values each.
    constexpr int most_batch = 4;
    constexpr int batches = (thread_pixels + most_batch - 1) / most_batch;
    constexpr int batch_pixels = (thread_pixels + batches - 1) / batches;
    int ring = threadIdx.x / producers;
    int thread = threadIdx.x % producers;
    Turn turn;
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
                ptx::mbarrier_arrive(&shared.full[ring][turn.stage]);
                turn.advance();
            }
        }
    }
}

// Rows on 16 bytes: the copy engine brings raw patches, raw_stages of them ahead, and the threads
// only transpose them.
template <typename Fields>
TCONV_DEVICE void produce_by_map(const Fields& arguments, Shared& shared) {
    int ring = threadIdx.x / producers;
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
            at.first_q_x() - Layer::shift_right - skew,
            Layer::row_step * at.first_q_y() - Layer::shift_bottom,
            at.group * Layer::in_channels + asked_chunk * channels_per_stage, int(at.image),
            barrier);
        if (++asked_chunk == chunks) {
            asked_chunk = 0;
            asked_tile += step;
        }
    };
    for (int slot = 0; slot < Layer::raw_stages; ++slot) ask(slot);

    Turn turn;
    int slot = 0;
    uint32_t raw_parity = 0;
    for (Index tile = first; tile < arguments.tiles; tile += step) {
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const float* raw = reinterpret_cast<const float*>(shared.raw[ring][slot]);
            unsigned char* stage = shared.pixels[ring][turn.stage];
            ptx::mbarrier_wait_parity(&shared.raw_full[ring][slot], raw_parity);
            ptx::mbarrier_wait_parity(&shared.empty[ring][turn.stage], turn.parity ^ 1);
#pragma unroll
            for (int i = 0; i < thread_pixels; ++i) {
                int pixel = thread + i * producers;
                if (pixel >= patch_pixels) break;
                const float* from = raw + pixel / Layer::patch_columns * raw_columns +
                                    pixel % Layer::patch_columns + skew;
                float values[channels_per_stage];
#pragma unroll
                for (int c = 0; c < channels_per_stage; ++c) {
                    // Beyond the group's channels lie the next group's.
                    bool exists = Layer::in_channels % channels_per_stage == 0 ||
                                  chunk * channels_per_stage + c < Layer::in_channels;
                    values[c] = exists ? from[c * raw_channel] : 0.0f;
                }
                store_pixel(stage, pixel, values);
            }
            ptx::fence_proxy_async_shared();
            ptx::mbarrier_arrive(&shared.full[ring][turn.stage]);
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
TCONV_DEVICE void produce(const Fields& arguments, Shared& shared) {
    if constexpr (tensor_map) {
        produce_by_map(arguments, shared);
    } else {
        produce_by_loads(arguments, shared);
    }
}

using Sums = float[Layer::m_tiles][Layer::tile_rows][columns / 2];

// The products of one tile. A class is a sequence of (m_tile, slot) pairs; weights stream in the
// order of use, held `ahead` pairs before their product.
template <int row_class>
TCONV_DEVICE void multiply(Shared& shared, int ring, Turn& turn, const uint32_t* weights,
                           Sums& sums) {
    constexpr int begin = Layer::class_begin[row_class];
    constexpr int count = Layer::class_begin[row_class + 1] - begin;
    static_assert(count > 0, "every row group has a slot");
    constexpr int ahead = Layer::class_ahead[row_class];
    constexpr int unroll = Layer::class_unroll[row_class];
    static_assert(count * unroll % ahead == 0 && chunks % unroll == 0,
                  "a pair's registers are known when it is compiled");
    uint32_t a[ahead][4];
    const uint32_t* next = weights + threadIdx.x % warpgroup * 4;
#pragma unroll
    for (int i = 0; i < ahead - 1; ++i) {
        uint4 loaded = *reinterpret_cast<const uint4*>(next);
        a[i][0] = loaded.x, a[i][1] = loaded.y, a[i][2] = loaded.z, a[i][3] = loaded.w;
        next += 4 * warpgroup;
    }
    uint64_t* used = nullptr;  // the stage before, to be handed back
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk += unroll) {
#pragma unroll
        for (int u = 0; u < unroll; ++u) {
            ptx::mbarrier_wait_parity(&shared.full[ring][turn.stage], turn.parity);
            uint64_t pixels =
                ptx::matrix_descriptor(shared.pixels[ring][turn.stage], 16, 8 * pixel_bytes,
                                       ptx::Swizzle::bytes_32);
            // Only the lower half varies, and is not to be computed for all slots at once.
            uint32_t first = ptx::opaque(static_cast<uint32_t>(pixels));
#pragma unroll
            for (int p = 0; p < count; ++p) {
                constexpr auto& m_tile = Layer::pair_m_tile;
                constexpr auto& pixel = Layer::pair_pixel;
                int now = (u * count + p) % ahead;
                int then = (u * count + p + ahead - 1) % ahead;
                if constexpr (ahead == 1) {
                    uint4 loaded = *reinterpret_cast<const uint4*>(next);
                    a[0][0] = loaded.x, a[0][1] = loaded.y, a[0][2] = loaded.z;
                    a[0][3] = loaded.w;
                    next += 4 * warpgroup;
                }
                ptx::wgmma_fence();
#pragma unroll
                for (int r = 0; r < Layer::tile_rows; ++r) {
                    int start = pixel[begin + p] + r * Layer::row_step * Layer::patch_columns;
                    ptx::wgmma_m64k8_tf32<columns>(
                        sums[m_tile[begin + p]][r], a[now],
                        (pixels >> 32 << 32) | (first + (start * pixel_bytes >> 4)), true);
                }
                ptx::wgmma_commit_group();
                if constexpr (ahead == 1) {
                    ptx::wgmma_wait_group<0>();
                } else {
                    // The registers of the pair before are free.
                    ptx::wgmma_wait_group<1>();
                    uint4 loaded = *reinterpret_cast<const uint4*>(next);
                    a[then][0] = loaded.x, a[then][1] = loaded.y;
                    a[then][2] = loaded.z, a[then][3] = loaded.w;
                    next += 4 * warpgroup;
                }
                // The stage before was last read by products that are over now.
                if (p == 0 && used != nullptr) ptx::mbarrier_arrive(used);
            }
            used = &shared.empty[ring][turn.stage];
            turn.advance();
        }
    }
    ptx::wgmma_wait_group<0>();
    ptx::mbarrier_arrive(used);
}

template <int row_class>
TCONV_DEVICE void multiply_class(int which, Shared& shared, int ring, Turn& turn,
                                 const uint32_t* weights, Sums& sums) {
    if constexpr (row_class < Layer::classes) {
        if (which == row_class) {
            multiply<row_class>(shared, ring, turn, weights, sums);
        } else {
            multiply_class<row_class + 1>(which, shared, ring, turn, weights, sums);
        }
    }
}

// Each warp interleaves its channels' phases in shared memory and writes pieces of whole rows.
TCONV_DEVICE void store(const Arguments& arguments, Shared& shared, const Position& at,
                        const Sums& sums) {
    constexpr int warp_channels = Layer::warp_channels;
    constexpr int phase_tiles = (Layer::out_channels + warp_channels - 1) / warp_channels;
    int lane = threadIdx.x % 32;
    int warp = threadIdx.x % warpgroup / 32;
    auto& outputs = shared.outputs[threadIdx.x / 32 - 4];
    int left = at.first_q_x() * Layer::stride_x - Layer::padding_x;
#pragma unroll
    for (int m = 0; m < Layer::m_tiles; ++m) {
        int warp_tile = (at.m_group * Layer::m_tiles + m) * 4 + warp;
        int phase_y = warp_tile / phase_tiles;
        int first_channel = (warp_tile - phase_y * phase_tiles) * warp_channels;
        if (phase_y >= Layer::stride_y * Layer::row_step) continue;
#pragma unroll
        for (int r = 0; r < Layer::tile_rows; ++r) {
            int out_y = (at.first_q_y() + r) * (Layer::stride_y * Layer::row_step) + phase_y -
                        Layer::padding_y;
            if (out_y < 0 || out_y >= arguments.destination_height) continue;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int row = lane / 4 + 8 * half;
                int channel = row / Layer::stride_x;
                if (channel >= warp_channels) continue;
                float* to = outputs[channel] + row % Layer::stride_x + lane % 4 * 2 * Layer::stride_x;
#pragma unroll
                for (int j = 0; j < columns / 8; ++j) {
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        to[(8 * j + k) * Layer::stride_x] = sums[m][r][4 * j + 2 * half + k];
                    }
                }
            }
            __syncwarp();
            float* line = static_cast<float*>(arguments.destination) +
                          at.image * arguments.destination_stride_n +
                          (Index(at.group) * Layer::out_channels + first_channel) *
                              arguments.destination_stride_c +
                          out_y * arguments.destination_stride_h + left;
            for (int channel = 0; channel < warp_channels; ++channel) {
                if (first_channel + channel >= Layer::out_channels) break;
                float bias = 0.0f;
                if constexpr (Layer::bias) {
                    bias = static_cast<const float*>(
                        arguments.bias)[at.group * Layer::out_channels + first_channel + channel];
                }
#pragma unroll
                for (int column = 0; column < out_columns; column += 32) {
                    int out_x = left + column + lane;
                    if (column + lane < out_columns && out_x >= 0 &&
                        out_x < arguments.destination_width) {
                        line[column + lane] = outputs[channel][column + lane] + bias;
                    }
                }
                line += arguments.destination_stride_c;
            }
            __syncwarp();
        }
    }
}

TCONV_DEVICE void consume(const Arguments& arguments, Shared& shared) {
    int ring = threadIdx.x / warpgroup - 1;
    Turn turn;
    for (Index tile = Index(blockIdx.x) * rings + ring; tile < arguments.tiles;
         tile += Index(gridDim.x) * rings) {
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
        const uint32_t* weights =
            static_cast<const uint32_t*>(arguments.packed) +
            (Index(at.group) * Layer::group_pairs + Layer::m_begin[at.m_group]) * chunks *
                (4 * warpgroup);
        multiply_class<0>(Layer::m_class[at.m_group], shared, ring, turn, weights, sums);
#pragma unroll
        for (int m = 0; m < Layer::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < Layer::tile_rows; ++r) ptx::fence_registers(sums[m][r]);
        }
        store(arguments, shared, at, sums);
    }
}

}  // namespace

TCONV_KERNEL(sm90_tf32_forward, Layer::threads, 1) {
    TCONV_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        for (int ring = 0; ring < rings; ++ring) {
            for (int slot = 0; slot < Layer::raw_stages; ++slot) {
                ptx::mbarrier_init(&shared.raw_full[ring][slot], 1);
            }
            for (int stage = 0; stage < stages; ++stage) {
                ptx::mbarrier_init(&shared.full[ring][stage], producers);
                ptx::mbarrier_init(&shared.empty[ring][stage], warpgroup);
            }
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < warpgroup) {
        produce<Layer::tensor_map>(arguments, shared);
    } else {
        consume(arguments, shared);
    }
}
