// Raw tiles: a contiguous source as it lies, whose positions are the product's rows. Tensor maps
// copy segments of rows as lines of pixels of a channel: [segment][image][row][channel][pixel]. Of
// rows off 16 bytes they are flat maps (<common/flat_planes.cuh>), a copy for each row and class of
// channels: [segment][row][class][image][channel][pixel]. Nothing turns lines: a thread loads words
// of its four channels, and takes a tap's pixel from those of two. No shift and no stride asks
// anything of shared memory, but that lines are an odd number of octets (`flat.line_pixels`), or
// 128 bytes and swizzled where a thread's words are of one octet.
//
// A thread's two rows are neighbouring positions of a row of the tile, an even one first, so that
// taps share words. A row's products are those of the taps of a row of the kernel, whose weights
// are a stage.
//
// Of float32 a word is a pixel of a channel. Vectors are of 4 words at even
// strides and of 2 at odd ones, with which lanes that load at a time meet all banks but at a stride
// of 4. There they meet half, as they do where a flat map has several classes.
//
// Strict float32 splits words in registers (<common/split.cuh>). The two channels of an operand are
// four apart, so that lanes have the channels that they have of TF32.
#pragma once

#include <common/element.cuh>
#include <common/flat_planes.cuh>
#include <engine/multiply_taps.cuh>
#include <ptx/tensor_map.cuh>

namespace {

// The lines of a stage of a tile, by a thread; of flat maps by a warp, whose lanes have a row and
// class each.
//
// NOTE: the instructions of a thread that issued all these copies took longer than what was
// multiplied meanwhile.
template <typename Fields>
TCONV_DEVICE void copy_lines(const Fields& arguments, const Position& at, int stage, int chunk,
                             unsigned char* to, uint64_t* full) {
    int x = at.x * Layer::source_step_x - Layer::raw_margin;
    int y = at.y * (Layer::flat ? Layer::source_step_y : 1) + entry(Layer::stage_y, stage);
    for (int segment = 0; segment < arguments.source_segments; ++segment) {
        if constexpr (Layer::flat) {
            FlatPlanes planes(arguments);
            int copies = arguments.source_rows * planes.classes;
#pragma unroll 1
            for (int i = threadIdx.x; i < copies; i += 32) {
                int row = y + planes.of_class(i) * Layer::source_step_y;
                int start = planes.start(i & (planes.classes - 1), row, x);
                ptx::cp_async_bulk_tensor_4d_global_to_shared(
                    to + i * arguments.source_copy_bytes, &arguments.source_0, start,
                    chunk * arguments.source_class_channels, at.image, at.group, full);
            }
            to += copies * arguments.source_copy_bytes;
        } else {
            ptx::cp_async_bulk_tensor_5d_global_to_shared(
                to, &arguments.source_0 + entry(Layer::stage_source, stage), x, chunk * depth, y,
                at.image, at.group, full);
            to += arguments.source_copy_bytes;
        }
        x += arguments.source_segment_x * Layer::source_step_x;
    }
}

template <typename Fields>
TCONV_DEVICE void bring_lines(const Fields& arguments, Shared& shared) {
    CountedTurn turn;
    Tiles tiles(arguments);
    for (int tile = tiles.first; tile < tiles.end; tile += tiles.step) {
        Position at(arguments, tiles, tile);
        if (!at.loads) continue;
        int first = at.first_stage(), end = at.end_stage();
        for (int chunk = 0; chunk < chunks; ++chunk) {
            for (int stage = first; stage < end; ++stage) {
                uint64_t* full = &shared.patches_full[turn.stage];
                ptx::mbarrier_wait_parity(&shared.patches_empty[turn.stage], turn.parity ^ 1);
                if (threadIdx.x == 0) ptx::mbarrier_arrive_expect_tx(full, arguments.patch_bytes);
                copy_lines(arguments, at, stage, chunk, patch_of(arguments, shared, turn.stage),
                           full);
                turn.advance(arguments.patch_stages);
            }
        }
    }
}

template <typename Fields>
struct RawMultiplier {
    // Words, of two pixels or one, that the taps of a thread's two positions read.
    static constexpr bool floats = sizeof(Element) == 4;
    static constexpr int of_word = floats ? 1 : 2;  // pixels
    static constexpr int stride = Layer::source_step_x;
    static constexpr int last_pixel = Layer::raw_first + Layer::raw_last + stride;
    // Words loaded at a time. What lines are off by may be no multiple of more.
    static constexpr int longest = floats            ? (stride % 2 == 0 ? 4 : 2)
                                   : 4 % stride == 0 ? stride
                                                     : 1;
    static constexpr int vector =
        longest < Layer::raw_grain / of_word ? longest : Layer::raw_grain / of_word;
    static constexpr int first_word = Layer::raw_first / of_word / vector * vector;
    static constexpr int words = (last_pixel / of_word - first_word) / vector * vector + vector;
    // Where all lanes would read odd words, or all even ones, half of them begin with the other of
    // two: with a stride of 2, of any two; or, in vectors, of the first pair that gives only its
    // second word, and the last that gives only its first.
    static constexpr bool ends = !floats && vector == 2 && words > 2 &&
                                 Layer::raw_first / 2 % 2 == 1 && last_pixel / 2 % 2 == 0;
    static constexpr bool pairs = stride == 2 && vector == 1;
    static constexpr int apart = ends ? words - 3 : 1;  // of two such words
    static constexpr int pixels = sizeof(Layer::raw_pixels) / sizeof(int);
    using Fragment = uint32_t[pixels][4];  // for each pixel that taps read of a position

