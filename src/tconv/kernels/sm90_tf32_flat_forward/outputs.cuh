// The epilogue of sm90_tf32_flat_forward. Consumers store outputs in shared memory; storers or the
// consumers write them from there to device memory.
#pragma once

#include <common/exact_output.cuh>
#include <common/ring.cuh>
#include <ptx/barrier.cuh>
#include <ptx/mbarrier.cuh>
#include <sm90_tf32_flat_forward/rows.cuh>
#include <sm90_tf32_flat_forward/stages.cuh>

namespace {

using Sums = float[columns / 2];

// Stores half of a warp's rows in shared memory, from column `first` on.
template <int first, int half>
TCONV_DEVICE void stage_outputs(Shared& shared, const flat::WarpRows& rows, int consumer,
                                const float (&bias)[2], const Sums& sums,
                                NotFinite<float>& not_finite) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % warpgroup / 32;
    int row = lane / 4 + 8 * half;
    if (row >= flat::warp_channels * flat::row_phases) return;
    int channel = warp * flat::warp_channels + row / flat::row_phases;
    float* to = shared.outputs[flat::apart ? 0 : consumer][channel] + rows.phase_x + Layer::shift +
                row % flat::row_phases + lane % 4 * 2 * phases;
    bool swap = swap_bit >= 0 && (lane >> (swap_bit & 31)) % 2 == 1;
    float* to_first = to + (swap ? phases : 0);
    float* to_second = to + (swap ? 0 : phases);
    float unit = Layer::half ? shared.units[consumer * 4 + warp] : 1.0f;
#pragma unroll
    for (int j = 0; j < part / 8 && first + j * 8 < columns; ++j) {
        const float* pair = sums + first / 2 + 4 * j + 2 * half;
        float at_first = (swap ? pair[1] : pair[0]) * unit + bias[half];
        float at_second = (swap ? pair[0] : pair[1]) * unit + bias[half];
        to_first[8 * j * phases] = at_first;
        to_second[8 * j * phases] = at_second;
        if constexpr (!Layer::half) not_finite.note(at_first), not_finite.note(at_second);
    }
}

// Notes whether some of a warp's outputs are not finite, for the warp that writes them. In float16
// no such image is final: it is recomputed.
TCONV_DEVICE void report(Shared& shared, int consumer, int half,
                         const NotFinite<float>& not_finite) {
    if constexpr (!Layer::half) {
        bool wrong = __any_sync(~0u, not_finite.any());
        if (threadIdx.x % 32 == 0)
            shared.wrong[consumer][half][threadIdx.x % warpgroup / 32] = wrong;
    }
}

// Whether some outputs of a consumer are not finite, or of both consumers where these are written
// together.
TCONV_DEVICE bool is_wrong(const Shared& shared, int consumer, int half, int warp) {
    return shared.wrong[consumer][half][warp] ||
           (slice_sets == 1 && shared.wrong[consumers - 1 - consumer][half][warp]);
}

// Hands a warp's outputs to the storers, slice by slice. `parity` is the tile's. A row group that
// does not exist has no outputs, but its slices turn with the others.
// NOTE: by mbarriers, at which all lanes arrive: compute-sanitizer's racecheck does not know that
// bar.arrive orders what comes before it.
template <int half = 0>
TCONV_DEVICE void hand_over(Shared& shared, const flat::WarpRows& rows, bool exists, int consumer,
                            const float (&bias)[2], const Sums& sums, uint32_t parity) {
    if constexpr (half < halves) {
        int set = consumer % slice_sets;
        ptx::mbarrier_wait_parity(&shared.slices_empty[set][half], parity ^ 1);
        NotFinite<float> not_finite;
        if (exists) {
            stage_outputs<0, half>(shared, rows, consumer, bias, sums, not_finite);
            if constexpr (halves == 1)
                stage_outputs<0, 1>(shared, rows, consumer, bias, sums, not_finite);
        }
        report(shared, consumer, half, not_finite);
        ptx::mbarrier_arrive(&shared.slices_full[set][half]);
        hand_over<half + 1>(shared, rows, exists, consumer, bias, sums, parity);
    }
}

