// Packs an image of any strides as [image][row][column][group][channel], each pixel of a group on
// 16 bytes, so that tensor maps can describe it.
//
// An octet is 8 channels of a group, or 4 of float32. A unit is an octet of some pixels, which one
// thread takes: of each channel a vector of neighbouring pixels, turned
// in registers into 16 bytes for each pixel.
// If channels are adjacent in the source, it is an octet of one pixel. Neither shared memory nor
// a barrier is needed, and a thread's loads are all under way together.
//
// Rows and columns that no tap reads are left out. Such rows are not read either.
#pragma once

#include <common/constant_tables.cuh>
#include <common/element.cuh>
#include <common/split.cuh>

namespace {

struct Image {
    const Layer::Element* source;
    Layer::Element* destination;
    Layer::Index stride_n, stride_c, stride_h, stride_w;
    int batch, height, width;
    unsigned block = blockIdx.x, blocks = gridDim.x;  // of those that pack it
};

template <typename Index>
struct UnsignedOf {
    using type = uint32_t;
};

template <>
struct UnsignedOf<long long> {
    using type = unsigned long long;
};

template <bool first, typename First, typename Second>
struct Chosen {
    using type = First;
};

template <typename First, typename Second>
struct Chosen<false, First, Second> {
    using type = Second;
};

// Neighbours of some bytes, in words.
template <int bytes>
TCONV_DEVICE void load_neighbours(const void* from, uint32_t* words) {
    if constexpr (bytes == 16) {
        uint4 found = *static_cast<const uint4*>(from);
        words[0] = found.x;
        words[1] = found.y;
        words[2] = found.z;
        words[3] = found.w;
    } else if constexpr (bytes == 8) {
        uint2 found = *static_cast<const uint2*>(from);
        words[0] = found.x;
        words[1] = found.y;
    } else if constexpr (bytes == 4) {
        words[0] = *static_cast<const uint32_t*>(from);
    } else {
        words[0] = *static_cast<const uint16_t*>(from);
    }
}

// A pixel's 8 channels, of words of pixels of each.
template <int words>
TCONV_DEVICE uint4 turned_octet(const uint32_t (&values)[8][words], int pixel) {
    uint32_t of[4];
    unsigned halves = pixel % 2 == 0 ? 0x5410 : 0x7632;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        of[pair] =
            __byte_perm(values[2 * pair][pixel / 2], values[2 * pair + 1][pixel / 2], halves);
    }
    return {of[0], of[1], of[2], of[3]};
}

// The pixels of an axis that are packed: those of whose (pixel + cut) % stride is among `phases`.
template <int stride, int cut, const auto& phases>
struct PackedPixels {
    static constexpr int of_stride = sizeof(phases) / sizeof(phases[0]);
    static constexpr bool all = of_stride == stride;

    TCONV_DEVICE static constexpr int before(int phase) {
        int found = 0;
#pragma unroll
        for (int i = 0; i < of_stride; ++i) found += phases[i] < phase;
        return found;
    }

    // How many there are before a pixel.
    TCONV_DEVICE static int place(int pixel) {
        if constexpr (all) return pixel;
        int whole = (pixel + cut) / stride, phase = pixel + cut - whole * stride;
        return whole * of_stride + before(phase) - before(cut);
    }

    TCONV_DEVICE static bool packed(int pixel) { return all || place(pixel + 1) > place(pixel); }

    // The pixel at a place.
    TCONV_DEVICE static int pixel(int place) {
        if constexpr (all) return place;
        place += before(cut);
        int whole = place / of_stride;
        return whole * stride + entry(phases, place - whole * of_stride) - cut;
    }
};

// Of `channels` channels of a group; `channels_last`: whether they are adjacent in the source.
// `Rows` and `Columns` are the pixels that are packed. `splits`: float32 becomes three of bfloat16
// (<common/split.cuh>), and each group's channels follow each other thrice.
template <int channels, bool channels_last, typename Rows, typename Columns,
          int groups = Layer::groups, bool splits = false>
