#include "crash.h"

#include <csignal>
#include <cstdint>
#include <cstdlib>

#include "state.h"

namespace emulator {

sigjmp_buf CrashGuard::place;

namespace {

constexpr int signals[] = {SIGSEGV, SIGBUS, SIGFPE};
constexpr std::size_t stack_bytes = 64 * 1024;

struct sigaction before[3];
stack_t stack_before;
// A handler needs its own stack: the thread's may have overflowed.
unsigned char handler_stack[stack_bytes];

void handle(int signal, siginfo_t* info, void*) {
    if (signal == SIGFPE) {
        fail_at_thread("an integer was divided by zero; TCONV_SANITIZE=1 names the line");
    } else {
        fail_at_thread(
            "out of bounds: the address %p is in no memory of this process (or the thread's stack "
            "overflowed); TCONV_SANITIZE=1 names the line",
            info->si_addr);
    }
    siglongjmp(CrashGuard::place, 1);
}

}  // namespace

CrashGuard::CrashGuard() {
    stack_t stack = {};
    stack.ss_sp = handler_stack;
    stack.ss_size = stack_bytes;
    sigaltstack(&stack, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 3; ++i) sigaction(signals[i], &action, &before[i]);
}

CrashGuard::~CrashGuard() {
    for (int i = 0; i < 3; ++i) sigaction(signals[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
}

}  // namespace emulator
