"""What is said on machines where a package, a library or the driver is missing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tconv.errors import MissingDependencyError
from tconv.jit import compile as compile_module
from tconv.jit import libraries


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    def forget() -> None:
        for function in (
            libraries.nvrtc,
            libraries.driver,
            compile_module.nvrtc_version,
            compile_module.nvrtc_build,
            compile_module.supported_architectures,
        ):
            function.cache_clear()

    forget()
    yield
    forget()


def stand_in(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str = "13.5.0", **members: Any
) -> None:
    """Puts a module in the place of cuda.bindings.<name>."""
    bindings = ModuleType("cuda.bindings")
    bindings.__version__ = version  # type: ignore[attr-defined]
    module = SimpleNamespace(**members)
    setattr(bindings, name, module)
    cuda = ModuleType("cuda")
    cuda.bindings = bindings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", cuda)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, f"cuda.bindings.{name}", module)


def failing(error: Exception) -> Callable[..., Any]:
    def call(*_: object) -> Any:
        raise error

    return call


def test_importing_needs_and_opens_nothing(run_alone: Callable[..., str]) -> None:
    modules = [
        "cache",
        "compile",
        "files",
        "libraries",
        "module",
        "runtime",
        "target",
        "tensor_map",
    ]
    code = f"""
import builtins, importlib, os
before = set(sys.modules)
for name in {modules!r}:
    importlib.import_module("tconv.jit." + name)
new = set(sys.modules) - before
assert not any(name.split(".")[0] in ("cuda", "torch", "numpy") for name in new), new
assert not os.path.exists(os.environ["TCONV_CACHE_DIR"])
from tconv.jit.target import Target
print(Target.named("sm_80").arch)
"""
    assert run_alone(code) == "sm_80\n"


@pytest.mark.parametrize("use", [libraries.nvrtc, libraries.driver])
def test_no_cuda_bindings(monkeypatch: pytest.MonkeyPatch, use: Callable[[], Any]) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingDependencyError) as raised:
        use()
    message = str(raised.value)
    assert "the package cuda-bindings (12.8 or newer)" in message
    assert libraries.INSTALL_CUDA_13 in message and libraries.INSTALL_CUDA_12 in message


def test_no_cuda_bindings_when_compiling(
    monkeypatch: pytest.MonkeyPatch, text_source: type[Any]
) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingDependencyError, match="cuda-bindings"):
        compile_module.compile_cuda(text_source(), "sm_90a")


def test_preloading_loads_what_there_is(run_alone: Callable[..., str]) -> None:
    code = """
import sys
from tconv.jit import libraries
before = set(sys.modules)
libraries.preload()
assert libraries.nvrtc.cache_info().currsize == 1
assert {"cuda.bindings.nvrtc", "cuda.bindings.driver"} <= set(sys.modules) - before
assert libraries.driver.cache_info().currsize == 0, "it is initialised at the first call"
"""
    assert run_alone(code) == ""


def test_preloading_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    libraries.preload()
    with pytest.raises(MissingDependencyError, match="cuda-bindings"):
        libraries.nvrtc()


@pytest.mark.parametrize(("cuda", "loaded"), [("13.0", "True"), (None, "False")])
def test_importing_preloads_for_cuda_builds_of_pytorch(cuda: str | None, loaded: str) -> None:
    code = f"""
import sys, torch
torch.version.cuda = {cuda!r}
import tconv
print("cuda.bindings.nvrtc" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{loaded}\n"


@pytest.mark.parametrize(
    ("version", "command"),
    [("12.8.0", libraries.INSTALL_CUDA_12), ("13.5.0", libraries.INSTALL_CUDA_13)],
)
def test_no_nvrtc(monkeypatch: pytest.MonkeyPatch, version: str, command: str) -> None:
    error = RuntimeError("Failed to dlopen libnvrtc.so.12\nand more")
    stand_in(monkeypatch, "nvrtc", version, nvrtcVersion=failing(error))
    with pytest.raises(MissingDependencyError) as raised:
        libraries.nvrtc()
    message = str(raised.value)
    assert "needs the NVRTC library" in message
    assert "Failed to dlopen libnvrtc.so.12. " in message and "and more" not in message
    assert message.endswith(f"Install it: {command}")


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "driver", cuInit=failing(RuntimeError("Failed to dlopen libcuda.so.1")))
    with pytest.raises(MissingDependencyError) as raised:
        libraries.driver()
    message = str(raised.value)
    assert "needs NVIDIA's driver (libcuda), which was not found" in message
    assert "Failed to dlopen libcuda.so.1" in message and "TCONV_EMULATE=1" in message


@pytest.mark.parametrize(("result", "hint"), [(100, "CUDA_VISIBLE_DEVICES=7"), (3, "'spawn'")])
def test_no_device(monkeypatch: pytest.MonkeyPatch, result: int, hint: str) -> None:
    codes = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_NOT_INITIALIZED=3, CUDA_ERROR_NO_DEVICE=100)
    stand_in(
        monkeypatch,
        "driver",
        cuInit=lambda _: (result,),
        CUresult=codes,
        cuGetErrorName=lambda code: (0, b"CUDA_ERROR_NAME"),
        cuGetErrorString=lambda code: (0, b"in words"),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(MissingDependencyError) as raised:
        libraries.driver()
    assert f"CUDA_ERROR_NAME ({result}): in words" in str(raised.value)
    assert hint in str(raised.value)


def test_what_is_installed_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cuda.bindings", None)
        with pytest.raises(MissingDependencyError):
            libraries.nvrtc()
    importlib.import_module("cuda.bindings.nvrtc")
    try:
        libraries.nvrtc()
    except MissingDependencyError as error:
        assert "NVRTC" in str(error), "only the library may be missing now"
