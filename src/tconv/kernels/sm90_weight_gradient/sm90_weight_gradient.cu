// The weight's gradient of 16-bit tensors and of float32 on Hopper's tensor cores. For TF32, what
// copies float32 rounds it; in strict float32 a value is three of bfloat16 (<common/split.cuh>).
//
//   sums[tap][64 in][out] += x[positions][64 in]^T * y[positions + shift][out]
//
// A stage is a box of positions: x, and the phases of y that a block's taps need, each with the
// positions that they reach. x goes to registers, turned, once for all taps; y stays in shared
// memory, where a tap is a start address. Eight positions in a row follow each other in both, so a
// product of 16 takes two such groups of y, wherever the second lies.
//
//   warp 0            bring: stages
//   warps 1 to 3      turn x in shared memory, of turned tiles
//   warpgroups 1, 2   consumers: each has taps of its own
//
// An x that is contiguous need not be turned: its tensor map copies lines of positions. Raw tiles
// read a contiguous y as it lies too: y goes to registers and x stays (<raw.cuh>), so that the
// product's rows are output channels. So do turned ones of float32 in channels_last
// (<turned.cuh>).
//
// A block has channels, taps and a share of the boxes, and writes its sums as float32. If it has
// all boxes, it writes the gradient.
#include <common/constant_tables.cuh>
#include <common/counted_ring.cuh>
#include <common/element.cuh>
#include <common/not_finite.cuh>
#include <common/split.cuh>
#include <engine/fold.cuh>
#include <ptx/barrier.cuh>
#include <ptx/bulk.cuh>
#include <ptx/convert.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/registers.cuh>
#include <ptx/setmaxnreg.cuh>
#include <ptx/tensor_map.cuh>
#include <ptx/wgmma.cuh>
#include <sm90_weight_gradient/exact_sum.cuh>
#include <sm90_weight_gradient/raw.cuh>
#include <sm90_weight_gradient/turned.cuh>

namespace {

using Index = Layer::Index;

constexpr int warpgroup = 128;
constexpr int consumers = Layer::consumers;
constexpr int line_bytes = 128;  // of a position: 64 channels
constexpr int in_block = Layer::in_block, out_block = Layer::out_block;
constexpr int tap_columns = Layer::raw ? in_block : out_block;
constexpr int columns = tap_columns * Layer::stacked;  // of a product
constexpr int in_blocks = (Layer::in_channels + in_block - 1) / in_block;
constexpr int out_blocks = (Layer::out_channels + out_block - 1) / out_block;
constexpr int consumer_taps = Layer::consumer_taps;  // at most
constexpr int takers = Layer::takers;  // of the taps of a set: the consumers, or parts of them
constexpr int all_steps = Layer::positions / step_positions;  // of a box
constexpr int steps = Layer::steps;  // at a time
constexpr bool overlaps = Layer::buffers > 1;  // loads with products
constexpr int operands = Layer::raw ? raw_taps : 1;  // of a step
// In strict float32 each part of a value has lines of its own.
constexpr int value_parts = Layer::strict ? 3 : 1;
constexpr int y_parts = Layer::raw ? 1 : value_parts;  // raw, it is split in registers
constexpr int x_part_bytes = value_bytes * Layer::positions * in_block;
constexpr int x_box_bytes = value_parts * x_part_bytes;
constexpr int turning_warps = 3;

// Bytes before y.
TCONV_DEVICE int x_room(const Arguments& arguments) {
    if constexpr (Layer::turned) return x_box_bytes;
    return (x_bytes(arguments, x_box_bytes) + 1023) / 1024 * 1024;
}

// Bytes before x as it is copied: turned tiles have it behind y.
template <typename Fields>
TCONV_DEVICE int x_copy(const Fields& arguments) {
    if constexpr (Layer::turned) return arguments.stage_bytes - arguments.x_bytes;
    return 0;
}

struct Shared {
    uint64_t full[Layer::most_stages];
    uint64_t landed[Layer::most_stages];  // x is not turned yet
    uint64_t empty[Layer::most_stages];
    int row[Layer::most_stages];  // a box's first, of a flat y
};

TCONV_DEVICE unsigned char* stage_of(const Arguments& arguments, unsigned char* memory, int stage) {
    return memory + 1024 + stage * arguments.stage_bytes;
}

// What a block computes: channels, a set of taps, and every `splits`-th box from `split` on.
struct Share {
    int group, in, out, set, split;

