// The gradient of the weight, for any layer: the matrix product over all input pixels
//
//     gw[ci, co, ty, tx] = sum over (n, iy, ix) of
//         x[n, ci, iy, ix] * gy[n, co, iy*stride - padding + ty*dilation, ...]
//
// with input channels as rows and (tap, output channel) as columns, on fused multiply-adds.
// A block owns one tile of one group and one contiguous share of the pixels (a split); its threads
// divide the tile, and each staged step of pixels, among `slices`. Partial sums of the slices are
// added in order through shared memory; those of the splits go to `partial[split, ci, co, ty, tx]`
// and are added in order afterwards, so the result does not depend on the schedule.
#include <common/element.cuh>
#include <common/not_finite.cuh>

namespace {

using Element = Layer::Element;
using Real = Accumulator<Element>::type;
using Index = Layer::Index;

constexpr int threads = Layer::threads;
constexpr int block_rows = Layer::row_threads * Layer::thread_rows;
constexpr int block_columns = Layer::column_threads * Layer::thread_columns;
constexpr int tile_threads = Layer::row_threads * Layer::column_threads;
constexpr int slices = threads / tile_threads;
constexpr int depth = Layer::depth;

constexpr int rows = Layer::in_channels;
constexpr int columns = Layer::kernel_y * Layer::kernel_x * Layer::out_channels;
constexpr int row_tiles = (rows + block_rows - 1) / block_rows;
constexpr int column_tiles = (columns + block_columns - 1) / block_columns;

constexpr int widest = 16 / sizeof(Real);
constexpr int row_vector = Layer::thread_rows < widest ? Layer::thread_rows : widest;
constexpr int column_vector = Layer::thread_columns < widest ? Layer::thread_columns : widest;

static_assert(threads == tile_threads * slices, "the slices divide the block");
static_assert(depth % slices == 0 && depth % 8 == 0 && depth <= threads, "slices divide a step");

// + 4: lanes write 4 channels of 8 pixels to 32 different banks.
struct Stage {
    alignas(16) Real x[depth][block_rows + 4];
    alignas(16) Real y[depth][block_columns + 4];
};

// The pixels of a step: where each lies in x, and where its tap (0, 0) lies in y.
struct Pixels {
    Index x_offset[depth];
    Index y_offset[depth];
    int out_y[depth];  // far outside for a pixel beyond the split's last
    int out_x[depth];
};

// The tile's columns: where each lies in y beside tap (0, 0) of channel 0.
struct Columns {
    Index y_offset[block_columns];
    int dy[block_columns];
    int dx[block_columns];
};

constexpr int far_outside = -0x40000000;

struct Shared {
    union {
        Stage stages[2];
        Real sums[block_rows][block_columns + 1];
    };
    Pixels pixels[2];
    Columns columns;
};

// How the staged values [depth][width] of one operand are divided among the threads: neighbouring
// lanes take neighbouring channels, or 8 neighbouring pixels of up to 4 channels.
template <int width, bool channels_last>
struct Share {
    static constexpr int lane_channels = width < 4 ? width : 4;
    static constexpr int count = (depth * width + threads - 1) / threads;
    static constexpr bool whole = depth * width % threads == 0;

    TCONV_DEVICE static int pixel(int e) {
        return channels_last ? e / width : e % 8 + e / (8 * lane_channels) % (depth / 8) * 8;
    }
    TCONV_DEVICE static int channel(int e) {
        return channels_last ? e % width
                             : e / 8 % lane_channels + e / (depth * lane_channels) * lane_channels;
    }
};

using ShareX = Share<block_rows, Layer::x_channels_last>;
using ShareY = Share<block_columns, Layer::y_channels_last>;

struct Tile {
    const Arguments& arguments;
    Shared& shared;
    int group;
    int first_row;
    int first_column;
    Index first_pixel;
    Index last_pixel;  // one past

    Real sums[Layer::thread_rows][Layer::thread_columns];
    Element x_items[ShareX::count];
    Element y_items[ShareY::count];

