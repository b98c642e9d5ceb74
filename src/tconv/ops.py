"""The three torch.library operators, closed under differentiation.

    tconv::forward(x, w, b)      x [N, Cin, H, W], w [Cin, Cout/groups, kH, kW] -> [N, Cout, OH, OW]
    tconv::input_gradient(y, w)  y like forward's output                        -> like x
    tconv::weight_gradient(x, y)                                                -> like w

Each is bilinear, and each one's derivatives are the other two, so that three operators (and three
kernels below them) give derivatives of every order, forward or reverse. Every operator has a fake
implementation (torch.compile, torch.export, meta tensors), autograd, a forward-mode rule, a vmap
rule and, for `forward`, autocast.

A CUDA tensor runs our kernels, through the three functions of `run`; a CPU tensor runs PyTorch's
own operators, or our kernels in the emulator under TCONV_EMULATE=1.

The Python functions `forward`, `input_gradient` and `weight_gradient` are the way in for the rest
of the package: they take the operator, or, where nobody could tell the difference, a shorter path
past the dispatcher that saves most of the host's time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils.flop_counter import register_flop_formula

from . import settings
from .memory_format import is_channels_last, memory_format
from .problem import Geometry, Pair

Sizes = Sequence[int]

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""The dtypes that our kernels compute in."""

