// Packs y folded, as [image][row][column][group][channel], each pixel of a group on 16 bytes, with
// zeros where there is no pixel and behind the channels (<engine/fold.cuh>).
//
// A thread takes octets, 8 channels of a folded pixel of a group.
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

// The values of an octet of a pixel, `channel` the first; zeros where there is no pixel. All of a
// vector's pixels exist, or none does.
template <int vector>
TCONV_DEVICE void load_folded(const FoldedImage& image, const Layer::Element* from, int y, int x,
                              int channel, uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 8; i += vector) {
        if (folded_channels % 8 != 0 && channel + i >= folded_channels) continue;
        Unfolded first(channel + i);
        int row = y + first.y, column = x + first.x;
        if (unsigned(row) >= unsigned(image.source_height) ||
            unsigned(column) >= unsigned(image.source_width)) {
            continue;
        }
        const auto* value = from + Layer::Index(row) * image.stride_h +
                            Layer::Index(column) * image.stride_w +
                            Layer::Index(first.channel) * image.stride_c;
        if constexpr (vector > 1) {
            load_neighbours<vector>(value, words + i / 2);
        } else {
            words[i / 2] |= uint32_t(value->bits) << i % 2 * 16;
        }
    }
}

template <int vector>
TCONV_DEVICE void fold_octets(const FoldedImage& image) {
    using Index = Layer::Index;
    using Count = UnsignedOf<Index>::type;
    constexpr int octets = (folded_channels + 7) / 8, all_octets = octets * Layer::groups;
    // Neighbouring threads have so many pixels of an octet before the next octet's: of a contiguous
    // image those are neighbours in memory, and octets are not.
    constexpr int run = Layer::fold_channels_last || all_octets <= 8 ? 1 : 4;
    constexpr int together = 4;  // octets of a thread, whose loads are under way at a time
    Count runs = (image.width + run - 1) / run;
    Count count = runs * (run * all_octets) * image.height * image.batch;
    for (Count first = Count(blockIdx.x) * (together * Layer::threads) + threadIdx.x; first < count;
         first += Count(gridDim.x) * (together * Layer::threads)) {
        uint32_t words[together][4] = {};
        uint4* to[together];
#pragma unroll
        for (int k = 0; k < together; ++k) {
            Count unit = first + k * Layer::threads, rest = unit / run;
            int octet = rest % all_octets;
            rest /= all_octets;
            Count row = rest / runs, n = row / image.height;
            int x = int(rest - row * runs) * run + unit % run, y = row - n * image.height;
            to[k] = nullptr;
            if (unit >= count || x >= image.width) continue;
            to[k] = static_cast<uint4*>(image.destination) +
                    (Index(row) * image.width + x) * all_octets + octet;
            const auto* from = image.source + Index(n) * image.stride_n +
                               Index(octet / octets * Layer::fold_channels) * image.stride_c;
            load_folded<vector>(image, from, y * Layer::fold_y - Layer::cut_y,
                                x * Layer::fold_x - Layer::cut_x, octet % octets * 8, words[k]);
        }
#pragma unroll
        for (int k = 0; k < together; ++k) {
            if (to[k] != nullptr) *to[k] = {words[k][0], words[k][1], words[k][2], words[k][3]};
        }
    }
}

// All octets of the launch, in vectors of a length that divides `aligned`: those start on multiples
// of it, and lie within a row of y or beside it.
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
    // Of a folded pixel's first value, of a group's, and of a row's end.
    auto aligned = reinterpret_cast<uint64_t>(image.source) / sizeof(Layer::Element) |
                   image.stride_n | image.stride_h | Layer::cut_x * image.stride_w |
                   Layer::fold_x * image.stride_w | Layer::fold_channels * image.stride_c |
                   image.source_width * of_pixel;
    if constexpr (!Layer::fold_channels_last) aligned |= image.stride_c;
    fold_with<fold_longest>(image, dense ? unsigned(aligned) : 1);
}

}  // namespace
