// The weights, patches and products of <mma_forward/tiles.cuh>.
#pragma once

#include <mma_forward/tiles.cuh>
#include <ptx/mma.cuh>

namespace mma_tiles {

// `Shared` has `Weights weights` besides what image_tiles::Block needs.
template <typename Kernel, typename Shared>
struct Products : image_tiles::Block<Kernel, Shared, Position> {
    using Base = image_tiles::Block<Kernel, Shared, Position>;
    using Base::arguments, Base::shared, Base::stage, Base::new_weights;
    using Base::Base;

    float sums[row_fragments][fragments][4];

    struct PatchShape {
        static constexpr int rows = patch_rows;
        static constexpr int vectors = used_vectors;
        static constexpr int channels = depth;
        static constexpr int channel_pitch = patch_channel;
        // NOTE: sums live through the steps of deep tiles, so that unrolling further would spill.
        static constexpr int unrolled = chunks > 1 ? 2 : 4;
        TCONV_DEVICE static int place(int row, int column) { return row * patch_pitch + column; }
    };
    using Patch = image_tiles::Patch<threads, PatchShape>;

    TCONV_DEVICE void load_patch(float* patch, const Position& of, int first_channel) const {
        int top = of.tile_y * tile_rows + Layer::first_row;
        int left = of.tile_x * tile_columns + Layer::first_column - skew;
        Patch::load(patch, arguments, of, first_channel, top, left, arguments.source_height);
    }

    // A thread has a tap of an output channel and 8 input channels at a time. Neighbouring lanes
    // have neighbouring taps, which are neighbours in memory.
    // NOTE: parts of a weight lie where the weight 4 channels on was copied to. Where there is no
    // such weight, old contents may be the bits of a NaN, so zeros are copied.
    TCONV_DEVICE void load_weights(const Position& of) const {
        constexpr unsigned taps = Layer::kernel_y * Layer::kernel_x;
        constexpr unsigned of_channel = tile_channels * taps;
        constexpr bool whole = Layer::out_channels % tile_channels == 0;
        constexpr bool whole_steps = Layer::in_channels % 8 == 0;
        Weights& weights = shared.weights;
        const float* source = static_cast<const float*>(arguments.weight) +
                              of.group() * Layer::in_channels * arguments.weight_stride_in;
#pragma unroll 1
        for (unsigned i = own_thread(); i < steps_8 * of_channel; i += threads) {
            int step = i / of_channel, out = i % of_channel / taps;
            int tap_y = i % taps / Layer::kernel_x, tap_x = i % Layer::kernel_x;
            int channel = of.first_channel() + out;
            bool inside = whole || channel < Layer::out_channels;
            Index offset = 8 * step * arguments.weight_stride_in +
                           channel * arguments.weight_stride_out +
                           tap_y * arguments.weight_stride_h + tap_x * arguments.weight_stride_w;
            float* to = &weights.values[step * step_weights + weight_place(out, tap_y, tap_x)];
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                bool exists = whole_steps || 8 * step + c < Layer::in_channels;
                if (!Layer::split && !exists) continue;
                bool filled = inside && exists;
                ptx::cp_async_ca<4>(to + (c % 4 * lane_weights + c / 4 * 2),
                                    source + (filled ? offset + c * arguments.weight_stride_in : 0),
                                    filled);
            }
        }
        const float* bias = static_cast<const float*>(arguments.bias);
        for (int i = own_thread(); i < tile_channels; i += threads) {
            if constexpr (Layer::bias) {
                bool inside = of.first_channel() + i < Layer::out_channels;
                Index offset = of.group() * Layer::out_channels + of.first_channel() + i;
                ptx::cp_async_ca<4>(&weights.bias[i], bias + (inside ? offset : 0), inside);
            } else {
                weights.bias[i] = 0;
            }
        }
    }

    // Clears the weights of rows, channels and slots without a tap, which no copy ever reaches.
    TCONV_DEVICE void clear_weights() const {
        for (int i = own_thread() * 4; i < kinds * kind_weights; i += threads * 4) {
            *reinterpret_cast<Vector<float, 4>*>(&shared.weights.values[i]) = Vector<float, 4>{};
        }
        __syncthreads();
    }

