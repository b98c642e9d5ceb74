"""Operands of every scale, the bounds that results on them are held to, and which pixels an output
reads: what the emulator's and the device's tests of docs/numerics.md share.

A result is compared with float64 by two measures: the error's norm as a share of the result's, and
the worst element's error as a share of its `sum |x||w|`. Either may be at most `LIMIT` times that
of a simulation, or a floor.

Where TF32 is allowed the simulation rounds the operands to it and multiplies by PyTorch in float32
on the CPU; how that sums hardly matters beside the operands' rounding. In strict mode it is a
float32 dot product: one running sum.

NOTE: PyTorch's float32 on the CPU is no running sum. It sums blocks of channels, or each tap, by
themselves, as the CPU and the layer would have it, and errs 0.35 to 1 times as much: against that a
kernel that does nothing but fused products one after another would err 2.5 times too much.
What a running sum loses depends on where its large terms stand, so the simulation is the worse of
two, from the first product to the last and back.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from layer_cases import Case, round_to_tf32
from tconv.problem import Direction, Math
from tconv.reference import without_ties

LIMIT = 2.0
"""Times the simulation's error."""

NORM_FLOOR, ELEMENT_FLOOR = 1e-7, 3e-7
"""Errors of the norm, and of an element as a share of its magnitudes, that are right anyway."""

TINY = 2.0**-100
"""Elements with smaller magnitudes are compared among themselves: of subnormals the simulation
loses all, which is no measure for the others.
"""


@dataclass(frozen=True)
class Sizes:
    """What a map multiplies: images [batch, channels, height, width] with weights
    [groups, reduced, kept, *kernel], where channels are groups * reduced.
    """

    batch: int
    groups: int
    reduced: int
    kept: int
    size: tuple[int, int]
    kernel: tuple[int, int]

    @classmethod
    def of(cls, direction: Direction, case: Case) -> Sizes:
        """Of the weight's gradient: as in forward."""
        channels = (case.in_channels, case.out_channels)
        size = case.size
        if direction == "input_gradient":
            channels, size = (case.out_channels, case.in_channels), case.output_size
        return cls(case.batch, case.groups, *channels, size, case.kernel)

    @property
    def images(self) -> tuple[int, int, int, int]:
        return (self.batch, self.groups * self.reduced, *self.size)

    @property
    def weights(self) -> tuple[int, ...]:
        return (self.groups, self.reduced, self.kept, *self.kernel)


Operands = tuple[Tensor, Tensor]
"""Images and weights, shaped as in `Sizes`, float32 or float64."""


@dataclass(frozen=True)
class Scale:
    """A family of operands.

    Attributes:
        name: what is scaled, and how.
        make: random images and weights of these sizes; the same seed gives the same.
        by: dimensions of the output whose slices have norms of their own, since one slice is all
            of the norm of the whole.
        ordinary: nothing may be computed again.
    """

    name: str
    make: Callable[[Generator, Sizes], Operands]
    by: tuple[int, ...] = ()
    ordinary: bool = False

    def __str__(self) -> str:
        return self.name


def _normal(g: Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=g)


def _log_uniform(g: Generator, low: float, high: float, *shape: int) -> Tensor:
    """Powers of ten between two of them."""
    low, high = math.log10(low), math.log10(high)
    return 10 ** (low + (high - low) * torch.rand(shape, generator=g, dtype=torch.float64))


def _both_normal(g: Generator, s: Sizes) -> Operands:
    return _normal(g, s.images), _normal(g, s.weights)


def _one_of(g: Generator, count: int) -> int:
    return int(torch.randint(count, (1,), generator=g))