    TCONV_DEVICE Share() {
        int rest = blockIdx.x / Layer::sets;
        set = blockIdx.x - rest * Layer::sets;
        int next = rest / out_blocks;
        out = (rest - next * out_blocks) * out_block;
        rest = next / in_blocks;
        in = (next - rest * in_blocks) * in_block;
        split = rest / Layer::groups;
        group = rest - split * Layer::groups;
    }
};

TCONV_DEVICE void bring(const Arguments& arguments, Shared& shared, unsigned char* memory) {
    Share share;
    CountedTurn turn;
    ptx::griddepcontrol_wait();  // the packing may still run
    const ptx::TensorMap* maps = &arguments.y_0;
    int first = entry(Layer::set_source, share.set);
    int count = entry(Layer::set_sources, share.set);
    for (int box = share.split; box < arguments.boxes; box += arguments.splits) {
        int rest = box / arguments.boxes_x;
        int x = (box - rest * arguments.boxes_x) * arguments.box_x;
        int image = rest / arguments.boxes_y;
        int y = (rest - image * arguments.boxes_y) * arguments.box_y;
        image *= arguments.box_n;
        uint64_t* full = Layer::turned ? &shared.landed[turn.stage] : &shared.full[turn.stage];
        ptx::mbarrier_wait_parity(&shared.empty[turn.stage], turn.parity ^ 1);
        int patches = count * arguments.patch_bytes;
        unsigned char* to = stage_of(arguments, memory, turn.stage);
        if (threadIdx.x == 0) {
            if constexpr (Layer::flat) shared.row[turn.stage] = y;
            ptx::mbarrier_arrive_expect_tx(full, x_bytes(arguments, x_box_bytes) + patches);
            if constexpr (Layer::maps_x) {
                int top = y - (Layer::stacked - 1);
#pragma unroll
                for (int i = 0; i < value_parts; ++i) {
                    ptx::cp_async_bulk_tensor_5d_global_to_shared(
                        to + i * x_part_bytes, &arguments.x, x, share.in, top, image,
                        share.group * value_parts + i, full);
                }
            } else {
                unsigned char* line = to + x_copy(arguments);
#pragma unroll
                for (int i = 0; i < (Layer::turned ? x_lines : value_parts); ++i) {
                    ptx::cp_async_bulk_tensor_5d_global_to_shared(
                        line + i * x_line_bytes, &arguments.x,
                        share.in + (Layer::strict ? 0 : i * line_channels), x, y, image,
                        share.group * value_parts + (Layer::strict ? i : 0), full);
                }
            }
        }
        to += x_room(arguments);
        for (int source = first; source < first + count; ++source) {
            int pixel = x * Layer::stride_x + entry(Layer::source_x, source);
            int row = y + entry(Layer::source_y, source), channel = share.out;
            if constexpr (Layer::flat) {
                row = Layer::source_first[source] + row * Layer::stride_y;
                bring_flat(arguments, to, pixel, row, channel, image, share.group, full);
                to += arguments.patch_stride;
                continue;
            }
            constexpr bool lines = Layer::raw && !Layer::turned;
#pragma unroll
            for (int i = 0; i < (Layer::turned ? y_lines : y_parts); ++i) {
                ptx::cp_async_bulk_tensor_5d_global_to_shared(
                    to + i * line_stride(arguments), maps + source, lines ? pixel : channel,
                    lines ? channel : pixel, row, image,
                    share.group * y_parts + (Layer::strict && !Layer::raw ? i : 0), full);
                if (Layer::turned) channel += line_channels;
            }
            to += arguments.patch_stride;
        }
        turn.advance(arguments.stages);
    }
}

// Turns x of each stage.
TCONV_DEVICE void turn_x(const Arguments& arguments, Shared& shared, unsigned char* memory) {
    Share share;
    CountedTurn turn;
    for (int box = share.split; box < arguments.boxes; box += arguments.splits) {
        ptx::mbarrier_wait_parity(&shared.landed[turn.stage], turn.parity);
        unsigned char* stage = stage_of(arguments, memory, turn.stage);
        turn_positions(stage + x_copy(arguments), stage, threadIdx.x / 32 - 1, turning_warps);
        ptx::fence_proxy_async_shared();
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.full[turn.stage]);
        turn.advance(arguments.stages);
    }
}

