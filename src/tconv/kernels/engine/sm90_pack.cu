// Packs the weights of an engine kernel, and the image that it reads if no tensor map can describe
// it.
#include <engine/fold_image.cuh>
#include <engine/pack_image.cuh>
#include <engine/pack_weights.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

// A template, as the fields are there only if the image is packed.
template <typename Fields>
TCONV_DEVICE void pack_image(const Fields& arguments, unsigned block, unsigned blocks) {
    if constexpr (Layer::folds) {
        fold_image({static_cast<const Layer::Element*>(arguments.source), arguments.image,
                    arguments.source_stride_n, arguments.source_stride_c, arguments.source_stride_h,
                    arguments.source_stride_w, arguments.batch, arguments.source_height,
                    arguments.source_width, arguments.image_height, arguments.image_width, block,
                    blocks});
    } else if constexpr (Layer::packs_image) {
        using Rows =
            PackedPixels<Layer::source_rows_stride, Layer::source_rows_cut, Layer::source_rows>;
        using Columns = PackedPixels<Layer::source_columns_stride, Layer::source_columns_cut,
                                     Layer::source_columns>;
        using Packing = ImagePacking<Layer::reduced, Layer::channels_last, Rows, Columns,
                                     Layer::groups, Layer::strict>;
        Packing::pack({static_cast<const Layer::Element*>(arguments.source),
                       static_cast<Layer::Element*>(arguments.image), arguments.source_stride_n,
                       arguments.source_stride_c, arguments.source_stride_h,
                       arguments.source_stride_w, arguments.batch, arguments.source_height,
                       arguments.source_width, block, blocks});
    }
}

}  // namespace

// The first blocks have an item of the weights each, the others the image: neither waits.
TCONV_KERNEL(sm90_pack, Layer::threads, Layer::packs_image ? 3 : 4) {
    TCONV_DYNAMIC_SHARED(memory);
    ptx::griddepcontrol_launch_dependents();
    if (blockIdx.x < weights::items) {
        weights::pack(arguments, memory, blockIdx.x);
    } else {
        pack_image(arguments, blockIdx.x - weights::items, gridDim.x - weights::items);
    }
}
