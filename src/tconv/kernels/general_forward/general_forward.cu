// out[n, co, oy, ox] for any layer: see common/implicit_gemm.cuh.
//
// A pixel is one q = (o + padding) / stride of both axes; a block computes one phase in y and
// `phases` neighbouring phases in x, which read the same source values and whose outputs
// interleave into one contiguous piece of the output row. A slot is one shift. Phases without an
// output, where the stride is longer than the image, have no block.
#include <common/implicit_gemm.cuh>

struct ForwardMap {
    static constexpr bool rows_are_inputs = false;
    static constexpr int rows = Layer::out_channels;
    static constexpr int channels = Layer::in_channels;
    static constexpr int phases = Layer::phases;
    static constexpr int chunks_x = (Layer::used_phases_x + phases - 1) / phases;
    static constexpr int variants = Layer::used_phases_y * chunks_x;
    static constexpr bool bias = Layer::bias;
    static constexpr bool sparse = Layer::sparse;

    TCONV_DEVICE static const Layer::Element* bias_values(const Arguments& arguments) {
        return static_cast<const Layer::Element*>(arguments.bias);
    }

    int phase_y;
    int first_x;  // of the block's phases in x, counted from the first with outputs
    int taps_y;
    int first_tap_y;
    int first_shift_y;

    TCONV_DEVICE explicit ForwardMap(int variant)
        : phase_y(from_first(Layer::first_phase_y, Layer::stride_y, variant / chunks_x)),
          first_x(variant % chunks_x * phases),
          taps_y(0),
          first_tap_y(0),
          first_shift_y(0) {
        // Taps of one phase lie tap_step apart; the first is among the first tap_step.
        for (int t = 0; t < Layer::tap_step_y && t < Layer::kernel_y; ++t) {
            if (t * Layer::dilation_y % Layer::stride_y == phase_y) {
                first_tap_y = t;
                first_shift_y = t * Layer::dilation_y / Layer::stride_y;
                taps_y = (Layer::kernel_y - 1 - t) / Layer::tap_step_y + 1;
            }
        }
    }

    // The phase that many behind the first one with outputs; 0 follows the last.
    TCONV_DEVICE static int from_first(int first, int stride, int index) {
        if (first == 0) return index;  // at compile time, as all but few layers have it
        return index < stride - first ? first + index : index - (stride - first);
    }

    TCONV_DEVICE static int phase_in_x(int index) {
        return from_first(Layer::first_phase_x, Layer::stride_x, index);
    }

    TCONV_DEVICE int slots() const { return taps_y * Layer::shift_count_x; }

    TCONV_DEVICE void offset(int slot, int& dy, int& dx) const {
        dy = -(first_shift_y + slot / Layer::shift_count_x * Layer::shift_step_y);
        dx = -Layer::shifts_x[slot % Layer::shift_count_x];
    }

    TCONV_DEVICE int tap(int slot, int phase) const {
        int tap_y = first_tap_y + slot / Layer::shift_count_x * Layer::tap_step_y;
        int reach = Layer::shifts_x[slot % Layer::shift_count_x] * Layer::stride_x +
                    phase_in_x(first_x + phase);
        int tap_x = reach / Layer::dilation_x;
        bool exists = first_x + phase < Layer::used_phases_x && reach % Layer::dilation_x == 0 &&
                      tap_x < Layer::kernel_x;
        return exists ? tap_y * Layer::kernel_x + tap_x : -1;
    }

    TCONV_DEVICE static int source_y(int y) { return y + Layer::first_q_y; }
    TCONV_DEVICE static int source_x(int x) { return x + Layer::first_q_x; }

    TCONV_DEVICE bool destination(int y, int x, int phase, int& out_y, int& out_x,
                                  const Arguments& arguments) const {
        out_y = (y + Layer::first_q_y) * Layer::stride_y + phase_y - Layer::padding_y;
        out_x = (x + Layer::first_q_x) * Layer::stride_x + phase_in_x(first_x + phase) -
                Layer::padding_x;
        return first_x + phase < Layer::used_phases_x && out_y >= 0 &&
               out_y < arguments.destination_height && out_x >= 0 &&
               out_x < arguments.destination_width;
    }
};

TCONV_KERNEL(general_forward, Layer::threads, Layer::blocks) {
    using Gemm = ImplicitGemm<ForwardMap>;
    static_assert(sizeof(Gemm::Shared) <= Layer::shared_bytes, "the host allots enough");
    TCONV_DYNAMIC_SHARED(memory);
    Gemm::run(arguments, *reinterpret_cast<Gemm::Shared*>(memory));
}
