// griddepcontrol (sm_90): programmatic dependent launch. A launch may start before the one in front
// of it in the stream has ended, if the host allows that (`Kernel.launch`, dependent). In an
// ordinary launch both functions do nothing.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

// Waits until the launches in front "have completed and all the memory operations from the
// prerequisite grids are performed and made visible to the current grid" (PTX ISA). Bulk copies
// that the thread issues afterwards read what ordinary stores wrote, as after any launch.
// NOTE: each thread that reads such memory, or issues a copy of it, must wait first. It must not
// use `nc` loads: the memory was written while the kernel ran, and the compiler may move them
// before the wait.
//
// Before sm_90 launches never depend so, and there is nothing to wait for.
TCONV_DEVICE void griddepcontrol_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the blocks of the next launch start where there is room, once every block of this grid has
// called it or has ended. It does not order this grid's stores: the next launch waits for its end.
TCONV_DEVICE void griddepcontrol_launch_dependents() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace ptx