// x of each step, as the wgmma takes it from registers. A stage has 8 channels of a position in a
// row of a matrix. Of a contiguous x it has 8 positions of a channel, [row][channel][column], and
// the tensor map swizzled the channels' lines of `octets` rows of a matrix.
template <int count, int taps>
TCONV_DEVICE void load_x(const unsigned char* x, int octets, uint32_t (&a)[count][taps][4]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % warpgroup / 32;
    if constexpr (Layer::maps_x) {
        int last = octets - 1, line = (warp * 16 + lane % 16) * octets, swizzle = line / 8 & last;
#pragma unroll
        for (int step = 0; step < count; ++step) {
            int octet = step * 2 + lane / 16, of_line = octet & last;
            int at = (octet - of_line) * in_block + line + (of_line ^ swizzle);
            ptx::ldmatrix_x4(a[step][0], x + at * 16);
        }
    } else {
        int position = lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
        x += position * line_bytes + (chunk ^ position % 8) * 16;
#pragma unroll
        for (int step = 0; step < count; ++step) {
            ptx::ldmatrix_x4_trans(a[step][0], x + step * 16 * line_bytes);
        }
    }
}

// The box behind the last whose sums are left to the tensor cores, which cut them, from `box` on.
template <typename Fields>
TCONV_DEVICE int part_end(const Fields& arguments, int box) {
    return min(arguments.boxes, box + arguments.part_boxes * arguments.splits);
}

using Sums = float[consumer_taps / Layer::stacked][columns / 2];

// Two sums of a thread, `sum` and `next_sum` behind it: of neighbouring output channels of the
// block, from `out` on, and of one input channel. There are tap_columns / 4 such pairs of a tap.
constexpr int next_sum = Layer::raw ? 2 : 1;

struct Pair {
    int sum, in, out;
    bool swapped;

    TCONV_DEVICE Pair(int pair, int classes) {
        int lane = threadIdx.x % 32, row = threadIdx.x % warpgroup / 32 * 16 + lane / 4;
        sum = Layer::raw ? pair / 2 * 4 + pair % 2 : 2 * pair;
        int column = sum / 4 * 8 + lane % 4 * 2;
        in = Layer::raw ? column + pair % 2 : row + pair % 2 * 8;
        out = Layer::raw ? raw_channel(0, classes) / 2 * 2 : column;
        swapped = Layer::raw && !Layer::turned && classes == 1 && lane >= 16;
    }

    TCONV_DEVICE float value(const Sums& sums, int tap, int i) const {
        int at = tap % Layer::stacked * (tap_columns / 2) + sum;
        float low = sums[tap / Layer::stacked][at],
              high = sums[tap / Layer::stacked][at + next_sum];
        return swapped == (i == 0) ? high : low;
    }
};

