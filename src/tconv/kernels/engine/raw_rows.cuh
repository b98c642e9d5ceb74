// Raw tiles: a contiguous source as it lies, whose positions are the product's rows. Tensor maps
// copy lines of 64 pixels, [line of a row][image][row][channel][pixel], swizzled by 128 bytes.
// Nothing turns them: a thread loads words of its four channels, and takes a tap's pixel from those
// of two. No shift and no stride asks anything of shared memory.
//
// A thread's two rows are neighbouring positions of a row of the tile, an even one first, so that
// taps share words. A row's products are those of the taps of a row of the kernel, whose weights
// are a stage.
#pragma once

#include <common/element.cuh>
#include <engine/multiply_taps.cuh>
#include <ptx/tensor_map.cuh>

namespace {

constexpr int raw_line = 64;  // pixels
constexpr int raw_step = depth * 2 * raw_line;  // from a row to the next, in bytes

template <typename Fields>
TCONV_DEVICE void bring_lines(const Fields& arguments, Shared& shared) {
    CountedTurn turn;
    Tiles tiles(arguments);
    for (int tile = tiles.first; tile < tiles.end; tile += tiles.step) {
        Position at(arguments, tiles, tile);
        if (!at.loads) continue;
        int x = at.x * Layer::source_step_x - Layer::raw_margin;
        int first = at.first_stage(), end = at.end_stage();
        for (int chunk = 0; chunk < chunks; ++chunk) {
            for (int stage = first; stage < end; ++stage) {
                uint64_t* full = &shared.patches_full[turn.stage];
                ptx::mbarrier_wait_parity(&shared.patches_empty[turn.stage], turn.parity ^ 1);
                ptx::mbarrier_arrive_expect_tx(full, arguments.patch_bytes);
                unsigned char* to = patch_of(arguments, shared, turn.stage);
                for (int line = 0; line < arguments.source_lines; ++line) {
                    ptx::cp_async_bulk_tensor_5d_global_to_shared(
                        to + line * arguments.source_line_bytes,
                        &arguments.source_0 + entry(Layer::stage_source, stage),
                        x + line * raw_line, chunk * depth, at.y + entry(Layer::stage_y, stage),
                        at.image, at.group, full);
                }
                turn.advance(arguments.patch_stages);
            }
        }
    }
}

template <typename Fields>
struct RawMultiplier {
    // Words, two pixels, that the taps of a thread's two positions read.
    static constexpr int stride = Layer::source_step_x;
    static constexpr int last_pixel = Layer::raw_first + Layer::raw_last + stride;
    static constexpr int vector = 4 % stride == 0 ? stride : 1;  // words loaded at a time
    static constexpr int first_vector = Layer::raw_first / 2 / vector;
    static constexpr int vectors = last_pixel / 2 / vector + 1 - first_vector;
    // Whether the first pair gives only its second word, and the last pair only its first. All
    // lanes would then read odd words, or all even ones: half of the banks. So half of the lanes
    // begin at the other end.
    static constexpr bool ends =
        vector == 2 && vectors > 1 && Layer::raw_first / 2 % 2 == 1 && last_pixel / 2 % 2 == 0;
    static constexpr int pixels = sizeof(Layer::raw_pixels) / sizeof(int);
    using Fragment = uint32_t[pixels][4];  // for each pixel that taps read of a position

    // The fragment of a tap.
    TCONV_DEVICE static constexpr int fragment_of(int tap) {
        int found = 0;
        while (Layer::raw_pixels[found] != Layer::raw_slot_pixel[tap]) ++found;
        return found;
    }

    CountedTurn patches, kept, weights;  // `kept`: where a tile's patches begin
    uint64_t weight_matrix;
    int consumer;
    bool late;
    int starts[blocks][vectors];  // of a thread's vectors of its first channel, in a patch

    TCONV_DEVICE RawMultiplier(const Fields& arguments, Shared& shared, int consumer)
        : consumer(consumer), late(ends && threadIdx.x % 2 == 1) {
        weight_matrix = ptx::matrix_descriptor(weights_of(arguments, shared, 0), 16,
                                               8 * weight_line, swizzle_of(weight_line));
        int lane = threadIdx.x % 32, warp = threadIdx.x % warpgroup / 32, channel = lane % 4 * 2;
#pragma unroll
        for (int block = 0; block < blocks; ++block) {
            int position = consumer * columns + block * 64 + warp * 16 + lane / 4 * 2;
            Place place(arguments, position);
            // What is read for positions that do not exist does not matter.
            if (!place.in_box(arguments)) place.n = place.y = place.x = 0;
            int row = place.n * arguments.source_rows + place.y;
#pragma unroll
            for (int i = 0; i < vectors; ++i) {
                int word = (first_vector + i) * vector;
                if (ends && i == (late ? vectors - 1 : 0)) word = first_vector * 2 + 1;
                if (ends && i == (late ? 0 : vectors - 1)) word = (first_vector + vectors - 1) * 2;
                int pixel = place.x * stride + word * 2, of_line = pixel % raw_line;
                starts[block][i] = pixel / raw_line * arguments.source_line_bytes + row * raw_step +
                                   channel * 2 * raw_line + (of_line / 8 ^ channel) * 16 +
                                   of_line % 8 * 2;
            }
        }
    }

