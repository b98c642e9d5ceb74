// Packs y folded, as [image][row][column][group][channel], each pixel of a group on 16 bytes, with
// zeros where there is no pixel and behind the channels (<engine/fold.cuh>).
//
// A thread takes an octet, 8 channels of a folded pixel of a group.
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
};

// The octets of a line's channels are vectors of so many values at most.
constexpr int fold_longest = fold_run % 8 == 0 ? 8 : fold_run & -fold_run;

// The values of an octet of a pixel, `channel` the first.
template <int vector>
TCONV_DEVICE void load_folded(const FoldedImage& image, const Layer::Element* from, int y, int x,
                              int channel, uint32_t (&words)[4]) {
    constexpr int of_pixel = Layer::fold_channels_last ? Layer::fold_channels : 1;
#pragma unroll
    for (int i = 0; i < 8; i += vector) {
        if (channel + i >= folded_channels) continue;
        Unfolded first(channel + i);
        // The last value of a vector may be of a later pixel.
        int later = of_pixel == 1 ? vector - 1 : (first.channel + vector - 1) / of_pixel;
        int row = y + first.y, column = x + first.x;
        if (row < 0 || row >= image.source_height || column + later < 0 ||
            column >= image.source_width) {
            continue;
        }
        const auto* value = from + Layer::Index(row) * image.stride_h +
                            Layer::Index(column) * image.stride_w +
                            Layer::Index(first.channel) * image.stride_c;
        uint32_t found[vector > 1 ? vector / 2 : 1] = {};
        if (column >= 0 && column + later < image.source_width) {
            load_neighbours<vector>(value, found);
        } else {
#pragma unroll
            for (int k = 0; k < vector; ++k) {
                int pixel = column + (of_pixel == 1 ? k : (first.channel + k) / of_pixel);
                if (pixel >= 0 && pixel < image.source_width) {
                    found[k / 2] |= uint32_t(value[k].bits) << k % 2 * 16;
                }
            }
        }
#pragma unroll
        for (int word = 0; word < (vector + 1) / 2; ++word) {
            words[i / 2 + word] |= found[word] << i % 2 * 16;
        }
    }
}

// The same, of a pixel whose values all exist; vectors of at least two.
template <int vector>
TCONV_DEVICE void load_whole(const FoldedImage& image, const Layer::Element* from, int y, int x,
                             int channel, uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 8; i += vector) {
        if (folded_channels % 8 != 0 && channel + i >= folded_channels) continue;
        Unfolded first(channel + i);
        const auto* value = from + Layer::Index(y + first.y) * image.stride_h +
                            Layer::Index(x + first.x) * image.stride_w +
                            Layer::Index(first.channel) * image.stride_c;
        load_neighbours<vector>(value, words + i / 2);
    }
}

// An octet's place: what a thread takes at a time.
struct FoldedOctet {
    using Index = Layer::Index;
    using Count = UnsignedOf<Index>::type;

    static constexpr int octets = (folded_channels + 7) / 8;  // of a group
    static constexpr int all_octets = octets * Layer::groups;
    // Neighbouring threads have so many pixels of an octet before the next octet's: of a contiguous
    // image those are neighbours in memory, and octets are not.
    static constexpr int run = Layer::fold_channels_last || all_octets <= 8 ? 1 : 4;

    const Layer::Element* from;
    uint4* to = nullptr;  // where there is one
    int y, x, channel;

    TCONV_DEVICE static Count runs(const FoldedImage& image) {
        return (image.width + run - 1) / run;
    }

    TCONV_DEVICE static Count count(const FoldedImage& image) {
        return runs(image) * (run * all_octets) * image.height * image.batch;
    }

    TCONV_DEVICE FoldedOctet(const FoldedImage& image, Count number) {
        Count rest = number / run;
        int octet = rest % all_octets;
        rest /= all_octets;
        Count row = rest / runs(image), n = row / image.height;
        int column = int(rest - row * runs(image)) * run + number % run;
        if (number >= count(image) || column >= image.width) return;
        channel = octet % octets * 8;
        y = int(row - n * image.height) * Layer::fold_y - Layer::cut_y;
        x = column * Layer::fold_x - Layer::cut_x;
        from = image.source + Index(n) * image.stride_n +
               Index(octet / octets * Layer::fold_channels) * image.stride_c;
        to = static_cast<uint4*>(image.destination) +
             (Index(row) * image.width + column) * all_octets + octet;
    }

    // Whether all values of its pixel exist.
    TCONV_DEVICE bool whole(const FoldedImage& image) const {
        return y >= 0 && y + Layer::fold_y <= image.source_height && x >= 0 &&
               x + Layer::fold_x <= image.source_width;
    }
};

template <int vector>
TCONV_DEVICE void fold_octets(const FoldedImage& image) {
    using Count = FoldedOctet::Count;
    // Octets of a thread, whose loads are under way at a time.
    constexpr int together = vector > 1 ? 4 : 1;
    Count count = FoldedOctet::count(image);
    for (Count first = Count(blockIdx.x) * (together * Layer::threads) + threadIdx.x; first < count;
         first += Count(gridDim.x) * (together * Layer::threads)) {
        uint32_t words[together][4] = {};
        uint4* to[together];
#pragma unroll
        for (int k = 0; k < together; ++k) {
            FoldedOctet of(image, first + k * Layer::threads);
            to[k] = of.to;
            if (of.to == nullptr) continue;
            if (vector > 1 && of.whole(image)) {
                load_whole<vector>(image, of.from, of.y, of.x, of.channel, words[k]);
            } else {
                load_folded<vector>(image, of.from, of.y, of.x, of.channel, words[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < together; ++k) {
            if (to[k] != nullptr) *to[k] = {words[k][0], words[k][1], words[k][2], words[k][3]};
        }
    }
}

// All octets of the launch, in vectors of a length that divides `aligned`: those start on multiples
// of it.
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
    constexpr int of_pixel = Layer::fold_channels_last ? Layer::fold_channels : 1;
    bool dense = image.stride_w == of_pixel && (of_pixel == 1 || image.stride_c == 1);
    // Of a folded pixel's first value, and of a group's.
    auto aligned = reinterpret_cast<uint64_t>(image.source) / sizeof(Layer::Element) |
                   image.stride_n | image.stride_h | Layer::cut_x * image.stride_w |
                   Layer::fold_x * image.stride_w | Layer::fold_channels * image.stride_c;
    if constexpr (!Layer::fold_channels_last) aligned |= image.stride_c;
    fold_with<fold_longest>(image, dense ? unsigned(aligned) : 1);
}

}  // namespace
