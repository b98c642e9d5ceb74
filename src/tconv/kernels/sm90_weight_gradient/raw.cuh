// Contiguous images as they lie, for `sm90_weight_gradient`. y has lines of pixels of each output
// channel, [row][channel][pixel], an odd number of octets apart, or of 128 bytes and swizzled, if
// each octet of positions has its own. A warp's rows of the product are 16 channels, its positions
// every stride-th pixel from a tap's on. They go to registers, and are taken apart there: no shift
// and no stride asks anything of shared memory.
//
// x is the product's other operand, as it lies too, [row][channel][column]: its rows that follow
// each other may be columns of one product, which then serves the taps of a column of the kernel.
// A taker has `row_taps` neighbouring taps of a row.
//
// A word of float32 is a pixel: nothing is taken apart.
//
// A flat y (<common/flat_planes.cuh>) has lines [row][class][channel], off by a few pixels: other
// words, of a row and class.
//
// A thread has its two rows' channels adjacent, so that lanes that load at a time meet all banks:
// 2 * (lane / 4) and the next, which lanes 16 to 31 have the other way round. Of classes a warp has
// two, which takes 8 channels of each in a stage; every second first. At strides of 4 and more,
// which float32 alone has, lanes meet a quarter of the banks.
//
// Only for <sm90_weight_gradient.cu>.
#pragma once

#include <common/element.cuh>
#include <common/flat_planes.cuh>

namespace {

constexpr int value_bytes = Layer::strict ? 2 : sizeof(Layer::Element);  // as it is multiplied
constexpr bool is_float32 = value_bytes == 4;
constexpr int step_positions = 32 / value_bytes;  // of a product

constexpr int raw_taps = Layer::row_taps;
constexpr int raw_channels = Layer::raw ? Layer::out_block : 16;
constexpr int raw_rows = Layer::positions / Layer::columns;
// Of y, as it lies: in strict float32 it is split in registers.
constexpr int pixel_bytes = sizeof(Layer::Element);
constexpr int raw_line_bytes = pixel_bytes * Layer::line_pixels;
constexpr int raw_row_bytes = raw_channels * raw_line_bytes;
constexpr int x_row_bytes = Layer::in_block * value_bytes * Layer::columns;

// Words, two pixels, that the taps of a thread's two positions read, from a multiple of
// `word_vector` on: so many are loaded at a time. A taker's first pixel is the word's second, or
// of the vector's second word, always (1), never (0), or sometimes (2).
constexpr int word_vector = Layer::stride_x == 2 ? 2 : 1;
constexpr bool may_be_odd = Layer::odd_pixel != 0;
constexpr bool may_be_late = Layer::late_word != 0;
constexpr int last_word = ((raw_taps - 1) * Layer::dilation_x + Layer::stride_x + may_be_odd) / 2;
constexpr int word_count = (last_word + may_be_late) / word_vector * word_vector + word_vector;

TCONV_DEVICE bool known_or(int known, int bit) { return known == 2 ? bit != 0 : known == 1; }

// Of channels in a stage.
template <typename Fields>
TCONV_DEVICE int raw_classes(const Fields& arguments) {
    if constexpr (Layer::flat) return arguments.flat_classes;
    return 1;
}

// Bytes of x in a stage: a raw box has rows above it.
template <typename Fields>
TCONV_DEVICE int x_bytes(const Fields& arguments, int of_box) {
    if constexpr (Layer::raw) return arguments.x_bytes;
    return of_box;
}

// A patch of a flat y, by a warp: each lane has a row and class.
//
// NOTE: the instructions of a thread that issued all these copies took longer than what was
// multiplied meanwhile.
template <typename Fields>
TCONV_DEVICE void bring_flat(const Fields& arguments, unsigned char* to, int x, int y, int channel,
                             int image, int group, uint64_t* full) {
    FlatPlanes planes(arguments);
    int of_class = planes.of_class(channel), bytes = planes.of_class(raw_row_bytes);
    int copies = arguments.pitch_y * planes.classes;
    for (int n = 0; n < arguments.box_n; ++n) {
#pragma unroll 1
        for (int i = threadIdx.x; i < copies; i += 32) {
            int row = y + planes.of_class(i) * Layer::stride_y;
            int start = planes.start(i & (planes.classes - 1), row, x);
            ptx::cp_async_bulk_tensor_4d_global_to_shared(to + i * bytes, &arguments.y_0, start,
                                                          of_class, image + n, group, full);
        }
        to += copies * bytes;
    }
}

// Of a thread's row 0 or 1.
TCONV_DEVICE int raw_channel(int row, int classes) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32 % (raw_channels / 16);
    int pair = lane / 4;
    if (Layer::turned) return warp * 16 + pair * 2 + row;
    if (classes == 1) return warp * 16 + pair * 2 + (row ^ lane / 16);
    int shift = classes / 4;  // 2, 4 or 8 classes are of 1, 2 or 4 warps
    int of_classes = warp >> shift;
    pair = pair % 4 * 2 + pair / 4;
    return (of_classes * 8 + pair) * classes + (warp - (of_classes << shift)) * 2 + row;
}

