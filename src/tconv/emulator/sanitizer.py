"""Reads what AddressSanitizer and UndefinedBehaviorSanitizer print."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_ADDRESS_ERROR = re.compile(
    r"ERROR: AddressSanitizer: ([\w-]+)(?: on (?:unknown )?address (0x\w+))?"
)
_ACCESS = re.compile(r"^(READ|WRITE) of size (\d+)", re.MULTILINE)
_FRAME = re.compile(r"^\s*#\d+ 0x\w+ in (.+?) (/\S+?):(\d+)(?::\d+)?$", re.MULTILINE)
_UNDEFINED = re.compile(r"^(\S+?):(\d+):\d+: runtime error: (.*)$", re.MULTILINE)
_VARIABLE = re.compile(
    r"located (\d+) bytes (?:to the )?(\w+)(?: of)? "
    r"global variable '([^']+)'.*?of size (\d+)"
)
_REGION = re.compile(r"located (\d+) bytes .*?(\d+)-byte region \[(0x\w+),(0x\w+)\)")

# Our own frames say nothing about the kernel.
_OWN_FILES = ("/emulator/runtime/", "/emulator/include/", "/libsanitizer/")


class Finding(NamedTuple):
    """What a sanitizer saw, and in which line of the source."""

    message: str
    file: str
    line: int


Allocation = tuple[int, int, str]


def parse(text: str, allocations: Sequence[Allocation]) -> Finding | None:
    """The first error in a sanitizer's output, None where there is none.

    Args:
        text: what the process printed.
        allocations: for each of the launch's, its address and size in that process, and the
            names of the arguments that point into it.
    """
    undefined = _UNDEFINED.search(text)
    if undefined is not None:
        return Finding(f"undefined behaviour: {undefined[3]}", undefined[1], int(undefined[2]))
    error = _ADDRESS_ERROR.search(text)
    if error is None:
        return None
    file, line = "", 0
    for frame in _FRAME.finditer(text):
        if not any(own in frame[2] for own in _OWN_FILES):
            file, line = frame[2], int(frame[3])
            break
    if error[1] == "SEGV":
        return Finding(f"out of bounds: {error[2]} is in no memory of its process", file, line)
    if error[1] == "ILL":  # clang++'s own check of bounds, which only traps
        return Finding("out of bounds of an array, or other undefined behaviour", file, line)
    access = _ACCESS.search(text)
    what = f"{access[1].lower()} of {access[2]} bytes" if access else "access"
    message = f"{_kind(error[1], text)}: {what}{_place(error[2], text, allocations)}"
    return Finding(f"{message} (AddressSanitizer: {error[1]})", file, line)


def _kind(name: str, text: str) -> str:
    if name == "use-after-poison":
        return "out of bounds of shared memory, or of bytes that a copy has not delivered yet"
    if name == "stack-overflow":
        return "a thread's stack overflows"
    return "out of bounds" if "overflow" in name or "underflow" in name else name


def _place(address: str | None, text: str, allocations: Sequence[Allocation]) -> str:
    variable = _VARIABLE.search(text)
    if variable is not None:
        side = "before" if variable[2] in ("left", "before") else "after"
        return f", {variable[1]} bytes {side} `{variable[3]}` of {variable[4]} bytes"
    if address is None:
        return ""
    region = _REGION.search(text)
    if region is None:
        return f" at {address}"
    first, end = int(region[3], 16), int(region[4], 16)
    for start, size, names in allocations:
        if first <= start and start + size <= end:
            return f", at byte {int(address, 16) - start} of the {size} bytes of `{names}`"
    return f", {region[1]} bytes beside the {region[2]} bytes of dynamic shared memory"