    // Whether a word of a flat map may lie beside its row, where an existing position's tap reads
    // zeros. Rows of 16 bits begin at even pixels, so that all of it does, or nothing. The last
    // position is one of a thread's two: which, may follow from what the width is a multiple of.
    TCONV_DEVICE static constexpr bool at_edge(int word) {
        constexpr int common = 2 * stride % Layer::raw_grain == 0 ? Layer::raw_grain : 2;
        for (int each = 0; Layer::flat && each < pixels * 2; ++each) {
            int own = each % 2 * stride;
            int tap = Layer::raw_pixels[each / 2] + Layer::raw_first - Layer::raw_margin;
            bool known = !floats && (Layer::raw_end + own) % common != 0;
            int end = Layer::raw_end + (known ? stride : 0);
            bool beside = tap + own < 0 || tap >= end;
            int at = (tap + own + Layer::raw_margin) / of_word;
            if (beside && at - first_word == word) return true;
        }
        return false;
    }

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
    int starts[blocks];  // of a thread's words of its first channel, in a patch
    // Of a flat map: pixels before those of the tile's first row; the first word's pixel in a row.
    int before[blocks], columns_in[blocks];

    TCONV_DEVICE RawMultiplier(const Fields& arguments, Shared& shared, int consumer)
        : consumer(consumer), late((ends || pairs) && threadIdx.x % 2 == 1) {
        weight_matrix = ptx::matrix_descriptor(weights_of(arguments, shared, 0), 16,
                                               8 * weight_line, swizzle_of(weight_line));
        int lane = threadIdx.x % 32, warp = threadIdx.x % warpgroup / 32;
        int channel = lane % 4 * (floats ? 1 : 2);
        int of_class = 0, classes = 1;
        if constexpr (Layer::flat) {
            classes = arguments.flat_classes;
            of_class = channel % classes;
        }
#pragma unroll
        for (int block = 0; block < blocks; ++block) {
            int position = consumer * columns + block * 64 + warp * 16 + lane / 4 * 2;
            Place place(arguments, position);
            // What is read for positions that do not exist does not matter.
            if (!place.in_box(arguments)) place.n = place.y = place.x = 0;
            columns_in[block] = place.x * stride - Layer::raw_margin + first_word * of_word;
            int segment = place.x / arguments.source_segment_x;
            place.x -= segment * arguments.source_segment_x;
            int of_line = place.x * stride * int(sizeof(Element)) + first_word * 4;
            if constexpr (Layer::swizzled) of_line ^= channel * 16;
            starts[block] =
                segment * arguments.source_segment_bytes + place.n * arguments.source_image_bytes +
                place.y * arguments.source_row_bytes + of_class * arguments.source_class_bytes +
                channel / classes * arguments.source_line_bytes + of_line;
            if constexpr (Layer::flat) {
                before[block] = FlatPlanes(arguments).shift(
                    of_class, place.y * Layer::source_step_y, -Layer::raw_margin);
            }
        }
    }

