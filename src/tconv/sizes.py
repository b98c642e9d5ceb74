"""The kernels of a layer, by the size of its images.

A kernel is compiled for a layer and a tile, and for some constants that depend on the image. A size
that networks commonly have (`is_common`) gets the kernel that is best for it. All other sizes of a
layer share `MOST_KERNELS` kernels, packings, repairs and additions among them, so that new sizes
soon compile nothing: those that together cost the least at `SAMPLES` sizes, by the model. They
follow from the layer and the GPU alone. So does the plan of a call, whatever was called before it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tconv import settings
from tconv.errors import TconvError
from tconv.jit.cache import default_cache, source_digest
from tconv.jit.compile import compile_cuda
from tconv.jit.nvrtc_process import NvrtcProcess
from tconv.jit.target import Target
from tconv.kernels.source import KERNEL_DIRECTORY, KernelSource
from tconv.plan import Candidate, Plan, family, make_plan, plan, usable
from tconv.problem import VECTOR, Problem

logger = logging.getLogger("tconv")

COMMON_FACTORS = (1, 3, 5, 7)
"""Odd factors of common sizes: 224 is 7 * 32, 640 is 5 * 128."""

VIDEO_RATIO = (9, 16)
VIDEO_FACTORS = (*COMMON_FACTORS, 15)
"""Of a video's sizes, the odd factors of what both are multiples of: 1080 is 9 * 15 * 8."""

MOST_RATIO = 5
"""Common sizes are in a ratio of whole numbers up to this: 1:1, 2:1, 4:3, 5:3, but not 7:6."""

SMALL_SIZE = 16
"""Pixels along an axis that are few, as in the depth of a network. There are few such sizes."""

MOST_KERNELS = 6
"""Kernels of a layer for sizes that are not common: all that its plans launch."""

SAMPLES = 64
"""Sizes that these kernels are chosen for."""

SURVEYED = 16
"""Samples for which all tiles are considered."""

NEAR = 1.15
"""Tiles within this factor of the best, at a surveyed sample, are considered at all samples."""

CHECKED = 256
"""Further sizes, at which some kernel must serve: with few pixels more or less, one may not."""

MOST_MISSED, MOST_ROUNDS = 4, 4
"""Sizes at which none serves that are taken as samples at a time, and how often."""

LEAST_PIXELS, MOST_PIXELS, MOST_BATCH = 8, 513, 64
"""Range of the samples: pixels along an axis, and images. Rows of the most are not aligned."""

MOST_ELEMENTS = 1 << 30
"""Elements of the largest tensor of a sample."""

MOST_PROCESSES = 8
"""That compile in the background. Each takes up to 200 MB, half of it NVRTC's library."""

WORST = 100.0
"""Where a kernel cannot serve, it counts as so many times slower than the best."""

KEY_PREFIX = "sizes-"
"""What the keys of cache entries start with that hold a layer's kernels."""

_any_sizes: dict[tuple[object, ...], Problem] = {}
_MOST_LAYERS = 1024
_expected: set[tuple[object, ...]] = set()
_waiting: collections.deque[tuple[KernelSource, str]] = collections.deque()
_compiling: set[threading.Thread] = set()
_lock = threading.Lock()


def planned(problem: Problem, target: Target) -> Plan:
    """The plan of a call on a GPU.

    Raises:
        NoKernelError: no kernel can serve.
    """
    return _planned(problem, target, settings.kernel())


@functools.lru_cache(maxsize=64)  # calls ask while they are settled, and keep what they launch
def _planned(problem: Problem, target: Target, forced: str | None) -> Plan:
    if is_common(problem) or problem.wide_offsets:
        return plan(problem, target)
    chosen = cheapest(kernels(problem, target), problem, target)
    # The layouts of the problem by that kernel are remembered under the very same object.
    return plan(problem, target) if chosen is None else make_plan(chosen[1], target, chosen[0])


