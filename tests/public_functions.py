"""tconv where PyTorch lacks functions that `tconv.private` looks for: all, or those of GONE.

As a pytest plugin it lets any test run so:

    PYTHONPATH=src:tests pytest -p public_functions tests/cpu/layer/test_compile.py
    GONE=Tensor._is_zerotensor PYTHONPATH=src:tests pytest -p public_functions tests/cpu/layer

PyTorch's own code calls them too, so they are gone only while `tconv.private` looks for them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

PATH = Path(__file__).resolve().parent.parent / "src" / "tconv" / "private.py"

ALL = (
    "_C",
    "_check",
    "_decomp.register_decomposition",
    "_functorch",
    "Tensor._is_zerotensor",
    "autograd.forward_ad._current_level",
    "autograd.forward_ad._set_fwd_grad_enabled",
    "autograd.function._SingleLevelFunction",
    "jit._builtins._register_builtin",
)


def load(name: str, gone: Sequence[str] = ALL) -> ModuleType:
    """`tconv.private` under another name, where PyTorch lacks some functions."""
    spec = importlib.util.spec_from_file_location(name, PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with contextlib.ExitStack() as stack:
        for path in gone:
            stack.enter_context(mock.patch(f"{torch.__name__}.{path}", None))
        spec.loader.exec_module(module)
    return module


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Put it in the place of `tconv.private`, before any test imports tconv."""
    assert "tconv" not in sys.modules, "tconv has found PyTorch's private functions already"
    gone = os.environ.get("GONE")
    sys.modules["tconv.private"] = load("tconv.private", gone.split() if gone else ALL)
