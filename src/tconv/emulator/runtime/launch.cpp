// One launch: its blocks one after another.
#include "copies.h"
#include "crash.h"
#include "state.h"

namespace emulator {
namespace {

void run_all(const Kernel& kernel, const Launch& launch, Report& report) {
    block.kernel = &kernel;
    block.launch = &launch;
    block.report = &report;
    block.thread_count = launch.threads;
    block_dim = {launch.threads, 1, 1};
    if (launch.argument_bytes != kernel.argument_bytes) {
        fail_at_thread("its Arguments take %llu bytes, the launcher brought %llu",
                       (unsigned long long)kernel.argument_bytes,
                       (unsigned long long)launch.argument_bytes);
        return;
    }
    grid_dim = {launch.grid[0], launch.grid[1], launch.grid[2]};
    prepare_threads(launch.threads);
    allocate_shared(kernel, launch.shared_bytes);
    if (report.failed) return;
    for (uint32_t z = 0; z < launch.grid[2]; ++z) {
        for (uint32_t y = 0; y < launch.grid[1]; ++y) {
            for (uint32_t x = 0; x < launch.grid[0]; ++x) {
                block_index = {x, y, z};
                block.linear = (z * launch.grid[1] + y) * launch.grid[0] + x;
                report.block = static_cast<int32_t>(block.linear);
                reset_warps();
                reset_barriers();
                reset_mbarriers();
                reset_copies();
                reset_products();
                poison_shared();
                reset_views();
                run_block();
                if (report.failed) return;
                check_shared_guards();
                if (report.failed) return;
            }
        }
    }
}

}  // namespace
}  // namespace emulator

extern "C" EMULATOR_API int tconv_emulator_launch(const emulator::Kernel* kernel,
                                                  const emulator::Launch* launch,
                                                  emulator::Report* report) {
    *report = {};
    report->thread = -1;
#ifdef TCONV_SANITIZE
    emulator::run_all(*kernel, *launch, *report);
#else
    emulator::CrashGuard guard;
    if (sigsetjmp(emulator::CrashGuard::place, 1) == 0) {
        emulator::run_all(*kernel, *launch, *report);
    }
#endif
    emulator::current = nullptr;
    emulator::release_shared();
    return report->failed;
}
