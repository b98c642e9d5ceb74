// The host's side: finds a kernel by its name and launches it.
#ifndef __CUDACC_RTC__
#include <cuda_runtime.h>
#include <string.h>

struct Kernel {
    const char* name;
    const void* function;
    int threads;
    int shared_bytes;  // dynamic
    size_t argument_bytes;
};

#define TCONV_ENTRY(space, name, threads, shared_bytes)                         \
    {#name, reinterpret_cast<const void*>(&space::name), threads, shared_bytes, \
     sizeof(space::Arguments)},

static const Kernel kernels[] = {TCONV_ENTRIES};

// Null, or what went wrong.
const char* launch_kernel(const char* name, unsigned blocks, const void* arguments, size_t bytes,
                          void* stream) {
    for (const Kernel& kernel : kernels) {
        if (strcmp(name, kernel.name) != 0) continue;
        if (bytes != kernel.argument_bytes) return "its arguments have another size";
        if (kernel.shared_bytes > 48 * 1024) {
            cudaError_t error = cudaFuncSetAttribute(
                kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes);
            if (error != cudaSuccess) return cudaGetErrorString(error);
        }
        void* parameters[] = {const_cast<void*>(arguments)};
        cudaError_t error =
            cudaLaunchKernel(kernel.function, dim3(blocks), dim3(kernel.threads), parameters,
                             kernel.shared_bytes, static_cast<cudaStream_t>(stream));
        if (error == cudaSuccess) error = cudaGetLastError();
        return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
    }
    return "there is no kernel of this name";
}
#endif
