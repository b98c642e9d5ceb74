// Store, of float32 results: from registers, as a warp's values fill sectors of 32 bytes in any
// layout. Eight lanes have neighbouring channels or positions; or four lanes have two each.
//
// Positions that do not exist are left out. In strict float32, a thread computes again what is not
// finite, once it has written it: an infinity has parts that are not numbers (<common/split.cuh>).
#pragma once

#include <common/not_finite.cuh>
#include <engine/exact_value.cuh>
#include <engine/store.cuh>

namespace {

// Templates, as results of 16 bits go another way (<engine/store.cuh>).

// Two values that follow each other in memory, written together where they may be.
template <typename Float>
TCONV_DEVICE void write_pair(Float* to, float first, float second, bool aligned, Index step) {
    if (aligned) {
        *reinterpret_cast<float2*>(to) = {first, second};
    } else {
        to[0] = first;
        to[step] = second;
    }
}

// Positions are the wgmma's rows: a thread has two neighbouring channels of a position.
template <typename Float>
TCONV_DEVICE void store_rows(const Arguments& arguments, const Position& at, int consumer,
                             const Destination& to, const Biases& bias,
                             const Block (&sums)[blocks]) {
    constexpr bool pairs = !Layer::contiguous && Layer::vector > 1;
    int lane = threadIdx.x % 32, warp = threadIdx.x % warpgroup / 32;
    int first = first_position(arguments, consumer) + warp * 16 + lane / 4;
    Index stride_c = arguments.destination_stride_c;
#pragma unroll
    for (int block = 0; block < blocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Index offset = offset_of(arguments, at, to, first + block * 64 + half * 8);
            if (offset < 0) continue;
#pragma unroll
            for (int octet = 0; octet < group_rows / 8; ++octet) {
                int channel = octet * 8 + lane % 4 * 2, from = octet * 4 + half * 2;
                float low = sums[block][from] + bias.of[octet * 2];
                float high = sums[block][from + 1] + bias.of[octet * 2 + 1];
                Float* pixel = to.first + offset + Index(channel) * stride_c;
                if (channel + 1 < to.channels) {
                    write_pair(pixel, low, high, pairs, stride_c);
                } else if (channel < to.channels) {
                    *pixel = low;
                }
            }
        }
    }
}

// The same of a raw tile, whose thread has two neighbouring positions, of two channels.
template <typename Float>
TCONV_DEVICE void store_raw(const Arguments& arguments, const Position& at, int consumer,
                            const Destination& to, const Biases& bias, const Block (&sums)[blocks],
                            bool pairs) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % warpgroup / 32;
    int first = first_position(arguments, consumer) + warp * 16 + lane / 4 * 2;
    Index stride_c = arguments.destination_stride_c, stride_w = arguments.destination_stride_w;
#pragma unroll
    for (int block = 0; block < blocks; ++block) {
        Index low = offset_of(arguments, at, to, first + block * 64);
        // NOTE: the two are of one row (`granule`).
        bool high = offset_of(arguments, at, to, first + block * 64 + 1) >= 0;
        if (low < 0) continue;
#pragma unroll
        for (int i = 0; i < group_rows / 4; ++i) {
            int channel = i / 2 * 8 + lane % 4 * 2 + i % 2, from = i / 2 * 4 + i % 2;
            if (channel >= to.channels) continue;
            Float* pixel = to.first + low + Index(channel) * stride_c;
            float values[2] = {sums[block][from] + bias.of[i], sums[block][from + 2] + bias.of[i]};
            if (high) {
                write_pair(pixel, values[0], values[1], pairs, stride_w);
            } else {
                *pixel = values[0];
            }
        }
    }
}

// Channels are: a thread has two neighbouring positions of a channel.
template <typename Float>
TCONV_DEVICE void store_columns(const Arguments& arguments, const Position& at, int consumer,
                                const Destination& to, const Biases& bias, const Block& sums,
                                bool pairs) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % warpgroup / 32;
    int first = first_position(arguments, consumer) + lane % 4 * 2, channel = warp * 16 + lane / 4;
    Float* pixels = to.first + Index(channel) * arguments.destination_stride_c;
