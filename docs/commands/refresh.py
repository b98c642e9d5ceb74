"""Runs every command shown on the pages of this folder again, and puts in what it prints now.

    python docs/commands/refresh.py [PAGE.md ...]

A command is a line `$ tconv ...` in a block marked `console`; all that follows it in the block is
its output. It runs in an empty folder that holds layers.json, with an empty cache and home, whose
paths are shown as `~`. Pages that were run on a GPU say so and mark their blocks `text`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
BLOCK = re.compile(r"(?<=^```console\n)(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Rewrites the pages given, or all of the folder."""
    pages = [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.md"))
    for page in pages:
        with tempfile.TemporaryDirectory() as home:
            text = page.read_text()
            page.write_text(BLOCK.sub(lambda block: rerun(block[1], Path(home)), text))
            print(page.name)


def rerun(block: str, home: Path) -> str:
    """A block with its commands' present output."""
    commands = [line for line in block.splitlines() if line.startswith("$ ")]
    return "".join(f"{command}\n{output(command[2:], home)}" for command in commands)


def output(command: str, home: Path) -> str:
    """What a command prints, its exit code where that is not 0, and no path of this machine."""
    work = home / "work"
    work.mkdir(exist_ok=True)
    shutil.copy(FOLDER / "layers.json", work)
    kept = {k: v for k, v in os.environ.items() if k in ("PYTHONPATH", "LANG", "LC_ALL")}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=work,
        env={**kept, "PATH": path, "HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    import tconv

    libc = "".join(platform.libc_ver())
    shown = (
        done.stdout.replace(str(Path(tconv.__file__).parent), "~/site-packages/tconv")
        .replace(str(home), "~")
        .replace(platform.platform(), f"Linux-{platform.machine()}-with-{libc}")
    )
    lines = [line.rstrip() for line in shown.splitlines()]
    if done.returncode:
        lines.append(f"[exit code {done.returncode}]")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines).strip("\n") + "\n") if lines else ""


if __name__ == "__main__":
    main()
