"""The reference: a layer's maps in float64, by PyTorch, and the bounds of a comparison.

The tests, `tconv verify` and the benchmarks share it. The bounds are those of the contract,
docs/numerics.md.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import deterministic

from tconv.kernels.sm90_weight_gradient.layout import PART_POSITIONS
from tconv.layers import DIRECTIONS, Layer
from tconv.problem import Pair, float32_math

MAPS = ("forward", "input_gradient", "weight_gradient", "bias_gradient")
"""What a layer computes, in the order in which this module lists it."""

LAYOUTS = ("contiguous", "channels_last", "strided", "mixed")
"""Of the operands; "mixed" is a contiguous input with a channels_last weight and gradient."""

UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}

# Of a result's norm; a 16-bit result is rounded once, by at most the unit roundoff.
NORM_BOUND = {
    torch.float64: 4e-15,
    torch.float32: 1e-6,
    torch.float16: 1.01 * 2.0**-11,
    torch.bfloat16: 1.01 * 2.0**-8,
}

# Elements of input and output that the reference takes at once, in float64 and several copies.
_MOST_ELEMENTS = 2**28


@dataclass(frozen=True)
class Operands:
    """The tensors of a layer, of one dtype, on one device."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    grad_output: Tensor


def operands(layer: Layer, dtype: torch.dtype, layout: str, device: str, seed: int = 0) -> Operands:
    """Random tensors; "strided" ones are neither contiguous nor channels_last."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator)
        return (without_ties(values) if dtype == torch.float32 else values).to(device, dtype)

    def laid_out(values: Tensor, name: str) -> Tensor:
        if name == "channels_last":
            return values.to(memory_format=torch.channels_last)
        if name == "strided":
            wider = torch.randn_like(torch.cat([values, values], 3).transpose(2, 3).contiguous())
            view = wider[:, :, ::2].transpose(2, 3)
            view.copy_(values)
            return view
        return values

    other = "channels_last" if layout == "mixed" else layout
    return Operands(
        x=laid_out(tensor(*layer.x_shape), layout),
        w=laid_out(tensor(*layer.w_shape), other),
        bias=tensor(layer.out_channels) if layer.bias else None,
        grad_output=laid_out(tensor(*layer.y_shape), other),
    )


def random_layers(
    count: int, seed: int, channels: int = 12, size: int = 9, *, one_dimension: bool = False
) -> list[Layer]:
    """Layers over all combinations that PyTorch accepts, every gcd of stride and dilation.

    Args:
        count: how many.
        seed: the same seed gives the same layers.
        channels: most channels of a group.
        size: most input pixels along an axis.
        one_dimension: whether every fourth is of one dimension.
    """
    rng = random.Random(seed)
    layers: list[Layer] = []
    while len(layers) < count:

        def pair(low: int, high: int) -> Pair:
            return rng.randint(low, high), rng.randint(low, high)

        stride, dilation = pair(1, 6), pair(1, 4)
        batch = rng.randint(1, 3)
        in_channels, out_channels = rng.randint(1, channels), rng.randint(1, channels)
        groups = rng.choice((1, 1, 1, 2, 3))
        (height, width), kernel_size = pair(1, size), pair(1, 5)
        padding = pair(0, 3)
        output_padding = (
            rng.randrange(max(stride[0], dilation[0])),
            rng.randrange(max(stride[1], dilation[1])),
        )
        bias = rng.random() < 0.5
        with contextlib.suppress(ValueError):  # no output
            layer = Layer(
                in_channels * groups,
                out_channels * groups,
                kernel_size,
                stride,
                padding,
                output_padding,
                groups,
                bias,
                dilation,
                batch,
                height,
                width,
            )
            is_fourth = len(layers) % 4 == 3
            layers.append(layer.flattened() if one_dimension and is_fourth else layer)
    return layers


def without_ties(values: Tensor) -> Tensor:
    """Float32 of which none is in the middle between two values of TF32."""
    bits = values.contiguous().view(torch.int32)
    return (bits + ((bits & 0x1FFF) == 0x1000).int()).view(torch.float32)


def round_to_tf32(values: Tensor) -> Tensor:
    """Float32 rounded to TF32: 10 bits of mantissa, to nearest, ties away from zero.

    Kernels round ties to either side; `operands` have none.
    """
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Makes torch.empty return NaN within a `with` block, so that unwritten outputs show."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def applied(
    layer: Layer, functions: Any, x: Tensor, w: Tensor, bias: Tensor | None
) -> Callable[[], Tensor]:
    """A layer's call of its function, on views of operands that have a height in one dimension too.

    Args:
        layer: the layer.
        functions: has conv_transpose1d and conv_transpose2d: torch.nn.functional, tconv.functional.
        x, w, bias: the operands.

    Returns:
        The call. In one dimension its result has no height.
    """
    sizes = [layer.sizes(pair) for pair in layer.geometry[:4]]
    stride, padding, output_padding, dilation = sizes
    function = getattr(functions, f"conv_transpose{layer.dimensions}d")
    if layer.dimensions == 1:
        x, w = x.squeeze(2), w.squeeze(2)
    return lambda: function(x, w, bias, stride, padding, output_padding, layer.groups, dilation)


def with_height(layer: Layer, result: Tensor) -> Tensor:
    """A result of the layer's function as the maps have it: [a, b, height, width]."""
    return result.unsqueeze(2) if layer.dimensions == 1 else result


