"""Which calls a model makes: run on fake tensors, without memory, arithmetic or a GPU.

A copy of the model runs on PyTorch's fake tensors, which have sizes, strides and a dtype alone, and
autograd runs its backward. What reaches our operators is noted, and becomes the problem that the
same call on a GPU has.

The fake tensors are CPU tensors that stand for CUDA's: autograd aborts the process at a fake CUDA
tensor where torch is built without CUDA. So CUDA devices that the model names become the CPU, and
the CPU's autocast stands for CUDA's. It casts what our operators take to the same dtype.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tconv import ops
from tconv.errors import TconvError
from tconv.messages import one_line
from tconv.ops import schema
from tconv.problem import Direction, Problem

_DIRECTIONS: dict[Any, Direction] = {
    schema.forward: "forward",
    schema.input_gradient: "input_gradient",
    schema.weight_gradient: "weight_gradient",
}

_WAY_OUT = (
    "The model runs on tensors without values, so nothing may depend on them (.item(), nonzero, a "
    "branch); `tconv precompile --layer` takes single layers"
)


def record(
    model: torch.nn.Module,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    *,
    backward: bool,
    autocast: torch.dtype | bool | None,
) -> tuple[Problem, ...]:
    """The problems of a model's calls, each once, in the order of the calls.

    Args:
        model: not changed.
        arguments, keywords: what its forward takes; of tensors only what describes them counts.
        backward: whether the gradients of the outputs, by parameters and by the tensors given, are
            computed too; not where gradients are off around the call.
        autocast: the dtype of CUDA's autocast; False for none; None for what is on around the call.

    Raises:
        TconvError: the model fails, makes no call of ours, or has no output that requires grad.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtype = _autocast_dtype(autocast)
    backward = backward and torch.is_grad_enabled()
    recorder = _Recorder()
    # What the copy holds beside its modules' own tensors stays real, and is taken as it comes.
    with FakeTensorMode(allow_non_fake_inputs=True):
        with _saying("copy the model"):
            copied = _fake_copy(model)
        given = tree_map(lambda value: _fake_input(value, backward), (tuple(arguments), keywords))
        with _on_cpu(dtype), recorder:
            with _saying("run the model's forward on fake tensors", _WAY_OUT):
                outputs = copied(*given[0], **given[1])
            if backward:
                _run_backward(outputs)
    if not recorder.problems:
        raise TconvError(_no_calls(model))
    return tuple(recorder.problems)


def _run_backward(outputs: Any) -> None:
    wanted = [
        leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not wanted:
        raise TconvError(
            "precompile computes gradients, but no output of the model requires grad: pass "
            "backward=False for its forward alone"
        )
    with _saying("run the model's backward on fake tensors", _WAY_OUT):
        torch.autograd.backward(wanted, [torch.empty_like(output) for output in wanted])


class _Recorder(TorchDispatchMode):
    """Notes the problems of the calls that reach our operators below autograd and autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: dict[Problem, None] = {}  # in order

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        direction = _DIRECTIONS.get(func)
        if direction is not None:
            self._note(direction, args, result)
        return result

    def _note(self, direction: Direction, arguments: tuple[Any, ...], result: Tensor) -> None:
        from tconv import run

        first, second, third, geometry, *_ = schema.pack(arguments)
        tensors = [tensor for tensor in (first, second, result) if tensor is not None]
        # As `ops.compute`: other dtypes go to PyTorch, and what has no elements launches nothing.
        if first.dtype in ops.DTYPES and all(tensor.numel() for tensor in tensors):
            problem = run.problem_of_fakes(direction, first, second, third, geometry)
            self.problems[problem] = None


class _CudaIsCpu(TorchFunctionMode):
    """CUDA devices that Python code names are the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], "cpu", *args[2:])
        named = {name: _on_the_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_the_cpu, args), **named)


def _on_the_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


@contextlib.contextmanager
def _on_cpu(dtype: torch.dtype | None) -> Iterator[None]:
    """Within, CUDA devices and CUDA's autocast are the CPU's; autocast is on if there is a dtype.

    NOTE: an autocast context is told its device when it is made. One that was made before, and is
    entered within, stays CUDA's and does nothing.
    """
    original, here = torch.autocast.__init__, threading.get_ident()

    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda" and threading.get_ident() == here:
            dtype = torch.get_autocast_dtype("cuda") if dtype is None else dtype
            device_type = "cpu"
        original(self, device_type, dtype, enabled, cache_enabled)

    with (
        mock.patch.object(torch.autocast, "__init__", init),
        torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None),
        _CudaIsCpu(),
        torch.device("cpu"),  # over a default device that is set around the call
    ):
        yield


def _autocast_dtype(wished: torch.dtype | bool | None) -> torch.dtype | None:
    """The dtype of CUDA's autocast, None where it is off."""
    if isinstance(wished, torch.dtype):
        return wished
    if wished:
        return torch.get_autocast_dtype("cuda")
    if wished is None:
        if torch.is_autocast_enabled("cuda"):
            return torch.get_autocast_dtype("cuda")
        within = torch.autocast_increment_nesting() > 1
        torch.autocast_decrement_nesting()
        if within and not torch.cuda.is_available() and not torch.is_autocast_enabled("cpu"):
            raise TconvError(
                "precompile is called within torch.autocast, which PyTorch turns off on a machine "
                "without a GPU: pass autocast=torch.bfloat16, or the dtype that it is to have, or "
                "autocast=False"
            )
    return None


def _fake_copy(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model whose tensors are fake; what the copy does leaves no trace in the model."""
    fakes: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for tensor in held.values():
                if _is_plain(tensor) and id(tensor) not in fakes:
                    fakes[id(tensor)] = _fake(tensor)
    return copy.deepcopy(model, fakes)


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not torch.nn.parameter.is_lazy(value)
        and not value.is_nested
    )


def _fake(tensor: Tensor) -> Tensor:
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, tensor.requires_grad)
    return fake


def _fake_input(value: Any, backward: bool) -> Any:
    """A fake tensor like an example, with its offset in memory; anything else as it is."""
    if not _is_plain(value):
        return value
    reach = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    elements = value.storage_offset() + reach + 1 if value.numel() else value.storage_offset()
    memory = torch.empty(elements, dtype=value.dtype, device="cpu")
    if backward and (value.is_floating_point() or value.is_complex()):
        # Cloned, since PyTorch forbids to write into a leaf that requires grad, as models may do.
        memory = memory.requires_grad_().clone()
    return memory.as_strided(value.size(), value.stride(), value.storage_offset())


@contextlib.contextmanager
def _saying(doing: str, way_out: str = "") -> Iterator[None]:
    """Errors within become one of ours that says what could not be done."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise TconvError(
            f"precompile could not {doing}: {reason}" + (f". {way_out}" if way_out else "")
        ) from error


def _no_calls(model: torch.nn.Module) -> str:
    """Why a model may have made no call of ours, and what to do."""
    kinds = Counter(type(module) for module in model.modules())
    classes = (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d)
    left = [f"{kinds[cls]} torch.nn.{cls.__name__}" for cls in classes if kinds[cls]]
    if left:
        return (
            f"precompile found no call of tconv's, but {' and '.join(left)}: call "
            "tconv.convert(model) before, as the program does, or precompile within `with "
            "tconv.enable():`"
        )
    return (
        "precompile found no call of tconv's: the model's forward reaches no "
        "tconv.ConvTranspose1d or tconv.ConvTranspose2d, and no tconv.conv_transpose1d or "
        "tconv.conv_transpose2d with float tensors"
    )
