// The epilogue of sm90_tf32_overlap_forward: sums of overlapping taps, and their stores.
#pragma once

#include <common/exact_output.cuh>
#include <ptx/memory.cuh>
#include <sm90_tf32_overlap_forward/strips.cuh>

namespace {

// Writes neighbouring outputs, if they exist.
TCONV_DEVICE void store(float* destination, const float* v, bool exist) {
    if constexpr (vector == 4) {
        ptx::st_global_cs_v4_if(destination, make_float4(v[0], v[1], v[2], v[3]), exist);
    } else if constexpr (vector == 2) {
        ptx::st_global_cs_v2_if(destination, make_float2(v[0], v[1]), exist);
    } else {
        ptx::st_global_cs_if(destination, v[0], exist);
    }
}

struct Outputs {
    const Arguments& arguments;
    float waiting[unit_slots][window > 1 ? window - 1 : 1][stride_x][2][reach + 1];
    float bias[unit_slots];
    Index offset[unit_slots];  // from the first unit's
    int row[unit_slots];  // of the outputs, less q * stride_y
    float* to;  // of output row y * stride_y, in the first out channel
    int first_row;  // y * stride_y, both of the last row that was added
    uint32_t live;  // a bit for each of the pair's outputs in x

    TCONV_DEVICE Outputs(const Arguments& arguments, Index group) : arguments(arguments) {
        const float* biases =
            static_cast<const float*>(arguments.bias) + group * Layer::out_channels;
#pragma unroll
        for (int slot = 0; slot < unit_slots; ++slot) {
            int unit = slot * 4 + threadIdx.x % 4;
            int channel = unit < units ? unit % Layer::out_channels : 0;
            bias[slot] = Layer::bias ? ptx::ld_global_nc(biases + channel) : 0;
        }
#pragma unroll
        for (int i = 0; i < unit_slots; ++i) {
            int unit = i * 4 + threadIdx.x % 4;
            bool exists = unit < units;
            int phase = exists ? unit / Layer::out_channels : 0;
            int channel = exists ? unit % Layer::out_channels : 0;
            // NOTE: a row that never exists.
            row[i] = exists ? phase - Layer::padding_y : -(1 << 30) * 2;
            offset[i] = channel * arguments.destination_stride_c +
                        (phase - Layer::padding_y) * arguments.destination_stride_h;
        }
    }

    TCONV_DEVICE void enter(const Walk& at, Index group) {
        int pair = threadIdx.x % 32 / 4;
        int pixel = Layer::first_pixel + at.strip * Layer::strip +
                    threadIdx.x % warpgroup / 32 * useful + 2 * pair;
        int x = pixel * stride_x - Layer::offset_x;
        live = 0;
#pragma unroll
        for (int i = 0; i < 2 * stride_x; i += vector) {
            bool exists = pair >= reach && unsigned(x + i) < unsigned(arguments.destination_width);
            live |= uint32_t(exists) << i;
        }
        first_row = (at.y - 1) * stride_y;
        to = static_cast<float*>(arguments.destination) +
             (at.image * arguments.destination_stride_n +
              group * Layer::out_channels * arguments.destination_stride_c +
              first_row * arguments.destination_stride_h + x);
        each_sum([&](int slot, int i, int r, int o, int h) {
            if (i + 1 < slot_taps(slot)) waiting[slot][i][r][o][h] = 0;
        });
    }

    // Calls `action` for every sum of the thread, with its slot, row, phase, pixel and pair.
    template <typename Action>
    TCONV_DEVICE static void each_sum(Action action) {
#pragma unroll
        for (int slot = 0; slot < unit_slots; ++slot) {
#pragma unroll
            for (int i = 0; i < window; ++i) {
#pragma unroll
                for (int r = 0; r < stride_x; ++r) {
#pragma unroll
                    for (int o = 0; o < 2; ++o) {
#pragma unroll
                        for (int h = 0; h <= reach; ++h) {
                            if (i < slot_taps(slot) && has_sum(r, o, h)) action(slot, i, r, o, h);
                        }
                    }
                }
            }
        }
    }