def _of_channels(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Factors [groups, reduced] of input channels, shaped for the images and for the weights."""
    return factors.reshape(1, -1, 1, 1), factors[:, :, None, None, None]


def _input_channels(g: Generator, s: Sizes) -> Operands:
    x, w = _both_normal(g, s)
    of_x, of_w = _of_channels(_log_uniform(g, 1e-8, 1e8, s.groups, s.reduced))
    return x * of_x, w / of_w


def _output_channels(g: Generator, s: Sizes) -> Operands:
    x, w = _both_normal(g, s)
    return x, w * _log_uniform(g, 1e-8, 1e8, s.groups, 1, s.kept, 1, 1)


def _samples(g: Generator, s: Sizes) -> Operands:
    x, w = _both_normal(g, s)
    return x * _log_uniform(g, 1e-8, 1e8, s.batch, 1, 1, 1), w


def _regions(g: Generator, s: Sizes) -> Operands:
    """16 x 16 pixels each, the first of them anywhere."""
    x, w = _both_normal(g, s)
    height, width = s.size
    factors = _log_uniform(g, 1e-8, 1e8, s.batch, 1, height // 16 + 2, width // 16 + 2)
    rows, columns = (torch.arange(size) + _one_of(g, 16) for size in s.size)
    return x * factors[:, :, rows // 16][..., columns // 16], w


def _rows(g: Generator, s: Sizes) -> Operands:
    x, w = _both_normal(g, s)
    return x * _log_uniform(g, 1e-8, 1e8, s.batch, 1, s.size[0], 1), w


def _pixels(g: Generator, s: Sizes) -> Operands:
    x, w = _both_normal(g, s)
    return x * _log_uniform(g, 1e-6, 10, s.batch, 1, *s.size), w


def _dominant(g: Generator, s: Sizes, *, small: float, cancels: bool) -> Operands:
    """One input channel of a group, and the others at `small` of it."""
    x, w = _both_normal(g, s)
    factors = torch.full((s.groups, s.reduced), small, dtype=torch.float64)
    factors[:, _one_of(g, s.reduced)] = 1
    of_x, of_w = _of_channels(factors)
    return x * of_x, w * (small / of_w) if cancels else w


def _dominant_weights(g: Generator, s: Sizes, *, small: float) -> Operands:
    """The weights of one input channel, and the others at `small` of it, with larger pixels."""
    x, w = _both_normal(g, s)
    factors = torch.full((s.groups, s.reduced), small, dtype=torch.float64)
    factors[:, _one_of(g, s.reduced)] = 1
    of_x, of_w = _of_channels(factors)
    return x * (small / of_x), w * of_w


def _bytes_beside_fractions(g: Generator, s: Sizes) -> Operands:
    x, w = _both_normal(g, s)
    x, w = x * 0.01, w.clone()
    channel = _one_of(g, s.reduced)
    x[:, channel :: s.reduced] = (256 * torch.rand((s.batch, 1, *s.size), generator=g)).floor()
    w[:, channel] *= 0.01 / 255
    return x, w


def _outlier(g: Generator, s: Sizes, *, value: float, of: str) -> Operands:
    x, w = _both_normal(g, s)
    flat = (x if of == "x" else w).view(-1)
    flat[_one_of(g, flat.numel())] = value
    return x, w


def _masks(g: Generator, s: Sizes) -> Tensor:
    """Softmax over a group's channels, of sharp logits."""
    logits = 10 * _normal(g, (s.batch, s.groups, s.reduced, *s.size))
    return logits.softmax(2).flatten(1, 2)


def _heat_maps(g: Generator, s: Sizes) -> Tensor:
    """A Gaussian in each channel, with its peak anywhere; it decays to nothing."""
    channels = s.images[:2]
    grids = torch.meshgrid(*(torch.arange(size).double() for size in s.size), indexing="ij")
    squares = torch.zeros(s.images, dtype=torch.float64)
    for grid, size in zip(grids, s.size, strict=True):
        peaks = size * torch.rand((*channels, 1, 1), generator=g, dtype=torch.float64)
        squares += (grid - peaks) ** 2
    return (-squares / (2 * _log_uniform(g, 0.7, 3, *channels, 1, 1) ** 2)).exp()


def _dense(g: Generator, s: Sizes) -> Tensor:
    return _normal(g, s.weights)


def _same_channel(s: Sizes) -> Tensor:
    return torch.eye(s.reduced, s.kept)[None, :, :, None, None]


def _diagonal(g: Generator, s: Sizes) -> Tensor:
    return _normal(g, s.weights) * _same_channel(s)


def _bilinear(g: Generator, s: Sizes) -> Tensor:
    """What heads of FCN begin with: each channel is interpolated by itself."""
    filters = []
    for taps in s.kernel:
        factor = (taps + 1) // 2
        middle = factor - 1 if taps % 2 else factor - 0.5
        filters.append(1 - (torch.arange(taps) - middle).abs() / factor)
    kernel = filters[0][:, None] * filters[1]
    return (_same_channel(s) * kernel).expand(s.weights)


def _images_and_weights(
    g: Generator,
    s: Sizes,
    *,
    images: Callable[[Generator, Sizes], Tensor],
    weights: Callable[[Generator, Sizes], Tensor],
) -> Operands:
    return images(g, s), weights(g, s)


def _zeros(g: Generator, s: Sizes, *, of: str) -> Operands:
    """In 98 of 100 elements."""
    x, w = _both_normal(g, s)
    for name, values in (("x", x), ("w", w)):
        if name in of:
            values *= torch.rand(values.shape, generator=g) < 0.02
    return x, w


def _everything(g: Generator, s: Sizes, *, scale: float, of: str) -> Operands:
    x, w = (values.double() for values in _both_normal(g, s))
    return (x * scale, w) if of == "x" else (x, w * scale)


def _uniform(g: Generator, s: Sizes) -> Operands:
    return torch.rand(s.images, generator=g), 2 * torch.rand(s.weights, generator=g) - 1


def _after_relu(g: Generator, s: Sizes) -> Operands:
    x, w = _both_normal(g, s)
    return x.relu(), w / math.sqrt(s.reduced)


def _scales() -> tuple[Scale, ...]:
    make = functools.partial
    images = {"soft masks": _masks, "heat maps": _heat_maps}
    weights = {"": _dense, ", diagonal weights": _diagonal, ", bilinear weights": _bilinear}
    return (
        Scale("normal", _both_normal, ordinary=True),
        Scale("uniform", _uniform, ordinary=True),
        Scale("after a ReLU", _after_relu, ordinary=True),
        Scale("input channels, inverse weights", _input_channels),
        Scale("output channels", _output_channels, by=(1,)),
        Scale("samples", _samples, by=(0,)),
        Scale("regions of 16 x 16", _regions),
        Scale("image rows", _rows),
        Scale("pixels 1e-6..10", _pixels),
        *(
            Scale(
                f"one channel beside {small:g} of it{', weights cancel' if cancels else ''}",
                make(_dominant, small=small, cancels=cancels),
            )
            for small in (1e-2, 1e-4, 1e-6, 1e-8, 1e-10)
            for cancels in (False, True)
        ),
        *(
            Scale(
                f"weights of one channel beside {small:g} of it, pixels cancel",
                make(_dominant_weights, small=small),
            )
            for small in (1e-2, 1e-4, 1e-8)
        ),
        Scale("a channel of 0..255 beside 0.01, weights cancel", _bytes_beside_fractions),
        *(
            Scale(f"one outlier of {value:g} in {of}", make(_outlier, value=value, of=of))
            for of in "xw"
            for value in (1e4, 1e8)
        ),
        *(
            Scale(x_name + w_name, make(_images_and_weights, images=x, weights=w))
            for x_name, x in images.items()
            for w_name, w in weights.items()
        ),
        *(Scale(f"98% zeros in {of}", make(_zeros, of=of)) for of in ("x", "w", "xw")),
        *(
            Scale(f"{of} at {scale:g}", make(_everything, scale=scale, of=of))
            for of in "xw"
            for scale in (1e-30, 1e-7, 1e4, 1e30)
        ),
        *(Scale(f"{of} subnormal", make(_everything, scale=1e-40, of=of)) for of in "xw"),
    )


SCALES = {scale.name: scale for scale in _scales()}


@functools.lru_cache(maxsize=64)
def operands(direction: Direction, case: Case, name: str, seed: int) -> Operands:
    """What a map multiplies, in PyTorch's shapes, float32, contiguous, without ties.

    Returns:
        x and w for forward; the gradient of the output and w for the gradient of the input; x and
        the gradient of the output for that of the weight, of which one (for odd seeds the other) is
        an image of the family and one is normal.
    """
    g = torch.Generator().manual_seed(seed)
    sizes = Sizes.of(direction, case)
    if direction == "weight_gradient":
        of_output = Sizes.of("input_gradient", case)
        scaled, plain = (of_output, sizes) if seed % 2 else (sizes, of_output)
        images, normal = SCALES[name].make(g, scaled)[0].float(), _normal(g, plain.images)
        images, normal = without_ties(images), without_ties(normal)
        return (normal, images) if seed % 2 else (images, normal)
    images, weights = SCALES[name].make(g, sizes)
    if direction == "input_gradient":
        weights = weights.transpose(1, 2)
    return without_ties(images.float()), without_ties(weights.flatten(0, 1).float())


def multiply(direction: Direction, case: Case, first: Tensor, second: Tensor) -> Tensor:
    """A map of operands as `operands` returns them, by PyTorch, in their dtype; without a bias."""
    stride, padding, output_padding, dilation, groups = case.geometry

    def forward(x: Tensor, w: Tensor) -> Tensor:
        return F.conv_transpose2d(x, w, None, stride, padding, output_padding, groups, dilation)

    if direction == "forward":
        return forward(first, second)
    if direction == "input_gradient":
        height, width = case.size  # beyond it are outputs of the padding alone
        return F.conv2d(first, second, None, stride, padding, dilation, groups)[
            :, :, :height, :width
        ]
    w = first.new_zeros(case.layer.w_shape).requires_grad_()
    return torch.autograd.grad(forward(first, w), w, second)[0]


def readers(direction: Direction, case: Case, first: Tensor, second: Tensor) -> Tensor:
    """Which elements of a map's result read one that is marked: booleans of its shape.

    Args:
        direction, case: the map.
        first, second: booleans of its operands' shapes, on one device.
    """
    ones_first, ones_second = (torch.ones_like(t, dtype=torch.float64) for t in (first, second))
    return (
        multiply(direction, case, first.double(), ones_second)
        + multiply(direction, case, ones_first, second.double())
    ) > 0.5


def not_finite(direction: Direction, case: Case, first: Tensor, second: Tensor) -> Tensor:
    """A map's result where it reads what is not finite, of operands of which one is finite; 0 where
    it does not.

    NOTE: PyTorch's own, for the weight's gradient, multiplies infinities by the zeros of a padding.
    """

    def count(of_first: Tensor, of_second: Tensor) -> Tensor:
        return multiply(direction, case, of_first.double(), of_second.double()).round()

    def infinite(values: Tensor, sign: int) -> Tensor:
        return values == sign * math.inf

    upwards = downwards = torch.zeros((), dtype=torch.float64, device=first.device)
    for sign in (1, -1):
        for other in (1, -1):
            met = count(infinite(first, sign), second * other > 0)
            met += count(first * other > 0, infinite(second, sign))
            if sign * other > 0:
                upwards = upwards + met
            else:
                downwards = downwards + met
    undefined = count(first.isnan(), torch.ones_like(second)) + count(
        torch.ones_like(first), second.isnan()
    )
    undefined += count(first.isinf(), second == 0) + count(first == 0, second.isinf())
    result = torch.where(upwards > 0, math.inf, 0.0)
    result = torch.where(downwards > 0, -math.inf, result)
    return torch.where((undefined > 0) | ((upwards > 0) & (downwards > 0)), math.nan, result)


def rounded_to_tf32(values: Tensor) -> Tensor:
    """To nearest, ties away from zero, subnormals too; what is not finite stays as it is."""
    return torch.where(values.isfinite(), round_to_tf32(values), values)


def running_sum(
    direction: Direction, case: Case, first: Tensor, second: Tensor, *, backwards: bool = False
) -> Tensor:
    """The map by one float32 sum for each element: over taps, and over channels for each of them;
    over pixels for the weight's gradient.
    """
    (height, width), (taps_y, taps_x), groups = case.size, case.kernel, case.groups
    (stride_y, stride_x), (step_y, step_x), (pad_y, pad_x) = (
        case.stride,
        case.dilation,
        case.padding,
    )
    batch = case.batch
    x_shape, y_shape, w_shape = case.layer.x_shape, case.layer.y_shape, case.layer.w_shape
    # The output and its padding, in which input i meets tap t at i*stride + t*dilation.
    padded = (batch, groups, case.out_channels, y_shape[2] + 2 * pad_y, y_shape[3] + 2 * pad_x)

    def met(values: Tensor, tap_y: int, tap_x: int) -> Tensor:
        """For each input, the output that it meets at a tap: [..., height, width]."""
        rows = slice(tap_y * step_y, tap_y * step_y + (height - 1) * stride_y + 1, stride_y)
        columns = slice(tap_x * step_x, tap_x * step_x + (width - 1) * stride_x + 1, stride_x)
        return values[..., rows, columns]

    def in_order(*counts: int) -> list[tuple[int, ...]]:
        terms = list(itertools.product(*map(range, counts)))
        return terms[::-1] if backwards else terms

    if direction == "weight_gradient":
        x = first.view(batch, groups, case.in_channels, height, width)
        y = F.pad(second, (pad_x, pad_x, pad_y, pad_y)).view(padded)
        # [batch, groups, out_channels, taps_y, taps_x, height, width]
        patches = torch.stack(
            [
                torch.stack([met(y, tap_y, tap_x) for tap_x in range(taps_x)], 3)
                for tap_y in range(taps_y)
            ],
            3,
        )
        sums = first.new_zeros((groups, case.in_channels, *w_shape[1:]))
        for n, row, column in in_order(batch, height, width):
            of_pixel = x[n, :, :, row, column][:, :, None, None, None]
            sums.addcmul_(of_pixel, patches[n, :, None, ..., row, column])
        return sums.view(w_shape)
    w = second.view(groups, case.in_channels, *w_shape[1:])
    if direction == "forward":
        x = first.view(batch, groups, case.in_channels, height, width)
        sums = first.new_zeros(padded)
        for tap_y, tap_x, channel in in_order(taps_y, taps_x, case.in_channels):
            of_tap = w[:, channel, :, tap_y, tap_x][None, :, :, None, None]
            met(sums, tap_y, tap_x).addcmul_(x[:, :, channel, None], of_tap)
        sums = sums[..., pad_y : pad_y + y_shape[2], pad_x : pad_x + y_shape[3]]
        return sums.reshape(y_shape)
    y = F.pad(first, (pad_x, pad_x, pad_y, pad_y)).view(padded)
    sums = first.new_zeros((batch, groups, case.in_channels, height, width))
    for tap_y, tap_x, channel in in_order(taps_y, taps_x, case.out_channels):
        of_tap = w[:, :, channel, tap_y, tap_x][None, :, :, None, None]
        sums.addcmul_(met(y, tap_y, tap_x)[:, :, channel, None], of_tap)
    return sums.view(x_shape)


def simulate(
    direction: Direction, case: Case, first: Tensor, second: Tensor, math: Math
) -> tuple[Tensor, ...]:
    """TF32, or a float32 dot product in both orders: what the map may err twice as much as."""
    if math == "tf32":
        rounded = (rounded_to_tf32(values).cpu() for values in (first, second))
        return (multiply(direction, case, *rounded).to(first.device),)
    return tuple(
        running_sum(direction, case, first, second, backwards=backwards)
        for backwards in (False, True)
    )


@dataclass(frozen=True)
class Ratios:
    """How many times the simulation's error a result has; at most `LIMIT` is right.

    Where the simulation errs by less than half of a floor, times that.
    """

    norm: float
    element: float

    @property
    def right(self) -> bool:
        """Whether the result is within the bounds."""
        return max(self.norm, self.element) <= LIMIT

    def __str__(self) -> str:
        return f"{self.norm:.3g} in the norm, {self.element:.3g} in the worst element"


@dataclass(frozen=True)
class Wanted:
    """What a map's result is held to.

    Attributes:
        exact: float64.
        magnitudes: `sum |x||w|` of each element, float64.
        simulated: float32; the worst of them counts.
    """

    exact: Tensor
    magnitudes: Tensor
    simulated: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, direction: Direction, case: Case, first: Tensor, second: Tensor, math: Math
    ) -> Wanted:
        wide = (first.double(), second.double())
        return cls(
            multiply(direction, case, *wide),
            multiply(direction, case, wide[0].abs(), wide[1].abs()),
            simulate(direction, case, first, second, math),
        )

    def ratios(self, got: Tensor, by: tuple[int, ...] = (), among: Tensor | None = None) -> Ratios:
        """The result's, over all elements or `among` some, and in the slices along `by`.

        What is over float32's range must be what the simulation has there.
        """
        over = ~torch.stack([t.isfinite() for t in self.simulated]).all(0)
        asked = torch.ones_like(over) if among is None else among
        if not torch.equal(got[over & asked], self.simulated[0][over & asked]):
            return Ratios(math.inf, math.inf)
        compared = asked & ~over

        def errors(values: Tensor) -> Tensor:
            error = (values.double() - self.exact).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            return torch.where(compared, error, 0)

        ours, simulated = errors(got), [errors(values) for values in self.simulated]
        exact = torch.where(compared, self.exact, 0)

        def norms(error: Tensor, dimensions: list[int] | None) -> Tensor:
            return _share(_norm(error, dimensions), _norm(exact, dimensions))

        norm = 0.0
        for dimensions in (None, *([d for d in range(4) if d != kept] for kept in by)):
            theirs = torch.stack([norms(error, dimensions) for error in simulated]).amax(0)
            norm = max(norm, _times(norms(ours, dimensions), theirs, NORM_FLOOR))
        element = 0.0
        tiny = self.magnitudes < TINY
        for some in (compared & ~tiny, compared & tiny):
            if some.any():
                of_some = self.magnitudes[some]
                most, *theirs = (_share(e[some], of_some).max() for e in (ours, *simulated))
                element = max(element, _times(most, max(theirs), ELEMENT_FLOOR))
        return Ratios(norm, element)


