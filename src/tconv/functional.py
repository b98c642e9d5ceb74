"""conv_transpose2d: PyTorch's function on our operators, and `enable`, which replaces PyTorch's.

A call with valid arguments goes to `ops`. Any other goes to PyTorch's operator with the arguments
as they came, so that the error's type and text are PyTorch's own, of whatever version and device.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import ops, settings, tuning
from .counts import Counter, counter
from .problem import Geometry

logger = logging.getLogger("tconv")

_pytorch = torch._C._VariableFunctions.conv_transpose2d
"""PyTorch's own function, which `enable` leaves alone."""

_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})
_STRIDED = torch.strided
_DEFAULT_RULES = (
    Tensor.__torch_function__.__func__,  # type: ignore[attr-defined]
    torch._C._disabled_torch_function_impl,
)

# PyTorch serves longer strides and dilations; most of its kernels read 32 bits of them and raise.
_MAX_STEP = 2**31 - 1

_is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled

_declined: set[str] = set()

_left_to_pytorch: dict[tuple[object, ...] | None, Counter] = {}
"""Calls that PyTorch's own function runs, by what the host reads fastest of them.

A wrong entry costs time, not a result: PyTorch's function checks its arguments, and runs under any
mode, transform or tracer. So the key has the weight's identity, and leaves out what seldom changes
for a weight: the layer's parameters, and flags (TF32, determinism).
"""
_MOST_LEFT = 4096


def _has_own_rules(kind: type[Tensor]) -> bool:
    """Whether a subclass overrides how PyTorch's operators act, which ours would bypass."""
    if hasattr(kind, "_mode_key"):
        # The tracers' own classes, FakeTensor and FunctionalTensor, take any operator.
        return False
    rule = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return rule not in _DEFAULT_RULES or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def _decline(what: str) -> None:
    """Say once that PyTorch serves a CUDA call that we do not, and count it.

    Raises:
        RuntimeError: under TCONV_STRICT=1.
    """
    message = f"tconv has no kernel for {what}: PyTorch's conv_transpose2d runs instead"
    if settings.strict():
        raise RuntimeError(f"{message}, which TCONV_STRICT=1 forbids")
    counter("forward", "pytorch", f"no kernel for {what}").add()
    if what not in _declined:
        _declined.add(what)
        logger.warning(message)


def _leave_to_pytorch(key: tuple[object, ...], served: Counter) -> None:
    if len(_left_to_pytorch) >= _MOST_LEFT:
        _left_to_pytorch.clear()
    _left_to_pytorch[key] = served


def _integer(value: Any) -> int | None:
    """The number that PyTorch would read, or None where it would raise."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, (bool, float)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _pair(value: Any) -> tuple[int, int] | None:
    """Height's and width's number, or None where PyTorch would raise."""
    if type(value) is int:
        return value, value
    if type(value) is tuple and len(value) == 2 and type(value[0]) is type(value[1]) is int:
        return value
    if not isinstance(value, (tuple, list)):
        value = (value,)
    if len(value) == 1:
        value = (value[0], value[0])
    if len(value) != 2:
        return None
    first, second = value
    if type(first) is not int or type(second) is not int:
        first, second = _integer(first), _integer(second)
        if first is None or second is None:
            return None
    return first, second


def _computed_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that the tensor has once autocast, if it is on, has cast it."""
    device = tensor.device.type
    dtype = tensor.dtype
    if dtype.is_floating_point and dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return dtype


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is _STRIDED and not tensor.is_nested


def _has_escaped_vmap(*tensors: Tensor | None) -> bool:
    """Whether one of them is of a torch.vmap that has ended, which PyTorch refuses."""
    if torch._C._are_functorch_transforms_active():
        return False
    is_batched = torch._C._functorch.is_batchedtensor
    return any(tensor is not None and is_batched(tensor) for tensor in tensors)


def _is_valid(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    unobserved: bool,
) -> bool:
    """Whether PyTorch would compute the call, and an output with pixels; input is 4-d."""
    if weight.dim() != 4 or not _is_plain(weight):
        return False
    device = input.device
    dtype = input.dtype
    if weight.device != device:
        return False
    if weight.dtype is not dtype and _computed_dtype(weight) is not _computed_dtype(input):
        return False
    if bias is not None and (
        bias.device != device
        or not _is_plain(bias)
        or (bias.dtype is not dtype and _computed_dtype(bias) is not _computed_dtype(input))
    ):
        return False
    sizes = (
        input.shape,
        weight.shape,
        None if bias is None else bias.shape,
        geometry,
    )
    if unobserved:
        return _has_valid_output(*sizes)
    if torch.compiler.is_compiling():
        # The operator's fake implementation refuses what remains, without narrowing the graph's
        # sizes.
        return _has_valid_sizes(*sizes)
    try:
        return _has_valid_output(*sizes)
    except TypeError:  # symbolic sizes have no hash
        return _has_valid_output.__wrapped__(*sizes)


