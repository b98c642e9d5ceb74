"""The three maps on tensors: make the problem, plan it, allocate the result, launch.

For CUDA tensors, and under TCONV_EMULATE=1 for CPU tensors, whose kernels the emulator runs.
Arguments have been checked by `functional`; none of the tensors is empty.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tconv import settings, tuning
from tconv.emulator import tensor_map as emulated_map
from tconv.emulator.launch import EmulatedKernel
from tconv.errors import CompileError, LaunchError
from tconv.jit import runtime, tensor_map
from tconv.jit.target import Target
from tconv.kernels.family import Operands, TensorView
from tconv.memory_format import is_channels_last, memory_format
from tconv.plan import Candidate, Plan, make_plan, plan
from tconv.problem import WIDE_OFFSET, Axis, Direction, Layout, Problem, float32_math

Pair = tuple[int, int]

DTYPE_NAMES = {
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
    axes = _axes(input.shape[2:], weight.shape[2:], stride, padding, output_padding, dilation)
    output = torch.empty(
        (input.shape[0], weight.shape[1] * groups, *(axis.output_size for axis in axes)),
        dtype=input.dtype,
        device=input.device,
        memory_format=memory_format(is_channels_last(input) or is_channels_last(weight)),
    )
    if bias is not None:
        bias = bias.contiguous()
    _launch("forward", axes, groups, input, weight, output, bias=bias)
    return output


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
    axes = _axes(input_size, weight.shape[2:], stride, padding, output_padding, dilation)
    gradient = torch.empty(
        (grad_output.shape[0], weight.shape[0], *input_size),
        dtype=grad_output.dtype,
        device=grad_output.device,
        memory_format=memory_format(is_channels_last(grad_output) or is_channels_last(weight)),
    )
    _launch("input_gradient", axes, groups, gradient, weight, grad_output)
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
    axes = _axes(input.shape[2:], kernel_size, stride, padding, output_padding, dilation)
    shape = (input.shape[1], grad_output.shape[1] // groups, *kernel_size)
    partial = _launch("weight_gradient", axes, groups, input, shape, grad_output)
    # In order, and in the sums' own type: torch.sum over the leading dimension is deterministic.
    total = partial[0] if partial.shape[0] == 1 else partial.sum(0)
    return total.to(input.dtype, memory_format=memory_format(channels_last))


def tf32_allowed() -> bool:
    """Whether PyTorch's flags let float32 convolutions use TF32, as they do by default."""
    convolution = getattr(torch.backends.cudnn, "conv", None)
    if convolution is None:  # torch before 2.9
        return torch.backends.cudnn.allow_tf32
    return convolution.fp32_precision == "tf32"


class _Launchable(Protocol):
    def launch(self, grid: int, arguments: bytes, stream: int = 0) -> None: ...


@dataclass(frozen=True)
class _Prepared:
    """A plan and its kernel, on one device or in the emulator."""

    plan: Plan
    kernel: _Launchable | EmulatedKernel
    pack: _Launchable | EmulatedKernel | None


@functools.lru_cache(maxsize=4096)
def _axes(
    input_size: Pair,
    kernel_size: Pair,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    dilation: Pair,
) -> tuple[Axis, Axis]:
    axes = zip(input_size, kernel_size, stride, padding, output_padding, dilation, strict=True)
    height, width = (Axis(*map(int, axis)) for axis in axes)
    return height, width


