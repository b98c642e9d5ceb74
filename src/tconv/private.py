"""What tconv uses of PyTorch's private functions, each with a public way behind it.

They are what PyTorch's own Python code calls, in a fraction of its time; a few have no public twin.
Each is looked for once, at import. Where this PyTorch lacks one, what stands in for it gives the
same answer, only later, or the cautious one, with which a call goes through the dispatcher.

This module alone names them: a test imports it where PyTorch has none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def find(path: str, public: Any = None) -> Any:
    """What lies at `torch.<path>`, else the public way."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return public if found is None else found


def perhaps(*_: object) -> bool:
    """The cautious answer to whether something observes a call: it may."""
    return True


# --- what observes a call -----------------------------------------------------------------------

len_dispatch_stack: Callable[[], int] = find("_C._len_torch_dispatch_stack", perhaps)
len_function_stack: Callable[[], int] = find("_C._len_torch_function_stack", perhaps)
are_transforms_active: Callable[[], bool] = find("_C._are_functorch_transforms_active", perhaps)
is_tracing: Callable[[], bool] = find("_C._is_tracing", torch.jit.is_tracing)
is_profiler_enabled: Callable[[], bool] = find("_C._autograd._profiler_enabled", perhaps)
is_zerotensor: Callable[[Tensor], bool] = find("Tensor._is_zerotensor", perhaps)

# NOTE: a tensor of a torch.func level is a plain Tensor to Python, and stays one when its level has
# ended and no transform is active: it is the dispatcher that unwraps it, or says what is wrong.
is_wrapped: Callable[[Tensor], bool] = find("_C._functorch.is_functorch_wrapped_tensor", perhaps)

# What `torch.autograd.grad(is_grads_batched=True)` batches has none, and is not wrapped.
has_storage: Callable[[Tensor], bool] = find("_C._has_storage", lambda _: False)


def _is_batched(_: Tensor) -> bool:
    return False  # then the dispatcher refuses it, in other words than PyTorch's function does


is_batched: Callable[[Tensor], bool] = find("_C._functorch.is_batchedtensor", _is_batched)

# `_current_level` is below 0 where nothing is differentiated in forward mode.
forward_ad: Any = (
    torch.autograd.forward_ad
    if find("autograd.forward_ad._current_level") is not None
    else SimpleNamespace(_current_level=0)
)

# --- autograd -----------------------------------------------------------------------------------


def _any_requires_grad(*arguments: Any) -> bool:
    return any(isinstance(one, Tensor) and one.requires_grad for one in arguments)


# torch 2.6 lacks it.
any_requires_grad: Callable[..., bool] = find("_C._any_requires_grad", _any_requires_grad)

below_autograd: Any = find("_C._AutoDispatchBelowAutograd")
single_level: Any = find("_functorch.utils.enable_single_level_autograd_function")
set_forward_grad_enabled: Any = find("autograd.forward_ad._set_fwd_grad_enabled")
Node: Any = find("autograd.function._SingleLevelFunction", torch.autograd.Function)

has_nodes_below_transforms = (
    None not in (below_autograd, single_level, set_forward_grad_enabled)
    and Node is not torch.autograd.Function
    and are_transforms_active is not perhaps
    and forward_ad is torch.autograd.forward_ad
)
"""Whether our operators can make their own nodes in the dispatcher. Else PyTorch's operators stand
there, which do: our kernels then serve calls that nothing observes, and those without autograd."""

# --- autocast -----------------------------------------------------------------------------------


def _is_any_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


is_any_autocast_enabled: Callable[[], bool] = find(
    "_C._is_any_autocast_enabled", _is_any_autocast_enabled
)


_keys, _key_set = find("_C.DispatchKey"), find("_C.DispatchKeySet")
_exclude = find("_C._ExcludeDispatchKeyGuard")


def without_autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """What makes a context in which the dispatcher leaves out autocast on "cpu" or "cuda"."""
    if None in (_keys, _key_set, _exclude):
        return lambda: torch.autocast(device, enabled=False)
    excluded = _key_set(getattr(_keys, f"Autocast{device.upper()}"))
    return lambda: _exclude(excluded)


# --- what tensors are alike ---------------------------------------------------------------------


