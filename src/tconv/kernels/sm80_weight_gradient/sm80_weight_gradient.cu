// The gradient of the weight, of 16-bit tensors on the tensor cores of sm_80:
//
//   sums[in][tap, out] += x[position][in] * y[position * stride + tap][out]
//
// Columns are octets of output channels: those of the first tap, of the second, and so on, without
// a gap. A thread brings the same columns of each stage, so that it has one tap. Both operands lie
// as they are read, positions by channels, and ldmatrix turns them.
//
// A block has input channels, columns and a share of the positions (a split). It writes its sums as
// float32; they are added in the order of the splits.
#include <sm80/multiply.cuh>

namespace {

constexpr int octets = (Layer::out_channels + 7) / 8;  // of a tap
constexpr int taps = Layer::kernel_y * Layer::kernel_x;
constexpr int row_blocks = (Layer::in_channels + tile_rows - 1) / tile_rows;
constexpr int column_blocks = (taps * octets * 8 + tile_columns - 1) / tile_columns;

// Those of a position, of y at tap 0.
struct alignas(sizeof(Index) == 4 ? 16 : 8) Pixel {
    Index x, y;
    int at_y, at_x;  // of y; at_y is `none` if there is no such position
};
constexpr int none = int(0x80000000);
using Table = Pixel[2][depth];  // of the stage that is brought, and the next
static_assert(sizeof(Table) <= Layer::table_bytes, "stages begin there");
static_assert(depth <= Layer::threads, "a thread finds one");

TCONV_DEVICE void find_pixels(const Arguments& of, Table& pixels, int stage) {
    if (threadIdx.x >= depth) return;
    Index position = Index(stage) * depth + threadIdx.x;
    Index row = position / of.x_width, n = row / of.x_height;
    int x = position - row * of.x_width, y = row - n * of.x_height;
    int at_y = y * Layer::stride_y - Layer::padding_y;
    int at_x = x * Layer::stride_x - Layer::padding_x;
    pixels[stage % 2][threadIdx.x] = {
        n * of.other_stride_n + y * of.other_stride_h + x * of.other_stride_w,
        n * of.source_stride_n + at_y * of.source_stride_h + at_x * of.source_stride_w,
        n < of.batch ? at_y : none, at_x};
}

TCONV_DEVICE void bring_x(const Arguments& of, unsigned char* to, const Pixel* pixels, int group,
                          int row, int part) {
    constexpr int chunks = tile_rows / 8;
    int chunk = threadIdx.x % chunks, in = row + chunk * 8;
    auto* x = static_cast<const Element*>(of.other) + (group * of.other_stride_group + in);
    for_lines<depth, Layer::threads / chunks>(threadIdx.x / chunks, part, [&](int i) {
        ptx::cp_async_cg_16(to + chunk_at<chunks>(i, chunk), x + pixels[i].x,
                            (in < Layer::in_channels) & (pixels[i].at_y != none));
    });
}

TCONV_DEVICE void bring_y(const Arguments& of, unsigned char* to, const Pixel* pixels, int group,
                          int column, int part) {
    constexpr int chunks = tile_columns / 8;
    int chunk = threadIdx.x % chunks, number = column / 8 + chunk, tap = number / octets;
    int tap_y = tap / Layer::kernel_x * Layer::dilation_y;
    int tap_x = tap % Layer::kernel_x * Layer::dilation_x;
    auto* y = static_cast<const Element*>(of.source) +
              (group * of.source_stride_group + tap_y * of.source_stride_h +
               tap_x * of.source_stride_w + number % octets * 8);
    for_lines<depth, Layer::threads / chunks>(threadIdx.x / chunks, part, [&](int i) {
        Pixel pixel = pixels[i];
        bool inside = (pixel.at_y + unsigned(tap_y) < unsigned(of.y_height)) &
                      (pixel.at_x + unsigned(tap_x) < unsigned(of.y_width));
        ptx::cp_async_cg_16(to + chunk_at<chunks>(i, chunk), y + pixel.y, inside & (tap < taps));
    });
}

// As [split][tap][in][out]: four lanes write a whole sector.
TCONV_DEVICE void write(float* partial, int row, int column, const Sums& sums) {
    constexpr int vector = Layer::out_channels % 2 == 0 ? 2 : 1;
    constexpr Index of_tap = Index(Layer::groups * Layer::in_channels) * Layer::out_channels;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < warp_columns / 8; ++j) {
        int number = (column + first_column()) / 8 + j, tap = number / octets;
        int first_out = number % octets * 8 + lane % 4 * 2;
        if (tap >= taps) continue;
#pragma unroll
        for (int i = 0; i < warp_rows / 4; i += vector) {
            int in = row + first_row() + i / 2 * 8 + lane / 4, out = first_out + i % 2;
            if (in >= Layer::in_channels || out >= Layer::out_channels) continue;
            Vector<float, vector> values;
#pragma unroll
            for (int k = 0; k < vector; ++k) values.values[k] = sums[i / 4][j][i % 4 + k];
            float* to = partial + (tap * of_tap + in * Layer::out_channels + out);
            *reinterpret_cast<Vector<float, vector>*>(to) = values;
        }
    }
}

}  // namespace

TCONV_KERNEL(sm80_weight_gradient, Layer::threads, Layer::blocks) {
    TCONV_DYNAMIC_SHARED(memory);
    Table& pixels = *reinterpret_cast<Table*>(memory);
    int number = blockIdx.x / column_blocks, column = blockIdx.x % column_blocks * tile_columns;
    int row = number % row_blocks * tile_rows, group = number / row_blocks % Layer::groups;
    int split = number / (row_blocks * Layer::groups), first = split * arguments.split_tiles;
    int count = min(arguments.split_tiles, arguments.tiles - first);
    find_pixels(arguments, pixels, first);
    Sums sums = {};
    ptx::griddepcontrol_wait();  // the packing may still run
    auto bring = [&](unsigned char* stage, int i, int part) {
        const Pixel* of_stage = pixels[(first + i) % 2];
        bring_x(arguments, stage, of_stage, group, row, part);
        bring_y(arguments, stage + a_bytes, of_stage, group, column, part);
        if (part == 0) find_pixels(arguments, pixels, first + i + 1);
    };
    sum_up<true, true>(memory + Layer::table_bytes, count, sums, bring);
    Index begin = (Index(split) * taps * Layer::groups + group) * Layer::in_channels;
    write(static_cast<float*>(arguments.destination) + begin * Layer::out_channels, row, column,
          sums);
}