// What is done with `width` outputs in shared and device memory. They are copied, or, where some of
// the part are not finite, recomputed.
struct Copying {
    static constexpr bool rolled = false;

    TCONV_DEVICE void operator()(float* to, const float* from) const {
        if constexpr (width == 4) {
            *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
        } else if constexpr (width == 2) {
            *reinterpret_cast<float2*>(to) = *reinterpret_cast<const float2*>(from);
        } else {
            *to = *from;
        }
    }
};

template <typename Fields>
struct Repairing {
    static constexpr bool rolled = true;
    const Fields& arguments;

    TCONV_DEVICE void operator()(float* to, const float*) const {
#pragma unroll 1
        for (int i = 0; i < width; ++i) exact::repair<true>(arguments, to + i);
    }
};

// Outputs of some channels in shared memory. `channel_count` of the channels are real.
// `destination` is where the first channel and phase in y begin.
struct Part {
    const float (*outputs)[out_pitch];
    const Place* places;
    int first;  // column
    int phase_y;
    int channel_count;
    float* destination;
};

// Visits the columns of `channels` channels' rows, from the part's first on.
template <int channels, typename Fields, typename Action>
TCONV_DEVICE void each_column(const Fields& arguments, const Part& of, const Action& action) {
    constexpr int unroll = Action::rolled ? 1 : channels < 4 ? 4 : 2;  // stores under way
    constexpr int unrolled = Action::rolled ? 1 : channels;
    int lane = threadIdx.x % 32;
#pragma unroll unroll
    for (int element = lane * width; element < out_columns; element += 32 * width) {
        int column = of.first + element / phases;
        if (columns % part != 0 && column >= columns) break;
        int phase = element % phases;
        Place place = of.places[column];
        int y = place.y + of.phase_y, x = place.x + phase;
        if (y < 0 || y >= arguments.destination_height || x < 0 ||
            x >= arguments.destination_width) {
            continue;
        }
        float* to = of.destination + place.offset + phase;
        const float* from = *of.outputs + element;
#pragma unroll unrolled
        for (int channel = 0; channel < channels; ++channel) {
            if (channel < of.channel_count) action(to, from + channel * out_pitch);
            to += arguments.destination_stride_c;
        }
    }
}

// Visits the rows of `channels` channels in the order of memory: those of phase_y and, in the
// second consumer's outputs, those of the next phase.
template <int channels, typename Fields, typename Action>
TCONV_DEVICE void each_row(const Fields& arguments, const Part& of, const Action& action) {
    constexpr int first = Layer::padding_x % phases;  // output of a row of positions that exists
    constexpr int unroll = Action::rolled ? 1 : channels < 4 ? 4 : 2;
    constexpr int unrolled = Action::rolled ? 1 : channels;
    int lane = threadIdx.x % 32;
    int pieces = arguments.destination_width / width;
    int row = lane / pieces, piece = lane - row * pieces;
    int rows_on = 32 / pieces, pieces_on = 32 - rows_on * pieces;
#pragma unroll unroll
    while (row < 2 * arguments.rows) {
        Place place = of.places[row / 2];
        int second = row % 2;
        int y = place.y + of.phase_y + second;
        if (y >= 0 && y < arguments.destination_height) {
            float* to = of.destination + place.offset + second * arguments.destination_stride_h +
                        first + piece * width;
            const float* from = of.outputs[second * out_channels] +
                                row / 2 * arguments.pitch * phases + Layer::shift + first +
                                piece * width;
#pragma unroll unrolled
            for (int channel = 0; channel < channels; ++channel) {
                if (channel < of.channel_count) action(to, from + channel * out_pitch);
                to += arguments.destination_stride_c;
            }
        }
        row += rows_on;
        piece += pieces_on;
        if (piece >= pieces) {
            piece -= pieces;
            ++row;
        }
    }
}