    TCONV_DEVICE static int own_row(int i) {
        int lane = threadIdx.x % tile_threads / Layer::column_threads;
        return (i / row_vector * Layer::row_threads + lane) * row_vector + i % row_vector;
    }

    TCONV_DEVICE static int own_column(int j) {
        int lane = threadIdx.x % Layer::column_threads;
        return (j / column_vector * Layer::column_threads + lane) * column_vector +
               j % column_vector;
    }

    TCONV_DEVICE void number_columns() const {
        for (int c = threadIdx.x; c < block_columns; c += threads) {
            int column = first_column + c;
            int tap = column / Layer::out_channels;
            int channel = column - tap * Layer::out_channels;
            int dy = tap / Layer::kernel_x * Layer::dilation_y;
            int dx = tap % Layer::kernel_x * Layer::dilation_x;
            shared.columns.y_offset[c] =
                (Index(group) * Layer::out_channels + channel) * arguments.y_stride_c +
                dy * arguments.y_stride_h + dx * arguments.y_stride_w;
            shared.columns.dy[c] = column < columns ? dy : far_outside;
            shared.columns.dx[c] = dx;
        }
    }

    TCONV_DEVICE void number_pixels(Pixels& pixels, Index first_pixel) const {
        if (threadIdx.x < depth) {
            Index pixel = first_pixel + threadIdx.x;
            Index line = pixel / arguments.width;
            Index batch = line / arguments.height;
            int y = int(line - batch * arguments.height);
            int x = int(pixel - line * arguments.width);
            int out_y = y * Layer::stride_y - Layer::padding_y;
            int out_x = x * Layer::stride_x - Layer::padding_x;
            bool exists = pixel < last_pixel;
            pixels.x_offset[threadIdx.x] =
                exists ? batch * arguments.x_stride_n + Index(group) * rows * arguments.x_stride_c +
                             y * arguments.x_stride_h + x * arguments.x_stride_w
                       : Index(-1);
            pixels.y_offset[threadIdx.x] = batch * arguments.y_stride_n +
                                           out_y * arguments.y_stride_h +
                                           out_x * arguments.y_stride_w;
            pixels.out_y[threadIdx.x] = exists ? out_y : far_outside;
            pixels.out_x[threadIdx.x] = out_x;
        }
    }

    TCONV_DEVICE void load(const Pixels& pixels) {
        const Element* x = static_cast<const Element*>(arguments.x);
        const Element* y = static_cast<const Element*>(arguments.y);
#pragma unroll
        for (int i = 0; i < ShareX::count; ++i) {
            int e = threadIdx.x + i * threads;
            x_items[i] = Element{};
            if (!ShareX::whole && e >= depth * block_rows) continue;
            int row = first_row + ShareX::channel(e);
            Index offset = pixels.x_offset[ShareX::pixel(e)];
            if (offset >= 0 && row < rows) x_items[i] = x[offset + row * arguments.x_stride_c];
        }
#pragma unroll
        for (int i = 0; i < ShareY::count; ++i) {
            int e = threadIdx.x + i * threads;
            y_items[i] = Element{};
            if (!ShareY::whole && e >= depth * block_columns) continue;
            int p = ShareY::pixel(e), c = ShareY::channel(e);
            int out_y = pixels.out_y[p] + shared.columns.dy[c];
            int out_x = pixels.out_x[p] + shared.columns.dx[c];
            if (out_y >= 0 && out_y < arguments.out_height && out_x >= 0 &&
                out_x < arguments.out_width) {
                y_items[i] = y[pixels.y_offset[p] + shared.columns.y_offset[c]];
            }
        }
    }

    TCONV_DEVICE void store(Stage& stage) const {
#pragma unroll
        for (int i = 0; i < ShareX::count; ++i) {
            int e = threadIdx.x + i * threads;
            if (!ShareX::whole && e >= depth * block_rows) continue;
            stage.x[ShareX::pixel(e)][ShareX::channel(e)] =
                operand<Layer::round_to_tf32>(x_items[i]);
        }
#pragma unroll
        for (int i = 0; i < ShareY::count; ++i) {
            int e = threadIdx.x + i * threads;
            if (!ShareY::whole && e >= depth * block_columns) continue;
            stage.y[ShareY::pixel(e)][ShareY::channel(e)] =
                operand<Layer::round_to_tf32>(y_items[i]);
        }
    }

