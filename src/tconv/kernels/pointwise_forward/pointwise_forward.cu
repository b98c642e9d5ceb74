// out[n, co, oy, ox] of layers with a kernel of 1x1 and few input channels in a group:
//
//     bias[co] + sum over ci of x[n, ci, oy/stride, ox/stride] * weight[ci, co]
//
// where both divisions are exact, else bias[co]. The layer is bound by what it writes. A thread
// computes one vector of some planes of y, each output from exactly its products. Where those are
// is found once: planes four channels apart begin at the same place of a vector, whatever their
// stride. See common/plane_vectors.cuh.
#include <common/element.cuh>
#include <common/plane_vectors.cuh>
#include <ptx/registers.cuh>

namespace {

using Index = Layer::Index;

constexpr int planes = Layer::planes;
constexpr int channels = Layer::groups * Layer::out_channels;
constexpr int channel_blocks = (channels + 4 * planes - 1) / (4 * planes);

// Whether the thread's plane `u` exists, its first being that of `channel`.
TCONV_DEVICE bool has_plane(int channel, int u) {
    return channels % (4 * planes) == 0 || channel + 4 * u < channels;
}

}  // namespace

TCONV_KERNEL(pointwise_forward, Layer::threads, Layer::blocks) {
    const Arguments& a = arguments;
    unsigned item = blockIdx.x * Layer::threads + threadIdx.x;
    if (item >= unsigned(a.items)) return;
    unsigned rest = divide(item, a.vectors_multiplier, a.vectors_shift);
    int vector = int(item - rest * a.plane_vectors);
    int image = int(rest / (4 * channel_blocks));
    int channel = int(rest / 4 % channel_blocks * (4 * planes) + rest % 4);
    Index first = image * a.destination_stride_n + channel * a.destination_stride_c;
    int e = 4 * vector - behind_vector(first);  // negative where the vector begins before the plane

    Index offset[4];
    bool exists[4];
    Output at(e, a);
#pragma unroll
    for (int v = 0; v < 4; ++v) {
        exists[v] = unsigned(e + v) < unsigned(a.plane) && at.has_pixel();
        Index pixel = Index(at.y / Layer::stride_y) * a.source_stride_h +
                      Index(at.x / Layer::stride_x) * a.source_stride_w;
        offset[v] = exists[v] ? pixel : 0;
        at.advance(a.destination_width);
    }

    float values[planes][4];
#pragma unroll
    for (int u = 0; u < planes; ++u) {
        bool has = has_plane(channel, u);
        int group = (channel + 4 * u) / Layer::out_channels;
        int of_group = (channel + 4 * u) % Layer::out_channels;
        Index in_channel = Index(group) * Layer::in_channels;
        // NOTE: opaque, or the compiler adds the offsets to its own in 64 bits.
        auto source = ptx::opaque(static_cast<const uint32_t*>(a.source) +
                                  (image * a.source_stride_n + in_channel * a.source_stride_c));
        auto weight = static_cast<const uint32_t*>(a.weight) +
                      (in_channel * a.weight_stride_in + of_group * a.weight_stride_out);
        float bias = 0;
        if constexpr (Layer::bias) {
            auto from = static_cast<const uint32_t*>(a.bias) + (channel + 4 * u);
            bias = __uint_as_float(ptx::ld_global_nc_if(from, has));
        }
#pragma unroll
        for (int v = 0; v < 4; ++v) values[u][v] = 0;
#pragma unroll
        for (int k = 0; k < Layer::in_channels; ++k) {
            float factor =
                __uint_as_float(ptx::ld_global_nc_if(weight + k * a.weight_stride_in, has));
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                uint32_t bits = ptx::ld_global_nc_if(source + offset[v] + k * a.source_stride_c,
                                                     exists[v] && has);
                // NOTE: zero times an infinite weight is no zero.
                float sum = fmaf(__uint_as_float(bits), factor, values[u][v]);
                values[u][v] = exists[v] ? sum : 0;
            }
        }
#pragma unroll
        for (int v = 0; v < 4; ++v) values[u][v] += bias;
    }

#pragma unroll
    for (int u = 0; u < planes; ++u) {
        if (!has_plane(channel, u)) break;
        float* run = static_cast<float*>(a.destination) + (first + 4 * u * a.destination_stride_c);
        store_vector(run, e, a.plane, values[u]);
    }
}
