#include "fiber.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <unistd.h>

#ifdef TCONV_SANITIZE
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// -DTCONV_UCONTEXT uses the slow ucontext on any machine.
#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(TCONV_UCONTEXT)
#define TCONV_UCONTEXT
#endif
#ifdef TCONV_UCONTEXT
#include <ucontext.h>
#endif

namespace emulator {
namespace {

// Unused pages take no memory, so stacks are large. Instrumented frames need that.
constexpr std::size_t stack_bytes = 512 * 1024;

void allocate_stack(Fiber& fiber) {
    std::size_t guard = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    void* memory = mmap(nullptr, stack_bytes + guard, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        std::perror("tconv emulator: no memory for a thread's stack");
        std::abort();
    }
    mprotect(memory, guard, PROT_NONE);  // an overflow faults here
    fiber.stack = static_cast<unsigned char*>(memory) + guard;
    fiber.stack_bytes = stack_bytes;
}

}  // namespace

#ifdef TCONV_UCONTEXT

void prepare(Fiber& fiber, void (*entry)()) {
    if (fiber.stack == nullptr) allocate_stack(fiber);
    auto* context = static_cast<ucontext_t*>(fiber.stack_pointer);
    if (context == nullptr) context = new ucontext_t;
    getcontext(context);
    context->uc_stack.ss_sp = fiber.stack;
    context->uc_stack.ss_size = fiber.stack_bytes;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
    fiber.stack_pointer = context;
}

static void switch_stacks(Fiber& from, Fiber& to) {
    if (from.stack_pointer == nullptr) from.stack_pointer = new ucontext_t;
    swapcontext(static_cast<ucontext_t*>(from.stack_pointer),
                static_cast<ucontext_t*>(to.stack_pointer));
}

#else

// Saves the callee-saved registers, stores the stack pointer in *save, and switches to `load`.
extern "C" void tconv_emulator_switch(void** save, void* load);

#if defined(__x86_64__)
constexpr std::size_t saved_words = 6;  // then the return address
constexpr std::size_t return_word = 6;
asm(R"(
    .text
    .globl tconv_emulator_switch
    .hidden tconv_emulator_switch
    .type tconv_emulator_switch, @function
tconv_emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size tconv_emulator_switch, .-tconv_emulator_switch
    .section .note.GNU-stack,"",@progbits
    .text
)");
#else
constexpr std::size_t saved_words = 20;  // x19 to x30 and d8 to d15
constexpr std::size_t return_word = 11;  // x30
asm(R"(
    .text
    .globl tconv_emulator_switch
    .hidden tconv_emulator_switch
    .type tconv_emulator_switch, %function
tconv_emulator_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size tconv_emulator_switch, .-tconv_emulator_switch
    .section .note.GNU-stack,"",%progbits
    .text
)");
#endif

void prepare(Fiber& fiber, void (*entry)()) {
    if (fiber.stack == nullptr) allocate_stack(fiber);
#ifdef TCONV_SANITIZE
    // An abandoned run leaves poisoned red zones on the stack.
    __asan_unpoison_memory_region(fiber.stack, fiber.stack_bytes);
#endif
    // Two words stay free above the first frame. The entry then finds the stack as after a call,
    // and a debugger's backtrace ends at a zero.
    auto* top = reinterpret_cast<std::uintptr_t*>(fiber.stack + fiber.stack_bytes) - 2;
    top[0] = top[1] = 0;
    std::uintptr_t* frame = top - saved_words;
    for (std::size_t word = 0; word < saved_words; ++word) frame[word] = 0;
    frame[return_word] = reinterpret_cast<std::uintptr_t>(entry);
    fiber.stack_pointer = frame;
}

static void switch_stacks(Fiber& from, Fiber& to) {
    tconv_emulator_switch(&from.stack_pointer, to.stack_pointer);
}

#endif

#ifdef TCONV_SANITIZE
namespace {
const void* main_stack = nullptr;
std::size_t main_stack_bytes = 0;
bool main_stack_known = false;
}  // namespace
#endif

void switch_fiber(Fiber& from, Fiber& to) {
#ifdef TCONV_SANITIZE
    const void* stack = to.stack != nullptr ? to.stack : main_stack;
    std::size_t bytes = to.stack != nullptr ? to.stack_bytes : main_stack_bytes;
    __sanitizer_start_switch_fiber(&from.sanitizer_state, stack, bytes);
    switch_stacks(from, to);
    __sanitizer_finish_switch_fiber(from.sanitizer_state, nullptr, nullptr);
#else
    switch_stacks(from, to);
#endif
}

void entered([[maybe_unused]] const Fiber& fiber) {
#ifdef TCONV_SANITIZE
    // The first switch starts on the thread's own stack, and learns where that is.
    const void* stack;
    std::size_t bytes;
    __sanitizer_finish_switch_fiber(fiber.sanitizer_state, &stack, &bytes);
    if (!main_stack_known) {
        main_stack = stack;
        main_stack_bytes = bytes;
        main_stack_known = true;
    }
#endif
}

}  // namespace emulator
