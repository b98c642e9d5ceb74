// Packs weights for sm90_tf32_wide_forward, rounded to TF32:
// [group][column tile][32 channels][part][column][channel]. Each part's block has the 128-byte
// swizzle in which a plain bulk copy loads it to shared memory. Columns that do not exist keep what
// was there: their products are never stored.
#include <sm90_tf32_wide_forward/columns.cuh>
#include <ptx/convert.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

using Index = Layer::Index;
using wide::depth;

constexpr int chunks = (Layer::in_channels + depth - 1) / depth;
constexpr int warps = Layer::threads / 32;
constexpr int taps = Layer::stride_y * Layer::stride_x;  // the kernel is the stride
constexpr int item_weights = Layer::item_channels * taps;
constexpr int items = (Layer::out_channels + Layer::item_channels - 1) / Layer::item_channels;
// Odd, so that the 32 channels of one weight lie in different banks.
constexpr int pitch = item_weights | 1;

using Shared = uint32_t[depth][pitch];
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

// Loads some output channels of 32 input channels, with all taps. Each of the warp's rows has four
// loads under way.
template <typename Load>
TCONV_DEVICE void stage(Shared& shared, Load load) {
    constexpr int batch = 4;
    constexpr int rounds = (item_weights + 31) / 32;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int first = 0; first < rounds; first += batch) {
        float values[depth / warps][batch];
#pragma unroll
        for (int i = 0; i < batch; ++i) {
#pragma unroll
            for (int c = 0; c < depth / warps; ++c) {
                values[c][i] = load(warp + c * warps, (first + i) * 32 + lane);
            }
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            int place = (first + i) * 32 + lane;
#pragma unroll
            for (int c = 0; c < depth / warps; ++c) {
                if (place < item_weights) {
                    shared[warp + c * warps][place] = ptx::cvt_rna_tf32_f32(values[c][i]);
                }
            }
        }
    }
}

// Writes the columns of one channel and phase in y. Eight threads share them, each with four of the
// input channels.
TCONV_DEVICE void write(const Arguments& arguments, const Shared& shared, int group, int chunk,
                        int phase_y, int channel, int from) {
    int piece = threadIdx.x % 8;
    int unit = phase_y * wide::phase_units + channel / wide::unit_channels;
    int column_tile = unit / wide::part_units;
    int line = unit % wide::part_units * 8 + channel % wide::unit_channels * wide::low_phases;
    auto* to = reinterpret_cast<uint4*>(
        static_cast<unsigned char*>(arguments.packed) +
        ((Index(group) * wide::column_tiles + column_tile) * chunks + chunk) * wide::weight_bytes);
#pragma unroll 1
    for (int part = 0; part < wide::parts; ++part) {
#pragma unroll
        for (int low = 0; low < wide::low_phases; ++low) {
            const uint32_t* tap = shared[piece * 4] + from * taps + phase_y * Layer::stride_x +
                                  part * wide::low_phases + low;
            int row = line + low;
            to[part * (wide::part_bytes / 16) + row * 8 + (piece ^ row % 8)] =
                make_uint4(tap[0], tap[pitch], tap[2 * pitch], tap[3 * pitch]);
        }
    }
}

}  // namespace

// NOTE: offsets of 64 bits need the registers that a fifth block would take.
TCONV_KERNEL(sm90_tf32_wide_pack, Layer::threads, sizeof(Index) == 8 ? 4 : 5) {
    TCONV_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    ptx::griddepcontrol_launch_dependents();
    for (int item = blockIdx.x; item < Layer::groups * chunks * items; item += gridDim.x) {
        int rest = item / items;
        int first_channel = (item - rest * items) * Layer::item_channels;
        int group = rest / chunks;
        int chunk = rest - group * chunks;
        const float* weight =
            static_cast<const float*>(arguments.weight) +
            (Index(group) * Layer::in_channels + chunk * depth) * arguments.weight_stride_in +
            first_channel * arguments.weight_stride_out;
        int in_left = Layer::in_channels - chunk * depth;
        int channels_left = Layer::out_channels - first_channel;
        int count = min(channels_left, Layer::item_channels);
        bool dense = arguments.weight_stride_w == 1 &&
                     arguments.weight_stride_h == Layer::stride_x &&
                     arguments.weight_stride_out == taps;
        if (dense) {
            stage(shared, [&](int in, int place) {
                bool exists = in < in_left && place < count * taps;
                return exists ? weight[in * arguments.weight_stride_in + place] : 0.0f;
            });
        } else {
            stage(shared, [&](int in, int place) {
                bool exists = in < in_left && place < count * taps;
                int out = place / taps;
                int tap = place - out * taps;
                return exists ? weight[in * arguments.weight_stride_in +
                                       out * arguments.weight_stride_out +
                                       tap / Layer::stride_x * arguments.weight_stride_h +
                                       tap % Layer::stride_x * arguments.weight_stride_w]
                              : 0.0f;
            });
        }
        __syncthreads();
        for (int i = threadIdx.x / 8; i < Layer::stride_y * count; i += Layer::threads / 8) {
            int phase_y = i / count;
            int from = i - phase_y * count;
            write(arguments, shared, group, chunk, phase_y, first_channel + from, from);
        }
        __syncthreads();
    }
}
