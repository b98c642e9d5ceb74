// Bring, without a tensor map: a warpgroup reads a contiguous source and turns it.
//
// A unit is 8 channels of 8 neighbouring pixels of a row, which one thread takes: of each channel
// the longest vectors that all addresses allow, turned in registers into 16 bytes for each pixel.
// Neighbouring threads have neighbouring octets of the same pixels, so that they write without bank
// conflicts, and read 64 bytes of a channel's row.
//
// A run is neighbouring stages that read the same rows: of the phases of y along x, whose pixels
// follow each other in turn. A run's pixels are read once.
//
// Promises what `bring_patches` does.
#pragma once

#include <common/division.cuh>
#include <engine/pack_image.cuh>
#include <engine/stages.cuh>
#include <ptx/bulk.cuh>

namespace {

// A template, as the fields are there only of a source that is turned.
template <typename Fields>
struct Turner {
    using Element = Layer::Element;

    static constexpr int octets = depth / 8;  // of a position
    static constexpr int abreast = warpgroup / octets;  // units that the threads take at a time
    static constexpr int unit_pixels = 8;
    static constexpr int units = 2;  // of a thread at a time, whose loads are under way together
    static constexpr int step_x = Layer::source_step_x, step_y = Layer::source_step_y;
    static constexpr bool whole = Layer::reduced % 8 == 0;  // octets have all channels, or none

    struct Unit {
        uint32_t values[8][4];  // of each channel 8 pixels; turned, of each pixel 8 channels
        int row;  // its first position in the patch; -1 if there is no unit
        int pixel;  // its first, from the run's first on
    };

    const Fields& arguments;
    Shared& shared;
    CountedTurn turn;
    int octet, longest;

    TCONV_DEVICE Turner(const Fields& arguments, Shared& shared)
        : arguments(arguments), shared(shared), octet(threadIdx.x % octets) {
        auto aligned = reinterpret_cast<uint64_t>(arguments.source) / sizeof(Element) |
                       arguments.source_stride_n | arguments.source_stride_c |
                       arguments.source_stride_h | arguments.source_width;
        longest = arguments.source_stride_w == 1 ? int(aligned & -aligned) : 1;
        if (longest > 8 || longest == 0) longest = 8;
    }

    template <int vector>
    TCONV_DEVICE void load_vectors(Unit& unit, Index from, int x, int exist) const {
        const Element* source = static_cast<const Element*>(arguments.source);
#pragma unroll
        for (int i = 0; i < unit_pixels; i += vector) {
            if (unsigned(x + i) >= unsigned(arguments.source_width)) continue;
            Index at = from + (x + i) * (vector == 1 ? arguments.source_stride_w : 1);
#pragma unroll
            for (int channel = 0; channel < 8; ++channel) {
                if (!whole && channel >= exist) continue;
                uint32_t* words = &unit.values[channel][i / 2];
                if constexpr (vector == 1) {
                    uint32_t found;
                    load_neighbours<1>(source + at, &found);
                    *words |= found << i % 2 * 16;
                } else {
                    load_neighbours<vector>(source + at, words);
                }
                at += arguments.source_stride_c;
            }
        }
    }

    // Loads unit `number` of a run, whose first pixel is (y, x) of an image.
    TCONV_DEVICE void load(Unit& unit, const Position& at, int chunk, int number, int y, int x) {
        unsigned line = divide(number, arguments.vectors_multiplier, arguments.vectors_shift);
        unsigned n = divide(line, arguments.patch_rows_multiplier, arguments.patch_rows_shift);
        int first = x & -longest;
        int of_line = (number - int(line) * arguments.vectors) * unit_pixels;
        unit.row = int(line) < arguments.lines ? int(line) * arguments.pitch_x : -1;
        unit.pixel = first - x + of_line;
#pragma unroll
        for (auto& of_channel : unit.values) {
#pragma unroll
            for (uint32_t& word : of_channel) word = 0;
        }
        y += (int(line) - int(n) * arguments.patch_rows) * step_y;
        int image = at.image + int(n), channel = chunk * depth + octet * 8;
        int exist = Layer::reduced - channel;
        if (unit.row < 0 || exist <= 0 || image >= arguments.batch ||
            unsigned(y) >= unsigned(arguments.source_height)) {
            return;
        }
        Index from = Index(image) * arguments.source_stride_n +
                     Index(y) * arguments.source_stride_h +
                     Index(at.group * Layer::reduced + channel) * arguments.source_stride_c;
        x = first + of_line;
        if (longest == 8) {
            load_vectors<8>(unit, from, x, exist);
        } else if (longest == 4) {
            load_vectors<4>(unit, from, x, exist);
        } else if (longest == 2) {
            load_vectors<2>(unit, from, x, exist);
        } else {
            load_vectors<1>(unit, from, x, exist);
        }
    }

