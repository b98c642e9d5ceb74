"""The three maps on tensors: make the problem, plan it, allocate the result, launch.

For CUDA tensors, and under TCONV_EMULATE=1 for CPU tensors, whose kernels the emulator runs.
Arguments have been checked by `functional`; none of the tensors is empty.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tconv import settings, tuning
from tconv.emulator import tensor_map as emulated_map
from tconv.emulator.launch import EmulatedKernel
from tconv.errors import CompileError, LaunchError
from tconv.jit import runtime, tensor_map
from tconv.jit.module import Kernel, Launch
from tconv.jit.target import Target
from tconv.kernels.launch import BoundLaunch
from tconv.kernels.source import KernelSource
from tconv.memory_format import fits_channels_last, is_channels_last, memory_format
from tconv.plan import Candidate, Plan, make_plan, plan
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

_NO_STRIDES = (0, 0, 0, 0)

DTYPE_NAMES: dict[torch.dtype, DType] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    """The layer's output, [N, Cout, OH, OW], channels_last if the input or the weight is.

    Args:
        input: [N, Cin, H, W], any strides.
        weight: [Cin, Cout/groups, kH, kW], any strides.
        bias: [Cout] or None.
        stride, padding, output_padding, dilation: (height, width), in pixels.
        groups: divides Cin and Cout.

    Raises:
        CompileError, LaunchError, NoKernelError, MissingDependencyError, EmulatorError: see there.
    """
    geometry = (stride, padding, output_padding, dilation, groups)
    return _forward(_find("forward", geometry, input, weight, None, bias), input, weight, bias)


def _forward(
    call: _Call, input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: object
) -> Tensor:
    """`forward` on a call that was found, which holds the geometry."""
    if bias is not None:
        bias = bias.contiguous()
    output = _empty_strided(input, call.y_shape, call.strides[2], input.dtype)
    _launch(call, input, weight, output, bias)
    return output


Forward = Callable[..., Tensor]
"""`forward` of calls that are like one another."""

_known: dict[tuple[object, ...], Forward] = {}
_MOST_KNOWN = 4096


def known(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Forward | None:
    """`forward` of calls like this one, if one of them was `remember`ed, whose arguments are sound.

    For tensors of any sizes, dtypes and devices that are strided and not nested. To find out that
    they fit each other, and then what to launch, takes the host twice as long.
    """
    return _known.get(likeness(input, weight, bias, geometry))


def remember(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> None:
    """Let `known` find calls like this one, whose arguments are sound and no tensor empty."""
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    call = _find("forward", geometry, input, weight, None, bias)
    _known[likeness(input, weight, bias, geometry)] = functools.partial(_forward, call)


def likeness(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> tuple[object, ...]:
    """All that it depends on whether a call's arguments are sound, and what `_find` finds."""
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


