"""conv_transpose1d and 2d: PyTorch's functions on our operators, and `enable`, which replaces them.

A call with valid arguments goes to `ops`. Any other goes to PyTorch's operator with the arguments
as they came, so that the error's type and text are PyTorch's own, of whatever version and device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import operator
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import choice, flags, ops, private, settings
from .counts import Counter, counter
from .memory_format import with_height
from .problem import Geometry

logger = logging.getLogger("tconv")

_pytorch = torch.conv_transpose2d
_pytorch1d = torch.conv_transpose1d
"""PyTorch's own functions, which `enable` leaves alone."""

# NOTE: a tuple, since torch.compile before 2.9 cannot look for a class in a set.
_PLAIN = (Tensor, torch.nn.Parameter, type(None))
_STRIDED = torch.strided
_DEFAULT_RULES = (
    Tensor.__torch_function__.__func__,  # type: ignore[attr-defined]
    torch.nn.Parameter.__torch_function__,  # none at all
)

# PyTorch serves longer strides and dilations; most of its kernels read 32 bits of them and raise.
_MAX_STEP = 2**31 - 1

_is_grad_enabled = torch.is_grad_enabled
_overrides = choice.overrides
_TIMING = choice.TIMING

# What may keep calls to our kernels, even if it is set to nothing: then calls take the longer way.
_environment = settings.environment
_STRICT, _KERNEL = settings.own_kernels_keys

_warned: set[str] = set()

# Read so by each call.
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_cudnn_enabled = private.is_cudnn_enabled
_is_cudnn_benchmark = private.is_cudnn_benchmark
_is_cudnn_deterministic = private.is_cudnn_deterministic
_is_deterministic = private.is_deterministic
_of_who_runs = flags.of_who_runs
_fp32_precision = private.fp32_precision
_autocast_dtype = torch.get_autocast_dtype

_Left = tuple[
    tuple[object, ...],  # grad mode, flags, the layer's parameters
    Callable[..., bool],  # whether an input and a weight are as they were
    object,  # the precision of float32 convolutions; None for other dtypes
    str,  # the device, as autocast calls it
    torch.dtype | None,  # what autocast casts to there, if it is on
    bool,  # whether the bias may require gradients, or may not
    Counter,
]
"""A kind of calls that PyTorch's own function runs, by all that the choice depends on.

A plain tuple, which is unpacked faster than one with names.

NOTE: but the tensors' alignment, which takes longer to read than it may matter: the entry is of
aligned ones. Others have the same kernels to choose among or fewer, so PyTorch's operator runs them
no less. Its function checks its arguments itself, and runs under any mode, transform or tracer.
"""

_left_to_pytorch: dict[int, tuple[_Left, ...]] = {}
"""The kinds, by the identity of a weight that a call of theirs had: where to look first.

Identity decides nothing: a new weight in an old one's place is found only if it is alike. So
layers that make a weight in each call soon find their kind wherever that lies.
"""
_MOST_LEFT = 4096
_MOST_OF_A_WEIGHT = 16

_Last = tuple[
    tuple[object, ...],  # grad mode, whether there is no bias, the layer's parameters
    Callable[..., bool],  # whether an input and a weight are as they were
    Callable[[], int],  # counts the calls
    Counter,
]
"""A kind of `_left_to_pytorch`, without the flags that it depends on."""

_last_left: dict[int, _Last] = {}
"""The kind of the last call that `_left` found, by the identity of its weight.

To read the flags takes longer than all else that `_left` does, and in a model that waits for the
host longer than all that PyTorch's layer does before its operator. So each `_EVERY`th of such calls
reads them. If they have changed, those between are PyTorch's still, and its function obeys them.

Both functions look here in their own text: one more call takes as long as much of the rest.
"""
_EVERY = ops.EVERY

_Own = tuple[
    tuple[object, ...],  # own_kernels, grad mode, whether there is no bias, the layer's parameters
    Callable[..., bool],  # whether the input, the weight and the bias, if any, are as they were
    object,  # as in _Left, like the two that follow
    str,
    torch.dtype | None,
    Callable[[], int],  # counts the calls; or says whether the kind goes on
    tuple[bool, ...] | None,  # `flags.of_who_runs`; None if the kind is to go on for some calls
    Callable[[Tensor, Tensor, Tensor | None], Tensor],  # runs the call
]
"""A kind of calls that our kernels run, with their gradients where these are recorded; or, for some
calls, PyTorch's function while it is watched."""

