// out[n, co, oy, ox] on Hopper's tensor cores: TF32 operands rounded to nearest, float32 sums.
//
// Rows of the matrix product are (phase in y, output channel, phase in x). Columns are pixels of
// one row of the patch. Depth is (slot, input channel). A slot is one shift of both axes: every
// phase with a tap there multiplies the same pixels. The 16 rows of a warp are one phase in y and
// warp_channels output channels with all their phases in x, so a warp writes whole pieces of output
// rows. The phases in y are those of a stride of row_step * stride_y. So layers with few output
// channels fill the 64 rows of a wgmma with several output rows.
//
// Weights are operand A, from registers. sm90_tf32_pack has laid them out as each thread needs
// them. Resident weights stay in shared memory while the block runs. Otherwise each consumer copies
// them there in the order of use, a few pairs at a time. Pixels are operand B, from shared memory,
// [pixel][8 channels] with 32-byte swizzle. A slot is another start address in the same patch.
//
// Layer::half: operands are float16, which has TF32's significand. A stage has 16 channels, loaded
// 8 at a time. At its end, a block recomputes the tiles whose values float16 cannot hold, with
// Layer::repair (common/sm90_patch_repairs.cuh).
//
//   warpgroup 0: producers, two warps for each consumer. They load the patch's next 8 channels from
//                device memory (zero outside the image), round them, and store [pixel][8 channels].
//   warpgroups 1, 2: consumers. Each has its own tiles and its own ring of stages, so the epilogue
//                of one overlaps with the products of the other.
//
// Layer::rings is 1 if both consumers multiply the same patches, which all producers load. The
// second consumer then has the rows below the first's.
//
// A tile is m_tiles x 64 rows by tile_rows x tile_columns pixels of one image and group.
#include <common/sm90_patches.cuh>
#include <ptx/registers.cuh>

namespace {

// A class is a sequence of (m_tile, slot) pairs. Weights are loaded `ahead` pairs before their
// product. A stage of many pairs is a loop over parts, which compiles faster.
template <int row_class>
struct Class {
    static constexpr int begin = Layer::class_begin[row_class];
    static constexpr int stage_parts =
        Layer::class_parts[row_class];  // the same slots of x, further on in y
    static constexpr int count = (Layer::class_begin[row_class + 1] - begin) / stage_parts;
    static constexpr int ahead = Layer::class_ahead[row_class];
    static constexpr int unroll = Layer::class_unroll[row_class];
    static constexpr int copied = stage_parts > 1 ? count : ahead;  // pairs of a copy of weights
    static_assert(count > 0, "every row group has a slot");
    static_assert(stage_parts > 1 ? unroll == 1 && count % ahead != 1 : count * unroll % ahead == 0,
                  "a pair's registers are known when it is compiled");
    static_assert(chunks % unroll == 0 && ahead <= count * unroll,
                  "at most the next turn's weights are asked for");
    using Staged = StagedWeights<copied, stage_parts * count * chunks / copied>;

    // Pairs of the first m_tile, which the second's follow.
    TCONV_DEVICE static constexpr int of_first() {
        int pairs = 0;
        for (int i = 0; i < count; ++i) pairs += Layer::pair_m_tile[begin + i] == 0;
        return pairs;
    }
};

template <int row_class>
TCONV_DEVICE void prepare(const uint32_t* weights, Shared& shared, int warp, const Turns& turns) {
    if constexpr (staged) {
        Class<row_class>::Staged::ask_first(weights, shared, warp, turns.weights);
    }
}

// Loads the weights of a class's pairs into registers, in order.
template <int row_class, bool by_copies>
struct Weights {
    using Of = Class<row_class>;
    ResidentWeights<Of::unroll> weights;
    int slots = 0;  // in y, from the first part to the one whose weights are loaded
    int next_stage = 1;  // 0: another part of the stage follows

    TCONV_DEVICE Weights(const Position& at, const Arguments& arguments, Shared& shared, int warp,
                         Turns&)
        : weights(at, arguments, shared, warp) {}

    // Pairs count from the first of the stages that are unrolled together.
    TCONV_DEVICE void load(uint32_t (&into)[4], int pair, bool) {
        uint4 loaded;
        if constexpr (Of::stage_parts == 1) {
            loaded = weights.load(Of::begin + pair % Of::count, pair / Of::count);
        } else {
            loaded =
                weights.load(Of::begin + pair % Of::count, pair / Of::count * next_stage, 0, slots);
        }
        into[0] = loaded.x, into[1] = loaded.y, into[2] = loaded.z, into[3] = loaded.w;
    }

