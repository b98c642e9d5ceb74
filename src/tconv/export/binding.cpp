#include <c10/cuda/CUDAGuard.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

const char* launch_kernel(const char* name, unsigned blocks, const void* arguments, size_t bytes,
                          void* stream);

// Launches the kernel of that name on the device's current stream.
void launch(const std::string& name, int device, long long blocks, const std::string& arguments) {
    c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    const char* error = launch_kernel(name.c_str(), static_cast<unsigned>(blocks), arguments.data(),
                                      arguments.size(), c10::cuda::getCurrentCUDAStream().stream());
    if (error) throw std::runtime_error(name + " was not launched: " + error);
}
