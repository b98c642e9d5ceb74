// A contiguous y as it lies, for `sm90_weight_gradient`: lines of up to 64 pixels of each output
// channel, [row][channel][pixel] or [channel][row][pixel], swizzled by 128 bytes. A warp's rows of
// the product are 16 channels, its positions every stride-th pixel from the tap's on. They go to
// registers, and are taken apart there: no shift and no stride asks anything of shared memory. x is
// the product's other operand, as it lies too.
//
// A thread has its two rows' channels adjacent: 2 * (lane / 4) and the next, which lanes 16 to 31
// have the other way round. So 16 lanes that load 8 bytes each, or 32 that load 4, meet all banks.
//
// Only for <sm90_weight_gradient.cu>.
#pragma once

namespace {

constexpr int raw_taps = Layer::consumer_taps;
constexpr int raw_channels = Layer::raw ? Layer::out_block : 16;
constexpr int raw_rows = Layer::positions / Layer::columns;

// Words, two pixels, that the taps of a thread's two positions read, from the first position on.
constexpr int last_pixel = Layer::first_pixel + (raw_taps - 1) * Layer::dilation_x;
constexpr int word_vector = Layer::stride_x;  // loaded at a time
constexpr int first_word = Layer::first_pixel / 2 / word_vector * word_vector;
constexpr int word_count =
    ((last_pixel + Layer::stride_x) / 2 - first_word) / word_vector * word_vector + word_vector;

// Of a thread's row 0 or 1.
TCONV_DEVICE int raw_channel(int row) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    return warp * 16 % raw_channels + lane / 4 * 2 + (row ^ lane / 16);
}

// Of a channel's line, from the word `at`, which is a multiple of the stride.
TCONV_DEVICE void load_words(const unsigned char* line, int swizzle, int at,
                             uint32_t (&words)[word_count]) {
    auto word = [&](int i) {
        return reinterpret_cast<const uint32_t*>(line + (i / 4 ^ swizzle) * 16 + i % 4 * 4);
    };
    if constexpr (word_vector == 1) {
#pragma unroll
        for (int i = 0; i < word_count; ++i) words[i] = *word(at + i);
    } else {
        constexpr int last = word_count - 1;
        // Whether of the first pair the second word is read alone, and of the last the first.
        constexpr bool ends = Layer::first_pixel / 2 % 2 == 1 &&
                              (last_pixel + Layer::stride_x) / 2 % 2 == 0 && word_count > 2;
#pragma unroll
        for (int i = ends ? 2 : 0; i < (ends ? last - 1 : last); i += 2) {
            uint2 pair = *reinterpret_cast<const uint2*>(word(at + i));
            words[i] = pair.x;
            words[i + 1] = pair.y;
        }
        if constexpr (ends) {
            // All these words are odd, or even: half of the banks. So half of the lanes begin with
            // the others.
            bool late = threadIdx.x % 32 >= 16;
            uint32_t one = *word(at + (late ? last - 1 : 1));
            uint32_t other = *word(at + (late ? 1 : last - 1));
            words[1] = late ? other : one;
            words[last - 1] = late ? one : other;
        }
    }
}

// Two neighbouring positions of a tap.
TCONV_DEVICE uint32_t two_positions(const uint32_t (&words)[word_count], int tap) {
    int pixel = Layer::first_pixel + tap * Layer::dilation_x, i = pixel / 2 - first_word;
    if constexpr (Layer::stride_x == 2) {
        return __byte_perm(words[i], words[i + 1], pixel % 2 ? 0x7632 : 0x5410);
    } else {
        return pixel % 2 ? __byte_perm(words[i], words[i + 1], 0x5432) : words[i];
    }
}

// Bytes from a row of y to the next in a patch that has those of a channel apart.
constexpr int raw_row_bytes = raw_channels * 128;

// y of some steps of a box, of a thread's row of the kernel. `of_row`: where the first channel's
// line of a row begins. By channel, the next channel's is `channel_rows` lines further on.
template <int count, int taps>
TCONV_DEVICE void load_y(const unsigned char* y, const int (&of_row)[raw_rows], int channel_rows,
                         int first, uint32_t (&a)[count][taps][4]) {
    int t = threadIdx.x % 4;
#pragma unroll
    for (int step = 0; step < count; ++step) {
        int position = (first + step) * 16, row = position / Layer::columns;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int column = position % Layer::columns + i / 2 * 8, channel = raw_channel(i % 2);
            int at = of_row[row] + channel * (Layer::by_channel ? channel_rows : 1) * 128;
            int word = (column / 2 + t) * Layer::stride_x + first_word;
            uint32_t words[word_count];
            load_words(y + at, (Layer::by_channel ? at / 128 : channel) % 8, word, words);
#pragma unroll
            for (int tap = 0; tap < taps; ++tap) a[step][tap][i] = two_positions(words, tap);
        }
    }
}

// x of a box: [row][channel][column], in lines that are swizzled by their length.
constexpr int x_line_bytes = 2 * Layer::columns;

TCONV_DEVICE uint64_t raw_x(const unsigned char* x) {
    constexpr ptx::Swizzle swizzle =
        Layer::columns == 16 ? ptx::Swizzle::bytes_32 : ptx::Swizzle::bytes_64;
    static_assert(!Layer::raw || Layer::columns == 16 || Layer::columns == 32);
    return ptx::matrix_descriptor(x, 0, 8 * x_line_bytes, swizzle);
}

// Where a step begins in it.
TCONV_DEVICE int raw_x_step(int step) {
    int position = step * 16, row = position / Layer::columns;
    return row * Layer::in_block * x_line_bytes + position % Layer::columns * 2;
}

}  // namespace
