// The epilogue of <mma_forward/tiles.cuh>: outputs from registers to shared memory, and which of
// them are recomputed.
#pragma once

#include <common/exact_output.cuh>
#include <mma_forward/products.cuh>
#include <ptx/barrier.cuh>

namespace mma_tiles {

// A team's outputs of one pass: pieces of rows, one row for each channel. A piece starts `head`
// after a multiple of 4 of the row.
constexpr int halves = Layer::unit_channels == 16 ? 2 : 1;  // of 8 channels, of lanes' rows
constexpr int pass_channels = Layer::unit_channels < 8 ? Layer::unit_channels : 8;
constexpr int head = Layer::head;
constexpr int team_columns = Layer::team ? tile_columns : part_columns;
constexpr int piece = team_columns * stride_x;
constexpr int output_pitch = Layer::output_pitch;
static_assert(head + piece <= output_pitch && output_pitch % 4 == 0, "rows start on a vector");
static_assert(Layer::unit_channels <= 8 || Layer::unit_channels == 16, "a pass is a lane's row");

// What outputs are tested for.
template <bool split>
struct Noting {
    using Of = NotFinite<float>;
};

template <>
struct Noting<true> {
    using Of = Unsound;
};

// `Kernel` has store_sums(unit).
template <typename Kernel, typename Shared>
struct Outputs : Products<Kernel, Shared> {
    using Base = Products<Kernel, Shared>;
    using Base::arguments, Base::shared, Base::stage, Base::position, Base::kernel, Base::sums;
    using Base::Base;
    using Base::clear_sums, Base::add_products;

    // Tables list the phases with taps first. Those without are listed apart.
    TCONV_DEVICE static int phase_y(int index) {
        int phase = 0;
#pragma unroll
        for (int k = 0; k < Layer::phases_y; ++k) {
            if (index == k) phase = Layer::phase_y[k];
        }
        return phase;
    }

    TCONV_DEVICE static int phase_x(int index) {
        int phase = 0;
#pragma unroll
        for (int k = 0; k < Layer::phases_x; ++k) {
            if (index == k) phase = Layer::phase_x[k];
        }
        return phase;
    }

    // Stores the lanes' outputs of one phase in y and up to 8 channels in shared memory. Returns
    // whether some of them are not finite.
    TCONV_DEVICE bool gather(float* outputs, const float* bias, int phase, int half) {
        constexpr int unit_channels = Layer::unit_channels;
        int lane = own_thread() % 32;
        typename Noting<Layer::split>::Of wrong;
#pragma unroll
        for (int m = 0; m < row_fragments; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int row = 16 * m + 8 * h;  // of lanes 0 to 3
                if (row >= unit_rows || (unit_channels == 16 && h != half)) continue;
                int own = row + lane / 4;
                int index = unit_channels % 8 == 0 ? row / unit_channels : own / unit_channels;
                int channel = unit_channels % 8 == 0 ? row % unit_channels + lane / 4
                                                     : own - index * unit_channels;
                bool used = unit_rows % 8 == 0 || own < unit_rows;
                if (Layer::unit_phases > 1) used = used && index / Layer::phases_x == phase;
                float added = Layer::bias && used ? bias[channel] : 0;
                int out = unit_channels % 8 == 0 ? lane / 4 : channel;
                float* to = outputs + out * output_pitch + head + phase_x(index % Layer::phases_x) +
                            lane % 4 * stride_x;
                if (!used) continue;
#pragma unroll
                for (int n = 0; n < fragments; ++n) {
                    const float* sum = &sums[m][n][2 * h];
                    float first = Layer::bias ? sum[0] + added : sum[0];
                    float second = Layer::bias ? sum[1] + added : sum[1];
                    to[8 * n * stride_x] = first;
                    to[(8 * n + 4) * stride_x] = second;
                    wrong.note(first, second);
                }
            }
        }
        // The phases in x that no tap reaches.
        if constexpr (Layer::phases_x < stride_x) {
            const float* row_bias = bias + 8 * half;
#pragma unroll
            for (int c = 0; c < pass_channels; ++c) {
                float value = row_bias[c];
#pragma unroll
                for (int k = 0; k < part_columns; k += 32) {
                    int pixel = k + lane;
                    if (k + 32 > part_columns && pixel >= part_columns) continue;
                    float* to = outputs + c * output_pitch + head + pixel * stride_x;
#pragma unroll
                    for (int e = 0; e < stride_x - Layer::phases_x; ++e) {
                        to[Layer::empty_x[e]] = value;
                    }
                }
            }
        }
        // Beside a tiny sum, another lane's zero may be what is left of a tiny sum.
        return Layer::split ? __any_sync(~0u, wrong.any()) : wrong.any();
    }

