"""Execution: allocates the result of a call, and launches its kernels on tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tconv import aten, private, tuning
from tconv.emulator import tensor_map as emulated_map
from tconv.emulator.launch import EmulatedKernel
from tconv.errors import LaunchError
from tconv.jit import runtime
from tconv.memory_format import memory_format
from tconv.plan import Candidate
from tconv.problem import Geometry, Pair, Sizes
from tconv.run import choosing
from tconv.run.binding import Call, Way
from tconv.tuning import PYTORCH


def forward(
    call: Call, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    """The layer's output."""
    return _run(call, _forward, aten.forward, input, weight, bias, geometry)


def ready_forward(call: Call, way: Way, axes: int) -> Callable[..., Tensor]:
    """What runs a known call of `forward` on our kernels, on a GPU.

    It takes the input, the weight and the bias, like those of the call but for their addresses, and
    looks at no more of them. It ignores a fourth argument, which stands for the geometry.

    Args:
        call: the call.
        way: who runs it, a candidate of ours.
        axes: the spatial axes of the operands and the output: 1 stands for a height of 1.

    NOTE: much of what a program waits for where it waits for the host. A function called here costs
    four times what a loop of such calls shows, as caches hold other things between two layers.
    """
    call = call if way.candidate is None else call.on(way.candidate)
    count = way.served.add
    shape, strides = call.shape, call.result_strides
    if axes == 1:
        shape, strides = (*shape[:2], shape[3]), (*strides[:2], strides[3])
    device = call.device
    empty = None if private.is_deterministic() else private.empty_strided_cuda

    def run(input: Tensor, weight: Tensor, bias: Tensor | None, _geometry: object = None) -> Tensor:
        count()
        if empty is None or private.current_device() != device:
            output = _forward(call, input, weight, bias, _geometry)
            return output if axes == 2 else output.squeeze(2)
        output = empty(shape, strides, input.dtype)
        packed, needed = None, call.bound.packed_elements
        if needed:
            packed = empty((needed,), (1,), torch.float32)
        addresses = (
            input.data_ptr(),
            weight.data_ptr(),
            output.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if packed is None else packed.data_ptr(),
            0,  # no forward has partial results
        )
        _start(call, device, addresses)
        return output

    return run


def input_gradient(
    call: Call, grad_output: Tensor, weight: Tensor, input_size: Pair, geometry: Geometry
) -> Tensor:
    """The gradient of the input."""
    arguments = (grad_output, weight, input_size, geometry)
    return _run(call, _input_gradient, aten.input_gradient, *arguments)


def weight_gradient(
    call: Call,
    input: Tensor,
    grad_output: Tensor,
    kernel_size: Pair,
    geometry: Geometry,
    channels_last: bool,
) -> Tensor:
    """The gradient of the weight, in the memory format asked for."""
    arguments = (input, grad_output, kernel_size, geometry, channels_last)
    return _run(call, _weight_gradient, aten.weight_gradient, *arguments)


def gradients(
    calls: tuple[Call, Call],
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    geometry: Geometry,
    channels_last: bool,
) -> tuple[Tensor, Tensor]:
    """Both gradients, in one operator where PyTorch runs both."""
    mode = tuning.mode()
    ways = [way for call in calls if (way := choosing.known(call, mode)) is not None]
    theirs = [way.served for way in ways if way.candidate is PYTORCH]
    if len(theirs) == len(calls):
        for served in theirs:
            served.add()
        return aten.gradients(grad_output, input, weight, geometry, channels_last)
    x, w = calls[0].shape, calls[1].shape
    return (
        input_gradient(calls[0], grad_output, weight, (x[2], x[3]), geometry),
        weight_gradient(calls[1], input, grad_output, (w[2], w[3]), geometry, channels_last),
    )


