// The gradient of the weight, for any layer: a sum over all input pixels
//
//     gw[ci, co, ty, tx] = sum over (n, iy, ix) of
//         x[n, ci, iy, ix] * gy[n, co, iy*stride - padding + ty*dilation, ...]
//
// on fused multiply-adds. A tile is some input channels, some output channels of their group and
// one tap. A block has a contiguous share of the pixels (a split), which its threads take in turns,
// each with sums of the whole tile. Pixels whose output at the tap does not exist are left out, so
// only products that exist are added. Sums of the lanes and of the warps are added in an order that
// never changes; those of the splits go to `partial[split, ci, co, ty, tx]` and are added
// afterwards.
#include <common/element.cuh>

namespace {

using Element = Layer::Element;
using Real = Accumulator<Element>::type;
using Index = Layer::Index;

constexpr int threads = Layer::threads;
constexpr int rows = Layer::tile_rows;
constexpr int columns = Layer::tile_columns;
constexpr int taps = Layer::kernel_y * Layer::kernel_x;
constexpr int row_tiles = (Layer::in_channels + rows - 1) / rows;
constexpr int column_tiles = (Layer::out_channels + columns - 1) / columns;

using Sums = Real[rows][columns];

struct Shared {
    Real sums[threads / 32][rows * columns];  // of each warp
};

// A tile of a split. Tiles of one split are neighbours: they read the same pixels.
struct Tile {
    int row, column;  // the first input channel, and output channel
    int tap, group;
    Index split;

    TCONV_DEVICE explicit Tile(Index number) {
        column = int(number % column_tiles) * columns;
        number /= column_tiles;
        row = int(number % row_tiles) * rows;
        number /= row_tiles;
        tap = int(number % taps);
        number /= taps;
        group = int(number % Layer::groups);
        split = number / Layer::groups;
    }
};

// Neighbouring channels of a pixel, of which `exist` exist: sums of the others are not stored.
template <int count>
TCONV_DEVICE void load(const Element* first, Index stride, int exist, Real (&values)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
        Element value{};
        if (i < exist) value = first[i * stride];
        values[i] = operand<Layer::round_to_tf32>(value);
    }
}

TCONV_DEVICE void accumulate(const Arguments& arguments, const Tile& tile, Sums& sums) {
    const Element* x = static_cast<const Element*>(arguments.x) +
                       (Index(tile.group) * Layer::in_channels + tile.row) * arguments.x_stride_c;
    const Element* y =
        static_cast<const Element*>(arguments.y) +
        (Index(tile.group) * Layer::out_channels + tile.column) * arguments.y_stride_c;
    int dy = tile.tap / Layer::kernel_x * Layer::dilation_y - Layer::padding_y;
    int dx = tile.tap % Layer::kernel_x * Layer::dilation_x - Layer::padding_x;
    Index first = tile.split * arguments.split_pixels, end = first + arguments.split_pixels;
    if (end > arguments.pixels) end = arguments.pixels;
#pragma unroll 1
    for (Index pixel = first + threadIdx.x; pixel < end; pixel += threads) {
        Index line = pixel / arguments.width;
        Index image = line / arguments.height;
        int in_y = int(line - image * arguments.height);
        int in_x = int(pixel - line * arguments.width);
        int out_y = in_y * Layer::stride_y + dy, out_x = in_x * Layer::stride_x + dx;
        if (out_y < 0 || out_y >= arguments.out_height || out_x < 0 ||
            out_x >= arguments.out_width) {
            continue;
        }
        Real of_x[rows], of_y[columns];
        load(x + (image * arguments.x_stride_n + in_y * arguments.x_stride_h +
                  in_x * arguments.x_stride_w),
             arguments.x_stride_c, Layer::in_channels - tile.row, of_x);
        load(y + (image * arguments.y_stride_n + out_y * arguments.y_stride_h +
                  out_x * arguments.y_stride_w),
             arguments.y_stride_c, Layer::out_channels - tile.column, of_y);
#pragma unroll
        for (int i = 0; i < rows; ++i) {
#pragma unroll
            for (int j = 0; j < columns; ++j) sums[i][j] += of_x[i] * of_y[j];
        }
    }
}

// partial: [splits, groups*rows, out_channels, kH*kW]
TCONV_DEVICE void store(const Arguments& arguments, Shared& shared, const Tile& tile, Sums& sums) {
#pragma unroll
    for (int i = 0; i < rows; ++i) {
#pragma unroll
        for (int j = 0; j < columns; ++j) {
#pragma unroll
            for (int other = 16; other > 0; other /= 2) {
                sums[i][j] += __shfl_xor_sync(~0u, sums[i][j], other);
            }
            if (threadIdx.x % 32 == 0) {
                shared.sums[threadIdx.x / 32][i * columns + j] = sums[i][j];
            }
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < rows * columns; e += threads) {
        int row = tile.row + e / columns, column = tile.column + e % columns;
        if (row >= Layer::in_channels || column >= Layer::out_channels) continue;
        Real sum = shared.sums[0][e];
#pragma unroll
        for (int warp = 1; warp < threads / 32; ++warp) sum += shared.sums[warp][e];
        Index in = (tile.split * Layer::groups + tile.group) * Layer::in_channels + row;
        static_cast<Real*>(
            arguments.partial)[(in * Layer::out_channels + column) * taps + tile.tap] = sum;
    }
    __syncthreads();  // the next tile reuses the memory
}

}  // namespace

TCONV_KERNEL(general_weight_gradient, Layer::threads, Layer::blocks) {
    static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");
    TCONV_DYNAMIC_SHARED(memory);
    for (Index number = blockIdx.x; number < arguments.tiles; number += gridDim.x) {
        Tile tile(number);
        Sums sums = {};
        accumulate(arguments, tile, sums);
        store(arguments, *reinterpret_cast<Shared*>(memory), tile, sums);
    }
}