#pragma unroll
    for (int octet = 0; octet < columns / 8; ++octet) {
        int position = first + octet * 8;
        Index low = offset_of(arguments, at, to, position);
        // NOTE: pairs do not cross rows (`granule`).
        Index high = Layer::contiguous && pairs ? low : offset_of(arguments, at, to, position + 1);
        if (low < 0 && high < 0) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (channel + half * 8 >= to.channels) continue;
            Float* of_channel = pixels + Index(half * 8) * arguments.destination_stride_c;
            int from = octet * 4 + half * 2;
            float values[2] = {sums[from] + bias.of[half], sums[from + 1] + bias.of[half]};
            if (Layer::contiguous && pairs) {
                *reinterpret_cast<float2*>(of_channel + low) = {values[0], values[1]};
            } else {
                if (low >= 0) of_channel[low] = values[0];
                if (high >= 0) of_channel[high] = values[1];
            }
        }
    }
}

// Computes again what a thread has written of a result in strict float32, where it is not finite.
template <typename Fields>
TCONV_DEVICE void store_exactly(const Fields& arguments, const Position& at, int consumer,
                                int row_group, int of_set, const Destination& to) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % warpgroup / 32;
    int result = row_group % sets * tile_results + of_set, block = row_group / sets;
    int first_y = entry(Layer::result_y, result / Layer::results_x);
    int first_x = entry(Layer::result_x, result % Layer::results_x);
    constexpr int of_block = group_rows / 2;  // values of a thread, as they are written above
#pragma unroll 1
    for (int i = 0; i < blocks * of_block; ++i) {
        int value = i % of_block, half = value % 2, column = value / 2;
        int position = first_position(arguments, consumer) + i / of_block * 64 + warp * 16;
        position += Layer::raw ? lane / 4 * 2 + half : lane / 4 + half * 8;
        int channel = column / 2 * 8 + lane % 4 * 2 + column % 2;
        Index offset = offset_of(arguments, at, to, position);
        if (offset < 0 || channel >= to.channels) continue;
        auto* written = reinterpret_cast<float*>(to.first) + offset +
                        Index(channel) * arguments.destination_stride_c;
        if (is_finite(*written)) continue;
        Place place(arguments, position);
        *written = exact_value(
            arguments, at.image + place.n, at.group, block * group_rows + channel,
            first_y + (at.y + place.y) * Layer::step_y, first_x + (at.x + place.x) * Layer::step_x);
    }
}

template <typename Float, typename Fields>
TCONV_DEVICE void store_values(const Fields& arguments, const Position& at, int consumer,
                               const Sums& sums) {
    int row_group = at.row_group(consumer);
    if (row_group >= row_groups) return;
    Biases bias(arguments, at, row_group);
    bool pairs = alignment_of(arguments) % 2 == 0;
#pragma unroll
    for (int result = 0; result < tile_results; ++result) {
        Destination to(arguments, at, row_group, result);
        if constexpr (Layer::raw) {
            store_raw<Float>(arguments, at, consumer, to, bias, sums[result], pairs);
        } else if constexpr (positions_are_rows) {
            store_rows<Float>(arguments, at, consumer, to, bias, sums[result]);
        } else {
            store_columns<Float>(arguments, at, consumer, to, bias, sums[result][0], pairs);
        }
        if constexpr (Layer::strict) {
            NotFinite<float> noted;
#pragma unroll
            for (auto& of_block : sums[result]) {
#pragma unroll
                for (int i = 0; i < group_rows / 2; i += 2)
                    noted.note(of_block[i], of_block[i + 1]);
            }
            if (noted.any()) store_exactly(arguments, at, consumer, row_group, result, to);
        }
    }
}

}  // namespace
