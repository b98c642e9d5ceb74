"""Calls: the key of a call on tensors, and what is remembered under it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tconv import choice, private, settings, tuning
from tconv.counts import Counter
from tconv.flags import is_deterministic, library_without_cudnn, tf32_allowed
from tconv.memory_format import fits_channels_last, sizes_of
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
from tconv.run import choosing, execution
from tconv.run.binding import Call, Settings
from tconv.tuning import PYTORCH

Laid = tuple[Sizes, Sizes]
"""Shape and strides of a tensor, strides in elements."""

Address = Callable[[Tensor], int]
"""The address of a tensor."""

DTYPE_NAMES: dict[torch.dtype, DType] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

_known: dict[tuple[object, ...], Known] = {}
_known_gradients: dict[tuple[object, ...], tuple[Call, Call]] = {}
_MOST_KNOWN = 4096
_PATIENCE = 16
"""Calls within our node after which its gradients count as PyTorch's, if nobody has timed them."""


class Known:
    """`forward` of calls of one signature, whose arguments are valid."""

    __slots__ = ("_call", "_cast", "_geometry", "_laid", "_pytorchs", "_waited", "_watching")

    def __init__(self, call: Call, geometry: Geometry, cast: bool) -> None:
        self._call = call
        self._geometry = geometry
        self._cast = cast  # by autocast
        self._pytorchs: dict[tuple[object, ...], Counter | None] = {}
        self._watching: dict[tuple[object, ...], Counter] = {}
        self._waited = 0
        self._laid = call.strides[2], True  # the output's gradient, until one is seen

    def __call__(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Tensor:
        """The layer's output."""
        return execution.forward(self._call, input, weight, bias, geometry)

    def ready(self, axes: int) -> Callable[..., Tensor] | None:
        """What runs the call on a GPU, where it is known who does.

        Args:
            axes: as in `execution.ready_forward`.
        """
        way = choosing.known(self._call, tuning.mode())
        if way is None or self._call.device is None:
            return None
        if way.candidate is PYTORCH:
            return execution.ready_forward_by_pytorch(way, self._geometry, axes)
        return execution.ready_forward(self._call, way, axes)

    def see(self, grad_output: Tensor) -> None:
        """Keep how the output's gradient lies; programs have it otherwise than the output.

        Args:
            grad_output: [N, Cout, OH, OW].
        """
        self._laid = grad_output.stride(), grad_output.data_ptr() % 16 == 0

    def is_settled(self, differentiable: bool, wanted: tuple[bool, bool]) -> bool:
        """Whether it is known who runs the call, with its gradients if there are any.

        Args:
            differentiable, wanted: as for `pytorchs`.
        """
        return (tuning.mode(), differentiable, *wanted) in self._pytorchs

    def pytorchs(self, differentiable: bool, wanted: tuple[bool, bool]) -> Counter | None:
        """The counter of the call where PyTorch's own function, with its own backward, runs it.

        As long as that is not settled `watch` is to see it.

        Args:
            differentiable: whether gradients may be asked for.
            wanted: whether the input's and the weight's may.
        """
        key = (tuning.mode(), differentiable, *wanted)
        if key in self._pytorchs:
            return self._pytorchs[key]
        if key in self._watching and choosing.is_being_watched(self._call, wanted):
            return self._watching[key]
        gradients = self._gradients if differentiable else None
        # A program may never ask for the gradients, or ask for them of another layout.
        waited = self._waited >= _PATIENCE
        found, is_settled = choosing.leave_to_pytorch(
            self._call, gradients, wanted, waited, self._cast
        )
        if is_settled:
            self._pytorchs[key] = found
        elif found is not None:
            self._watching[key] = found
        elif differentiable and not choosing.is_capturing(self._call):
            self._waited += 1
        return found

    def watch(self, wanted: tuple[bool, bool]) -> tuning.Watch:
        """Sees PyTorch's function run the call; `wanted` as for `pytorchs`."""
        return self._call.watch(wanted)

    def _gradients(self) -> tuple[Call, Call]:
        return _find_gradients(self._call, self._geometry, *self._laid)


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
    call = _find_forward(input, weight, bias, geometry)
    return execution.forward(call, input, weight, bias, geometry)


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
    call = _find_input_gradient(grad_output, weight, input_size, geometry)
    return execution.input_gradient(call, grad_output, weight, input_size, geometry)


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
    call = _find_weight_gradient(input, grad_output, kernel_size, geometry, channels_last)
    return execution.weight_gradient(call, input, grad_output, kernel_size, geometry, channels_last)


def gradients(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    geometry: Geometry,
    channels_last: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of the input and the weight.

    Args:
        grad_output: [N, Cout, OH, OW], any strides.
        input: [N, Cin, H, W], any strides.
        weight: [Cin, Cout/groups, kH, kW], any strides.
        geometry: of the layer.
        channels_last: the memory format of the weight's gradient.

    Raises:
        CompileError, LaunchError, NoKernelError, MissingDependencyError, EmulatorError: see there.
    """
    aligned = grad_output.data_ptr() % 16 == 0
    key = (signature(input, weight, None, geometry), grad_output.stride(), aligned)
    calls = _known_gradients.get(key)
    if calls is None:
        if len(_known_gradients) >= _MOST_KNOWN:
            _known_gradients.clear()
        image, kernel = sizes_of(input), sizes_of(weight)
        calls = _known_gradients[key] = (
            _find_input_gradient(grad_output, weight, image, geometry),
            _find_weight_gradient(input, grad_output, kernel, geometry, channels_last),
        )
    return execution.gradients(calls, grad_output, input, weight, geometry, channels_last)


def ready_gradients(
    grad_output: Tensor,
    input: Tensor | None,
    weight: Tensor | None,
    sizes: tuple[Sizes, Sizes],
    geometry: Geometry,
    channels_last: bool,
) -> Callable[[Tensor, Any, Any], tuple[Tensor | None, Tensor | None]] | None:
    """What computes the gradients of calls like this one; None unless it is known who runs each.

    It takes the output's gradient, the input and the weight, of calls that differ in their
    addresses alone, and gives the gradients of both.

    Args:
        grad_output: [N, Cout, OH, OW], any strides.
        input: [N, Cin, H, W], any strides; None if the weight's gradient is not wanted.
        weight: [Cin, Cout/groups, kH, kW], any strides; None if the input's gradient is not wanted.
        sizes: of the input and the weight.
        geometry: of the layer.
        channels_last: the memory format of the weight's gradient.
    """
    of_input = of_weight = None
    if weight is not None:
        image = (sizes[0][2], sizes[0][3])
        call = _find_input_gradient(grad_output, weight, image, geometry)
        of_input = execution.ready(call, image, geometry)
        if of_input is None:
            return None
    if input is not None:
        kernel = (sizes[1][2], sizes[1][3])
        call = _find_weight_gradient(input, grad_output, kernel, geometry, channels_last)
        of_weight = execution.ready(call, kernel, geometry, channels_last)
        if of_weight is None:
            return None
    return execution.ready_gradients(of_input, of_weight)


def known(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    cast: torch.dtype | None = None,
) -> Known | None:
    """`forward` of calls with this one's signature; None where no such call was `remember`ed.

    Takes tensors of any sizes, dtypes and devices that are strided and not nested. One look-up
    answers two questions: whether the arguments are valid, and what to launch.

    Args:
        input, weight, bias, geometry: of the call.
        cast: the dtype that autocast casts the tensors to before it runs.
    """
    return _known.get((signature(input, weight, bias, geometry), cast))


def remember(
    key: tuple[Any, ...], input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> None:
    """Let `known` find calls like this one. Its arguments are valid and no tensor is empty.

    Args:
        key: the signature of the call, and the dtype that autocast casts its tensors to.
        input, weight, bias: as autocast cast them.
        geometry: of the layer.
    """
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    call = _find_forward(input, weight, bias, geometry)
    signed, cast = key
    # The same without torch.Size, which unlike a tuple the garbage collector never ignores.
    signed = tuple([tuple(part) if type(part) is torch.Size else part for part in signed])
    _known[signed, cast] = Known(call, geometry, cast is not None)


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
        weight.data_ptr() % 16 == 0,
        weight.dtype,
        weight.device,
        None if bias is None else (*bias.shape, bias.dtype, bias.device),
        _read(input.is_cuda, dtype),
    )


def _read(is_cuda: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    """The settings and flags that a call depends on, as in `Settings`."""
    float32 = dtype is torch.float32
    tf32 = float32 and tf32_allowed()
    if is_cuda:
        library = "cudnn" if private.is_cudnn_enabled() else library_without_cudnn(float32)
        # The emulator's two mean nothing here.
        return settings.kernel(), "", False, choice.own_only(), is_deterministic(), tf32, library
    emulated = (settings.emulate_arch(), settings.sanitize())
    return settings.kernel(), *emulated, True, False, tf32, ""


def problem_of_fakes(
    direction: Direction, first: Tensor, second: Tensor, third: Any, geometry: Geometry
) -> Problem:
    """The problem of a call on fake tensors, as if they were on a GPU.

    Args:
        direction: of the call.
        first, second, third, geometry: the arguments of the map of that name, up to its geometry.
    """
    if direction == "forward":
        return _find_forward(first, second, third, geometry, _address_of_fake).problem
    if direction == "input_gradient":
        return _find_input_gradient(first, second, third, geometry, _address_of_fake).problem
    return _find_weight_gradient(first, second, third, geometry, False, _address_of_fake).problem


def _address_of_fake(tensor: Tensor) -> int:
    # It has none. Those that PyTorch allocates are multiples of 16.
    return int(tensor.storage_offset()) * tensor.element_size()


def _find_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    address: Address = Tensor.data_ptr,
) -> Call:
    return _find(
        "forward",
        geometry,
        input,
        _laid(input),
        _laid(weight),
        None,
        bias is not None,
        address(input) % 16 == 0,
        address(weight) % 16 == 0,
    )


def _find_input_gradient(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Pair,
    geometry: Geometry,
    address: Address = Tensor.data_ptr,
) -> Call:
    w, y = _laid(weight), _laid(grad_output)
    x = _made((y[0][0], w[0][0], *input_size), w, y)
    aligned, weight_aligned = (address(tensor) % 16 == 0 for tensor in (grad_output, weight))
    return _find("input_gradient", geometry, grad_output, x, w, y, False, aligned, weight_aligned)


def _find_weight_gradient(
    input: Tensor,
    grad_output: Tensor,
    kernel_size: Pair,
    geometry: Geometry,
    channels_last: bool,
    address: Address = Tensor.data_ptr,
) -> Call:
    x, y = _laid(input), _laid(grad_output)
    shape = (x[0][1], y[0][1] // geometry[4], *kernel_size)
    w = shape, dense_strides(shape, channels_last)
    aligned = address(input) % 16 == address(grad_output) % 16 == 0
    return _find("weight_gradient", geometry, input, x, w, y, aligned=aligned)


def _find_gradients(
    call: Call, geometry: Geometry, strides: Sizes, aligned: bool
) -> tuple[Call, Call]:
    """The calls of a forward's two gradients.

    Args:
        call: the forward call.
        geometry: of the layer.
        strides, aligned: of the output's gradient.
    """
    problem = call.problem
    x, w = (problem.x_shape, call.strides[0]), (problem.w_shape, call.strides[1])
    y = (problem.y_shape, strides)
    rest = (problem.dtype, call.device, False, aligned, True, call.settings)
    return (
        _call("input_gradient", geometry, _made(x[0], w, y), w, y, *rest),
        _call("weight_gradient", geometry, x, _made(w[0], w), y, *rest),
    )


def _laid(tensor: Tensor) -> Laid:
    """NOTE: no torch.Size, as in `remember`."""
    return tuple(tensor.shape), tensor.stride()


def _made(shape: Sizes, *operands: Laid) -> Laid:
    """A result of that shape: channels_last if one of the operands is."""
    return shape, dense_strides(shape, any(fits_channels_last(*operand) for operand in operands))


def _find(
    direction: Direction,
    geometry: Geometry,
    tensor: Tensor,
    x: Laid,
    w: Laid,
    y: Laid | None,
    bias: bool = False,
    aligned: bool = True,
    weight_aligned: bool = True,
) -> Call:
    """The call on tensors that are laid out so, of the dtype and on the device of `tensor`."""
    device = tensor.get_device() if tensor.is_cuda else None
    read = _settings(_read(tensor.is_cuda, tensor.dtype))
    dtype = DTYPE_NAMES[tensor.dtype]
    return _call(direction, geometry, x, w, y, dtype, device, bias, aligned, weight_aligned, read)


@functools.lru_cache(maxsize=64)
def _settings(read: tuple[Any, ...]) -> Settings:
    """One object of those that are equal: all calls of a program have the same few."""
    return Settings(*read)


@functools.lru_cache(maxsize=4096)
def _call(
    direction: Direction,
    geometry: Geometry,
    x: Laid,
    w: Laid,
    y: Laid | None,
    dtype: DType,
    device: int | None,
    bias: bool,
    aligned: bool,
    weight_aligned: bool,
    read: Settings,
) -> Call:
    """The call by all that it depends on; `y` is None where the call makes it."""
    if y is None:
        y = _made(output_shape(x[0], w[0], geometry), x, w)
    problem = Problem.of(
        direction,
        x[0],
        w[0],
        geometry,
        dtype=dtype,
        tf32=read.tf32,
        bias=bias,
        strides=(x[1], w[1], y[1]),
        aligned=aligned,
        weight_aligned=weight_aligned,
    )
    result = {"forward": y, "input_gradient": x, "weight_gradient": w}[direction]
    return Call(problem, *result, (x[1], w[1], y[1]), read, device)
