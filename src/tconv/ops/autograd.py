"""The three maps, differentiable: autograd's nodes, and the functions that make them.

A node's first argument is its implementation: the operator below autograd for a call through the
dispatcher, a function of `compute` or a `Step` for one past it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tconv import choice, flags, private
from tconv.counts import Counter
from tconv.memory_format import (
    is_channels_last,
    lies_channels_last,
    sizes_of,
    with_height,
    without_height,
)
from tconv.ops import autocast, compute, schema
from tconv.ops.fake import output_size
from tconv.ops.schema import Map
from tconv.problem import Geometry, Pair


class _Node(private.Node):
    """A differentiable call of one operator.

    NOTE: this is `torch.autograd.Function` without its Python-level `apply`, which would send a
    call under torch.func's transforms back to the top of their stack. These nodes are made below
    that, where the dispatcher has already unwrapped one level, as PyTorch's own C++ nodes are.
    """

    apply: Callable[..., Tensor]


def _save(ctx: Any, first: Tensor, second: Tensor) -> None:
    """Save those of a bilinear map's two arguments that the wanted derivatives read."""
    needs_first, needs_second = ctx.needs_input_grad[1:3]
    ctx.save_for_backward(first if needs_second else None, second if needs_first else None)
    _save_for_forward(ctx, first, second)


def _save_for_forward(ctx: Any, first: Tensor, second: Tensor) -> None:
    """Save both, if something is differentiated in forward mode."""
    if private.forward_ad._current_level >= 0:
        ctx.save_for_forward(first, second)
        # An argument without a tangent reaches `jvp` as None, not as zeros.
        ctx.set_materialize_grads(False)


def _product_rule(
    ctx: Any, first: Tensor | None, second: Tensor | None, bilinear: Callable[..., Tensor]
) -> list[Tensor]:
    """The terms of a bilinear map's tangent, one for each argument that has a tangent."""
    primal_first, primal_second = ctx.saved_tensors
    terms = []
    if first is not None:
        terms.append(bilinear(first, primal_second))
    if second is not None:
        terms.append(bilinear(primal_first, second))
    return terms


def _sum(terms: list[Tensor]) -> Tensor | None:
    if not terms:
        return None
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


Gradients = tuple["Tensor | None", "Tensor | None"]
"""Of the input and the weight, each if it is wanted."""

AtOnce = Callable[[Tensor, Any, Any], "Gradients | None"]
"""Computes the gradients from the output's, the input and the weight; None where these or their
surroundings are not like those that it was made for."""

EVERY = 64
"""What is found at once reads in each so many calls the flags that tell who runs it."""

_TRIES, _MOST_KINDS = 16, 4
"""How often a step looks for what computes its gradients at once, and how many kinds it keeps."""