    TCONV_DEVICE void multiply(const Stage& stage) {
        int slice = threadIdx.x / tile_threads;
#pragma unroll 4
        for (int k = slice; k < depth; k += slices) {
            Real columns_[Layer::thread_columns];
#pragma unroll
            for (int j = 0; j < Layer::thread_columns; j += column_vector) {
                using Part = Vector<Real, column_vector>;
                Part part = *reinterpret_cast<const Part*>(&stage.y[k][own_column(j)]);
#pragma unroll
                for (int v = 0; v < column_vector; ++v) columns_[j + v] = part.values[v];
            }
#pragma unroll
            for (int i = 0; i < Layer::thread_rows; i += row_vector) {
                using Part = Vector<Real, row_vector>;
                Part part = *reinterpret_cast<const Part*>(&stage.x[k][own_row(i)]);
#pragma unroll
                for (int v = 0; v < row_vector; ++v) {
#pragma unroll
                    for (int j = 0; j < Layer::thread_columns; ++j) {
                        sums[i + v][j] += part.values[v] * columns_[j];
                    }
                }
            }
        }
    }

    TCONV_DEVICE void accumulate() {
#pragma unroll
        for (int i = 0; i < Layer::thread_rows; ++i) {
#pragma unroll
            for (int j = 0; j < Layer::thread_columns; ++j) sums[i][j] = 0;
        }
        number_columns();
        number_pixels(shared.pixels[0], first_pixel);
        number_pixels(shared.pixels[1], first_pixel + depth);
        __syncthreads();
        load(shared.pixels[0]);
        store(shared.stages[0]);
        __syncthreads();
        int stage = 0;
        for (Index pixel = first_pixel; pixel < last_pixel; pixel += depth) {
            // Steps beyond the last pixel load nothing and are not multiplied.
            load(shared.pixels[stage ^ 1]);
            multiply(shared.stages[stage]);
            store(shared.stages[stage ^ 1]);
            number_pixels(shared.pixels[stage], pixel + 2 * depth);
            stage ^= 1;
            __syncthreads();
        }
    }

    // Adds the slices' sums in order; slice 0 ends with the total.
    TCONV_DEVICE void add_slices() {
        int slice = threadIdx.x / tile_threads;
        for (int s = 1; s < slices; ++s) {
            if (slice == s) {
#pragma unroll
                for (int i = 0; i < Layer::thread_rows; ++i) {
#pragma unroll
                    for (int j = 0; j < Layer::thread_columns; ++j) {
                        shared.sums[own_row(i)][own_column(j)] = sums[i][j];
                    }
                }
            }
            __syncthreads();
            if (slice == 0) {
#pragma unroll
                for (int i = 0; i < Layer::thread_rows; ++i) {
#pragma unroll
                    for (int j = 0; j < Layer::thread_columns; ++j) {
                        sums[i][j] += shared.sums[own_row(i)][own_column(j)];
                    }
                }
            }
            __syncthreads();
        }
    }

    // partial: [splits, groups*rows, out_channels, kH*kW]
    TCONV_DEVICE Real* partial(Index split, int row, int column) const {
        int tap = column / Layer::out_channels;
        int channel = column - tap * Layer::out_channels;
        Index in_channel = (split * Layer::groups + group) * rows + row;
        return static_cast<Real*>(arguments.partial) +
               (in_channel * columns + channel * (Layer::kernel_y * Layer::kernel_x) + tap);
    }

    // Whether all that the thread stored is finite.
    TCONV_DEVICE bool store_partial(Index split) const {
        NotFinite<Real> not_finite;
        if (threadIdx.x >= tile_threads) return true;
#pragma unroll
        for (int i = 0; i < Layer::thread_rows; ++i) {
            int row = first_row + own_row(i);
            if (row >= rows) continue;
#pragma unroll
            for (int j = 0; j < Layer::thread_columns; ++j) {
                int column = first_column + own_column(j);
                if (column >= columns) continue;
                *partial(split, row, column) = sums[i][j];
                not_finite.note(sums[i][j]);
            }
        }
        return !not_finite.any();
    }

