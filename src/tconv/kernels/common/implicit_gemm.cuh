// The tile loop that general_forward and general_input_gradient share: an implicit matrix product
//
//     destination[row, pixel, phase] = sum over (slot, channel) of
//         weight[row, channel, tap(slot, phase)] * source[channel, pixel + offset(slot)]
//
// on fused multiply-adds, for any strides of the three tensors. The Map defines rows, pixels, slots
// and phases:
//
//     phases                          outputs of one pixel that share its source values
//     variants                        tiles that share pixels and rows (phases of other blocks)
//     Map(variant)
//     slots()                         number of distinct offsets
//     offset(slot, dy, dx)            offset of the slot in the source
//     tap(slot, phase)                tap index ty*kW + tx, or -1: that phase has no tap there
//     source_y/x(pixel coordinate)    coordinate in the source of the pixel's offset 0
//     destination(y, x, phase, oy, ox, arguments)  coordinates of the output; false if none
//     rows_are_inputs                 whether rows are input channels; else `channels` are
//     bias, bias_values(arguments)    whether a value is added to each row, and the values
//
// A block owns block_rows x block_pixels x phases outputs of one group. Pixels are numbered over
// (batch, y, x), so small images share a block. Each step stages depth_shifts slots of
// depth_channels channels in shared memory and converts them once. Meanwhile the loads of the next
// step go to registers. The epilogue goes through shared memory: neighbouring lanes then write
// neighbours of a row (in channels_last, neighbouring channels), whatever the phases.
#pragma once

#include <common/element.cuh>
#include <common/not_finite.cuh>

template <typename Map>
struct ImplicitGemm {
    using Element = Layer::Element;
    using Real = Accumulator<Element>::type;
    using Index = Layer::Index;

    // weight[group*Cin_g + in, out, tap], of which one is a row and the other a channel.
    TCONV_DEVICE static Index weight_offset(int group, int row, int channel, int tap,
                                            const Arguments& arguments) {
        int in = Map::rows_are_inputs ? row : channel, out = Map::rows_are_inputs ? channel : row;
        return (Index(group) * Layer::in_channels + in) * arguments.weight_stride_in +
               out * arguments.weight_stride_out +
               tap / Layer::kernel_x * arguments.weight_stride_h +
               tap % Layer::kernel_x * arguments.weight_stride_w;
    }

    static constexpr int threads = Layer::threads;
    static constexpr int phases = Map::phases;
    static constexpr int row_threads = Layer::row_threads;
    static constexpr int pixel_threads = threads / row_threads;
    static constexpr int thread_rows = Layer::thread_rows;
    static constexpr int thread_pixels = Layer::thread_pixels;
    static constexpr int block_rows = row_threads * thread_rows;
    static constexpr int block_pixels = pixel_threads * thread_pixels;
    static constexpr int row_tiles = (Map::rows + block_rows - 1) / block_rows;

    static constexpr int depth_shifts = Layer::depth_shifts;
    static constexpr int depth_channels = Layer::depth_channels;
    static constexpr int depth = depth_shifts * depth_channels;

    // Vectors of shared memory have 16 bytes, or fewer if a thread owns fewer.
    static constexpr int widest = 16 / sizeof(Real);
    static constexpr int row_vector = thread_rows < widest ? thread_rows : widest;
    static constexpr int pixel_vector = thread_pixels < widest ? thread_pixels : widest;

    static constexpr int thread_sources = depth * block_pixels / threads;
    static constexpr int thread_weights = (depth * phases * block_rows + threads - 1) / threads;
    static constexpr int own_pixels = block_pixels / threads;

    static_assert(threads % row_threads == 0, "every thread owns a part of the tile");
    static_assert(block_pixels % threads == 0, "a thread stages whole columns of pixels");
    static_assert(thread_rows % row_vector == 0 && thread_pixels % pixel_vector == 0,
                  "a thread's part of the tile is whole vectors");

    struct Stage {
        // + 4: in channels_last, lanes write 8 channels of 4 pixels to 32 different banks.
        alignas(16) Real source[depth][block_pixels + 4];
        alignas(16) Real weight[depth][phases][block_rows];
    };

    // One pass of the epilogue stores row_vector rows of each thread.
    static constexpr int passes = thread_rows / row_vector;
    static constexpr int pass_rows = row_threads * row_vector;
    static constexpr int pass_columns = block_pixels * phases;

    struct Shared {
        union {
            Stage stages[2];
            Real outputs[pass_rows][pass_columns + 1];
        };
        Index batch[block_pixels];  // -1: beyond the last pixel
        int y[block_pixels];
        int x[block_pixels];
    };

