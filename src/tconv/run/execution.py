"""Execution: allocates the result of a call, and launches its kernels on tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tconv import aten, private, tuning
from tconv.emulator import tensor_map as emulated_map
from tconv.emulator.launch import EmulatedKernel
from tconv.errors import LaunchError
from tconv.jit import runtime
from tconv.memory_format import memory_format, with_height, without_height
from tconv.plan import Candidate
from tconv.problem import Geometry, Pair, Sizes
from tconv.run import choosing
from tconv.run.binding import Bound, Call, Way
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
            return output if axes == 2 else without_height(output)
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


def ready_forward_by_pytorch(way: Way, geometry: Geometry, axes: int) -> Callable[..., Tensor]:
    """As `ready_forward`, of a call that PyTorch's operator runs within our node of autograd."""
    count = way.served.add

    def run(input: Tensor, weight: Tensor, bias: Tensor | None, _geometry: object = None) -> Tensor:
        count()
        if axes == 2:
            return aten.forward(input, weight, bias, geometry)
        tall = with_height(input), with_height(weight)
        return without_height(aten.forward(*tall, bias, geometry))

    return run


class Ready(NamedTuple):
    """A known call of a gradient, on a GPU.

    Attributes:
        call: the call, on the candidate that runs it.
        by_pytorch: whether PyTorch's operator does.
        served: counts it.
        rest: the map's arguments behind its tensors.
    """

    call: Call
    by_pytorch: bool
    served: Callable[[], int]
    rest: tuple[Any, ...]


Gradients = tuple[Tensor | None, Tensor | None]
"""Of the input and the weight, each if it is wanted."""


def ready(call: Call, *rest: Any) -> Ready | None:
    """The call of a gradient on a GPU, if it is known who runs it.

    Args:
        call: the call.
        rest: the map's arguments behind its tensors.
    """
    way = choosing.known(call, tuning.mode())
    if way is None or call.device is None:
        return None
    by_pytorch = way.candidate is PYTORCH
    if way.candidate is not None and not by_pytorch:
        call = call.on(way.candidate)
    return Ready(call, by_pytorch, way.served.add, rest)


def ready_gradients(
    of_input: Ready | None, of_weight: Ready | None
) -> Callable[[Tensor, Any, Any], Gradients]:
    """What computes gradients of known calls.

    It takes the output's gradient, the input and the weight, as `ready_forward` takes its operands.

    Args:
        of_input, of_weight: the gradients' calls, each if it is wanted; one at least is.
    """

    def of(by_pytorch: bool) -> tuple[Ready | None, Ready | None]:
        input, weight = (
            None if one is None or one.by_pytorch != by_pytorch else one
            for one in (of_input, of_weight)
        )
        return input, weight

    ours, theirs = of(False), of(True)
    if not any(theirs):
        return _on_our_kernels(*ours)
    if not any(ours):
        return _by_pytorch(*theirs)
    first, second = _on_our_kernels(*ours), _by_pytorch(*theirs)

    def run(*operands: Any) -> Gradients:
        (input, weight), (other_input, other_weight) = first(*operands), second(*operands)
        return other_input if input is None else input, other_weight if weight is None else weight

    return run


def _by_pytorch(
    of_input: Ready | None, of_weight: Ready | None
) -> Callable[[Tensor, Any, Any], Gradients]:
    """As `ready_gradients`, of calls that PyTorch's operator runs: one for both, if both are."""

    def run(grad_output: Tensor, input: Any, weight: Any) -> Gradients:
        for ready in (of_input, of_weight):
            if ready is not None:
                ready.served()
        if of_input is None:
            assert of_weight is not None
            return None, aten.weight_gradient(input, grad_output, *of_weight.rest)
        if of_weight is None:
            return aten.input_gradient(grad_output, weight, *of_input.rest), None
        return aten.gradients(grad_output, input, weight, *of_weight.rest[1:])

    return run


def _on_our_kernels(
    of_input: Ready | None, of_weight: Ready | None
) -> Callable[[Tensor, Any, Any], Gradients]:
    """As `ready_gradients`, of calls that our kernels run: one start for both, if both are."""
    empty = None if private.is_deterministic() else private.empty_strided_cuda
    first = of_input or of_weight
    assert first is not None and first.call.device is not None
    device = first.call.device
    behind = of_weight.call if of_input is not None and of_weight is not None else None
    wanted = [(i, one) for i, one in enumerate((of_input, of_weight)) if one is not None]

    def run(grad_output: Tensor, input: Any, weight: Any) -> Gradients:
        grad_input = grad_weight = None
        if (
            empty is None
            or private.current_device() != device
            or (of_weight is not None and of_weight.call.bound.pytorch_adds)
        ):
            if of_input is not None:
                of_input.served()
                grad_input = _input_gradient(of_input.call, grad_output, weight, *of_input.rest)
            if of_weight is not None:
                of_weight.served()
                grad_weight = _weight_gradient(of_weight.call, input, grad_output, *of_weight.rest)
            return grad_input, grad_weight
        results: list[Tensor | None] = [None, None]
        addresses: tuple[int, ...] = ()
        held = []
        for index, one in wanted:
            one.served()
            call = one.call
            made = results[index] = empty(call.shape, call.result_strides, grad_output.dtype)
            x, w = (input, made) if index else (made, weight)
            spaces = _workspaces(call.bound, empty, grad_output.dtype)
            held.append(spaces)
            where = x.data_ptr(), w.data_ptr(), grad_output.data_ptr(), 0
            addresses = *addresses, *where, *map(_address, spaces)
        _start(first.call, device, addresses, behind)
        return results[0], results[1]

    return run


def _workspaces(
    needed: Bound, empty: Callable[..., Tensor], dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Those of packed operands and of partial results, each where the call has it."""
    packed = partial = None
    if needed.packed_elements:
        packed = empty((needed.packed_elements,), (1,), torch.float32)
    if needed.partial_shape is not None:
        partial = empty(needed.partial_shape, needed.partial_strides, _summed_in(dtype))
    return packed, partial


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial results."""
    return torch.float64 if dtype is torch.float64 else torch.float32


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
    if not call.bound.pytorch_adds:
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
        summed = _summed_in(x.dtype)
        partial = _empty_strided(x, needed.partial_shape, needed.partial_strides, summed)
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


def _start(call: Call, device: int, addresses: Sizes, behind: Call | None = None) -> None:
    """Starts a call's kernels on the device's current stream.

    Args:
        call: the call.
        device: its ordinal.
        addresses: of the operands, in the order of `OPERANDS`; 0 for those that it lacks.
        behind: a call that starts behind it; its operands' addresses follow.
    """
    try:
        filled = call.filled
        filled.uses += 1
        if behind is not None:
            behind.filled.uses += 1
            filled = call.filled_before(behind)
        series = filled[addresses]
        stream = private.raw_stream(device)
        # CUDA refuses to capture stream 0.
        if not stream or not private.is_capturing(device):
            series.start(stream)
            return
        # NOTE: the kernels of these launches: the call may load others meanwhile.
        for launch in series.launches:
            runtime.keep(launch.kernel)
        series.start_each(stream)
    except LaunchError as error:
        plans = "".join(f"\nplan: {one.plan}" for one in (call, behind) if one is not None)
        raise LaunchError(f"{error}{plans}") from error


def _allocations(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Address and bytes of the memory under the tensors, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sorted({(s.data_ptr(), s.nbytes()) for s in storages if s.nbytes()})