def _launch(
    direction: Direction,
    axes: tuple[Axis, Axis],
    groups: int,
    x: Tensor,
    w: Tensor | tuple[int, ...],
    y: Tensor,
    bias: Tensor | None = None,
    choice: Candidate | None = None,
) -> Tensor:
    """Runs one map; returns the workspace of partial results, empty where there is none.

    `w` is a shape where the direction computes it; `choice` runs that candidate, untuned.
    """
    dtype = DTYPE_NAMES[x.dtype]
    tensors = [t for t in (x, w, y) if isinstance(t, Tensor)]
    problem = _problem(
        direction,
        x.shape[0],
        x.shape[1],
        y.shape[1],
        groups,
        *axes,
        dtype,
        dtype == "float32" and tf32_allowed(),
        bias is not None,
        _layout(x),
        _layout(y),
        any(_reach(t) > WIDE_OFFSET for t in tensors),
        direction == "forward" and _aligned(x),
    )
    device = x.device.index if x.is_cuda else None
    if choice is None:

        def launch(candidate: Candidate) -> None:
            results = _launch(direction, axes, groups, x, w, y, bias, candidate)
            if len(results) > 1:  # their sum belongs to what a candidate takes
                results.sum(0)

        choice = tuning.choose(problem, device, launch)
    prepared = _prepare(
        problem, device, settings.kernel(), settings.emulate_arch(), settings.sanitize(), choice
    )
    partial = torch.empty(
        (prepared.plan.splits, *problem.w_shape),
        dtype=torch.float64 if dtype == "float64" else torch.float32,
        device=x.device,
    )
    packing = prepared.plan.packing
    packed = torch.empty(packing.elements if packing else 0, device=x.device)
    operands = Operands(
        x=_view(x),
        w=_view(w) if isinstance(w, Tensor) else TensorView(0, (0, 0, 0, 0)),
        y=_view(y),
        bias=0 if bias is None else bias.data_ptr(),
        packed=packed.data_ptr(),
        partial=partial.data_ptr(),
        encode_tensor_map=emulated_map.encode if device is None else tensor_map.encode,
    )
    used = [*tensors, partial, packed] if bias is None else [*tensors, partial, packed, bias]
    if packing is not None and prepared.pack is not None:
        arguments = prepared.plan.packing_arguments(operands)
        _run(prepared.pack, packing.grid, arguments, device, used, prepared.plan)
    arguments = prepared.plan.arguments(operands)
    _run(prepared.kernel, prepared.plan.grid, arguments, device, used, prepared.plan)
    return partial


def _run(
    kernel: _Launchable | EmulatedKernel,
    grid: int,
    arguments: bytes,
    device: int | None,
    used: list[Tensor],
    plan: Plan,
) -> None:
    if isinstance(kernel, EmulatedKernel):
        kernel.launch(grid, arguments, allocations=_allocations(used))
        return
    assert device is not None
    try:
        kernel.launch(grid, arguments, torch._C._cuda_getCurrentRawStream(device))
    except LaunchError as error:
        raise LaunchError(f"{error}\nplan: {plan}") from error


@functools.lru_cache(maxsize=4096)
def _problem(
    direction: Direction,
    batch: int,
    in_channels: int,
    out_channels: int,
    groups: int,
    height: Axis,
    width: Axis,
    dtype: str,
    tf32: bool,
    bias: bool,
    x_layout: Layout,
    y_layout: Layout,
    wide_offsets: bool,
    x_aligned: bool,
) -> Problem:
    problem = Problem(
        direction=direction,
        batch=batch,
        in_channels=in_channels,
        out_channels=out_channels,
        groups=groups,
        height=height,
        width=width,
        dtype=dtype,  # type: ignore[arg-type]
        math=float32_math(
            direction, in_channels // groups, out_channels // groups, tf32_allowed=tf32
        ),
        bias=bias,
        x_layout=x_layout,
        y_layout=y_layout,
        wide_offsets=wide_offsets,
        x_aligned=x_aligned,
    )
    return problem


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
    sources = [chosen.source] if chosen.packing is None else [chosen.source, chosen.packing.source]
    try:
        kernels: list[_Launchable | EmulatedKernel] = [
            EmulatedKernel(source, sanitize=sanitize)
            if device is None
            else runtime.load(source, device)
            for source in sources
        ]
    except CompileError as error:
        error.plan = chosen
        raise
    return _Prepared(chosen, kernels[0], kernels[1] if len(kernels) > 1 else None)


def _layout(tensor: Tensor) -> Layout:
    """Which axis is innermost in memory: the order in which a kernel's reads are coalesced."""
    _, channel, _, column = tensor.stride()
    return "channels_last" if channel == 1 and column > 1 else "contiguous"


def _aligned(tensor: Tensor) -> bool:
    """Whether a tensor map can describe it: adjacent columns, all else on 16 bytes."""
    *outer, columns = tensor.stride()
    size = tensor.element_size()
    return (
        columns == 1
        and tensor.data_ptr() % 16 == 0
        and all(stride * size % 16 == 0 and stride > 0 for stride in outer)
    )


def _reach(tensor: Tensor) -> int:
    """The largest element offset in the tensor."""
    return sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _view(tensor: Tensor) -> TensorView:
    return TensorView(tensor.data_ptr(), tensor.stride())


def _allocations(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Address and bytes of the memory under the tensors, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sorted({(s.data_ptr(), s.nbytes()) for s in storages if s.nbytes()})