    // Adds the products of the walk's input row. Writes the rows that are then complete, if they
    // belong to the walk's share.
    TCONV_DEVICE void add(const Products& products, const Walk& at, Index group) {
        Sums complete[unit_slots];
        each_sum([&](int slot, int i, int r, int o, int h) {
            bool begun = i + 1 < slot_taps(slot);
            float sum = begun ? waiting[slot][i][r][o][h] : 0.0f;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                int tap = tap_of(r, o, h, e);
                if (!is_tap(tap)) continue;
                int column = slot_begin(slot) + i * kernel_x + tap;
                float product = products[column / 2 * 4 + 2 * e + column % 2];
                sum = begun ? sum + product : product;
                begun = true;
            }
            if (i == 0) {
                complete[slot][r][o][h] = sum;
            } else {
                waiting[slot][i - 1][r][o][h] = sum;
            }
        });
        to += stride_y * arguments.destination_stride_h;
        first_row += stride_y;
        if (at.y >= at.first_q) {
            NotFinite<float> not_finite;
#pragma unroll
            for (int slot = 0; slot < unit_slots; ++slot) {
                float values[2 * stride_x];
                finish(slot, complete[slot], values);
#pragma unroll
                for (int i = 0; i < 2 * stride_x; ++i) not_finite.note(values[i]);
                write(slot, values);
            }
            if (not_finite.any()) repair(at, group);
        }
    }

private:
    TCONV_DEVICE bool has_row(int slot) const {
        return unsigned(first_row + row[slot]) < unsigned(arguments.destination_height);
    }

    // The pair's outputs of a unit: adds sums of other pairs, and the bias.
    TCONV_DEVICE void finish(int slot, const Sums& sums, float (&values)[2 * stride_x]) const {
#pragma unroll
        for (int r = 0; r < stride_x; ++r) {
#pragma unroll
            for (int o = 0; o < 2; ++o) {
                float sum = 0;
                bool any = false;
                if (slot_taps(slot) > 0) {
#pragma unroll
                    for (int h = reach; h >= 0; --h) {
                        if (has_sum(r, o, h)) {
                            sum = any ? sum + sums[r][o][h] : sums[r][o][h];
                            any = true;
                        }
                        if (any && h > 0) sum = __shfl_up_sync(0xffffffffu, sum, 4);
                    }
                }
                values[o * stride_x + r] = Layer::bias ? sum + bias[slot] : sum;
            }
        }
    }

    TCONV_DEVICE void write(int slot, const float (&values)[2 * stride_x]) const {
        if (!has_row(slot)) return;
        float* destination = to + offset[slot];
#pragma unroll
        for (int i = 0; i < 2 * stride_x; i += vector) {
            store(destination + i, values + i, live >> i & 1);
        }
    }

    // Recomputes the outputs of this row that the thread has written and that are not finite.
    TCONV_DEVICE void repair(const Walk& at, Index group) const {
        int pair = threadIdx.x % 32 / 4;
        if (pair < reach) return;
        int pixel = Layer::first_pixel + at.strip * Layer::strip +
                    threadIdx.x % warpgroup / 32 * useful + 2 * pair;
#pragma unroll 1
        for (int i = 0; i < unit_slots * 2 * stride_x; ++i) {
            int unit = i / (2 * stride_x) * 4 + threadIdx.x % 4, column = i % (2 * stride_x);
            if (unit >= units) break;
            int channel = unit % Layer::out_channels;
            int y = first_row + unit / Layer::out_channels - Layer::padding_y;
            int x = pixel * stride_x - Layer::offset_x + column;
            if (unsigned(y) >= unsigned(arguments.destination_height) ||
                unsigned(x) >= unsigned(arguments.destination_width)) {
                continue;
            }
            float* place =
                static_cast<float*>(arguments.destination) +
                (at.image * arguments.destination_stride_n +
                 (group * Layer::out_channels + channel) * arguments.destination_stride_c +
                 y * arguments.destination_stride_h + x);
            if (is_finite(*place)) continue;
            *place = exact::output<true>(arguments, at.image, group, channel, y, x);
        }
    }
};

}  // namespace
