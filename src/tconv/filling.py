"""Ahead of time: the kernels of a model's or a layer's calls, compiled into the cache on disk.

    model, example inputs  ->  recording.py  ->  problems
    problems x targets     ->  plans         ->  sources, each once  ->  compiled, on all cores

Plans are made by Python alone, one after another. What takes long there is the search for a layer's
kernels at sizes that are not common (`tconv.sizes`): processes share it, and the cache has what
they find.

NVRTC needs no GPU. Beside the one in this process, others run in processes of their own. What a
process on the GPU plans for the same call has the same source, so the same key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tconv import choice, settings, sizes
from tconv.errors import CompileError, TconvError
from tconv.jit import files
from tconv.jit.cache import SUFFIX, DiskCache, default_cache
from tconv.jit.compile import check_arch, compile_cuda
from tconv.jit.nvrtc_process import NvrtcProcess
from tconv.jit.target import Target
from tconv.kernels.source import KernelSource
from tconv.plan import Plan, make_plan
from tconv.problem import Problem

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress

LEAST_SEARCHES = 8
"""Of a process that searches for kernels, which takes a second or two to start, a fifth each."""

DEFAULT_ARCH = "sm_90a"
"""What is compiled for where nothing else is asked for and no GPU is there."""


@dataclass(frozen=True)
class Filled:
    """What `fill` did.

    Attributes:
        architectures: as asked for, "sm_90a" or "sm_90a:114".
        calls: the calls that differ in more than their tensors' addresses.
        pytorchs: those of them that PyTorch's operator always runs, on all the architectures.
        compiled: kernels that were compiled now.
        found: kernels that were in the cache already.
        seconds: that all of it took.
        nbytes: of both kinds' files.
        folder: the cache's.
    """

    architectures: tuple[str, ...]
    calls: int
    pytorchs: int
    compiled: int
    found: int
    seconds: float
    nbytes: int
    folder: str

    def record(self) -> dict[str, Any]:
        """The attributes as JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """One line."""
        handed = f", {self.pytorchs} of them on PyTorch's operator" if self.pytorchs else ""
        return (
            f"{_plural(self.calls, 'call')} for {', '.join(self.architectures)}{handed}: "
            f"{_plural(self.compiled, 'kernel')} compiled, {self.found} already there, "
            f"{self.nbytes / 2**20:.2f} MiB in {self.folder}, {self.seconds:.1f} s"
        )