    // A lane's share of a partial sum of exactly its products.
    TCONV_DEVICE Real exact_share(int row, int column) const {
        int tap = column / Layer::out_channels;
        int channel = column - tap * Layer::out_channels;
        int dy = tap / Layer::kernel_x * Layer::dilation_y - Layer::padding_y;
        int dx = tap % Layer::kernel_x * Layer::dilation_x - Layer::padding_x;
        const Element* x = static_cast<const Element*>(arguments.x) +
                           (Index(group) * rows + row) * arguments.x_stride_c;
        const Element* y = static_cast<const Element*>(arguments.y) +
                           (Index(group) * Layer::out_channels + channel) * arguments.y_stride_c;
        Real sum = 0;
        // Once it is not a number, a sum stays so.
#pragma unroll 1
        for (Index pixel = first_pixel; pixel < last_pixel && __all_sync(~0u, sum == sum);
             pixel += 32) {
            Index own = pixel + threadIdx.x % 32;
            Index line = own / arguments.width;
            Index batch = line / arguments.height;
            int in_y = int(line - batch * arguments.height),
                in_x = int(own - line * arguments.width);
            int out_y = in_y * Layer::stride_y + dy, out_x = in_x * Layer::stride_x + dx;
            if (own >= last_pixel || out_y < 0 || out_y >= arguments.out_height || out_x < 0 ||
                out_x >= arguments.out_width) {
                continue;
            }
            Element of_x = x[batch * arguments.x_stride_n + in_y * arguments.x_stride_h +
                             in_x * arguments.x_stride_w];
            Element of_y = y[batch * arguments.y_stride_n + out_y * arguments.y_stride_h +
                             out_x * arguments.y_stride_w];
            sum += operand<Layer::round_to_tf32>(of_x) * operand<Layer::round_to_tf32>(of_y);
        }
        return sum;
    }

    // Replaces what the warp has stored and is not finite: a tile also multiplies zeros, where a
    // tap has no output, and an infinity or NaN times zero is a NaN. The lanes divide the pixels.
    TCONV_DEVICE void store_exact(Index split) const {
        int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int e = 0; e < Layer::thread_rows * Layer::thread_columns; ++e) {
            int row = first_row + own_row(e / Layer::thread_columns);
            int column = first_column + own_column(e % Layer::thread_columns);
            bool stored = threadIdx.x < tile_threads && row < rows && column < columns;
            bool wrong = stored && !is_finite(*partial(split, row, column));
            unsigned lanes = __ballot_sync(~0u, wrong);
#pragma unroll 1
            for (int from = 0; from < 32; ++from) {
                if (!(lanes >> from & 1)) continue;
                Real sum = exact_share(__shfl_sync(~0u, row, from), __shfl_sync(~0u, column, from));
#pragma unroll 1
                for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
                if (lane == from) *partial(split, row, column) = sum;
            }
        }
    }
};

}  // namespace

TCONV_KERNEL(general_weight_gradient, Layer::threads, Layer::blocks) {
    static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");
    TCONV_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    // Tiles of one split are neighbours: they read the same pixels.
    for (Index tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        int column_tile = int(tile % column_tiles);
        Index rest = tile / column_tiles;
        int row_tile = int(rest % row_tiles);
        rest /= row_tiles;
        int group = int(rest % Layer::groups);
        Index split = rest / Layer::groups;
        Index first_pixel = split * arguments.split_pixels;
        Index last_pixel = first_pixel + arguments.split_pixels;
        Tile work{arguments,
                  shared,
                  group,
                  row_tile * block_rows,
                  column_tile * block_columns,
                  first_pixel,
                  last_pixel < arguments.pixels ? last_pixel : arguments.pixels};
        work.accumulate();
        work.add_slices();
        bool finite = work.store_partial(split);
        if (!__all_sync(~0u, finite)) work.store_exact(split);
        __syncthreads();  // the next tile reuses the memory
    }
}