def _norm(values: Tensor, dimensions: list[int] | None) -> Tensor:
    return torch.linalg.vector_norm(values, dim=dimensions)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """0 of nothing is 0: where no product is but zeros, the result is that exactly."""
    return torch.where(part == 0, 0, part / whole)


def _times(ours: Tensor, simulated: Tensor, floor: float) -> float:
    return float((ours / simulated.clamp_min(floor / LIMIT)).max())


@functools.lru_cache(maxsize=64)
def wanted(
    direction: Direction, case: Case, name: str, seed: int, math: Math, device: str = "cpu"
) -> Wanted:
    """What the result on `operands` is held to, on a device."""
    first, second = (t.to(device) for t in operands(direction, case, name, seed))
    return Wanted.of(direction, case, first, second, math)


class Worst:
    """The worst ratios, for each kernel and mode, and for each family of operands and mode."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, Math], dict[str, Ratios]] = {}

    def note(self, kernel: str, math: Math, name: str, ratios: Ratios) -> None:
        of_kernel = self._found.setdefault((kernel, math), {})
        before = of_kernel.get(name, Ratios(0, 0))
        of_kernel[name] = Ratios(max(before.norm, ratios.norm), max(before.element, ratios.element))

    def __str__(self) -> str:
        """Two tables in Markdown."""
        lines = [
            "| kernel | math | norm | operands | element | operands |",
            "|---|---|---|---|---|---|",
        ]
        for (kernel, math_), of_kernel in sorted(self._found.items()):
            cells = []
            for measure in ("norm", "element"):
                name = max(of_kernel, key=lambda name: getattr(of_kernel[name], measure))
                cells += [f"{getattr(of_kernel[name], measure):.3g}", name]
            lines.append(f"| {' | '.join([f'`{kernel}`', math_, *cells])} |")
        modes = sorted({math_ for _, math_ in self._found})
        lines += ["", f"| operands | {' | '.join(f'{m}: norm | element' for m in modes)} |"]
        lines.append("|---" * (1 + 2 * len(modes)) + "|")
        for name in SCALES:
            cells = []
            for mode in modes:
                found = [f[name] for (_, m), f in self._found.items() if m == mode and name in f]
                cells.append(f"{max((r.norm for r in found), default=0):.3g}")
                cells.append(f"{max((r.element for r in found), default=0):.3g}")
            lines.append(f"| {' | '.join([name, *cells])} |")
        return "\n".join(lines)


def _with_a_nan(sample: Tensor) -> Tensor:
    changed = sample.clone()
    changed[0, 0, 0] = math.nan
    return changed


SAMPLES: dict[str, Callable[[Tensor], Tensor]] = {
    "other values": lambda sample: sample.flip(0, 1, 2),
    "small": lambda sample: sample * 1e-8,
    "large": lambda sample: sample * 1e8,
    "zeros": torch.zeros_like,
    "infinite": lambda sample: torch.full_like(sample, math.inf),
    "not a number": lambda sample: torch.full_like(sample, math.nan),
    "one NaN": _with_a_nan,
}
"""What a sample [channels, height, width] may be replaced with."""

NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Spot:
    """Where an image holds another value: one pixel of a channel, or a line or plane of them.

    Sample, channel, row and column are taken modulo the image's sizes.
    """

    where: Literal["pixel", "row", "column", "channel"] = "pixel"
    sample: int = 0
    channel: int = 0
    row: int = 0
    column: int = 0
    value: float = NAN

    def of(self, shape: tuple[int, ...]) -> tuple[int | slice, ...]:
        """Its place in an image of that shape."""
        indices = (self.sample, self.channel, self.row, self.column)
        free = {"pixel": (), "row": (3,), "column": (2,), "channel": (2, 3)}[self.where]
        return tuple(
            slice(None) if dimension in free else index % size
            for dimension, (index, size) in enumerate(zip(indices, shape, strict=True))
        )


SPOTS = st.lists(
    st.builds(
        Spot,
        where=st.sampled_from(("pixel", "row", "column", "channel")),
        sample=st.integers(0, 3),
        channel=st.integers(0, 4095),
        row=st.integers(0, 255),
        column=st.integers(0, 255),
        value=st.sampled_from((NAN, INF, -INF, 2.0**17, -1e30)),
    ),
    min_size=1,
    max_size=3,
)
NAMES = st.sampled_from(list(SCALES))
SEEDS = st.integers(0, 2**32 - 1)
OTHERS = st.lists(st.sampled_from(list(SAMPLES)), min_size=1, max_size=3)


def few(examples: int) -> settings:
    """So many random examples. They are not made smaller: no seed is simpler than another."""
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    return settings(max_examples=examples, deadline=None, print_blob=True, phases=phases)


def assert_sample_alone(
    run: Callable[[Tensor, Tensor], Tensor], given: Operands, kept: int, others: list[str]
) -> None:
    """The bits of one sample stay when the others are replaced.

    Args:
        run: computes a map.
        given: its operands, images first.
        kept: the sample, modulo their number.
        others: which of `SAMPLES` the others become, by turns.
    """
    images, second = given
    kept %= len(images)
    replaced = images.clone()
    for index in range(len(images)):
        if index != kept:
            replaced[index] = SAMPLES[others[index % len(others)]](images[index])
    before, after = run(images, second)[kept], run(replaced, second)[kept]
    changed = int((before.view(torch.int32) != after.view(torch.int32)).sum())
    most = float((before - after).abs().max() / before.abs().max())
    assert not changed, (
        f"{changed} of {before.numel()} values of sample {kept} changed, by {most:.1e} of the "
        "largest"
    )


def assert_read_by_readers_alone(
    run: Callable[[Tensor, Tensor], Tensor],
    direction: Direction,
    case: Case,
    math: Math,
    given: Operands,
    spots: list[Spot],
    of_second: bool = False,
) -> None:
    """Spots reach the elements that read them, as in PyTorch, and no others.

    Args:
        run: computes the map.
        direction, case, math: what it computes.
        given: its operands.
        spots: where the first operand, an image, is changed.
        of_second: the second is, in place of the first.
    """
    changed, clean = ([operand.clone() for operand in given] for _ in range(2))
    marked = [torch.zeros_like(operand, dtype=torch.bool) for operand in given]
    for spot in spots:
        place = spot.of(given[of_second].shape)
        changed[of_second][place] = spot.value
        clean[of_second][place] = 0
        marked[of_second][place] = True
    reading = readers(direction, case, *marked)
    marked[of_second] &= ~changed[of_second].isfinite()
    broken = readers(direction, case, *marked)
    got = run(*changed)
    assert torch.equal(broken, ~got.isfinite()), (
        f"{int((~got.isfinite()).sum())} elements are not finite, {int(broken.sum())} read what is "
        f"not, {int((broken & got.isfinite()).sum())} of these are finite"
    )
    # Infinities and NaNs are those of the sum; what is finite is as exact as ever.
    expected = not_finite(direction, case, *changed)
    same = (got == expected) | (got.isnan() & expected.isnan())
    assert same[broken].all(), "infinities and NaNs differ from the sum's"
    far = Wanted.of(direction, case, *clean, math).ratios(got, among=~reading)
    assert far.right, f"elements that read none of it err {far}"
    finite = [torch.where(operand.isfinite(), operand, 0) for operand in changed]
    near = Wanted.of(direction, case, *finite, math).ratios(got, among=reading & ~broken)
    assert near.right, f"elements that read large values err {near}"
