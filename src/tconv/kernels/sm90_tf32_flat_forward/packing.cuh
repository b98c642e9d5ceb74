// The packing of sm90_tf32_flat_forward: weights and pixels in lines of 128 bytes. A line is 32
// channels rounded to TF32, or 64 rounded to float16. The first items are weights, the others
// pixels.
//
// Weights: [group][row group][line of channels][slot][64 rows][line], in the 128-byte swizzle in
// which a plain bulk copy loads them to shared memory. Rows that do not exist keep what was there:
// their products are never stored.
//
// Pixels: [group][line of channels][position][line]. Position (n, y, x) is n * image_positions + y
// * pitch + x. It holds zeros where y or x lie beyond the image.
#pragma once

#include <common/division.cuh>
#include <common/float16_weights.cuh>
#include <sm90_tf32_flat_forward/rows.cuh>
#include <ptx/barrier.cuh>
#include <ptx/convert.cuh>
#include <ptx/memory.cuh>
#include <ptx/registers.cuh>

namespace flat::packing {

using Index = Layer::Index;

// Some of these are unused in a kernel that never packs.
constexpr bool half = Layer::packs_half;
constexpr int threads = 256;  // that pack
[[maybe_unused]] constexpr int warps = threads / 32;

constexpr int line_words = 32;
constexpr int thread_words = line_words / warps;  // of a place, that a thread brings
constexpr int word_channels = half ? 2 : 1;
constexpr int depth = line_words * word_channels;  // channels of a line
[[maybe_unused]] constexpr int thread_channels = thread_words * word_channels;
[[maybe_unused]] constexpr int chunks = (Layer::in_channels + depth - 1) / depth;
[[maybe_unused]] constexpr bool whole = Layer::in_channels % depth == 0;  // lines of channels

[[maybe_unused]] constexpr int taps = Layer::kernel_y * Layer::kernel_x;
[[maybe_unused]] constexpr int phases = flat::row_phases;
constexpr int channels = flat::channel_tiles * flat::warp_channels;  // with those that are none
[[maybe_unused]] constexpr int parts = (channels + Layer::part_channels - 1) / Layer::part_channels;
// An item's taps: all, or, where the host says so, those of one phase in y: every row_step-th row
// of the kernel.
constexpr int row_step = Layer::packed_row_step;
constexpr int part_taps = (Layer::kernel_y + row_step - 1) / row_step * Layer::kernel_x;
[[maybe_unused]] constexpr int item_phases = row_step > 1 ? Layer::stride_y : 1;
constexpr int part_weights = Layer::part_channels * part_taps;
// Odd, so that the 32 words of one weight lie in different banks.
constexpr int weight_pitch = part_weights | 1;

constexpr int positions = 128 / word_channels;  // of an item: as many loads for a thread
constexpr int position_pitch = positions + 1;

struct Shared {
    union {
        uint32_t weights[line_words][weight_pitch];
        uint32_t pixels[line_words][position_pitch];
    };
    // Float16: whether some of 8 channels of a position, which a warp loads, are slight or do not
    // fit.
    unsigned char noted[half ? warps : 1][half ? positions : 1];
};

using float16_operands::Scale;
using Seen = float16_operands::Seen<false>;

[[maybe_unused]] constexpr unsigned char slight = 1, misfit = 2;

// Kernels other than the packing have more threads; those of warpgroups 1 and 2 pack.
TCONV_DEVICE int own_thread() {
    return int(threadIdx.x) - (Layer::threads == threads ? 0 : threads / 2);
}

[[maybe_unused]] TCONV_DEVICE bool packs() { return unsigned(own_thread()) < unsigned(threads); }

TCONV_DEVICE void sync() {
    if constexpr (Layer::threads == threads) {
        __syncthreads();
    } else {
        ptx::bar_sync(5, threads);
    }
}

// A place of an item in device memory: that of the line's first channel. The other channels are
// `step` apart.
struct Place {
    const float* at;
    bool exists;
};

// Reads `count` places of each of the warp's words, with all loads under way at once. Rounds the
// values and stores them in `into`, which has one row of `pitch` for each word. `in_left` of the
// line's channels exist. Float16 values are scaled, and `note` is called with each place and its
// values.
template <int count, typename Find, typename Note>
TCONV_DEVICE void stage(uint32_t* into, int pitch, int width, Index step, int in_left,
                        [[maybe_unused]] Scale scale, Find find, [[maybe_unused]] Note note) {
    constexpr int batch = 4 / word_channels;  // places under way
    constexpr int words = thread_words;
    int lane = own_thread() % 32, warp = own_thread() / 32;
    // In float16, neighbours.
    auto word = [&](int i) { return half ? warp * words + i : warp + i * warps; };
    constexpr int next_channel = half ? 1 : warps;
    int first_channel = word(0) * word_channels;
#pragma unroll 1
    for (int first = 0; first < count; first += batch) {
        float values[batch][words * word_channels];
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            Place place = find((first + i) * 32 + lane);
            // NOTE: an advancing pointer; otherwise each address is computed anew, in ten
            // instructions.
            const float* from = place.at + first_channel * step;
#pragma unroll
            for (int c = 0; c < words * word_channels; ++c) {
                bool exists = place.exists && (whole || first_channel + c * next_channel < in_left);
                values[i][c] = exists ? ptx::ld_global_nc(from) : 0.0f;
                from = ptx::opaque(from + next_channel * step);
            }
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            int place = (first + i) * 32 + lane;
            const float* v = values[i];
            uint32_t bits[words];
            if constexpr (half) {
#pragma unroll
                for (int c = 0; c < words; ++c) {
                    bits[c] = ptx::cvt_rna_f16x2_f32(v[2 * c], v[2 * c + 1], scale.exponent);
                }
                note(place, values[i]);
            } else {
#pragma unroll
                for (int c = 0; c < words; ++c) bits[c] = ptx::cvt_rna_tf32_f32(v[c]);
            }
#pragma unroll
            for (int c = 0; c < words; ++c) {
                if (place < width) into[word(c) * pitch + place] = bits[c];
            }
        }
    }
}

