// Lays weights and pixels out for sm90_tf32_flat_forward, rounded to TF32. The first blocks take
// weights, the others pixels.
//
// Weights: [group][row group][32 channels][slot][64 rows][32 channels] in the 128-byte swizzle in
// which a plain bulk copy brings them to shared memory. Rows that are none keep what was there:
// their products are never stored.
//
// Pixels: [group][32 channels][position][32 channels]; position (n, y, x) is
// n * image_positions + y * pitch + x, and holds zeros where y or x lie beyond the image.
#include <common/sm90_tf32_flat_rows.cuh>
#include <ptx/convert.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/memory.cuh>

namespace {

using Index = Layer::Index;

constexpr int depth = 32;
constexpr int chunks = (Layer::in_channels + depth - 1) / depth;
constexpr int warps = Layer::threads / 32;

constexpr int taps = Layer::kernel_y * Layer::kernel_x;
constexpr int phases = flat::row_phases;
constexpr int channels = flat::channel_tiles * flat::warp_channels;  // with those that are none
constexpr int parts = (channels + Layer::part_channels - 1) / Layer::part_channels;
constexpr int part_weights = Layer::part_channels * taps;
// Odd, so that the 32 channels of one weight lie in different banks.
constexpr int weight_pitch = part_weights | 1;

constexpr int positions = 128;  // of an item
constexpr int position_pitch = positions + 1;

union Shared {
    uint32_t weights[depth][weight_pitch];
    uint32_t pixels[depth][position_pitch];
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

// Reads `count` values for each of the warp's channels, all under way at once, rounds and keeps
// them: `into` has one row of `pitch` for each channel.
template <int count, typename Load>
TCONV_DEVICE void stage(uint32_t* into, int pitch, int width, Load load) {
    constexpr int batch = 4;  // loads of a channel under way
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int first = 0; first < count; first += batch) {
        float values[depth / warps][batch];
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            int place = (first + i) * 32 + lane;
#pragma unroll
            for (int c = 0; c < depth / warps; ++c) {
                values[c][i] = load(warp + c * warps, place);
            }
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            int place = (first + i) * 32 + lane;
#pragma unroll
            for (int c = 0; c < depth / warps; ++c) {
                if (place < width) {
                    into[(warp + c * warps) * pitch + place] = ptx::cvt_rna_tf32_f32(values[c][i]);
                }
            }
        }
    }
}

// Four channels of one line of 32, from their rows in shared memory.
TCONV_DEVICE uint4 gather(const uint32_t* from, int pitch) {
    return make_uint4(from[0], from[pitch], from[2 * pitch], from[3 * pitch]);
}

// Some output channels, all phases and slots, 32 input channels.
TCONV_DEVICE void pack_weights(const Arguments& arguments, Shared& shared, int item) {
    int group = item / (chunks * parts);
    int rest = item - group * (chunks * parts);
    int chunk = rest / parts;
    int first_channel = (rest - chunk * parts) * Layer::part_channels;

    const float* weight = static_cast<const float*>(arguments.weight) +
                          (Index(group) * Layer::in_channels + chunk * depth) *
                              arguments.weight_stride_in +
                          first_channel * arguments.weight_stride_out;
    int in_left = Layer::in_channels - chunk * depth;
    int left = (Layer::out_channels - first_channel) * taps;
    if (left > part_weights) left = part_weights;
    constexpr int rounds = (part_weights + 31) / 32;
    bool dense = arguments.weight_stride_w == 1 &&
                 arguments.weight_stride_h == Layer::kernel_x &&
                 arguments.weight_stride_out == taps;
    if (dense) {
        stage<rounds>(shared.weights[0], weight_pitch, part_weights, [&](int in, int place) {
            bool exists = in < in_left && place < left;
            return exists ? weight[in * arguments.weight_stride_in + place] : 0.0f;
        });
    } else {
        stage<rounds>(shared.weights[0], weight_pitch, part_weights, [&](int in, int place) {
            bool exists = in < in_left && place < left;
            int out = place / taps;
            int tap = place - out * taps;
            return exists ? weight[in * arguments.weight_stride_in +
                                   out * arguments.weight_stride_out +
                                   tap / Layer::kernel_x * arguments.weight_stride_h +
                                   tap % Layer::kernel_x * arguments.weight_stride_w]
                          : 0.0f;
        });
    }
    __syncthreads();
    // A warp writes four rows of 32 channels at a time.
    int lane = threadIdx.x % 32;
    int piece = lane % 8;
#pragma unroll 1
    for (int phase = 0; phase < Layer::stride_y * flat::shares_x; ++phase) {
        int phase_y = phase / flat::shares_x;
        int share_x = phase - phase_y * flat::shares_x;
        // The part may lie in several row groups.
        int last_group = flat::row_group(phase_y, share_x, first_channel + Layer::part_channels - 1);
#pragma unroll 1
        for (int row_group = flat::row_group(phase_y, share_x, first_channel);
             row_group <= last_group && row_group < Layer::row_groups;
             row_group += flat::apart ? 2 : 1) {
            int row_class = Layer::row_class[row_group];
            int begin = Layer::class_begin[row_class];
            int count = Layer::class_begin[row_class + 1] - begin;
            uint32_t* to = static_cast<uint32_t*>(arguments.packed) +
                           ((Index(group) * Layer::group_slots + Layer::row_begin[row_group]) *
                                chunks +
                            Index(chunk) * count) *
                               (64 * depth);
            constexpr int rows = Layer::part_channels * phases;
#pragma unroll 1
            for (int i = threadIdx.x / 8; i < rows * count; i += Layer::threads / 8) {
                int slot = i / rows;
                int row = i - slot * rows;
                int channel = first_channel + row / phases;
                if (channel >= channels ||
                    flat::row_group(phase_y, share_x, channel) != row_group) {
                    continue;
                }
                int reach_y = Layer::slot_y[begin + slot] * Layer::stride_y + phase_y;
                int reach_x = Layer::slot_x[begin + slot] * Layer::stride_x + share_x * phases +
                              row % phases;
                int tap_y = reach_y / Layer::dilation_y, tap_x = reach_x / Layer::dilation_x;
                bool exists = reach_y % Layer::dilation_y == 0 && tap_y < Layer::kernel_y &&
                              reach_x % Layer::dilation_x == 0 && tap_x < Layer::kernel_x;
                uint4 values = make_uint4(0, 0, 0, 0);
                if (exists) {
                    values = gather(shared.weights[piece * 4] + row / phases * taps +
                                        tap_y * Layer::kernel_x + tap_x,
                                    weight_pitch);
                }
                int line = flat::first_row(phase_y, channel) + row % phases;
                reinterpret_cast<uint4*>(to)[(slot * 64 + line) * 8 + (piece ^ line % 8)] = values;
            }
        }
    }
}

