// Outputs of a kernel of 1x1 without padding, as vectors of a plane. A plane's rows follow each
// other without a gap, so that a run of them is one line of outputs, whatever its rows' width.
//
// Vectors lie on multiples of 16 bytes of memory. The first and the last of a run may be parts.
// Read from Layer: stride_y and stride_x. An output has a pixel where both coordinates are
// multiples of the strides, and holds the bias alone elsewhere.
#pragma once

#include <common/division.cuh>
#include <ptx/memory.cuh>

namespace {

// Elements from the multiple of 16 bytes at or before element `first` of y to it.
template <typename Index>
TCONV_DEVICE int behind_vector(Index first) {
    return int(first & 3);
}

// The coordinates of an output, moved along a run.
struct Output {
    int y, x;

    // Of element `e` of a run that begins with a row; e is negative before it.
    template <typename Arguments>
    TCONV_DEVICE Output(int e, const Arguments& a) {
        y = e < 0 ? 0 : int(divide(unsigned(e), a.width_multiplier, a.width_shift));
        x = e - y * a.destination_width;
    }

    TCONV_DEVICE void advance(int width) {
        if (++x == width) x = 0, ++y;
    }

    TCONV_DEVICE bool has_pixel() const {
        return y % Layer::stride_y == 0 && x % Layer::stride_x == 0;
    }
};

// Writes elements e to e + 3 of a run, those that it has.
TCONV_DEVICE void store_vector(float* run, int e, int length, const float (&values)[4]) {
    if (e >= 0 && e + 4 <= length) {
        ptx::st_global_cs_v4(run + e, make_float4(values[0], values[1], values[2], values[3]));
    } else {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            if (unsigned(e + v) < unsigned(length)) ptx::st_global_cs(run + e + v, values[v]);
        }
    }
}

}  // namespace