_own_calls: tuple[dict[int, tuple[_Own, ...]], dict[int, tuple[_Own, ...]]] = ({}, {})
"""These kinds of either function, as in `_left_to_pytorch`, by the identity of the weight."""


def _has_own_rules(kind: type[Tensor]) -> bool:
    """Whether a subclass overrides how PyTorch's operators act, which ours would bypass."""
    if hasattr(kind, "_mode_key"):
        # The tracers' own classes, FakeTensor and FunctionalTensor, take any operator.
        return False
    rule = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return rule not in _DEFAULT_RULES or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def _decline(
    kind: _Kind, what: str, input: Tensor | None = None, weight: Tensor | None = None
) -> None:
    """Say once that PyTorch serves a CUDA call that we do not, and count it.

    Args:
        kind: which function was called.
        what: what of the call we do not serve.
        input, weight: the call's; their gradients are PyTorch's too.

    Raises:
        RuntimeError: under TCONV_STRICT=1.
    """
    message = f"tconv has no kernel for {what}: PyTorch's {kind.name} runs instead"
    if settings.strict():
        raise RuntimeError(f"{message}, which TCONV_STRICT=1 forbids")
    reason = f"no kernel for {what}"
    gradients = [
        (direction, "pytorch", reason)
        for direction, tensor in (("input_gradient", input), ("weight_gradient", weight))
        if tensor is not None and tensor.requires_grad and _is_grad_enabled()
    ]
    counter("forward", "pytorch", reason, *gradients).add()
    warn_once(what, message)


def warn_once(what: str, message: str) -> None:
    """Log a warning, unless one of the same matter was logged before."""
    if what not in _warned:
        _warned.add(what)
        logger.warning(message)


def leave_to_torchscript() -> None:
    """Say once what torch.jit.trace and torch.jit.script make of our layers and functions."""
    warn_once(
        "TorchScript",
        "TorchScript (torch.jit.trace, torch.jit.script) holds PyTorch's operator and leaves "
        "tconv's kernels, on every device; torch.compile and torch.export keep them",
    )


def _computed(input: Tensor) -> tuple[object, str, torch.dtype | None]:
    """The precision, the device and the dtype of autocast of an entry of `_Left` or `_Own`."""
    cast = ops.autocast_dtype(input)
    is_float32 = (input.dtype if cast is None else cast) is torch.float32
    precision = _fp32_precision("cuda", "conv") if is_float32 else None
    return precision, "cuda" if input.is_cuda else "cpu", cast


def _leave_to_pytorch(
    state: tuple[object, ...], input: Tensor, weight: Tensor, bias: Tensor | None, served: Counter
) -> None:
    """Let `_left` find calls like this one, which PyTorch's function is to run.

    Args:
        state: what `_left` gave for it.
        input, weight, bias: the call's.
        served: its counter.
    """
    if (input.data_ptr() | weight.data_ptr()) % 16:
        return
    # Where neither of the others requires gradients, that of the bias tells whether some do.
    free = not _is_grad_enabled() or input.requires_grad or weight.requires_grad
    if not free and bias is not None and bias.requires_grad:
        return
    kept = []
    for value in state:
        if not isinstance(value, (int, tuple, list)):
            return  # what it is equal to may change
        kept.append(value.copy() if isinstance(value, list) else value)
    entry = (
        tuple(kept),
        private.alike(input, weight),
        *_computed(input),
        free,
        served,
    )
    if len(_left_to_pytorch) >= _MOST_LEFT:
        _left_to_pytorch.clear()
    first = id(weight)
    for table in _own_calls:
        kinds = _going_on(table.pop(first, ()))
        if kinds:
            table[first] = kinds
    others = _left_to_pytorch.get(first, ())[: _MOST_OF_A_WEIGHT - 1]
    _left_to_pytorch[first] = (entry, *others)