// As [split][tap][in][out]: four lanes write a whole sector. Taps and channels of a folded y are
// those of the layer again. `adds`: to what the thread wrote before.
TCONV_DEVICE void write(const Arguments& arguments, const Share& share, int first, int count,
                        const Sums& sums, bool adds) {
    constexpr int vector = Layer::out_channels % 2 == 0 && !is_folded ? 2 : 1;
    constexpr int all_in = Layer::groups * Layer::in_channels;
    int of_group = share.group * Layer::in_channels;
    auto* partial = static_cast<float*>(arguments.result);
#pragma unroll
    for (int tap = 0; tap < consumer_taps; ++tap) {
        if (tap >= count) break;
        int index = Layer::tap_index[first + tap], y = index / Layer::kernel_x;
        int x = index - y * Layer::kernel_x;
        if (Layer::raw && index < 0) continue;
#pragma unroll
        for (int i = 0; i < tap_columns / 2; i += vector) {
            Pair pair(i / 2, raw_classes(arguments));
            int in = share.in + pair.in, out = share.out + pair.out + i % 2;
            if (in >= Layer::in_channels || out >= Layer::out_channels) continue;
            Vector<float, vector> values;
#pragma unroll
            for (int k = 0; k < vector; ++k) values.values[k] = pair.value(sums, tap, i % 2 + k);
            Unfolded of(out);
            int row = (y * Layer::fold_y + of.y) * Layer::kernel_x * Layer::fold_x;
            Index of_tap = Index(share.split) * Layer::taps + row + x * Layer::fold_x + of.x;
            float* to = partial + (of_tap * all_in + of_group + in) * Layer::fold_channels;
            to += of.channel;
            if (is_float32 && adds) {
                auto before = *reinterpret_cast<Vector<float, vector>*>(to);
#pragma unroll
                for (int k = 0; k < vector; ++k) values.values[k] += before.values[k];
            }
            *reinterpret_cast<Vector<float, vector>*>(to) = values;
        }
    }
}

// Computes again what a thread has written in strict float32, where it is not finite.
template <typename Fields>
TCONV_DEVICE void write_exactly(const Fields& arguments, const Share& share, int first, int count) {
    constexpr int all_in = Layer::groups * Layer::in_channels, of_tap = tap_columns / 2;
#pragma unroll 1
    for (int i = 0; i < count * of_tap; ++i) {
        Pair pair(i % of_tap / 2, raw_classes(arguments));
        int in = share.in + pair.in, out = share.out + pair.out + i % 2;
        int tap = entry(Layer::tap_index, first + i / of_tap);
        if (in >= Layer::in_channels || out >= Layer::out_channels || tap < 0) continue;
        Index row = Index(share.split * Layer::taps + tap) * all_in;
        row += share.group * Layer::in_channels + in;
        float* written = static_cast<float*>(arguments.result) + row * Layer::out_channels + out;
        if (is_finite(*written)) continue;
        *written = exact_sum(arguments, share.split, share.group * Layer::in_channels + in,
                             share.group * Layer::out_channels + out, tap);
    }
}

using Bits = unsigned short;  // of a value of the gradient

// The gradient is dense: weights of an input channel have their taps adjacent, or their output
// channels. A block's are a line in that order, taps by their place in the block's set.
constexpr int set_taps = Layer::sets == 1 ? Layer::taps : takers * consumer_taps;  // at most
constexpr int line_weights = set_taps * out_block;

// Neighbouring threads write neighbouring weights.
template <int vector, bool taps_adjacent>
TCONV_DEVICE void write_lines(const Arguments& arguments, const Share& share, const Bits* lines,
                              int pitch) {
    constexpr int warps = consumers * warpgroup / 32;
    int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 - warpgroup / 32;
    int rows = min(in_block, Layer::in_channels - share.in);
    int outs = min(out_block, Layer::out_channels - share.out);
    int first = entry(Layer::set_place, share.set);
    int taps = entry(Layer::set_place, share.set + 1) - first;
    constexpr Index row_weights = Index(Layer::out_channels) * Layer::taps;
    auto* gradient = static_cast<Bits*>(arguments.result) +
                     (share.group * Layer::in_channels + share.in + first_row) * row_weights;
#pragma unroll 1
    for (int i = lane * vector; i < line_weights; i += 32 * vector) {
        int out = taps_adjacent ? i / set_taps : i % out_block;
        int place = taps_adjacent ? i % set_taps : i / out_block;
        if (out >= outs || place >= taps) continue;
        int tap = Layer::sets == 1 ? place : entry(Layer::place_tap, first + place);
        Bits* to = gradient + (taps_adjacent ? (share.out + out) * Layer::taps + tap
                                             : tap * Layer::out_channels + share.out + out);
        using Values = Vector<Bits, vector>;
#pragma unroll 4
        for (int row = first_row; row < rows; row += warps) {
            *reinterpret_cast<Values*>(to) =
                *reinterpret_cast<const Values*>(lines + row * pitch + i);
            to += warps * row_weights;
        }
    }
}

