// A libcuda.so.1 of the few functions that tconv.jit calls, so that loading and launching are
// tested without a GPU: it records what it is asked and answers what the test sets up.
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <string>

using Handle = void*;

namespace {
constexpr int current_context = 0xC0;
int context_depth = 0, capture_mode = 0;
Handle thread_context = nullptr;  // what cuCtxGetCurrent says
std::deque<int> next_results;
struct {
    unsigned grid, block, shared;
    Handle function, stream;
    int context_depth;
    unsigned char arguments[24];
} last_launch;
// Of the last launch by cuLaunchKernelEx.
struct {
    int count, id, value;
} last_attributes;
int driver_version = 13000, capability = 9;
int unloads = 0;
int launches = 0, dynamic_shared = -1, parameters = 1, load_capture_mode = -1;
// One graph at a time: how many launches it has, what became of it.
constexpr intptr_t capture_stream = 0xE0, executable = 0xE1;
bool capturing = false;
int captured = 0, graph_launches = 0, graphs_destroyed = 0, executables_destroyed = 0;
Handle graph_stream = nullptr;

int next_result() {
    if (next_results.empty()) return 0;
    int result = next_results.front();
    next_results.pop_front();
    return result;
}
}  // namespace

extern "C" {
// For the test.
void fake_next_result(int result) { next_results.push_back(result); }
int fake_unloads() { return unloads; }
void fake_parameters(int count) { parameters = count; }
int fake_launches() { return launches; }
void fake_driver_version(int version) { driver_version = version; }
void fake_capability(int major) { capability = major; }
void fake_forget_attributes() { last_attributes = {}; }
const void* fake_last_attributes() { return &last_attributes; }
int fake_dynamic_shared() { return dynamic_shared; }
void fake_thread_context(Handle context) { thread_context = context; }
Handle fake_set_context() { return thread_context; }
int fake_context_depth() { return context_depth; }
int fake_capture_mode() { return capture_mode; }
int fake_load_capture_mode() { return load_capture_mode; }
const void* fake_last_launch() { return &last_launch; }
int fake_captured() { return captured; }
int fake_graph_launches() { return graph_launches; }
Handle fake_graph_stream() { return graph_stream; }
int fake_is_capturing() { return capturing; }
int fake_graphs_destroyed() { return graphs_destroyed; }
int fake_executables_destroyed() { return executables_destroyed; }

// For NVRTC, which looks for a driver when it compiles.
int cuGetExportTable(const void** table, const void*) { return *table = nullptr, 500; }

// For tconv.
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return *version = driver_version, 0; }
int cuDeviceGetCount(int* count) { return *count = 2, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 75:
            return *value = capability, 0;        // compute capability, major
        case 76:
            return *value = 0, 0;        // minor
        case 16:
            return *value = 132, 0;      // multiprocessors
        case 97:
            return *value = 232448, 0;   // shared memory of a block, opted in
        case 38:
            return *value = 62914560, 0; // L2
    }
    return 1;
}
int cuDevicePrimaryCtxRetain(Handle* context, int) { return *context = (Handle)0xC0, 0; }
int cuCtxGetCurrent(Handle* context) { return *context = thread_context, 0; }
int cuCtxSetCurrent(Handle context) { return thread_context = context, 0; }
int cuCtxPushCurrent(Handle context) {
    return context == (Handle)(intptr_t)current_context ? (++context_depth, 0) : 201;
}
int cuCtxPopCurrent(Handle* context) { return --context_depth, *context = nullptr, 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) {
    int before = capture_mode;
    return capture_mode = *mode, *mode = before, 0;
}
int cuModuleLoadData(Handle* module, const void* image) {
    load_capture_mode = capture_mode;
    if (std::memcmp(image, "\177ELF", 4) != 0) return 200;
    return *module = (Handle)0xD0, 0;
}
int cuModuleUnload(Handle module) {
    if (module != (Handle)0xD0 || capture_mode != 2) return 1;
    return ++unloads, 0;
}
int cuModuleGetFunction(Handle* function, Handle, const char* name) {
    return *function = (Handle)0xF0, std::strcmp(name, "absent") == 0 ? 500 : 0;
}
int cuFuncGetAttribute(int* value, int, Handle) { return *value = 512, 0; }
int cuFuncSetAttribute(Handle, int, int value) { return dynamic_shared = value, 0; }
int cuFuncGetParamInfo(Handle, size_t index, size_t* offset, size_t* size) {
    return index < (size_t)parameters ? (*offset = 0, *size = 24, 0) : 1;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Handle, int, size_t) {
    return *blocks = 3, 0;
}
int cuLaunchKernel(Handle function, unsigned grid, unsigned, unsigned, unsigned block, unsigned,
                   unsigned, unsigned shared, Handle stream, void** parameters, void**) {
    if (int result = next_result()) return result;
    if (capturing && stream == (Handle)capture_stream) return ++captured, 0;
    ++launches;
    last_launch = {grid, block, shared, function, stream, context_depth, {}};
    std::memcpy(last_launch.arguments, parameters[0], sizeof last_launch.arguments);
    return 0;
}
struct Attribute {
    int id, padding;
    union {
        int value;
        char reserved[64];
    };
};
struct Configuration {
    unsigned grid[3], block[3], shared;
    Handle stream;
    const Attribute* attributes;
    unsigned count;
};
int cuLaunchKernelEx(const Configuration* c, Handle function, void** parameters, void** extra) {
    last_attributes = {(int)c->count, c->attributes[0].id, c->attributes[0].value};
    return cuLaunchKernel(function, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1],
                          c->block[2], c->shared, c->stream, parameters, extra);
}
int cuStreamCreate(Handle* stream, unsigned flags) {
    return *stream = (Handle)capture_stream, flags == 1 ? 0 : 1;
}
int cuStreamBeginCapture(Handle stream, int mode) {
    if (int result = next_result()) return result;
    if (capturing || stream != (Handle)capture_stream || mode != 2 || capture_mode != 2) return 1;
    return capturing = true, captured = 0, 0;
}
int cuStreamEndCapture(Handle, Handle* graph) {
    if (!capturing) return 1;
    return capturing = false, *graph = (Handle)0xE2, 0;
}
int cuGraphInstantiateWithFlags(Handle* made, Handle, unsigned long long) {
    return *made = (Handle)executable, next_result();
}
int cuGraphDestroy(Handle) { return ++graphs_destroyed, 0; }
int cuGraphExecDestroy(Handle) { return ++executables_destroyed, 0; }
int cuGraphLaunch(Handle, Handle stream) {
    if (int result = next_result()) return result;
    return ++graph_launches, graph_stream = stream, 0;
}
int cuTensorMapEncodeTiled(unsigned char* map, int dtype, unsigned rank, void* address,
                           const uint64_t* dims, const uint64_t* strides, const unsigned* box,
                           const unsigned* element_strides, int interleave, int swizzle,
                           int l2_promotion, int oob_fill) {
    if ((uintptr_t)map % 64 != 0) return 1;
    if (address == (void*)0xBAD0) return 1;
    std::memset(map, 0, 128);
    unsigned char head[] = {(unsigned char)dtype,    (unsigned char)rank,
                            (unsigned char)swizzle,  (unsigned char)l2_promotion,
                            (unsigned char)oob_fill, (unsigned char)interleave};
    std::memcpy(map, head, sizeof head);
    std::memcpy(map + 8, &address, 8);
    for (unsigned i = 0; i < rank; ++i) {
        map[16 + i] = (unsigned char)dims[i];
        map[32 + i] = (unsigned char)box[i];
        map[48 + i] = (unsigned char)element_strides[i];
        if (i + 1 < rank) std::memcpy(map + 64 + 8 * i, &strides[i], 8);
    }
    return 0;
}
int cuGetErrorName(int error, const char** name) {
    return *name = error == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_FAKE", 0;
}
int cuGetErrorString(int, const char** text) { return *text = "words of the driver", 0; }

int cuGetProcAddress_v2(const char* name, void** address, int, uint64_t, int* status) {
    static Handle self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    std::string wanted = name;
    if (wanted == "cuGetProcAddress") wanted += "_v2";
    *address = dlsym(self, wanted.c_str());
    if (status != nullptr) *status = *address == nullptr;
    return 0;
}
int cuGetProcAddress(const char* name, void** address, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, address, version, flags, nullptr);
}
}
