// cvta.to.shared: the 32-bit shared address that instructions and descriptors take.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

TCONV_DEVICE uint32_t cvta_to_shared(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace ptx