// The gradient itself, of sums of all boxes.
TCONV_DEVICE void write_gradient(const Arguments& arguments, unsigned char* memory,
                                 const Share& share, int first, int count, const Sums& sums) {
    bool taps_adjacent = arguments.gradient_stride_out != 1;
    int of_out = taps_adjacent ? set_taps : 1, of_tap = taps_adjacent ? 1 : out_block;
    // Lines begin one bank or four apart: of the eight that a warp writes at a time, so are most.
    int pitch = (line_weights + 63) / 64 * 64 + (taps_adjacent ? 2 : 8);
    static_assert(is_folded || in_block * (line_weights + 72) * sizeof(Bits) <= 96 << 10,
                  "stages have room");
    auto* lines = reinterpret_cast<Bits*>(stage_of(arguments, memory, 0));
    ptx::bar_sync(1, consumers * warpgroup);  // the other consumer may still read a stage
#pragma unroll
    for (int tap = 0; tap < consumer_taps; ++tap) {
        if (tap >= count) break;
        if (Layer::raw && Layer::tap_index[first + tap] < 0) continue;
        Bits* to = lines + Layer::tap_place[first + tap] * of_tap;
#pragma unroll
        for (int i = 0; i < tap_columns / 4; ++i) {
            Pair of(i, raw_classes(arguments));
            float low = of.value(sums, tap, 0), high = of.value(sums, tap, 1);
            uint32_t pair = Layer::bfloat ? ptx::cvt_rn_bf16x2_f32(low, high)
                                          : ptx::cvt_rn_f16x2_f32(low, high);
            Bits* of_pair = to + of.in * pitch + of.out * of_out;
            of_pair[0] = Bits(pair);
            of_pair[of_out] = Bits(pair >> 16);
        }
    }
    ptx::bar_sync(1, consumers * warpgroup);
    constexpr bool even = Layer::out_channels % 2 == 0;
    if (taps_adjacent) {
        write_lines<even && Layer::places_pair ? 2 : 1, true>(arguments, share, lines, pitch);
    } else {
        write_lines<even ? 2 : 1, false>(arguments, share, lines, pitch);
    }
}

// Where a taker's taps read a stage: `count` from `first` on. A taker without one reads what the
// first of the set does.
template <typename Fields>
TCONV_DEVICE auto places_of(const Fields& arguments, const Share& share, int first, int count) {
    int other = entry(Layer::set_tap, share.set * takers);
    if constexpr (Layer::turned) {
        return TurnedPlaces(arguments, x_room(arguments), first, count, other,
                            entry(Layer::set_source, share.set));
    } else {
        return RawPlaces(arguments, count > 0 ? first : other);
    }
}

// Keeps operands until here.
template <int count>
TCONV_DEVICE void keep(uint32_t (&a)[count][operands][4]) {
#pragma unroll
    for (auto& of_step : a) {
#pragma unroll
        for (auto& of_tap : of_step) {
#pragma unroll
            for (uint32_t& value : of_tap) value = ptx::opaque(value);
        }
    }
}

// The product of a step and a tap.
TCONV_DEVICE void multiply(float (&sums)[columns / 2], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (is_float32) {
        ptx::wgmma_m64k8_tf32<columns>(sums, a, b, true);
    } else {
        ptx::wgmma_m64k16<Layer::bfloat, columns, !Layer::raw>(sums, a, b, true);
    }
}