// Gathers four words of one line of 32, from their rows in shared memory.
TCONV_DEVICE uint4 gather(const uint32_t* from, int pitch) {
    return make_uint4(from[0], from[pitch], from[2 * pitch], from[3 * pitch]);
}

// Packs some output channels, with all phases and slots, of a line of input channels. `seen` gets
// the values that float16 is to hold.
template <typename Fields>
TCONV_DEVICE void pack_weights(const Fields& arguments, uint32_t* packed, Shared& shared,
                               Scale scale, Seen& seen, int item) {
    int group = item / (chunks * parts * item_phases);
    int rest = item - group * (chunks * parts * item_phases);
    int chunk = rest / (parts * item_phases);
    rest -= chunk * (parts * item_phases);
    int first_channel = rest / item_phases * Layer::part_channels;
    int first_phase = rest % item_phases;
    int first_row =
        0;  // of the kernel, where the item is one of a phase; beyond it if there is none
    if constexpr (row_step > 1) {
        while (first_row < row_step &&
               first_row * Layer::dilation_y % Layer::stride_y != first_phase) {
            ++first_row;
        }
        if (first_row == row_step) first_row = Layer::kernel_y;
    }

    const float* weight =
        static_cast<const float*>(arguments.weight) +
        (Index(group) * Layer::in_channels + chunk * depth) * arguments.weight_stride_in +
        first_channel * arguments.weight_stride_out;
    int in_left = Layer::in_channels - chunk * depth;
    int left = (Layer::out_channels - first_channel) * part_taps;
    if (left > part_weights) left = part_weights;
    // Fewer rows than others have.
    if constexpr (row_step > 1) {
        int rows = (Layer::kernel_y - first_row + row_step - 1) / row_step;
        left = min(left, rows * Layer::kernel_x);
    }
    constexpr int rounds = (part_weights + 31) / 32;
    bool dense = arguments.weight_stride_w == 1 && arguments.weight_stride_h == Layer::kernel_x &&
                 arguments.weight_stride_out == taps;
    uint32_t* into = shared.weights[0];
    auto note = [&](int, const float (&values)[thread_channels]) { seen.add(values, scale); };
    if (dense) {
        stage<rounds>(
            into, weight_pitch, part_weights, arguments.weight_stride_in, in_left, scale,
            [&](int place) {
                int row = row_step > 1 ? place / Layer::kernel_x : 0;
                int skipped = first_row + row * (row_step - 1);
                return Place{weight + place + skipped * Layer::kernel_x, place < left};
            },
            note);
    } else {
        stage<rounds>(
            into, weight_pitch, part_weights, arguments.weight_stride_in, in_left, scale,
            [&](int place) {
                int out = place / part_taps;
                int tap = place - out * part_taps;
                int row = first_row + tap / Layer::kernel_x * row_step;
                return Place{weight + out * arguments.weight_stride_out +
                                 row * arguments.weight_stride_h +
                                 tap % Layer::kernel_x * arguments.weight_stride_w,
                             place < left};
            },
            note);
    }
    sync();
    // A warp writes four lines at a time.
    int lane = own_thread() % 32;
    int piece = lane % 8;
#pragma unroll 1
    for (int phase = 0; phase < Layer::stride_y / item_phases * flat::shares_x; ++phase) {
        int phase_y = phase / flat::shares_x;
        int share_x = phase - phase_y * flat::shares_x;
        phase_y += first_phase;
        // The part may lie in several row groups.
        int last_group =
            flat::row_group(phase_y, share_x, first_channel + Layer::part_channels - 1);
#pragma unroll 1
        for (int row_group = flat::row_group(phase_y, share_x, first_channel);
             row_group <= last_group && row_group < Layer::row_groups;
             row_group += flat::group_step) {
            flat::RowSlots slots(row_group);
            int begin = slots.begin;
            int count = slots.end - begin;
            uint32_t* to = packed + ((Index(group) * Layer::group_slots + slots.packed) * chunks +
                                     Index(chunk) * count) *
                                        (64 * line_words);
            constexpr int rows = Layer::part_channels * phases;
#pragma unroll 1
            for (int i = own_thread() / 8; i < rows * count; i += threads / 8) {
                int slot = i / rows;
                int row = i - slot * rows;
                int channel = first_channel + row / phases;
                if (channel >= channels ||
                    flat::row_group(phase_y, share_x, channel) != row_group) {
                    continue;
                }
                int reach_y = entry(Layer::slot_y, begin + slot) * Layer::stride_y + phase_y;
                int reach_x = entry(Layer::slot_x, begin + slot) * Layer::stride_x +
                              share_x * phases + row % phases;
                int tap_y = reach_y / Layer::dilation_y, tap_x = reach_x / Layer::dilation_x;
                bool exists = reach_y % Layer::dilation_y == 0 && tap_y < Layer::kernel_y &&
                              reach_x % Layer::dilation_x == 0 && tap_x < Layer::kernel_x;
                uint4 values = make_uint4(0, 0, 0, 0);
                if (exists) {
                    int staged_row = (tap_y - first_row) / row_step;
                    values = gather(shared.weights[piece * 4] + row / phases * part_taps +
                                        staged_row * Layer::kernel_x + tap_x,
                                    weight_pitch);
                }
                int line = flat::first_row(phase_y, channel) + row % phases;
                reinterpret_cast<uint4*>(to)[(slot * 64 + line) * 8 + (piece ^ line % 8)] = values;
            }
        }
    }
}