def input_gradient(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Pair,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    """The gradient of the input, [N, Cin, H, W], channels_last if grad_output or the weight is.

    Args:
        grad_output: [N, Cout, OH, OW], any strides.
        weight: [Cin, Cout/groups, kH, kW], any strides.
        input_size: (H, W).
        stride, padding, output_padding, dilation: (height, width), in pixels.
        groups: divides Cin and Cout.

    Raises:
        CompileError, LaunchError, NoKernelError, MissingDependencyError, EmulatorError: see there.
    """
    geometry = (stride, padding, output_padding, dilation, groups)
    size = (grad_output.shape[0], weight.shape[0], *input_size)
    channels_last = is_channels_last(grad_output) or is_channels_last(weight)
    strides = dense_strides(size, channels_last)
    gradient = _empty_strided(grad_output, size, strides, grad_output.dtype)
    call = _find("input_gradient", geometry, gradient, weight, grad_output)
    _launch(call, gradient, weight, grad_output)
    return gradient


def weight_gradient(
    input: Tensor,
    grad_output: Tensor,
    kernel_size: Pair,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    dilation: Pair,
    groups: int,
    channels_last: bool,
) -> Tensor:
    """The gradient of the weight, [Cin, Cout/groups, kH, kW].

    Args:
        input: [N, Cin, H, W], any strides.
        grad_output: [N, Cout, OH, OW], any strides.
        kernel_size: (kH, kW).
        stride, padding, output_padding, dilation: (height, width), in pixels.
        groups: divides Cin and Cout.
        channels_last: the memory format of the result.

    Raises:
        CompileError, LaunchError, NoKernelError, MissingDependencyError, EmulatorError: see there.
    """
    geometry = (stride, padding, output_padding, dilation, groups)
    shape = (input.shape[1], grad_output.shape[1] // groups, *kernel_size)
    call = _find("weight_gradient", geometry, input, shape, grad_output)
    partial = _launch(call, input, None, grad_output)
    assert partial is not None
    # In order, and in the sums' own type: torch.sum over the leading dimension is deterministic.
    total = partial[0] if partial.shape[0] == 1 else partial.sum(0)
    return total.to(input.dtype, memory_format=memory_format(channels_last))


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


# Read once, as cuDNN and cuBLAS do. Of other values cuDNN takes no notice.
_TF32_FORBIDDEN = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"

# What torch.backends.cudnn.conv.fp32_precision reads, which takes twice as long to get there.
_PRECISION = getattr(torch._C, "_get_fp32_precision_getter", None)


def _empty_strided(like: Tensor, size: Sizes, strides: Sizes, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on that device."""
    if (
        _EMPTY_CUDA is not None
        and like.is_cuda
        and torch._C._cuda_getDevice() == like.get_device()  # it is of the current one
        and not torch._C._get_deterministic_algorithms()  # which may fill it
    ):
        return _EMPTY_CUDA(size, strides, dtype)
    return like.new_empty_strided(size, strides, dtype=dtype)


# What torch.compile's code allocates with, past the dispatcher: 2.1 us on a host where
# `new_empty_strided` took 3.6.
_EMPTY_CUDA: Callable[..., Tensor] | None = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", None
)


@dataclass(frozen=True)
class _Prepared:
    """A plan and its kernels, on one device or in the emulator."""

    plan: Plan
    kernels: tuple[Kernel | EmulatedKernel, ...]  # of its launches


class _Bound(NamedTuple):
    """A launch of a call on its kernel, but for the operands' addresses.

    Binding takes longer than a launch, so it is done once for all calls on tensors of the same
    sizes and strides.
    """

    kernel: Kernel | EmulatedKernel
    grid: int
    launch: BoundLaunch


@dataclass(frozen=True)
class _Call:
    """A map on tensors of given sizes, strides and alignment, wherever they lie."""

    problem: Problem
    y_shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # of x, w, y
    settings: tuple[str | None, str, bool]
    device: int | None
    choice: Candidate | None = None

    def on(self, choice: Candidate) -> _Call:
        """This call on a candidate, untuned."""
        found = self._chosen.get(choice)
        if found is None:  # of two threads that make one at a time, both go on with the first's
            found = self._chosen.setdefault(choice, dataclasses.replace(self, choice=choice))
        return found

    @functools.cached_property
    def _chosen(self) -> dict[Candidate, _Call]:
        return {}

    @functools.cached_property
    def plan(self) -> Plan:
        return self._prepared.plan

    @functools.cached_property
    def launches(self) -> tuple[_Bound, ...]:
        """The plan's, in order."""
        strides = dict(zip("xwy", self.strides, strict=True))
        prepared = self._prepared
        return tuple(
            _Bound(kernel, launch.grid, launch.bind(strides))
            for kernel, launch in zip(prepared.kernels, prepared.plan.launches, strict=True)
        )

    @functools.cached_property
    def filled(self) -> Callable[[tuple[int, ...]], list[Launch]]:
        """From the operands' addresses to the launches on a device.

        Remembered: a program's calls soon meet the allocator's same few addresses again, and
        filling in takes longer than a launch.
        """
        launches = self.launches  # not `self`, which would hold itself

        def fill(addresses: tuple[int, ...]) -> list[Launch]:
            filled = []
            for bound in launches:
                assert not isinstance(bound.kernel, EmulatedKernel)
                arguments = bound.launch.arguments(addresses, tensor_map.encode)
                filled.append(bound.kernel.prepare(bound.grid, arguments))
            return filled

        return functools.lru_cache(maxsize=64)(fill)

    @functools.cached_property
    def packed_elements(self) -> int:
        return self.plan.packed

    @functools.cached_property
    def partial_shape(self) -> tuple[int, ...] | None:
        return (self.plan.splits, *self.problem.w_shape) if self.plan.splits else None

    @functools.cached_property
    def _prepared(self) -> _Prepared:
        return _prepare(self.problem, self.device, *self.settings, self.choice)


@functools.lru_cache(maxsize=4096)
def _call(
    direction: Direction,
    geometry: Geometry,
    x_shape: Sizes,
    x_strides: Sizes,
    w_shape: Sizes,
    w_strides: Sizes,
    y_shape: Sizes | None,
    y_strides: Sizes | None,
    dtype: torch.dtype,
    device: int | None,
    tf32: bool,
    bias: bool,
    aligned: bool,
    settings: tuple[str | None, str, bool],
) -> _Call:
    """What is known of a call by all that it depends on; y is None where the call makes it."""
    if y_shape is None or y_strides is None:
        y_shape = output_shape(x_shape, w_shape, geometry)
        y_strides = dense_strides(
            y_shape,
            fits_channels_last(x_shape, x_strides) or fits_channels_last(w_shape, w_strides),
        )
    problem = Problem.of(
        direction,
        x_shape,
        w_shape,
        geometry,
        dtype=DTYPE_NAMES[dtype],
        tf32=tf32,
        bias=bias,
        strides=(x_strides, w_strides, y_strides),
        aligned=aligned,
    )
    return _Call(problem, y_shape, (x_strides, w_strides, y_strides), settings, device)


def _find(
    direction: Direction,
    geometry: Geometry,
    x: Tensor,
    w: Tensor | tuple[int, ...],
    y: Tensor | None,
    bias: Tensor | None = None,
) -> _Call:
    """The call on these tensors; `w` is a shape and `y` None where the direction computes it."""
    device = x.get_device() if x.is_cuda else None
    w_shape, w_strides = (w.shape, w.stride()) if isinstance(w, Tensor) else (w, _NO_STRIDES)
    dtype = x.dtype
    return _call(
        direction,
        geometry,
        x.shape,
        x.stride(),
        w_shape,
        w_strides,
        None if y is None else y.shape,
        None if y is None else y.stride(),
        dtype,
        device,
        dtype is torch.float32 and tf32_allowed(),
        bias is not None,
        x.data_ptr() % 16 == 0,
        # On a device the last two mean nothing.
        (settings.kernel(), "", False)
        if device is not None
        else (settings.kernel(), settings.emulate_arch(), settings.sanitize()),
    )


def _launch(
    call: _Call,
    x: Tensor,
    w: Tensor | None,
    y: Tensor,
    bias: Tensor | None = None,
) -> Tensor | None:
    """Runs a call on its kernel, or on the one that tuning chooses; returns what `_run` does."""
    if tuning.may_choose():

        def launch(candidate: Candidate) -> None:
            results = _run(call.on(candidate), x, w, y, bias)
            if results is not None and len(results) > 1:  # their sum belongs to what it takes
                results.sum(0)

        choice = tuning.choose(call.problem, call.device, launch)
        if choice is not None:
            return _run(call.on(choice), x, w, y, bias)
    return _run(call, x, w, y, bias)


def _run(call: _Call, x: Tensor, w: Tensor | None, y: Tensor, bias: Tensor | None) -> Tensor | None:
    """Launches a call's kernels; returns the workspace of partial results, None without one."""
    partial = packed = None
    if call.partial_shape is not None:
        accumulated = torch.float64 if x.dtype is torch.float64 else torch.float32
        partial = torch.empty(call.partial_shape, dtype=accumulated, device=x.device)
    if call.packed_elements:
        packed = _empty_strided(x, (call.packed_elements,), (1,), torch.float32)
    addresses = (  # in the order of OPERANDS
        x.data_ptr(),
        0 if w is None else w.data_ptr(),
        y.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if packed is None else packed.data_ptr(),
        0 if partial is None else partial.data_ptr(),
    )
    device = call.device
    if device is None:
        used = [t for t in (x, w, y, bias, packed, partial) if t is not None]
        memory = _allocations(used)
        for bound in call.launches:
            assert isinstance(bound.kernel, EmulatedKernel)
            arguments = bound.launch.arguments(addresses, emulated_map.encode)
            bound.kernel.launch(bound.grid, arguments, allocations=memory)
        return partial
    stream = torch._C._cuda_getCurrentRawStream(device)
    # The packing waits for all that came before it; the kernel behind it need not wait to start.
    dependent = False
    try:
        for launch in call.filled(addresses):
            launch.start(stream, dependent)
            dependent = True
    except LaunchError as error:
        raise LaunchError(f"{error}\nplan: {call.plan}") from error
    return partial


@functools.lru_cache(maxsize=4096)
def _prepare(
    problem: Problem,
    device: int | None,
    forced: str | None,
    arch: str,
    sanitize: bool,
    choice: Candidate | None,
) -> _Prepared:
    """The plan and its compiled kernels; the settings are there to be part of the key.

    `choice` is what the plan is made of, chosen by timing; None lets the plan choose.
    """
    target = Target.named(arch) if device is None else Target.for_device(device)
    chosen = plan(problem, target) if choice is None else make_plan(problem, target, choice)
    sources = [launch.source for launch in chosen.launches]

    def load(source: KernelSource) -> Kernel | EmulatedKernel:
        if device is None:
            return EmulatedKernel(source, sanitize=sanitize)
        return runtime.load(source, device)

    try:
        # Beside each other: NVRTC takes a second or two for each, and holds no lock meanwhile.
        with ThreadPoolExecutor(len(sources)) as threads:
            kernels = tuple(threads.map(load, sources))
    except CompileError as error:
        error.plan = chosen
        raise
    return _Prepared(chosen, kernels)


def _allocations(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Address and bytes of the memory under the tensors, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sorted({(s.data_ptr(), s.nbytes()) for s in storages if s.nbytes()})
