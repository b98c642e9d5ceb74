"""The errors that tconv raises on its own account; all of them are `TconvError`."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TconvError(RuntimeError):
    """Any failure that is tconv's own to report."""


class MissingDependencyError(TconvError):
    """A package or library that the call needs is not on this machine.

    The message names what is missing, what was found, and the command that installs it.
    """


class NoKernelError(TconvError):
    """No kernel of tconv can run the given problem; the message holds each kernel's reason."""


class EmulatorError(TconvError):
    """A kernel did something wrong while the emulator ran it."""


class LaunchError(TconvError):
    """A kernel could not be loaded or launched on its device.

    The message names the kernel, its grid, block and shared memory, and the CUDA error.
    """


class CompileError(TconvError):
    """A kernel's source did not compile.

    Attributes:
        message: one sentence that says what failed.
        log: all that the compiler printed.
        options: the options it was given.
        source_path: where the generated source was written, or None where it could not be.
        source_text: the generated source.
        plan: what asked for the kernel, set by the caller that knows it; printed with the error.
    """

    FIRST_ERRORS = 8

    def __init__(
        self,
        message: str,
        log: str = "",
        options: tuple[str, ...] | list[str] = (),
        source_path: Path | str | None = None,
        plan: Any = None,
        source_text: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.log = log
        self.options = tuple(options)
        self.source_path = None if source_path is None else Path(source_path)
        self.plan = plan
        self.source_text = source_text

    def first_errors(self) -> list[str]:
        """The log's first error lines, or its first lines where none is marked as an error."""
        lines = [line for line in self.log.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
        return (errors or lines)[: self.FIRST_ERRORS]

    def __str__(self) -> str:
        """The message, the first errors of the log, the options, the source's path and the plan."""
        parts = [self.message]
        parts += [f"  {line}" for line in self.first_errors()]
        if self.options:
            parts.append(f"options: {' '.join(self.options)}")
        if self.source_path is not None:
            parts.append(f"source: {self.source_path}")
        if self.plan is not None:
            parts.append(f"plan: {self.plan}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles with its attributes, so that a worker process can pass it on."""
        path = None if self.source_path is None else str(self.source_path)
        arguments = (self.message, self.log, self.options, path, self.plan, self.source_text)
        return type(self), arguments
