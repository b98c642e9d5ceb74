// Packs weights for sm90_tf32_forward and sm90_split_forward. For the first they are rounded to
// TF32 or float16. For the second they are split, or, for its repair, as they are.
//
// Streamed weights lie in the order in which warpgroups use them: [group][row group][chunk of 8
// channels][pair][thread][4]. Resident weights lie there once each: [group][chunk][reach in y][slot
// in x][channels of a warp][thread][4]. A thread's four values are its registers of a wgmma's A
// operand (rows g and g + 8, channels t and t + 4 of the chunk).
//
// In float16 a chunk has 16 channels, and a value is two of them, 2t and 2t + 1. They are
// multiplied by a power of two, which each block finds from the same sample of all weights. For
// sm90_split_forward, a warp's high parts come before its low ones. Behind all these come the same
// weights in TF32 or as they are, streamed, for the tiles that are recomputed.
#include <common/constant_tables.cuh>
#include <common/float16_weights.cuh>
#include <ptx/convert.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/memory.cuh>

namespace {

using Index = Layer::Index;

// A chunk is as deep as one wgmma: 8 channels of TF32 or bfloat16, or 16 of float16.
template <bool half>
constexpr int chunks = (Layer::in_channels + 8 * (1 + half) - 1) / (8 * (1 + half));
constexpr int phase_tiles = (Layer::out_channels + Layer::warp_channels - 1) / Layer::warp_channels;

// The source of the 512 bytes that a warp loads for one product.
struct Fragment {
    int group, chunk;
    int channels;  // which of a phase's warps
    int reach_y;  // negative where the rows are none
    int slot_x;
};

// The weight of a channel and one of a warp's 16 rows; zero where the row's phase has no tap there.
TCONV_DEVICE float weight(const Arguments& arguments, const Fragment& of, int row, int channel) {
    int out_channel = of.channels * Layer::warp_channels + row / Layer::stride_x;
    if (out_channel >= Layer::out_channels || row >= Layer::warp_channels * Layer::stride_x ||
        channel >= Layer::in_channels) {
        return 0;
    }
    int reach_y = of.reach_y, slot_x = of.slot_x;
    int reach_x = slot_x * Layer::stride_x + row % Layer::stride_x;
    int tap_y = reach_y / Layer::dilation_y, tap_x = reach_x / Layer::dilation_x;
    bool exists = reach_y >= 0 && reach_y % Layer::dilation_y == 0 && tap_y < Layer::kernel_y &&
                  reach_x >= 0 && reach_x % Layer::dilation_x == 0 && tap_x < Layer::kernel_x;
    if (!exists) return 0;
    Index offset = (Index(of.group) * Layer::in_channels + channel) * arguments.weight_stride_in +
                   out_channel * arguments.weight_stride_out + tap_y * arguments.weight_stride_h +
                   tap_x * arguments.weight_stride_w;
    return static_cast<const float*>(arguments.weight)[offset];
}

// An item is a pair: (group, m_group, chunk, pair). Row groups differ in their number of pairs.
// Items beyond the last have a group that does not exist.
template <int chunks>
TCONV_DEVICE Fragment streamed(Index item) {
    int group = int(item / (Index(Layer::group_pairs) * chunks));
    int rest = int(item - Index(group) * Layer::group_pairs * chunks);
    int m_group = 0;
    while (m_group + 1 < Layer::m_groups && rest >= entry(Layer::m_begin, m_group + 1) * chunks) {
        ++m_group;
    }
    rest -= entry(Layer::m_begin, m_group) * chunks;
    int row_class = entry(Layer::m_class, m_group);
    int begin = entry(Layer::class_begin, row_class);
    int count = entry(Layer::class_begin, row_class + 1) - begin;
    int pair = begin + rest % count;
    int warp_tile = (m_group * Layer::m_tiles + Layer::pair_m_tile[pair]) * 4 + threadIdx.x / 32;
    int phase_y = warp_tile / phase_tiles;
    bool exists = phase_y < Layer::stride_y * Layer::row_step;
    return {group, rest / count, warp_tile - phase_y * phase_tiles,
            exists ? Layer::pair_slot_y[pair] * Layer::stride_y + phase_y : -1,
            Layer::pair_slot_x[pair]};
}

// An item is four fragments. Items beyond the last have a group that does not exist.
template <int chunks>
TCONV_DEVICE Fragment resident(Index item) {
    int rest = int(item) * 4 + threadIdx.x / 32;
    auto digit = [&](int count) {
        int value = rest % count;
        rest /= count;
        return value;
    };
    Fragment of;
    of.channels = digit(phase_tiles);
    of.slot_x = Layer::slot_x[digit(Layer::slots_x)];
    of.reach_y = digit(Layer::reaches);
    of.chunk = digit(chunks);
    of.group = rest;
    return of;
}

// Writes an item's weights to `to`, rounded to TF32 or as they are.
TCONV_DEVICE void pack(const Arguments& arguments, const Fragment& of, uint4* to) {
    int row = threadIdx.x % 32 / 4;
    int channel = of.chunk * 8 + threadIdx.x % 4;
    uint4 values;
    uint32_t* parts[4] = {&values.x, &values.y, &values.z, &values.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float value = of.group < Layer::groups
                          ? weight(arguments, of, row + i % 2 * 8, channel + i / 2 * 4)
                          : 0;
        *parts[i] = Layer::split ? __float_as_uint(value) : ptx::cvt_rna_tf32_f32(value);
    }
    to[threadIdx.x] = values;
}

// 16-byte words of a pair, or of four fragments, in float16 and otherwise.
constexpr int half_words = 128 * (Layer::split ? 2 : 1);
constexpr int words = 128;

using float16_operands::Scale;

// The same in float16, scaled. Returns how many weights do not fit.
TCONV_DEVICE uint32_t pack_half(const Arguments& arguments, const Fragment& of, uint4* to,
                                Scale scale) {
    int row = threadIdx.x % 32 / 4;
    int channel = of.chunk * 16 + threadIdx.x % 4 * 2;
    uint4 values, rest;
    uint32_t* high[4] = {&values.x, &values.y, &values.z, &values.w};
    uint32_t* low[4] = {&rest.x, &rest.y, &rest.z, &rest.w};
    uint32_t unfit = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float pair[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            pair[k] = of.group < Layer::groups
                          ? weight(arguments, of, row + i % 2 * 8, channel + i / 2 * 8 + k)
                          : 0;
        }
        unfit += float16_operands::unfit(pair, scale, Layer::split);
        float16_operands::Parts parts(pair[0] * scale.factor(), pair[1] * scale.factor());
        *high[i] = parts.high;
        *low[i] = parts.low;
    }
    to += threadIdx.x / 32 * (half_words / 4) + threadIdx.x % 32;
    to[0] = values;
    if constexpr (Layer::split) to[32] = rest;
    return unfit;
}

