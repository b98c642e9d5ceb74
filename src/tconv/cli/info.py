"""`tconv info`."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tconv.cli.shared import add_command, bytes_text, console

if TYPE_CHECKING:
    from tconv.cli.shared import Commands


def add(commands: Commands) -> argparse.ArgumentParser:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "info",
        "versions, devices, compilers, cache and settings",
        "Shows what tconv finds on this machine, for a look or for a bug report. "
        "Exit code 1 if a TCONV_ variable has a value that is not allowed.",
        "tconv info\ntconv info --json > report.json",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Runs the command."""
    from tconv import settings

    current = settings.current()
    if parsed.json:
        variables = [
            {
                "name": variable.name,
                "set_to": current[variable.name] or None,
                "default": variable.default,
                "allowed": variable.allowed,
                "meaning": variable.meaning,
            }
            for variable in settings.VARIABLES
        ]
        found = [{"what": what, "found": value} for what, value in findings()]
        print(json.dumps({**record(), "found": found, "settings": variables}, indent=2))
    else:
        _show(current)
    try:
        settings.check()
    except ValueError as error:
        sys.stdout.flush()
        print(f"tconv info: {error}", file=sys.stderr)
        return 1
    return 0


def _show(current: dict[str, str]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from tconv import settings

    shown = console()
    found = Table(show_header=False, box=box.SIMPLE, title="On this machine", title_justify="left")
    found.add_column(no_wrap=True)
    found.add_column(overflow="fold")
    for name, value in findings():
        found.add_row(name, escape(value))
    shown.print(found)

    table = Table(
        box=box.SIMPLE_HEAD, title="Settings (environment variables)", title_justify="left"
    )
    table.add_column("variable", no_wrap=True)
    table.add_column("value", overflow="fold", max_width=28)
    table.add_column("meaning; allowed")
    for variable in settings.VARIABLES:
        value = current[variable.name] or f"{variable.default or 'not set'} (default)"
        meaning = f"{variable.meaning}; {variable.allowed}"
        table.add_row(variable.name, escape(value), escape(meaning))
    shown.print(table)


def findings() -> Iterator[tuple[str, str]]:
    """What tconv depends on, and what of it is here; a missing part is a finding, no error."""
    import torch

    import tconv
    from tconv import disassemble
    from tconv.emulator import compile
    from tconv.jit.compile import nvrtc_version, supported_architectures

    yield "tconv", f"{tconv.__version__}, {Path(tconv.__file__).parent}"
    yield "Python", f"{platform.python_version()}, {platform.platform()}"
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else "none"
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, cuDNN {cudnn}"
    for ordinal in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(ordinal)
        yield (
            f"device {ordinal}",
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} multiprocessors, "
            f"{bytes_text(properties.total_memory)}",
        )
    if torch.cuda.device_count() == 0:
        yield "device", "no CUDA device: tensors on the CPU go to PyTorch's own operators"
    yield "driver", _or_reason(_driver)
    yield "cuda-bindings", _version("cuda-bindings")
    yield (
        "NVRTC",
        _or_reason(
            lambda: (
                "{}.{}, compiles for ".format(*nvrtc_version())
                + ", ".join(supported_architectures())
            )
        ),
    )
    yield "C++ compiler", _or_reason(lambda: " ".join(compile.compiler()))
    yield "nvcc", shutil.which("nvcc") or "not on PATH: only files of `tconv export` need it"
    tool = disassemble.find()
    yield "disassembler", str(tool or f"none, for `tconv explain --sass`: {disassemble.INSTALL}")
    yield (
        "matplotlib",
        _version("matplotlib", "for `tconv report` and `explain --png`: pip install matplotlib"),
    )
    yield "kernel cache", _or_reason(_cache)


def record() -> dict[str, Any]:
    """What scripts read: versions, each device, and the cache's state, by keys that stay.

    `cache.entries` and `cache.bytes` are None where the cache is off or refused; `cache.refusal`
    says why it is refused.
    """
    import torch

    import tconv
    from tconv.jit.cache import default_cache

    devices = []
    for ordinal in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(ordinal)
        devices.append(
            {
                "name": properties.name,
                "arch": f"sm_{properties.major}{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "bytes": properties.total_memory,
            }
        )
    folder, entries, size, refusal = None, None, None, None
    try:
        cache = default_cache()
        folder = cache.folder
        refusal = None if folder is None else cache.why_not()
        if folder is not None and refusal is None:
            entries, size = len(cache.entries()), cache.size()
    except (ValueError, OSError) as error:  # a setting that is not allowed is a finding
        refusal = str(error)
    return {
        "tconv": tconv.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": devices,
        "cache": {
            "folder": None if folder is None else str(folder),
            "entries": entries,
            "bytes": size,
            "refusal": refusal,
        },
    }


def _driver() -> str:
    from tconv.jit import libraries

    driver = libraries.driver()
    version = int(libraries.check(driver, driver.cuDriverGetVersion(), "ask for the version"))
    return f"for CUDA up to {version // 1000}.{version % 1000 // 10}"


def _cache() -> str:
    from tconv.jit.cache import default_cache

    cache = default_cache()
    if cache.folder is None:
        return "off (TCONV_CACHE=0): kernels are kept in memory only"
    refusal = cache.why_not()
    if refusal is not None:
        return refusal
    return f"{cache.folder}: {len(cache.entries())} entries, {bytes_text(cache.size())}"


def _or_reason(find: Callable[[], str]) -> str:
    """What is found, or why it is not."""
    from tconv.errors import TconvError

    try:
        return find()
    except (TconvError, ValueError, OSError) as error:
        return str(error)


def _version(package: str, missing: str = "") -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"not installed{', ' if missing else ''}{missing}"