    TCONV_DEVICE void release(int) {}

    // From the next pair on, the weights of another part.
    TCONV_DEVICE void next_part(bool last) {
        slots = last ? 0
                     : slots + Layer::pair_slot_y[Of::begin + Of::count] -
                           Layer::pair_slot_y[Of::begin];
        next_stage = last;
    }

    TCONV_DEVICE void advance(bool others) { weights.advance(others); }
};

template <int row_class>
struct Weights<row_class, true> {
    using Of = Class<row_class>;
    typename Of::Staged weights;

    TCONV_DEVICE Weights(const Position& at, const Arguments& arguments, Shared& shared, int warp,
                         Turns& turns)
        : weights(at, arguments, shared, warp, turns.weights) {}

    // `others`: whether more parts or stages follow those unrolled together. If not, the pair may
    // not exist.
    TCONV_DEVICE void load(uint32_t (&into)[4], int pair, bool others) {
        bool exists = pair < Of::count * Of::unroll || others;
        if (pair % Of::copied == 0 && pair > 0) weights.turn.advance();
        if (pair % Of::copied == 0 && exists) weights.wait();
        if (!exists) return;
        uint4 loaded = weights.load(pair);
        into[0] = loaded.x, into[1] = loaded.y, into[2] = loaded.z, into[3] = loaded.w;
    }

    // After this pair's products.
    TCONV_DEVICE void release(int pair) {
        if (pair % Of::copied != Of::copied - 1) return;
        weights.hand_back();
        if (Of::ahead == 1 && pair == Of::count * Of::unroll - 1) weights.turn.advance();
    }

    TCONV_DEVICE void next_part(bool) {}
    TCONV_DEVICE void advance(bool) {}
};

TCONV_DEVICE void multiply_row(float (&sums)[columns / 2], const uint32_t (&weights)[4],
                               uint64_t pixels) {
    if constexpr (Layer::half) {
        ptx::wgmma_m64k16<false, columns>(sums, weights, pixels, true);
    } else {
        ptx::wgmma_m64k8_tf32<columns>(sums, weights, pixels, true);
    }
}

// As loops over pairs. The weights of a pair are loaded when it is multiplied.
template <int row_class>
TCONV_DEVICE void multiply_rolled(const Arguments& arguments, Shared& shared, const Position& at,
                                  int warp, Turns& turns, Sums& sums) {
    using Of = Class<row_class>;
    Weights<row_class, staged> weights(at, arguments, shared, warp, turns);
    auto& turn = turns.pixels;
    int ring = (warp / 4 - 1) % rings;
    int first_row = at.own * Layer::tile_rows * Layer::row_step;  // of the patch
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        ptx::mbarrier_wait_parity(&shared.full[ring][turn.stage], turn.parity);
        uint64_t pixels = ptx::matrix_descriptor(shared.pixels[ring][turn.stage], 16,
                                                 8 * pixel_bytes, ptx::Swizzle::bytes_32);
#pragma unroll
        for (int m = 0; m < Layer::m_tiles; ++m) {
            constexpr int of_first = Of::of_first();
#pragma unroll 1
            for (int pair = m == 0 ? 0 : of_first; pair < (m == 0 ? of_first : Of::count); ++pair) {
                uint32_t a[4];
                weights.load(a, pair, true);
                int first = first_row * Layer::patch_columns + Layer::pair_pixel[Of::begin + pair];
                ptx::wgmma_fence();
#pragma unroll
                for (int r = 0; r < Layer::tile_rows; ++r) {
                    int pixel = first + r * Layer::row_step * Layer::patch_columns;
                    multiply_row(sums[m][r], a, pixels + (pixel * pixel_bytes >> 4));
                }
                ptx::wgmma_commit_group();
                ptx::wgmma_wait_group<0>();
                weights.release(pair);
            }
        }
        arrive(&shared.empty[ring][turn.stage]);
        turn.advance();
    }
}