template <int channels, typename Fields, typename Action>
TCONV_DEVICE void each(const Fields& arguments, const Part& of, const Action& action) {
    if constexpr (flat::paired) {
        each_row<channels>(arguments, of, action);
    } else {
        each_column<channels>(arguments, of, action);
    }
}

// Called by a warp.
template <int channels, typename Fields>
TCONV_DEVICE void write(const Fields& arguments, const Part& of, bool wrong) {
    each<channels>(arguments, of, Copying{});
    if constexpr (!Layer::half) {
        if (wrong) each<channels>(arguments, of, Repairing<Fields>{arguments});
    }
}

TCONV_DEVICE float* destination_of(const Arguments& arguments, int group, int channel,
                                   int phase_y) {
    return static_cast<float*>(arguments.destination) +
           (Index(group) * Layer::out_channels + channel) * arguments.destination_stride_c +
           phase_y * arguments.destination_stride_h;
}

// Called before and after a warp's outputs are gathered. Synchronises the warp, or the two warps
// that hold its phases.
[[maybe_unused]] TCONV_DEVICE void gatherers_sync() {
    if (flat::apart) {
        ptx::bar_sync(1 + threadIdx.x % warpgroup / 32, 2 * 32);
    } else {
        __syncwarp();
    }
}

// Gathers and writes all columns of a warp's outputs, some at a time.
template <int first = 0>
TCONV_DEVICE void stage_and_write(const Arguments& arguments, Shared& shared, const Place* places,
                                  const flat::WarpRows& rows, int group, int consumer,
                                  const float (&bias)[2], const Sums& sums) {
    if constexpr (first < columns) {
        // Where two warps gather the same channels, each writes half of them.
        constexpr int channels = flat::apart ? flat::warp_channels / 2 : flat::warp_channels;
        int own = flat::apart ? consumer * channels : 0;
        int warp = threadIdx.x % warpgroup / 32;
        NotFinite<float> not_finite;
        stage_outputs<first, 0>(shared, rows, consumer, bias, sums, not_finite);
        stage_outputs<first, 1>(shared, rows, consumer, bias, sums, not_finite);
        report(shared, consumer, 0, not_finite);
        gatherers_sync();
        write<channels>(
            arguments,
            {shared.outputs[flat::apart ? 0 : consumer] + warp * flat::warp_channels + own, places,
             first, rows.phase_y, Layer::out_channels - rows.channel - own,
             destination_of(arguments, group, rows.channel + own, rows.phase_y)},
            is_wrong(shared, consumer, 0, warp));
        gatherers_sync();
        stage_and_write<first + part>(arguments, shared, places, rows, group, consumer, bias, sums);
    }
}

TCONV_DEVICE void store(const Arguments& arguments, Shared& shared) {
    int warp = threadIdx.x % warpgroup / 32;
    Turn<2> places;
    uint32_t parity = 0;
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(tile, arguments);
        ptx::mbarrier_wait_parity(&shared.places_full[places.stage], places.parity);
        const Place* positions = shared.places[places.stage];
#pragma unroll 1
        for (int slice = 0; slice < slice_sets * halves; ++slice) {
            int set = slice / halves, half = slice % halves;
            ptx::mbarrier_wait_parity(&shared.slices_full[set][half], parity);
            flat::WarpRows rows(at.row_group(set), warp);
            rows.channel += half * slice_channels;
            if (at.row_group(set) < Layer::row_groups && rows.phase_y < Layer::stride_y) {
                const float (*outputs)[out_pitch] =
                    shared.outputs[set] + warp * flat::warp_channels + half * slice_channels;
                write<slice_channels>(
                    arguments,
                    {outputs, positions, 0, rows.phase_y, Layer::out_channels - rows.channel,
                     destination_of(arguments, at.group, rows.channel, rows.phase_y)},
                    is_wrong(shared, set, half, warp));
            }
            ptx::mbarrier_arrive(&shared.slices_empty[set][half]);
        }
        parity ^= 1;
        ptx::mbarrier_arrive(&shared.places_empty[places.stage]);
        places.advance();
    }
}

}  // namespace