// 128 positions of 32 channels.
TCONV_DEVICE void pack_pixels(const Arguments& arguments, Shared& shared, Index item) {
    Index next = item / (Layer::groups * chunks);
    int plane = int(item - next * (Layer::groups * chunks));
    int group = plane / chunks;
    int chunk = plane - group * chunks;
    unsigned first = unsigned(next) * positions;
    const float* channel = static_cast<const float*>(arguments.source) +
                           (Index(group) * Layer::in_channels + chunk * depth) *
                               arguments.source_stride_c;
    int in_left = Layer::in_channels - chunk * depth;
    Index offsets[positions / 32];
#pragma unroll
    for (int i = 0; i < positions / 32; ++i) {
        unsigned position = first + i * 32 + threadIdx.x % 32;
        unsigned image = position / unsigned(arguments.image_positions);
        unsigned rest = position - image * arguments.image_positions;
        unsigned y = rest / unsigned(arguments.pitch);
        unsigned x = rest - y * arguments.pitch;
        bool inside = image < unsigned(arguments.batch) && y < unsigned(arguments.source_height) &&
                      x < unsigned(arguments.source_width);
        offsets[i] = inside ? Index(image) * arguments.source_stride_n +
                                  Index(y) * arguments.source_stride_h +
                                  Index(x) * arguments.source_stride_w
                            : Index(-1);
    }
    stage<positions / 32>(shared.pixels[0], position_pitch, positions, [&](int in, int place) {
        Index offset = offsets[place / 32];
        bool exists = offset >= 0 && in < in_left;
        return exists ? channel[in * arguments.source_stride_c + offset] : 0.0f;
    });
    __syncthreads();
    uint4* to = reinterpret_cast<uint4*>(static_cast<uint32_t*>(arguments.packed) +
                                         arguments.weight_elements +
                                         (Index(plane) * arguments.positions + first) * depth);
    int piece = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < positions / (Layer::threads / 8); ++i) {
        int p = i * (Layer::threads / 8) + threadIdx.x / 8;
        if (first + p < unsigned(arguments.positions)) {
            to[p * 8 + piece] = gather(shared.pixels[piece * 4] + p, position_pitch);
        }
    }
}

constexpr int blocks_of_sm = 5;
constexpr unsigned few_blocks = blocks_of_sm * 132;  // which an H100 or H200 runs at a time

}  // namespace

TCONV_KERNEL(sm90_tf32_flat_pack, Layer::threads, blocks_of_sm) {
    TCONV_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    // The kernel's blocks come when all of these have said so or are over: at once where these are
    // few, and then they find what room is left. Where they are many, at the end: maskrcnn takes
    // 0.121 ms so and 0.138 at once, why is not known, and no other layer measured differs.
    bool few = gridDim.x <= few_blocks;
    if (few) ptx::griddepcontrol_launch_dependents();
    for (Index item = blockIdx.x; item < arguments.items; item += gridDim.x) {
        if (item < arguments.weight_items) {
            pack_weights(arguments, shared, int(item));
        } else {
            pack_pixels(arguments, shared, item - arguments.weight_items);
        }
        __syncthreads();
    }
    if (!few) ptx::griddepcontrol_launch_dependents();
}
