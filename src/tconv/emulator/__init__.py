"""Runs the `.cu` kernels on the CPU: the same text, compiled by the host's C++ compiler.

    from tconv.emulator import EmulatedKernel

    kernel = EmulatedKernel(source)                 # a tconv.kernels.source.KernelSource
    kernel.launch(grid, source.pack(input=a.ctypes.data, ...),
                  allocations=[(a.ctypes.data, a.nbytes), ...])

What is emulated. A block's threads are fibers that take turns on one thread of the process, and
blocks run one after another. A thread runs until it waits: at `__syncthreads`, a shuffle, a vote,
a named barrier, an mbarrier. `#include <ptx/...>` finds, here, a host implementation of each
function of `kernels/ptx` (include/ptx); what they need of the runtime is in runtime/.

What it finds that a GPU lets pass, or makes hard to find:

- Shared memory starts as NaN (all bits set) in every block.
- Asynchronous copies (cp.async, bulk, tensor maps) land when they are waited for and not before;
  until then their destination holds NaN. wgmma reads its operands and writes its accumulators when
  its group is waited for. So a missing or early wait gives NaN or old values.
- A barrier that not all threads reach, and a block in which no thread can go on, are errors that
  list where all threads stand.
- A bulk store, or a wgmma, that reads what threads wrote without a fence.proxy.async in between.
- Accumulators touched while a wgmma is under way, or written before one without a wgmma.fence.
- Misaligned or out-of-bounds accesses by functions of ptx/, the rules of tensor maps and mbarriers.
- With `sanitize=True` (TCONV_SANITIZE=1), by AddressSanitizer and UndefinedBehaviorSanitizer: any
  access out of a tensor, of a shared array or of the launch's dynamic shared memory; reads of bytes
  that a copy has not delivered; misaligned vectors, overlong shifts, signed overflow.
- Races: `schedule="reverse"` and `schedule="random:<seed>"` run the threads in another order. A
  result that depends on it lacks a barrier.

Each is an `EmulatorError` that names the kernel, block, thread and source line.

What it does not do: clusters of more than one block, several streams, timing, and the races that
no order of whole threads' turns shows. Products of the tensor cores are summed more exactly than
on a GPU; TF32 operands are cut, not rounded, as there.

Debugging. `printf` works in kernels. The text that a kernel was compiled from lies in the cache
folder's sources/; the compiled library (`EmulatedKernel.path`) is there as long as the process. For
a debugger use a sanitized kernel, which is an executable of its own:

    kernel = EmulatedKernel(source, sanitize=True)
    kernel.launch(grid, arguments, allocations=..., keep=Path("request"))
    $ gdb --args request.program request
    (gdb) break general_forward          # the kernel: once for each thread
    (gdb) print emulator::thread_index
    (gdb) break __asan::ReportGenericError
    (gdb) break emulator::fail           # where the emulator itself reports

A kernel that crashes in this process is reported too, without its line; TCONV_SANITIZE=1 has it.

The compiler is $CXX, else g++, else clang++. With clang++ static shared arrays have no red zones:
an overrun is seen where the compiler can tell which array the pointer comes from.

Limits of kernels: static shared memory (TCONV_SHARED) only at the kernel's own scope; no standard
header; no spinning on memory without a call that waits or polls; blocks of one dimension.
"""

from __future__ import annotations

from tconv.emulator.launch import EmulatedKernel

__all__ = ["EmulatedKernel"]
