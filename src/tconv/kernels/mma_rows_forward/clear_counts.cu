// Clears the counters from which the kernel behind hands out work.
#include <ptx/griddepcontrol.cuh>

TCONV_KERNEL(clear_counts, Layer::threads, 1) {
    // Called at once, as the kernel's blocks have work to begin with.
    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x < Layer::counts) static_cast<uint32_t*>(arguments.counts)[threadIdx.x] = 0;
}