def _alike_in_python(*tensors: Tensor) -> Callable[..., bool]:
    def described(one: Tensor) -> tuple[object, ...]:
        # What C compares with the dispatcher's keys: values that do not lie there as they are.
        seen = one.is_neg(), is_zerotensor(one), is_wrapped(one)
        return one.dtype, one.device, one.shape, one.stride(), one.requires_grad, seen

    def surroundings() -> tuple[object, ...]:
        seen = len_dispatch_stack(), are_transforms_active(), is_tracing()
        return *seen, torch.is_autocast_enabled(device)

    kinds = tuple(map(type, tensors))
    kept = tuple(map(described, tensors))
    device = tensors[0].device.type
    then = surroundings()
    return lambda *others: (
        tuple(map(type, others)) == kinds
        and tuple(map(described, others)) == kept
        and surroundings() == then
    )


_guards = find("_C._dynamo.guards.TensorGuards")


def _alike_in_c(*tensors: Tensor) -> Callable[..., bool]:
    sizes = [list(tensor.shape) for tensor in tensors]
    strides = [list(tensor.stride()) for tensor in tensors]
    check: Callable[..., bool] = _guards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    return check


# Takes strided tensors, and makes a function that says whether others (or anything else) have their
# class, dtype, device, sizes and strides, and require gradients as they do, with autocast for their
# device on or off, and modes of operators, transforms and tracers about or not, as they are now. In
# C it is what torch.compile guarded its graphs with, 0.2 us for two tensors where their sizes and
# strides alone take Python 0.4: the dispatcher's keys of a tensor and a thread tell most of it.
alike: Callable[..., Callable[..., bool]] = _alike_in_python if _guards is None else _alike_in_c


def is_watched() -> bool:
    """Whether something that `alike` does not ask about sees this thread's calls."""
    return len_function_stack() != 0 or is_profiler_enabled() or forward_ad._current_level >= 0


# --- flags --------------------------------------------------------------------------------------

_cudnn = torch.backends.cudnn


def _allows_tf32() -> bool:
    if hasattr(_cudnn, "conv"):  # from torch 2.9 on
        return bool(_cudnn.conv.fp32_precision == "tf32")
    return bool(_cudnn.allow_tf32)


_precision = find("_C._get_fp32_precision_getter")

# What `allows_tf32` depends on, of ("cuda", "conv"): a function in C, with no frame around it.
fp32_precision: Callable[[str, str], object] = (
    (lambda *_: _allows_tf32()) if _precision is None else _precision
)
allows_tf32: Callable[[], bool] = (
    _allows_tf32 if _precision is None else lambda: bool(_precision("cuda", "conv") == "tf32")
)


def _allows_tf32_products() -> bool:
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # from torch 2.9 on
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)


allows_tf32_products: Callable[[], bool] = (
    _allows_tf32_products
    if _precision is None
    else lambda: bool(_precision("cuda", "matmul") == "tf32")
)
is_cudnn_enabled: Callable[[], bool] = find("_C._get_cudnn_enabled", lambda: _cudnn.enabled)
is_cudnn_benchmark: Callable[[], bool] = find("_C._get_cudnn_benchmark", lambda: _cudnn.benchmark)
is_cudnn_deterministic: Callable[[], bool] = find(
    "_C._get_cudnn_deterministic", lambda: _cudnn.deterministic
)
is_deterministic: Callable[[], bool] = find(
    "_C._get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)

# --- the device; only CUDA builds of PyTorch have these -----------------------------------------


def _raw_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


current_device: Callable[[], int] = find("_C._cuda_getDevice", torch.cuda.current_device)


is_stream_capturing: Callable[[], bool] = find(
    "_C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


def is_capturing(device: int) -> bool:
    """Whether the device's current stream captures: PyTorch tells it of the current device's."""
    if current_device() == device:
        return is_stream_capturing()
    with torch.cuda.device(device):
        return is_stream_capturing()


raw_stream: Callable[[int], int] = find("_C._cuda_getCurrentRawStream", _raw_stream)

# What torch.compile's code allocates with, past the dispatcher: 2.1 us on a host where
# `new_empty_strided`, which stands in for it, took 3.6.
empty_strided_cuda: Callable[..., Tensor] | None = find("_C._dynamo.guards._empty_strided_cuda")

# --- compilers ----------------------------------------------------------------------------------


def _check(condition: Any, message: Callable[[], str]) -> None:
    if not condition:
        raise RuntimeError(message())


check: Callable[[Any, Callable[[], str]], None] = find("_check", _check)

# Without it TorchScript refuses a scripted module that holds our layer.
register_builtin: Callable[[Any, str], None] = find(
    "jit._builtins._register_builtin", lambda *_: None
)
