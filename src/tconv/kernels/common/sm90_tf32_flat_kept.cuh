// Weights that an earlier call has packed for sm90_tf32_flat_forward in float16, compared with what
// packing would make of the layer's weights now: nothing else tells that they are still the same.
//
// Pieces are handed out by a counter, to whichever warp has nothing else to do.
#pragma once

#include <common/float16_operands.cuh>
#include <common/sm90_tf32_flat_rows.cuh>
#include <common/sm90_tf32_flat_status.cuh>
#include <ptx/atom.cuh>
#include <ptx/convert.cuh>
#include <ptx/memory.cuh>

namespace flat::kept {

using Index = Layer::Index;

// Of each tap the host says where those of the first output channels and input channels lie, in lines
// of 128 bytes ([group][row group][64 channels][slot][64 rows][channel]).
struct alignas(16) Tap {
    int line;         // of the first
    int chunk_lines;  // to the next 64 input channels
    int group_lines;  // to the next row group of output channels
    int unused;
};

constexpr int taps = Layer::kernel_y * Layer::kernel_x;
constexpr int depth = 64;
constexpr int chunks = (Layer::in_channels + depth - 1) / depth;
constexpr int places = Layer::out_channels * taps;  // of an input channel

// A piece: a line's channels, 8 for each of 8 lanes, and 16 or 32 places, 4 neighbours for each of the 4
// lanes with the same channels. So both sides are read in whole sectors, 16 bytes a lane, with as few
// lines of L1 in an instruction as there can be: the products want the same memory's time.
constexpr int lane_channels = 8;
constexpr int lane_places = 4;
constexpr int octets = depth / lane_channels;
constexpr int batch = Layer::storers ? 1 : 2;
constexpr int batch_places = 32 / octets * lane_places;
constexpr int piece_places = batch * batch_places;
constexpr int runs = (places + piece_places - 1) / piece_places;
constexpr uint32_t pieces = uint32_t(Layer::groups) * chunks * runs;
static_assert(!Layer::compares || places % lane_places == 0, "vectors");

// By a warp.
TCONV_DEVICE void find_taps(Tap* found) {
    for (int tap = threadIdx.x % 32; tap < taps; tap += 32) {
        found[tap] = {Layer::tap_line[tap], Layer::tap_chunk_lines[tap],
                      Layer::tap_group_lines[tap], 0};
    }
}

// A weight as it is packed, where it fits and is no less than float16 may hold. Its exponent is added to,
// which is one instruction with the rounding behind it; what is less, zeros too, is no more afterwards.
TCONV_DEVICE float scaled(float weight) {
    constexpr int exponent = 8;
    static_assert(Layer::weight_scale == 1 << exponent, "a power of two");
    return __uint_as_float(__float_as_uint(weight) + (exponent << 23));
}

// Whether a piece is the same.
template <typename Fields>
TCONV_DEVICE bool is_same(const Fields& arguments, const Tap* found, uint32_t piece) {
    int lane = threadIdx.x % 32;
    int octet = lane % octets;
    int plane = piece / runs;
    int first = (piece - plane * runs) * piece_places + lane / octets * lane_places;
    int group = plane / chunks, chunk = plane - group * chunks;
    int channel = chunk * depth + octet * lane_channels;
    const float* weight = static_cast<const float*>(arguments.weight) +
                          (Index(group) * Layer::in_channels + channel) * places + first;
    const uint4* packed = static_cast<const uint4*>(arguments.packed) +
                          Index(group) * Layer::group_slots * chunks * 64 * octets;
    float values[batch][lane_channels][lane_places];
    uint4 lines[batch][lane_places];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
        bool exists = places % piece_places == 0 || first + i * batch_places < places;
#pragma unroll
        for (int c = 0; c < lane_channels; ++c) {
            bool some = exists &&
                        (Layer::in_channels % depth == 0 || channel + c < Layer::in_channels);
            float4 v = make_float4(0, 0, 0, 0);
            if (some) {
                v = ptx::ld_global_nc_L1_no_allocate_v4(weight + c * places + i * batch_places);
            }
            values[i][c][0] = v.x;
            values[i][c][1] = v.y;
            values[i][c][2] = v.z;
            values[i][c][3] = v.w;
        }
#pragma unroll
        for (int j = 0; j < lane_places; ++j) {
            lines[i][j] = make_uint4(0, 0, 0, 0);
            if (exists) {
                int place = first + i * batch_places + j;
                int out = place / taps;
                Tap tap = found[place - out * taps];
                int line = tap.line + chunk * tap.chunk_lines +
                           out / flat::group_channels * tap.group_lines + flat::first_row(0, out);
                lines[i][j] = packed[Index(line) * octets + (octet ^ line % 8)];
            }
        }
    }
    // NOTE: what is too large for float16 is packed as its largest number, so bits do not tell.
    constexpr float most = float16_operands::most / Layer::weight_scale;
    uint32_t different = 0;
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < batch; ++i) {
#pragma unroll
        for (int j = 0; j < lane_places; ++j) {
            uint32_t words[] = {lines[i][j].x, lines[i][j].y, lines[i][j].z, lines[i][j].w};
#pragma unroll
            for (int c = 0; c < lane_channels; c += 2) {
                different |= words[c / 2] ^ ptx::cvt_rna_f16x2_f32(scaled(values[i][c][j]),
                                                                   scaled(values[i][c + 1][j]));
            }
        }
#pragma unroll
        for (int c = 0; c < lane_channels; ++c) {
            largest = float16_operands::largest(largest, values[i][c]);
        }
    }
    return different == 0 && largest <= most;
}

// A warp's comparisons: of pieces that nobody else has.
template <typename Fields, bool some>
class Comparison {
public:
    TCONV_DEVICE Comparison(const Fields& arguments, const Tap* found)
        : arguments(arguments), found(found) {
        if (arguments.kept_note_count != 0) piece = told(ask());
    }

    TCONV_DEVICE bool has_more() const { return piece < pieces; }

    // By all lanes.
    TCONV_DEVICE void step() {
        uint32_t next = ask();
        if (!is_same(arguments, found, piece)) {
            status().changed = 1;
            atomicMax(&status().verdict, uint32_t(flat::Verdict::unfit));
        }
        piece = told(next);
        ++compared;
    }

    // Behind the last.
    TCONV_DEVICE void count() {
        __syncwarp();
        if (compared != 0 && threadIdx.x % 32 == 0) {
            __threadfence();
            atomicAdd(&status().compared, compared);
        }
    }

private:
    const Fields& arguments;
    const Tap* found;
    uint32_t piece = pieces;
    uint32_t compared = 0;

    TCONV_DEVICE flat::Status& status() const {
        return *static_cast<flat::Status*>(arguments.status);
    }

    // NOTE: what lane 0 gets is told to the others when it is needed: the compiler has a warp wait where
    // it is told.
    TCONV_DEVICE uint32_t ask() const {
        return threadIdx.x % 32 == 0 ? ptx::atom_global_inc_u32(&status().taken) : 0;
    }

    TCONV_DEVICE static uint32_t told(uint32_t asked) { return __shfl_sync(0xffffffffu, asked, 0); }
};

template <typename Fields>
class Comparison<Fields, false> {
public:
    TCONV_DEVICE Comparison(const Fields&, const Tap*) {}
    TCONV_DEVICE bool has_more() const { return false; }
    TCONV_DEVICE void step() {}
    TCONV_DEVICE void count() {}
};

}  // namespace flat::kept
