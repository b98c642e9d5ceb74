"""Whether products on tensor cores keep the operands that they read from registers.

A wgmma is asynchronous, and ptxas does not keep the registers of its first operand: to it they are
free once the instruction is issued. A kernel that loads the next operand before it has waited may
get the same registers. Neither the compiler nor the emulator says so.
"""

from __future__ import annotations

import re
from typing import NamedTuple

INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P(?:\d|T)\s+)?([A-Z][A-Z0-9_.]+)\s*(.*?);")
REGISTER = re.compile(r"R(\d+)(?:\.reuse)?")
OF_OPERAND = 4
"""Registers of a first operand."""

NOT_FIRST = ("SHFL",)
"""Instructions whose second argument is what they write."""

WRITES_NOTHING = ("ST", "RED", "BRA", "R2UR", "SYNCS", "BAR", "WARPGROUP", "UTMA")
"""Of those whose first argument may be a register."""


class Overwritten(NamedTuple):
    """A register that products under way read, and the instruction that writes it."""

    register: int
    instruction: str


def overwritten(sass: str) -> tuple[int, list[Overwritten]]:
    """Products that read registers, and what writes those before the wait for them.

    Instructions are taken in the order of the text, so that a write behind a jump backwards is not
    seen.

    Args:
        sass: a kernel's, as nvdisasm and cuobjdump print it.
    """
    products, found = 0, []
    open_group: set[int] = set()
    under_way: list[set[int]] = []  # the groups that were committed, the oldest first
    for line in sass.splitlines():
        match = INSTRUCTION.match(line)
        if match is None:
            continue
        name, arguments = match.group(1), [part.strip() for part in match.group(2).split(",")]
        if name.startswith("HGMMA"):
            first = REGISTER.fullmatch(arguments[1])
            if first is not None:
                products += 1
                open_group |= set(range(int(first.group(1)), int(first.group(1)) + OF_OPERAND))
            if "gsb0" in arguments:
                under_way.append(open_group)
                open_group = set()
        elif name.startswith("WARPGROUP.DEPBAR"):
            left = int(arguments[1], 16)
            under_way = under_way[len(under_way) - left :] if left else []
        elif not name.startswith(WRITES_NOTHING):
            written = REGISTER.fullmatch(arguments[name.startswith(NOT_FIRST)])
            if written is None:
                continue
            begin = int(written.group(1))
            busy = open_group.union(*under_way)
            hit = busy & set(range(begin, begin + _width(name)))
            found += [Overwritten(register, line.strip()) for register in sorted(hit)]
    return products, found


def _width(name: str) -> int:
    """Registers that an instruction writes."""
    if name.startswith("LDSM"):
        return int(name[-1]) if name[-1].isdigit() else 1
    return 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