    // --- one tile -------------------------------------------------------------------------------

    const Arguments& arguments;
    Shared& shared;
    Map map;
    int group;
    int first_row;

    Real sums[phases][thread_rows][thread_pixels];
    Element sources[thread_sources];
    Element weights[thread_weights];
    NotFinite<Real> not_finite;  // of what the thread has written

    TCONV_DEVICE ImplicitGemm(const Arguments& arguments, Shared& shared, int variant, int group,
                              int first_row)
        : arguments(arguments), shared(shared), map(variant), group(group), first_row(first_row) {}

    TCONV_DEVICE static int own_row(int i) {
        int lane = threadIdx.x / pixel_threads;
        return (i / row_vector * row_threads + lane) * row_vector + i % row_vector;
    }

    TCONV_DEVICE static int own_pixel(int j) {
        int lane = threadIdx.x % pixel_threads;
        return (j / pixel_vector * pixel_threads + lane) * pixel_vector + j % pixel_vector;
    }

    TCONV_DEVICE void number_pixels(Index first_pixel) {
        for (int p = threadIdx.x; p < block_pixels; p += threads) {
            Index pixel = first_pixel + p;
            Index row = pixel / arguments.pixel_width;
            Index batch = row / arguments.pixel_height;
            shared.batch[p] = pixel < arguments.pixels ? batch : Index(-1);
            shared.y[p] = int(row - batch * arguments.pixel_height);
            shared.x[p] = int(pixel - row * arguments.pixel_width);
        }
    }

    // Offset of a pixel's source value at a slot, in channel 0 of the group; -1 if outside.
    TCONV_DEVICE Index source_offset(Index batch, int y, int x, int slot) const {
        int dy, dx;
        map.offset(slot, dy, dx);
        int source_y = Map::source_y(y) + dy;
        int source_x = Map::source_x(x) + dx;
        bool inside = batch >= 0 && slot < map.slots() && source_y >= 0 &&
                      source_y < arguments.source_height && source_x >= 0 &&
                      source_x < arguments.source_width;
        return inside
                   ? batch * arguments.source_stride_n +
                         Index(group) * Map::channels * arguments.source_stride_c +
                         source_y * arguments.source_stride_h + source_x * arguments.source_stride_w
                   : Index(-1);
    }

    TCONV_DEVICE void load_sources(int slot, int channel) {
        const Element* source = static_cast<const Element*>(arguments.source);
        if constexpr (Layer::source_channels_last) {
            // Neighbouring lanes take neighbouring channels.
#pragma unroll
            for (int i = 0; i < thread_sources; ++i) {
                int e = threadIdx.x + i * threads;
                int c = channel + e % depth_channels;
                int p = e / depth_channels % block_pixels;
                int s = slot + e / (depth_channels * block_pixels);
                Index offset = source_offset(shared.batch[p], shared.y[p], shared.x[p], s);
                bool inside = offset >= 0 && c < Map::channels;
                sources[i] = inside ? source[offset + c * arguments.source_stride_c] : Element{};
            }
        } else {
            // Neighbouring lanes take neighbouring pixels. A thread always takes the same pixels.
#pragma unroll
            for (int j = 0; j < own_pixels; ++j) {
                int p = threadIdx.x + j * threads;
#pragma unroll
                for (int s = 0; s < depth_shifts; ++s) {
                    Index offset =
                        source_offset(shared.batch[p], shared.y[p], shared.x[p], slot + s);
#pragma unroll
                    for (int c = 0; c < depth_channels; ++c) {
                        bool inside = offset >= 0 && channel + c < Map::channels;
                        sources[(j * depth_shifts + s) * depth_channels + c] =
                            inside ? source[offset + (channel + c) * arguments.source_stride_c]
                                   : Element{};
                    }
                }
            }
        }
    }

    TCONV_DEVICE void store_sources(Stage& stage) {
#pragma unroll
        for (int i = 0; i < thread_sources; ++i) {
            Real value = operand<Layer::round_to_tf32>(sources[i]);
            if constexpr (Layer::source_channels_last) {
                int e = threadIdx.x + i * threads;
                int s = e / (depth_channels * block_pixels);
                stage.source[s * depth_channels + e % depth_channels]
                            [e / depth_channels % block_pixels] = value;
            } else {
                stage.source[i % depth][threadIdx.x + i / depth * threads] = value;
            }
        }
    }

