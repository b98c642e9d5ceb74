// Turning: patches of a contiguous image, by a warpgroup that reads it and writes them as a tensor
// map would, [position][channels] and swizzled, with zeros in place of what does not exist.
//
// A unit is 8 channels of 8 neighbouring pixels of a row, which one thread takes: of each channel
// the longest vectors that all addresses allow, turned in registers into 16 bytes for each pixel.
// Neighbouring threads have neighbouring octets of the same pixels. So they write without bank
// conflicts, and read 64 bytes of a channel's row.
//
// A run is patches of the same rows: of the phases of y along x, whose pixels follow each other in
// turn. A run's pixels are read once.
#pragma once

#include <common/division.cuh>
#include <engine/pack_image.cuh>
#include <ptx/bulk.cuh>
#include <ptx/registers.cuh>

namespace {

// An image, and the rows of a run: `lines` of all its images, `rows` of each.
struct TurnedImage {
    const Layer::Element* source;
    Layer::Index stride_n, stride_c, stride_h, stride_w;
    int batch, height, width;
    int lines, rows, rows_multiplier, rows_shift;
    int vectors, vectors_multiplier, vectors_shift;  // of 8 pixels, of a row
    int pitch_x;  // positions from one row of a patch to the next

    // Pixels of the longest vectors.
    TCONV_DEVICE int longest() const {
        auto aligned = reinterpret_cast<uint64_t>(source) / sizeof(Layer::Element) | stride_n |
                       stride_c | stride_h | width | 8;
        return stride_w == 1 ? int(aligned & -aligned) : 1;
    }
};

// Where a box reads: the first image and pixel of a run, and the first channel of a patch.
struct TurnedBox {
    int image, y, x;
    int first_channel;  // of all groups
    int channels;  // from there on, of its group
};

// `channels`: of a group; `octets`: of a position that are written; `units`: of a thread at a time,
// whose loads are under way together.
template <int channels, int octets, int line_bytes, int step_y, int step_x, int units>
struct Turning {
    using Index = Layer::Index;

    static constexpr int abreast = 128 / octets;  // units that all threads take at a time

    // Of each channel 8 pixels; turned, of each pixel 8 channels.
    using Unit = uint32_t[8][4];

    // Where a unit lies: its row among `lines`, and its first pixel from the run's first on.
    struct Place {
        int line, pixel;

        TCONV_DEVICE Place(const TurnedImage& image, const TurnedBox& box, int longest,
                           int number) {
            line = divide(number, image.vectors_multiplier, image.vectors_shift);
            pixel = (number - line * image.vectors) * 8 - (box.x & (longest - 1));
        }
    };

    template <int vector>
    TCONV_DEVICE static void load_vectors(const TurnedImage& image, Unit& unit, Index from, int x,
                                          int exist) {
#pragma unroll
        for (int i = 0; i < 8; i += vector) {
            if (unsigned(x + i) >= unsigned(image.width)) continue;
            Index at = from + (x + i) * (vector == 1 ? image.stride_w : 1);
#pragma unroll
            for (int channel = 0; channel < 8; ++channel) {
                if (channels % 8 != 0 && channel >= exist) continue;
                uint32_t* words = &unit[channel][i / 2];
                if constexpr (vector == 1) {
                    uint32_t found;
                    load_neighbours<1>(image.source + at, &found);
                    *words |= found << i % 2 * 16;
                } else {
                    load_neighbours<vector>(image.source + at, words);
                }
                at += image.stride_c;
            }
        }
    }

    TCONV_DEVICE static void load(const TurnedImage& image, const TurnedBox& box, int longest,
                                  int octet, int number, Unit& unit) {
        Place place(image, box, longest, number);
        int n = divide(place.line, image.rows_multiplier, image.rows_shift);
#pragma unroll
        for (auto& of_channel : unit) {
#pragma unroll
            for (uint32_t& word : of_channel) word = 0;
        }
        int y = box.y + (place.line - n * image.rows) * step_y, x = box.x + place.pixel;
        int exist = channels % (8 * octets) == 0 ? 8 : box.channels - octet * 8;
        if (place.line >= image.lines || exist <= 0 || box.image + n >= image.batch ||
            unsigned(y) >= unsigned(image.height)) {
            return;
        }
        Index from = Index(box.image + n) * image.stride_n + Index(y) * image.stride_h +
                     Index(box.first_channel + octet * 8) * image.stride_c;
        if (longest == 8) {
            load_vectors<8>(image, unit, from, x, exist);
        } else if (longest == 4) {
            load_vectors<4>(image, unit, from, x, exist);
        } else if (longest == 2) {
            load_vectors<2>(image, unit, from, x, exist);
        } else {
            load_vectors<1>(image, unit, from, x, exist);
        }
    }

    TCONV_DEVICE static void turn(Unit& unit) {
        uint4 pixels[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) pixels[i] = turned_octet(unit, i);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            unit[i][0] = pixels[i].x;
            unit[i][1] = pixels[i].y;
            unit[i][2] = pixels[i].z;
            unit[i][3] = pixels[i].w;
        }
    }

    // Writes what a patch has of a unit that is turned. The patch's first position is pixel `first`
    // of the run.
    TCONV_DEVICE static void write(const Unit& unit, const Place& place, unsigned char* patch,
                                   int pitch_x, int octet, int first) {
        // The position and the phase of its first pixel, rounded down.
        int pixel = place.pixel - first, x = pixel / step_x, phase = pixel - x * step_x;
        if (phase < 0) {
            phase += step_x;
            --x;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int behind = (i + step_x - 1) / step_x;  // positions, if this pixel is the patch's
            if (phase != behind * step_x - i || unsigned(x + behind) >= unsigned(pitch_x)) continue;
            unsigned position = place.line * pitch_x + x + behind;
            unsigned chunk = (octet ^ position / (128 / line_bytes)) % (line_bytes / 16);
            *reinterpret_cast<uint4*>(patch + position * line_bytes + chunk * 16) = {
                unit[i][0], unit[i][1], unit[i][2], unit[i][3]};
        }
    }

    // The patches of a run. `wait()` returns when they may be written; `patch_of(i)` and
    // `first_of(i)` say where patch i begins, and with which of the run's pixels.
    template <typename Wait, typename PatchOf, typename FirstOf>
    TCONV_DEVICE static void bring(const TurnedImage& image, const TurnedBox& box, int longest,
                                   int patches, Wait wait, PatchOf patch_of, FirstOf first_of) {
        int thread = threadIdx.x % 128, octet = thread % octets, number = thread / octets;
        // Also a thread without a unit waits: it may not promise the next stage before this one.
        do {
            Unit loaded[units];
#pragma unroll
            for (int k = 0; k < units; ++k) {
                load(image, box, longest, octet, number + k * abreast, loaded[k]);
            }
            if (number < abreast) wait();
#pragma unroll
            for (int k = 0; k < units; ++k) {
                // NOTE: once, before the patches: else the turned values live beside the others.
                turn(loaded[k]);
                // NOTE: found again, as the loads leave no registers to remember it.
                Place place(image, box, longest, ptx::opaque(number + k * abreast));
                if (place.line >= image.lines) break;
#pragma unroll 1
                for (int i = 0; i < patches; ++i) {
                    write(loaded[k], place, patch_of(i), image.pitch_x, octet,
                          step_x == 1 ? 0 : first_of(i));
                }
            }
            number += units * abreast;
        } while (number < image.lines * image.vectors);
    }
};

}  // namespace
