"""Whether products on tensor cores keep the operands that they read from registers.

A wgmma is asynchronous, and ptxas does not keep the registers of its first operand: to it they are
free once the instruction is issued. A kernel that loads the next operand before it has waited may
get the same registers. Neither the compiler nor the emulator says so.
"""

from __future__ import annotations

import re
from typing import NamedTuple

INSTRUCTION = re.compile(
    r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P(?:\d|T)\s+)?([A-Z][A-Za-z0-9_.]+)\s*(.*?);"
)
LABEL = re.compile(r"\s*(\.L_x_\d+):")
JUMP = re.compile(r"BRA.*`\((\.L_x_\d+)\)")
REGISTER = re.compile(r"R(\d+)(?:\.reuse)?")
OF_OPERAND = 4
"""Registers of a first operand."""

NOT_FIRST = ("SHFL", "ATOM")
"""Instructions whose second argument is what they write."""

WRITES_NOTHING = ("ST", "RED", "BRA", "R2UR", "SYNCS", "BAR", "WARPGROUP", "UTMA")
"""Of those whose first argument may be a register."""


class Overwritten(NamedTuple):
    """A register that products under way read, and the instruction that writes it."""

    register: int
    instruction: str


def overwritten(sass: str) -> tuple[int, list[Overwritten]]:
    """Products that read registers, and what writes those before the wait for them.

    Instructions are taken in the order of the text; at a jump backwards, those from its label on
    once more, with what is under way there.

    Args:
        sass: a kernel's, as nvdisasm and cuobjdump print it.
    """
    lines = sass.splitlines()
    labels = {m.group(1): at for at, line in enumerate(lines) if (m := LABEL.match(line))}
    state = _State()
    for at, line in enumerate(lines):
        state.take(line)
        jump = JUMP.search(line)
        if jump is not None and labels.get(jump.group(1), at) < at and state.under_way:
            again = state.copy()
            for behind in lines[labels[jump.group(1)] : at]:
                again.take(behind)
            state.found |= again.found
    return state.products, sorted(state.found)


class _State:
    """What is under way behind some instructions."""

    def __init__(self) -> None:
        self.products = 0
        self.found: set[Overwritten] = set()
        self.open: set[int] = set()
        self.under_way: list[set[int]] = []  # the groups that were committed, the oldest first

    def copy(self) -> _State:
        other = _State()
        other.open, other.under_way = set(self.open), list(self.under_way)
        return other

    def take(self, line: str) -> None:
        match = INSTRUCTION.match(line)
        if match is None:
            return
        name, arguments = match.group(1), [part.strip() for part in match.group(2).split(",")]
        if name.startswith("HGMMA"):
            first = REGISTER.fullmatch(arguments[1])
            if first is not None:
                self.products += 1
                self.open |= set(range(int(first.group(1)), int(first.group(1)) + OF_OPERAND))
            if "gsb0" in arguments:
                self.under_way.append(self.open)
                self.open = set()
        elif name.startswith("WARPGROUP.DEPBAR"):
            left = int(arguments[1], 16)
            self.under_way = self.under_way[max(0, len(self.under_way) - left) :]
        elif not name.startswith(WRITES_NOTHING):
            written = REGISTER.fullmatch(arguments[name.startswith(NOT_FIRST)])
            if written is None:
                return
            begin = int(written.group(1))
            busy = self.open.union(*self.under_way)
            hit = busy & set(range(begin, begin + _width(name)))
            self.found |= {Overwritten(register, line.strip()) for register in hit}


def _width(name: str) -> int:
    """Registers that an instruction writes."""
    if name.startswith("LDSM"):
        return int(name[-1]) if name[-2:] in (".2", ".4") else 1
    if name.startswith("CS2R") and not name.endswith(".32"):
        return 2
    return 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