    TCONV_DEVICE void load_weights(int slot, int channel) {
        const Element* weight = static_cast<const Element*>(arguments.weight);
#pragma unroll
        for (int i = 0; i < thread_weights; ++i) {
            int e = threadIdx.x + i * threads;
            int row = first_row + e % block_rows;
            int phase = e / block_rows % phases;
            int k = e / (block_rows * phases);
            int s = slot + k / depth_channels;
            int c = channel + k % depth_channels;
            weights[i] = Element{};
            if (k < depth && row < Map::rows && c < Map::channels && s < map.slots()) {
                int tap = map.tap(s, phase);
                if (tap >= 0) weights[i] = weight[weight_offset(group, row, c, tap, arguments)];
            }
        }
    }

    TCONV_DEVICE void store_weights(Stage& stage) {
        Real* stored = &stage.weight[0][0][0];
#pragma unroll
        for (int i = 0; i < thread_weights; ++i) {
            int e = threadIdx.x + i * threads;
            if (e < depth * phases * block_rows) {
                stored[e] = operand<Layer::round_to_tf32>(weights[i]);
            }
        }
    }

    TCONV_DEVICE void multiply(const Stage& stage, int slot) {
#pragma unroll
        for (int k = 0; k < depth; ++k) {
            Real pixels[thread_pixels];
#pragma unroll
            for (int j = 0; j < thread_pixels; j += pixel_vector) {
                using Pixels = Vector<Real, pixel_vector>;
                Pixels part = *reinterpret_cast<const Pixels*>(&stage.source[k][own_pixel(j)]);
#pragma unroll
                for (int v = 0; v < pixel_vector; ++v) pixels[j + v] = part.values[v];
            }
#pragma unroll
            for (int phase = 0; phase < phases; ++phase) {
                // Uniform over the block. A phase without a tap in this slot costs no products.
                if (Map::sparse && map.tap(slot + k / depth_channels, phase) < 0) continue;
#pragma unroll
                for (int i = 0; i < thread_rows; i += row_vector) {
                    using Rows = Vector<Real, row_vector>;
                    Rows part = *reinterpret_cast<const Rows*>(&stage.weight[k][phase][own_row(i)]);
#pragma unroll
                    for (int v = 0; v < row_vector; ++v) {
#pragma unroll
                        for (int j = 0; j < thread_pixels; ++j) {
                            sums[phase][i + v][j] += part.values[v] * pixels[j];
                        }
                    }
                }
            }
        }
    }

    TCONV_DEVICE void accumulate() {
#pragma unroll
        for (int phase = 0; phase < phases; ++phase) {
#pragma unroll
            for (int i = 0; i < thread_rows; ++i) {
#pragma unroll
                for (int j = 0; j < thread_pixels; ++j) sums[phase][i][j] = 0;
            }
        }
        if (map.slots() == 0) return;  // an empty phase: the bias alone
        int slot = 0, channel = 0, stage = 0;
        load_sources(slot, channel);
        load_weights(slot, channel);
        store_sources(shared.stages[0]);
        store_weights(shared.stages[0]);
        __syncthreads();
        while (true) {
            int next_channel = channel + depth_channels;
            int next_slot = slot;
            if (next_channel >= Map::channels) {
                next_channel = 0;
                next_slot += depth_shifts;
            }
            bool more = next_slot < map.slots();
            if (more) {
                load_sources(next_slot, next_channel);
                load_weights(next_slot, next_channel);
            }
            multiply(shared.stages[stage], slot);
            if (!more) break;
            // The other stage was last read before the barrier that opened this one.
            stage ^= 1;
            store_sources(shared.stages[stage]);
            store_weights(shared.stages[stage]);
            __syncthreads();
            slot = next_slot;
            channel = next_channel;
        }
        __syncthreads();  // the epilogue reuses the stages
    }

    // Writes one output. `column` counts (pixel, phase), `row` counts the rows of the pass.
    TCONV_DEVICE Index destination_offset(int column) const {
        int p = column / phases;
        int y, x;
        Index batch = shared.batch[p];
        if (batch < 0) return Index(-1);
        if (!map.destination(shared.y[p], shared.x[p], column % phases, y, x, arguments))
            return Index(-1);
        return batch * arguments.destination_stride_n +
               Index(group) * Map::rows * arguments.destination_stride_c +
               y * arguments.destination_stride_h + x * arguments.destination_stride_w;
    }

