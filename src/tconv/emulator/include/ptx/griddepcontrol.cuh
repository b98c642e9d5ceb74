// Dependent launches on the host: a launch ends before the next one starts.
#pragma once

#include <ptx/cuda.cuh>

namespace ptx {

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

}  // namespace ptx
