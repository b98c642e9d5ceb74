// Clears the counts from which the kernel behind it hands work out.
#include <ptx/griddepcontrol.cuh>

TCONV_KERNEL(clear_counts, Layer::threads, 1) {
    // At once: the kernel's blocks have work to begin with.
    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x < Layer::counts) static_cast<uint32_t*>(arguments.counts)[threadIdx.x] = 0;
}