def maps(
    layer: Layer,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    y: Tensor,
    *,
    output_alone: bool = False,
) -> list[Tensor]:
    """The maps in float64, by PyTorch, on the operands' device; the bias's gradient if it has one.

    Large batches are taken in parts.

    Args:
        layer: the layer.
        x, w, bias, y: its operands; y is the gradient of the output.
        output_alone: compute the first map and no gradient.
    """
    wide = w.double().requires_grad_(not output_alone)
    wide_bias = None if bias is None else bias.double()
    images = max(1, _MOST_ELEMENTS * len(x) // (x.numel() + y.numel()))
    outputs, x_gradients, w_gradient = [], [], torch.zeros_like(wide)
    for part, part_y in zip(x.split(images), y.split(images), strict=True):
        part = part.double().requires_grad_(not output_alone)
        out = with_height(layer, applied(layer, F, part, wide, wide_bias)())
        outputs.append(out.detach())
        if output_alone:
            continue
        x_gradient, of_part = torch.autograd.grad(out, (part, wide), part_y.double())
        x_gradients.append(x_gradient)
        w_gradient += of_part
    if output_alone:
        return [torch.cat(outputs)]
    results = [torch.cat(outputs), torch.cat(x_gradients), w_gradient]
    return results if bias is None else [*results, y.double().sum((0, 2, 3))]


@dataclass(frozen=True)
class Expected:
    """One map's right result in float64, and the largest error that a computed one may have.

    Attributes:
        name: one of `MAPS`.
        exact: computed from the operands as they are.
        contract: computed from the operands as the numerics contract rounds them.
        magnitude: the same map of the operands' absolute values: the size of the summed products.
        terms: the products that one element sums, at most.
        dtype: of the result.
    """

    name: str
    exact: Tensor
    contract: Tensor
    magnitude: Tensor
    terms: int
    dtype: torch.dtype

    @property
    def cuts(self) -> float:
        """The error of a tensor core that cuts, not rounds, its sum after every 8 products.

        It is relative to the sum's magnitude, and 0 for maps that no tensor core computes. The
        weight's gradient takes its sums off the tensor cores after some thousand pixels.
        """
        if self.contract is self.exact or self.name == "bias_gradient":
            return 0.0
        of_weight = self.name == "weight_gradient"
        terms = min(self.terms, PART_POSITIONS) if of_weight else self.terms
        return terms / 8 * 2.0**-23

    @property
    def sum_roundoff(self) -> float:
        """The unit roundoff of the sums: float32 for all but float64."""
        return UNIT_ROUNDOFF[torch.float64 if self.dtype == torch.float64 else torch.float32]

    @property
    def norm_bound(self) -> float:
        """The largest relative error of the norm that is right.

        Half of a tensor core's cuts are expected: the last cut the whole sum, the first only a
        small part of it. One H200 showed 1.4e-6 for 576 terms, where this gives 5.3e-6. The
        weight's gradient sums over all pixels. Its error grows like the square root of their
        number: 3.4e-6 for 4.2 million, where this gives 8.6e-6.
        """
        pixels = self.terms if self.name == "weight_gradient" else 0
        growth = pixels**0.5 * self.sum_roundoff / 16
        return NORM_BOUND[self.dtype] + growth + self.cuts / 2

    def why_wrong(self, got: Tensor) -> str | None:
        """One sentence if a computed result breaks the contract, else None."""
        want, dtype = self.contract, self.dtype
        if got.shape != want.shape or got.dtype != dtype:
            return (
                f"must be {dtype} of shape {tuple(want.shape)}, got {got.dtype} of "
                f"{tuple(got.shape)}"
            )
        if not bool(torch.isfinite(got).all()):
            count = int((~torch.isfinite(got)).sum())
            return f"not every element was written: {count} of {got.numel()} are not finite"
        error = (got.double() - want).abs()
        norm = float(error.norm() / want.norm().clamp_min(1e-300))
        near_zero = float(error.max()) <= 4 * self.sum_roundoff * float(self.magnitude.max())
        if norm > self.norm_bound and not near_zero:
            return f"relative error {norm:.2e} in the norm, the bound is {self.norm_bound:.2e}"
        # Each element's bound: one rounding of the result, and sums whose error grows like the
        # square root of their length, of products as large as the operands' absolute values
        # make them.
        bound = UNIT_ROUNDOFF[dtype] * 1.01 * want.abs()
        bound += (4 * self.terms**0.5 * self.sum_roundoff + self.cuts) * self.magnitude
        if dtype == torch.float16:
            bound += 2.0**-25  # subnormal results
        worst = float((error - bound).max())
        if worst > 0:
            return f"an element is {worst:.2e} over its bound"
        return None


def expected(
    layer: Layer, tensors: Operands, *, tf32: bool = False, output_alone: bool = False
) -> list[Expected]:
    """What the maps of the operands should be, in the order of `MAPS`.

    Args:
        layer: the layer.
        tensors: its operands.
        tf32: TF32 is allowed: the contract's result takes operands rounded to TF32 wherever the
            contract rounds them, so that the bounds stay those of float32.
        output_alone: the first of `MAPS` alone.
    """
    t = tensors
    wanted = functools.partial(maps, layer, output_alone=output_alone)
    exact = wanted(t.x, t.w, t.bias, t.grad_output)
    contract = exact
    in_channels, out_channels = layer.in_channels // layer.groups, layer.w_shape[1]
    height, width = layer.axes
    phase_taps, taps = height.phase_taps * width.phase_taps, height.kernel * width.kernel
    allowed = tf32 and t.x.dtype == torch.float32
    maths = [
        float32_math(direction, in_channels, out_channels, phase_taps, taps, tf32_allowed=allowed)
        for direction in DIRECTIONS
    ]
    if "tf32" in maths:
        x, w, y = (round_to_tf32(operand) for operand in (t.x, t.w, t.grad_output))
        rounded = wanted(x, w, t.bias, y)
        contract = [
            r if math == "tf32" else e for r, e, math in zip(rounded, exact, maths, strict=False)
        ] + exact[3:]
    absolute_bias = None if t.bias is None else t.bias.abs()
    magnitude = wanted(t.x.abs(), t.w.abs(), absolute_bias, t.grad_output.abs())
    terms = (
        in_channels * taps,
        out_channels * taps,
        layer.batch * layer.height * layer.width,
        layer.batch * layer.output_size[0] * layer.output_size[1],
    )
    return [
        Expected(name, e, c, m, n, t.x.dtype)
        for name, e, c, m, n in zip(MAPS, exact, contract, magnitude, terms, strict=False)
    ]