// The products of some steps and all taps in strict float32. They have ended.
//
// The tensor cores cut a sum after each product. So those of a tap go to a temporary sum, the
// small ones first, while there is little to cut. It is then added in float32.
template <typename Fields>
TCONV_DEVICE void multiply_parts(const Fields& arguments, const unsigned char* x, int first,
                                 uint64_t y, const int (&starts)[consumer_taps],
                                 const int (&of_step)[all_steps], Sums& sums) {
    uint32_t a[value_parts][steps][operands][4];
#pragma unroll
    for (int part = 0; part < value_parts; ++part) {
        load_x(x + part * x_part_bytes + first * 16 * line_bytes, 0, a[part]);
    }
    float partial[columns / 2];
#pragma unroll
    for (float& sum : partial) sum = 0.0f;
    // NOTE: ptxas must not know, or it has temporary sums of several taps, and spills.
    bool keeps = ptx::opaque(0u) != 0;
#pragma unroll
    for (int tap = 0; tap < consumer_taps; ++tap) {
        uint64_t of_tap = ptx::advance(y, starts[tap]);
        ptx::wgmma_fence();
#pragma unroll
        for (int product = 0; product < Split::products; ++product) {
            auto& of_part = a[Split::part_of_a(product)];
#pragma unroll
            for (int step = 0; step < steps; ++step) {
                int at = of_step[first + step] + Split::part_of_b(product) * line_stride(arguments);
                ptx::wgmma_m64k16<true, columns, true>(partial, of_part[step][0],
                                                       ptx::advance(of_tap, at),
                                                       product + step > 0 || keeps);
            }
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();
        ptx::fence_registers(partial);
#pragma unroll
        for (int i = 0; i < columns / 2; ++i) {
            sums[tap][i] = fmaf(partial[i], Split::rescale, sums[tap][i]);
        }
        // NOTE: or ptxas adds later, and keeps the temporary sums of several taps until then.
        ptx::fence_registers(sums[tap]);
    }
    // NOTE: to ptxas a register is free once a product that reads it is issued.
#pragma unroll
    for (auto& of_part : a) keep(of_part);
}

// The same of a raw tile's box. A tap's next operands are split, and its last sums added, while
// products write the other temporary sum.
template <typename Places>
TCONV_DEVICE void multiply_raw_parts(Places& places, const unsigned char* y, uint64_t x,
                                     Sums& sums) {
    using Parts = uint32_t[value_parts][4];
    typename Places::Pixels pixels;
    Parts parts[2];
    float partial[2][columns / 2];
#pragma unroll
    for (auto& of_number : partial) {
#pragma unroll
        for (float& sum : of_number) sum = 0.0f;
    }
    // NOTE: ptxas must not know, or it has temporary sums of several taps, and spills.
    bool keeps = ptx::opaque(0u) != 0;
    auto prepare = [&](int number) {
        int tap = number % raw_taps;
        if (tap == 0) places.load_pixels_of(y, number / raw_taps, pixels);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            Split both = Split::scaled(pixels[i][tap][0], pixels[i][tap][1]);
            parts[number % 2][0][i] = both.high;
            parts[number % 2][1][i] = both.middle;
            parts[number % 2][2][i] = both.low;
        }
    };
    auto add = [&](int number) {
        ptx::fence_registers(partial[number % 2]);
        // NOTE: to ptxas a register is free once a product that reads it is issued.
#pragma unroll
        for (auto& part : parts[number % 2]) {
#pragma unroll
            for (uint32_t& value : part) value = ptx::opaque(value);
        }
        auto& to = sums[number % raw_taps];
#pragma unroll
        for (int i = 0; i < columns / 2; ++i) {
            to[i] = fmaf(partial[number % 2][i], Split::rescale, to[i]);
        }
        // NOTE: or ptxas adds later, and keeps the temporary sums of several taps until then.
        ptx::fence_registers(to);
    };
    constexpr int numbers = all_steps * raw_taps;
    prepare(0);
#pragma unroll
    for (int number = 0; number < numbers; ++number) {
        uint64_t of_step = ptx::advance(x, places.x_step(number / raw_taps));
        ptx::wgmma_fence();
#pragma unroll
        for (int product = 0; product < Split::products; ++product) {
            ptx::wgmma_m64k16<true, columns>(
                partial[number % 2], parts[number % 2][Split::part_of_a(product)],
                ptx::advance(of_step, Split::part_of_b(product) * x_part_bytes),
                product > 0 || keeps);
        }
        ptx::wgmma_commit_group();
        if (number > 0) {
            ptx::wgmma_wait_group<1>();
            add(number - 1);
        }
        if (number + 1 < numbers) prepare(number + 1);
    }
    ptx::wgmma_wait_group<0>();
    add(numbers - 1);
}

