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
// them. Resident, they lie in shared memory from the block's start to its end; else each consumer
// copies them there in the order of use, a few pairs at a time. Pixels are B, from shared memory,
// [pixel][8 channels] with 32-byte swizzle: a slot is another start address in the same staged patch.
//
// Layer::half: operands are float16 instead, with TF32's significand, and 16 channels are what is 8
// here, brought 8 at a time. Tiles that float16 cannot hold the block computes again when it has done all
// others, with Layer::repair (common/sm90_patch_repairs.cuh).
//
//   warpgroup 0: producers, two warps for each consumer: take the patch's next 8 channels from
//                device memory (zero beyond the image), round, store as [pixel][8 channels]
//   warpgroups 1, 2: consumers, each with tiles and a ring of stages of its own, so that one's
//                epilogue runs beside the other's products
//
// Layer::rings is 1 where both consumers multiply the same patches, and all producers bring those: the
// second consumer has the rows below the first's.
//
// A tile is m_tiles x 64 rows by tile_rows x tile_columns pixels of one image and group.
#include <common/sm90_patches.cuh>
#include <ptx/registers.cuh>

namespace {

// A class is a sequence of (m_tile, slot) pairs; weights are held `ahead` pairs before their product.
template <int row_class>
struct Class {
    static constexpr int begin = Layer::class_begin[row_class];
    static constexpr int count = Layer::class_begin[row_class + 1] - begin;
    static constexpr int ahead = Layer::class_ahead[row_class];
    static constexpr int unroll = Layer::class_unroll[row_class];
    static_assert(count > 0, "every row group has a slot");
    static_assert(count * unroll % ahead == 0 && chunks % unroll == 0,
                  "a pair's registers are known when it is compiled");
    static_assert(ahead <= count * unroll, "at most the next turn's weights are asked for");
    using Staged = StagedWeights<ahead, count * chunks / ahead>;
};

template <int row_class>
TCONV_DEVICE void prepare(const uint32_t* weights, Shared& shared, int warp, const Turns& turns) {
    if constexpr (staged) {
        Class<row_class>::Staged::ask_first(weights, shared, warp, turns.weights);
    }
}

// The weights of a class's pairs, one after the other, into registers.
template <int row_class, bool by_copies>
struct Weights {
    using Of = Class<row_class>;
    ResidentWeights<Of::unroll> weights;

    TCONV_DEVICE Weights(const Position& at, const Arguments& arguments, Shared& shared, int warp,
                         Turns&)
        : weights(at, arguments, shared, warp) {}

    // Pairs are counted from the first of the stages unrolled together.
    TCONV_DEVICE void load(uint32_t (&into)[4], int pair, bool) {
        uint4 loaded = weights.load(Of::begin + pair % Of::count, pair / Of::count);
        into[0] = loaded.x, into[1] = loaded.y, into[2] = loaded.z, into[3] = loaded.w;
    }

    TCONV_DEVICE void release(int) {}

    TCONV_DEVICE void advance(bool others) { weights.advance(others); }
};

template <int row_class>
struct Weights<row_class, true> {
    using Of = Class<row_class>;
    typename Of::Staged weights;

    TCONV_DEVICE Weights(const Position& at, const Arguments& arguments, Shared& shared, int warp,
                         Turns& turns)
        : weights(at, arguments, shared, warp, turns.weights) {}

    // `others`: whether more stages follow those unrolled together, else there may be no such pair.
    TCONV_DEVICE void load(uint32_t (&into)[4], int pair, bool others) {
        bool exists = pair < Of::count * Of::unroll || others;
        if (pair % Of::ahead == 0 && pair > 0) weights.turn.advance();
        if (pair % Of::ahead == 0 && exists) weights.wait();
        if (!exists) return;
        uint4 loaded = weights.load(pair);
        into[0] = loaded.x, into[1] = loaded.y, into[2] = loaded.z, into[3] = loaded.w;
    }

    // After this pair's products.
    TCONV_DEVICE void release(int pair) {
        if (pair % Of::ahead != Of::ahead - 1) return;
        weights.hand_back();
        if (Of::ahead == 1 && pair == Of::count * Of::unroll - 1) weights.turn.advance();
    }

    TCONV_DEVICE void advance(bool) {}
};

TCONV_DEVICE void multiply_row(float (&sums)[columns / 2], const uint32_t (&weights)[4],
                               uint64_t pixels) {
    if constexpr (Layer::half) {
        ptx::wgmma_m64k16_f16<columns>(sums, weights, pixels, true);
    } else {
        ptx::wgmma_m64k8_tf32<columns>(sums, weights, pixels, true);
    }
}

// The products of one tile.
template <int row_class>
TCONV_DEVICE void multiply(const Arguments& arguments, Shared& shared, const Position& at, int warp,
                           Turns& turns, Sums& sums) {
    int ring = (warp / 4 - 1) % rings;
    using Of = Class<row_class>;
    constexpr int begin = Of::begin, count = Of::count, ahead = Of::ahead, unroll = Of::unroll;
    Weights<row_class, staged> weights(at, arguments, shared, warp, turns);
    auto& turn = turns.pixels;
    const int patch_row = arguments.patch_row;
    const int first_row = at.own * Layer::tile_rows * Layer::row_step;  // of the patch
    uint32_t a[ahead][4];
#pragma unroll
    for (int i = 0; i < ahead - 1; ++i) weights.load(a[i], i, true);
    uint64_t* used = nullptr;  // the stage before, to be handed back
    // NOTE: where no loop is left, ptxas waits for each row's products by itself (C7517).
    const int end = chunks == unroll ? int(ptx::opaque(uint32_t(chunks))) : chunks;
#pragma unroll 1
    for (int chunk = 0; chunk < end; chunk += unroll) {
        bool others = chunk + unroll < chunks;
#pragma unroll
        for (int u = 0; u < unroll; ++u) {
            ptx::mbarrier_wait_parity(&shared.full[ring][turn.stage], turn.parity);
            uint64_t pixels =
                ptx::matrix_descriptor(shared.pixels[ring][turn.stage], 16, 8 * pixel_bytes,
                                       ptx::Swizzle::bytes_32);
            uint32_t first = static_cast<uint32_t>(pixels);  // the half that varies
            first += first_row * patch_row;
            int row = 0;  // behind it, where `first` points
            constexpr int unrolled = Layer::rolled ? 1 : count;
#pragma unroll unrolled
            for (int p = 0; p < count; ++p) {
                constexpr auto& m_tile = Layer::pair_m_tile;
                constexpr auto& pixel = Layer::pair_pixel;
                int now = (u * count + p) % ahead;
                int then = (u * count + p + ahead - 1) % ahead;
                if constexpr (ahead == 1) weights.load(a[0], u * count + p, others);
                // NOTE: by an argument, which ptxas does not know to be constant: slots share start
                // addresses with other rows of other slots, and it would compute each once and keep
                // it, two registers an address, until it spills.
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
                    weights.load(a[then], u * count + p + ahead - 1, others);
                }
                weights.release(u * count + p);
                // The stage before was last read by products that are over now.
                if (p == 0 && used != nullptr) arrive(used);
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
