"""What all tests share: where they may write, what they are skipped for."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

# NOTE: before torch is imported. Under xdist each worker has one of the cores, not all of them.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

# A kernel's first call compiles it, which no deadline for one example allows for.
if not os.environ.get("CI"):  # there, Hypothesis loads its own profile: no deadline, one seed
    hypothesis.settings.register_profile("tconv", deadline=None)
    hypothesis.settings.load_profile("tconv")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the user's settings and cache out of the tests, and the tests out of the cache.

    TCONV_SANITIZE stays: it is how a run of the tests asks for sanitizers. Compiled kernels are
    kept between runs, under a key that holds all they are made of.
    """
    for name in list(os.environ):
        if name.startswith("TCONV_") and name not in ("TCONV_SANITIZE", "TCONV_CACHE_DIR"):
            del os.environ[name]
    os.environ.setdefault("TCONV_CACHE_DIR", str(ROOT / ".pytest_cache" / "tconv-kernels"))
    # For the processes that tests start, which do not see pytest's own `pythonpath`.
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "src"), inherited)))


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many of the thorough tests run."""
    parser.addoption(
        "--thorough",
        type=int,
        default=1,
        metavar="N",
        help="run one in N of the thorough tests, always the same ones (default: all)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what lies under tests/gpu. Skip it where there is no device, or fail if one must be.

    Leave out what `--thorough` leaves out.
    """
    one_in = config.getoption("thorough")
    kept, left_out = [], []
    for item in items:
        leaves = item.get_closest_marker("thorough") and zlib.crc32(item.nodeid.encode()) % one_in
        (left_out if leaves else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    no_device = pytest.mark.skip(reason="no CUDA device on this machine")
    missing = not torch.cuda.is_available()
    if missing and os.environ.get("TESTS_NEED_GPU") == "1":  # `make test-gpu`
        raise pytest.UsageError("this torch sees no CUDA device, and TESTS_NEED_GPU=1 claims one")
    for item in items:
        if (ROOT / "tests" / "gpu") in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if missing and item.get_closest_marker("gpu"):
            item.add_marker(no_device)
