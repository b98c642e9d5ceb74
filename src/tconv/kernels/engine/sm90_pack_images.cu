// Packs x, y or both for the weight's gradient.
#include <engine/fold_image.cuh>
#include <engine/pack_image.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

// A template, as the fields are there only of what is packed.
template <typename Fields>
TCONV_DEVICE void pack_images(const Fields& arguments) {
    using Element = Layer::Element;
    if constexpr (Layer::packs_x) {
        using Rows = PackedPixels<Layer::x_rows_stride, Layer::x_rows_cut, Layer::x_rows>;
        using Columns =
            PackedPixels<Layer::x_columns_stride, Layer::x_columns_cut, Layer::x_columns>;
        using Packing = ImagePacking<Layer::in_channels, Layer::x_channels_last, Rows, Columns,
                                     Layer::groups, Layer::strict>;
        Packing::pack({static_cast<const Element*>(arguments.x),
                       static_cast<Element*>(arguments.packed_x), arguments.x_stride_n,
                       arguments.x_stride_c, arguments.x_stride_h, arguments.x_stride_w,
                       arguments.batch, arguments.x_height, arguments.x_width});
    }
    if constexpr (Layer::folds) {
        fold_image({static_cast<const Element*>(arguments.y), arguments.packed_y,
                    arguments.y_stride_n, arguments.y_stride_c, arguments.y_stride_h,
                    arguments.y_stride_w, arguments.batch, arguments.y_height, arguments.y_width,
                    arguments.image_height, arguments.image_width});
    } else if constexpr (Layer::packs_y) {
        using Rows = PackedPixels<Layer::y_rows_stride, Layer::y_rows_cut, Layer::y_rows>;
        using Columns =
            PackedPixels<Layer::y_columns_stride, Layer::y_columns_cut, Layer::y_columns>;
        using Packing = ImagePacking<Layer::out_channels, Layer::y_channels_last, Rows, Columns,
                                     Layer::groups, Layer::strict>;
        Packing::pack({static_cast<const Element*>(arguments.y),
                       static_cast<Element*>(arguments.packed_y), arguments.y_stride_n,
                       arguments.y_stride_c, arguments.y_stride_h, arguments.y_stride_w,
                       arguments.batch, arguments.y_height, arguments.y_width});
    }
}

}  // namespace

TCONV_KERNEL(sm90_pack_images, Layer::threads, 3) {
    ptx::griddepcontrol_launch_dependents();
    pack_images(arguments);
}
