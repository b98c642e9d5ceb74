// Producers: they load 8 channels of a patch at a time, round or split them, and fill a ring of
// stages.
#pragma once

#include <common/float16_operands.cuh>
#include <common/sm90_patch_order.cuh>
#include <common/sm90_patch_repairs.cuh>
#include <common/sm90_patch_tiles.cuh>
#include <common/split.cuh>
#include <ptx/barrier.cuh>
#include <ptx/bulk.cuh>
#include <ptx/convert.cuh>
#include <ptx/memory.cuh>
#include <ptx/registers.cuh>
#include <ptx/tensor_map.cuh>

namespace {

using float16_operands::Scale;

// Rounds or splits 8 channels of a pixel into its part of the stage. The stage has a 32-byte
// swizzle: bit 4 of the address is exclusive-ored with bit 7.
TCONV_DEVICE void store_pixel(unsigned char* stage, int pixel, int part,
                              const float (&values)[part_channels], [[maybe_unused]] Scale scale) {
    int swapped = pixel >> 2 & 1;
    const float* v = values;
    auto* to = reinterpret_cast<uint32_t*>(stage + pixel * pixel_bytes);
    if constexpr (Layer::half && Layer::split) {
        float factor = scale.factor();
        float16_operands::Parts a(v[0] * factor, v[1] * factor), b(v[2] * factor, v[3] * factor),
            c(v[4] * factor, v[5] * factor), d(v[6] * factor, v[7] * factor);
        uint32_t* into = to + (part ^ swapped) * 4;
        ptx::st_shared_v4(into, make_uint4(a.high, b.high, c.high, d.high));
        ptx::st_shared_v4(into + patch_bytes / 4, make_uint4(a.low, b.low, c.low, d.low));
    } else if constexpr (Layer::split) {
        // Channels t and t + 4 go together: a thread holds a fragment of weights in this order.
        Split a(v[0], v[4]), b(v[1], v[5]), c(v[2], v[6]), d(v[3], v[7]);
        uint4 high = make_uint4(a.high, b.high, c.high, d.high);
        uint32_t* first = to + swapped * 4;
        uint32_t* second = to + (swapped ^ 1) * 4;
        ptx::st_shared_v4(first, high);
        ptx::st_shared_v4(second, make_uint4(a.middle, b.middle, c.middle, d.middle));
        ptx::st_shared_v4(first + patch_bytes / 4, make_uint4(a.low, b.low, c.low, d.low));
        ptx::st_shared_v4(second + patch_bytes / 4, high);
    } else if constexpr (Layer::half) {
        ptx::st_shared_v4(to + (part ^ swapped) * 4,
                          make_uint4(ptx::cvt_rna_f16x2_f32(v[0], v[1], scale.exponent),
                                     ptx::cvt_rna_f16x2_f32(v[2], v[3], scale.exponent),
                                     ptx::cvt_rna_f16x2_f32(v[4], v[5], scale.exponent),
                                     ptx::cvt_rna_f16x2_f32(v[6], v[7], scale.exponent)));
    } else {
#pragma unroll
        for (int h = 0; h < 2; ++h, v += 4) {
            ptx::st_shared_v4(to + (h ^ swapped) * 4, make_uint4(tf32_bits(v[0]), tf32_bits(v[1]),
                                                                 tf32_bits(v[2]), tf32_bits(v[3])));
        }
    }
}

// The float16 pixels of a tile: their scale, a power of two, and what a thread has seen of them.
template <bool half>
struct OperandsIn {
    Scale scale{0};

    // `sampled` is the bits of a sample's largest magnitude. It is the same for all threads that
    // load the tile's pixels. The thread with `tells` passes the scale on to the consumers.
    TCONV_DEVICE void begin(Shared& shared, int ring, bool tells, uint32_t sampled) {
        scale = Scale::of_sample(sampled, Layer::split ? 13 : 12);
        if (tells) shared.units[ring][shared.scaled[ring]++ % order_size] = scale.unit();
    }

    TCONV_DEVICE void add(const float (&values)[part_channels]) { seen.add(values, scale); }

