// out[n, co, oy, ox] for any layer: see common/implicit_gemm.cuh.
//
// A pixel is one q = (o + padding) / stride of both axes; a block computes one phase of both. A
// slot is a tap of the phase. Phases without an output, where the stride is longer than the image,
// have no block.
#include <common/implicit_gemm.cuh>

// A phase of an axis, and its taps. They lie `step` apart; the first is among the first `step`.
struct Phase {
    int phase;
    int taps = 0, first_tap = 0, first_shift = 0;

    // `index` counts from the first phase with outputs, which 0 follows behind the last.
    TCONV_DEVICE Phase(int index, int first, int stride, int dilation, int kernel, int step)
        : phase(index < stride - first ? first + index : index - (stride - first)) {
        for (int t = 0; t < step && t < kernel; ++t) {
            if (t * dilation % stride == phase) {
                first_tap = t;
                first_shift = t * dilation / stride;
                taps = (kernel - 1 - t) / step + 1;
            }
        }
    }
};

struct ForwardMap {
    static constexpr bool rows_are_inputs = false;
    static constexpr int rows = Layer::out_channels;
    static constexpr int channels = Layer::in_channels;
    static constexpr int variants = Layer::used_phases_y * Layer::used_phases_x;
    static constexpr bool bias = Layer::bias;

    template <typename Fields>
    TCONV_DEVICE static auto bias_of(const Fields& arguments, int group, int row) {
        return widen(static_cast<const Layer::Element*>(arguments.bias)[group * rows + row]);
    }

    Phase y, x;

    TCONV_DEVICE explicit ForwardMap(int variant)
        : y(variant / Layer::used_phases_x, Layer::first_phase_y, Layer::stride_y,
            Layer::dilation_y, Layer::kernel_y, Layer::tap_step_y),
          x(variant % Layer::used_phases_x, Layer::first_phase_x, Layer::stride_x,
            Layer::dilation_x, Layer::kernel_x, Layer::tap_step_x) {}

    TCONV_DEVICE int slots() const { return y.taps * x.taps; }

    TCONV_DEVICE int tap(int slot, int& dy, int& dx) const {
        int of_y = slot / x.taps, of_x = slot - of_y * x.taps;
        dy = -(y.first_shift + of_y * Layer::shift_step_y);
        dx = -(x.first_shift + of_x * Layer::shift_step_x);
        return (y.first_tap + of_y * Layer::tap_step_y) * Layer::kernel_x + x.first_tap +
               of_x * Layer::tap_step_x;
    }

    TCONV_DEVICE static int source_y(int y) { return y + Layer::first_q_y; }
    TCONV_DEVICE static int source_x(int x) { return x + Layer::first_q_x; }

    TCONV_DEVICE void destination(int& of_y, int& of_x) const {
        of_y = (of_y + Layer::first_q_y) * Layer::stride_y + y.phase - Layer::padding_y;
        of_x = (of_x + Layer::first_q_x) * Layer::stride_x + x.phase - Layer::padding_x;
    }
};

TCONV_KERNEL(general_forward, Layer::threads, Layer::blocks) {
    ImplicitGemm<ForwardMap>::run(arguments);
}
