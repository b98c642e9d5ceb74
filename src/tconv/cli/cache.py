"""`tconv cache`."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tconv.cli.shared import add_command, bytes_text, console, print_whole

if TYPE_CHECKING:
    from tconv.cli.shared import Commands
    from tconv.jit.cache import Entry

# What the emulator writes into its folder: <what>-<digest>, and the text that it was made from.
_EMULATORS = re.compile(r"[a-z0-9_]+-[0-9a-f]{32}(\.so|\.o|\.cpp)?")


def add(commands: Commands) -> argparse.ArgumentParser:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "cache",
        "the compiled kernels on disk: their size, a list, and a way to remove them",
        "Compiled kernels, and what autotune chose, are kept on disk, so that a second run "
        "compiles and times nothing. `size` sums them up, `list` shows each, `clear` removes them; "
        "what is needed is compiled again. "
        "TCONV_CACHE_DIR names the folder, TCONV_CACHE=0 keeps none.",
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
    from tconv.tuning import KEY_PREFIX

    cache = default_cache()
    shown = console()
    if cache.folder is None:
        if parsed.json:
            print(json.dumps({"folder": None, "entries": []}, indent=2))
        else:
            shown.print("The cache is off (TCONV_CACHE=0): kernels are kept in memory only.")
        return 0
    entries, emulated = cache.entries(), emulator_files(cache.folder)
    emulated_bytes = sum(path.stat().st_size for path in emulated)
    choices = [entry for entry in entries if entry.key.startswith(KEY_PREFIX)]
    kernels = [entry for entry in entries if entry not in choices]
    if parsed.action == "clear":
        before = cache.size() + emulated_bytes
        removed = cache.clear()
        for path in emulated:
            path.unlink(missing_ok=True)
        of_tuning = f", {_plural(len(choices), 'choice')} by autotune" if choices else ""
        shown.print(
            f"Removed {_plural(removed - len(choices), 'kernel')}{of_tuning} and "
            f"{_plural(len(emulated), 'file')} of the emulator, {bytes_text(before)}, from "
            f"{cache.folder}.",
            soft_wrap=True,
        )
        # NOTE: counted, not taken on trust: a folder may be read-only.
        left = len(cache.entries()) + len(emulator_files(cache.folder))
        if left:
            raise OSError(f"{_plural(left, 'file')} could not be removed from {cache.folder}")
        return 0
    if parsed.json:
        record = {
            "folder": str(cache.folder),
            "bytes": cache.size(),
            "emulator_files": len(emulated),
            "emulator_bytes": emulated_bytes,
            "entries": [_record(entry) for entry in entries],
        }
        print(json.dumps(record, indent=2))
        return 0
    if parsed.action == "list":
        _show_list(entries)
    shown.print(f"{cache.folder}:", soft_wrap=True)
    for noun, found in (("kernel", kernels), ("choice", choices)):
        if found or noun == "kernel":
            size = bytes_text(sum(entry.nbytes for entry in found))
            by = " by autotune" if noun == "choice" else ""
            shown.print(f"  {_plural(len(found), noun)}{by}, {size}")
    if emulated:
        files = _plural(len(emulated), "file")
        shown.print(f"  {files} of the emulator, {bytes_text(emulated_bytes)}")
    return 0


def emulator_files(folder: Path) -> list[Path]:
    """The emulator's compiled kernels below a cache folder, and the texts beside them."""
    beneath = folder / "emulator"
    if not beneath.is_dir():
        return []
    return sorted(path for path in beneath.iterdir() if _EMULATORS.fullmatch(path.name))


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
        print_whole(table, console())


def _record(entry: Entry) -> dict[str, Any]:
    about = entry.metadata
    resources = about.get("resources") or {}
    spilled = resources.get("spill_stores")
    return {
        "key": entry.key,
        "bytes": entry.nbytes,
        "damaged": entry.damaged,
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
    return f"{count} {noun}{'' if count == 1 else 's'}"
