// Pixels of an image that are gathered for positions, by the distance of a tap.
#pragma once

#include <sm80/multiply.cuh>

namespace {

constexpr bool forward = Layer::forward;
constexpr int common(int a, int b) { return b == 0 ? a : common(b, a % b); }

// An axis, for a phase of the result; the weight's gradient has that of the input's. Each further
// position and tap lies steps on.
template <int kernel, int stride, int padding, int dilation>
struct Axis {
    static constexpr int phases = forward ? stride : 1, factor = common(stride, dilation);
    static constexpr int source_step = forward ? 1 : stride;
    static constexpr int tap_step = forward ? stride / factor : 1;
    static constexpr int tap_distance = forward ? -dilation / factor : dilation;
    int first = 0, source = -padding;  // pixels of the first position: of the result, and at `tap`
    int tap = 0, taps = kernel;

    TCONV_DEVICE explicit Axis(int phase) {
        if constexpr (forward) {
            while (tap < kernel && tap * dilation % stride != phase) ++tap;
            taps = (kernel - tap + tap_step - 1) / tap_step;
            first = (phase + stride - padding % stride) % stride;
            source = (first + padding - tap * dilation) / stride;
        }
    }
};
using Y = Axis<Layer::kernel_y, Layer::stride_y, Layer::padding_y, Layer::dilation_y>;
using X = Axis<Layer::kernel_x, Layer::stride_x, Layer::padding_x, Layer::dilation_x>;

// An index that may wrap around: a tap's pixel lies in memory, but that of the first tap need not.
template <int bytes>
struct WrappingOf {
    using type = uint32_t;
};
template <>
struct WrappingOf<8> {
    using type = unsigned long long;
};
using Wrapping = WrappingOf<sizeof(Index)>::type;

struct alignas(sizeof(Index) == 4 ? 16 : 8) Pixel {
    Wrapping from;  // in the source, at the phase's first tap
    Index to;  // in the result, negative if none
    int y, x;  // of the source
};

// Those of `lines` positions of a phase of the result. Whether there are any.
template <int lines>
TCONV_DEVICE bool find_pixels(const Arguments& of, const Y& y, const X& x, Index first,
                              Pixel* pixels) {
    int height = ((forward ? of.y_height : of.x_height) - y.first + Y::phases - 1) / Y::phases;
    int width = ((forward ? of.y_width : of.x_width) - x.first + X::phases - 1) / X::phases;
    Index count = Index(of.batch) * height * width;
    if (height <= 0 || width <= 0 || first >= count) return false;
    for (int i = threadIdx.x; i < lines; i += Layer::threads) {
        Index all_rows = (first + i) / width, n = all_rows / height;
        int column = first + i - all_rows * width, row = all_rows - n * height;
        Index to = n * of.destination_stride_n +
                   (y.first + row * Y::phases) * of.destination_stride_h +
                   (x.first + column * X::phases) * of.destination_stride_w;
        row = y.source + row * Y::source_step;
        column = x.source + column * X::source_step;
        Wrapping from = Wrapping(n) * of.source_stride_n + Wrapping(row) * of.source_stride_h +
                        Wrapping(column) * of.source_stride_w;
        bool exists = first + i < count;
        pixels[i] = {from, exists ? to : Index(-1), exists ? row : int(0x80000000), column};
    }
    return true;
}

// Brings a part of them, `down` and `right` of those: each thread an octet of their channels.
template <int lines, int chunks>
TCONV_DEVICE void bring_pixels(const Arguments& of, const Pixel* pixels, unsigned char* to,
                               int group, int octet, int down, int right, bool exists, int part) {
    unsigned height = forward ? of.x_height : of.y_height;
    unsigned width = forward ? of.x_width : of.y_width;
    auto* source =
        static_cast<const Element*>(of.source) + (group * of.source_stride_group + octet * 8);
    Wrapping tap = Wrapping(down) * of.source_stride_h + Wrapping(right) * of.source_stride_w;
    for_lines<lines, Layer::threads / chunks>(threadIdx.x / chunks, part, [&](int i) {
        Pixel pixel = pixels[i];
        // NOTE: without a branch, which each copy would have.
        bool inside = exists & (unsigned(pixel.y) + unsigned(down) < height) &
                      (unsigned(pixel.x) + unsigned(right) < width);
        ptx::cp_async_cg_16(to + chunk_at<chunks>(i, threadIdx.x % chunks),
                            source + Index(pixel.from + tap), inside);
    });
}

}  // namespace