    // Recomputes the outputs of row y that the lane has gathered and that are not finite.
    TCONV_DEVICE void repair(float* outputs, const Unit& unit, int phase, int half, int y) const {
        constexpr int row_pixels = 2 * fragments;  // of a lane
        const Position& at = position();
        int lane = own_thread() % 32;
        int left = (at.tile_x * tile_columns + unit.part * part_columns) * stride_x +
                   Layer::first_output_x;
        int unit_channel = at.first_channel() + unit.channel_block * Layer::unit_channels;
#pragma unroll 1
        for (int e = 0; e < 2 * row_fragments * row_pixels; ++e) {
            int row = e / row_pixels * 8 + lane / 4;
            int index = row / Layer::unit_channels, channel = row % Layer::unit_channels;
            if (row >= unit_rows || index / Layer::phases_x != phase || channel / 8 != half)
                continue;
            int x = phase_x(index % Layer::phases_x) + (e % row_pixels * 4 + lane % 4) * stride_x;
            float* to = outputs + channel % 8 * output_pitch + head + x;
            bool inside = unit_channel + channel < Layer::out_channels &&
                          unsigned(left + x) < unsigned(arguments.destination_width);
            if (!inside || !is_wrong<Layer::split>(*to)) continue;
            *to = exact::output<!Layer::split>(arguments, at.image, at.group(),
                                               unit_channel + channel, y, left + x);
        }
    }

    TCONV_DEVICE static void team_barrier() {
        if constexpr (team_warps == 1) {
            __syncwarp();
        } else {
            ptx::bar_sync(1 + own_thread() / (32 * team_warps), 32 * team_warps);
        }
    }

    // The phase with taps after which a phase in y without one is written: the last before it, or
    // the first.
    TCONV_DEVICE static constexpr int before(int empty) {
        int found = 0;
        for (int k = 1; k < Layer::phases_y; ++k) {
            if (Layer::phase_y[k] < Layer::empty_y[empty]) found = k;
        }
        return found;
    }

    // Whether all of a unit lies beyond the output, or all of the row that its warp writes with
    // others.
    TCONV_DEVICE bool is_outside(const Unit& unit) const {
        const Position& at = position();
        int y = (at.tile_y * tile_rows + unit.row) * Layer::stride_y + Layer::first_output_y;
        int x = (at.tile_x * tile_columns + unit.part * part_columns) * stride_x +
                Layer::first_output_x;
        return y >= arguments.destination_height ||
               (team_warps == 1 && x >= arguments.destination_width);
    }

    // Computes and stores a tile.
    TCONV_DEVICE void compute_tile() {
        if constexpr (chunks == 1) {
            kernel().begin_step(true, 0);
            // NOTE: where each warp has at most one unit, the next is not counted, to save the
            // register.
#pragma unroll 1
            for (int i = own_thread() / 32; i < units; i = (units > warps) ? i + warps : units) {
                Unit unit(i);
                if (is_outside(unit)) continue;
                clear_sums();
                add_products(shared.patch[stage ^ 1], unit, 0, steps_8);
                // NOTE: the unit is found again: beside split operands, its values would not fit
                // the registers.
                Unit found =
                    Layer::team || Layer::split ? Unit(int(ptx::opaque(uint32_t(i)))) : unit;
                kernel().store_sums(found);
            }
        } else {
            clear_sums();
#pragma unroll 1
            for (int first = 0; first < Layer::in_channels; first += depth) {
                bool last = first + depth >= Layer::in_channels;
                kernel().begin_step(last, first + depth);
                Unit unit(own_thread() / 32);
                if (unit.row >= tile_rows || is_outside(unit)) continue;
                int rest = steps_8 - first / 8;
                int count = rest < depth / 8 ? rest : depth / 8;
                add_products(shared.patch[stage ^ 1], unit, first / 8, count);
            }
            Unit unit(own_thread() / 32);
            if (unit.row < tile_rows && !is_outside(unit)) {
                kernel().store_sums(unit);
            }
        }
    }
};

}  // namespace mma_tiles