    // Words of a channel, the second of two or the first.
    TCONV_DEVICE void load(const unsigned char* lines, const int (&starts)[vectors], int second,
                           uint32_t (&words)[vectors * vector]) const {
        auto at = [&](int i) {
            return lines + (second ? (starts[i] ^ 16) + 2 * raw_line : starts[i]);
        };
#pragma unroll
        for (int i = ends ? 1 : 0; i < (ends ? vectors - 1 : vectors); ++i) {
            using Words = Vector<uint32_t, vector>;
            Words read = *reinterpret_cast<const Words*>(at(i));
#pragma unroll
            for (int k = 0; k < vector; ++k) words[i * vector + k] = read.values[k];
        }
        if constexpr (ends) {
            constexpr int last = vectors - 1;
            uint32_t one = *reinterpret_cast<const uint32_t*>(at(0));
            uint32_t other = *reinterpret_cast<const uint32_t*>(at(last));
            words[1] = late ? other : one;
            words[last * 2] = late ? one : other;
        }
    }

    // The operands of 16 channels, of all taps.
    TCONV_DEVICE void load(const unsigned char* lines, const int (&starts)[vectors],
                           Fragment& a) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t words[2][vectors * vector];
#pragma unroll
            for (int second = 0; second < 2; ++second) {
                load(lines + half * 16 * raw_line, starts, second, words[second]);
            }
#pragma unroll
            for (int each = 0; each < pixels; ++each) {
#pragma unroll
                for (int own = 0; own < 2; ++own) {
                    int pixel = Layer::raw_first + Layer::raw_pixels[each] + own * stride;
                    int i = pixel / 2 - first_vector * vector;
                    a[each][half * 2 + own] =
                        __byte_perm(words[0][i], words[1][i], pixel % 2 ? 0x7632 : 0x5410);
                }
            }
        }
    }

    TCONV_DEVICE void multiply(const Fields& arguments, Shared& shared, const Position& at,
                               Sums& sums, int& until_lead) {
#pragma unroll
        for (auto& of_result : sums) {
#pragma unroll
            for (auto& of_block : of_result) {
#pragma unroll
                for (float& sum : of_block) sum = 0.0f;
            }
        }
        if (Layer::resident) weights.stage = 0;
        if (at.loads) kept = patches;
        patches = kept;
        int used_patch = -1, used_weights = -1;
        Slots slots(at.row_group(consumer));
        int first = at.first_stage(), end = at.end_stage(), slot = slots.begin;
#pragma unroll 1
        for (int turns = chunks * (end - first), stage = first; turns > 0; --turns) {
            if (stage == first) slot = slots.begin;
            int last = Layer::stages == 1 ? slots.end : entry(Layer::stage_end, stage);
            if (++stage == end) stage = first;
            ptx::mbarrier_wait_parity(&shared.patches_full[patches.stage], patches.parity);
            const unsigned char* patch = patch_of(arguments, shared, patches.stage);
#pragma unroll 1
            for (; slot < last; slot += stage_slots) {
                if (consumer == 0 && until_lead-- == 0) hand_back(&shared.leading);
                ptx::mbarrier_wait_parity(&shared.weights_full[0][weights.stage],
                                          Layer::resident ? 0 : weights.parity);
                uint64_t weight = ptx::advance(weight_matrix, weights.stage * weight_stage_bytes);
                const unsigned char* lines = patch + entry(Layer::slot_y, slot) * raw_step;
                // Of two fragments one is loaded while products read the other.
                constexpr int steps = depth / 16 * blocks;
                static_assert(!Layer::raw || steps % 2 == 0, "each has registers of its own");
                Fragment a[2];
#pragma unroll
                for (int step = 0; step < steps; ++step) {
                    int block = step % blocks, k = step / blocks * 16;
                    load(lines + k * 2 * raw_line, starts[block], a[step % 2]);
                    ptx::wgmma_fence();
#pragma unroll
                    for (int tap = 0; tap < stage_slots; ++tap) {
                        uint64_t b = ptx::advance(weight, tap * weight_bytes + k * 2);
                        auto& to = sums[Layer::raw_slot_result[tap]][block];
                        auto& of_tap = a[step % 2][fragment_of(tap)];
                        ptx::wgmma_m64k16<Layer::bfloat, products_columns>(to, of_tap, b, true);
                    }
                    ptx::wgmma_commit_group();
                    ptx::wgmma_wait_group<1>();
                    if (step == 0) {
                        if (used_weights >= 0) hand_back(&shared.weights_empty[0][used_weights]);
                        if (used_patch >= 0) hand_back(&shared.patches_empty[used_patch]);
                        used_patch = -1;
                    }
                }
                if constexpr (Layer::resident) {
                    ++weights.stage;
                } else {
                    used_weights = weights.stage;
                    weights.advance(arguments.weight_stages);
                }
            }
            if (at.hands_back) used_patch = patches.stage;
            patches.advance(arguments.patch_stages);
        }
        ptx::wgmma_wait_group<0>();
#pragma unroll
        for (auto& of_result : sums) {
#pragma unroll
            for (auto& of_block : of_result) ptx::fence_registers(of_block);
        }
        if (used_weights >= 0) hand_back(&shared.weights_empty[0][used_weights]);
        if (used_patch >= 0) hand_back(&shared.patches_empty[used_patch]);
    }
};

}  // namespace