// Packs the lines of some positions. In float16, `arguments.slight` gets a byte for each line: the
// number of its octets with slight values, plus 16 for each octet with values that do not fit.
template <typename Fields>
TCONV_DEVICE void pack_pixels(const Fields& arguments, uint32_t* packed, Shared& shared,
                              Index item) {
    // Pixels have the same scale in all calls, as images follow each other in a tile.
    // NOTE: local, since nvcc gives no object of the namespace to a lambda in device code.
    constexpr Scale pixel_scale{Layer::pixel_exponent};
    Index next = item / (Layer::groups * chunks);
    int plane = int(item - next * (Layer::groups * chunks));
    int group = plane / chunks;
    int chunk = plane - group * chunks;
    unsigned first = unsigned(next) * positions;
    const float* channel =
        static_cast<const float*>(arguments.source) +
        (Index(group) * Layer::in_channels + chunk * depth) * arguments.source_stride_c;
    int in_left = Layer::in_channels - chunk * depth;
    stage<positions / 32>(
        shared.pixels[0], position_pitch, positions, arguments.source_stride_c, in_left,
        pixel_scale,
        [&](int place) {
            unsigned position = first + place;
            unsigned image = divide(position, arguments.image_multiplier, arguments.image_shift);
            unsigned rest = position - image * arguments.image_positions;
            unsigned y = divide(rest, arguments.pitch_multiplier, arguments.pitch_shift);
            unsigned x = rest - y * arguments.pitch;
            bool inside = image < unsigned(arguments.batch) &&
                          y < unsigned(arguments.source_height) &&
                          x < unsigned(arguments.source_width);
            return Place{channel + Index(image) * arguments.source_stride_n +
                             Index(y) * arguments.source_stride_h +
                             Index(x) * arguments.source_stride_w,
                         inside};
        },
        [&](int place, const float (&values)[thread_channels]) {
            Seen seen;
            seen.add(values, pixel_scale);
            shared.noted[own_thread() / 32][place] =
                (pixel_scale.holds(seen.largest()) ? 0 : misfit) | (seen.slight != 0 ? slight : 0);
        });
    sync();
    packed += arguments.weight_elements + (Index(plane) * arguments.positions + first) * line_words;
    uint4* to = reinterpret_cast<uint4*>(packed);
    int piece = own_thread() % 8;
#pragma unroll
    for (int i = 0; i < positions / (threads / 8); ++i) {
        int p = i * (threads / 8) + own_thread() / 8;
        if (first + p < unsigned(arguments.positions)) {
            to[p * 8 + piece] = gather(shared.pixels[piece * 4] + p, position_pitch);
        }
        if constexpr (half) {
            // The lanes of a position are neighbours, so their bits lie in a byte.
            unsigned char noted = shared.noted[piece][p];
            uint32_t of_slight = __ballot_sync(~0u, noted & slight),
                     misfits = __ballot_sync(~0u, noted & misfit);
            auto count = [&](uint32_t bits) {
                return __popc(bits >> threadIdx.x % 32 / 8 * 8 & 0xff);
            };
            if (piece == 0) {
                static_cast<unsigned char*>(arguments.slight)[item * positions + p] =
                    static_cast<unsigned char>(count(of_slight) + 16 * count(misfits));
            }
        }
    }
}

// Packs an item into `packed`. The first items are weights, which `weights` has then seen.
template <typename Fields>
TCONV_DEVICE void pack_item(const Fields& arguments, uint32_t* packed, Shared& shared,
                            Scale weight_scale, Seen& weights, Index item) {
    if (item < arguments.weight_items) {
        pack_weights(arguments, packed, shared, weight_scale, weights, int(item));
    } else {
        pack_pixels(arguments, packed, shared, item - arguments.weight_items);
    }
    sync();
}

}  // namespace flat::packing
