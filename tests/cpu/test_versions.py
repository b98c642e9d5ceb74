"""Other versions of PyTorch: which are refused, and what stands in for functions that they lack."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import public_functions
from tconv import private
from tconv.errors import TconvError
from tconv.filling import precompile
from tconv.requirements import LEAST_TORCH, check

ROOT = Path(__file__).resolve().parents[2]


NEW_ENOUGH = ["2.6", "2.6.0+cu124", "2.6.0a0+ecf3bae40a.nv25.01", "2.6.0.dev20241101+cpu"]
NEW_ENOUGH += ["2.10.1", "2.13.0+cpu", "2.15.0a0+git12ab34c", "3.0.0", "main"]


@pytest.mark.parametrize("version", NEW_ENOUGH)
def test_new_enough(version: str) -> None:
    check(version)


@pytest.mark.parametrize("version", ["1.13.1", "2.5.1+cu124", "2.5.0a0+git12ab34c", "2.0.0.post2"])
def test_too_old(version: str) -> None:
    with pytest.raises(ImportError) as raised:
        check(version)
    message = str(raised.value)
    assert f"needs torch 2.6 or newer, but torch {version} is installed: pip install" in message


def test_importing_beside_an_old_pytorch_says_so_and_no_more() -> None:
    script = "import torch; torch.__version__ = '2.5.1+cu124'; import tconv"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: tconv needs torch 2.6 or newer")


def test_the_package_requires_what_the_import_does() -> None:
    assert f'"torch>={LEAST_TORCH}"' in (ROOT / "pyproject.toml").read_text()


# --- private functions, and what stands in for them -----------------------------------------------

public = public_functions.load("tconv_private_without")

PLAIN = torch.zeros(2)
WITH_GRADIENT = torch.zeros(2, requires_grad=True)


@contextlib.contextmanager
def flag(owner: Any, name: str, value: bool) -> Any:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


cudnn = torch.backends.cudnn

# For each function a state that changes its answer, and its arguments.
ANSWERS: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
    "is_any_autocast_enabled": (lambda: torch.autocast("cpu", torch.bfloat16), ()),
    "is_cudnn_enabled": (lambda: flag(cudnn, "enabled", False), ()),
    "is_cudnn_benchmark": (lambda: flag(cudnn, "benchmark", True), ()),
    "is_cudnn_deterministic": (lambda: flag(cudnn, "deterministic", True), ()),
    "is_deterministic": (deterministic, ()),
    "allows_tf32": (lambda: flag(cudnn, "allow_tf32", False), ()),
    "allows_tf32_products": (lambda: flag(torch.backends.cuda.matmul, "allow_tf32", True), ()),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_public_way_gives_the_same_answer(name: str) -> None:
    state, arguments = ANSWERS[name]
    ours, theirs = getattr(private, name), getattr(public, name)
    assert ours is not theirs
    before = ours(*arguments)
    assert theirs(*arguments) == before
    with state():
        assert ours(*arguments) == theirs(*arguments) != before


@pytest.mark.parametrize("given", [(PLAIN, None), (PLAIN, WITH_GRADIENT, 3), (), ([2], (0, 1))])
def test_what_requires_grad(given: tuple[Any, ...]) -> None:
    expected = any(one is WITH_GRADIENT for one in given)
    assert private.any_requires_grad(*given) == public.any_requires_grad(*given) == expected


@pytest.mark.parametrize("way", [private, public], ids=["private", "public"])
def test_a_condition_that_does_not_hold(way: Any) -> None:
    way.check(True, lambda: "never read")
    with pytest.raises(RuntimeError, match="too small"):
        way.check(False, lambda: "too small")


@pytest.mark.parametrize("way", [private, public], ids=["private", "public"])
def test_leaving_out_autocast(way: Any) -> None:
    square = torch.eye(2)
    with torch.autocast("cpu", torch.bfloat16):
        with way.without_autocast("cpu")():
            assert torch.mm(square, square).dtype == torch.float32
        assert torch.mm(square, square).dtype == torch.bfloat16


@pytest.mark.parametrize("way", [private, public], ids=["private", "public"])
def test_what_tensors_are_alike(way: Any) -> None:
    x, w = torch.zeros(2, 3, 4), torch.nn.Parameter(torch.zeros(3))
    found = way.alike(x, w)
    assert found(torch.ones(2, 3, 4), torch.nn.Parameter(torch.ones(3)))
    for others in (
        (x.half(), w),
        (x, torch.nn.Parameter(w.detach().half())),
        (torch.zeros(2, 3, 5), w),
        (torch.zeros(4, 3, 2), w),
        (torch.zeros(2, 4, 3).transpose(1, 2), w),
        (torch.zeros(2, 3, 4, device="meta"), w),
        (x[0], w),
        (torch._neg_view(x), w) if way is private else (x[1], w),  # unseen, so no call is kept
        (x, w.detach()),
        (x, torch.nn.Parameter(torch.zeros(3), requires_grad=False)),
        (torch.zeros(2, 3, 4, requires_grad=True), w),
        (None, w),
        (x, [1, 2, 3]),
    ):
        assert not found(*others)
    with torch.autocast("cpu", torch.bfloat16):
        assert not found(x, w)
        assert way.alike(x, w)(x, w)
    assert found(x, w)


def test_without_them_any_call_may_be_observed() -> None:
    assert not private.is_zerotensor(PLAIN) and public.is_zerotensor(PLAIN)
    assert not private.is_wrapped(PLAIN) and public.is_wrapped(PLAIN)
    assert private.has_storage(PLAIN) and not public.has_storage(PLAIN)
    for name in ("len_dispatch_stack", "len_function_stack", "are_transforms_active"):
        assert not getattr(private, name)() and getattr(public, name)()
    assert not private.is_profiler_enabled() and public.is_profiler_enabled()
    assert private.is_tracing() == public.is_tracing() == False  # noqa: E712
    assert private.forward_ad._current_level < 0 <= public.forward_ad._current_level
    with forward_ad.dual_level():
        assert private.forward_ad._current_level >= 0
    assert private.has_nodes_below_transforms and not public.has_nodes_below_transforms


# What says nothing about who runs a call, nor about what PyTorch's own operators cannot do in our
# place: the derivatives of its backward operator lack output paddings, and on torch 2.6 sizes that
# are symbols.
VALUES = [
    *("test_compile.py", "test_function.py", "test_operators.py"),
    *(
        "-k",
        "not ours and not grouped and not phases and not wanted and not saves and not profile"
        " and not opcheck and not data_decides",
    ),
]
OURS = ["test_our_kernels.py::test_forward_and_both_gradients_run_ours"]


@pytest.mark.parametrize(
    ("gone", "tests"),
    [
        pytest.param(" ".join(public_functions.ALL), VALUES, id="all"),
        # Nothing says what observes a call: all go through the dispatcher, to our kernels.
        pytest.param("Tensor._is_zerotensor", OURS, id="observers"),
        # Our kernels serve the calls that nothing observes.
        pytest.param(
            "autograd.function._SingleLevelFunction", [*OURS, "-k", "not dispatched"], id="nodes"
        ),
    ],
)
def test_the_layer_without_them(gone: str, tests: list[str], tmp_path: Path) -> None:
    files = [f"tests/cpu/layer/{test}" if ".py" in test else test for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "public_functions", *files]
    command += ["-m", "not thorough", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    path = os.pathsep.join([str(ROOT / "tests"), environment.get("PYTHONPATH", "")])
    environment |= {"PYTHONPATH": path, "GONE": gone}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= (300 if tests is VALUES else 8)


def test_without_fake_tensors_precompile_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tconv.recording", None)
    with pytest.raises(TconvError, match=r"precompile .* torch \d"):
        precompile(torch.nn.Linear(1, 1), PLAIN)
