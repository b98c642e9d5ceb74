"""What a row of a benchmark was measured on: GPU, driver, versions, commit."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import torch

import tconv


def environment(device: str) -> dict[str, str]:
    """The machine and the versions; "" for what is not there or cannot be found out.

    Args:
        device: "cuda", whose current device is meant, or "cpu".
    """
    cuda = device == "cuda"
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "gpu": torch.cuda.get_device_name() if cuda else "",
        "driver": _driver() if cuda else "",
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "cudnn": "" if cudnn is None else str(cudnn),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_threads": str(torch.get_num_threads()),
        "tconv": tconv.__version__,
    }


def short_name(device: str) -> str:
    """The device in one word, as a folder and `floors.GPUS` name it: "h200", "rtx-4090", "cpu"."""
    if device != "cuda":
        return device
    name = torch.cuda.get_device_name().lower()
    for word in ("nvidia", "geforce"):
        name = name.replace(word, " ")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def commit() -> str:
    """The commit of the tconv that runs, with "-dirty" if its sources differ; "" if unknown.

    Unknown where tconv does not lie in a clone of its own repository, or git is not there.
    """
    package = Path(tconv.__file__).resolve().parent
    root = _output("git", "-C", str(package), "rev-parse", "--show-toplevel")
    # NOTE: an installed package may lie in a virtual environment inside another repository.
    if not root or Path(root).resolve() / "src" / "tconv" != package:
        return ""
    head = _output("git", "-C", root, "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", root, "status", "--porcelain", "--", "src/tconv")
    return head + ("-dirty" if head and changed else "")


def _driver() -> str:
    """The driver's version, "580.159.04"."""
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if found:
        return found.splitlines()[0].strip()
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return version[0] if version else ""


def _output(*command: str) -> str:
    """The output of a command, or "" if it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