template <bool half>
TCONV_DEVICE Fragment fragment(Index item) {
    return Layer::resident && (half || !Layer::half) ? resident<chunks<half>>(item)
                                                     : streamed<chunks<half>>(item);
}

}  // namespace

TCONV_KERNEL(sm90_tf32_pack, Layer::threads, 1) {
    // Called at once: the kernel's blocks start only when this grid's last block has started, and
    // then find what room it leaves.
    ptx::griddepcontrol_launch_dependents();
    auto* packed = static_cast<uint4*>(arguments.packed);
    auto* status = static_cast<uint32_t*>(arguments.status);
    if (blockIdx.x == 0 && threadIdx.x == 0) status[0] = 0;  // tiles handed out
    uint32_t unfit = 0;
    Scale scale{0};
    if constexpr (Layer::half) {
        auto sample = float16_operands::sample_weights<Layer::threads>(arguments);
        scale = sample.scale;
        if (Layer::split && sample.sparse) unfit = float16_operands::too_many;
        if (blockIdx.x == 0 && threadIdx.x == 0) status[1] = scale.exponent;
    }
    for (Index item = blockIdx.x; item < arguments.items; item += gridDim.x) {
        Index other = item - arguments.half_items;
        if constexpr (Layer::half) {
            if (other < 0) {
                uint4* to = packed + item * half_words;
                unfit += pack_half(arguments, fragment<true>(item), to, scale);
                unfit = min(unfit, float16_operands::too_many);
                continue;
            }
        }
        uint4* to = packed + arguments.half_items * half_words + other * words;
        pack(arguments, fragment<false>(other), to);
    }
    if constexpr (Layer::half) {
        // No more than decides the verdict, so that the sum over all warps does not overflow.
        unfit = min(ptx::redux_sync_add_u32(unfit), float16_operands::too_many);
        if (threadIdx.x % 32 == 0) status[2 + blockIdx.x * 4 + threadIdx.x / 32] = unfit;
    }
}