_aten = torch.ops.aten
_library = torch.library.Library("tconv", "DEF")
_GEOMETRY = (
    "SymInt[2] stride, SymInt[2] padding, SymInt[2] output_padding, SymInt[2] dilation, "
    "SymInt groups"
)
_library.define(
    f"forward(Tensor input, Tensor weight, Tensor? bias, {_GEOMETRY}) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"input_gradient(Tensor grad_output, Tensor weight, SymInt[2] input_size, {_GEOMETRY})"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"weight_gradient(Tensor input, Tensor grad_output, SymInt[2] kernel_size, {_GEOMETRY},"
    " bool channels_last) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_forward_op = torch.ops.tconv.forward.default
_input_gradient_op = torch.ops.tconv.input_gradient.default
_weight_gradient_op = torch.ops.tconv.weight_gradient.default


# Shapes and strides


def output_size(
    input_size: Sizes,
    kernel_size: Sizes,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    dilation: Pair,
) -> Pair:
    """Height and width of the output; each argument holds height and width, in pixels."""
    height = (input_size[0] - 1) * stride[0] - 2 * padding[0] + dilation[0] * (kernel_size[0] - 1)
    width = (input_size[1] - 1) * stride[1] - 2 * padding[1] + dilation[1] * (kernel_size[1] - 1)
    return height + output_padding[0] + 1, width + output_padding[1] + 1


def _empty(like: Tensor, size: Sizes, channels_last: bool) -> Tensor:
    return torch.empty(
        size,
        dtype=like.dtype,
        device=like.device,
        memory_format=memory_format(channels_last),
    )


def _settle(tensor: Tensor, channels_last: bool) -> Tensor:
    """A dense result with the strides promised of it, copied only where they are not so.

    NOTE: where a size of 1 makes both formats fit, what PyTorch's CPU operators pick differs from
    dtype to dtype, and from what its own fake tensors say.
    """
    channels, height, width = (max(size, 1) for size in tensor.shape[1:])
    if channels_last:
        strides = (height * width * channels, 1, width * channels, channels)
    else:
        strides = (channels * height * width, height * width, width, 1)
    if tensor.stride() == strides:
        return tensor
    return _empty(tensor, tensor.shape, channels_last).copy_(tensor)


@functools.cache
def _runner() -> ModuleType:
    """`run`, imported with its libraries by the first call that needs it."""
    from . import run

    return run


def _runs_our_kernels(tensor: Tensor) -> bool:
    # A device's `type` is made anew each time, which takes longer than all else here.
    ours = tensor.is_cuda or (tensor.is_cpu and settings.emulate())
    return ours and tensor.dtype in DTYPES


# PyTorch's own operators: the CPU's implementation, and that of any device we have no kernels for


def _aten_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    output = _aten.convolution.default(
        input, weight, bias, stride, padding, dilation, True, output_padding, groups
    )
    return _settle(output, is_channels_last(input) or is_channels_last(weight))


def _aten_input_gradient(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Pair,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    channels_last = is_channels_last(grad_output) or is_channels_last(weight)
    # Only the size and the memory format of this input are read.
    input_shape = (grad_output.shape[0], weight.shape[0], *input_size)
    gradient = _aten.convolution_backward.default(
        grad_output,
        _empty(grad_output, input_shape, channels_last),
        weight,
        None,
        stride,
        padding,
        dilation,
        True,
        output_padding,
        groups,
        [True, False, False],
    )[0]
    return _settle(gradient, channels_last)


def _aten_weight_gradient(
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
    # Only the size and the memory format of this weight are read.
    weight_shape = (input.shape[1], grad_output.shape[1] // groups, *kernel_size)
    gradient = _aten.convolution_backward.default(
        grad_output,
        input,
        _empty(input, weight_shape, channels_last),
        None,
        stride,
        padding,
        dilation,
        True,
        output_padding,
        groups,
        [False, True, False],
    )[1]
    return _settle(gradient, channels_last)


# Implementations below autograd: `run` for the tensors that our kernels serve, else PyTorch


def _forward_impl(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    geometry = (stride, padding, output_padding, dilation, groups)
    if not _runs_our_kernels(input):
        return _aten_forward(input, weight, bias, *geometry)
    if input.numel() == 0:
        return _forward_fake(input, weight, bias, *geometry)
    return _runner().forward(input, weight, bias, *geometry)


def _input_gradient_impl(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Pair,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    geometry = (stride, padding, output_padding, dilation, groups)
    if not _runs_our_kernels(grad_output):
        return _aten_input_gradient(grad_output, weight, input_size, *geometry)
    if grad_output.numel() == 0:
        return _input_gradient_fake(grad_output, weight, input_size, *geometry).zero_()
    return _runner().input_gradient(grad_output, weight, input_size, *geometry)


def _weight_gradient_impl(
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
    geometry = (kernel_size, stride, padding, output_padding, dilation, groups, channels_last)
    if not _runs_our_kernels(input):
        return _aten_weight_gradient(input, grad_output, *geometry)
    if input.numel() == 0 or grad_output.numel() == 0:
        return _weight_gradient_fake(input, grad_output, *geometry).zero_()
    return _runner().weight_gradient(input, grad_output, *geometry)


def _with_tuples(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tuple(a) if isinstance(a, list) else a for a in arguments)


def _kernel(implementation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An implementation as the dispatcher calls it: with lists where the rest has tuples."""

    def kernel(*arguments: Any) -> Tensor:
        return implementation(*_with_tuples(arguments))

    return kernel


@_kernel
def _forward_kernel(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    geometry = (stride, padding, output_padding, dilation, groups)
    if _runs_our_kernels(input):
        # A compiled graph may ask for an output without pixels; `functional` never does.
        spatial = output_size(input.shape[2:], weight.shape[2:], *geometry[:4])
        if 0 in spatial:
            return _forward_fake(input, weight, bias, *geometry)
    return _forward_impl(input, weight, bias, *geometry)


# Fake implementations: size, strides, dtype and device of the result, for symbolic sizes too


def _forward_fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    image = input.shape[2:]
    spatial = output_size(image, weight.shape[2:], stride, padding, output_padding, dilation)
    for size in spatial:
        torch._check(
            size >= 0,
            lambda: (
                f"Given input size per channel: {list(image)}. "
                f"Calculated output size per channel: {list(spatial)}. Output size is too small"
            ),
        )
    return _empty(
        input,
        (input.shape[0], weight.shape[1] * groups, *spatial),
        is_channels_last(input) or is_channels_last(weight),
    )


def _input_gradient_fake(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Pair,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    return _empty(
        grad_output,
        (grad_output.shape[0], weight.shape[0], *input_size),
        is_channels_last(grad_output) or is_channels_last(weight),
    )


def _weight_gradient_fake(
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
    return _empty(
        input, (input.shape[1], grad_output.shape[1] // groups, *kernel_size), channels_last
    )


# Autograd. Each node's first argument is what computes it: the operator below autograd for a call
# that came through the dispatcher, the implementation for one that went past it


class _Node(_SingleLevelFunction):
    """A differentiable call of one operator.

    NOTE: this is `torch.autograd.Function` without its Python-level `apply`, which would send a
    call under torch.func's transforms back to the top of their stack. These nodes are made below
    that, where the dispatcher has already unwrapped one level, as PyTorch's own C++ nodes are.
    """

    apply: Callable[..., Tensor]


def _image(tensor: Tensor) -> Pair:
    return tensor.shape[2], tensor.shape[3]


def _save(ctx: Any, first: Tensor, second: Tensor) -> None:
    """Keep of a bilinear map's two arguments what the derivatives that are wanted will read."""
    needs_first, needs_second = ctx.needs_input_grad[1:3]
    ctx.save_for_backward(first if needs_second else None, second if needs_first else None)
    if forward_ad._current_level >= 0:
        ctx.save_for_forward(first, second)
        # What has no tangent comes to `jvp` as None, not as zeros to be computed with.
        ctx.set_materialize_grads(False)


def _sum(terms: list[Tensor]) -> Tensor | None:
    if not terms:
        return None
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


class TconvForward(_Node):
    """forward(x, w, b): x's gradient is an input_gradient, w's a weight_gradient, b's a sum."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[..., Tensor],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *geometry: Any,
    ) -> Tensor:
        """Compute the output and note what its derivatives need."""
        _save(ctx, input, weight)
        ctx.geometry = geometry
        ctx.input_size = _image(input)
        ctx.kernel_size = _image(weight)
        ctx.input_channels_last = is_channels_last(input)
        ctx.weight_channels_last = is_channels_last(weight)
        output = compute(input, weight, bias, *geometry)
        ctx.output_shape = output.shape
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the input, the weight and the bias, each only where it is wanted."""
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        input, weight = ctx.saved_tensors
        _, needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_bias = grad.sum((0, 2, 3)) if needs_bias else None
        if ctx.input_channels_last and (needs_input or needs_weight):
            # What ran in channels_last goes back in it, whatever the loss made of its gradient.
            grad = grad.contiguous(memory_format=torch.channels_last)
        grad_input = grad_weight = None
        if needs_input:
            grad_input = input_gradient(grad, weight, ctx.input_size, *ctx.geometry)
        if needs_weight:
            rest = (*ctx.geometry, ctx.weight_channels_last)
            grad_weight = weight_gradient(input, grad, ctx.kernel_size, *rest)
        return (None, grad_input, grad_weight, grad_bias, *(None,) * 5)

    @staticmethod
    def jvp(
        ctx: Any,
        _compute: None,
        input: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        *_geometry: None,
    ) -> Tensor | None:
        """The output's tangent, from those of the input, the weight and the bias."""
        primal_input, primal_weight = ctx.saved_tensors
        terms = []
        if input is not None:
            terms.append(forward(input, primal_weight, None, *ctx.geometry))
        if weight is not None:
            terms.append(forward(primal_input, weight, None, *ctx.geometry))
        if bias is not None:
            terms.append(bias.view(1, -1, 1, 1).expand(ctx.output_shape))
        return _sum(terms)


class TconvInputGradient(_Node):
    """input_gradient(y, w): y's gradient is a forward, w's a weight_gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[..., Tensor],
        grad_output: Tensor,
        weight: Tensor,
        input_size: Pair,
        *geometry: Any,
    ) -> Tensor:
        """Compute the input's gradient and note what its own derivatives need."""
        _save(ctx, grad_output, weight)
        ctx.geometry = geometry
        ctx.input_size = input_size
        ctx.kernel_size = _image(weight)
        ctx.weight_channels_last = is_channels_last(weight)
        return compute(grad_output, weight, input_size, *geometry)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the output's gradient and of the weight, each only where it is wanted."""
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        grad_output, weight = ctx.saved_tensors
        _, needs_output, needs_weight, *_ = ctx.needs_input_grad
        grad_grad_output = grad_weight = None
        if needs_output:
            grad_grad_output = forward(grad, weight, None, *ctx.geometry)
        if needs_weight:
            rest = (*ctx.geometry, ctx.weight_channels_last)
            grad_weight = weight_gradient(grad, grad_output, ctx.kernel_size, *rest)
        return (None, grad_grad_output, grad_weight, *(None,) * 6)

    @staticmethod
    def jvp(
        ctx: Any,
        _compute: None,
        grad_output: Tensor | None,
        weight: Tensor | None,
        *_rest: None,
    ) -> Tensor | None:
        """The input gradient's tangent."""
        primal_output, primal_weight = ctx.saved_tensors
        terms = []
        if grad_output is not None:
            terms.append(input_gradient(grad_output, primal_weight, ctx.input_size, *ctx.geometry))
        if weight is not None:
            terms.append(input_gradient(primal_output, weight, ctx.input_size, *ctx.geometry))
        return _sum(terms)


class TconvWeightGradient(_Node):
    """weight_gradient(x, y): x's gradient is an input_gradient, y's a forward."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[..., Tensor],
        input: Tensor,
        grad_output: Tensor,
        kernel_size: Pair,
        *rest: Any,
    ) -> Tensor:
        """Compute the weight's gradient and note what its own derivatives need."""
        _save(ctx, input, grad_output)
        *geometry, channels_last = rest
        ctx.geometry = tuple(geometry)
        ctx.input_size = _image(input)
        ctx.kernel_size = kernel_size
        ctx.channels_last = channels_last
        return compute(input, grad_output, kernel_size, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the input and of the output's gradient, each only where it is wanted."""
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        input, grad_output = ctx.saved_tensors
        _, needs_input, needs_output, *_ = ctx.needs_input_grad
        grad_input = grad_grad_output = None
        if needs_input:
            grad_input = input_gradient(grad_output, grad, ctx.input_size, *ctx.geometry)
        if needs_output:
            grad_grad_output = forward(input, grad, None, *ctx.geometry)
        return (None, grad_input, grad_grad_output, *(None,) * 7)

    @staticmethod
    def jvp(
        ctx: Any,
        _compute: None,
        input: Tensor | None,
        grad_output: Tensor | None,
        *_rest: None,
    ) -> Tensor | None:
        """The weight gradient's tangent."""
        primal_input, primal_output = ctx.saved_tensors
        rest = (ctx.kernel_size, *ctx.geometry, ctx.channels_last)
        terms = []
        if input is not None:
            terms.append(weight_gradient(input, primal_output, *rest))
        if grad_output is not None:
            terms.append(weight_gradient(primal_input, grad_output, *rest))
        return _sum(terms)


def _autograd(node: type[_Node], operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What the dispatcher runs for an operator's autograd keys."""

    def below(*arguments: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    def lower(*arguments: Any) -> Tensor:
        # A node computes with gradients off, but the transforms further out want theirs.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return below(*arguments)

    def kernel(*arguments: Any) -> Tensor:
        differentiable = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        if not differentiable and forward_ad._current_level < 0:
            return below(*arguments)
        arguments = _with_tuples(arguments)
        if not torch._C._are_functorch_transforms_active():
            return node.apply(below, *arguments)
        with enable_single_level_autograd_function():
            return node.apply(lower, *arguments)

    return kernel


# Autocast, as for aten::conv_transpose2d. The gradients run in the dtype of what was saved


def _cast(tensor: Any, device: str, dtype: torch.dtype) -> Any:
    """The tensor as autocast on that device passes it on."""
    eligible = (
        isinstance(tensor, Tensor)
        and tensor.device.type == device
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
    )
    return tensor.to(dtype) if eligible else tensor


def _autocast(device: str) -> Callable[..., Tensor]:
    key = getattr(torch._C.DispatchKey, f"Autocast{device.upper()}")
    excluded = torch._C.DispatchKeySet(key)

    def kernel(*arguments: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return _forward_op(*(_cast(argument, device, dtype) for argument in arguments))

    return kernel


# vmap. A mapped weight makes its own group of channels, any other mapped dimension joins the batch


def _leading(tensor: Tensor, dimension: int | None, size: int) -> Tensor:
    """The tensor with its mapped dimension first; one that is not mapped is repeated."""
    if dimension is None:
        return tensor.expand(size, *tensor.shape)
    return tensor.movedim(dimension, 0)


def _into_batch(tensor: Tensor) -> Tensor:
    """[B, N, C, H, W] -> [B*N, C, H, W]."""
    return tensor.flatten(0, 1)


def _into_channels(tensor: Tensor) -> Tensor:
    """[B, N, C, H, W] -> [N, B*C, H, W]."""
    return tensor.transpose(0, 1).flatten(1, 2)


def _from_batch(tensor: Tensor, size: int) -> Tensor:
    """[B*N, C, H, W] -> [B, N, C, H, W]."""
    return tensor.unflatten(0, (size, tensor.shape[0] // size))


def _from_channels(tensor: Tensor, size: int) -> Tensor:
    """[N, B*C, H, W] -> [B, N, C, H, W]."""
    return tensor.unflatten(1, (size, tensor.shape[1] // size)).transpose(0, 1)


def _forward_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *geometry: Any,
) -> tuple[Tensor, int]:
    size = info.batch_size
    input_dim, weight_dim, bias_dim, *_ = in_dims
    if weight_dim is not None:
        *axes, groups = geometry
        output = _forward_op(
            _into_channels(_leading(input, input_dim, size)),
            _into_batch(_leading(weight, weight_dim, size)),
            None if bias is None else _leading(bias, bias_dim, size).flatten(0, 1),
            *axes,
            groups * size,
        )
        return _from_channels(output, size), 0
    if bias is not None and bias_dim is not None:
        added = bias.movedim(bias_dim, 0)[:, None, :, None, None]
        if input_dim is None:
            return _forward_op(input, weight, None, *geometry) + added, 0
        output = _forward_op(_into_batch(input.movedim(input_dim, 0)), weight, None, *geometry)
        return _from_batch(output, size) + added, 0
    output = _forward_op(_into_batch(_leading(input, input_dim, size)), weight, bias, *geometry)
    return _from_batch(output, size), 0


def _input_gradient_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    grad_output: Tensor,
    weight: Tensor,
    input_size: Pair,
    *geometry: Any,
) -> tuple[Tensor, int]:
    size = info.batch_size
    output_dim, weight_dim, *_ = in_dims
    *axes, groups = geometry
    leading = _leading(grad_output, output_dim, size)
    if weight_dim is None:
        gradient = _input_gradient_op(_into_batch(leading), weight, input_size, *geometry)
        return _from_batch(gradient, size), 0
    gradient = _input_gradient_op(
        _into_channels(leading),
        _into_batch(_leading(weight, weight_dim, size)),
        input_size,
        *axes,
        groups * size,
    )
    return _from_channels(gradient, size), 0


def _weight_gradient_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    grad_output: Tensor,
    kernel_size: Pair,
    *rest: Any,
) -> tuple[Tensor, int]:
    size = info.batch_size
    input_dim, output_dim, *_ = in_dims
    *axes, groups, channels_last = rest
    gradient = _weight_gradient_op(
        _into_channels(_leading(input, input_dim, size)),
        _into_channels(_leading(grad_output, output_dim, size)),
        kernel_size,
        *axes,
        groups * size,
        channels_last,
    )
    return _from_batch(gradient, size), 0


# What torch.utils.flop_counter counts, which is the same for all three: each pixel of the input
# meets each tap of the weight, in a product and a sum


def _multiply_adds(image: Sequence[int], weight: Sequence[int]) -> int:
    batch, _, height, width = image
    return 2 * batch * height * width * math.prod(weight)


def _forward_flops(
    input: Sequence[int], weight: Sequence[int], *_: Any, out_shape: Any = None
) -> int:
    return _multiply_adds(input, weight)


def _input_gradient_flops(
    _grad_output: Sequence[int], weight: Sequence[int], *_: Any, out_shape: Sequence[int]
) -> int:
    return _multiply_adds(out_shape, weight)


def _weight_gradient_flops(input: Sequence[int], *_: Any, out_shape: Sequence[int]) -> int:
    return _multiply_adds(input, out_shape)


def _register() -> None:
    operators = (
        (
            _forward_op,
            _forward_kernel,
            _forward_fake,
            TconvForward,
            _forward_vmap,
            _forward_flops,
        ),
        (
            _input_gradient_op,
            _kernel(_input_gradient_impl),
            _input_gradient_fake,
            TconvInputGradient,
            _input_gradient_vmap,
            _input_gradient_flops,
        ),
        (
            _weight_gradient_op,
            _kernel(_weight_gradient_impl),
            _weight_gradient_fake,
            TconvWeightGradient,
            _weight_gradient_vmap,
            _weight_gradient_flops,
        ),
    )
    for operator, kernel, fake, node, vmap, flops in operators:
        name = operator.name()
        unqualified = name.removeprefix("tconv::")
        _library.impl(unqualified, kernel, "CompositeExplicitAutograd")
        _library.impl(unqualified, _autograd(node, operator), "Autograd")
        torch.library.register_fake(name, fake, lib=_library)
        torch.library.register_vmap(name, vmap, lib=_library)
        register_flop_formula(operator.overloadpacket)(flops)
    for device in ("cpu", "cuda"):
        _library.impl("forward", _autocast(device), f"Autocast{device.upper()}")


_register()


# The ways in


_PLAIN = frozenset({Tensor, torch.nn.Parameter})

# NOTE: a tensor of a torch.func level is a plain Tensor to Python, and stays one when its level has
# ended and no transform is active: it is the dispatcher that unwraps it, or says what is wrong.
_is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def unobserved(first: Tensor, second: Tensor, third: Tensor | None = None) -> bool:
    """Whether the dispatcher would do nothing for a call on these tensors but call us.

    True of an ordinary eager call: no subclass, mode, transform, tracer or profiler, and every
    tensor's values lie in its own memory as they are. Those of a negative view, of a ZeroTensor and
    of what a torch.func level has wrapped do not. Autocast is left to `forward`, the only one of
    the three that it changes. Whoever asks has asked `torch.compiler.is_compiling` before.
    """
    return (
        type(first) in _PLAIN
        and type(second) in _PLAIN
        and (
            third is None
            or (
                type(third) in _PLAIN
                and not (third.is_neg() or third._is_zerotensor() or _is_wrapped(third))
            )
        )
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._is_tracing()
        and not torch._C._autograd._profiler_enabled()
        and forward_ad._current_level < 0
        and not (first.is_neg() or first._is_zerotensor() or _is_wrapped(first))
        and not (second.is_neg() or second._is_zerotensor() or _is_wrapped(second))
    )


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
    """The transposed convolution.

    Args:
        input: [N, Cin, H, W].
        weight: [Cin, Cout/groups, kH, kW], of the input's dtype and device.
        bias: [Cout] or None.
        stride: height's and width's, like the three pairs after it.
        padding: what is left out on each side of the output.
        output_padding: what is added to the end of the output.
        dilation: the distance between the kernel's taps.
        groups: divides Cin.

    Returns:
        [N, Cout, OH, OW], channels_last if the input or the weight is.

    The arguments must be sound: `functional.conv_transpose2d` is where they are checked. Under
    autocast their dtypes may differ.
    """
    geometry = (stride, padding, output_padding, dilation, groups)
    if torch.compiler.is_compiling() or not unobserved(input, weight, bias):
        return _forward_op(input, weight, bias, *geometry)
    return forward_unobserved(input, weight, bias, *geometry)


def forward_unobserved(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    """As `forward`, of a call that is not compiled and of tensors that are `unobserved`.

    For who has asked already: asking takes longer than all else that is done here.
    """
    if torch._C._is_any_autocast_enabled():
        device = input.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            input = _cast(input, device, dtype)
            weight = _cast(weight, device, dtype)
            bias = _cast(bias, device, dtype)
    geometry = (stride, padding, output_padding, dilation, groups)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(input, weight, bias):
        return TconvForward.apply(_forward_impl, input, weight, bias, *geometry)
    return _forward_impl(input, weight, bias, *geometry)


def forward_as_before(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor | None:
    """`forward_unobserved` of a call like one that was `remember`ed, else None.

    Args:
        input, weight, bias: any strided tensors, `unobserved`; they need not fit each other.
        geometry: as `Geometry` says.
    """
    if not _runs_our_kernels(input) or torch._C._is_any_autocast_enabled():
        return None
    compute = _runner().known(input, weight, bias, geometry)
    if compute is None:
        return None
    if torch.is_grad_enabled() and torch._C._any_requires_grad(input, weight, bias):
        return TconvForward.apply(compute, input, weight, bias, *geometry)
    return compute(input, weight, bias, *geometry)


def remember(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> None:
    """Let `forward_as_before` serve calls like this one, which is sound as its arguments are.

    NOTE: only who has checked that may ask for it; not a gradient, whose arguments may be those of
    an operator that was called by its name.
    """
    # What is sound under autocast, which casts, need not be without.
    if _runs_our_kernels(input) and input.numel() and not torch._C._is_any_autocast_enabled():
        _runner().remember(input, weight, bias, geometry)


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
    """The gradient of `forward` by its input.

    Args:
        grad_output: [N, Cout, OH, OW].
        weight: [Cin, Cout/groups, kH, kW].
        input_size: (H, W), which the output's size alone does not tell.
        stride: like the rest, as in `forward`.
        padding: as in `forward`.
        output_padding: as in `forward`.
        dilation: as in `forward`.
        groups: as in `forward`.

    Returns:
        [N, Cin, H, W], channels_last if grad_output or the weight is.
    """
    arguments = (
        grad_output,
        weight,
        input_size,
        stride,
        padding,
        output_padding,
        dilation,
        groups,
    )
    if torch.compiler.is_compiling() or not unobserved(grad_output, weight):
        return _input_gradient_op(*arguments)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(grad_output, weight):
        return TconvInputGradient.apply(_input_gradient_impl, *arguments)
    return _input_gradient_impl(*arguments)


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
    """The gradient of `forward` by its weight.

    Args:
        input: [N, Cin, H, W].
        grad_output: [N, Cout, OH, OW].
        kernel_size: (kH, kW), which the sizes alone do not tell.
        stride: like the rest, as in `forward`.
        padding: as in `forward`.
        output_padding: as in `forward`.
        dilation: as in `forward`.
        groups: as in `forward`.
        channels_last: the memory format of the result, which is the weight's.

    Returns:
        [Cin, Cout/groups, kH, kW].
    """
    arguments = (
        input,
        grad_output,
        kernel_size,
        stride,
        padding,
        output_padding,
        dilation,
        groups,
        channels_last,
    )
    if torch.compiler.is_compiling() or not unobserved(input, grad_output):
        return _weight_gradient_op(*arguments)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(input, grad_output):
        return TconvWeightGradient.apply(_weight_gradient_impl, *arguments)
    return _weight_gradient_impl(*arguments)
