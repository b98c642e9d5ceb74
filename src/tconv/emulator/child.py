"""Sanitized launches: each is a process, which reads the launch from a file.

The file holds the launch, its arguments and a copy of the memory that they point into. The process
works on copies between red zones, which expose accesses outside a tensor. It writes the copies back
at the end. The file always names the running block and thread, also if the process dies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tconv.emulator import sanitizer
from tconv.emulator.records import Launch, Piece, Report, describe
from tconv.errors import EmulatorError
from tconv.kernels.source import KernelSource

_ALIGNMENT = 256
_FAILED = 3  # the exit status that means: read the report

_ADDR_NO_RANDOMIZE = 0x0040000  # of personality(2)
_PERSONALITY_QUERY = 0xFFFFFFFF


class Request(ctypes.Structure):
    """The head of the file, with the layout of runtime/runner.cpp."""

    _fields_ = (
        ("launch", Launch),
        ("arguments_offset", ctypes.c_uint64),
        ("pieces_offset", ctypes.c_uint64),
        ("piece_count", ctypes.c_uint64),
        ("report", Report),
    )


def run(
    source: KernelSource,
    executable: Path,
    launch: Launch,
    arguments: bytes,
    allocations: Sequence[tuple[int, int]],
    *,
    keep: Path | None = None,
) -> None:
    """Run one sanitized launch to its end; arguments as in `EmulatedKernel.launch`.

    Args:
        keep: path at which the request remains, for a debugger.

    Raises:
        EmulatorError: the kernel, or a sanitizer, reported something.
    """
    pieces = merged(allocations)
    if keep is not None:
        _run(source, executable, launch, arguments, pieces, keep)
        return
    shared = Path("/dev/shm")
    folder = shared if os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tconv-emulator-", dir=folder) as directory:
        _run(source, executable, launch, arguments, pieces, Path(directory) / "request")


def merged(allocations: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same memory, with overlapping and repeated allocations merged."""
    result: list[tuple[int, int]] = []
    for address, size in sorted(set(allocations)):
        if result and address < result[-1][0] + result[-1][1]:
            first = result[-1][0]
            result[-1] = (first, max(result[-1][1], address + size - first))
        elif size or address not in {other for other, _ in result}:
            result.append((address, size))
    return result


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _run(
    source: KernelSource,
    executable: Path,
    launch: Launch,
    arguments: bytes,
    pieces: list[tuple[int, int]],
    path: Path,
) -> None:
    launch.argument_bytes = len(arguments)
    arguments_offset = _align(ctypes.sizeof(Request))
    pieces_offset = _align(arguments_offset + len(arguments))
    offset = _align(pieces_offset + len(pieces) * ctypes.sizeof(Piece))
    offsets = []
    for _, size in pieces:
        offsets.append(offset)
        offset = _align(offset + size)

    with open(path, "w+b") as file:
        file.truncate(offset)
        with mmap.mmap(file.fileno(), 0) as memory:
            base = ctypes.c_char.from_buffer(memory)
            start = ctypes.addressof(base)
            try:
                request = Request(
                    launch,
                    arguments_offset,
                    pieces_offset,
                    len(pieces),
                    Report(block=-1, thread=-1),
                )
                ctypes.memmove(start, ctypes.byref(request), ctypes.sizeof(request))
                ctypes.memmove(start + arguments_offset, arguments, len(arguments))
                for index, ((address, size), at) in enumerate(zip(pieces, offsets, strict=True)):
                    piece = Piece(address, size, at)
                    place = start + pieces_offset + index * ctypes.sizeof(Piece)
                    ctypes.memmove(place, ctypes.byref(piece), ctypes.sizeof(Piece))
                    ctypes.memmove(start + at, address, size)
                result = _execute(executable, path)
                if result.returncode == 0:
                    for (address, size), at in zip(pieces, offsets, strict=True):
                        ctypes.memmove(address, start + at, size)
                    return
                report = Request.from_buffer_copy(memory).report
                table = (Piece * len(pieces)).from_buffer_copy(memory, pieces_offset)
            finally:
                del base  # the mapping cannot be closed while something points into it
    raise _failure(source, result, report, list(table))


def _execute(executable: Path, request: Path) -> subprocess.CompletedProcess[str]:
    # Options of another program, or another allocator, would disturb the sanitizer.
    ours = ("ASAN_OPTIONS", "UBSAN_OPTIONS", "LD_PRELOAD")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    with _FixedAddresses():
        return subprocess.run(
            [str(executable), str(request)],
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            check=False,
        )


class _FixedAddresses:
    """Turns address randomisation off for a child process.

    Newer kernels randomise many bits. Older AddressSanitizers then sometimes find their shadow
    memory in use, and die before main.
    """

    def __enter__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._before = self._libc.personality(_PERSONALITY_QUERY)
        if self._before != -1:
            self._libc.personality(self._before | _ADDR_NO_RANDOMIZE)

    def __exit__(self, *_: object) -> None:
        if self._before != -1:
            self._libc.personality(self._before)


def _failure(
    source: KernelSource,
    result: subprocess.CompletedProcess[str],
    report: Report,
    pieces: list[Piece],
) -> EmulatorError:
    if result.returncode == _FAILED and report.failed:
        return EmulatorError(report.describe(source.stem))
    known = [(piece.copy, piece.bytes, piece.names.decode()) for piece in pieces]
    found = sanitizer.parse(result.stderr, known)
    if found is None:
        status = result.returncode
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        found = sanitizer.Finding(
            f"its process died ({how}): {result.stderr[-2000:].strip()}", "", 0
        )
    message, file, line = found
    return EmulatorError(describe(source.stem, message, report.block, report.thread, file, line))
