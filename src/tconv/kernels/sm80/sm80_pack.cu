// Packs one or two operands as [image][row][column][group][channel]. Of a weight the channels that
// are summed over are the channels, others the images, and taps the pixels.
#include <engine/pack_image.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

using Element = Layer::Element;
using Every = PackedPixels<1, 0, Layer::every>;

// A template, as the second's fields are there only if it is packed.
template <typename Fields>
TCONV_DEVICE void pack(const Fields& of) {
    auto* to = static_cast<Element*>(of.destination);
    ImagePacking<Layer::first_channels, Layer::first_last, Every, Every, Layer::first_groups>::pack(
        {static_cast<const Element*>(of.first), to, of.first_stride_n, of.first_stride_c,
         of.first_stride_h, of.first_stride_w, of.first_batch, of.first_height, of.first_width});
    if constexpr (Layer::second_channels > 0) {
        using Second = ImagePacking<Layer::second_channels, Layer::second_last, Every, Every,
                                    Layer::second_groups>;
        Second::pack({static_cast<const Element*>(of.second), to + of.second_begin,
                      of.second_stride_n, of.second_stride_c, of.second_stride_h,
                      of.second_stride_w, of.second_batch, of.second_height, of.second_width});
    }
}

}  // namespace

TCONV_KERNEL(sm80_pack, Layer::threads, 3) {
    ptx::griddepcontrol_launch_dependents();
    pack(arguments);
}
