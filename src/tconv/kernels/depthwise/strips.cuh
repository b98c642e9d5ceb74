// What the three depthwise kernels share: which positions and channels a thread has, and how it
// reads and writes them.
//
// A thread has Layer::vector neighbouring channels, and strips of Layer::strip neighbouring
// pixels of x in a row, with the outputs that belong to them. Where y is channels_last,
// neighbouring threads have neighbouring channels; else a block has one channel, and neighbouring
// threads have neighbouring strips. So a warp's accesses are whole lines.
#pragma once

#include <common/division.cuh>
#include <common/element.cuh>
#include <ptx/memory.cuh>

namespace {

using Element = Layer::Element;
using Index = Layer::Index;

constexpr int vector = Layer::vector;
constexpr int strip = Layer::strip;
constexpr int taps = Layer::kernel_y * Layer::kernel_x;
constexpr int block_channels = Layer::threads_c * vector;

// Rounded down and up, for numbers of any sign.
constexpr int floor_div(int a, int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
constexpr int ceil_div(int a, int b) { return -floor_div(-a, b); }

// Columns that move as one access, of rows that are read in steps of `step` columns.
constexpr int group_of(int step) {
    int group = 1;
    while (step % (2 * group) == 0 && 2 * group * int(sizeof(Element)) <= 16) group *= 2;
    return group;
}

// N neighbouring values, as float; zeros if they do not exist.
template <int N, typename E>
TCONV_DEVICE void load(const E* address, bool exists, float (&values)[N]) {
    constexpr int words = int(sizeof(E)) * N / 4;
    if constexpr (words == 0) {
        auto from = reinterpret_cast<const uint16_t*>(address);
        values[0] = widen(E{ptx::ld_global_nc_if(from, exists)});
    } else {
        auto from = reinterpret_cast<const uint32_t*>(address);
        uint32_t bits[words];
        if constexpr (words == 1) {
            bits[0] = ptx::ld_global_nc_if(from, exists);
        } else if constexpr (words == 2) {
            uint2 two = ptx::ld_global_nc_v2_if(from, exists);
            bits[0] = two.x, bits[1] = two.y;
        } else {
            static_assert(words == 4, "an access has 16 bytes at most");
            uint4 four = ptx::ld_global_nc_v4_if(from, exists);
            bits[0] = four.x, bits[1] = four.y, bits[2] = four.z, bits[3] = four.w;
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if constexpr (sizeof(E) == 4) {
                values[i] = __uint_as_float(bits[i]);
            } else {
                uint32_t half = i % 2 == 0 ? bits[i / 2] & 0xffffu : bits[i / 2] >> 16;
                values[i] = widen(E{static_cast<unsigned short>(half)});
            }
        }
    }
}

TCONV_DEVICE uint32_t pair(float low, float high, float16) {
    return ptx::cvt_rn_f16x2_f32(low, high);
}
TCONV_DEVICE uint32_t pair(float low, float high, bfloat16) {
    return ptx::cvt_rn_bf16x2_f32(low, high);
}

// N neighbouring values, rounded. Streaming: nothing here reads them again.
template <int N, typename E>
TCONV_DEVICE void store(E* address, const float (&values)[N]) {
    constexpr int words = int(sizeof(E)) * N / 4;
    if constexpr (words == 0) {
        E element;
        narrow(values[0], element);
        ptx::st_global_cs(reinterpret_cast<uint16_t*>(address), uint16_t(element.bits));
    } else {
        auto to = reinterpret_cast<uint32_t*>(address);
        uint32_t bits[words];
#pragma unroll
        for (int i = 0; i < words; ++i) {
            if constexpr (sizeof(E) == 4) {
                bits[i] = __float_as_uint(values[i]);
            } else {
                bits[i] = pair(values[2 * i], values[2 * i + 1], E{});
            }
        }
        if constexpr (words == 1) {
            ptx::st_global_cs(to, bits[0]);
        } else if constexpr (words == 2) {
            ptx::st_global_cs_v2(to, make_uint2(bits[0], bits[1]));
        } else {
            static_assert(words == 4, "an access has 16 bytes at most");
            ptx::st_global_cs_v4(to, make_uint4(bits[0], bits[1], bits[2], bits[3]));
        }
    }
}

// x or y, as the thread sees it.
template <bool vectors_, int columns_>
struct Image {
    // Whether it has its channels, or its columns, in the order in which threads have them.
    static constexpr bool vectors = vectors_;
    // Columns that move as one access, where columns are neighbours.
    static constexpr int group = group_of(columns_);
    static constexpr int item = int(sizeof(Element));

    const Element* data;
    int height, width;
    Index stride_n, stride_c, stride_h, stride_w;
    Index channels[vector];  // offsets of the thread's channels

    // Whether each access of several values starts on a multiple of its size.
    TCONV_DEVICE bool aligned() const {
        if constexpr (!vectors) return true;
        constexpr int values = Layer::channels_last ? vector : group;
        auto on = [](Index stride) { return stride % values == 0; };
        bool outer =
            reinterpret_cast<uint64_t>(data) % (values * item) == 0 && on(stride_n) && on(stride_h);
        if constexpr (Layer::channels_last) {
            return outer && (stride_c == 1 || vector == 1) && on(stride_w);
        } else {
            return outer && (stride_w == 1 || group == 1) && on(stride_c) && width % group == 0;
        }
    }

    TCONV_DEVICE bool has_column(int column) const { return unsigned(column) < unsigned(width); }

    TCONV_DEVICE const Element* row(int image, int y) const {
        return data + (image * stride_n + y * stride_h);
    }

    // Columns base + first and those behind it, as [column][channel]; zeros for those that do not
    // exist. `base` is a multiple of `columns_`. What nobody uses is not loaded.
    template <bool fast, int first, int count>
    TCONV_DEVICE void load_row(const Element* of_row, bool row_exists, int base,
                               float (&values)[count][vector]) const {
        if constexpr (Layer::channels_last || !fast || !vectors || group == 1) {
#pragma unroll
            for (int i = 0; i < count; ++i) {
                int column = base + first + i;
                bool exists = row_exists && has_column(column);
                const Element* at = of_row + column * stride_w;
                if constexpr (fast && vectors) {
                    load(at + channels[0], exists, values[i]);
                } else {
#pragma unroll
                    for (int v = 0; v < vector; ++v) {
                        float value[1];
                        load(at + channels[v], exists, value);
                        values[i][v] = value[0];
                    }
                }
            }
        } else {
            // Groups of columns that lie within; of others, the columns one by one.
            constexpr int first_group = floor_div(first, group);
            constexpr int last_group = floor_div(first + count - 1, group);
#pragma unroll
            for (int g = first_group; g <= last_group; ++g) {
                int from = g * group - first;
                if (from >= 0 && from + group <= count) {
                    float several[group];
                    bool exists = row_exists && has_column(base + g * group);
                    load(of_row + channels[0] + (base + g * group), exists, several);
#pragma unroll
                    for (int i = 0; i < group; ++i) values[from + i][0] = several[i];
                } else {
#pragma unroll
                    for (int i = 0; i < group; ++i) {
                        if (from + i < 0 || from + i >= count) continue;
                        int column = base + g * group + i;
                        float value[1];
                        load(of_row + channels[0] + column, row_exists && has_column(column),
                             value);
                        values[from + i][0] = value[0];
                    }
                }
            }
        }
    }

    // Columns base + first and those behind it, where they exist.
    template <bool fast, int first, int count>
    TCONV_DEVICE void store_row(const Element* of_row, int base,
                                const float (&values)[count][vector]) const {
        auto row = const_cast<Element*>(of_row);
        if constexpr (Layer::channels_last || !fast || !vectors || group == 1) {
#pragma unroll
            for (int i = 0; i < count; ++i) {
                int column = base + first + i;
                if (!has_column(column)) continue;
                Element* at = row + column * stride_w;
                if constexpr (fast && vectors) {
                    store(at + channels[0], values[i]);
                } else {
#pragma unroll
                    for (int v = 0; v < vector; ++v) {
                        float value[1] = {values[i][v]};
                        store(at + channels[v], value);
                    }
                }
            }
        } else {
            static_assert(first == 0 && count % group == 0, "a strip is whole groups");
#pragma unroll
            for (int i = 0; i < count; i += group) {
                if (!has_column(base + i)) continue;
                float several[group];
#pragma unroll
                for (int j = 0; j < group; ++j) several[j] = values[i + j][0];
                store(row + channels[0] + (base + i), several);
            }
        }
    }
};

using ImageX = Image<Layer::x_vectors, strip>;
using ImageY = Image<Layer::y_vectors, strip * Layer::stride_x>;

// The block's channels and the thread's place among its threads.
struct Thread {
    int first_channel;  // of the block, counted as Layer::channels are
    int channel;  // of the thread
    int share;  // of the positions
    int shares;
    bool exists;  // whether it has a channel

    TCONV_DEVICE explicit Thread(int chunk, int share_of_block, int blocks)
        : first_channel(chunk * block_channels),
          channel(first_channel + int(threadIdx.x) % Layer::threads_c * vector),
          share(share_of_block * (Layer::threads / Layer::threads_c) +
                int(threadIdx.x) / Layer::threads_c),
          shares(blocks * (Layer::threads / Layer::threads_c)),
          exists(channel < Layer::channels) {}

    // x with channel `of(v)` for each channel v of the thread; so y_image.
    template <typename Of>
    TCONV_DEVICE ImageX x_image(const Arguments& a, Of of) const {
        return image<ImageX>(a.x, a.x_height, a.x_width, a.x_stride_n, a.x_stride_c, a.x_stride_h,
                             a.x_stride_w, of);
    }

    template <typename Of>
    TCONV_DEVICE ImageY y_image(const Arguments& a, Of of) const {
        return image<ImageY>(a.y, a.y_height, a.y_width, a.y_stride_n, a.y_stride_c, a.y_stride_h,
                             a.y_stride_w, of);
    }

private:
    template <typename Image, typename Of>
    TCONV_DEVICE static Image image(const void* data, int height, int width, Index n, Index c,
                                    Index h, Index w, Of of) {
        Image found{static_cast<const Element*>(data), height, width, n, c, h, w, {}};
#pragma unroll
        for (int v = 0; v < vector; ++v) found.channels[v] = Index(of(v)) * c;
        return found;
    }
};

// Where a strip is. Positions count strips along rows; in channels_last, groups of rows come
// first, so that warps of a block meet the rows that their taps share.
struct Place {
    int image, row, column;  // strip's own, of `rows` and `strips`
    bool exists;

    TCONV_DEVICE Place(unsigned position, const Arguments& a) {
        unsigned within = position & ((1u << a.row_shift) - 1);
        unsigned rest = position >> a.row_shift;
        unsigned of_strips = divide(rest, a.strips_multiplier, a.strips_shift);
        column = int(rest - of_strips * a.strips);
        image = int(divide(of_strips, a.groups_multiplier, a.groups_shift));
        row = int(((of_strips - image * a.row_groups) << a.row_shift) + within);
        exists = row < a.rows;
    }
};

}  // namespace