struct ImagePacking {
    using Element = Layer::Element;
    using Index = Layer::Index;
    using Count = UnsignedOf<Index>::type;

    static constexpr bool words_each = sizeof(Element) == 4;  // a value is a word
    static constexpr int of_octet = words_each ? 4 : 8;
    static constexpr int octets = (channels + of_octet - 1) / of_octet;  // of a group
    static constexpr int all_octets = octets * groups;
    // As they are written: 16 bytes, or three times 8, of which a group has an even number.
    using Octet = typename Chosen<splits, uint2, uint4>::type;
    static constexpr int part_octets = (octets + 1) / 2 * 2;
    static constexpr int pixel_octets = splits ? 3 * part_octets * groups : all_octets;
    // The longest vector. A vector of channels lies in a group. For a single octet, pixels are 16
    // bytes apart in the result: with longer vectors of pixels, a warp would write 16 bytes here
    // and there.
    static constexpr int longest =
        channels_last     ? (channels % of_octet == 0 ? of_octet : channels & -channels)
        : all_octets == 1 ? 2
                          : of_octet;

    // Writes the parts of four channels.
    TCONV_DEVICE static void split(const uint4& octet, Octet* to) {
        if constexpr (splits) {
            auto first = Split::scaled(__uint_as_float(octet.x), __uint_as_float(octet.y));
            auto last = Split::scaled(__uint_as_float(octet.z), __uint_as_float(octet.w));
            to[0] = {first.high, last.high};
            to[part_octets] = {first.middle, last.middle};
            to[2 * part_octets] = {first.low, last.low};
        }
    }

    // All units of the launch.
    TCONV_DEVICE static void pack(const Image& image) {
        // Where rows follow each other without a gap, an image is one row.
        bool joined = Rows::all && Columns::all &&
                      image.stride_h == Index(image.width) * image.stride_w &&
                      Index(image.height) * image.width <= 0x7fffffff;
        int rows = joined ? 1 : Rows::place(image.height);
        int size = joined ? image.height * image.width : image.width;
        // Vectors of a length that divides this start on multiples of it.
        Count aligned = Count(reinterpret_cast<uint64_t>(image.source) / sizeof(Element)) |
                        Count(image.stride_n) | (joined ? 0 : Count(image.stride_h));
        if constexpr (channels_last) {
            aligned |= Count(image.stride_w) | (image.stride_c == 1 ? 0 : 1);
        } else {
            aligned |= Count(image.stride_c) | size | (image.stride_w == 1 ? 0 : 1);
        }
        pack_with<longest>(image, rows, size, aligned);
    }

    template <int vector>
    TCONV_DEVICE static void pack_with(const Image& image, int rows, int size, Count aligned) {
        if constexpr (vector > 1) {
            if (aligned % vector != 0) {
                pack_with<vector / 2>(image, rows, size, aligned);
                return;
            }
        }
        pack_units<vector>(image, rows, size);
    }

