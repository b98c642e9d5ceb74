"""`make test-matrix`: the quick tests of tests/cpu on several versions of PyTorch, and a table.

    python tests/matrix.py                         # each row in a virtual environment of its own
    python tests/matrix.py --only 2.6.0 --jobs 4 -- -k compile      # what follows -- goes to pytest
    python tests/matrix.py --torch-index https://download.pytorch.org/whl/cpu

PyPI's wheels of PyTorch for Linux are CUDA builds, several GB each; the index above has small ones.
pip's own settings count as well (PIP_INDEX_URL and so on). A row needs its Python on PATH, as
`python3.10`, or another one that its PyTorch supports. NVRTC and cuda-bindings are those that a
user of that PyTorch gets.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The PyTorch of a row, and the Pythons that it supports, the one wanted first.
ROWS = {
    "2.6.0": ("3.10", "3.11", "3.12", "3.13"),
    "2.9.1": ("3.12", "3.11", "3.13", "3.14", "3.10"),
    "newest": ("3.13", "3.14", "3.12", "3.11", "3.10"),
}
COLUMNS = ("torch", "Python", "NVRTC", "cuda-bindings")
COLUMNS += ("passed", "failed", "failed as expected", "skipped")
OUTCOMES = ("passed", "failed", "error", "xfailed", "skipped")

VERSIONS = """
import json, platform, torch, cuda.bindings
from tconv.jit.compile import nvrtc_version
print(json.dumps([str(torch.__version__), platform.python_version(),
                  ".".join(map(str, nvrtc_version())), cuda.bindings.__version__]))
"""


def find_python(versions: tuple[str, ...]) -> str | None:
    """The first of these Pythons that is there and runs (a pyenv's shim may not)."""
    for version in versions:
        found = shutil.which(f"python{version}")
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    return None


def output_of(python: Path, code: str) -> str:
    command = [python, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def set_up(python: Path, interpreter: str, torch: str, index: str | None) -> None:
    """A virtual environment with that PyTorch, and with what belongs to its version of CUDA."""
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", python.parent.parent], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = ["--upgrade", "torch"] if torch == "newest" else [f"torch=={torch}"]
    subprocess.run([*pip, *wanted, *(["--index-url", index] if index else [])], check=True)
    cuda = output_of(python, "import torch; print(torch.version.cuda)")
    extra = "cuda12" if cuda.startswith("12.") else "cuda13"
    kept = output_of(python, "import torch; print(torch.__version__)").strip().split("+")[0]
    subprocess.run([*pip, f"torch=={kept}", "--editable", f"{ROOT}[{extra},test]"], check=True)


def run_row(folder: Path, python: Path, options: list[str]) -> dict[str, int]:
    """Run the tests; what they print is shown and kept, the numbers of each outcome returned."""
    command = [str(python), "-m", "pytest", "tests/cpu", "-m", "not thorough", *options]
    lines = []
    with (folder / "pytest.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            log.write(line)
            print(line, end="", flush=True)
    if process.wait() not in (0, 1):  # neither all passed nor some failed
        sys.exit(f"pytest broke off with exit status {process.returncode}")
    found = {outcome: re.search(rf"(\d+) {outcome}", lines[-1]) for outcome in OUTCOMES}
    return {outcome: int(match[1]) if match else 0 for outcome, match in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=ROWS, action="append", help="this row alone")
    parser.add_argument("--jobs", default="2", help="processes of a row's tests")
    parser.add_argument("--torch-index", metavar="URL", help="where pip finds torch")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "matrix")
    parser.add_argument("pytest", nargs="*", help="options of pytest")
    arguments = parser.parse_args()
    table, failed = [], 0
    for torch in arguments.only or ROWS:
        interpreter = find_python(ROWS[torch])
        if interpreter is None:
            print(f"torch {torch}: none of Python {', '.join(ROWS[torch])} is here, left out")
            continue
        folder = arguments.folder.resolve() / f"{torch}-{Path(interpreter).name}"
        python = folder / "bin" / "python"
        print(f"torch {torch}: setting up {folder}", flush=True)
        set_up(python, interpreter, torch, arguments.torch_index)
        versions = json.loads(output_of(python, VERSIONS))
        counts = run_row(folder, python, ["-q", "-n", arguments.jobs, *arguments.pytest])
        failures = counts["failed"] + counts["error"]
        failed += failures
        table.append((*versions, counts["passed"], failures, counts["xfailed"], counts["skipped"]))
    for row in (COLUMNS, ["---"] * len(COLUMNS), *table):
        print("| " + " | ".join(map(str, row)) + " |")
    if failed or not table:
        sys.exit(1)


if __name__ == "__main__":
    main()
