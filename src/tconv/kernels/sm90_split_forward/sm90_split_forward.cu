// out[n, co, oy, ox] of strict float32 on Hopper's tensor cores: three products of float16 for one.
// A value is high + low, both float16. Pixels and weights are scaled so that float16 holds low.
//
// Rows, columns, depth, patches and tiles are those of sm90_tf32_forward in float16
// (<common/sm90_patches.cuh>). Producers store two patches in a stage. Weights are packed as parts.
//
// A block recomputes tiles whose values do not fit, as sm90_tf32_forward does, but in bfloat16: six
// products for one, two at a time (<common/split.cuh>), 8 channels in a stage. These weights are
// packed whole. A consumer splits its fragments in registers.
//
// The tensor cores truncate their sums after every product. After 100 products that would show. So
// the products of one row with a group of `most_group` slots or fewer go to a temporary sum. Small
// products come first, while there is little to truncate. The temporary is then added to the row's
// sums in float32. With two temporaries, one row is multiplied while the other is added.
#include <common/sm90_patches.cuh>

namespace {

// Weights from L2, in the order of use.
template <int unroll>
struct StreamedWeights {
    const uint32_t* next;

    TCONV_DEVICE StreamedWeights(const Position& at, const Arguments& arguments, const Shared&,
                                 int warp)
        : next(packed_weights(at.m_group, at.group, arguments) + warp % 4 * fragment +
               threadIdx.x % 32 * 4) {}

    TCONV_DEVICE uint4 load(int, int, int part = 0, int = 0) {
        uint4 loaded = *reinterpret_cast<const uint4*>(next + part * part_words);
        if (part == weight_parts - 1) next += pair_words;
        return loaded;
    }

    TCONV_DEVICE void advance(bool) {}
};

template <bool resident, int unroll>
struct WeightsOf {
    using Type = StreamedWeights<unroll>;
};

template <int unroll>
struct WeightsOf<true, unroll> {
    using Type = ResidentWeights<unroll>;
};

constexpr int rows = Layer::tile_rows;
// The products of a pair: first weights with the first patch, second with the second, second with
// the first. In float16
//   low * high, high * low, high * high
// without low * low. That is 2^-24 of the whole in the mean, and at most 2^-22. Tiles in which a
// single product may decide an output are not computed in float16. In bfloat16 each instruction has
// two products:
//   low * high + high * middle, high * low + middle * high, high * high + middle * middle
[[maybe_unused]] constexpr int products = 3;
constexpr int temporaries = Layer::temporaries;
static_assert(Layer::m_tiles == 1, "a group's slots have the same 64 rows");
static_assert(Layer::half || (Layer::rolled && !Layer::resident),
              "bfloat16 repairs: weights in the order of use");
static_assert(temporaries == 1 || (temporaries == 2 && rows > 1), "a row is added beside another");

// A thread's weights of a pair, as both operands.
struct SplitWeights {
    uint32_t first[4], second[4];

