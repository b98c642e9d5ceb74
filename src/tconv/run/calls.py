"""Calls: the key of a call on tensors, and what is remembered under it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor

from tconv import settings
from tconv.memory_format import fits_channels_last, is_channels_last
from tconv.problem import (
    Direction,
    DType,
    Geometry,
    Pair,
    Problem,
    Sizes,
    dense_strides,
    output_shape,
)
from tconv.run import execution
from tconv.run.binding import Call, Settings

Laid = tuple[Sizes, Sizes]
"""Shape and strides of a tensor, strides in elements."""

Forward = Callable[..., Tensor]
"""Maps (input, weight, bias) to the output, for calls of one signature; takes a geometry too."""

DTYPE_NAMES: dict[torch.dtype, DType] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

_known: dict[tuple[object, ...], Forward] = {}
_MOST_KNOWN = 4096


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """The layer's output, [N, Cout, OH, OW], channels_last if the input or the weight is.

    Args:
        input: [N, Cin, H, W], any strides.
        weight: [Cin, Cout/groups, kH, kW], any strides.
        bias: [Cout] or None.
        geometry: of the layer.

    Raises:
        CompileError, LaunchError, NoKernelError, MissingDependencyError, EmulatorError: see there.
    """
    return execution.forward(_find_forward(input, weight, bias, geometry), input, weight, bias)


def input_gradient(
    grad_output: Tensor, weight: Tensor, input_size: Pair, geometry: Geometry
) -> Tensor:
    """The gradient of the input, [N, Cin, H, W], channels_last if grad_output or the weight is.

    Args:
        grad_output: [N, Cout, OH, OW], any strides.
        weight: [Cin, Cout/groups, kH, kW], any strides.
        input_size: (H, W).
        geometry: of the layer.

    Raises:
        CompileError, LaunchError, NoKernelError, MissingDependencyError, EmulatorError: see there.
    """
    shape = (grad_output.shape[0], weight.shape[0], *input_size)
    channels_last = is_channels_last(grad_output) or is_channels_last(weight)
    call = _find(
        "input_gradient",
        geometry,
        grad_output,
        (shape, dense_strides(shape, channels_last)),
        (weight.shape, weight.stride()),
        (grad_output.shape, grad_output.stride()),
    )
    return execution.input_gradient(call, grad_output, weight)


def weight_gradient(
    input: Tensor, grad_output: Tensor, kernel_size: Pair, geometry: Geometry, channels_last: bool
) -> Tensor:
    """The gradient of the weight, [Cin, Cout/groups, kH, kW].

    Args:
        input: [N, Cin, H, W], any strides.
        grad_output: [N, Cout, OH, OW], any strides.
        kernel_size: (kH, kW).
        geometry: of the layer.
        channels_last: the memory format of the result.

    Raises:
        CompileError, LaunchError, NoKernelError, MissingDependencyError, EmulatorError: see there.
    """
    shape = (input.shape[1], grad_output.shape[1] // geometry[4], *kernel_size)
    call = _find(
        "weight_gradient",
        geometry,
        input,
        (input.shape, input.stride()),
        (shape, (0, 0, 0, 0)),  # the kernel writes partial results, which are contiguous
        (grad_output.shape, grad_output.stride()),
    )
    return execution.weight_gradient(call, input, grad_output, channels_last)


def known(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Forward | None:
    """`forward` of calls with this one's signature; None where no such call was `remember`ed.

    Takes tensors of any sizes, dtypes and devices that are strided and not nested. One look-up
    answers two questions: whether the arguments are valid, and what to launch.
    """
    return _known.get(signature(input, weight, bias, geometry))


def remember(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> None:
    """Let `known` find calls like this one. Its arguments are valid and no tensor is empty."""
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    call = _find_forward(input, weight, bias, geometry)
    _known[signature(input, weight, bias, geometry)] = functools.partial(execution.forward, call)


def signature(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> tuple[object, ...]:
    """Everything that decides whether a call's arguments are valid, and which `Call` it is."""
    dtype = input.dtype
    return (
        geometry,
        input.shape,
        input.stride(),
        dtype,
        input.device,
        input.data_ptr() % 16 == 0,
        weight.shape,
        weight.stride(),
        weight.dtype,
        weight.device,
        None if bias is None else (bias.shape, bias.dtype, bias.device),
        dtype is torch.float32 and tf32_allowed(),
        settings.kernel(),
        None if input.is_cuda else (settings.emulate_arch(), settings.sanitize()),
    )


def tf32_allowed() -> bool:
    """Whether float32 convolutions may use TF32, which is PyTorch's default.

    Not where its flags forbid it, cuDNN is off (`torch.backends.cudnn.enabled`), or
    NVIDIA_TF32_OVERRIDE=0 was set by the first call.
    """
    if _TF32_FORBIDDEN or not torch._C._get_cudnn_enabled():
        return False
    if _PRECISION is None:  # torch before 2.9
        return torch.backends.cudnn.allow_tf32
    return bool(_PRECISION("cuda", "conv") == "tf32")


# Read once, as cuDNN and cuBLAS do. cuDNN ignores other values.
_TF32_FORBIDDEN = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"

# What torch.backends.cudnn.conv.fp32_precision reads, in half its time.
_PRECISION = getattr(torch._C, "_get_fp32_precision_getter", None)


def _find_forward(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Call:
    return _find(
        "forward",
        geometry,
        input,
        (input.shape, input.stride()),
        (weight.shape, weight.stride()),
        None,
        bias is not None,
        input.data_ptr() % 16 == 0,
    )


def _find(
    direction: Direction,
    geometry: Geometry,
    tensor: Tensor,
    x: Laid,
    w: Laid,
    y: Laid | None,
    bias: bool = False,
    aligned: bool = True,
) -> Call:
    """The call on tensors that are laid out so, of the dtype and on the device of `tensor`."""
    dtype = tensor.dtype
    if tensor.is_cuda:
        device = tensor.get_device()
        read = (settings.kernel(), "", False)  # the emulator's two mean nothing
    else:
        device = None
        read = (settings.kernel(), settings.emulate_arch(), settings.sanitize())
    tf32 = dtype is torch.float32 and tf32_allowed()
    return _call(direction, geometry, x, w, y, dtype, device, tf32, bias, aligned, read)


@functools.lru_cache(maxsize=4096)
def _call(
    direction: Direction,
    geometry: Geometry,
    x: Laid,
    w: Laid,
    y: Laid | None,
    dtype: torch.dtype,
    device: int | None,
    tf32: bool,
    bias: bool,
    aligned: bool,
    read: Settings,
) -> Call:
    """The call by all that it depends on; `y` is None where the call makes it."""
    if y is None:
        channels_last = fits_channels_last(*x) or fits_channels_last(*w)
        shape = output_shape(x[0], w[0], geometry)
        y = shape, dense_strides(shape, channels_last)
    problem = Problem.of(
        direction,
        x[0],
        w[0],
        geometry,
        dtype=DTYPE_NAMES[dtype],
        tf32=tf32,
        bias=bias,
        strides=(x[1], w[1], y[1]),
        aligned=aligned,
    )
    result = x if direction == "input_gradient" else y
    return Call(problem, *result, (x[1], w[1], y[1]), read, device)
