// Lays weights out for sm90_tf32_forward, rounded to TF32, or for sm90_split_forward, as they are:
// where they stream, in the order in which its warpgroups use them, [group][row group][chunk of 8
// channels][pair][thread][4]; where they are resident, each once, [group][chunk][reach in y][slot in
// x][channels of a warp][thread][4]. A thread's four values are its registers of a wgmma's A operand
// (rows g and g + 8, channels t and t + 4 of the chunk).
#include <ptx/convert.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/memory.cuh>

namespace {

using Index = Layer::Index;

constexpr int chunks = (Layer::in_channels + 7) / 8;
constexpr int phase_tiles = (Layer::out_channels + Layer::warp_channels - 1) / Layer::warp_channels;

// Where the 512 bytes that a warp loads for one product come from.
struct Fragment {
    int group, chunk;
    int channels;  // which of a phase's warps
    int reach_y;   // negative where the rows are none
    int slot_x;
};

// The weight of a row of a warp's 16 and a channel; zero where the row's phase has no tap there.
TCONV_DEVICE uint32_t weight(const Arguments& arguments, const Fragment& of, int row, int channel) {
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
                   out_channel * arguments.weight_stride_out +
                   tap_y * arguments.weight_stride_h + tap_x * arguments.weight_stride_w;
    float value = static_cast<const float*>(arguments.weight)[offset];
    if constexpr (Layer::split) return __float_as_uint(value);
    return ptx::cvt_rna_tf32_f32(value);
}

// item = (group, m_group, chunk, pair); row groups have pairs of their own number.
// item = a pair; those beyond the last are of a group that does not exist.
TCONV_DEVICE Fragment streamed(Index item) {
    int group = int(item / (Index(Layer::group_pairs) * chunks));
    int rest = int(item - Index(group) * Layer::group_pairs * chunks);
    int m_group = 0;
    while (m_group + 1 < Layer::m_groups && rest >= Layer::m_begin[m_group + 1] * chunks) ++m_group;
    rest -= Layer::m_begin[m_group] * chunks;
    int row_class = Layer::m_class[m_group];
    int count = Layer::class_begin[row_class + 1] - Layer::class_begin[row_class];
    int pair = Layer::class_begin[row_class] + rest % count;
    int warp_tile = (m_group * Layer::m_tiles + Layer::pair_m_tile[pair]) * 4 + threadIdx.x / 32;
    int phase_y = warp_tile / phase_tiles;
    bool exists = phase_y < Layer::stride_y * Layer::row_step;
    return {group, rest / count, warp_tile - phase_y * phase_tiles,
            exists ? Layer::pair_slot_y[pair] * Layer::stride_y + phase_y : -1,
            Layer::pair_slot_x[pair]};
}

// item = four fragments; those beyond the last are of a group that does not exist.
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

}  // namespace

TCONV_KERNEL(sm90_tf32_pack, Layer::threads, 1) {
    // At once: the kernel's blocks come only when this grid's last block has started, and then find
    // what room it leaves.
    ptx::griddepcontrol_launch_dependents();
    for (Index item = blockIdx.x; item < arguments.items; item += gridDim.x) {
        Fragment of = Layer::resident ? resident(item) : streamed(item);
        int row = threadIdx.x % 32 / 4;
        int channel = of.chunk * 8 + threadIdx.x % 4;
        uint4 values;
        uint32_t* parts[4] = {&values.x, &values.y, &values.z, &values.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            *parts[i] = of.group < Layer::groups
                            ? weight(arguments, of, row + i % 2 * 8, channel + i / 2 * 4)
                            : 0;
        }
        reinterpret_cast<uint4*>(arguments.packed)[item * 128 + threadIdx.x] = values;
    }
}