    // Called after the tile: notes whether float16 holds the pixels that this warp loaded.
    TCONV_DEVICE void note(const Arguments& arguments, Shared& shared, Index tile, int warp) const {
        uint32_t unfit = scale.holds(seen.largest()) ? seen.slight : most_slight + 1;
        unfit = ptx::redux_sync_add_u32(unfit);
        bool fits = unfit <= most_slight;
        if (!Layer::split && unfit > 0 && are_few(arguments)) fits = false;
        // An output of few products shows what split products leave out.
        if constexpr (Layer::split)
            fits = fits && int(ptx::redux_sync_add_u32(uint32_t(seen.lone))) <= 0;
        if (threadIdx.x % 32 == 0 &&
            (fits ? warp % tile_warps == 0 : finds_first(shared, tile, warp))) {
            chain_up(arguments, fits ? shared.repairs.others : shared.repairs.unfit, tile, warp);
        }
    }

private:
    // An octet is 8 channels of a pixel. `most_slight` is how many octets with a slight value
    // chance may bring to a warp's part of a tile.
    // Not split: one. Chance brings more once in 10^7 parts.
    // Split: 1 value in 10^4 is slight, and hardly ever alone in its octet. Of octets that hold
    // only slight values, chance brings one or two. A pixel whose values are all slight does not
    // pass.
    // A call of few octets may have none.
    static constexpr uint32_t octets = uint32_t(patch_pixels) * chunks * parts / tile_warps;
    static constexpr uint32_t most_slight = Layer::split ? 8 + octets / 128 : 1;
    static constexpr uint32_t of_pixel = (Layer::in_channels + 7) / 8;
    static constexpr uint32_t dark =
        Layer::split ? most_slight / (of_pixel < 3 ? of_pixel : 3) + 1 : 1;

    // Whether the call has so few octets that chance brings no slight value: 1 call in 1.3 * 10^6
    // has one. FEW_OCTETS is the same bound of the flat kernel.
    TCONV_DEVICE static bool are_few(const Arguments& arguments) {
        constexpr float few = 1024.0f, of_pixel = Layer::groups * ((Layer::in_channels + 7) / 8);
        float of_image = of_pixel * float(arguments.source_height) * float(arguments.source_width);
        float tiles_of_image =
            float(Layer::groups * Layer::m_groups * arguments.tiles_y) * float(arguments.tiles_x);
        return of_image * float(arguments.tiles) <= few * tiles_of_image;
    }

    float16_operands::Seen<Layer::split, dark> seen;
};

// Tiles in TF32 or bfloat16 need no scale.
template <>
struct OperandsIn<false> {
    Scale scale{0};