def _has_valid_sizes(
    input: tuple[int, ...],
    weight: tuple[int, ...],
    bias: tuple[int, ...] | None,
    geometry: Geometry,
) -> bool:
    """Whether channels, groups and the layer's parameters fit each other; shapes are given."""
    stride, padding, output_padding, dilation, groups = geometry
    channels = input[1]
    in_channels, out_channels, kernel_height, kernel_width = weight
    if bias is not None and (len(bias) != 1 or bias[0] != out_channels * groups):
        return False
    if (
        groups < 1
        or channels != in_channels
        or in_channels < groups
        or in_channels % groups
        or out_channels < 1
        or kernel_height < 1
        or kernel_width < 1
    ):
        return False
    for axis in (0, 1):
        step = stride[axis]
        spread = dilation[axis]
        extra = output_padding[axis]
        if step < 1 or spread < 1 or padding[axis] < 0 or extra < 0:
            return False
        if step > _MAX_STEP or spread > _MAX_STEP:
            return False
        if extra >= step and extra >= spread:
            return False
    return True


@functools.lru_cache(maxsize=4096)
def _has_valid_output(
    input: tuple[int, ...],
    weight: tuple[int, ...],
    bias: tuple[int, ...] | None,
    geometry: Geometry,
) -> bool:
    """As `_has_valid_sizes`, and whether the output has pixels.

    Remembered: it runs in each call that `ops.cached_forward` does not serve.
    """
    if not _has_valid_sizes(input, weight, bias, geometry):
        return False
    if input[2] < 1 or input[3] < 1:
        return False
    return min(ops.output_size(input[2:], weight[2:], geometry)) > 0


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """`torch.nn.functional.conv_transpose2d`, on our kernels.

    Args:
        input: [N, Cin, H, W] or [Cin, H, W]. On a CUDA device float16, bfloat16, float32 and
            float64 run our kernels; any other dtype, and a tensor subclass with rules of its own,
            goes to PyTorch's operator and says so once through the logger "tconv". Tensors on
            other devices run PyTorch's operators.
        weight: [Cin, Cout/groups, kH, kW], of the input's dtype and device.
        bias: [Cout] of that dtype and device, or None.
        stride: one number, or height's and width's; so are the three sizes below.
        padding: how many pixels to leave out on each side of the output.
        output_padding: how many pixels to add at the end, fewer than stride or dilation.
        groups: a divisor of Cin.
        dilation: the distance between the kernel's taps.

    Returns:
        [N, Cout, OH, OW], or without N if the input has none, where
        OH = (H - 1)*stride - 2*padding + dilation*(kH - 1) + output_padding + 1. channels_last if
        the input or the weight is.

    Raises:
        RuntimeError: for sizes, dtypes or devices that do not fit, with PyTorch's own message;
            under TCONV_STRICT=1 also where PyTorch would have to run a CUDA call.
        TypeError: for arguments of the wrong type, with PyTorch's own message.
        TconvError: where a kernel cannot be compiled or launched.
    """
    compiling = torch.compiler.is_compiling()
    left_key = None
    if (
        not compiling
        and type(input) is Tensor
        and (input.is_cuda or settings.emulate())
        and not tuning.may_choose()
    ):
        # Most of what PyTorch is to run ends here. Its own function checks its arguments.
        try:
            left_key = (
                id(weight),
                input.shape,
                input.stride(),
                input.dtype,
                _is_grad_enabled(),
                _is_any_autocast_enabled(),
            )
        except RuntimeError:  # a sparse tensor has no strides
            left_key = None
        served = _left_to_pytorch.get(left_key)
        if served is not None:
            served.add()
            return _pytorch(input, weight, bias, stride, padding, output_padding, groups, dilation)
    unobserved = not compiling and ops.unobserved(input, weight, bias)
    arguments = (input, weight, bias, stride, padding, output_padding, groups, dilation)
    if not unobserved:
        if type(input) not in _PLAIN or type(weight) not in _PLAIN or type(bias) not in _PLAIN:
            kinds: set[Any] = {type(input), type(weight), type(bias)} - _PLAIN
            if not all(issubclass(kind, Tensor) for kind in kinds):
                if has_torch_function_variadic(input, weight, bias):
                    # What stands in for a tensor, such as torch.fx's proxy, notes our function.
                    return handle_torch_function(
                        conv_transpose2d, (input, weight, bias), *arguments
                    )
                return _pytorch(*arguments)
            if any(map(_has_own_rules, kinds)):
                if input.device.type == "cuda":
                    _decline("tensors of type " + ", ".join(sorted(k.__name__ for k in kinds)))
                return _pytorch(*arguments)
            if has_torch_function_variadic(input, weight, bias):
                # PyTorch's default rule calls us again, and gives the result its class back.
                return handle_torch_function(conv_transpose2d, (input, weight, bias), *arguments)
        elif input is None or weight is None:
            return _pytorch(*arguments)
        if not compiling and _has_escaped_vmap(input, weight, bias):
            return _pytorch(*arguments)

    # `device.type` takes half a microsecond to make its name.
    device = "cuda" if input.is_cuda else input.device.type
    if not unobserved and torch.jit.is_tracing():
        # A traced module is TorchScript, which must load, or become ONNX, where tconv is not.
        if device == "cuda":
            _decline("torch.jit.trace")
        return _pytorch(*arguments)
    if device != "cuda" and device != "cpu":
        return _pytorch(*arguments)
    dtype = input.dtype
    if dtype not in ops.DTYPES or input.layout is not _STRIDED or input.is_nested:
        if device == "cuda" or settings.emulate():
            _decline(f"{dtype} tensors of layout {input.layout}")
        return _pytorch(*arguments)

    stride_pair = _pair(stride)
    padding_pair = _pair(padding)
    output_padding_pair = _pair(output_padding)
    dilation_pair = _pair(dilation)
    group_count = groups if type(groups) is int else _integer(groups)
    if (
        stride_pair is None
        or padding_pair is None
        or output_padding_pair is None
        or dilation_pair is None
        or group_count is None
    ):
        return _pytorch(*arguments)
    geometry = (stride_pair, padding_pair, output_padding_pair, dilation_pair, group_count)
    dimensions = input.dim()
    if dimensions == 4:
        batch = input
    elif dimensions == 3:
        batch = input.unsqueeze(0)
    else:
        return _pytorch(*arguments)
    output = None
    leave = None if left_key is None else functools.partial(_leave_to_pytorch, left_key)
    cached = (
        unobserved
        and (device == "cuda" or settings.emulate())
        and _is_plain(weight)
        and (bias is None or _is_plain(bias))
    )
    if cached:
        output = ops.cached_forward(batch, weight, bias, geometry, leave)
    if output is None:
        if not _is_valid(batch, weight, bias, geometry, unobserved):
            return _pytorch(*arguments)
        if cached:
            ops.remember(batch, weight, bias, geometry)
            output = ops.cached_forward(batch, weight, bias, geometry, leave)
        if output is None:
            forward = ops.forward_unobserved if unobserved else ops.forward
            output = forward(batch, weight, bias, geometry)
    return output if dimensions == 4 else output.squeeze(0)


