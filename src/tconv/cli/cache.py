"""`tconv cache`."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from tconv import settings
from tconv.cli.shared import add_command, bytes_text, console, print_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tconv.cli.shared import Commands
    from tconv.jit.cache import Entry

# What descriptions say that entries are, and how that is called; one that says nothing: a kernel.
_KINDS = {
    "cubin": "kernel",
    "emulated": "build of the emulator",
    "choice": "choice by autotune",
    "sizes": "set of kernels for all sizes of a layer",
}


def add(commands: Commands) -> argparse.ArgumentParser:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "cache",
        "the compiled kernels on disk: their size, a list, and a way to remove them",
        "Compiled kernels, and what autotune chose, are kept on disk, so that a second run "
        "compiles and times nothing. `size` sums them up, `list` shows each, `clear` removes them; "
        "what is needed is compiled again. "
        "TCONV_CACHE_DIR names the folder, TCONV_CACHE_LIMIT its size, TCONV_CACHE=0 keeps none.",
        "tconv cache\ntconv cache list\ntconv cache clear",
    )
    parser.add_argument(
        "action",
        nargs="?",
        choices=("size", "list", "clear"),
        default="size",
        metavar="ACTION",
        help="size, list or clear (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="size and list, for machines")
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Runs the command."""
    from tconv.jit.cache import default_cache

    cache = default_cache()
    shown = console()
    if cache.folder is None:
        if parsed.json:
            print(json.dumps({"folder": None, "entries": []}, indent=2))
        else:
            shown.print("The cache is off (TCONV_CACHE=0): kernels are kept in memory only.")
        return 0
    refusal = cache.why_not()
    if refusal is not None:
        raise OSError(refusal)
    entries, nbytes = cache.entries(), cache.size()
    if parsed.action == "clear":
        left = [str(path) for path in cache.clear()]
        # NOTE: counted, not taken on trust: a folder may be read-only.
        found = len(cache.entries())
        if found:
            raise OSError(f"{_plural(found, 'file')} could not be removed from {cache.folder}")
        what = ", ".join(text for text, _ in _by_kind(entries))
        shown.print(f"Removed {what} ({bytes_text(nbytes)}) from {cache.folder}.", soft_wrap=True)
        if left:
            shown.print(f"Left what tconv did not write: {', '.join(left)}.", soft_wrap=True)
        return 0
    if parsed.json:
        record = {
            "folder": str(cache.folder),
            "bytes": nbytes,
            "limit": settings.cache_limit(),
            "entries": [_record(entry) for entry in entries],
        }
        print(json.dumps(record, indent=2))
        return 0
    if parsed.action == "list":
        _show_list(entries)
    limit = bytes_text(settings.cache_limit())
    shown.print(f"{cache.folder}: {bytes_text(nbytes)} of {limit}", soft_wrap=True)
    for text, size in _by_kind(entries):
        shown.print(f"  {text}, {bytes_text(size)}")
    return 0


def _by_kind(entries: list[Entry]) -> Iterator[tuple[str, int]]:
    """How many entries of each kind there are, in words, and their bytes; kernels in any case."""
    of_kind: dict[str, list[int]] = {"cubin": []}
    for entry in entries:
        of_kind.setdefault(_kind(entry), []).append(entry.nbytes)
    for kind, noun in _KINDS.items():
        if kind in of_kind:
            yield _plural(len(of_kind[kind]), noun), sum(of_kind[kind])


def _kind(entry: Entry) -> str:
    kind = str(entry.metadata.get("kind"))
    return kind if kind in _KINDS else "cubin"


def _show_list(entries: list[Entry]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("kernel", "for", "size", "registers", "compiled with", "in", "on", "key"):
        right = heading in ("size", "registers", "in")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for entry in entries:
        size = bytes_text(entry.nbytes)
        if entry.damaged:
            table.add_row(entry.key.split("-")[0], "damaged", size, *[""] * 4, _short(entry.key))
            continue
        found = _record(entry)
        table.add_row(
            str(found["kernel"]),
            str(found["arch"] or ""),
            size,
            "" if found["registers"] is None else str(found["registers"]),
            str(found["compiler"] or ""),
            "" if found["seconds"] is None else f"{found['seconds']:.2f} s",
            str(found["created"] or "")[:10],
            _short(entry.key),
        )
    if entries:
        print_whole(table, console(), spare=(6, 5, 4, 7, 3))


def _record(entry: Entry) -> dict[str, Any]:
    about = entry.metadata
    resources = about.get("resources") or {}
    spilled = resources.get("spill_stores")
    return {
        "key": entry.key,
        "bytes": entry.nbytes,
        "damaged": entry.damaged,
        "kind": _kind(entry),
        "kernel": about.get("stem", entry.key),
        "arch": about.get("arch"),
        "compiler": about.get("compiler"),
        "seconds": about.get("seconds"),
        "created": about.get("created"),
        "registers": resources.get("registers"),
        "spilled_bytes": None if spilled is None else spilled + resources.get("spill_loads", 0),
    }


def _short(key: str) -> str:
    """The first letters of the digest that ends a key."""
    return key.rsplit("-", 1)[-1][:8]


def _plural(count: int, noun: str) -> str:
    first, *rest = noun.split(" ")
    return " ".join([str(count), first if count == 1 else f"{first}s", *rest])
