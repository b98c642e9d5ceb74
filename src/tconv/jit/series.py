"""`Series`: launches one behind the other, which the host soon starts all at once."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from tconv.errors import LaunchError
from tconv.jit import libraries
from tconv.jit.module import Kernel, Launch, current_context, relaxed_capture

GRAPH_AFTER = 8
"""Starts of a series after which it becomes a CUDA graph.

To make one takes the host some 20 us, and it saves 8 of each start of three launches (an H200's
host, benchmarks/results/h200/host_graphs.log).
"""

_capturing = threading.Lock()
_MOST_HANDLES = 64
_handles: dict[int, Any] = {}


class Series:
    """Launches that belong together, in groups of which all but the first are dependent.

    Started often, it is a CUDA graph of the same launches, which costs the host one call for all.
    A graph runs them as they would run in the stream.

    Attributes:
        launches: in order.

    Args:
        groups: at least one launch each, all of one device; see `Launch.start` for dependent ones.
    """

    __slots__ = ("_graph", "_groups", "_starts_left", "launches")

    def __init__(self, *groups: Sequence[Launch]) -> None:
        self._groups = tuple([tuple(group) for group in groups])
        self.launches = sum(self._groups, ())
        self._graph: _Graph | None = None
        self._starts_left = GRAPH_AFTER if len(self.launches) > 1 else 0

    def start(self, stream: int = 0) -> None:
        """Starts the launches on a stream that does not capture, and returns at once.

        Args:
            stream: the stream's handle, of the kernels' device.

        Raises:
            LaunchError: as `Launch.start`.
        """
        graph = self._graph
        if graph is not None and graph.start(stream):
            return
        self.start_each(stream)
        if self._starts_left:
            self._starts_left -= 1
            if not self._starts_left:
                self._graph = _captured(self)

    def start_each(self, stream: int = 0) -> None:
        """Starts the launches one by one, on a stream that may capture.

        Args:
            stream: as for `start`.

        Raises:
            LaunchError: as `Launch.start`.
        """
        for group in self._groups:
            dependent = False
            for launch in group:
                launch.start(stream, dependent)
                dependent = True


class _Graph:
    """A CUDA graph that can be launched on any stream of its device. Thread-safe.

    Args:
        launches: what it launches; their kernels stay loaded as long as it is there.
        executable: the driver's handle.
    """

    __slots__ = ("__weakref__", "_executable", "_launch", "_launches", "_lock")

    def __init__(self, launches: tuple[Launch, ...], executable: Any) -> None:
        driver = libraries.driver()
        self._launches = launches
        self._executable = executable
        self._launch = driver.cuGraphLaunch
        # Two threads must not launch one graph at a time.
        self._lock = threading.Lock()
        device = launches[0].kernel.device
        weakref.finalize(self, _destroy, device, executable).atexit = False

    def start(self, stream: int) -> bool:
        """Launches the graph; False where another thread does, or the driver refuses."""
        if not self._lock.acquire(False):
            return False
        try:
            (result,) = self._launch(self._executable, _handles.get(stream) or _handle(stream))
        finally:
            self._lock.release()
        return not result


def _handle(stream: int) -> Any:
    """A stream as the bindings want it: they make such an object of a number in each call."""
    if len(_handles) >= _MOST_HANDLES:
        _handles.clear()
    made = _handles[stream] = libraries.driver().CUstream(stream)
    return made


def _destroy(device: int, executable: Any) -> None:
    """Lets go of a graph. The driver waits until it does not run."""
    with current_context(device), relaxed_capture():
        libraries.driver().cuGraphExecDestroy(executable)


def _captured(series: Series) -> _Graph | None:
    """The launches as a graph; None where the driver does not make one."""
    driver = libraries.driver()
    launches = series.launches
    kernel: Kernel = launches[0].kernel
    with _capturing, current_context(kernel.device), relaxed_capture():
        stream = _capture_stream(kernel.device)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        if stream is None or driver.cuStreamBeginCapture(stream, mode)[0]:
            return None
        whole = False
        try:
            series.start_each(int(stream))
            whole = True
        except LaunchError:
            pass
        finally:
            result, graph = driver.cuStreamEndCapture(stream)
        if result:
            return None
        result, executable = driver.cuGraphInstantiate(graph, 0) if whole else (1, None)
        driver.cuGraphDestroy(graph)
    return None if result else _Graph(launches, executable)


@functools.cache
def _capture_stream(device: int) -> Any:
    """A stream of the current device that waits for no other; None if it cannot be made."""
    driver = libraries.driver()
    result, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    return None if result else stream