    using Masks = uint32_t[words];

    // Words of a channel.
    TCONV_DEVICE void load(const unsigned char* line, const Masks& masks,
                           uint32_t (&read)[words]) const {
        if constexpr (!pairs) {
#pragma unroll
            for (int i = ends ? 2 : 0; i < (ends ? words - 2 : words); i += vector) {
                using Words = Vector<uint32_t, vector>;
                Words together = *reinterpret_cast<const Words*>(line + i * 4);
#pragma unroll
                for (int k = 0; k < vector; ++k) read[i + k] = together.values[k];
            }
        }
        if constexpr (ends || pairs) {
            int later = late ? apart * 4 : 0;
#pragma unroll
            for (int i = ends ? 1 : 0; i < (ends ? 2 : words); i += 2) {
                int j = i + apart < words ? i + apart : i;
                auto* one = reinterpret_cast<const uint32_t*>(line + i * 4 + (j > i ? later : 0));
                auto* other = reinterpret_cast<const uint32_t*>(line + j * 4 - (j > i ? later : 0));
                uint32_t first = *one, last = *other;
                read[i] = late ? last : first;
                read[j] = late ? first : last;
            }
        }
#pragma unroll
        for (int i = 0; i < words; ++i) {
            if (at_edge(i)) read[i] &= masks[i];
        }
    }

    // Where a thread's words begin of its channels of each eight, of the class of the first and of
    // the second.
    struct Lines {
        const unsigned char* begin[2];
    };

    TCONV_DEVICE Lines lines_of(const Fields& arguments, const unsigned char* row, int y,
                                int block) const {
        const unsigned char* begin = row + starts[block];
        if constexpr (Layer::flat) {
            FlatPlanes planes(arguments);
            int first = before[block] + planes.shift(0, y, 0);
            int second = first + (planes.classes > 1 ? planes.shift(1, 0, 0) : 0);
            auto off = [](int pixels) { return pixels * int(sizeof(Element)) % 16; };
            return {begin + off(first), begin + arguments.source_second + off(second)};
        } else {
            int second = Layer::swizzled ? starts[block] ^ 16 : starts[block];
            return {begin, row + second + arguments.source_second};
        }
    }