    TCONV_DEVICE void write(Index offset, int row, Real value) {
        Element* destination = static_cast<Element*>(arguments.destination);
        if constexpr (Map::bias) {
            value += widen(Map::bias_values(arguments)[group * Map::rows + row]);
        }
        not_finite.note(value);
        narrow(value, destination[offset + row * arguments.destination_stride_c]);
    }

    TCONV_DEVICE void store_outputs() {
#pragma unroll
        for (int pass = 0; pass < passes; ++pass) {
            int pass_row = first_row + pass * pass_rows;
#pragma unroll
            for (int phase = 0; phase < phases; ++phase) {
#pragma unroll
                for (int v = 0; v < row_vector; ++v) {
                    int i = pass * row_vector + v;
#pragma unroll
                    for (int j = 0; j < thread_pixels; ++j) {
                        shared
                            .outputs[own_row(i) - pass * pass_rows][own_pixel(j) * phases + phase] =
                            sums[phase][i][j];
                    }
                }
            }
            __syncthreads();
            if constexpr (Layer::destination_channels_last) {
                for (int e = threadIdx.x; e < pass_rows * pass_columns; e += threads) {
                    int row = e % pass_rows;
                    Index offset = destination_offset(e / pass_rows);
                    if (offset >= 0 && pass_row + row < Map::rows) {
                        write(offset, pass_row + row, shared.outputs[row][e / pass_rows]);
                    }
                }
            } else {
                for (int column = threadIdx.x; column < pass_columns; column += threads) {
                    Index offset = destination_offset(column);
                    if (offset < 0) continue;
                    for (int row = 0; row < pass_rows && pass_row + row < Map::rows; ++row) {
                        write(offset, pass_row + row, shared.outputs[row][column]);
                    }
                }
            }
            if (pass + 1 == passes && not_finite.any()) store_exact();
            __syncthreads();  // the next pass, or tile, reuses the memory
        }
    }

    // One output as the sum of exactly its products.
    TCONV_DEVICE Real exact_sum(int row, int column) const {
        const Element* source = static_cast<const Element*>(arguments.source);
        const Element* weight = static_cast<const Element*>(arguments.weight);
        int p = column / phases;
        Real sum = 0;
#pragma unroll 1
        for (int slot = 0; slot < map.slots(); ++slot) {
            int tap = map.tap(slot, column % phases);
            Index offset = source_offset(shared.batch[p], shared.y[p], shared.x[p], slot);
            if (tap < 0 || offset < 0) continue;
            // A sum that is NaN stays NaN.
#pragma unroll 1
            for (int c = 0; c < Map::channels && sum == sum; ++c) {
                Element w = weight[weight_offset(group, row, c, tap, arguments)];
                sum +=
                    operand<Layer::round_to_tf32>(w) *
                    operand<Layer::round_to_tf32>(source[offset + c * arguments.source_stride_c]);
            }
        }
        return sum;
    }

    // Recomputes the thread's outputs that are not finite. A tile also multiplies zeros, for phases
    // without a tap and outside the source. An infinity or NaN times zero is NaN.
    TCONV_DEVICE void store_exact() {
        const Element* destination = static_cast<const Element*>(arguments.destination);
        constexpr int count = passes * pass_rows * pass_columns;
        static_assert(pass_columns % threads == 0, "a thread keeps to its own columns");
#pragma unroll 1
        for (int e = threadIdx.x; e < count; e += threads) {
            int column =
                Layer::destination_channels_last ? e / pass_rows % pass_columns : e % pass_columns;
            int row = first_row + e / (pass_rows * pass_columns) * pass_rows +
                      (Layer::destination_channels_last ? e : e / pass_columns) % pass_rows;
            Index offset = destination_offset(column);
            if (offset < 0 || row >= Map::rows) continue;
            if (is_finite(widen(destination[offset + row * arguments.destination_stride_c])))
                continue;
            write(offset, row, exact_sum(row, column));
        }
    }

    // The variant varies fastest in a tile's number, then row tile, group and pixels. So blocks
    // that run together read the same source pixels and fill the same output rows.
    TCONV_DEVICE static void run(const Arguments& arguments, Shared& shared) {
        for (Index tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
            Index rest = tile / Map::variants;
            int variant = int(tile - rest * Map::variants);
            int row_tile = int(rest % row_tiles);
            rest /= row_tiles;
            int group = int(rest % Layer::groups);
            ImplicitGemm gemm(arguments, shared, variant, group, row_tile * block_rows);
            gemm.number_pixels(rest / Layer::groups * block_pixels);
            __syncthreads();
            gemm.accumulate();
            gemm.store_outputs();
        }
    }
};