# TorchScript cannot compile the above; it takes PyTorch's operator wherever it meets our function.
torch.jit._builtins._register_builtin(conv_transpose2d, "aten::conv_transpose2d")


class _Switch:
    """The state of `enable` and `disable`: one for the process, as PyTorch's names are."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.replaced: dict[Any, Any] = {}  # module -> the function it had

    @property
    def on(self) -> bool:
        return bool(self.replaced)

    def turn(self, on: bool) -> None:
        with self.lock:
            if on == self.on:
                return
            if on:
                modules: tuple[Any, ...] = (torch.nn.functional, torch)
                for module in modules:
                    self.replaced[module] = module.conv_transpose2d
                    module.conv_transpose2d = conv_transpose2d
                return
            for module, replaced in self.replaced.items():
                if module.conv_transpose2d is conv_transpose2d:
                    module.conv_transpose2d = replaced
                else:
                    logger.warning(
                        "%s.conv_transpose2d was replaced by other code after tconv.enable(); "
                        "it is left as it is",
                        module.__name__,
                    )
            self.replaced.clear()


_switch = _Switch()


class _Switched:
    """What `enable` and `disable` return: a context whose exit restores the state before it."""

    def __init__(self, on: bool) -> None:
        with _switch.lock:
            self._before = _switch.on
            _switch.turn(on)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _switch.turn(self._before)


def enable() -> AbstractContextManager[None]:
    """Put our conv_transpose2d in the place of PyTorch's, for code that calls it by name.

    From here on `torch.nn.functional.conv_transpose2d` and `torch.conv_transpose2d` are ours, and
    with them every `torch.nn.ConvTranspose2d`, in the whole process and all of its threads, until
    `disable()`. As a context, `with tconv.enable():`, until the end of the block, where the state
    before it comes back, whatever it was and however the block ends. Enabling twice is enabling
    once. A name that other code has bound before (`from torch.nn.functional import
    conv_transpose2d`) is out of reach.
    """
    return _Switched(True)


def disable() -> AbstractContextManager[None]:
    """Give PyTorch its conv_transpose2d back: the opposite of `enable`, also as a context."""
    return _Switched(False)
