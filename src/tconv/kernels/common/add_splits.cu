// Adds the partial results of a weight's gradient, and rounds each sum once.
//
// A block has an input channel, some output channels and some taps. It adds many splits in four
// parts, each in order, and then the parts in order, so that the same splits give the same sum. In
// shared memory the sums change from the order of the partial results to that of the gradient,
// which is dense: its input channels outermost, then its output channels or its taps.
#include <common/element.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

using Index = Layer::Index;
using Element = Layer::Element;

constexpr int taps = Layer::kernel_y * Layer::kernel_x;
constexpr int tile_outs = Layer::tile_outs, tile_taps = Layer::tile_taps;
constexpr int out_tiles = (Layer::out_channels + tile_outs - 1) / tile_outs;
constexpr int tap_tiles = (taps + tile_taps - 1) / tile_taps;
constexpr int sums = tile_outs * tile_taps, parts = Layer::parts;
// Output channels read together, and weights written together where they follow each other.
constexpr int vector = Layer::taps_first && Layer::out_channels % 4 == 0 ? 4 : 1;
constexpr int written = vector == 4 && tap_tiles == 1 ? 4 : 1;
constexpr int pitch = tile_outs + 4;

template <typename Value, int count>
struct alignas(count * sizeof(Value)) Values {
    Value values[count];
};

struct alignas(16) Staged {
    float sums[parts][tile_taps * pitch];
};

// The sums of parts of the splits, as they lie.
TCONV_DEVICE void add(const Arguments& arguments, Staged& staged, int used_parts, int in,
                      int first_out, int first_tap) {
    using Read = Values<float, vector>;
    constexpr Index plane = Index(Layer::in_channels) * Layer::out_channels;
    int of_part = (arguments.splits + used_parts - 1) / used_parts;
    for (int i = threadIdx.x; i < used_parts * sums / vector; i += Layer::threads) {
        int part = i / (sums / vector), rest = (i - part * (sums / vector)) * vector;
        int tap = Layer::taps_first ? rest / tile_outs : rest % tile_taps;
        int out = Layer::taps_first ? rest - tap * tile_outs : rest / tile_taps;
        Read sum = {};
        if (first_out + out < Layer::out_channels && first_tap + tap < taps) {
            Index at = Index(in) * Layer::out_channels + first_out + out;
            at = Layer::taps_first ? (first_tap + tap) * plane + at : at * taps + first_tap + tap;
            const float* from = static_cast<const float*>(arguments.partial) + at;
            int end = min(arguments.splits, (part + 1) * of_part);
#pragma unroll 4
            for (int split = part * of_part; split < end; ++split) {
                Read read = *reinterpret_cast<const Read*>(from + split * (plane * taps));
#pragma unroll
                for (int k = 0; k < vector; ++k) sum.values[k] += read.values[k];
            }
        }
        *reinterpret_cast<Read*>(staged.sums[part] + tap * pitch + out) = sum;
    }
}

// Adds the parts, and writes the sums in the order of the gradient.
TCONV_DEVICE void write(const Arguments& arguments, const Staged& staged, int used_parts, int in,
                        int first_out, int first_tap) {
    bool taps_adjacent = arguments.gradient_stride_out != 1;
    auto* gradient = static_cast<Element*>(arguments.gradient);
    for (int i = threadIdx.x * written; i < sums; i += Layer::threads * written) {
        int at[written];
        Values<Element, written> values;
#pragma unroll
        for (int k = 0; k < written; ++k) {
            int out = taps_adjacent ? (i + k) / tile_taps : (i + k) % tile_outs;
            int tap = taps_adjacent ? i + k - out * tile_taps : (i + k) / tile_outs;
            at[k] = tap * pitch + out;
            float sum = 0;
            for (int part = 0; part < used_parts; ++part) sum += staged.sums[part][at[k]];
            narrow(sum, values.values[k]);
        }
        int tap = at[0] / pitch, out = at[0] - tap * pitch;
        if (first_out + out >= Layer::out_channels || first_tap + tap >= taps) continue;
        int y = (first_tap + tap) / Layer::kernel_x, x = first_tap + tap - y * Layer::kernel_x;
        Index to = Index(in) * arguments.gradient_stride_in +
                   Index(first_out + out) * arguments.gradient_stride_out +
                   Index(y) * arguments.gradient_stride_h + Index(x) * arguments.gradient_stride_w;
        *reinterpret_cast<Values<Element, written>*>(gradient + to) = values;
    }
}

}  // namespace

TCONV_KERNEL(add_splits, Layer::threads, 4) {
    TCONV_SHARED Staged staged;
    int next = blockIdx.x / tap_tiles, in = next / out_tiles;
    int first_tap = (blockIdx.x - next * tap_tiles) * tile_taps;
    int first_out = (next - in * out_tiles) * tile_outs;
    int used_parts = arguments.splits < 2 * parts ? 1 : parts;
    ptx::griddepcontrol_wait();
    add(arguments, staged, used_parts, in, first_out, first_tap);
    __syncthreads();
    write(arguments, staged, used_parts, in, first_out, first_tap);
}
