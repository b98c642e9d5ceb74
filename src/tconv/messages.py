"""Errors in one line, for a terminal and for a table."""

from __future__ import annotations

from tconv.errors import CompileError


def one_line(error: BaseException) -> str:
    """An error in one line: what is wrong, with its reasons or the first error of a log."""
    if isinstance(error, CompileError):
        first = error.first_errors()[:1]
        return "; ".join(part.strip() for part in (error.message, *first))
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    lines = (line.strip() for line in str(error).splitlines())
    return "; ".join(line for line in lines if line).replace(":;", ":")