    template <int vector>
    TCONV_DEVICE static void pack_units(const Image& image, int rows, int size) {
        constexpr int pixels = channels_last ? 1 : vector;
        int columns = Columns::place(size);
        // Vectors of a row that neighbouring threads take before the next octet's: they read 64
        // bytes, and write the octets of few pixels.
        constexpr int run = channels_last ? 1 : vector == 1 ? 16 : 4 * of_octet / vector;
        constexpr int words = words_each ? pixels : (pixels + 1) / 2;
        // Of a thread at a time.
        constexpr int units = vector == 8 ? 1 : vector == 4 ? 2 : 4;
        // Of a row, vectors of all columns, or the columns that are packed.
        Count vectors = channels_last ? columns : size / pixels;
        Count runs = (vectors + run - 1) / run;
        Count count = runs * (run * all_octets) * rows * image.batch;
        for (Count first = Count(image.block) * (units * Layer::threads) + threadIdx.x;
             first < count; first += Count(image.blocks) * (units * Layer::threads)) {
            uint32_t values[units][channels_last ? 4 : of_octet][words];
            Octet* to[units];
            int at[units];  // the first pixel
#pragma unroll
            for (int k = 0; k < units; ++k) {
                Count unit = first + k * Layer::threads, rest = unit / run;
                int octet = rest % all_octets;
                rest /= all_octets;
                Count next = rest / runs, number = (rest - next * runs) * run + unit % run;
                to[k] = nullptr;
                if (unit >= count || number >= vectors) continue;
                Count n = rows == 1 ? next : next / rows, row = next - n * rows;
                at[k] = channels_last ? Columns::pixel(number) : int(number) * pixels;
                Index place = Index(next) * columns + Columns::place(at[k]);
                to[k] = reinterpret_cast<Octet*>(image.destination) + place * pixel_octets +
                        (splits ? octet / octets * (3 * part_octets) + octet % octets : octet);
                int channel = octet % octets * of_octet, exist = channels - channel;
                const Element* from = image.source + Index(n) * image.stride_n +
                                      Index(Rows::pixel(row)) * image.stride_h +
                                      Index(at[k]) * image.stride_w +
                                      Index(octet / octets * channels + channel) * image.stride_c;
                load<vector>(from, image.stride_c, exist, values[k]);
            }
#pragma unroll
            for (int k = 0; k < units; ++k) {
                if (to[k] == nullptr) continue;
#pragma unroll
                for (int pixel = 0; pixel < pixels; ++pixel) {
                    if (!Columns::packed(at[k] + pixel)) continue;
                    Octet* of_pixel =
                        to[k] +
                        Index(Columns::place(at[k] + pixel) - Columns::place(at[k])) * pixel_octets;
                    if constexpr (splits) {
                        split(octet_of(values[k], pixel), of_pixel);
                    } else {
                        *of_pixel = octet_of(values[k], pixel);
                    }
                }
            }
        }
    }

    // An octet's values, of which `exist` channels exist, zeros behind them: words of channels, or
    // of each channel words of pixels.
    template <int vector, int count, int words>
    TCONV_DEVICE static void load(const Element* from, Index stride_c, int exist,
                                  uint32_t (&values)[count][words]) {
        constexpr int bytes = vector * sizeof(Element);
#pragma unroll
        for (auto& of_channel : values) {
#pragma unroll
            for (uint32_t& word : of_channel) word = 0;
        }
        if constexpr (!channels_last) {
#pragma unroll
            for (int channel = 0; channel < of_octet; ++channel) {
                if (channel >= channels || (channels % of_octet != 0 && channel >= exist)) continue;
                load_neighbours<bytes>(from + channel * stride_c, values[channel]);
            }
        } else {
#pragma unroll
            for (int channel = 0; channel < of_octet; channel += vector) {
                if (channel >= channels || (channels % of_octet != 0 && channel >= exist)) continue;
                constexpr int words_found = (bytes + 3) / 4;
                uint32_t found[words_found];
                load_neighbours<bytes>(from + channel * stride_c, found);
#pragma unroll
                for (int word = 0; word < words_found; ++word) {
                    if constexpr (words_each) {
                        values[channel + word][0] = found[word];
                    } else {
                        values[channel / 2 + word][0] |= found[word] << channel % 2 * 16;
                    }
                }
            }
        }
    }

    // A pixel's octet.
    template <int count, int words>
    TCONV_DEVICE static uint4 octet_of(const uint32_t (&values)[count][words], int pixel) {
        if constexpr (words_each) {
            int at = channels_last ? 0 : pixel;
            return {values[0][at], values[1][at], values[2][at], values[3][at]};
        } else if constexpr (channels_last) {
            return {values[0][0], values[1][0], values[2][0], values[3][0]};
        } else {
            return turned_octet(values, pixel);
        }
    }
};

}  // namespace