    TCONV_DEVICE static void turn_over(Unit& unit) {
        uint4 pixels[unit_pixels];
#pragma unroll
        for (int i = 0; i < unit_pixels; ++i) {
            pixels[i] = ImagePacking<Layer::reduced, false>::octet_of(unit.values, i);
        }
#pragma unroll
        for (int i = 0; i < unit_pixels; ++i) {
            unit.values[i][0] = pixels[i].x;
            unit.values[i][1] = pixels[i].y;
            unit.values[i][2] = pixels[i].z;
            unit.values[i][3] = pixels[i].w;
        }
    }

    // Writes the pixels that a stage has of a unit that is turned. The stage's first position is
    // pixel `first` of the run.
    TCONV_DEVICE void write(const Unit& unit, unsigned char* patch, int first) const {
        if (unit.row < 0) return;
#pragma unroll
        for (int i = 0; i < unit_pixels; ++i) {
            int pixel = unit.pixel - first + i, x = pixel / step_x;
            if (pixel < 0 || pixel != x * step_x || x >= arguments.pitch_x) continue;
            int position = unit.row + x;
            int chunk = octet ^ (line_bytes == 128 ? position % 8 : position / 2 % 4);
            const uint32_t(&values)[4] = unit.values[i];
            *reinterpret_cast<uint4*>(patch + position * line_bytes + chunk * 16) = {
                values[0], values[1], values[2], values[3]};
        }
    }

    TCONV_DEVICE int stage_of_run(int i) const {
        int stage = turn.stage + i;
        return stage < arguments.patch_stages ? stage : stage - arguments.patch_stages;
    }

    // The run of the stages from place `i` on.
    TCONV_DEVICE void bring(const Position& at, int chunk, int i, int length) {
        int first_x = entry(Layer::run_x, i);
        int y = at.y * step_y + entry(Layer::stage_pixel_y, entry(Layer::kind_stages, i));
        int x = at.x * step_x + first_x;
        int count = arguments.lines * arguments.vectors;
        int number = threadIdx.x % warpgroup / octets;
        bool waits = true;
        do {
            Unit loaded[units];
#pragma unroll
            for (int k = 0; k < units; ++k) {
                load(loaded[k], at, chunk, number + k * abreast, y, x);
            }
            if (waits) {
                CountedTurn next = turn;
                for (int k = 0; k < length; ++k) {
                    ptx::mbarrier_wait_parity(&shared.patches_empty[next.stage], next.parity ^ 1);
                    next.advance(arguments.patch_stages);
                }
                waits = false;
            }
            // NOTE: once, before the stages: else the turned values live beside the others.
#pragma unroll
            for (Unit& unit : loaded) turn_over(unit);
#pragma unroll 1
            for (int k = 0; k < length; ++k) {
                int stage = entry(Layer::kind_stages, i + k);
                int first = step_x == 1 ? 0 : entry(Layer::stage_pixel_x, stage) - first_x;
                unsigned char* patch = patch_of(arguments, shared, stage_of_run(k));
#pragma unroll
                for (const Unit& unit : loaded) write(unit, patch, first);
            }
            number += units * abreast;
        } while (number < count);
        ptx::fence_proxy_async_shared();
        __syncwarp();
        for (int k = 0; k < length; ++k) {
            if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.patches_full[turn.stage]);
            turn.advance(arguments.patch_stages);
        }
    }

    TCONV_DEVICE void bring_all() {
        for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
            Position at(arguments, tile);
            int end = at.end_stage();
            for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll 1
                for (int i = at.first_stage(); i < end;) {
                    int length = entry(Layer::run_length, i);
                    bring(at, chunk, i, length);
                    i += length;
                }
            }
        }
    }
};

}  // namespace
