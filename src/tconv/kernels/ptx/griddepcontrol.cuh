// griddepcontrol (sm_90): a launch that starts before the one in front of it in the stream has
// ended, if the host has asked for that (`Kernel.launch`, dependent). Launched otherwise, both do
// nothing.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

// Until the launches in front "have completed and all the memory operations from the prerequisite
// grids are performed and made visible to the current grid" (PTX ISA). Of the grid, so bulk copies
// that the thread asks for afterwards read what ordinary stores wrote there, as after any launch.
// NOTE: each thread that reads such memory, or asks for a copy of it, has waited before. Not by
// `nc` loads: something did write while the kernel ran, and the compiler may move them before the
// wait.
TCONV_DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next launch's blocks start where there is room, once every block of this grid has come
// here or is over. Says nothing of this grid's stores: the next one waits for its end.
TCONV_DEVICE void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace ptx