    template <typename Memory>
    TCONV_DEVICE void begin(Memory&, int, bool, uint32_t) {}
    TCONV_DEVICE void add(const float (&)[part_channels]) {}
    TCONV_DEVICE void note(const Arguments&, Shared&, Index, int) const {}
};

using TileOperands = OperandsIn<Layer::half>;

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

// Loads pixels through registers, for any strides. The next batch of loads is under way while one
// batch is stored.
template <typename Fields>
TCONV_DEVICE void produce_by_loads(const Fields& arguments, Shared& shared, int warp) {
    constexpr Index outside = -1;
    // Pixels that a thread loads at a time, in two buffers of 8 values each.
    constexpr int most_batch = !Layer::split ? 4 : Layer::half ? 3 : 1;
    constexpr int batches = (thread_pixels + most_batch - 1) / most_batch;
    constexpr int batch_pixels = (thread_pixels + batches - 1) / batches;
    int ring = warp * 32 / producers;
    int thread = threadIdx.x % producers;
    Turn<stages> turn;
    Tiles tiles(arguments, shared, ring);
    while (tiles.next() < arguments.tiles) {
        Position at(tiles.now(), arguments);
        Patch patch(at, arguments);
        TileOperands operands;
        // The offset of each of this thread's pixels in a channel. The offsets lie in shared
        // memory, to keep the registers for loads. No other thread reads them.
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
        float values[2][batch_pixels][part_channels];
        auto load = [&](float (&into)[batch_pixels][part_channels], int chunk, int batch) {
            const float* base =
                patch.channels + Index(chunk) * part_channels * arguments.source_stride_c;
#pragma unroll
            for (int b = 0; b < batch_pixels; ++b) {
                int i = batch * batch_pixels + b;
                Index offset = i < thread_pixels ? offsets[i * producers] : outside;
#pragma unroll
                for (int c = 0; c < part_channels; ++c) {
                    bool inside =
                        offset != outside && (Layer::in_channels % channels_per_stage == 0 ||
                                              chunk * part_channels + c < Layer::in_channels);
                    into[b][c] = inside ? base[offset + c * arguments.source_stride_c] : 0.0f;
                }
            }
        };
        load(values[0], 0, 0);
        if constexpr (Layer::half) {
            // The sample is what each warp has of the first batch.
            float of_thread = 0.0f;
#pragma unroll
            for (int b = 0; b < batch_pixels; ++b)
                of_thread = float16_operands::largest(of_thread, values[0][b]);
            uint32_t (&sampled)[tile_warps] = shared.sampled[ring];
            uint32_t of_warp = float16_operands::largest_of_warp(__float_as_uint(of_thread));
            if (threadIdx.x % 32 == 0) sampled[warp % tile_warps] = of_warp;
            ptx::bar_sync(1 + ring, producers);
            uint32_t largest = 0;
#pragma unroll
            for (uint32_t of_one : sampled) largest = max(largest, of_one);
            ptx::bar_sync(1 + ring, producers);
            operands.begin(shared, ring, thread == 0, largest);
        }
        for (int chunk = 0; chunk < chunks * parts; chunk += 2) {
            // Two chunks a turn, so that a batch's buffer is known at compile time.
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (chunk + half >= chunks * parts) break;
                int part = half % parts;
                unsigned char* stage = shared.pixels[ring][turn.stage];
#pragma unroll
                for (int batch = 0; batch < batches; ++batch) {
                    constexpr int both = 2;
                    int now = (half * batches + batch) % both;
                    if (batch + 1 < batches) {
                        load(values[now ^ 1], chunk + half, batch + 1);
                    } else if (chunk + half + 1 < chunks * parts) {
                        load(values[now ^ 1], chunk + half + 1, 0);
                    }
                    if (batch == 0 && part == 0) {
                        ptx::mbarrier_wait_parity(&shared.empty[ring][turn.stage], turn.parity ^ 1);
                    }
#pragma unroll
                    for (int b = 0; b < batch_pixels; ++b) {
                        int pixel = thread + (batch * batch_pixels + b) * producers;
                        if (pixel >= patch_pixels) continue;
                        store_pixel(stage, pixel, part, values[now][b], operands.scale);
                        operands.add(values[now][b]);
                    }
                }
                if (part + 1 < parts) continue;
                ptx::fence_proxy_async_shared();
                arrive(&shared.full[ring][turn.stage]);
                turn.advance();
            }
        }
        operands.note(arguments, shared, tiles.now(), warp);
    }
}

// The bits of the largest of 256 values of a raw patch, the same values for each warp. A template,
// as Finder is.
template <int lane_values = 8>
TCONV_DEVICE uint32_t sample(const float* raw) {
    constexpr int each = patch_pixels * part_channels / (32 * lane_values);
    static_assert(each > 0, "the patch has as many");
    constexpr int step = (each - 1) | 1;  // odd, so that lanes read different banks
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < lane_values; ++i) {
        largest = ptx::max_nan_f32(largest, fabsf(raw[(i * 32 + threadIdx.x % 32) * step]));
    }
    return float16_operands::largest_of_warp(__float_as_uint(largest));
}

