// Packs y folded, as [image][row][column][group][channel], each pixel of a group on 16 bytes, with
// zeros where there is no pixel and behind the channels (<engine/fold.cuh>).
//
// A thread takes octets, 8 channels of a folded pixel of a group, or 4 of float32: all of a pixel
// if they are few, as the place of each value is known then when the kernel is compiled.
#pragma once

#include <common/element.cuh>
#include <engine/fold.cuh>
#include <engine/pack_image.cuh>

namespace {

struct FoldedImage {
    const Layer::Element* source;
    void* destination;
    Layer::Index stride_n, stride_c, stride_h, stride_w;
    int batch, source_height, source_width, height, width;
    unsigned block = blockIdx.x, blocks = gridDim.x;  // of those that pack it
};

constexpr bool folds_floats = sizeof(Layer::Element) == 4;
constexpr int fold_of_octet = folds_floats ? 4 : 8;
// Values of a row of y that follow each other: those of a pixel, and those before the first line.
constexpr int fold_of_pixel = Layer::fold_channels_last ? Layer::fold_channels : 1;
constexpr int fold_cut = Layer::cut_x * fold_of_pixel;
// Lines are whole vectors of so many values at most, and begin on them.
constexpr int fold_vector_of_run = fold_run % 8 == 0 ? 8 : fold_run & -fold_run;
constexpr int fold_vector_of_cut = fold_cut % 8 == 0 ? 8 : fold_cut & -fold_cut;
// Lines of pairs, each of which begins in the middle of a word.
constexpr bool fold_off_words = fold_vector_of_cut == 1 && fold_vector_of_run > 1;
constexpr int fold_longest = folds_floats                              ? 1
                             : fold_off_words                          ? 2
                             : fold_vector_of_run < fold_vector_of_cut ? fold_vector_of_run
                                                                       : fold_vector_of_cut;

// The values of an octet of a pixel, `channel` the first; zeros where there is no pixel. y, x: the
// first pixel of y. With vectors a pixel's values follow each other in a row, which is whole
// vectors. All loads come first, none of them behind a branch, so that they are under way together.
template <int vector>
TCONV_DEVICE void load_folded(const FoldedImage& image, const Layer::Element* from, int y, int x,
                              int channel, uint32_t (&words)[4]) {
    constexpr bool off_words = vector == 2 && fold_off_words;
    using Count = UnsignedOf<Layer::Index>::type;
    Count count = Count(image.source_width) * (vector == 1 ? 1 : fold_of_pixel);
    uint32_t values[8] = {};  // words, or values of a word each
    uint32_t before[4] = {};  // the words in the middle of which lines begin
#pragma unroll
    for (int i = 0; i < fold_of_octet; i += vector) {
        if (folded_channels % fold_of_octet != 0 && channel + i >= folded_channels) continue;
        // Where lines are whole octets, all of an octet is of one.
        int behind = vector > 1 && fold_run % 8 == 0 ? i : 0;
        Unfolded first(channel + i - behind);
        int row = y + first.y;
        bool has_row = unsigned(row) < unsigned(image.source_height);
        const auto* line = from + Layer::Index(row) * image.stride_h;
        if (vector == 1 || !Layer::fold_channels_last) {
            line += Layer::Index(first.channel) * image.stride_c;
        }
        if constexpr (vector == 1) {
            Layer::Index at = x + first.x;
            const auto* value = line + at * image.stride_w;
            if (has_row && Count(at) < count) {
                load_neighbours<sizeof(Layer::Element)>(value, values + i);
            }
            continue;
        }
        Layer::Index at = Layer::Index(x) * fold_of_pixel + first.rest + behind;
        if constexpr (off_words) {
            bool begins = i == 0 || (channel + i) % fold_run == 0;
            if (begins && has_row && Count(at - 1) < count) {
                load_neighbours<4>(line + at - 1, before + i / 2);
            }
            if (has_row && Count(at + 1) < count) {
                load_neighbours<4>(line + at + 1, values + i / 2);
            }
        } else if (has_row && Count(at) < count) {
            load_neighbours<2 * vector>(line + at, values + i / 2);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (off_words) {
            bool begins = i == 0 || (channel + 2 * i) % fold_run == 0;
            words[i] =
                __byte_perm(begins ? before[i] : values[i > 0 ? i - 1 : 0], values[i], 0x5432);
        } else if constexpr (vector == 1 && !folds_floats) {
            words[i] = values[2 * i] | values[2 * i + 1] << 16;
        } else {
            words[i] = values[i];
        }
    }
}

// The digits of a number of units, the first the fastest. To add one to another takes a third of
// the instructions that dividing takes.
struct FoldedPlace {
    int part, run, y, n;

    template <typename Count>
    TCONV_DEVICE FoldedPlace(Count number, int parts, int runs, int height) {
        Count rest = number / parts, row = rest / runs;
        part = number - rest * parts;
        run = rest - row * runs;
        n = row / height;
        y = row - Count(n) * height;
    }

    TCONV_DEVICE void add(const FoldedPlace& step, int parts, int runs, int height) {
        auto carry = [](int& digit, int more, int base) {
            digit += more;
            int over = digit >= base;
            digit -= over ? base : 0;
            return over;
        };
        n += step.n +
             carry(y, step.y + carry(run, step.run + carry(part, step.part, parts), runs), height);
    }
};

template <int vector>
TCONV_DEVICE void fold_octets(const FoldedImage& image) {
    using Index = Layer::Index;
    using Count = UnsignedOf<Index>::type;
    constexpr int octets = (folded_channels + fold_of_octet - 1) / fold_of_octet;
    constexpr int all_octets = octets * Layer::groups;
    constexpr int own = octets <= 4 ? octets : 1;  // of a thread
    constexpr int parts = all_octets / own;  // of a pixel
    // Neighbouring threads have so many pixels of an octet before the next octet's: of a contiguous
    // image those are neighbours in memory, and octets are not.
    constexpr int run = Layer::fold_channels_last || parts <= 8 ? 1 : 4;
    // Parts of a thread, whose loads are under way at a time.
    constexpr int together = own > 2 ? 1 : 4 / own;
    int runs = (image.width + run - 1) / run;
    Count units = Count(image.blocks) * (Layer::threads / run);
    FoldedPlace step(units, parts, runs, image.height);
    FoldedPlace place(Count(image.block) * (Layer::threads / run) + threadIdx.x / run, parts, runs,
                      image.height);
    while (place.n < image.batch) {
        uint32_t words[together][own][4] = {};
        uint4* to[together];
#pragma unroll
        for (int k = 0; k < together; ++k) {
            int x = place.run * run + threadIdx.x % run, n = place.n, y = place.y;
            int octet = place.part * own;
            place.add(step, parts, runs, image.height);
            to[k] = nullptr;
            if (n >= image.batch || (run > 1 && x >= image.width)) continue;
            to[k] = static_cast<uint4*>(image.destination) +
                    ((Index(n) * image.height + y) * image.width + x) * all_octets + octet;
            const auto* from = image.source + Index(n) * image.stride_n +
                               Index(octet / octets * Layer::fold_channels) * image.stride_c;
#pragma unroll
            for (int i = 0; i < own; ++i) {
                // With all octets of a pixel, a constant.
                int channel = (own == octets ? i : octet % octets) * fold_of_octet;
                load_folded<vector>(image, from, y * Layer::fold_y - Layer::cut_y,
                                    x * Layer::fold_x - Layer::cut_x, channel, words[k][i]);
            }
        }
#pragma unroll
        for (int k = 0; k < together; ++k) {
            if (to[k] == nullptr) continue;
#pragma unroll
            for (int i = 0; i < own; ++i) {
                const uint32_t (&of)[4] = words[k][i];
                to[k][i] = {of[0], of[1], of[2], of[3]};
            }
        }
    }
}

// All octets of the launch, in vectors of a length that divides `aligned`.
template <int vector>
TCONV_DEVICE void fold_with(const FoldedImage& image, unsigned aligned) {
    if constexpr (vector > 1) {
        if (aligned % vector != 0) {
            fold_with<vector / 2>(image, aligned);
            return;
        }
    }
    fold_octets<vector>(image);
}

TCONV_DEVICE void fold_image(const FoldedImage& image) {
    bool dense = image.stride_w == fold_of_pixel && (fold_of_pixel == 1 || image.stride_c == 1);
    // Where rows begin, and how long they are.
    auto aligned = reinterpret_cast<uint64_t>(image.source) / sizeof(Layer::Element) |
                   image.stride_n | image.stride_h |
                   Layer::Index(image.source_width) * fold_of_pixel;
    if (Layer::groups > 1) aligned |= Layer::fold_channels * image.stride_c;
    if constexpr (!Layer::fold_channels_last) aligned |= image.stride_c;
    fold_with<fold_longest>(image, dense ? unsigned(aligned) : 1);
}

}  // namespace
