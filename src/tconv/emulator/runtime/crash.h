// Turns a crash of the kernel into a report, where no sanitizer does.
#pragma once

#include <csetjmp>

namespace emulator {

// While one lives, SIGSEGV, SIGBUS and SIGFPE come back through `place` instead of ending the
// process; the report then says what happened.
struct CrashGuard {
    CrashGuard();
    ~CrashGuard();
    CrashGuard(const CrashGuard&) = delete;
    CrashGuard& operator=(const CrashGuard&) = delete;

    static sigjmp_buf place;
};

}  // namespace emulator