    // For rows g and g + 8, channels t and t + 4.
    TCONV_DEVICE explicit SplitWeights(const uint4& whole) {
        Split top(__uint_as_float(whole.x), __uint_as_float(whole.z));
        Split bottom(__uint_as_float(whole.y), __uint_as_float(whole.w));
        first[0] = top.low, first[1] = bottom.low, first[2] = top.high, first[3] = bottom.high;
        second[0] = top.high, second[1] = bottom.high, second[2] = top.middle,
        second[3] = bottom.middle;
    }
};

// As a loop over pairs, which compiles faster. Each pair is a group, and its weights are loaded
// when it is multiplied.
template <int row_class>
TCONV_DEVICE void multiply_rolled(const Arguments& arguments, Shared& shared, const Position& at,
                                  int warp, Turns& turns, Sums& sums) {
    StreamedWeights<1> weights(at, arguments, shared, warp);
    auto& turn = turns.pixels;
    int ring = (warp / 4 - 1) % rings;
    int first_row = at.own * rows * Layer::row_step;  // of the patch
    float partial[columns / 2] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        ptx::mbarrier_wait_parity(&shared.full[ring][turn.stage], turn.parity);
        uint64_t pixels = ptx::matrix_descriptor(shared.pixels[ring][turn.stage], 16,
                                                 8 * pixel_bytes, ptx::Swizzle::bytes_32);
#pragma unroll 1
        for (int pair = Layer::class_begin[row_class]; pair < Layer::class_begin[row_class + 1];
             ++pair) {
            const SplitWeights own(weights.load(0, 0));
            int first_pixel = (first_row + pair_row(pair)) * Layer::patch_columns +
                              Layer::pair_pixel[pair] % Layer::patch_columns;
#pragma unroll
            for (int r = 0; r < rows; ++r) {
                int pixel = first_pixel + r * Layer::row_step * Layer::patch_columns;
                uint64_t first_patch = pixels + (pixel * pixel_bytes >> 4);
                ptx::wgmma_fence();
                ptx::wgmma_m64k16<!Layer::half, columns>(partial, own.first, first_patch, false);
                ptx::wgmma_m64k16<!Layer::half, columns>(partial, own.second,
                                                         first_patch + (patch_bytes >> 4), true);
                ptx::wgmma_m64k16<!Layer::half, columns>(partial, own.second, first_patch, true);
                ptx::wgmma_commit_group();
                ptx::wgmma_wait_group<0>();
                ptx::fence_registers(partial);
#pragma unroll
                for (int j = 0; j < columns / 2; ++j) sums[0][r][j] += partial[j];
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
    auto& turn = turns.pixels;
    constexpr int begin = Layer::class_begin[row_class];
    constexpr int stage_parts =
        Layer::class_parts[row_class];  // the same slots of x, further on in y
    constexpr int count = (Layer::class_begin[row_class + 1] - begin) / stage_parts;
    constexpr int groups = Layer::class_groups[row_class];  // of a part
    constexpr int unroll = Layer::class_unroll[row_class];  // stages unrolled together
    constexpr int next_part = stage_parts > 1 ? begin + count : begin;
    constexpr int part_rows = pair_row(next_part) - pair_row(begin);
    constexpr int part_slots = Layer::pair_slot_y[next_part] - Layer::pair_slot_y[begin];
    constexpr int all_groups = unroll * groups;
    constexpr int most_group = (count + groups - 1) / groups;
    constexpr bool moves = groups % 2 != 0 && unroll == 1;  // the next weights replace this part's
    static_assert((all_groups % 2 == 0 || moves) && chunks % unroll == 0 && groups <= count &&
                      (stage_parts == 1 || unroll == 1),
                  "a group's registers are known when it is compiled");
    typename WeightsOf<Layer::resident, unroll>::Type weights(at, arguments, shared, warp);
    const int patch_row = arguments.patch_row;
    const int first_row = at.own * Layer::tile_rows * Layer::row_step;  // of the patch
    // Weights of the current group and of the next.
    uint32_t first_weights[2][most_group][4], second_weights[2][most_group][4];
    int slots = 0;  // in y, from the first part to the one whose weights are loaded
    int next_stage = 1;  // 0: another part of the stage follows a part's last group
    auto keep = [&](uint32_t (&into)[4], const uint4& loaded) {
        into[0] = loaded.x, into[1] = loaded.y, into[2] = loaded.z, into[3] = loaded.w;
    };
    // Loads a group's weights into one set of registers.
    auto take = [&](int into, int group) {
        int stage = group / groups * next_stage;
#pragma unroll
        for (int i = 0; i < most_group; ++i) {
            int pair = group % groups * count / groups + i;
            if (pair >= (group % groups + 1) * count / groups) continue;
            keep(second_weights[into][i], weights.load(begin + pair, stage, 0, slots));
            keep(first_weights[into][i], weights.load(begin + pair, stage, 1, slots));
        }
    };
    float partial[temporaries][columns / 2];
    auto add = [&](int temporary, int r) {
        ptx::fence_registers(partial[temporary]);
#pragma unroll
        for (int j = 0; j < columns / 2; ++j) sums[0][r][j] += partial[temporary][j];
    };
    // The products of a part. `first` is half of the start address of its row 0, then of the next
    // part's.
    auto multiply_part = [&](int u, uint64_t pixels, uint32_t& first, bool last) {
        constexpr auto& pixel = Layer::pair_pixel;
        int patch_y = 0;  // rows after row 0, where `first` points
#pragma unroll
        for (int g = 0; g < groups; ++g) {
            int group = u * groups + g;
            int now = group % 2;
            int group_begin = g * count / groups;
            int group_count = (g + 1) * count / groups - group_begin;
#pragma unroll
            for (int r = 0; r < rows; ++r) {
                int t = (group * rows + r) % temporaries;
                ptx::wgmma_fence();
#pragma unroll
                for (int product = 0; product < products; ++product) {
#pragma unroll
                    for (int i = 0; i < group_count; ++i) {
                        int pair = begin + group_begin + i;
                        // NOTE: ptxas must not know that the step is constant, so it is an
                        // argument. Otherwise it keeps each start address in two registers, until
                        // it spills.
                        int y = pair_row(pair) + r * Layer::row_step;
                        first += (y - patch_y) * patch_row;
                        patch_y = y;
                        int start = pixel[pair] % Layer::patch_columns * pixel_bytes +
                                    (product == 1 ? patch_bytes : 0);
                        ptx::wgmma_m64k16<!Layer::half, columns>(
                            partial[t],
                            product == 0 ? first_weights[now][i] : second_weights[now][i],
                            (pixels >> 32 << 32) | (first + (start >> 4)), product > 0 || i > 0);
                    }
                }
                ptx::wgmma_commit_group();
                if (temporaries == 2 && g + r > 0) {
                    // The row before has ended.
                    ptx::wgmma_wait_group<1>();
                    add(t ^ 1, (r + rows - 1) % rows);
                }
                if (r == 0) {
                    // The group before has been multiplied.
                    if (stage_parts > 1 && g == groups - 1) {
                        slots = last ? 0 : slots + part_slots;
                        next_stage = last;
                    }
                    take(now ^ 1, group + 1);
                }
                if constexpr (temporaries == 1) {
                    ptx::wgmma_wait_group<0>();
                    add(0, r);
                }
            }
        }
        if constexpr (temporaries == 2) {
            // NOTE: ptxas serialises products in flight across a loop, also those of the next wait,
            // if registers of other sums are read.
            ptx::wgmma_wait_group<0>();
            add((u * groups * rows + groups * rows - 1) % 2, rows - 1);
        }
        if constexpr (moves) {
            // NOTE: not later. Otherwise ptxas 13.0 moves weights of one slot between the products
            // of the next stage, and serialises these.
#pragma unroll
            for (int i = 0; i < most_group; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    first_weights[0][i][j] = ptx::opaque(first_weights[1][i][j]);
                    second_weights[0][i][j] = ptx::opaque(second_weights[1][i][j]);
                }
            }
        }
        first += (part_rows - patch_y) * patch_row;
    };
#pragma unroll
    for (int t = 0; t < temporaries; ++t) {
#pragma unroll
        for (int j = 0; j < columns / 2; ++j) partial[t][j] = 0.0f;
    }
    take(0, 0);
    // NOTE: ptxas unrolls a loop of two iterations, whatever the pragma says. It then separates
    // products from their commit: a kernel in float16 gave wrong results, without a warning.
    const int end = int(ptx::opaque(uint32_t(chunks)));
    const int last_part = int(ptx::opaque(uint32_t(stage_parts)));
#pragma unroll 1
    for (int chunk = 0; chunk < end; chunk += unroll) {
#pragma unroll
        for (int u = 0; u < unroll; ++u) {
            ptx::mbarrier_wait_parity(&shared.full[ring][turn.stage], turn.parity);
            uint64_t pixels = ptx::matrix_descriptor(shared.pixels[ring][turn.stage], 16,
                                                     8 * pixel_bytes, ptx::Swizzle::bytes_32);
            uint32_t first = static_cast<uint32_t>(pixels);  // the half that varies
            first += first_row * patch_row;
            if constexpr (stage_parts == 1) {
                multiply_part(u, pixels, first, true);
            } else {
#pragma unroll 1
                for (int part = 1; part <= last_part; ++part)
                    multiply_part(0, pixels, first, part == last_part);
            }
            arrive(&shared.empty[ring][turn.stage]);
            turn.advance();
        }
        weights.advance(chunk + 2 * unroll < chunks);
    }
}

template <int row_class>
TCONV_DEVICE void prepare(const uint32_t*, Shared&, int, const Turns&) {}

}  // namespace

#ifndef TCONV_INNER
TCONV_KERNEL(sm90_split_forward, Layer::threads, 1) {
    TCONV_DYNAMIC_SHARED(memory);
    run_block(arguments, memory);
}
#endif