// The words from `at` on, the first that a taker's first tap reads in front. None is read behind
// the last that a tap needs, where a line may end.
TCONV_DEVICE void load_words(const unsigned char* at, bool odd, bool late,
                             uint32_t (&words)[word_count]) {
    constexpr int pixels = (raw_taps - 1) * Layer::dilation_x + Layer::stride_x;
    int last = (pixels + odd) / 2 + late;
    using Words = Vector<uint32_t, word_vector>;
#pragma unroll
    for (int i = 0; i < word_count; i += word_vector) {
        // NOTE: no branch, before which ptxas would end products (C7519).
        int from = i <= pixels / 2 || i <= last ? i : i - word_vector;
        Words read = *reinterpret_cast<const Words*>(at + from * 4);
#pragma unroll
        for (int k = 0; k < word_vector; ++k) words[i + k] = read.values[k];
    }
#pragma unroll
    for (int i = 0; i + 1 < word_count; ++i) words[i] = late ? words[i + 1] : words[i];
}

// A position of each tap in float32, the first tap's at `pixel`. Of every second pixel two at a
// time: of single ones, lanes would meet half of the banks.
TCONV_DEVICE void load_pixels(const unsigned char* line, int pixel, float (&values)[raw_taps]) {
    constexpr int last = (raw_taps - 1) * Layer::dilation_x;
    if constexpr (Layer::stride_x == 2 && Layer::dilation_x == 1) {
        bool odd = known_or(Layer::odd_pixel, pixel % 2);
        constexpr int pairs = (last + may_be_odd) / 2 + 1;
        float words[2 * pairs + 1];
#pragma unroll
        for (int i = 0; i < pairs; ++i) {
            // Not behind the last that a tap needs, where a line may end.
            int from = 2 * i <= last + odd ? i : i - 1;
            float2 pair = reinterpret_cast<const float2*>(line)[pixel / 2 + from];
            words[2 * i] = pair.x;
            words[2 * i + 1] = pair.y;
        }
#pragma unroll
        for (int tap = 0; tap < raw_taps; ++tap) values[tap] = odd ? words[tap + 1] : words[tap];
    } else {
        const auto* pixels = reinterpret_cast<const float*>(line) + pixel;
#pragma unroll
        for (int tap = 0; tap < raw_taps; ++tap) values[tap] = pixels[tap * Layer::dilation_x];
    }
}

// Two neighbouring positions of a tap.
TCONV_DEVICE uint32_t two_positions(const uint32_t (&words)[word_count], int tap, bool odd) {
    constexpr int last = word_count - 1;
    int pixel = tap * Layer::dilation_x, i = pixel / 2;
    auto word = [&](int i) { return words[i < last ? i : last]; };
    if constexpr (Layer::stride_x == 2) {
        if (pixel % 2 == 0) return __byte_perm(word(i), word(i + 1), odd ? 0x7632 : 0x5410);
        uint32_t even = __byte_perm(word(i), word(i + 1), 0x7632);
        return odd ? __byte_perm(word(i + 1), word(i + 2), 0x5410) : even;
    } else if (may_be_odd || pixel % 2) {
        int by = pixel % 2 + odd;  // pixels
        return __byte_perm(word(i), word(i + 1), by == 0 ? 0x3210 : by == 1 ? 0x5432 : 0x7654);
    } else {
        return words[i];
    }
}

// Where a taker's y and x lie in a stage.
template <typename Fields>
struct RawPlaces {
    int of_channel[2], first_pixel, of_row[raw_rows], x_row[raw_rows];
    // Flat, pixels before a class, a row and a box, of which the last three bits matter.
    unsigned class_pixels[2], row_pixels[Layer::flat ? raw_rows : 1], box_pixels;