TCONV_DEVICE void consume(const Arguments& arguments, Shared& shared, unsigned char* memory,
                          int consumer) {
    Share share;
    CountedTurn turn;
    int warp = threadIdx.x % warpgroup / 32;
    int taker = consumer * (takers / consumers) + (Layer::raw ? warp * 16 / raw_channels : 0);
    int first = entry(Layer::set_tap, share.set * takers + taker);
    int count = entry(Layer::set_tap, share.set * takers + taker + 1) - first;
    const unsigned char* stages = stage_of(arguments, memory, 0);
    uint64_t matrix = Layer::raw ? raw_x(stages)
                                 : ptx::matrix_descriptor(stages, 0, arguments.group_stride,
                                                          ptx::Swizzle::bytes_128);
    // Where the positions of a tap, and of a step, begin among those of y.
    int starts[consumer_taps], of_step[all_steps];
#pragma unroll
    for (int tap = 0; tap < consumer_taps; ++tap) {
        int at = tap < count ? first + tap : entry(Layer::set_tap, share.set * takers);
        int source = Layer::tap_source[at] - entry(Layer::set_source, share.set);
        int position = Layer::tap_y[at] * arguments.pitch_x + Layer::tap_x[at];
        starts[tap] = x_room(arguments) + source * arguments.patch_stride;
        if (!Layer::raw) starts[tap] += position * line_bytes;
    }
    auto places = places_of(arguments, share, first, count);
#pragma unroll
    for (int step = 0; step < all_steps; ++step) {
        int row = step * 16 / arguments.box_x, x = step * 16 - row * arguments.box_x;
        int image = row / arguments.box_y;
        row += image * (arguments.pitch_y - arguments.box_y);
        of_step[step] = (row * arguments.pitch_x + x) * line_bytes;
    }
    int lane = threadIdx.x % 32, box = share.split;
    bool adds = false;
    uint32_t a[Layer::buffers][steps][operands][4];
    uint64_t* behind = nullptr;  // the stage that products may still read
    do {
        Sums sums;
#pragma unroll
        for (auto& of_tap : sums) {
#pragma unroll
            for (float& sum : of_tap) sum = 0.0f;
        }
        int end = arguments.boxes;
        if constexpr (is_float32) end = part_end(arguments, box);
#pragma unroll 1
        for (; box < end; box += arguments.splits) {
            if constexpr (Layer::turned) {
                ptx::mbarrier_wait_parity(&shared.landed[turn.stage], turn.parity);
            }
            ptx::mbarrier_wait_parity(&shared.full[turn.stage], turn.parity);
            const unsigned char* stage = stage_of(arguments, memory, turn.stage);
            uint64_t operand = ptx::advance(matrix, turn.stage * arguments.stage_bytes);
            if constexpr (Layer::flat) places.begin(arguments, shared.row[turn.stage]);
            if constexpr (Layer::strict && Layer::raw) {
                multiply_raw_parts(places, stage + starts[0], operand, sums);
            }
#pragma unroll
            for (int first = 0; first < (Layer::strict && Layer::raw ? 0 : all_steps);
                 first += steps) {
                if constexpr (Layer::strict) {
                    multiply_parts(arguments, stage, first, operand, starts, of_step, sums);
                    continue;
                }
                auto& of_steps = a[first / steps % Layer::buffers];
                if constexpr (Layer::raw) {
                    places.load(arguments, stage + (Layer::turned ? 0 : starts[0]), first,
                                of_steps);
                } else {
                    // NOTE: opaque, so that no register remembers where each step begins.
                    load_x(stage, ptx::opaque(arguments.box_x) / 8, of_steps);
                }
                ptx::wgmma_fence();
                // NOTE: all taps, also those beyond `count`, whose sums nobody writes: ptxas
                // serialises products that a branch may leave out (C7519).
#pragma unroll
                for (int tap = 0; tap < consumer_taps / Layer::stacked; ++tap) {
#pragma unroll
                    for (int step = 0; step < steps; ++step) {
                        auto& of_tap = of_steps[step][Layer::raw ? tap : 0];
                        int at =
                            Layer::raw ? places.x_step(first + step) : starts[tap] + of_step[step];
                        uint64_t b = ptx::advance(operand, at);
                        multiply(sums[tap], of_tap, b);
                    }
                }
                ptx::wgmma_commit_group();
                ptx::wgmma_wait_group<overlaps ? 1 : 0>();
                if constexpr (overlaps) {
                    // NOTE: to ptxas a register is free once a product that reads it is issued.
                    keep(a[(first / steps + 1) % Layer::buffers]);
                    if (first == 0 && lane == 0 && behind != nullptr) ptx::mbarrier_arrive(behind);
                }
            }
            if constexpr (overlaps) {
                behind = &shared.empty[turn.stage];
            } else {
                if (lane == 0) ptx::mbarrier_arrive(&shared.empty[turn.stage]);
            }
            turn.advance(arguments.stages);
        }
        if constexpr (overlaps) {
            ptx::wgmma_wait_group<0>();
#pragma unroll
            for (auto& of_steps : a) keep(of_steps);
            if (lane == 0 && behind != nullptr) ptx::mbarrier_arrive(behind);
            behind = nullptr;
        }
#pragma unroll
        for (auto& of_tap : sums) ptx::fence_registers(of_tap);
        if constexpr (!is_folded && !is_float32 && !Layer::strict) {
            if (arguments.splits == 1) {
                write_gradient(arguments, memory, share, first, count, sums);
                return;
            }
        }
        write(arguments, share, first, count, sums, adds);
        if constexpr (Layer::strict) {
            NotFinite<float> noted;
#pragma unroll
            for (auto& of_tap : sums) {
#pragma unroll
                for (int i = 0; i < columns / 2; i += 2) noted.note(of_tap[i], of_tap[i + 1]);
            }
            if (noted.any()) write_exactly(arguments, share, first, count);
        }
        adds = true;
    } while (is_float32 && box < arguments.boxes);
}

}  // namespace

