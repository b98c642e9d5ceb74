// out[n, co, oy, ox] of layers with a kernel of 1x1 and few input channels in a group:
//
//     bias[co] + sum over ci of x[n, ci, oy/stride, ox/stride] * weight[ci, co]
//
// where both divisions are exact, else bias[co]. The layer is bound by what it writes: a thread
// computes `vectors` vectors of y, each from exactly its products. See common/plane_vectors.cuh.
#include <common/element.cuh>
#include <common/plane_vectors.cuh>

namespace {

using Index = Layer::Index;

// A vector of y and its values.
struct Piece {
    float* run;  // its plane
    int e;  // its first element of the plane; negative where it begins before
    float values[4];

    TCONV_DEVICE Piece(const Arguments& a, unsigned vector) {
        unsigned plane = divide(vector, a.vectors_multiplier, a.vectors_shift);
        int image = int(plane) / (Layer::groups * Layer::out_channels);
        int channel = int(plane) - image * (Layer::groups * Layer::out_channels);
        int group = channel / Layer::out_channels, of_group = channel % Layer::out_channels;
        Index first = image * a.destination_stride_n + channel * a.destination_stride_c;
        run = static_cast<float*>(a.destination) + first;
        e = 4 * int(vector - plane * a.plane_vectors) - behind_vector(first);
        Index in_channel = Index(group) * Layer::in_channels;
        auto source = static_cast<const uint32_t*>(a.source) +
                      (image * a.source_stride_n + in_channel * a.source_stride_c);
        auto weight = static_cast<const float*>(a.weight) +
                      (in_channel * a.weight_stride_in + of_group * a.weight_stride_out);
        const uint32_t* pixel[4];
        bool exists[4];
        Output at(e, a);
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            exists[v] = unsigned(e + v) < unsigned(a.plane) && at.has_pixel();
            Index offset = at.y / Layer::stride_y * a.source_stride_h +
                           at.x / Layer::stride_x * a.source_stride_w;
            pixel[v] = source + (exists[v] ? offset : 0);
            values[v] = 0;
            at.advance(a.destination_width);
        }
#pragma unroll
        for (int k = 0; k < Layer::in_channels; ++k) {
            float factor = ptx::ld_global_nc(weight + k * a.weight_stride_in);
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                uint32_t bits = ptx::ld_global_nc_if(pixel[v] + k * a.source_stride_c, exists[v]);
                // NOTE: zero times an infinite weight is no zero.
                float sum = fmaf(__uint_as_float(bits), factor, values[v]);
                values[v] = exists[v] ? sum : 0;
            }
        }
        if constexpr (Layer::bias) {
            float bias = ptx::ld_global_nc(static_cast<const float*>(a.bias) + channel);
#pragma unroll
            for (int v = 0; v < 4; ++v) values[v] += bias;
        }
    }
};

template <int left>
TCONV_DEVICE void write(const Arguments& a, unsigned vector) {
    if (vector >= unsigned(a.vectors)) return;
    Piece piece(a, vector);
    // The next vector's loads are under way before this one is stored.
    if constexpr (left > 1) write<left - 1>(a, vector + Layer::threads);
    store_vector(piece.run, piece.e, a.plane, piece.values);
}

}  // namespace

TCONV_KERNEL(pointwise_forward, Layer::threads, Layer::blocks) {
    write<Layer::vectors>(arguments, blockIdx.x * (Layer::threads * Layer::vectors) + threadIdx.x);
}
