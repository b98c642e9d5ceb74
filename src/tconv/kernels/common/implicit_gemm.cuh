// What general_forward and general_input_gradient share: an implicit matrix product
//
//     destination[row, pixel] = sum over (slot, channel) of
//         weight[row, channel, tap of the slot] * source[channel, pixel + offset of the slot]
//
// on fused multiply-adds, for any strides of the three tensors. The Map defines rows, pixels and
// slots:
//
//     variants                        tiles that share pixels and rows: phases
//     Map(variant)
//     slots()                         number of taps
//     tap(slot, dy, dx)               the tap's index ty*kW + tx, and its offset in the source
//     source_y/x(pixel coordinate)    coordinate in the source of the pixel's offset 0
//     destination(y, x)               makes of a pixel's coordinates those of the output
//     rows_are_inputs                 whether rows are input channels; else `channels` are
//     bias                            whether a value is added to each row
//
// A thread has some rows and some pixels of one group; pixels are numbered over (batch, y, x), so
// small images share a block. Neighbouring threads have neighbouring pixels, or first rows where
// channels are innermost in memory (`row_threads`). A source value that lies outside is left out,
// so only products that exist are added.
#pragma once

#include <common/element.cuh>

template <typename Map>
struct ImplicitGemm {
    using Element = Layer::Element;
    using Real = Accumulator<Element>::type;
    using Index = Layer::Index;

    static constexpr int rows = Layer::tile_rows;
    static constexpr int pixels = Layer::tile_pixels;  // of a thread
    static constexpr int row_threads = Layer::row_threads;  // a thread's rows are so far apart
    static constexpr int block_rows = rows * row_threads;
    static constexpr int row_tiles = (Map::rows + block_rows - 1) / block_rows;

    const Arguments& arguments;
    Map map;
    int group;
    int first_row;
    Index batch[pixels];  // -1: beyond the last pixel
    int y[pixels], x[pixels];

    Real sums[rows][pixels] = {};

    TCONV_DEVICE ImplicitGemm(const Arguments& arguments, int variant, int group, int first_row,
                              Index first_pixel)
        : arguments(arguments), map(variant), group(group), first_row(first_row) {
#pragma unroll
        for (int j = 0; j < pixels; ++j) {
            Index pixel = first_pixel + (threadIdx.x + j * Layer::threads) / row_threads;
            Index line = pixel / arguments.pixel_width;
            Index image = line / arguments.pixel_height;
            batch[j] = pixel < arguments.pixels ? image : Index(-1);
            y[j] = int(line - image * arguments.pixel_height);
            x[j] = int(pixel - line * arguments.pixel_width);
        }
    }

    // Adds the products of a slot.
    TCONV_DEVICE void accumulate(int slot) {
        int dy, dx, tap = map.tap(slot, dy, dx);
        Index offsets[pixels];  // in channel 0 of the group; -1 if outside
#pragma unroll
        for (int j = 0; j < pixels; ++j) {
            int source_y = Map::source_y(y[j]) + dy, source_x = Map::source_x(x[j]) + dx;
            bool inside = batch[j] >= 0 && source_y >= 0 && source_y < arguments.source_height &&
                          source_x >= 0 && source_x < arguments.source_width;
            offsets[j] = inside ? batch[j] * arguments.source_stride_n +
                                      Index(group) * Map::channels * arguments.source_stride_c +
                                      source_y * arguments.source_stride_h +
                                      source_x * arguments.source_stride_w
                                : Index(-1);
        }
        // weight[group*Cin_g + in, out, tap], of which one is a row and the other a channel.
        constexpr bool inputs = Map::rows_are_inputs;
        Index row_step = inputs ? arguments.weight_stride_in : arguments.weight_stride_out;
        Index channel_step = inputs ? arguments.weight_stride_out : arguments.weight_stride_in;
        const Element* weight = static_cast<const Element*>(arguments.weight) +
                                Index(group) * Layer::in_channels * arguments.weight_stride_in +
                                first_row * row_step +
                                tap / Layer::kernel_x * arguments.weight_stride_h +
                                tap % Layer::kernel_x * arguments.weight_stride_w;
        const Element* source = static_cast<const Element*>(arguments.source);
#pragma unroll 2
        for (int channel = 0; channel < Map::channels; ++channel) {
            Real weights[rows];
#pragma unroll
            for (int i = 0; i < rows; ++i) {
                int row = i * row_threads;  // beside the first
                Element value{};            // sums of rows behind the last are not stored
                if (first_row + row < Map::rows) value = weight[row * row_step];
                weights[i] = operand<Layer::round_to_tf32>(value);
            }
#pragma unroll
            for (int j = 0; j < pixels; ++j) {
                if (offsets[j] < 0) continue;
                Real value = operand<Layer::round_to_tf32>(source[offsets[j]]);
#pragma unroll
                for (int i = 0; i < rows; ++i) sums[i][j] += weights[i] * value;
            }
            weight += channel_step;
            source += arguments.source_stride_c;
        }
    }

    TCONV_DEVICE void store() const {
#pragma unroll
        for (int j = 0; j < pixels; ++j) {
            int out_y = y[j], out_x = x[j];
            map.destination(out_y, out_x);
            if (batch[j] < 0 || out_y < 0 || out_y >= arguments.destination_height || out_x < 0 ||
                out_x >= arguments.destination_width) {
                continue;
            }
            Element* destination =
                static_cast<Element*>(arguments.destination) +
                (batch[j] * arguments.destination_stride_n +
                 (Index(group) * Map::rows + first_row) * arguments.destination_stride_c +
                 out_y * arguments.destination_stride_h + out_x * arguments.destination_stride_w);
#pragma unroll
            for (int i = 0; i < rows; ++i) {
                int row = i * row_threads;  // beside the first
                if (first_row + row >= Map::rows) continue;
                Real sum = sums[i][j];
                if constexpr (Map::bias) sum += Map::bias_of(arguments, group, first_row + row);
                narrow(sum, destination[row * arguments.destination_stride_c]);
            }
        }
    }

    // The variant varies fastest in a tile's number, then row tile, group and pixels. So blocks
    // that run together read the same source pixels and fill the same output rows.
    TCONV_DEVICE static void run(const Arguments& arguments) {
        for (Index tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
            Index rest = tile / Map::variants;
            int variant = int(tile - rest * Map::variants);
            int row_tile = int(rest % row_tiles);
            rest /= row_tiles;
            int group = int(rest % Layer::groups);
            ImplicitGemm gemm(arguments, variant, group,
                              row_tile * block_rows + int(threadIdx.x) % row_threads,
                              rest / Layer::groups * (pixels * Layer::threads / row_threads));
            int slots = gemm.map.slots();
#pragma unroll 1
            for (int slot = 0; slot < slots; ++slot) gemm.accumulate(slot);
            gemm.store();
        }
    }
};