def _going_on(kinds: tuple[_Own, ...]) -> tuple[_Own, ...]:
    """Those that are not over."""
    return tuple([kind for kind in kinds if kind[6] is not None or kind[5]()])


def _keep_own(
    state: tuple[object, ...],
    operands: tuple[Tensor, Tensor, Tensor | None],
    axes: int,
    ready: Callable[[int], Callable[..., Tensor] | None],
    goes_on: Callable[[], bool] | None = None,
) -> None:
    """Let `_own` find calls like this one, whose arguments are valid.

    Args:
        state: what `_left` gave for it.
        operands: the call's input, weight and bias.
        axes: how many spatial axes they have.
        ready: gives what runs such calls on operands of so many axes, if that is known.
        goes_on: whether it runs the next of them; None if it does as long as flags stay.

    A weight's calls of further kinds take the longer way: to make entries in turns takes more.
    """
    input, weight, bias = operands
    others = _going_on(_own_calls[axes - 1].get(id(weight), ()))
    if len(others) >= _MOST_OF_A_WEIGHT:
        return
    if (input.data_ptr() | weight.data_ptr()) % 16 or not (bias is None or bias.is_contiguous()):
        return
    for value in state:
        if not all(
            type(one) in (int, bool) for one in (value if type(value) is tuple else (value,))
        ):
            return
    run = ready(axes)
    if run is None:
        return
    grad_enabled, _, _, *rest = state
    entry = (
        (bool(_overrides), grad_enabled, *rest),
        private.alike(*(operand for operand in operands if operand is not None)),
        *_computed(input),
        goes_on or itertools.count(1).__next__,
        None if goes_on else _of_who_runs(),
        run,
    )
    table = _own_calls[axes - 1]
    if len(table) >= _MOST_LEFT:
        table.clear()
    table[id(weight)] = (entry, *others)


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


def _single(value: Any, neutral: int) -> tuple[int, int] | None:
    """The neutral number for the height, and the width's; None where PyTorch would raise."""
    if isinstance(value, (tuple, list)):
        if len(value) != 1:
            return None
        (value,) = value
    number = value if type(value) is int else _integer(value)
    return None if number is None else (neutral, number)


def _pair(value: Any, _neutral: int) -> tuple[int, int] | None:
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
    if private.are_transforms_active():
        return False
    return any(tensor is not None and private.is_batched(tensor) for tensor in tensors)


def _is_valid(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    unobserved: bool,
    once: bool,
) -> bool:
    """Whether PyTorch would compute the call, and an output with pixels; input is 4-d.

    Args:
        input, weight, bias, geometry: of the call.
        unobserved: whether nothing watches it.
        once: whether calls like it are not asked about again.
    """
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
        return (_has_valid_output.__wrapped__ if once else _has_valid_output)(*sizes)
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


def _left(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: Any,
    dilation: Any,
) -> tuple[tuple[object, ...] | None, Counter | None]:
    """Whether PyTorch is known to run a call, whose arguments nobody has looked at.

    Every call that PyTorch runs waits for this, in a program whose caches hold other things: a
    function called or an object made here takes four times what a loop of such calls shows.

    Returns:
        what `_leave_to_pytorch` takes, None where the call may not be left; the call's counter if
        it is.

    NOTE: both are None under torch.compile, so that no graph is guarded by what the table holds.
    """
    if (  # `flags.are_usual` in its own text
        _is_dynamo_compiling()
        or _TIMING in _overrides
        or _is_cudnn_benchmark()
        or not _is_cudnn_enabled()
        or _STRICT in _environment
        or _KERNEL in _environment
    ):
        return None, None
    state = (
        _is_grad_enabled(),
        _is_cudnn_deterministic(),
        _is_deterministic(),
        bias is None,
        stride,
        padding,
        output_padding,
        groups,
        dilation,
    )
    try:
        left = () if _overrides else _left_to_pytorch.get(id(weight), ())
        for kept, alike, precision, device, cast, free, served in left:
            if (
                kept == state
                and alike(input, weight)
                and (precision is None or _fp32_precision("cuda", "conv") == precision)
                and (cast is None or _autocast_dtype(device) is cast)
                and (free or bias is None or not bias.requires_grad)
            ):
                if free:
                    if len(_last_left) >= _MOST_LEFT:
                        _last_left.clear()
                    grad_enabled, _, _, *rest = kept
                    turn = itertools.count(1).__next__
                    _last_left[id(weight)] = (grad_enabled, *rest), alike, turn, served
                return state, served
    except (TypeError, ValueError, RuntimeError):
        # What only looks like a number, or has no strides: who checks the arguments says so.
        return None, None
    return state, None