def is_common(problem: Problem) -> bool:
    """Whether both sizes of the image are few, or both a small odd number times a power of two, in
    a simple ratio; or a video's. A row may have any length of that kind.
    """
    least, most = sorted((problem.height.size, problem.width.size))
    if most <= SMALL_SIZE:
        return True
    common = math.gcd(least, most)
    if (least // common, most // common) == VIDEO_RATIO:
        return common // (common & -common) in VIDEO_FACTORS
    simple = least == 1 or most // common <= MOST_RATIO
    return simple and all(size // (size & -size) in COMMON_FACTORS for size in (least, most))


def kernels(problem: Problem, target: Target) -> tuple[Candidate, ...]:
    """The kernels of a layer for all sizes that are not common.

    Args:
        problem: a call of the layer, of any size.
        target: the GPU.

    Raises:
        NoKernelError: no kernel can serve.
    """
    return _kernels(_any_size(problem), target, settings.kernel())


def are_found(problem: Problem, target: Target) -> bool:
    """Whether `kernels` are in the cache, and so need no search."""
    entry = _entry(_any_size(problem), target, settings.kernel())
    return default_cache().get(entry) is not None


def _any_size(problem: Problem) -> Problem:
    """The same for all sizes; a layer may have outputs too large for the largest of these."""
    key = problem.layer, _is_row(problem)  # a row's samples are rows
    known = _any_sizes.get(key)
    if known is not None:
        return known
    sizes = (MOST_PIXELS >> halvings for halvings in range(MOST_PIXELS.bit_length()))
    for size in sizes:
        found = _sample(problem, 1, size, size)
        if found is not None:
            if len(_any_sizes) >= _MOST_LAYERS:
                _any_sizes.clear()
            _any_sizes[key] = found
            return found
    return problem


def cheapest(
    among: Sequence[Candidate], problem: Problem, target: Target
) -> tuple[Candidate, Problem] | None:
    """The cheapest by the model of kernels made for other sizes, and the problem by that kernel.

    None if none can serve.
    """
    best, least = None, math.inf
    for kernel in among:
        served = _served(kernel, problem, target)
        if served is not None and (found := _cost(kernel, served, target)) < least:
            best, least = (kernel, served), found
    return None if best is None else (dataclasses.replace(best[0], cost=least), best[1])


def cost(kernel: Candidate, problem: Problem, target: Target) -> float:
    """Modelled seconds of a kernel made for another size; infinite if it cannot serve."""
    served = _served(kernel, problem, target)
    return math.inf if served is None else _cost(kernel, served, target)


def _cost(kernel: Candidate, served: Problem, target: Target) -> float:
    return family(kernel.stem).cost(served, target, kernel.tile)


def _served(kernel: Candidate, problem: Problem, target: Target) -> Problem | None:
    """The problem by a kernel made for another size; None if it cannot serve."""
    served = None if kernel.like is None else problem.by(kernel.like)
    if served is None:
        return None
    of_kernel = family(kernel.stem)
    if of_kernel.why_not(served, target) or of_kernel.tile_why_not(served, target, kernel.tile):
        return None
    return served


def expect(problem: Problem, chosen: Plan) -> None:
    """Prepares for more sizes: a layer's first compiles the kernels of all, in the background.

    Args:
        problem: of a call on our kernels.
        chosen: its plan, whose own kernels the call compiles.
    """
    layer = problem.layer, chosen.target
    if chosen.problem.like is None or layer in _expected:
        return
    wanted: dict[KernelSource, None] = {}
    for kernel in kernels(problem, chosen.target):
        assert kernel.like is not None
        wanted |= dict.fromkeys(make_plan(kernel.like, chosen.target, kernel).sources)
    with _lock:
        if layer in _expected:
            return
        _expected.add(layer)
        _waiting.extend((s, chosen.target.arch) for s in wanted if s not in chosen.sources)
        # The other cores are left to the calls, which compile what they need at once.
        most = max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) // 2))
        started = min(len(_waiting), most - len(_compiling))
        threads = [threading.Thread(target=_compile, name="tconv-sizes") for _ in range(started)]
        _compiling.update(threads)
    for thread in threads:
        try:
            thread.start()
        except RuntimeError as error:  # no more threads; the call that needs a kernel compiles it
            _compiling.discard(thread)
            logger.debug("no kernels for more sizes of %s: %s", problem, error)


def _compile() -> None:
    """Compiles what waits in a process, until nothing does or the interpreter ends.

    NOTE: no daemon, as NVRTC may crash when the process ends around it. And no ThreadPoolExecutor,
    which compiles all that waits before it lets the process end.
    """
    with NvrtcProcess() as process:
        while True:
            with _lock:
                if not _waiting or not threading.main_thread().is_alive():
                    _compiling.discard(threading.current_thread())
                    return
                source, arch = _waiting.popleft()
            try:
                compile_cuda(source, arch, process=process)
            except Exception as error:  # the call that needs it raises
                logger.debug("a kernel for more sizes: %s", error)


@functools.lru_cache(maxsize=_MOST_LAYERS)
def _kernels(problem: Problem, target: Target, forced: str | None) -> tuple[Candidate, ...]:
    entry = _entry(problem, target, forced)
    found = _read(entry, problem)
    if found is None:
        found = _find(problem, target)
        about = {"kind": "sizes", "stem": KEY_PREFIX + problem.direction, "arch": target.arch}
        record = json.dumps([_record(kernel) for kernel in found], indent=1)
        default_cache().put(entry, record.encode(), about)
    logger.debug("%s at any size: %s", problem, ", ".join(f"{k.stem} {k.tile}" for k in found))
    return found


def _find(problem: Problem, target: Target) -> tuple[Candidate, ...]:
    """The kernels that together cost the least at the samples, and serve nearly all sizes."""
    samples = _samples(problem)
    tiles: dict[tuple[str, Any], None] = {}
    for sample in samples[:SURVEYED]:
        of_sample = usable(sample, target)
        near = [c for c in of_sample if c.cost <= NEAR * of_sample[0].cost]
        tiles |= {(candidate.stem, candidate.tile): None for candidate in near}
    # The best kernel of each sample. Several may have the same text.
    pool: dict[tuple[KernelSource, ...] | None, Candidate] = {}
    pooled = 0
    for _ in range(MOST_ROUNDS):
        for sample in samples[pooled:]:
            made = [Candidate(stem, tile, None, math.inf, sample) for stem, tile in tiles]
            found = cheapest(made, sample, target)
            best = _own(sample, target) if found is None else found[0]
            texts = _texts(best, target)
            # A kernel that does not depend on the alignment of x serves any.
            loose = dataclasses.replace(
                best, like=dataclasses.replace(sample, source_aligned=False)
            )
            same = not sample.source_aligned or _texts(loose, target) == texts
            made_for = loose if same else best
            kept = pool.get(texts)
            if kept is None or _strictness(made_for) < _strictness(kept):
                pool[texts] = made_for
        pooled = len(samples)
        together = _cheapest_set(pool, samples, target)
        missed = (
            size
            for size in _checked(problem)
            if all(_served(kernel, size, target) is None for kernel in together)
        )
        samples += itertools.islice(missed, MOST_MISSED)
        if len(samples) == pooled:
            break
    return together


def _cheapest_set(
    pool: dict[tuple[KernelSource, ...] | None, Candidate], samples: list[Problem], target: Target
) -> tuple[Candidate, ...]:
    """Of kernels by their sources, those that together cost the least at the samples."""
    among = list(pool.values())
    times = [[cost(kernel, sample, target) for kernel in among] for sample in samples]
    losses = [[math.log(min(time / min(row), WORST)) for time in row] for row in times]
    of_kernels = list(zip(*losses, strict=True))
    sources = [frozenset(texts or ()) for texts in pool]
    _, chosen = min(_completed(first, of_kernels, sources) for first in range(len(among)))
    return tuple(among[index] for index in chosen)


def _completed(
    first: int, losses: Sequence[Sequence[float]], sources: Sequence[frozenset[KernelSource]]
) -> tuple[float, list[int]]:
    """A kernel and those that are added to it: greedily, by what each gains for a new source.

    Returns their loss too, summed over the samples.

    Args:
        first: its index.
        losses: of each kernel at each sample: the logarithm of its time over the least.
        sources: of each kernel. Together they may have `MOST_KERNELS`.
    """
    chosen, held, least = [first], sources[first], losses[first]
    while True:
        best, most = None, 1e-9
        for index, of_kernel in enumerate(losses):
            new = len(sources[index] - held)
            if len(held) + new > MOST_KERNELS:
                continue
            gain = sum(a - b for a, b in zip(least, of_kernel, strict=True) if b < a)
            if gain / max(new, 1) > most:
                best, most = index, gain / max(new, 1)
        if best is None:
            return sum(least), chosen
        chosen.append(best)
        held |= sources[best]
        least = list(map(min, least, losses[best]))


def _own(problem: Problem, target: Target) -> Candidate:
    """The kernel that is best for a problem, as one made for it."""
    return dataclasses.replace(usable(problem, target)[0], like=problem)


def _texts(kernel: Candidate, target: Target) -> tuple[KernelSource, ...] | None:
    """The sources of a kernel's launches; None if it does not serve its own problem."""
    assert kernel.like is not None
    if cost(kernel, kernel.like, target) == math.inf:
        return None
    return make_plan(kernel.like, target, kernel).sources


def _strictness(kernel: Candidate) -> tuple[int, ...]:
    """Of kernels with the same text, the one with the least serves the most sizes."""
    like = kernel.like
    assert like is not None
    width = like.width
    aligned = math.gcd(width.size, VECTOR) if like.rows_aligned else 0
    return math.gcd(width.output_size, VECTOR), aligned, -width.size


def _samples(problem: Problem) -> list[Problem]:
    """Sizes; the same for each layer that can have them.

    Pixels along an axis are evenly distributed in the logarithm or, in every second sample, as
    they are.
    """
    draw = random.Random(0)
    found: list[Problem] = []
    # The corners of the range come first, so that some kernel serves each of them.
    corners = list(itertools.product((0, 1), repeat=3))
    for index in range(4 * SAMPLES):
        at = corners[index] if index < len(corners) else [draw.random() for _ in range(3)]
        batch = int(MOST_BATCH ** at[0])
        height, width = (
            round(LEAST_PIXELS + (MOST_PIXELS - LEAST_PIXELS) * part)
            if index % 2
            else round(LEAST_PIXELS * (MOST_PIXELS / LEAST_PIXELS) ** part)
            for part in at[1:]
        )
        sample = _sample(problem, batch, height, width)
        if sample is not None and len(found) < SAMPLES:
            found.append(sample)
    return found or [problem]


def _checked(problem: Problem) -> Iterator[Problem]:
    """Sizes, evenly distributed."""
    draw = random.Random(1)
    for _ in range(CHECKED):
        height, width = (draw.randint(LEAST_PIXELS, MOST_PIXELS) for _ in range(2))
        size = _sample(problem, draw.randint(1, MOST_BATCH), height, width)
        if size is not None:
            yield size


def _sample(problem: Problem, batch: int, height: int, width: int) -> Problem | None:
    """The layer at another size; None if it has no output there, or is too large.

    A layer of one dimension has a row as long as the image would have pixels.
    """
    if _is_row(problem):
        height, width = 1, height * width
    try:
        sample = problem.resized(batch, height, width)
    except ValueError:
        return None
    largest = max(math.prod(sample.x_shape), math.prod(sample.y_shape))
    return sample if largest <= MOST_ELEMENTS else None


def _is_row(problem: Problem) -> bool:
    """Whether it is of one dimension."""
    height = problem.height
    return height.size == height.kernel == height.stride == 1


def _entry(problem: Problem, target: Target, forced: str | None) -> str:
    """The cache's key: all that the choice depends on, the models of all kernels among it."""
    gpu = (target.arch, target.multiprocessors, target.shared_per_block)
    parts = [repr(problem), repr(gpu), str(forced), _models()]
    return f"{KEY_PREFIX}{problem.direction}-{source_digest('', [], parts)}"


@functools.cache
def _models() -> str:
    """Digest of what a choice is made by: the Python code and the costs of all kernels, and the
    geometry and the plan.
    """
    endings = ("py", "json")
    files = sorted((p for e in endings for p in KERNEL_DIRECTORY.rglob(f"*.{e}")), key=str)
    own = (Path(__file__).with_name(name) for name in ("sizes.py", "plan.py", "problem.py"))
    return source_digest("", [], [path.read_text() for path in (*files, *own)])


def _record(kernel: Candidate) -> dict[str, object]:
    """A kernel as JSON values."""
    like = kernel.like
    assert like is not None
    sizes = {"batch": like.batch, "height": like.height.size, "width": like.width.size}
    return {
        "kernel": kernel.stem,
        "tile": str(kernel.tile),
        **sizes,
        "aligned": like.source_aligned,
    }


def _read(entry: str, problem: Problem) -> tuple[Candidate, ...] | None:
    """The kernels in the cache; None if there are none, or none that can be read."""
    payload = default_cache().get(entry)
    if payload is None:
        return None
    try:
        # NOTE: a list, as a generator turns StopIteration into a RuntimeError.
        return tuple([_candidate(one, problem) for one in json.loads(payload)])
    except (ValueError, KeyError, TypeError, StopIteration, RecursionError, TconvError):
        logger.warning("the cache entry %s holds no kernels; they are found again", entry)
        return None


def _candidate(one: Any, problem: Problem) -> Candidate:
    """The kernel of a record.

    Raises:
        ValueError, KeyError, TypeError, StopIteration, TconvError: it is none of this direction.
    """
    of_kernel = family(one["kernel"])
    sizes = [one[name] for name in ("batch", "height", "width")]
    if problem.direction != of_kernel.DIRECTION or any(type(size) is not int for size in sizes):
        raise ValueError("no such kernel")
    return Candidate(
        stem=one["kernel"],
        tile=next(tile for tile in of_kernel.TILES if str(tile) == one["tile"]),
        refusal=None,
        cost=math.inf,
        like=dataclasses.replace(problem.resized(*sizes), source_aligned=one["aligned"] is True),
    )
