"""NVRTC in a process of its own, for kernels that are compiled beside each other.

NVRTC 13.0 holds a lock over half of a compilation: of seven kernels in as many threads the last is
done after five seconds, where each alone takes one and a half. 13.5 does not; older ones were not
looked at.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

_PACKAGE = Path(__file__).resolve().parent.parent

# The package without its __init__, which imports torch. That takes longer than a compilation.
_CODE = f"""
import sys, types
package = types.ModuleType("tconv")
package.__path__ = [{str(_PACKAGE)!r}]
sys.modules["tconv"] = package
from tconv.jit import nvrtc_process
nvrtc_process.serve()
"""

Request = tuple[str, str, str, tuple[str, ...], str]
"""Stem, text, architecture, options and key, as `compile_cuda` has them."""


class NvrtcProcess(contextlib.AbstractContextManager["NvrtcProcess"]):
    """Compiles one kernel at a time. The process starts with the first, and ends with the block."""

    def __init__(self) -> None:
        self._ends = contextlib.ExitStack()
        self._started = False
        self._process: subprocess.Popen[bytes] | None = None

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed
            self._ends.close()

    def run(self, request: Request) -> tuple[bytes, str] | None:
        """Cubin and log; None if it does not compile, or not there.

        Who compiles it here then finds out why.
        """
        if not self._started:
            self._started = True
            self._process = self._start()
        if self._process is None:
            return None
        try:
            _send(self._process.stdin, request)
            answer: tuple[bytes, str] | None = _receive(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):  # it was killed, or has no NVRTC
            answer = None
        return answer

    def _start(self) -> subprocess.Popen[bytes] | None:
        """None if none can be started, or if it finds another NVRTC than this process."""
        from tconv.jit.compile import nvrtc_build

        # Where Python is part of another program, that is the executable.
        if not Path(sys.executable or "").name.startswith("python") or hasattr(sys, "frozen"):
            return None
        # NOTE: no `multiprocessing`, which would run a user's script once more in the process. A
        # session of its own, so that Ctrl-C reaches this process alone.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            started = subprocess.Popen(
                [sys.executable, "-c", _CODE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError:  # no memory, no executable, or too many processes
            return None
        self._ends.enter_context(started)  # closes the pipes, and waits
        try:
            found = _receive(started.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            return None
        return started if found == nvrtc_build() else None


def serve() -> None:
    """In the process: says which NVRTC it has, then compiles what it is sent until there is no
    more.
    """
    from tconv.errors import TconvError
    from tconv.jit.compile import nvrtc_build, run_nvrtc

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may be written there
    _send(answers, nvrtc_build())
    with contextlib.suppress(EOFError):
        while True:
            request: Request = _receive(sys.stdin.buffer)
            try:
                _send(answers, run_nvrtc(*request))
            except TconvError:
                _send(answers, None)


def _send(pipe: IO[bytes] | None, value: object) -> None:
    assert pipe is not None
    pickle.dump(value, pipe)
    pipe.flush()


def _receive(pipe: IO[bytes] | None) -> Any:
    assert pipe is not None
    return pickle.load(pipe)