def _run(
    call: Call, ours: Callable[..., Tensor], pytorch: Callable[..., Tensor], *arguments: Any
) -> Tensor:
    """The result of a call, by whoever is to run it.

    Args:
        call: the call.
        ours: runs a call on our kernels: takes it and the arguments.
        pytorch: runs PyTorch's operator on the arguments.
        arguments: of the map.
    """

    def run(candidate: Candidate | None) -> Tensor:
        if candidate is PYTORCH:
            return pytorch(*arguments)
        return ours(call if candidate is None else call.on(candidate), *arguments)

    way = call.ways.get(tuning.mode()) or choosing.choose(call, run)
    way.served.add()
    return run(way.candidate)


def _forward(
    call: Call, input: Tensor, weight: Tensor, bias: Tensor | None, _geometry: object
) -> Tensor:
    if bias is not None:
        bias = bias.contiguous()
    output = _empty_strided(input, call.shape, call.result_strides, input.dtype)
    _launch(call, input, weight, output, bias)
    return output


def _input_gradient(
    call: Call, grad_output: Tensor, weight: Tensor, _input_size: Pair, _geometry: Geometry
) -> Tensor:
    gradient = _empty_strided(grad_output, call.shape, call.result_strides, grad_output.dtype)
    _launch(call, gradient, weight, grad_output, None)
    return gradient


def _weight_gradient(
    call: Call,
    input: Tensor,
    grad_output: Tensor,
    _kernel_size: Pair,
    _geometry: Geometry,
    channels_last: bool,
) -> Tensor:
    if call.bound.partial_shape is None or call.bound.adds:
        gradient = _empty_strided(input, call.shape, call.result_strides, input.dtype)
        _launch(call, input, gradient, grad_output, None)
        return gradient
    partial = _launch(call, input, None, grad_output, None)
    assert partial is not None
    # In order, and in the sums' own type: torch.sum over the leading dimension is deterministic.
    total = partial[0] if partial.shape[0] == 1 else partial.sum(0)
    return total.to(input.dtype, memory_format=memory_format(channels_last))


def _empty_strided(like: Tensor, size: Sizes, strides: Sizes, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the device of `like`."""
    if (
        private.empty_strided_cuda is not None
        and like.is_cuda
        and private.current_device() == like.get_device()  # it allocates on the current one
        and not private.is_deterministic()  # which may fill it
    ):
        return private.empty_strided_cuda(size, strides, dtype)
    return like.new_empty_strided(size, strides, dtype=dtype)


def _launch(
    call: Call, x: Tensor, w: Tensor | None, y: Tensor, bias: Tensor | None
) -> Tensor | None:
    """Launches a call's kernels; returns the workspace of partial results, None without one."""
    partial = packed = None
    needed = call.bound
    if needed.partial_shape is not None:
        accumulated = torch.float64 if x.dtype is torch.float64 else torch.float32
        partial = _empty_strided(x, needed.partial_shape, needed.partial_strides, accumulated)
    if needed.packed_elements:
        packed = _empty_strided(x, (needed.packed_elements,), (1,), torch.float32)
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
        memory = _allocations(t for t in (x, w, y, bias, packed, partial) if t is not None)
        for kernel, bound in zip(needed.kernels, needed.launches, strict=True):
            assert isinstance(kernel, EmulatedKernel)
            arguments = bound.arguments(addresses, emulated_map.encode)
            kernel.launch(bound.grid, arguments, allocations=memory)
        return partial
    _start(call, device, addresses)
    return partial


def _start(call: Call, device: int, addresses: Sizes) -> None:
    """Starts a call's kernels on the device's current stream.

    Args:
        call: the call.
        device: its ordinal.
        addresses: of the operands, in the order of `OPERANDS`; 0 for those that it lacks.
    """
    try:
        filled = call.filled
        filled.uses += 1
        series = filled[addresses]
        stream = private.raw_stream(device)
        if not private.is_capturing(device):
            series.start(stream)
            return
        # NOTE: the kernels of these launches: the call may load others meanwhile.
        for launch in series.launches:
            runtime.keep(launch.kernel)
        series.start_each(stream)
    except LaunchError as error:
        raise LaunchError(f"{error}\nplan: {call.plan}") from error


def _allocations(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Address and bytes of the memory under the tensors, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sorted({(s.data_ptr(), s.nbytes()) for s in storages if s.nbytes()})