    // The operands of 16 channels, or of 8 of float32, of all taps. `to_half`: bytes to the second
    // half of them.
    TCONV_DEVICE void load(const Lines& lines, int to_first, int to_half, const Masks& masks,
                           Fragment& a) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if constexpr (floats) {
                load_floats(lines.begin[0] + to_first + half * to_half, masks, half, a);
            } else {
                load_pairs(lines, to_first + half * to_half, masks, half, a);
            }
        }
    }

    // Of strict float32: words of a thread's four channels of 16, whose operands are of two each.
    using FourChannels = uint32_t[2][2][words];

    TCONV_DEVICE void load_channels(const unsigned char* line, int eight, const Masks& masks,
                                    FourChannels& read) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int other = 0; other < 2; ++other) {
                load(line + half * eight + other * (eight / 2), masks, read[half][other]);
            }
        }
    }

    // The parts of a tap's operands.
    using Parts = uint32_t[value_parts][4];

    TCONV_DEVICE static void split(const FourChannels& read, int tap, Parts& parts) {
        if constexpr (Layer::strict) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int pixel = Layer::raw_first + Layer::raw_slot_pixel[tap] + i % 2 * stride;
                auto value = [&](int other) {
                    return __uint_as_float(read[i / 2][other][pixel - first_word]);
                };
                Split both = Split::scaled(value(0), value(1));
                parts[0][i] = both.high;
                parts[1][i] = both.middle;
                parts[2][i] = both.low;
            }
        }
    }

    // The products of a row of taps in strict float32. They have ended.
    //
    // As in Multiplier::multiply_parts, those of a tap and 16 channels go to a temporary sum, small
    // ones first. While they write it, the one before is added to the sums, and what the next ones
    // read is loaded and split.
    TCONV_DEVICE void multiply_parts(const Fields& arguments, const unsigned char* lines, int y,
                                     const Masks (&masks)[blocks], uint64_t weight,
                                     Block (&sums)[blocks]) const {
        constexpr int steps = depth / 16 * blocks;
        int eight = arguments.source_eight_bytes;
        FourChannels read;
        Parts parts[2];
        auto prepare = [&](int number) {
            int step = number / stage_slots, block = step % blocks, k = step / blocks;
            if (number % stage_slots == 0) {
                const unsigned char* line = lines_of(arguments, lines, y, block).begin[0];
                load_channels(line + k * 2 * eight, eight, masks[block], read);
            }
            split(read, number % stage_slots, parts[number % 2]);
        };
        prepare(0);
        Block partial[2];
#pragma unroll
        for (auto& of_number : partial) {
#pragma unroll
            for (float& sum : of_number) sum = 0.0f;
        }
        // NOTE: ptxas must not know, or it has temporary sums of several taps, and spills.
        bool keeps = ptx::opaque(0u) != 0;
        auto add = [&](int number) {
            ptx::fence_registers(partial[number % 2]);
            // NOTE: to ptxas a register is free once a product that reads it is issued.
#pragma unroll
            for (auto& part : parts[number % 2]) {
#pragma unroll
                for (uint32_t& value : part) value = ptx::opaque(value);
            }
            auto& to = sums[number / stage_slots % blocks];
#pragma unroll
            for (int i = 0; i < products_columns / 2; ++i) {
                to[i] = fmaf(partial[number % 2][i], Split::rescale, to[i]);
            }
            // NOTE: or ptxas adds later, and keeps the temporary sums of several taps until then.
            ptx::fence_registers(to);
        };
        constexpr int numbers = steps * stage_slots;
#pragma unroll
        for (int number = 0; number < numbers; ++number) {
            int step = number / stage_slots, k = step / blocks;
            auto& a = parts[number % 2];
            uint64_t b = ptx::advance(weight, number % stage_slots * weight_bytes + k * 32);
            ptx::wgmma_fence();
#pragma unroll
            for (int product = 0; product < Split::products; ++product) {
                ptx::wgmma_m64k16<true, products_columns>(
                    partial[number % 2], a[Split::part_of_a(product)],
                    ptx::advance(b, Split::part_of_b(product) * part_weight_bytes),
                    product > 0 || keeps);
            }
            ptx::wgmma_commit_group();
            if (number > 0) {
                ptx::wgmma_wait_group<1>();
                add(number - 1);
            }
            if (number + 1 < numbers) prepare(number + 1);
        }
        ptx::wgmma_wait_group<0>();
        add(numbers - 1);
    }

    // Of a channel of float32.
    TCONV_DEVICE void load_floats(const unsigned char* line, const Masks& masks, int half,
                                  Fragment& a) const {
        uint32_t read[words];
        load(line, masks, read);
#pragma unroll
        for (int i = 0; i < pixels * 2; ++i) {
            int pixel = Layer::raw_first + Layer::raw_pixels[i / 2] + i % 2 * stride;
            a[i / 2][half * 2 + i % 2] = read[pixel - first_word];
        }
    }

    // Of two channels of 16 bits.
    TCONV_DEVICE void load_pairs(const Lines& lines, int from, const Masks& masks, int half,
                                 Fragment& a) const {
        uint32_t read[2][words];
#pragma unroll
        for (int second = 0; second < 2; ++second) {
            load(lines.begin[second] + from, masks, read[second]);
        }
#pragma unroll
        for (int each = 0; each < pixels; ++each) {
#pragma unroll
            for (int own = 0; own < 2; ++own) {
                int pixel = Layer::raw_first + Layer::raw_pixels[each] + own * stride;
                int i = pixel / 2 - first_word;
                a[each][half * 2 + own] =
                    __byte_perm(read[0][i], read[1][i], pixel % 2 ? 0x7632 : 0x5410);
            }
        }
    }

    TCONV_DEVICE static void multiply(Block& sums, const uint32_t (&a)[4], uint64_t b) {
        if constexpr (floats) {
            ptx::wgmma_m64k8_tf32<products_columns>(sums, a, b, true);
        } else {
            ptx::wgmma_m64k16<Layer::bfloat, products_columns>(sums, a, b, true);
        }
    }

    // The stages that the newest finished products were the last to read, or -1.
    TCONV_DEVICE static void hand_back_used(Shared& shared, int weights, int patch) {
        if (weights >= 0) hand_back(&shared.weights_empty[0][weights]);
        if (patch >= 0) hand_back(&shared.patches_empty[patch]);
    }

    TCONV_DEVICE void multiply(const Fields& arguments, Shared& shared, const Position& at,
                               Sums& sums, int& until_lead) {
        // NOTE: fenced, as ptxas else zeroes some between the products of a single stage, for which
        // it waits (C7517) or serialises all (C7519).
#pragma unroll
        for (auto& of_result : sums) {
#pragma unroll
            for (auto& of_block : of_result) {
#pragma unroll
                for (float& sum : of_block) sum = 0.0f;
                ptx::fence_registers(of_block);
            }
        }
        Masks masks[blocks] = {};
        if constexpr (Layer::flat) {
#pragma unroll
            for (int word = 0; word < words * blocks; ++word) {
                int block = word / words, i = word % words;
                int x = at.x * stride + columns_in[block] + i * of_word;
                bool inside = x >= 0 && x < arguments.flat_width;
                masks[block][i] = inside ? 0xffffffff : 0;
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
            int stage_y = at.y * Layer::source_step_y + entry(Layer::stage_y, stage);
            if (++stage == end) stage = first;
            ptx::mbarrier_wait_parity(&shared.patches_full[patches.stage], patches.parity);
            const unsigned char* patch = patch_of(arguments, shared, patches.stage);
#pragma unroll 1
            for (; slot < last; slot += stage_slots) {
                if (until_lead-- == 0) hand_back(&shared.leading);
                ptx::mbarrier_wait_parity(&shared.weights_full[0][weights.stage],
                                          Layer::resident ? 0 : weights.parity);
                uint64_t weight = ptx::advance(weight_matrix, weights.stage * weight_stage_bytes);
                int row = entry(Layer::slot_y, slot);
                const unsigned char* lines = patch + row * arguments.source_row_bytes;
                int y = stage_y + row * Layer::source_step_y;
                if constexpr (Layer::strict) {
                    multiply_parts(arguments, lines, y, masks, weight, sums[0]);
                    if (!Layer::resident) hand_back(&shared.weights_empty[0][weights.stage]);
                } else {
                    int eight = arguments.source_eight_bytes;
                    // Of two fragments one is loaded while products read the other.
                    constexpr int step_channels = floats ? 8 : 16, halves = step_channels / 8;
                    constexpr int steps = depth / step_channels * blocks;
                    static_assert(!Layer::raw || steps % 2 == 0, "each has registers of its own");
                    Fragment a[2];
#pragma unroll
                    for (int step = 0; step < steps; ++step) {
                        int block = step % blocks, k = step / blocks;
                        load(lines_of(arguments, lines, y, block), k * halves * eight,
                             floats ? eight / 2 : eight, masks[block], a[step % 2]);
                        ptx::wgmma_fence();
#pragma unroll
                        for (int tap = 0; tap < stage_slots; ++tap) {
                            uint64_t b = ptx::advance(weight, tap * weight_bytes + k * 32);
                            multiply(sums[Layer::raw_slot_result[tap]][block],
                                     a[step % 2][fragment_of(tap)], b);
                        }
                        ptx::wgmma_commit_group();
                        ptx::wgmma_wait_group<1>();
                        if (step == 0) {
                            hand_back_used(shared, used_weights, used_patch);
                            used_patch = -1;
                        }
                    }
                    if (!Layer::resident) used_weights = weights.stage;
                }
                if constexpr (Layer::resident) {
                    ++weights.stage;
                } else {
                    weights.advance(arguments.weight_stages);
                }
            }
            if (at.hands_back) {
                if constexpr (Layer::strict) {
                    __syncwarp();  // no lane still waits for it
                    hand_back(&shared.patches_empty[patches.stage]);
                } else {
                    used_patch = patches.stage;
                }
            }
            patches.advance(arguments.patch_stages);
        }
        ptx::wgmma_wait_group<0>();
#pragma unroll
        for (auto& of_result : sums) {
#pragma unroll
            for (auto& of_block : of_result) ptx::fence_registers(of_block);
        }
        hand_back_used(shared, used_weights, used_patch);
    }
};

}  // namespace
