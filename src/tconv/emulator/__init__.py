"""Runs the `.cu` kernels on the CPU: the same text, compiled by the host's C++ compiler.

    from tconv.emulator import EmulatedKernel

    kernel = EmulatedKernel(source)                 # a tconv.kernels.source.KernelSource
    kernel.launch(grid, source.pack(input=a.ctypes.data, ...),
                  allocations=[(a.ctypes.data, a.nbytes), ...])

Execution. The threads of a block are fibers on one thread of the process. Blocks run one after
another. A thread runs until it waits: at `__syncthreads`, a shuffle, a vote, a named barrier, an
mbarrier. include/ptx has a host implementation of each function of `kernels/ptx`. runtime/ has the
threads, barriers and memory that these need.

Checks. It finds mistakes that a GPU lets pass, or makes hard to find:

- Shared memory starts as NaN (all bits set) in every block.
- Asynchronous copies (cp.async, bulk, tensor maps) land at the wait for them. Until then their
  destination holds NaN. wgmma reads its operands and writes its accumulators at the wait for its
  group. So a missing or early wait gives NaN or old values.
- A barrier that not all threads reach, and a deadlock of a block, are errors that list where all
  threads stand.
- A tensor store or wgmma that reads ordinary stores without a fence.proxy.async in between.
- Accesses to accumulators of a wgmma in flight, or stores to them before it without a wgmma.fence.
- Misaligned or out-of-bounds accesses by functions of ptx/, and the rules of tensor maps and
  mbarriers.
- With `sanitize=True` (TCONV_SANITIZE=1), by AddressSanitizer and UndefinedBehaviorSanitizer: any
  access out of a tensor, of a shared array or of the launch's dynamic shared memory; reads of bytes
  that a copy has not delivered; misaligned vectors, overlong shifts, signed overflow.
- Races: `schedule="reverse"` and `schedule="random:<seed>"` run the threads in another order. A
  result that depends on it lacks a barrier.

Each is an `EmulatorError` that names the kernel, block, thread and source line.

Not emulated: clusters of more than one block, several streams, timing. Some races show in no
schedule, because a thread runs without interruption from wait to wait. Tensor cores sum more
exactly here than on a GPU. TF32 operands are truncated, as there.

Debugging. `printf` works in kernels. The compiled text lies in sources/ of the cache folder. The
compiled library (`EmulatedKernel.path`) exists as long as the process. A sanitized kernel is an
executable, for a debugger:

    kernel = EmulatedKernel(source, sanitize=True)
    kernel.launch(grid, arguments, allocations=..., keep=Path("request"))
    $ gdb --args request.program request
    (gdb) break general_forward          # the kernel: once for each thread
    (gdb) print emulator::thread_index
    (gdb) break __asan::ReportGenericError
    (gdb) break emulator::fail           # where the emulator itself reports

A kernel that crashes in this process is reported without its line. TCONV_SANITIZE=1 reports it.

The compiler is $CXX, else g++, else clang++. With clang++ static shared arrays have no red zones:
an overrun is found only if the compiler knows which array the pointer comes from.

Limits of kernels: static shared memory (TCONV_SHARED) only in the kernel itself, no standard
header, no loop that polls memory without a function that waits, blocks of one dimension.
"""

from __future__ import annotations

from tconv.emulator.launch import EmulatedKernel

__all__ = ["EmulatedKernel"]