TCONV_KERNEL(sm90_weight_gradient, Layer::threads, 1) {
    TCONV_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    static_assert(sizeof(Shared) <= 1024, "stages begin there");
    // Each map, of x and of y's sources, by a lane of warp 1, while barriers are made.
    constexpr int maps = 1 + (Layer::flat ? 1 : sizeof(Layer::source_y) / sizeof(int));
    int map = int(threadIdx.x) - 32;
    if (0 <= map && map < maps) ptx::prefetch_tensormap(&arguments.x + map);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < arguments.stages; ++stage) {
            ptx::mbarrier_init(&shared.full[stage], Layer::turned ? turning_warps : 1);
            if constexpr (Layer::turned) ptx::mbarrier_init(&shared.landed[stage], 1);
            ptx::mbarrier_init(&shared.empty[stage], consumers * warpgroup / 32);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    // NOTE: from one lane, so that ptxas takes it, and what follows from it, for uniform.
    int role = __shfl_sync(0xffffffffu, threadIdx.x / warpgroup, 0);
    // NOTE: setmaxnreg takes effect only in branches that do not join again.
    if (role == 0) {
        ptx::setmaxnreg_dec<Layer::turned ? 56 : consumers == 2 ? 24 : 32>();
        if (threadIdx.x < (Layer::flat ? 32 : 1)) bring(arguments, shared, memory);
        if constexpr (Layer::turned) {
            if (threadIdx.x >= 32) turn_x(arguments, shared, memory);
        }
    } else {
        ptx::setmaxnreg_inc<Layer::turned ? 224 : consumers == 2 ? 240 : 160>();
        consume(arguments, shared, memory, role - 1);
    }
}
