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
#include <sm80/pixels.cuh>

namespace {

constexpr int octets = (Layer::out_channels + 7) / 8;  // of a tap
constexpr int taps = Layer::kernel_y * Layer::kernel_x;
constexpr int row_blocks = (Layer::in_channels + tile_rows - 1) / tile_rows;
constexpr int column_blocks = (taps * octets * 8 + tile_columns - 1) / tile_columns;

using Table = Pixel[2][depth];  // of the stage that is brought, and the next
static_assert(sizeof(Table) <= Layer::table_bytes, "stages begin there");

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
    Y y(0);
    X x(0);
    auto find = [&](int stage) {
        find_pixels<depth>(arguments, y, x, Index(stage) * depth, pixels[stage % 2]);
    };
    // What a thread brings of a line.
    constexpr int chunks = tile_rows / 8, y_chunks = tile_columns / 8;
    int in = row + threadIdx.x % chunks * 8, octet = column / 8 + threadIdx.x % y_chunks;
    int tap = octet / octets, down = tap / Layer::kernel_x * Y::tap_distance;
    int right = tap % Layer::kernel_x * X::tap_distance;
    auto* of_x =
        static_cast<const Element*>(arguments.other) + (group * arguments.other_stride_group + in);
    auto bring = [&](unsigned char* stage, int i, int part) {
        const Pixel* own = pixels[(first + i) % 2];
        for_lines<depth, Layer::threads / chunks>(threadIdx.x / chunks, part, [&](int line) {
            Index to = own[line].to;
            ptx::cp_async_cg_16(stage + chunk_at<chunks>(line, threadIdx.x % chunks), of_x + to,
                                (in < Layer::in_channels) & (to >= 0));
        });
        bring_pixels<depth, y_chunks>(arguments, own, stage + a_bytes, group, octet % octets, down,
                                      right, tap < taps, part);
        if (part == 0) find(first + i + 1);
    };
    find(first);
    Sums sums = {};
    ptx::griddepcontrol_wait();  // the packing may still run
    sum_up<true, true>(memory + Layer::table_bytes, count, sums, bring);
    Index begin = (Index(split) * taps * Layer::groups + group) * Layer::in_channels;
    write(static_cast<float*>(arguments.destination) + begin * Layer::out_channels, row, column,
          sums);
}