def _own(
    kinds: tuple[_Own, ...],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: Any,
    dilation: Any,
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """What runs a call of a kind of `_Own`, if that is known; its arguments were valid then.

    As our kernels, unlike PyTorch's function, see no mode, transform or tracer, and read vectors,
    more is asked than by `_left`, and less often: what changes a result in each call, the flags in
    each `_EVERY`th. The layer's parameters have to be the very objects: 1.0 equals 1, and PyTorch
    raises.

    Args:
        kinds: those that the call's weight is known for.
    """
    if _TIMING in _overrides:
        return None
    around = bool(_overrides), _is_grad_enabled(), bias is None
    called = *around, stride, padding, output_padding, groups, dilation
    try:
        for kept, alike, precision, device, cast, turn, flags_then, run in kinds:
            if (
                all(map(operator.is_, kept, called))
                and (alike(input, weight) if bias is None else alike(input, weight, bias))
                and not (input.data_ptr() | weight.data_ptr()) % 16
                # Without cuDNN nothing allows TF32.
                and (precision is None or _is_cudnn_enabled())
                and (precision is None or _fp32_precision("cuda", "conv") == precision)
                and (cast is None or _autocast_dtype(device) is cast)
                and not private.is_watched()
                and (turn() % _EVERY or _of_who_runs() == flags_then)
            ):
                return run
    except (TypeError, ValueError, RuntimeError):  # as in `_left`
        pass
    return None


def _convolve(kind: _Kind, arguments: tuple[Any, ...], state: tuple[object, ...] | None) -> Tensor:
    """A call of `conv_transpose1d` or `conv_transpose2d`, whose arguments nobody has looked at.

    Args:
        kind: which of the two.
        arguments: the call's.
        state: what `_left` gave for it.
    """
    input, weight, bias, stride, padding, output_padding, groups, dilation = arguments
    compiling = torch.compiler.is_compiling()
    unobserved = not compiling and ops.unobserved(input, weight, bias)
    if not unobserved:
        if type(input) not in _PLAIN or type(weight) not in _PLAIN or type(bias) not in _PLAIN:
            kinds: set[Any] = {type(input), type(weight), type(bias)}.difference(_PLAIN)
            if not all(issubclass(kind, Tensor) for kind in kinds):
                if has_torch_function_variadic(input, weight, bias):
                    # What stands in for a tensor, such as torch.fx's proxy, notes our function.
                    return handle_torch_function(kind.ours, (input, weight, bias), *arguments)
                return kind.pytorch(*arguments)
            if any(map(_has_own_rules, kinds)):
                if input.device.type == "cuda":
                    names = ", ".join(sorted(one.__name__ for one in kinds))
                    _decline(kind, f"tensors of type {names}", input, weight)
                return kind.pytorch(*arguments)
            if has_torch_function_variadic(input, weight, bias):
                # PyTorch's default rule calls us again, and gives the result its class back.
                return handle_torch_function(kind.ours, (input, weight, bias), *arguments)
        elif input is None or weight is None:
            return kind.pytorch(*arguments)
        if not compiling and _has_escaped_vmap(input, weight, bias):
            return kind.pytorch(*arguments)

    # `device.type` takes half a microsecond to make its name.
    device = "cuda" if input.is_cuda else input.device.type
    if not unobserved and torch.jit.is_tracing():
        # A traced module is TorchScript, which must load, or become ONNX, where tconv is not.
        if device == "cuda":
            _decline(kind, "torch.jit.trace", input, weight)
        else:
            leave_to_torchscript()
        return kind.pytorch(*arguments)
    if device != "cuda" and device != "cpu":
        return kind.pytorch(*arguments)
    dtype = input.dtype
    if dtype not in ops.DTYPES or input.layout is not _STRIDED or input.is_nested:
        if device == "cuda" or settings.emulate():
            _decline(kind, f"{dtype} tensors of layout {input.layout}", input, weight)
        return kind.pytorch(*arguments)

    stride_pair = kind.sizes(stride, 1)
    padding_pair = kind.sizes(padding, 0)
    output_padding_pair = kind.sizes(output_padding, 0)
    dilation_pair = kind.sizes(dilation, 1)
    group_count = groups if type(groups) is int else _integer(groups)
    if (
        stride_pair is None
        or padding_pair is None
        or output_padding_pair is None
        or dilation_pair is None
        or group_count is None
    ):
        return kind.pytorch(*arguments)
    geometry = (stride_pair, padding_pair, output_padding_pair, dilation_pair, group_count)
    unbatched = input.dim() == kind.axes + 1
    batch = input.unsqueeze(0) if unbatched else input
    if kind.axes == 1:
        if batch.dim() != 3 or weight.dim() != 3 or not _is_plain(weight):
            return kind.pytorch(*arguments)
        tall = with_height(batch), with_height(weight)
    elif batch.dim() != 4:
        return kind.pytorch(*arguments)
    else:
        tall = batch, weight
    output = None
    leave = None if state is None else functools.partial(_leave_to_pytorch, state, *arguments[:3])
    keep = None
    if state is not None and not unbatched:
        keep = functools.partial(_keep_own, state, arguments[:3], kind.axes)
    cached = (
        unobserved
        and (device == "cuda" or settings.emulate())
        and _is_plain(weight)
        and (bias is None or _is_plain(bias))
    )
    if cached:
        output = ops.cached_forward(batch, weight, bias, geometry, leave, keep)
    if output is None:
        if not _is_valid(*tall, bias, geometry, unobserved, cached):
            return kind.pytorch(*arguments)
        if cached:
            ops.remember(batch, weight, bias, geometry)
            output = ops.cached_forward(batch, weight, bias, geometry, leave, keep)
        if output is None:
            forward = ops.forward_unobserved if unobserved else ops.forward
            output = forward(batch, weight, bias, geometry)
    return output.squeeze(0) if unbatched else output


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """`torch.nn.functional.conv_transpose1d`, on our kernels: `conv_transpose2d` of a height of 1.

    Nothing is copied for that.

    Args:
        input: [N, Cin, L] or [Cin, L]; dtypes and devices as in `conv_transpose2d`.
        weight: [Cin, Cout/groups, k], of the input's dtype and device.
        bias: [Cout] of that dtype and device, or None.
        stride, padding, output_padding, groups, dilation: as in `conv_transpose2d`, along L.

    Returns:
        [N, Cout, OL], or without N if the input has none, contiguous.

    Raises:
        RuntimeError, TypeError, TconvError: as `conv_transpose2d`, with PyTorch's own message.
    """
    compiling = _is_dynamo_compiling()
    last = None if compiling else _last_left.get(id(weight))
    if last is not None:
        kept, alike, turn, served = last
        called = _is_grad_enabled(), bias is None, stride, padding, output_padding, groups, dilation
        try:
            stays = kept == called and alike(input, weight) and not _overrides and turn() % _EVERY
        except (TypeError, ValueError, RuntimeError):  # as in `_left`
            stays = False
        if stays:
            # Most of what PyTorch is to run ends here. Its own function checks its arguments.
            served.add()
            return _pytorch1d(
                input, weight, bias, stride, padding, output_padding, groups, dilation
            )
    kinds = None if compiling else _own_calls[0].get(id(weight))
    if kinds is not None:
        run = _own(kinds, input, weight, bias, stride, padding, output_padding, groups, dilation)
        if run is not None:
            return run(input, weight, bias)
    state, found = _left(input, weight, bias, stride, padding, output_padding, groups, dilation)
    if found is not None:
        found.add()
        return _pytorch1d(input, weight, bias, stride, padding, output_padding, groups, dilation)
    if last is not None:
        _last_left.pop(id(weight), None)
    arguments = (input, weight, bias, stride, padding, output_padding, groups, dilation)
    return _convolve(_ONE, arguments, state)


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
            float64 run our kernels, or PyTorch's operator where that is faster. Any other dtype,
            and a tensor subclass with rules of its own, goes to PyTorch's operator and says so once
            through the logger "tconv". Tensors on other devices run PyTorch's operators.
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
    compiling = _is_dynamo_compiling()
    last = None if compiling else _last_left.get(id(weight))
    if last is not None:
        kept, alike, turn, served = last
        called = _is_grad_enabled(), bias is None, stride, padding, output_padding, groups, dilation
        try:
            stays = kept == called and alike(input, weight) and not _overrides and turn() % _EVERY
        except (TypeError, ValueError, RuntimeError):  # as in `_left`
            stays = False
        if stays:
            # Most of what PyTorch is to run ends here. Its own function checks its arguments.
            served.add()
            return _pytorch(input, weight, bias, stride, padding, output_padding, groups, dilation)
    kinds = None if compiling else _own_calls[1].get(id(weight))
    if kinds is not None:
        run = _own(kinds, input, weight, bias, stride, padding, output_padding, groups, dilation)
        if run is not None:
            return run(input, weight, bias)
    state, found = _left(input, weight, bias, stride, padding, output_padding, groups, dilation)
    if found is not None:
        found.add()
        return _pytorch(input, weight, bias, stride, padding, output_padding, groups, dilation)
    if last is not None:
        _last_left.pop(id(weight), None)
    arguments = (input, weight, bias, stride, padding, output_padding, groups, dilation)
    return _convolve(_TWO, arguments, state)


# TorchScript cannot compile the above; it takes PyTorch's operator wherever it meets our function.
private.register_builtin(conv_transpose1d, "aten::conv_transpose1d")
private.register_builtin(conv_transpose2d, "aten::conv_transpose2d")


@dataclasses.dataclass(frozen=True)
class _Kind:
    """One of the two functions.

    Attributes:
        axes: how many spatial ones.
        name: of PyTorch's function and of ours.
        ours, pytorch: these.
        sizes: height's and width's number from an argument and the height's neutral number; None
            where PyTorch would raise.
    """

    axes: int
    name: str
    ours: Callable[..., Tensor]
    pytorch: Callable[..., Tensor]
    sizes: Callable[[Any, int], tuple[int, int] | None]


_ONE = _Kind(1, "conv_transpose1d", conv_transpose1d, _pytorch1d, _single)
_TWO = _Kind(2, "conv_transpose2d", conv_transpose2d, _pytorch, _pair)


class _Switch:
    """The state of `enable` and `disable`: one for the process, as PyTorch's names are."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.replaced: dict[Any, Any] = {}  # (module, kind) -> the function it had

    @property
    def on(self) -> bool:
        return bool(self.replaced)

    def turn(self, on: bool) -> None:
        with self.lock:
            if on == self.on:
                return
            if on:
                for module in (torch.nn.functional, torch):
                    for kind in (_ONE, _TWO):
                        self.replaced[module, kind] = getattr(module, kind.name)
                        setattr(module, kind.name, kind.ours)
                return
            for (module, kind), replaced in self.replaced.items():
                if getattr(module, kind.name) is kind.ours:
                    setattr(module, kind.name, replaced)
                else:
                    logger.warning(
                        "%s.%s was replaced by other code after tconv.enable(); it is left as it "
                        "is",
                        module.__name__,
                        kind.name,
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
    """Put our conv_transpose1d and 2d in the place of PyTorch's, for code that calls them by name.

    From here on `torch.nn.functional.conv_transpose2d` and `torch.conv_transpose2d` are ours, with
    them every `torch.nn.ConvTranspose2d`, and likewise in one dimension: in the whole process and
    all of its threads, until `disable()`. As a context, `with tconv.enable():`, until the end of
    the block, where the state before it comes back, whatever it was and however the block ends.
    Enabling twice is enabling once. A name that other code has bound before (`from
    torch.nn.functional import conv_transpose2d`) is out of reach.
    """
    return _Switched(True)


def disable() -> AbstractContextManager[None]:
    """Give PyTorch its functions back: the opposite of `enable`, also as a context."""
    return _Switched(False)
