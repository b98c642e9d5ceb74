"""Records that Python and the emulator's runtime exchange, with the layout of runtime/state.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence


class AllocationRecord(ctypes.Structure):
    """A piece of memory that a launch may touch."""

    _fields_ = (("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


class Piece(ctypes.Structure):
    """An allocation in a sanitized launch's file, and its red-zoned copy."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("copy", ctypes.c_uint64),
        ("names", ctypes.c_char * 96),
    )


class Launch(ctypes.Structure):
    """What to run."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64),
        ("argument_bytes", ctypes.c_uint64),
        ("allocation_count", ctypes.c_uint64),
        ("allocations", ctypes.c_uint64),
        ("schedule", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
    )


class Report(ctypes.Structure):
    """The outcome. `block` and `thread` are up to date while it runs."""

    _fields_ = (
        ("failed", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("thread", ctypes.c_int32),
        ("line", ctypes.c_int32),
        ("file", ctypes.c_char * 512),
        ("message", ctypes.c_char * 3572),
    )

    def describe(self, stem: str) -> str:
        """The report as an error's message."""
        return describe(
            stem,
            self.message.decode(errors="replace"),
            self.block,
            self.thread,
            self.file.decode(errors="replace"),
            self.line,
        )


def describe(stem: str, message: str, block: int, thread: int, file: str, line: int) -> str:
    """One error's message: source line, kernel, block, thread and mistake."""
    place = f"block {block}" + (f", thread {thread}" if thread >= 0 else "")
    where = f"{file}:{line}: " if file else ""
    return f"{where}{stem}, {place}: {message}"


def allocation_array(allocations: Sequence[tuple[int, int]]) -> ctypes.Array[AllocationRecord]:
    """Addresses and sizes as the runtime reads them."""
    records = [AllocationRecord(address, size) for address, size in allocations]
    return (AllocationRecord * max(1, len(records)))(*records)
