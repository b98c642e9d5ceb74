// The gradient of the input, for any layer: an ordinary strided correlation of the output's
// gradient,
//
//     gx[n, ci, iy, ix] = sum over (co, ty, tx) of
//         gy[n, co, iy*stride - padding + ty*dilation, ...] * weight[ci, co, ty, tx]
//
// as an implicit matrix product: see common/implicit_gemm.cuh. A pixel is an input pixel, a slot
// a tap, and there is one phase.
#include <common/implicit_gemm.cuh>

struct InputGradientMap {
    static constexpr bool rows_are_inputs = true;
    static constexpr int rows = Layer::in_channels;
    static constexpr int channels = Layer::out_channels;
    static constexpr int phases = 1;
    static constexpr int variants = 1;
    static constexpr bool bias = false;
    static constexpr bool sparse = false;

    TCONV_DEVICE static const Layer::Element* bias_values(const Arguments&) { return nullptr; }

    TCONV_DEVICE explicit InputGradientMap(int) {}

    TCONV_DEVICE static constexpr int slots() { return Layer::kernel_y * Layer::kernel_x; }

    TCONV_DEVICE static void offset(int slot, int& dy, int& dx) {
        dy = slot / Layer::kernel_x * Layer::dilation_y;
        dx = slot % Layer::kernel_x * Layer::dilation_x;
    }

    TCONV_DEVICE static int tap(int slot, int) { return slot; }

    TCONV_DEVICE static int source_y(int y) { return y * Layer::stride_y - Layer::padding_y; }
    TCONV_DEVICE static int source_x(int x) { return x * Layer::stride_x - Layer::padding_x; }

    TCONV_DEVICE static bool destination(int y, int x, int, int& in_y, int& in_x,
                                         const Arguments&) {
        in_y = y;
        in_x = x;
        return true;
    }
};

TCONV_KERNEL(general_input_gradient, Layer::threads, Layer::blocks) {
    using Gemm = ImplicitGemm<InputGradientMap>;
    static_assert(sizeof(Gemm::Shared) <= Layer::shared_bytes, "the host allots enough");
    TCONV_DYNAMIC_SHARED(memory);
    Gemm::run(arguments, *reinterpret_cast<Gemm::Shared*>(memory));
}