class Step:
    """A call of `forward` that autograd records, as its backward needs it.

    Args:
        run: computes it: takes the input, the weight, the bias and the geometry.
        geometry: of the layer.
        wanted: of a step that stands for all calls like it: whether the input's and the weight's
            gradients may be asked for. What computes them is kept then.
        see: is shown the output's gradient as the gradients' operators get it.

    Attributes:
        is_flat: whether its tensors lack their heights, which count as 1.
        laid: the sizes and strides of the input, and of the weight, with heights.
    """

    __slots__ = (
        "_at_once",
        "_bias_dtype",
        "_see",
        "_tries_left",
        "geometry",
        "is_flat",
        "laid",
        "run",
        "wanted",
    )

    def __init__(
        self,
        run: Map,
        geometry: Geometry,
        wanted: tuple[bool, bool] | None = None,
        see: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.run = run
        self.geometry = geometry
        self.wanted = wanted
        self.is_flat = False
        self.laid: Any = None
        self._see = see
        self._bias_dtype: torch.dtype | None = None
        self._at_once: dict[tuple[bool, ...], tuple[AtOnce, ...]] = {}  # by what is wanted
        self._tries_left = 0 if wanted is None else _TRIES

    def note_operands(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Keep what a backward needs to know of the tensors; calls alike keep the first's."""
        if bias is not None:
            self._bias_dtype = bias.dtype
        self.is_flat = input.dim() == 3
        input, weight = _tall(input, weight)
        self.laid = input.shape, input.stride(), weight.shape, weight.stride()

    def gradients(
        self, grad: Tensor, input: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of the input, the weight and the bias, each if it is wanted.

        Args:
            grad: the output's.
            input, weight: tensors.
            wanted: which.
        """
        if self.is_flat:
            grad, (input, weight) = with_height(grad), _tall(input, weight)
        grad_bias = grad.sum((0, 2, 3), dtype=self._bias_dtype) if wanted[2] else None
        if not (wanted[0] or wanted[1]):
            return None, None, grad_bias
        grad_input, grad_weight = self._of_operands(grad, input, weight, wanted)
        if self.is_flat:
            grad_input, grad_weight = (
                None if one is None else _without_height(one) for one in (grad_input, grad_weight)
            )
        return grad_input, grad_weight, grad_bias

    def _of_operands(
        self, grad: Tensor, input: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
    ) -> Gradients:
        """The gradients of the input and the weight, with heights, one at least."""
        for at_once in self._at_once.get(wanted, ()):
            found = at_once(grad, input, weight)
            if found is not None:
                return found
        found = self._longer_way(grad, input, weight, *wanted[:2])
        kept = self._at_once.get(wanted, ())
        if self._tries_left and len(kept) < _MOST_KINDS:
            made = self._find_at_once(grad, input, weight, *wanted[:2])
            if made is not None:
                self._at_once[wanted] = (*kept, made)
        return found

    def _longer_way(
        self, grad: Tensor, input: Tensor, weight: Tensor, needs_input: bool, needs_weight: bool
    ) -> Gradients:
        """The gradients of the input and the weight, one at least, of any call."""
        input_shape, input_strides, weight_shape, weight_strides = self.laid
        if lies_channels_last(input_shape, input_strides):
            # A channels_last forward has a channels_last backward, whatever the loss's gradient is.
            grad = grad.contiguous(memory_format=torch.channels_last)
        compiling = torch.compiler.is_compiling()
        if self._see is not None and not compiling and unobserved(grad, grad):
            self._see(grad)
        channels_last = needs_weight and lies_channels_last(weight_shape, weight_strides)
        if (
            needs_input
            and needs_weight
            and not torch.is_grad_enabled()
            and not compiling
            and unobserved(grad, input, weight)
        ):
            return compute.gradients(grad, input, weight, self.geometry, channels_last)
        grad_input = grad_weight = None
        if needs_input:
            grad_input = input_gradient(grad, weight, input_shape[2:], self.geometry)
        if needs_weight:
            rest = (weight_shape[2:], self.geometry, channels_last)
            grad_weight = weight_gradient(input, grad, *rest)
        return grad_input, grad_weight

    def _find_at_once(
        self, grad: Tensor, input: Tensor, weight: Tensor, needs_input: bool, needs_weight: bool
    ) -> AtOnce | None:
        """What computes such gradients; None unless it is known who runs each."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not flags.are_usual():
            return None
        tensors = [grad, *[input] * needs_weight, *[weight] * needs_input]
        if not unobserved(*tensors) or any(tensor.data_ptr() % 16 for tensor in tensors):
            return None
        self._tries_left -= 1
        input_shape, input_strides, weight_shape, weight_strides = self.laid
        full, converts = grad, False
        if lies_channels_last(input_shape, input_strides):
            full = grad.contiguous(memory_format=torch.channels_last)
            converts = full is not grad
        run = compute.runner().ready_gradients(
            full,
            input if needs_weight else None,
            weight if needs_input else None,
            (input_shape, weight_shape),
            self.geometry,
            lies_channels_last(weight_shape, weight_strides),
        )
        if run is None:
            return None
        alike = private.alike(*tensors)
        own = bool(choice.overrides)
        flags_then, turn = flags.of_who_runs(), itertools.count(1).__next__
        is_float32 = grad.dtype is torch.float32
        precision = private.fp32_precision("cuda", "conv")

        def at_once(grad: Tensor, input: Any, weight: Any) -> Gradients | None:
            # NOTE: only what is alike is known to have an address.
            if needs_input and needs_weight:
                if not alike(grad, input, weight):
                    return None
                addresses = grad.data_ptr() | input.data_ptr() | weight.data_ptr()
            else:
                other = weight if needs_input else input
                if not alike(grad, other):
                    return None
                addresses = grad.data_ptr() | other.data_ptr()
            if (
                addresses % 16
                or torch.is_grad_enabled()
                or bool(choice.overrides) is not own
                or choice.TIMING in choice.overrides
                or private.is_watched()
                or (
                    is_float32
                    and not (
                        private.is_cudnn_enabled()
                        and private.fp32_precision("cuda", "conv") == precision
                    )
                )
                or not (turn() % EVERY or flags.of_who_runs() == flags_then)
            ):
                return None
            if converts:
                grad = grad.contiguous(memory_format=torch.channels_last)
            return run(grad, input, weight)

        return at_once


class TconvForward(_Node):
    """forward(x, w, b): x's gradient is an input_gradient, w's a weight_gradient, b's a sum.

    The sum has the bias's dtype, which under autocast may be another than the output's.

    NOTE: its implementation may be a `Step`, which calls alike share.
    """

    @staticmethod
    def forward(
        ctx: Any,
        implementation: Map,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
    ) -> Tensor:
        """Compute the output and note what its derivatives need."""
        if type(implementation) is Step:
            step = implementation
        else:
            step = Step(implementation, geometry)
        # As PyTorch's node: a call that `checkpoint` computes twice may have another node then.
        ctx.save_for_backward(input, weight)
        if step.wanted is None:
            _save_for_forward(ctx, input, weight)
        if step.laid is None:
            step.note_operands(input, weight, bias)
        ctx.step = step
        return step.run(input, weight, bias, geometry)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the input, the weight and the bias, each only where it is wanted."""
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        return None, *ctx.step.gradients(grad, *ctx.saved_tensors, ctx.needs_input_grad[1:4]), None

    @staticmethod
    def jvp(
        ctx: Any,
        _implementation: None,
        input: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        _geometry: None,
    ) -> Tensor | None:
        """The output's tangent, from those of the input, the weight and the bias."""
        geometry = ctx.step.geometry
        input_shape, _, weight_shape, _ = ctx.step.laid
        terms = _product_rule(ctx, input, weight, lambda x, w: forward(x, w, None, geometry))
        if bias is not None:
            spatial = output_size(input_shape[2:], weight_shape[2:], geometry)
            one = bias.view(1, -1, 1, 1).expand(input_shape[0], bias.shape[0], *spatial)
            terms.append(one.squeeze(2) if ctx.step.is_flat else one)
        return _sum(terms)


class TconvInputGradient(_Node):
    """input_gradient(y, w): y's gradient is a forward, w's a weight_gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        implementation: Map,
        grad_output: Tensor,
        weight: Tensor,
        input_size: Pair,
        geometry: Geometry,
    ) -> Tensor:
        """Compute the input's gradient and note what its own derivatives need."""
        _save(ctx, grad_output, weight)
        ctx.geometry = geometry
        ctx.input_size = input_size
        ctx.kernel_size = sizes_of(weight)
        ctx.weight_channels_last = is_channels_last(weight)
        return implementation(grad_output, weight, input_size, geometry)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the output's gradient and of the weight, each only where it is wanted."""
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        grad_output, weight = ctx.saved_tensors
        _, needs_output, needs_weight, *_ = ctx.needs_input_grad
        grad_grad_output = grad_weight = None
        if needs_output:
            grad_grad_output = forward(grad, weight, None, ctx.geometry)
        if needs_weight:
            grad_weight = weight_gradient(
                grad, grad_output, ctx.kernel_size, ctx.geometry, ctx.weight_channels_last
            )
        return None, grad_grad_output, grad_weight, None, None

    @staticmethod
    def jvp(
        ctx: Any,
        _implementation: None,
        grad_output: Tensor | None,
        weight: Tensor | None,
        *_rest: None,
    ) -> Tensor | None:
        """The input gradient's tangent."""
        return _sum(
            _product_rule(
                ctx,
                grad_output,
                weight,
                lambda y, w: input_gradient(y, w, ctx.input_size, ctx.geometry),
            )
        )


class TconvWeightGradient(_Node):
    """weight_gradient(x, y): x's gradient is an input_gradient, y's a forward."""

    @staticmethod
    def forward(
        ctx: Any,
        implementation: Map,
        input: Tensor,
        grad_output: Tensor,
        kernel_size: Pair,
        geometry: Geometry,
        channels_last: bool,
    ) -> Tensor:
        """Compute the weight's gradient and note what its own derivatives need."""
        _save(ctx, input, grad_output)
        ctx.geometry = geometry
        ctx.input_size = sizes_of(input)
        ctx.kernel_size = kernel_size
        ctx.channels_last = channels_last
        return implementation(input, grad_output, kernel_size, geometry, channels_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the input and of the output's gradient, each only where it is wanted."""
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        input, grad_output = ctx.saved_tensors
        _, needs_input, needs_output, *_ = ctx.needs_input_grad
        grad_input = grad_grad_output = None
        if needs_input:
            grad_input = input_gradient(grad_output, grad, ctx.input_size, ctx.geometry)
        if needs_output:
            grad_grad_output = forward(input, grad, None, ctx.geometry)
        return None, grad_input, grad_grad_output, None, None, None

    @staticmethod
    def jvp(
        ctx: Any,
        _implementation: None,
        input: Tensor | None,
        grad_output: Tensor | None,
        *_rest: None,
    ) -> Tensor | None:
        """The weight gradient's tangent."""
        rest = (ctx.kernel_size, ctx.geometry, ctx.channels_last)
        return _sum(
            _product_rule(ctx, input, grad_output, lambda x, y: weight_gradient(x, y, *rest))
        )


def dispatched(node: type[_Node], operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What the dispatcher runs for an operator's autograd keys.

    It needs `private.has_nodes_below_transforms`.
    """

    def below(*arguments: Any) -> Tensor:
        with private.below_autograd():
            return operator(*arguments)

    def compute_eager(
        first: Any, second: Any, third: Any, geometry: Geometry, *rest: Any
    ) -> Tensor:
        return below(first, second, third, *geometry, *rest)

    def compute_transformed(*arguments: Any) -> Tensor:
        # A node computes with gradients off; transforms further out need them on.
        with torch.enable_grad(), private.set_forward_grad_enabled(True):
            return compute_eager(*arguments)

    def kernel(*arguments: Any) -> Tensor:
        differentiable = torch.is_grad_enabled() and private.any_requires_grad(*arguments)
        if not differentiable and private.forward_ad._current_level < 0:
            return below(*arguments)
        arguments = schema.pack(arguments)
        if not private.are_transforms_active():
            return node.apply(compute_eager, *arguments)
        with private.single_level():
            return node.apply(compute_transformed, *arguments)

    return kernel


_pytorch, _pytorch1d = torch.conv_transpose2d, torch.conv_transpose1d
"""PyTorch's own functions, whatever `tconv.enable` puts in their place."""

_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def unobserved(first: Tensor, second: Tensor, third: Tensor | None = None) -> bool:
    """Whether the dispatcher would do nothing for a call on these tensors but call us.

    True of an ordinary eager call: no subclass, mode, transform, tracer or profiler, and every
    tensor's values lie in its own memory as they are. Those of a negative view, of a ZeroTensor, of
    what a torch.func level has wrapped and of autograd's own batches do not. Autocast, which
    changes `forward` alone, is ignored. Ask `torch.compiler.is_compiling` before.
    """
    return (
        type(first) in _PLAIN
        and type(second) in _PLAIN
        and (
            third is None
            or (
                type(third) in _PLAIN
                and not third.is_neg()
                and not private.is_zerotensor(third)
                and not private.is_wrapped(third)
                and private.has_storage(third)
            )
        )
        and not (
            private.len_dispatch_stack()
            or private.are_transforms_active()
            or private.is_tracing()
            or private.is_watched()
        )
        and not (first.is_neg() or private.is_zerotensor(first) or private.is_wrapped(first))
        and not (second.is_neg() or private.is_zerotensor(second) or private.is_wrapped(second))
        and private.has_storage(first)
        and private.has_storage(second)
    )


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """The transposed convolution.

    Args:
        input: [N, Cin, H, W], or without H, which counts as 1.
        weight: [Cin, Cout/groups, kH, kW], or without kH, of the input's dtype and device.
        bias: [Cout] or None.
        geometry: of the layer.

    Returns:
        [N, Cout, OH, OW], channels_last if the input or the weight is; without OH if the input
        lacks H.

    `functional.conv_transpose2d` has checked the arguments. Under autocast their dtypes may differ.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and unobserved(input, weight, bias):
        return forward_unobserved(input, weight, bias, geometry)
    if input.dim() == 4:
        return schema.forward(input, weight, bias, *geometry)
    if not compiling and _takes_a_node(input, weight, bias):
        # One outside of the operator, which saves what the node of an unobserved call does.
        return _run(_observed, True, autocast.dtype_for(input), input, weight, bias, geometry)
    return schema.forward(*_tall(input, weight), bias, *geometry).squeeze(2)


def _observed(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    return schema.forward(input, weight, bias, *geometry)


def _takes_a_node(*tensors: Tensor | None) -> bool:
    """Whether autograd records an eager call, and by one node that stands above the dispatcher.

    It may stand there for plain tensors, as they are.
    """
    return (
        torch.is_grad_enabled()
        and private.any_requires_grad(*tensors)
        and not private.are_transforms_active()
        and not private.is_tracing()
        and all(
            one is None or (type(one) in _PLAIN and private.has_storage(one)) for one in tensors
        )
    )


def forward_unobserved(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    """As `forward`, of a call that is not compiled and of tensors that are `unobserved`.

    For callers that have asked: asking takes longer than everything else here.

    Args:
        input, weight: as for `forward`, or without their heights, which count as 1; so does the
            output then.
        bias, geometry: as for `forward`.
    """
    dtype = autocast.dtype_for(input)
    differentiable = torch.is_grad_enabled() and private.any_requires_grad(input, weight, bias)
    return _run(compute.forward, differentiable, dtype, input, weight, bias, geometry)


Keep = Callable[..., None]
"""Takes what makes a function of a call's input, weight and bias that runs calls like it, from the
spatial axes of these; and, if it is not to run all, what says whether it runs the next."""


def cached_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    leave: Callable[[Counter], None] | None = None,
    keep: Keep | None = None,
) -> Tensor | None:
    """`forward_unobserved` of a call whose like was `remember`ed, else None.

    Args:
        input: of a dtype and on a device that our kernels serve.
        weight: of as many axes. It and the bias need not fit the input. All are strided and
            `unobserved`.
        bias: any tensor, or None.
        geometry: of the layer.
        leave: is told the call's counter where PyTorch is to run such calls from now on.
        keep: is told how to run such calls.

    Where PyTorch is to run the call and its gradients, its own function does, with its own
    backward: the host then does what it does without us, but for one look-up.
    """
    dtype = autocast.dtype_for(input)
    axes = input.dim() - 2
    run = compute.runner().known(*_tall(input, weight), bias, geometry, dtype)
    if run is None:
        return None
    differentiable, wanted = False, (False, False)
    if torch.is_grad_enabled():
        wanted = (input.requires_grad, weight.requires_grad)
        differentiable = True in wanted or (bias is not None and bias.requires_grad)
    served = run.pytorchs(differentiable, wanted)
    if served is not None:
        if not run.is_settled(differentiable, wanted):
            watch = run.watch(wanted)
            watched = functools.partial(_watched, watch, served, geometry)
            if keep is not None:
                keep(watched, watch.goes_on)
            return watched(axes)(input, weight, bias)
        served.add()
        if leave is not None:
            leave(served)
        function, rest = _pytorchs(geometry, axes)
        return function(input, weight, bias, *rest)
    if keep is not None:
        keep(functools.partial(_ready, run, dtype, differentiable, wanted, geometry))
    return _run(run, differentiable, dtype, input, weight, bias, geometry, run.see)


def _pytorchs(geometry: Geometry, axes: int) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """PyTorch's function for so many spatial axes, and its arguments behind the tensors."""
    *pairs, groups = geometry
    stride, padding, output_padding, dilation = (pair[2 - axes :] for pair in pairs)
    function = _pytorch if axes == 2 else _pytorch1d
    return function, (stride, padding, output_padding, groups, dilation)


def _tall(input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The tensors with their heights, of 1 if they have none."""
    if input.dim() == 4:
        return input, weight
    return with_height(input), with_height(weight)


def _flat(
    implementation: Map, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    """What an implementation makes of tensors without their heights."""
    return without_height(implementation(*_tall(input, weight), bias, geometry))


def _without_height(gradient: Tensor) -> Tensor:
    """A view where something sees the backward: autograd, for one. Else none, as PyTorch's."""
    if (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or not unobserved(gradient, gradient)
    ):
        return gradient.squeeze(2)
    return without_height(gradient)


def _watched(
    watch: Any, served: Counter, geometry: Geometry, axes: int
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """What runs a call by PyTorch's own function, and has a `tuning.Watch` see it.

    Args:
        watch: the call's.
        served: counts it.
        geometry: of the layer.
        axes: the spatial axes of its tensors.
    """
    function, rest = _pytorchs(geometry, axes)

    def run(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        served.add()
        return watch.see(function, input, weight, bias, *rest)

    return run


def _ready(
    known: Any,
    dtype: torch.dtype | None,
    differentiable: bool,
    wanted: tuple[bool, bool],
    geometry: Geometry,
    axes: int,
) -> Callable[..., Tensor] | None:
    """What runs a known call within our node, or without gradients, if that is known.

    It takes the input, the weight and the bias of calls like it.

    Args:
        known: the call, a `run.calls.Known`.
        dtype: what autocast casts its tensors to.
        differentiable: whether autograd records it.
        wanted: whether the input's and the weight's gradients may be asked for.
        geometry: of the layer.
        axes: the spatial axes of its tensors.
    """
    if differentiable and not known.is_settled(True, wanted):
        return None
    run: Callable[..., Tensor] | None = known.ready(axes)
    if run is None or not (differentiable or dtype):
        return run
    if dtype is not None:
        run = functools.partial(_with_cast_bias, run)
    if differentiable:
        run = functools.partial(TconvForward.apply, Step(run, geometry, wanted))

    def ready(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if dtype is not None:
            input, weight = _cast(dtype, input, weight)
        return run(input, weight, bias, geometry)

    return ready


def remember(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> None:
    """Let `cached_forward` serve calls like this one, whose arguments are valid.

    NOTE: only callers that have checked the arguments may ask for it. A gradient may not: its
    arguments may be those of an operator that was called by its name.
    """
    if not input.numel():
        return
    runner = compute.runner()
    dtype = autocast.dtype_for(input)
    key = (runner.signature(*_tall(input, weight), bias, geometry), dtype)
    if dtype is not None:
        input, weight = _cast(dtype, input, weight)
    runner.remember(key, *_tall(input, weight), bias, geometry)


def _run(
    implementation: Map,
    differentiable: bool,
    dtype: torch.dtype | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    see: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """A valid call of `forward`, in the dtype that autocast computes it in, if it is on."""
    if dtype is not None:
        input, weight = _cast(dtype, input, weight)
        # Below our node, which needs no second one then to cast the bias's gradient back.
        implementation = functools.partial(_with_cast_bias, implementation)
    if input.dim() == 3:
        implementation = functools.partial(_flat, implementation)
    if differentiable:
        step = Step(implementation, geometry, see=see)
        return TconvForward.apply(step, input, weight, bias, geometry)
    return implementation(input, weight, bias, geometry)


def _with_cast_bias(
    implementation: Map, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    if bias is not None and bias.dtype is not input.dtype:
        bias = bias.to(input.dtype)
    return implementation(input, weight, bias, geometry)


def _cast(dtype: torch.dtype, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The tensors of a valid call as autocast passes them on."""
    if input.dtype is torch.float64:  # then all are
        return input, weight
    # `to` would take a microsecond to return the tensor itself.
    return (
        input if input.dtype is dtype else input.to(dtype),
        weight if weight.dtype is dtype else weight.to(dtype),
    )


def input_gradient(
    grad_output: Tensor, weight: Tensor, input_size: Pair, geometry: Geometry
) -> Tensor:
    """The gradient of `forward` by its input.

    Args:
        grad_output: [N, Cout, OH, OW].
        weight: [Cin, Cout/groups, kH, kW].
        input_size: (H, W), which the output's size alone does not tell.
        geometry: of the layer.

    Returns:
        [N, Cin, H, W], channels_last if grad_output or the weight is.
    """
    if torch.compiler.is_compiling() or not unobserved(grad_output, weight):
        return schema.input_gradient(grad_output, weight, input_size, *geometry)
    arguments = (grad_output, weight, input_size, geometry)
    if torch.is_grad_enabled() and private.any_requires_grad(grad_output, weight):
        return TconvInputGradient.apply(compute.input_gradient, *arguments)
    return compute.input_gradient(*arguments)


def weight_gradient(
    input: Tensor, grad_output: Tensor, kernel_size: Pair, geometry: Geometry, channels_last: bool
) -> Tensor:
    """The gradient of `forward` by its weight.

    Args:
        input: [N, Cin, H, W].
        grad_output: [N, Cout, OH, OW].
        kernel_size: (kH, kW), which the sizes alone do not tell.
        geometry: of the layer.
        channels_last: the memory format of the result, which is the weight's.

    Returns:
        [Cin, Cout/groups, kH, kW].
    """
    if torch.compiler.is_compiling() or not unobserved(input, grad_output):
        return schema.weight_gradient(input, grad_output, kernel_size, *geometry, channels_last)
    arguments = (input, grad_output, kernel_size, geometry, channels_last)
    if torch.is_grad_enabled() and private.any_requires_grad(input, grad_output):
        return TconvWeightGradient.apply(compute.weight_gradient, *arguments)
    return compute.weight_gradient(*arguments)