    // Rounds all threads' weights, and those that no copy reaches, in an order without bank
    // conflicts.
    TCONV_DEVICE void round_weights() const {
        __syncthreads();
        constexpr int lanes = kinds * kind_weights / slot_weights * row_fragments * 32;
        for (int i = own_thread(); i < lanes; i += threads) {
            int fragment = i / 32;
            float* at =
                &shared.weights
                     .values[fragment / row_fragments * slot_weights +
                             fragment % row_fragments * fragment_weights + i % 32 * lane_weights];
            if constexpr (Layer::split) {
                Split top(at[0], at[2]), bottom(at[1], at[3]);
                using Pair = Vector<uint32_t, 2>;
                auto* to = reinterpret_cast<Pair*>(at);
                to[0] = {{top.high, bottom.high}};
                to[1] = {{top.middle, bottom.middle}};
                to[2] = {{top.low, bottom.low}};
            } else {
                auto values = *reinterpret_cast<Vector<float, 4>*>(at);
#pragma unroll
                for (float& value : values.values) value = operand<true>(value);
                *reinterpret_cast<Vector<float, 4>*>(at) = values;
            }
        }
    }

    TCONV_DEVICE void round_step() {
        if constexpr (!Layer::round_on_load) Patch::round(shared.patch[stage]);
        if (new_weights) round_weights();
    }

    TCONV_DEVICE void clear_sums() {
#pragma unroll
        for (int m = 0; m < row_fragments; ++m) {
#pragma unroll
            for (int n = 0; n < fragments; ++n) {
#pragma unroll
                for (int v = 0; v < 4; ++v) sums[m][n][v] = 0;
            }
        }
    }

    // Whether some row of fragment m has a tap at the slot, in the phase group that has most taps.
    TCONV_DEVICE static bool has_tap(int m, int slot_y, int slot_x) {
        bool any = false;
#pragma unroll
        for (int row = 16 * m; row < 16 * m + 16; row += Layer::unit_channels == 16 ? 16 : 1) {
            int phase = row / Layer::unit_channels;
            if (row >= unit_rows) continue;
            bool y = Layer::phase_groups > 1;
            bool x = false;
#pragma unroll
            for (int t = 0; t < Layer::kernel_y; ++t) {
                y |= Layer::tap_slot_y[t] == slot_y &&
                     Layer::tap_phase_y[t] == phase / Layer::phases_x;
            }
#pragma unroll
            for (int t = 0; t < Layer::kernel_x; ++t) {
                x |= Layer::tap_slot_x[t] == slot_x &&
                     Layer::tap_phase_x[t] == phase % Layer::phases_x;
            }
            any |= x && y;
        }
        return any;
    }

    // Whether a phase group has a tap at the slot in y.
    TCONV_DEVICE static bool group_has_tap(int group, int slot_y) {
        bool any = Layer::phase_groups == 1;
#pragma unroll
        for (int t = 0; t < Layer::kernel_y; ++t) {
            any |= Layer::tap_slot_y[t] == slot_y && Layer::tap_phase_y[t] == group;
        }
        return any;
    }

    TCONV_DEVICE static uint32_t pixel_bits(float value) {
        return Layer::round_on_load ? ptx::cvt_rna_tf32_f32(value) : __float_as_uint(value);
    }

    // Column c of a fragment is pixel c/2 + c%2 * 4. So a lane's two sums are 4 pixels apart, and
    // neighbouring lanes have neighbouring pixels. This spreads the gathering stores over the
    // banks.
    TCONV_DEVICE static int pixel_of(int column) { return column / 2 + column % 2 * 4; }

    // Adds the products of `count` times 8 channels of the patch to the unit's sums.
    TCONV_DEVICE void multiply(const float* patch, const Unit& unit, int first_8, int count) {
        int lane = own_thread() % 32;
        const float* source = patch + lane % 4 * patch_channel + unit.row * patch_pitch +
                              (unit.part * part_columns + skew + pixel_of(lane / 4));
        const float* weight =
            shared.weights.values + unit.kind() * kind_weights + first_8 * step_weights + lane * 4;
#pragma unroll 1
        for (int k = 0; k < count; ++k) {
#pragma unroll
            for (int slot = 0; slot < Layer::slots_y; ++slot) {
                // NOTE: uniform over the warp.
                if (Layer::phase_groups > 1 && !group_has_tap(unit.phase_group, slot)) continue;
#pragma unroll
                for (int x = 0; x < Layer::slots_x; ++x) {
                    uint32_t a[row_fragments][4];
#pragma unroll
                    for (int m = 0; m < row_fragments; ++m) {
                        if (!has_tap(m, slot, x)) continue;
                        using Four = Vector<uint32_t, 4>;
                        Four part = *reinterpret_cast<const Four*>(
                            weight + (slot * Layer::slots_x + x) * slot_weights + m * 128);
#pragma unroll
                        for (int v = 0; v < 4; ++v) a[m][v] = part.values[v];
                    }
                    const float* from =
                        source + Layer::offset_y[slot] * patch_pitch + Layer::offset_x[x];
#pragma unroll
                    for (int n = 0; n < fragments; ++n) {
                        uint32_t b[2] = {pixel_bits(from[8 * n]),
                                         pixel_bits(from[4 * patch_channel + 8 * n])};
#pragma unroll
                        for (int m = 0; m < row_fragments; ++m) {
                            if (!has_tap(m, slot, x)) continue;
                            ptx::mma_m16n8k8_tf32(sums[m][n], a[m], b);
                        }
                    }
                }
            }
            source += 8 * patch_channel;
            weight += step_weights;
        }
    }