// Loads pixels by tensor map, for rows aligned to 16 bytes. The copy engine loads raw patches,
// `raw_stages` of them ahead; the threads only transpose them.
template <typename Fields>
TCONV_DEVICE void produce_by_map(const Fields& arguments, Shared& shared, int warp) {
    constexpr int buffers = Layer::rolled ? 1 : 2;
    // Counting and splitting take registers too: with a larger batch they spill.
    constexpr int most_batch = Layer::split ? 1 : 2;
    constexpr int batches = (thread_pixels + most_batch - 1) / most_batch;
    constexpr int batch_pixels = (thread_pixels + batches - 1) / batches;
    int ring = warp * 32 / producers;
    int thread = threadIdx.x % producers;
    Tiles tiles(arguments, shared, ring);
    TileFinder finder(arguments, shared, ring);
    if (thread == 0) finder.begin();

    // The next copy that thread 0 issues.
    int asked_chunk = 0;
    int asked_x = 0, asked_y = 0, asked_channel = 0, asked_image = 0;
    auto ask = [&](int slot) {
        if (thread != 0 || finder.now() >= arguments.tiles) return;
        if (asked_chunk == 0) {
            Position at(finder.now(), arguments);
            asked_x = at.first_q_x() - Layer::shift_right - Layer::skew;
            asked_y = Layer::row_step * at.first_q_y() - Layer::shift_bottom;
            asked_channel = at.group * Layer::in_channels;
            asked_image = int(at.image);
        }
        uint64_t* barrier = &shared.raw_full[ring][slot];
        ptx::mbarrier_arrive_expect_tx(barrier, raw_bytes);
        ptx::cp_async_bulk_tensor_4d_global_to_shared(
            shared.raw[ring][slot], &arguments.source_map, asked_x, asked_y,
            asked_channel + asked_chunk * part_channels, asked_image, barrier);
        if (++asked_chunk == chunks * parts) {
            asked_chunk = 0;
            finder.advance();
        }
    };
    for (int slot = 0; slot < Layer::raw_stages; ++slot) ask(slot);

    Turn<stages> turn;
    int slot = 0;
    uint32_t raw_parity = 0;
    while (tiles.next() < arguments.tiles) {
        TileOperands operands;
        for (int chunk = 0; chunk < chunks * parts; ++chunk) {
            int part = chunk % parts;
            const float* raw = reinterpret_cast<const float*>(shared.raw[ring][slot]);
            unsigned char* stage = shared.pixels[ring][turn.stage];
            ptx::mbarrier_wait_parity(&shared.raw_full[ring][slot], raw_parity);
            if constexpr (Layer::half) {
                if (chunk == 0) operands.begin(shared, ring, thread == 0, sample(raw));
            }
            if (part == 0) {
                ptx::mbarrier_wait_parity(&shared.empty[ring][turn.stage], turn.parity ^ 1);
            }
            // A store is a barrier to the compiler, so loads that are to overlap precede it.
            float values[buffers][batch_pixels][part_channels];
            auto load = [&](float (&into)[batch_pixels][part_channels], int batch) {
#pragma unroll
                for (int b = 0; b < batch_pixels; ++b) {
                    int pixel = thread + (batch * batch_pixels + b) * producers;
                    const float* from = raw + min(pixel, patch_pixels - 1);
#pragma unroll
                    for (int c = 0; c < part_channels; ++c) {
                        // The next group's channels follow this group's. Behind the last group's,
                        // the copy engine writes zeros.
                        bool exists = Layer::groups == 1 ||
                                      Layer::in_channels % channels_per_stage == 0 ||
                                      chunk * part_channels + c < Layer::in_channels;
                        into[b][c] = exists ? from[c * patch_pixels] : 0.0f;
                    }
                }
            };
            if constexpr (!Layer::rolled) load(values[0], 0);
            constexpr int unrolled = Layer::rolled ? 1 : batches;
#pragma unroll unrolled
            for (int batch = 0; batch < batches; ++batch) {
                if constexpr (Layer::rolled) {
                    load(values[0], batch);
                } else if (batch + 1 < batches) {
                    load(values[(batch + 1) % 2], batch + 1);
                }
#pragma unroll
                for (int b = 0; b < batch_pixels; ++b) {
                    int pixel = thread + (batch * batch_pixels + b) * producers;
                    if (pixel >= patch_pixels) continue;
                    store_pixel(stage, pixel, part, values[batch % buffers][b], operands.scale);
                    operands.add(values[batch % buffers][b]);
                }
            }
            if (part == parts - 1) {
                ptx::fence_proxy_async_shared();
                arrive(&shared.full[ring][turn.stage]);
                turn.advance();
            }
            ptx::bar_sync(1 + ring, producers);  // the raw patch has been read
            // Not before the first stage is on its way: the packing may still run.
            if (thread == 0 && chunk == parts - 1) finder.look_ahead();
            ask(slot);
            if (++slot == Layer::raw_stages) {
                slot = 0;
                raw_parity ^= 1;
            }
        }
        operands.note(arguments, shared, tiles.now(), warp);
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

}  // namespace