    // `tap`: a taker's first.
    TCONV_DEVICE RawPlaces(const Fields& arguments, int tap) : first_pixel(Layer::tap_x[tap]) {
        int t = threadIdx.x % 4, tap_y = Layer::tap_y[tap], pitch = arguments.pitch_y;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int channel = raw_channel(i, raw_classes(arguments)), line = channel;
            if constexpr (Layer::flat) {
                FlatPlanes planes(arguments);
                int in_class = planes.of_class(channel);
                int of_class = channel - in_class * planes.classes;
                line = of_class * planes.of_class(raw_channels) + in_class;
                class_pixels[i] = of_class * arguments.flat_plane;
            }
            // Of a lane two positions of 16 bits, or of strict float32; one of TF32.
            of_channel[i] = line * raw_line_bytes + t * Layer::stride_x * (Layer::strict ? 8 : 4);
            if constexpr (Layer::swizzled) of_channel[i] ^= channel % 8 * 16;
        }
#pragma unroll
        for (int row = 0; row < raw_rows; ++row) {
            int image = row / arguments.box_y, of_image = row - image * arguments.box_y + tap_y;
            of_row[row] = (image * pitch + of_image) * raw_row_bytes;
            x_row[row] = (row + image * (Layer::stacked - 1)) * x_row_bytes;
            if constexpr (Layer::flat) {
                int source = Layer::tap_source[tap];
                int of_source = of_image + entry(Layer::source_y, source);
                row_pixels[row] = unsigned(Layer::source_first[source]) * arguments.flat_width +
                                  unsigned(of_source) * Layer::stride_y * arguments.flat_width;
            }
        }
    }

    // `y`: a box's first row.
    TCONV_DEVICE void begin(const Fields& arguments, int y) {
        if constexpr (Layer::flat) {
            box_pixels = unsigned(y) * Layer::stride_y * arguments.flat_width;
        }
    }

    // y of some steps of a box; `y`: a taker's source.
    template <int count>
    TCONV_DEVICE void load(const Fields& arguments, const unsigned char* y, int first,
                           uint32_t (&a)[count][raw_taps][4]) {
#pragma unroll
        for (int step = 0; step < count; ++step) {
            int position = (first + step) * step_positions, row = position / Layer::columns;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int column = position % Layer::columns + i / 2 * (step_positions / 2);
                int pixel = first_pixel, of_line = column * Layer::stride_x * value_bytes;
                if constexpr (Layer::flat) {
                    pixel += int(class_pixels[i % 2] + row_pixels[row] + box_pixels) &
                             (FlatPlanes::octet - 1);
                }
                if constexpr (is_float32) {
                    int at = of_channel[i % 2];
                    at = Layer::swizzled ? at ^ of_line : at + of_line;
                    float values[raw_taps];
                    load_pixels(y + of_row[row] + at, pixel, values);
#pragma unroll
                    for (int tap = 0; tap < raw_taps; ++tap) {
                        a[step][tap][i] = __float_as_uint(values[tap]);
                    }
                    continue;
                }
                bool odd = known_or(Layer::odd_pixel, pixel % 2);
                bool late = known_or(Layer::late_word, pixel / 2 % 2);
                int word = pixel / 2 / word_vector * word_vector, at = of_channel[i % 2];
                at = Layer::swizzled ? at ^ of_line : at + of_line;
                uint32_t words[word_count];
                load_words(y + of_row[row] + at + word * 4, odd, late, words);
#pragma unroll
                for (int tap = 0; tap < raw_taps; ++tap) {
                    a[step][tap][i] = two_positions(words, tap, odd);
                }
            }
        }
    }

    // Pixels of a step's positions of strict float32, a thread's two of each tap.
    using Pixels = float[4][raw_taps][2];

    TCONV_DEVICE void load_pixels_of(const unsigned char* y, int step, Pixels& values) {
        int position = step * step_positions, row = position / Layer::columns;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int column = position % Layer::columns + i / 2 * (step_positions / 2);
            int pixel = first_pixel, of_line = column * Layer::stride_x * pixel_bytes;
            if constexpr (Layer::flat) {
                pixel += int(class_pixels[i % 2] + row_pixels[row] + box_pixels) &
                         (FlatPlanes::octet - 1);
            }
            int at = of_channel[i % 2];
            at = Layer::swizzled ? at ^ of_line : at + of_line;
            const auto* pixels = reinterpret_cast<const float*>(y + of_row[row] + at) + pixel;
#pragma unroll
            for (int tap = 0; tap < raw_taps; ++tap) {
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    values[i][tap][k] = pixels[tap * Layer::dilation_x + k * Layer::stride_x];
                }
            }
        }
    }

    // Where a step begins in x.
    TCONV_DEVICE int x_step(int step) const {
        int position = step * step_positions;
        return x_row[position / Layer::columns] + position % Layer::columns * value_bytes;
    }
};

// x, in lines that are swizzled by their length.
TCONV_DEVICE uint64_t raw_x(const unsigned char* x) {
    constexpr int line = Layer::columns * value_bytes;
    constexpr ptx::Swizzle swizzle = line == 32   ? ptx::Swizzle::bytes_32
                                     : line == 64 ? ptx::Swizzle::bytes_64
                                                  : ptx::Swizzle::bytes_128;
    static_assert(!Layer::raw || line == 32 || line == 64 || line == 128);
    return ptx::matrix_descriptor(x, 0, 8 * line, swizzle);
}

}  // namespace
