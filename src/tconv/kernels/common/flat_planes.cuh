// Dense images as flat maps have them (kernels/flat.py): `classes` neighbouring planes are one
// dimension. Channel c of a group is of the class c % classes, and there the c / classes-th.
//
// NOTE: no zeros lie beside a row, but the rows before and behind it.
#pragma once

#include <ptx/cuda.cuh>

namespace {

struct FlatPlanes {
    static constexpr int octet = 16 / sizeof(Layer::Element);  // elements of 16 bytes

    int classes, plane, width, height;

    template <typename Fields>
    TCONV_DEVICE explicit FlatPlanes(const Fields& arguments)
        : classes(arguments.flat_classes),
          plane(arguments.flat_plane),
          width(arguments.flat_width),
          height(arguments.flat_height) {}

    // NOTE: no division. It would take longer than the rest of a row's copy.
    TCONV_DEVICE int of_class(int channel) const {
        return channel >> (classes / 2 - classes / 8);  // 1, 2, 4 or 8
    }

    // Where a copy of a row from pixel x on starts, in elements: on 16 bytes. A row outside the
    // image reads as zeros, like all behind the planes.
    TCONV_DEVICE int start(int of_class, int row, int x) const {
        bool inside = row >= 0 && row < height;
        return inside ? (of_class * plane + row * width + x) & -octet : classes * plane;
    }

    // How many pixels before x that is, of any row.
    TCONV_DEVICE int shift(int of_class, int row, int x) const {
        return int(unsigned(of_class) * plane + unsigned(row) * width + unsigned(x)) & (octet - 1);
    }
};

}  // namespace