def precompile(
    model: torch.nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = True,
    arch: str | Sequence[str] | None = None,
    autocast: torch.dtype | bool | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> Filled:
    """Compile the kernels of a model's calls into the cache on disk, without a GPU.

    A process on a GPU that makes the same calls then compiles nothing. The model is copied and runs
    on tensors without values, so that it takes neither its memory nor its time; it may be on any
    device, "meta" too. Sizes, strides (memory formats) and dtypes are those of the model and the
    examples, the TF32 flags, `own_kernels` and TCONV_KERNEL those around the call. The model's
    layers must be tconv's, by `convert` or within `enable`, as in the program.

    Calls that PyTorch's operator always runs need no kernel. What `autotune` would time besides the
    kernel that the plan chooses is not compiled.

    Args:
        model: the model; it is not changed.
        *inputs: example inputs of its forward, on any device.
        kwargs: its forward's arguments by name.
        backward: also the gradients of all outputs that require grad, by parameters that require
            grad and by all floating-point inputs. Nothing where gradients are off around the call,
            as under `torch.no_grad()`.
        arch: the GPUs to compile for: "sm_90a", "sm_90a:114" with another number of
            multiprocessors than the usual product's, or a sequence of these. By default those of
            the GPUs here, or sm_90a where there is none.
        autocast: the dtype of CUDA's autocast, or False for none; by default what is on around the
            call. PyTorch turns it off on a machine without a GPU, where it must be given.
        jobs: how many compile at once; by default all cores of this process.
        progress: whether to show a bar, if stderr is a terminal.

    Returns:
        what was compiled and what was there already; prints as one line.

    Raises:
        TconvError: the model fails, or makes no call of ours, or kernels cannot be kept.
        ValueError: an architecture is not known, or an environment variable of ours has a value
            that is not allowed. Nothing was compiled then, nor above.
        CompileError: a kernel does not compile, or this NVRTC does not know an architecture.
        MissingDependencyError: cuda-bindings or NVRTC is not installed.
    """
    import torch
    from torch.nn import Module

    try:
        from tconv.recording import record
    except ImportError as error:  # modes and fake tensors have private names alone
        raise TconvError(
            f"precompile cannot run a model without a GPU on torch {torch.__version__}: {error}"
        ) from error

    settings.check()
    if not isinstance(model, Module):
        raise TypeError(f"precompile takes a torch.nn.Module, got {type(model).__name__}")
    targets = targets_of(arch)
    problems = record(model, inputs, kwargs or {}, backward=backward, autocast=autocast)
    return fill(problems, targets, jobs=jobs, progress=progress)


def targets_of(arch: str | Sequence[str] | None) -> dict[str, Target]:
    """The targets of architectures by their names; of the GPUs here, or the default, for None.

    Raises:
        ValueError: there is none of that name.
    """
    if arch is None:
        here = _targets_here()
        if here:
            return here
        arch = DEFAULT_ARCH
    names = [arch] if isinstance(arch, str) else list(arch)
    if not names:
        raise ValueError("an architecture must be named, as sm_90a, got none")
    return {name.strip(): Target.parse(name) for name in names}


def _targets_here() -> dict[str, Target]:
    import torch

    if not torch.cuda.is_available():
        return {}
    found = {Target.for_device(device) for device in range(torch.cuda.device_count())}
    return {f"{target.arch}:{target.multiprocessors}": target for target in found}


def fill(
    problems: Sequence[Problem],
    targets: Mapping[str, Target],
    *,
    jobs: int | None = None,
    progress: bool = True,
) -> Filled:
    """Compile what the problems' plans launch on the targets, and keep it in the cache on disk.

    All is planned before anything is compiled. After an error, and after Ctrl-C, the kernels that
    were finished, or were being compiled, are in the cache.

    Args:
        problems: of the calls.
        targets: by the names to call them in the summary.
        jobs: how many compile at once; None for all cores of this process.
        progress: whether to show a bar, if stderr is a terminal.

    Raises:
        NoKernelError: no kernel serves a problem.
        CompileError: a kernel does not compile, or this NVRTC does not know an architecture.
        MissingDependencyError: cuda-bindings or NVRTC is not installed.
        TconvError: the cache is off, or did not keep all.
        OSError: the cache cannot be written.
    """
    started = time.perf_counter()
    cache = _writable_cache()
    for target in targets.values():
        check_arch(target.arch, "kernels")
    with _bar(progress) as bar:
        task = bar.add_task("planning", total=None)
        jobs = jobs or len(os.sched_getaffinity(0))
        _search(problems, list(targets.values()), jobs)
        wanted, planned = _wanted(problems, list(targets.values()))
        bar.update(task, description="compiling kernels", total=len(wanted))
        keys = _compile(wanted, jobs, lambda: bar.advance(task))
    sizes = [_bytes_kept(cache, key) for key in keys]
    lost = sizes.count(0)
    if lost:
        raise TconvError(
            f"the cache {cache.folder} did not keep {lost} of {_plural(len(keys), 'kernel')}: "
            "TCONV_CACHE_LIMIT sets its size, and a warning above says if it could not be written"
        )
    compiled = sum(keys.values())
    return Filled(
        architectures=tuple(targets),
        calls=len(problems),
        pytorchs=len(problems) - len(planned),
        compiled=compiled,
        found=len(keys) - compiled,
        seconds=time.perf_counter() - started,
        nbytes=sum(sizes),
        folder=str(cache.folder),
    )


def _search(problems: Sequence[Problem], targets: Sequence[Target], jobs: int) -> None:
    """Has processes find the kernels of layers at sizes that are not common, if there are many."""
    asked = {
        (problem.layer, target): (problem, target)
        for target in targets
        for problem in problems
        if not (sizes.is_common(problem) or problem.wide_offsets)
    }
    missing = [call for call in asked.values() if not sizes.are_found(*call)]
    count = min(jobs, len(missing) // LEAST_SEARCHES)
    if count < 2:
        return
    # NOTE: no `multiprocessing`, which would run a user's script once more in each process.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", "from tconv import filling; filling.search_given()"]
    with contextlib.ExitStack() as started:
        searches = []
        for _ in range(count):
            search = subprocess.Popen(
                command, stdin=subprocess.PIPE, env=environment, start_new_session=True
            )
            started.enter_context(search)
            started.callback(search.kill)  # before the wait of the line above
            searches.append(search)
        for number, search in enumerate(searches):
            assert search.stdin is not None
            # In turn, as layers that are alike, and take as long, often follow each other. Where a
            # process ended at once, its layers' kernels are searched for here.
            with contextlib.suppress(BrokenPipeError), search.stdin as given:
                given.write(pickle.dumps(missing[number::count]))
        for search in searches:
            search.wait()


def search_given() -> None:
    """In a process of `_search`: finds the kernels for the pairs of problem and target on stdin."""
    for problem, target in pickle.load(sys.stdin.buffer):
        # Who planned them for a call raises the same.
        with contextlib.suppress(TconvError):
            sizes.kernels(problem, target)


_Wanted = dict[tuple[KernelSource, str], Plan]
"""Of each kernel, by its source and architecture, a plan that launches it."""


def _wanted(problems: Sequence[Problem], targets: Sequence[Target]) -> tuple[_Wanted, set[Problem]]:
    """The kernels to compile, and the problems whose kernels they are."""
    wanted: _Wanted = {}
    planned = set()
    for target in targets:
        for problem in problems:
            chosen = sizes.planned(problem, target)
            if _is_pytorchs(chosen):
                continue
            planned.add(problem)
            plans = [chosen]
            if not sizes.is_common(problem):  # the layer will meet others that are not
                for kernel in sizes.kernels(problem, target):
                    assert kernel.like is not None
                    plans.append(make_plan(kernel.like, target, kernel))
            for one in plans:
                for source in one.sources:
                    wanted.setdefault((source, target.arch), one)
    return wanted, planned


def _is_pytorchs(chosen: Plan) -> bool:
    """Whether PyTorch's operator runs the call on every GPU, without a timing."""
    # The GPU's name, which is not known here, only tells kernels that are ahead from timed ones.
    return not choice.own_only() and choice.verdict(chosen, "").runs == "pytorch"


def _compile(wanted: _Wanted, jobs: int, advance: Callable[[], object]) -> dict[str, bool]:
    """The kernels' keys, and whether each was compiled now; `advance` is called for each."""
    idle: queue.SimpleQueue[NvrtcProcess | None] = queue.SimpleQueue()

    def build(source: KernelSource, arch: str) -> tuple[str, bool]:
        process = idle.get()
        try:
            compiled = compile_cuda(source, arch, process=process)
        finally:
            idle.put(process)
        return compiled.key, not compiled.cached

    with contextlib.ExitStack() as ends:
        idle.put(None)  # this process
        for _ in range(min(jobs, len(wanted)) - 1):
            idle.put(ends.enter_context(NvrtcProcess()))
        threads = ThreadPoolExecutor(jobs, thread_name_prefix="tconv-precompile")
        # NOTE: those that run cannot be stopped: each is waited for, and kept.
        ends.callback(threads.shutdown, cancel_futures=True)
        pending = {threads.submit(build, *kernel): chosen for kernel, chosen in wanted.items()}
        keys = {}
        for done in as_completed(pending):
            try:
                key, compiled = done.result()
            except CompileError as error:
                error.plan = pending[done]
                raise
            keys[key] = compiled
            advance()
        return keys


def _writable_cache() -> DiskCache:
    """The cache on disk, whose folder is made and can be written.

    Raises:
        TconvError: it is off, or others could put code there.
        OSError: it cannot be made or written.
    """
    cache = default_cache()
    if cache.folder is None:
        raise TconvError("precompile fills the cache on disk, which TCONV_CACHE=0 turns off")
    reason = cache.why_not()
    if reason is not None:
        raise TconvError(reason)
    files.make_folder(cache.folder)
    if not os.access(cache.folder, os.W_OK | os.X_OK):
        raise PermissionError(13, "the cache folder cannot be written", str(cache.folder))
    return cache


def _bytes_kept(cache: DiskCache, key: str) -> int:
    assert cache.folder is not None
    try:
        return (cache.folder / f"{key}{SUFFIX}").stat().st_size
    except FileNotFoundError:
        return 0


def _bar(shown: bool) -> Progress:
    """A progress bar on stderr, if that is a terminal and it is to be shown."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hidden = not shown or not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=hidden)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