template <int row_class>
TCONV_DEVICE void multiply_unrolled(const Arguments& arguments, Shared& shared, const Position& at,
                                    int warp, Turns& turns, Sums& sums) {
    int ring = (warp / 4 - 1) % rings;
    using Of = Class<row_class>;
    constexpr int begin = Of::begin, count = Of::count, ahead = Of::ahead, unroll = Of::unroll;
    constexpr int stage_parts = Of::stage_parts;
    Weights<row_class, staged> weights(at, arguments, shared, warp, turns);
    auto& turn = turns.pixels;
    const int patch_row = arguments.patch_row;
    const int first_row = at.own * Layer::tile_rows * Layer::row_step;  // of the patch
    uint32_t a[ahead][4];
#pragma unroll
    for (int i = 0; i < (stage_parts > 1 ? 1 : ahead - 1); ++i) weights.load(a[i], i, true);
    uint64_t* used = nullptr;  // the stage before, to be released
    // The products of a part. `first` is half of the start address of its row 0, then of the next
    // part's.
    auto multiply_part = [&](int u, uint64_t pixels, uint32_t& first, bool last, bool others) {
        int row = 0;  // the row after it, where `first` points
#pragma unroll
        for (int p = 0; p < count; ++p) {
            constexpr auto& m_tile = Layer::pair_m_tile;
            constexpr auto& pixel = Layer::pair_pixel;
            int now = (u * count + p) % ahead;
            if constexpr (ahead == 1) weights.load(a[0], u * count + p, others);
            // NOTE: ptxas must not know that the step is constant, so it is an argument. Slots
            // share start addresses with rows of other slots. ptxas would keep each in two
            // registers, until it spills.
            first += (pair_row(begin + p) - row) * patch_row;
            row = pair_row(begin + p);
            ptx::wgmma_fence();
#pragma unroll
            for (int r = 0; r < Layer::tile_rows; ++r) {
                int start = pixel[begin + p] % Layer::patch_columns +
                            r * Layer::row_step * Layer::patch_columns;
                multiply_row(sums[m_tile[begin + p]][r], a[now],
                             (pixels >> 32 << 32) | (first + (start * pixel_bytes >> 4)));
            }
            ptx::wgmma_commit_group();
            if constexpr (ahead == 1) {
                ptx::wgmma_wait_group<0>();
            } else {
                // The registers of the pair before are free.
                ptx::wgmma_wait_group<1>();
                int next = u * count + p + ahead - 1;
                if constexpr (stage_parts == 1) {
                    weights.load(a[next % ahead], next, others);
                } else {
                    // The first of a part is loaded with the last of the part before, the others
                    // with that first.
#pragma unroll
                    for (int i = 1; i < ahead; ++i) {
                        if (p == 0 || (i == ahead - 1 && next < count))
                            weights.load(a[(p + i) % ahead], p + i, true);
                    }
                    if (p == count - 1) {
                        weights.next_part(last);
                        weights.load(a[0], count, !last || others);
                    }
                }
            }
            weights.release(u * count + p);
            // The products that read the stage before have ended.
            if (p == 0 && used != nullptr) {
                arrive(used);
                if constexpr (stage_parts > 1) used = nullptr;
            }
        }
        if constexpr (stage_parts > 1)
            first += (pair_row(begin + count) - pair_row(begin) - row) * patch_row;
    };
    // NOTE: without any loop, ptxas waits for each row's products (C7517).
    const int end = chunks == unroll ? int(ptx::opaque(uint32_t(chunks))) : chunks;
    // NOTE: ptxas unrolls a loop of two iterations, whatever the pragma says.
    const int last_part = int(ptx::opaque(uint32_t(stage_parts)));
#pragma unroll 1
    for (int chunk = 0; chunk < end; chunk += unroll) {
        bool others = chunk + unroll < chunks;
#pragma unroll
        for (int u = 0; u < unroll; ++u) {
            ptx::mbarrier_wait_parity(&shared.full[ring][turn.stage], turn.parity);
            uint64_t pixels = ptx::matrix_descriptor(shared.pixels[ring][turn.stage], 16,
                                                     8 * pixel_bytes, ptx::Swizzle::bytes_32);
            uint32_t first = static_cast<uint32_t>(pixels);  // the half that varies
            first += first_row * patch_row;
            if constexpr (stage_parts == 1) {
                multiply_part(u, pixels, first, true, others);
            } else {
#pragma unroll 1
                for (int part = 1; part <= last_part; ++part) {
                    multiply_part(0, pixels, first, part == last_part, others);
                }
            }
            used = &shared.empty[ring][turn.stage];
            turn.advance();
        }
        weights.advance(chunk + 2 * unroll < chunks);
    }
    ptx::wgmma_wait_group<0>();
    arrive(used);
}

}  // namespace

#ifndef TCONV_INNER
TCONV_KERNEL(sm90_tf32_forward, Layer::threads, 1) {
    TCONV_DYNAMIC_SHARED(memory);
    run_block(arguments, memory);
}
#endif
