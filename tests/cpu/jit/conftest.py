"""What the tests of tconv.jit share. None needs a GPU; some need NVRTC, some a C++ compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tconv import settings
from tconv.errors import MissingDependencyError
from tconv.jit import cache

SOURCE_ROOT = Path(settings.__file__).parent.parent

# The package without its __init__, which imports torch: these modules must do without.
BARE_PACKAGE = f"""
import sys, types
sys.path.insert(0, {str(SOURCE_ROOT)!r})
package = types.ModuleType("tconv")
package.__path__ = [{str(SOURCE_ROOT / "tconv")!r}]
sys.modules["tconv"] = package
"""


def named(name: str) -> str:
    """A cache key that begins with `name`."""
    return f"{name}-{0:064x}"


KEY = named("key")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the test's own, and no other variable of tconv set."""
    for variable in settings.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    folder = tmp_path / "cache"
    monkeypatch.setenv("TCONV_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(cache, "_caches", {})
    return folder


@pytest.fixture
def nvrtc() -> None:
    """Skips where NVRTC is not installed."""
    from tconv.jit import libraries

    try:
        libraries.nvrtc()
    except MissingDependencyError as error:
        pytest.skip(str(error))


def start_alone(code: str, **environment: str) -> subprocess.Popen[str]:
    """Starts Python code in its own process, without torch."""
    return subprocess.Popen(
        [sys.executable, "-c", BARE_PACKAGE + code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What a process printed, once it has ended well."""
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, output + errors
    return output


@pytest.fixture
def run_alone() -> Callable[..., str]:
    """Runs Python code or a file in its own process, without torch; returns what it printed."""

    def run(code: str | Path, **environment: str) -> str:
        text = code.read_text() if isinstance(code, Path) else code
        return finish(start_alone(text, **environment))

    return run


@pytest.fixture
def run_many_alone() -> Callable[[str, int], list[str]]:
    """Runs Python code in several processes at once; returns what each printed."""

    def run(code: str, count: int) -> list[str]:
        processes = [start_alone(code) for _ in range(count)]
        return [finish(process) for process in processes]

    return run


@dataclass(frozen=True)
class TextSource:
    """A kernel's source that is its own text."""

    stem: str = "tiny"
    body: str = "arguments.output[threadIdx.x] = 1.0f;"
    head: str = ""
    threads: int = 128
    shared_bytes: int = 0
    bounds: str = "128"

    def text(self) -> str:
        return (
            f"{self.head}\nstruct Arguments {{ float* output; int count; }};\n"
            f'extern "C" __global__ void __launch_bounds__({self.bounds})\n'
            f"{self.stem}(const __grid_constant__ Arguments arguments) {{\n{self.body}\n}}\n"
        )


@pytest.fixture
def text_source() -> type[TextSource]:
    return TextSource
