// Packs an image of any strides as [image][row][column][group][channel], each pixel of a group on
// 16 bytes, so that tensor maps can describe it.
//
// An item is 64 pixels of an image, in the order of rows, and 64 channels of a group.
#pragma once

#include <common/element.cuh>

namespace {

struct Image {
    const Layer::Element* source;
    Layer::Element* destination;
    Layer::Index stride_n, stride_c, stride_h, stride_w;
    int batch, height, width;
};

// Of `channels` channels of a group; `channels_last`: whether they are adjacent in the source.
template <int channels, bool channels_last>
struct ImagePacking {
    using Element = Layer::Element;
    using Index = Layer::Index;

    static constexpr int pixels = 64, depth = 64;
    static constexpr int padded = (channels + 7) / 8 * 8;
    static constexpr int parts = (channels + depth - 1) / depth;
    static constexpr int pitch = depth + 2;  // elements; a bank further
    static constexpr int batch = 8;  // loads under way at a time

    // Items of an image, of all groups.
    TCONV_DEVICE static int items(const Image& image) {
        return (image.height * image.width + pixels - 1) / pixels * parts * Layer::groups *
               image.batch;
    }

    // All items of a block.
    TCONV_DEVICE static void pack(const Image& image, Element* staged) {
        int count = items(image);
        for (int item = blockIdx.x; item < count; item += gridDim.x) pack(image, staged, item);
    }

    TCONV_DEVICE static void pack(const Image& image, Element* staged, int item) {
        int rest = item / parts, part = item - rest * parts;
        int next = rest / Layer::groups, group = rest - next * Layer::groups;
        int size = image.height * image.width;
        int runs = (size + pixels - 1) / pixels;
        int number = next / runs, first = (next - number * runs) * pixels;
        const Element* source = image.source + Index(number) * image.stride_n +
                                Index(group * channels + part * depth) * image.stride_c;
        __syncthreads();
        for (int begin = threadIdx.x; begin < pixels * depth; begin += batch * Layer::threads) {
            Element values[batch];
#pragma unroll
            for (int k = 0; k < batch; ++k) {
                int i = begin + k * Layer::threads;
                int pixel = channels_last ? i / depth : i % pixels;
                int channel = channels_last ? i % depth : i / pixels;
                values[k] = {};
                if (i < pixels * depth && first + pixel < size &&
                    part * depth + channel < channels) {
                    int y = (first + pixel) / image.width, x = first + pixel - y * image.width;
                    values[k] = source[Index(channel) * image.stride_c + Index(y) * image.stride_h +
                                       Index(x) * image.stride_w];
                }
            }
#pragma unroll
            for (int k = 0; k < batch; ++k) {
                int i = begin + k * Layer::threads;
                int pixel = channels_last ? i / depth : i % pixels;
                int channel = channels_last ? i % depth : i / pixels;
                if (i < pixels * depth) staged[pixel * pitch + channel] = values[k];
            }
        }
        __syncthreads();
        Element* to = image.destination +
                      ((Index(number) * size + first) * Layer::groups + group) * padded +
                      part * depth;
        for (int i = threadIdx.x; i < pixels * depth / 8; i += Layer::threads) {
            int pixel = i / (depth / 8), channel = i % (depth / 8) * 8;
            if (first + pixel >= size || part * depth + channel >= padded) continue;
            const auto* from = reinterpret_cast<const uint32_t*>(staged + pixel * pitch + channel);
            uint4 values = {from[0], from[1], from[2], from[3]};
            *reinterpret_cast<uint4*>(to + Index(pixel) * (Layer::groups * padded) + channel) =
                values;
        }
    }
};

}  // namespace
