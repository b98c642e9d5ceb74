// Adds the partial results of a weight's gradient, and rounds each sum once.
//
// A block has an input channel, some output channels and some taps. It adds the splits in four
// parts, each in order, and then the parts in order, so that the same splits give the same sum. In
// shared memory the sums change from the order of the partial results to that of the gradient.
#include <common/element.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

using Index = Layer::Index;
using Element = Layer::Element;

constexpr int taps = Layer::kernel_y * Layer::kernel_x;
constexpr int tile_outs = Layer::tile_outs, tile_taps = Layer::tile_taps;
constexpr int out_tiles = (Layer::out_channels + tile_outs - 1) / tile_outs;
constexpr int tap_tiles = (taps + tile_taps - 1) / tile_taps;
constexpr int pitch = tile_taps | 1;  // other banks for the next channel
constexpr int sums = tile_outs * tile_taps, parts = Layer::parts;

}  // namespace

TCONV_KERNEL(add_splits, Layer::threads, 2) {
    TCONV_SHARED float staged[parts][tile_outs * pitch];
    int next = blockIdx.x / tap_tiles, in = next / out_tiles;
    int first_tap = (blockIdx.x - next * tap_tiles) * tile_taps;
    int first_out = (next - in * out_tiles) * tile_outs;
    constexpr Index plane = Index(Layer::in_channels) * Layer::out_channels;
    int of_part = (arguments.splits + parts - 1) / parts;
    ptx::griddepcontrol_wait();
    for (int i = threadIdx.x; i < parts * sums; i += Layer::threads) {
        int part = i / sums, rest = i - part * sums;
        int tap = Layer::taps_first ? rest / tile_outs : rest % tile_taps;
        int out = Layer::taps_first ? rest - tap * tile_outs : rest / tile_taps;
        float sum = 0;
        if (first_out + out < Layer::out_channels && first_tap + tap < taps) {
            Index at = Index(in) * Layer::out_channels + first_out + out;
            at = Layer::taps_first ? (first_tap + tap) * plane + at : at * taps + first_tap + tap;
            const float* from = static_cast<const float*>(arguments.partial) + at;
            int end = min(arguments.splits, (part + 1) * of_part);
#pragma unroll 4
            for (int split = part * of_part; split < end; ++split) {
                sum += from[split * (plane * taps)];
            }
        }
        staged[part][out * pitch + tap] = sum;
    }
    __syncthreads();
    bool taps_adjacent = arguments.gradient_stride_out != 1;
    for (int i = threadIdx.x; i < sums; i += Layer::threads) {
        int out = taps_adjacent ? i / tile_taps : i % tile_outs;
        int tap = taps_adjacent ? i - out * tile_taps : i / tile_outs;
        if (first_out + out >= Layer::out_channels || first_tap + tap >= taps) continue;
        float sum = 0;
#pragma unroll
        for (int part = 0; part < parts; ++part) sum += staged[part][out * pitch + tap];
        int y = (first_tap + tap) / Layer::kernel_x, x = first_tap + tap - y * Layer::kernel_x;
        Index at = Index(in) * arguments.gradient_stride_in +
                   Index(first_out + out) * arguments.gradient_stride_out +
                   Index(y) * arguments.gradient_stride_h + Index(x) * arguments.gradient_stride_w;
        narrow(sum, static_cast<Element*>(arguments.gradient)[at]);
    }
}