    // The same with split operands. bfloat16 is twice as deep, so that two products of parts go
    // side by side. The tensor cores cut what they add, so the products of each step and slot leave
    // them: the products of high parts, one product of 16 bits, on their own. They are added as
    // float32 adds.
    TCONV_DEVICE void multiply_split(const float* patch, const Unit& unit, int first_8, int count) {
        int lane = own_thread() % 32;
        const float* source = patch + lane % 4 * patch_channel + unit.row * patch_pitch +
                              (unit.part * part_columns + skew + pixel_of(lane / 4));
        const float* weight = shared.weights.values + unit.kind() * kind_weights +
                              first_8 * step_weights + lane * lane_weights;
        // NOTE: ptxas loads as many slots ahead as it sees, until it spills. Which fragments of
        // rows have a tap depends on the slot in x alone, except for units of several phases in y.
        constexpr bool unrolled = Layer::unit_phases > 1;
#pragma unroll 1
        for (int k = 0; k < count; ++k) {
#pragma unroll(unrolled ? Layer::slots_y : 1)
            for (int slot = 0; slot < Layer::slots_y; ++slot) {
                if (Layer::phase_groups > 1 && !group_has_tap(unit.phase_group, slot)) continue;
                int offset = entry(Layer::offset_y, slot);
                const float* row = source + offset * patch_pitch;
                const float* fragment = weight + slot * (Layer::slots_x * slot_weights);
#pragma unroll(unrolled ? Layer::slots_x : 1)
                for (int x = 0; x < Layer::slots_x; ++x) {
                    const float* from = row + entry(Layer::offset_x, x);
                    uint32_t middle_high[fragments][2], low_middle[fragments][2];
#pragma unroll
                    for (int n = 0; n < fragments; ++n) {
                        Split parts(from[8 * n], from[4 * patch_channel + 8 * n]);
                        middle_high[n][0] = low_middle[n][1] = parts.middle;
                        middle_high[n][1] = parts.high;
                        low_middle[n][0] = parts.low;
                    }
#pragma unroll
                    for (int m = 0; m < row_fragments; ++m) {
                        // NOTE: uniform over the warp.
                        if (unrolled ? !has_tap(m, slot, x)
                                     : !(entry(Layer::slot_fragments, x) >> m & 1)) {
                            continue;
                        }
                        auto parts = reinterpret_cast<const Vector<uint32_t, 2>*>(
                            fragment + x * slot_weights + m * fragment_weights);
                        const auto &high = parts[0].values, &middle = parts[1].values,
                                   &low = parts[2].values;
                        const uint32_t both[4] = {high[0], high[1], middle[0], middle[1]};
#pragma unroll
                        for (int n = 0; n < fragments; ++n) {
                            constexpr float zero[4] = {};
                            float large[4], small[4];
                            const uint32_t pixel_high[1] = {middle_high[n][1]};
                            // NOTE: in this order ptxas spills nothing.
                            ptx::mma_m16n8k8_bf16(small, low, pixel_high, zero);
                            ptx::mma_m16n8k16_bf16(small, both, low_middle[n]);
                            ptx::mma_m16n8k8_bf16(large, high, pixel_high, zero);
                            ptx::mma_m16n8k16_bf16(small, both, middle_high[n]);
#pragma unroll
                            for (int v = 0; v < 4; ++v) sums[m][n][v] += large[v];
#pragma unroll
                            for (int v = 0; v < 4; ++v) sums[m][n][v] += small[v];
                        }
                    }
                }
            }
            source += 8 * patch_channel;
            weight += step_weights;
        }
    }

    TCONV_DEVICE void add_products(const float* patch, const Unit& unit, int first_8, int count) {
        if constexpr (Layer::split) {
            multiply_split(patch, unit, first_8, count);
        } else {
            multiply(patch, unit, first_8, count);
        }
    }
};

}  // namespace mma_tiles
