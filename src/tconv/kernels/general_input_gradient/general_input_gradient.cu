// The gradient of the input, for any layer: an ordinary strided correlation of the output's
// gradient,
//
//     gx[n, ci, iy, ix] = sum over (co, ty, tx) of
//         gy[n, co, iy*stride - padding + ty*dilation, ...] * weight[ci, co, ty, tx]
//
// as an implicit matrix product: see common/implicit_gemm.cuh. A pixel is an input pixel, a slot a
// tap.
#include <common/implicit_gemm.cuh>

struct InputGradientMap {
    static constexpr bool rows_are_inputs = true;
    static constexpr int rows = Layer::in_channels;
    static constexpr int channels = Layer::out_channels;
    static constexpr int variants = 1;
    static constexpr bool bias = false;

    TCONV_DEVICE explicit InputGradientMap(int) {}

    TCONV_DEVICE static constexpr int slots() { return Layer::kernel_y * Layer::kernel_x; }

    TCONV_DEVICE static int tap(int slot, int& dy, int& dx) {
        dy = slot / Layer::kernel_x * Layer::dilation_y;
        dx = slot % Layer::kernel_x * Layer::dilation_x;
        return slot;
    }

    TCONV_DEVICE static int source_y(int y) { return y * Layer::stride_y - Layer::padding_y; }
    TCONV_DEVICE static int source_x(int x) { return x * Layer::stride_x - Layer::padding_x; }
    TCONV_DEVICE static void destination(int&, int&) {}
};

TCONV_KERNEL(general_input_gradient, Layer::threads, Layer::blocks) {
    ImplicitGemm<InputGradientMap>::run(arguments);
}
