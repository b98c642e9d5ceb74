// A sanitized kernel's main(). It reads a launch from a file, runs it on red-zoned copies of its
// memory, and writes the copies and the report back to the file.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "state.h"
#include "tensor_map.h"

#ifdef TCONV_SANITIZE
#include <sanitizer/asan_interface.h>
#endif

extern "C" const emulator::Kernel tconv_emulator_kernel;
extern "C" int tconv_emulator_launch(const emulator::Kernel* kernel, const emulator::Launch* launch,
                                     emulator::Report* report);

// NOTE: no fake stacks of the sanitizer: a thread's frames must stay on its fiber's stack.
extern "C" EMULATOR_API const char* __asan_default_options() {
    return "detect_leaks=0:detect_stack_use_after_return=0:handle_sigill=1";
}

extern "C" EMULATOR_API const char* __ubsan_default_options() { return "halt_on_error=1"; }

namespace {

using emulator::Allocation;
using emulator::FieldKind;

// One allocation of the launch, with the layout of records.py.
struct Piece {
    uint64_t address;  // in the launching process
    uint64_t bytes;
    uint64_t offset;  // of its contents in the file
    // For reports: its address in this process, and the arguments that point into it.
    uint64_t copy;
    char names[96];
};

// The head of the file. The arguments, the pieces and their contents follow.
struct Request {
    emulator::Launch launch;
    uint64_t arguments_offset;
    uint64_t pieces_offset;
    uint64_t piece_count;
    emulator::Report report;
};

// With the original's offset from a multiple of 64 bytes, and at the end of its memory.
unsigned char* red_zoned_copy(const Piece& piece, const unsigned char* contents) {
    uint64_t lead = piece.address % 64;
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, lead + piece.bytes + (piece.bytes == 0)) != 0) std::abort();
    auto* copy = static_cast<unsigned char*>(memory) + lead;
    std::memcpy(copy, contents, piece.bytes);
#ifdef TCONV_SANITIZE
    __asan_poison_memory_region(memory, lead);
    if (piece.bytes == 0) __asan_poison_memory_region(memory, lead + 1);
#endif
    return copy;
}

// The piece that contains a pointer of the launching process, or ends at it.
Piece* find_piece(uint64_t address, Piece* pieces, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
        if (address - pieces[i].address < pieces[i].bytes) return &pieces[i];
    }
    for (uint64_t i = 0; i < count; ++i) {
        if (address == pieces[i].address + pieces[i].bytes) return &pieces[i];
    }
    return nullptr;
}

void add_name(Piece& piece, const char* name) {
    std::size_t used = std::strlen(piece.names);
    std::snprintf(piece.names + used, sizeof piece.names - used, "%s%s", used ? ", " : "", name);
}

int run(unsigned char* file) {
    auto& request = *reinterpret_cast<Request*>(file);
    auto* pieces = reinterpret_cast<Piece*>(file + request.pieces_offset);
    std::vector<Allocation> allocations;
    for (uint64_t i = 0; i < request.piece_count; ++i) {
        unsigned char* copy = red_zoned_copy(pieces[i], file + pieces[i].offset);
        pieces[i].copy = reinterpret_cast<uint64_t>(copy);
        allocations.push_back({pieces[i].copy, pieces[i].bytes});
    }

    uint64_t bytes = request.launch.argument_bytes;
    void* arguments = nullptr;
    if (posix_memalign(&arguments, 128, bytes) != 0) std::abort();
    std::memcpy(arguments, file + request.arguments_offset, bytes);
    const emulator::Kernel& kernel = tconv_emulator_kernel;
    for (uint64_t i = 0; i < kernel.field_count && bytes == kernel.argument_bytes; ++i) {
        const emulator::Field& field = kernel.fields[i];
        if (field.kind == FieldKind::value) continue;
        uint64_t offset = field.offset;
        if (field.kind == FieldKind::tensor_map) offset += emulator::tensor_map_address_offset;
        uint64_t address;
        std::memcpy(&address, static_cast<char*>(arguments) + offset, sizeof address);
        if (address == 0) continue;
        Piece* piece = find_piece(address, pieces, request.piece_count);
        if (piece == nullptr) {
            request.report.failed = 1;
            request.report.thread = request.report.block = -1;
            std::snprintf(request.report.message, sizeof request.report.message,
                          "its argument `%s` points into none of the launch's allocations",
                          field.name);
            return 3;
        }
        add_name(*piece, field.name);
        uint64_t copy = piece->copy + (address - piece->address);
        std::memcpy(static_cast<char*>(arguments) + offset, &copy, sizeof copy);
    }

    emulator::Launch launch = request.launch;
    launch.arguments = arguments;
    launch.allocations = allocations.data();
    launch.allocation_count = allocations.size();
    if (tconv_emulator_launch(&kernel, &launch, &request.report) != 0) return 3;
    for (uint64_t i = 0; i < request.piece_count; ++i) {
        std::memcpy(file + pieces[i].offset, reinterpret_cast<void*>(pieces[i].copy),
                    pieces[i].bytes);
    }
    return 0;
}

}  // namespace

int main(int count, char** values) {
    int descriptor = count == 2 ? open(values[1], O_RDWR) : -1;
    struct stat status;
    if (descriptor < 0 || fstat(descriptor, &status) != 0) {
        std::fprintf(stderr, "usage: %s <request>, a file that tconv.emulator wrote\n", values[0]);
        return 2;
    }
    void* file = mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ | PROT_WRITE,
                      MAP_SHARED, descriptor, 0);
    if (file == MAP_FAILED) {
        std::perror("mmap");
        return 2;
    }
    return run(static_cast<unsigned char*>(file));
}
