"""`Problem`: the geometry of one layer call. No torch, no GPU.

Along one axis, with kernel size k, stride s, padding p, output padding op, dilation d and input
size I, a transposed convolution is

    O = (I - 1)*s - 2*p + d*(k - 1) + op + 1
    out[o] = sum of x[i] * w[t] over the taps t and inputs i with  i*s - p + t*d == o

Sort the outputs into s phases, `phase = (o + p) % s`, and write `q = (o + p) // s`. A phase uses
the taps with `t*d % s == phase`, each at the shift `(t*d - phase) / s`, and reads `x[q - shift]`.
Over all phases every tap occurs exactly once; where gcd(s, d) > 1 some phases have none.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from typing import Literal, get_args

Direction = Literal["forward", "input_gradient", "weight_gradient"]
DType = Literal["float32", "float64", "float16", "bfloat16"]
Layout = Literal["contiguous", "channels_last"]
Math = Literal["ieee", "tf32"]
Pair = tuple[int, int]
Sizes = tuple[int, ...]
Geometry = tuple[Pair, Pair, Pair, Pair, int]
"""Stride, padding, output padding and dilation, each a (height, width), and groups."""

_ALLOWED = (
    ("direction", get_args(Direction)),
    ("dtype", get_args(DType)),
    ("math", get_args(Math)),
    ("x_layout", get_args(Layout)),
    ("y_layout", get_args(Layout)),
)
"""The values of these fields of a `Problem`."""

_LEAST = (
    ("size", 1),
    ("kernel", 1),
    ("stride", 1),
    ("padding", 0),
    ("output_padding", 0),
    ("dilation", 1),
)
"""The least values of the fields of an `Axis`."""

ITEM_BYTES: dict[str, int] = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}

WIDE_OFFSET = 2**31 - 1
"""Offsets and counts up to this fit a 32-bit index."""

VECTOR = 4
"""float32 values of 16 bytes: kernels that copy or store so many at once need aligned rows."""

TF32_LEAST_CHANNELS = 16
"""From so many channels of a group to sum over on, TF32 is taken.

`weight_gradient` sums over positions: there one side has as many, or tensor cores would be idle.
"""

TF32_LEAST_PRODUCTS = 96
"""With fewer channels, forward takes TF32 if an output sums so many products.

Twice those of KernelBench #75 (8 channels, 6 taps), whose check TF32 fails: cuDNN takes float32.
cuDNN was seen to take TF32 for 8 channels with 120 and 128 products.
"""

TF32_LEAST_GRADIENT_PRODUCTS = 48
"""The same of `input_gradient`, where channels are made enough, whatever the channels summed over.

cuDNN was seen to take TF32 for 3 channels with 48 products. No check asks for more of a gradient.
"""

TF32_FEWEST_CHANNELS = 4
"""Of forward: with fewer, tensor cores, which multiply 8, would be no faster than multiply-adds."""


def float32_math(
    direction: Direction,
    in_channels: int,
    out_channels: int,
    phase_taps: int,
    kernel_taps: int,
    *,
    tf32_allowed: bool,
) -> Math:
    """The math of a float32 call: TF32 if it is allowed and there is enough arithmetic.

    Args:
        direction: which of the three maps.
        in_channels, out_channels: channels of one group.
        phase_taps: the most taps of a phase, of both axes together.
        kernel_taps: all taps.
        tf32_allowed: whether PyTorch's flags allow TF32.
    """
    reduced = {
        "forward": in_channels,
        "input_gradient": out_channels,
        "weight_gradient": max(in_channels, out_channels),
    }[direction]
    enough = reduced >= TF32_LEAST_CHANNELS
    if direction == "forward":
        products = reduced * phase_taps
        enough |= reduced >= TF32_FEWEST_CHANNELS and products >= TF32_LEAST_PRODUCTS
    elif direction == "input_gradient" and in_channels >= TF32_LEAST_CHANNELS:
        enough |= reduced * kernel_taps >= TF32_LEAST_GRADIENT_PRODUCTS
    return "tf32" if tf32_allowed and enough else "ieee"


@dataclass(frozen=True)
class Tap:
    """One kernel element of a phase: output `q` reads input `q - shift` through weight `index`."""

    index: int
    shift: int


@dataclass(frozen=True)
class Phase:
    """The outputs with `(o + padding) % stride == index`, and the taps that reach them."""

    index: int
    taps: tuple[Tap, ...]


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a transposed convolution. Sizes are in elements.

    Raises:
        ValueError: a parameter out of range, or no output.
    """

    size: int
    kernel: int
    stride: int = 1
    padding: int = 0
    output_padding: int = 0
    dilation: int = 1

    def __post_init__(self) -> None:
        """Refuses what has no meaning; PyTorch's own messages are given further up."""
        for name, bound in _LEAST:
            value = getattr(self, name)
            if value < bound:
                raise ValueError(f"an axis needs {name} >= {bound}, got {name}={value}")
        if self.output_size < 1:
            raise ValueError(f"an axis needs at least one output, got {self.output_size}: {self}")

    @cached_property
    def output_size(self) -> int:
        """The number of outputs, O."""
        reach = self.dilation * (self.kernel - 1) + 1
        return (self.size - 1) * self.stride - 2 * self.padding + reach + self.output_padding

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The `stride` phases, in order, those without taps included."""
        taps: list[list[Tap]] = [[] for _ in range(self.stride)]
        for index in range(self.kernel):
            shift, phase = divmod(index * self.dilation, self.stride)
            taps[phase].append(Tap(index, shift))
        return tuple(Phase(index, tuple(of_phase)) for index, of_phase in enumerate(taps))

    @cached_property
    def shifts(self) -> Sizes:
        """The distinct shifts over all phases, ascending."""
        return tuple(sorted({tap * self.dilation // self.stride for tap in range(self.kernel)}))

    @cached_property
    def phases_share_shifts(self) -> bool:
        """Whether all phases have the same shifts."""
        return len({tuple(tap.shift for tap in phase.taps) for phase in self.phases}) == 1

    @property
    def phase_taps(self) -> int:
        """The most taps of a phase."""
        return -(-self.kernel // (self.stride // gcd(self.stride, self.dilation)))

    @property
    def used_phases(self) -> int:
        """How many phases have outputs: all, unless there are fewer outputs than phases."""
        return min(self.stride, self.output_size)

    @property
    def first_phase(self) -> int:
        """The first phase with outputs. The others follow it; phase 0 comes after the last."""
        return 0 if self.used_phases == self.stride else self.padding % self.stride

    @cached_property
    def q_range(self) -> range:
        """The values of `q = (o + padding) // stride` over all outputs o."""
        first = self.padding // self.stride
        last = (self.output_size - 1 + self.padding) // self.stride
        return range(first, last + 1)

    @cached_property
    def products(self) -> int:
        """The (input, tap) pairs whose output is kept: the products that one row needs."""
        count = 0
        for tap in range(self.kernel):
            # Inputs i with 0 <= i*stride - padding + tap*dilation < output_size.
            start = self.padding - tap * self.dilation
            first = max(0, -(-start // self.stride))
            last = min(self.size - 1, (start + self.output_size - 1) // self.stride)
            count += max(0, last - first + 1)
        return count


@dataclass(frozen=True)
class Problem:
    """One call of `forward`, `input_gradient` or `weight_gradient`; immutable and hashable.

    `x` is the layer's input (N, Cin, H, W), `w` its weight (Cin, Cout/groups, kH, kW), `y` its
    output (N, Cout, OH, OW), whichever of them the direction computes.

    Attributes:
        direction: which of the three bilinear maps.
        batch, in_channels, out_channels, groups: N, Cin, Cout and the groups.
        height, width: the two axes, with the input's sizes.
        dtype: of all tensors.
        math: "tf32" rounds float32 operands to TF32, to nearest; "ieee" does not.
        bias: whether `forward` adds a bias.
        x_layout, y_layout: which axis of x and y is innermost in memory (columns or channels);
            a kernel may read any strides, the layout says which order is coalesced.
        wide_offsets: some tensor's element offset or stride does not fit 32 bits.
        source_aligned: tensor maps can describe the images that are read, x by `forward`, y by
            `input_gradient`: columns are adjacent (channels, if they are channels_last), and all
            else starts on multiples of 16 bytes. Of `weight_gradient` those of x and y that are
            channels_last with groups of whole vectors of 16 bytes, and those that are contiguous
            with rows of whole vectors of 16 bytes, but of float64; as others are packed anyway.
        source_dense: contiguous ones among the images that are read, if not float64, have no gaps
            and start on 16 bytes, so that flat maps (`tconv.kernels.flat`) may describe them.
        weight_mapped: tensor maps can describe the weight of a 16-bit `forward` or
            `input_gradient`: output channels are adjacent, all else starts on multiples of 16
            bytes.
        like: a problem of the same layer that `serves` this one. A kernel's constants are then
            those of that problem, and this one's sizes are arguments alone.
    """

    direction: Direction
    batch: int
    in_channels: int
    out_channels: int
    groups: int
    height: Axis
    width: Axis
    dtype: DType = "float32"
    math: Math = "ieee"
    bias: bool = False
    x_layout: Layout = "contiguous"
    y_layout: Layout = "contiguous"
    wide_offsets: bool = False
    source_aligned: bool = False
    source_dense: bool = False
    weight_mapped: bool = False
    like: Problem | None = None

    def __post_init__(self) -> None:
        """Refuses what has no meaning; PyTorch's own messages are given further up."""
        for name in ("batch", "in_channels", "out_channels", "groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"a problem needs {name} >= 1, got {name}={getattr(self, name)}")
        for name in ("in_channels", "out_channels"):
            if getattr(self, name) % self.groups:
                raise ValueError(
                    f"a problem needs {name} divisible by groups, got "
                    f"{name}={getattr(self, name)}, groups={self.groups}"
                )
        for name, allowed in _ALLOWED:
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.math == "tf32" and self.dtype != "float32":
            raise ValueError(f"math='tf32' is for dtype='float32', got dtype={self.dtype!r}")
        if self.like is not None and not self.like.serves(self):
            raise ValueError(f"no kernel for {self.like} can serve {self}")

    def __hash__(self) -> int:
        """Remembered, but for `like`: a plan looks its problem up for each tile."""
        return self._hash if self.like is None else hash((self._hash, self.like))

    @cached_property
    def _hash(self) -> int:
        names = (name for name in self.__dataclass_fields__ if name != "like")
        return hash(tuple([getattr(self, name) for name in names]))

    def __getstate__(self) -> dict[str, object]:
        # Another process has other hashes of strings.
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @classmethod
    def of(
        cls,
        direction: Direction,
        x_shape: Sizes,
        w_shape: Sizes,
        geometry: Geometry,
        *,
        dtype: DType = "float32",
        tf32: bool = True,
        bias: bool = False,
        strides: tuple[Sizes, Sizes, Sizes] | None = None,
        aligned: bool = True,
        weight_aligned: bool = True,
    ) -> Problem:
        """The problem of a call on tensors.

        Args:
            direction: which of the three maps.
            x_shape, w_shape: of x and w.
            geometry: of the layer.
            dtype: of all tensors.
            tf32: whether PyTorch's flags allow it.
            bias: whether the layer has one, which `forward` alone adds.
            strides: of x, w and y, in elements; None where all are dense and contiguous.
            aligned: whether the images that are read start on a multiple of 16 bytes.
            weight_aligned: whether the weight does.
        """
        groups = geometry[4]
        height, width = axes(x_shape[2:], w_shape[2:], geometry)
        shapes = (x_shape, w_shape, output_shape(x_shape, w_shape, geometry))
        if strides is None:
            strides = (dense_strides(x_shape), dense_strides(w_shape), dense_strides(shapes[2]))
        in_channels, out_channels = x_shape[1], w_shape[1] * groups
        allowed = tf32 and dtype == "float32"
        channels = (in_channels // groups, w_shape[1])
        taps = height.phase_taps * width.phase_taps, height.kernel * width.kernel
        math = float32_math(direction, *channels, *taps, tf32_allowed=allowed)
        read: tuple[Sizes, ...] = strides[:1] if direction == "forward" else strides[2:]
        if direction == "weight_gradient":
            read = tuple(
                of_image
                for of_image, count in zip(strides[::2], channels, strict=True)
                if _layout(of_image) == "channels_last" and count * ITEM_BYTES[dtype] % 16 == 0
            )
            for of_image, shape in zip(strides[::2], shapes[::2], strict=True):
                whole = _layout(of_image) == "contiguous" and _on_lines(dtype, shape[3])
                read += (of_image,) if whole else ()
        unread = {"forward": 2, "input_gradient": 0}.get(direction)
        images = [i for i in (0, 2) if i != unread and _layout(strides[i]) == "contiguous"]
        dense = all(strides[i] == dense_strides(shapes[i]) for i in images)
        vectors = aligned and all(_on_vectors(of_read, ITEM_BYTES[dtype]) for of_read in read)
        mapped = weight_aligned and ITEM_BYTES[dtype] == 2 and direction != "weight_gradient"
        mapped = mapped and _layout(strides[1]) == "channels_last" and _on_vectors(strides[1], 2)
        return cls(
            direction=direction,
            batch=x_shape[0],
            in_channels=in_channels,
            out_channels=out_channels,
            groups=groups,
            height=height,
            width=width,
            dtype=dtype,
            math=math,
            bias=bias and direction == "forward",
            x_layout=_layout(strides[0]),
            y_layout=_layout(strides[2]),
            wide_offsets=any(map(_is_wide, shapes, strides)),
            source_aligned=vectors,
            source_dense=aligned and ITEM_BYTES[dtype] <= 4 and bool(images) and dense,
            weight_mapped=mapped,
        )

    @property
    def pattern(self) -> Problem:
        """The problem that a kernel's constants are for: `like`, or this one."""
        return self.like or self

    @property
    def rows_aligned(self) -> bool:
        """Whether the rows of a contiguous x start on multiples of 16 bytes."""
        contiguous = self.direction == "forward" and self.x_layout == "contiguous"
        return contiguous and self.source_aligned

    @property
    def x_mapped(self) -> bool:
        """Whether tensor maps can describe a contiguous x of a `weight_gradient`, but float64."""
        contiguous = self.direction == "weight_gradient" and self.x_layout == "contiguous"
        return contiguous and self.source_aligned and _on_lines(self.dtype, self.width.size)

    @property
    def y_mapped(self) -> bool:
        """The same of a contiguous y."""
        contiguous = self.direction == "weight_gradient" and self.y_layout == "contiguous"
        return contiguous and self.source_aligned and _on_lines(self.dtype, self.width.output_size)

    @cached_property
    def layer(self) -> tuple[object, ...]:
        """All but the batch, the image's sizes and the alignment of x."""
        axes = (
            (axis.kernel, axis.stride, axis.padding, axis.output_padding, axis.dilation)
            for axis in (self.height, self.width)
        )
        channels = (self.in_channels, self.out_channels, self.groups)
        kind = (self.direction, self.dtype, self.math, self.bias, self.x_layout, self.y_layout)
        return (*kind, *channels, *axes, self.wide_offsets, self.weight_mapped)

    def serves(self, other: Problem) -> bool:
        """Whether kernels with the constants of this problem may serve another.

        That takes the same layer, and rows of the other that are aligned where this one's are. A
        kernel may have limits of its own.
        """
        ours, theirs = (problem.width for problem in (self, other))
        return (
            self.layer == other.layer
            and not self.wide_offsets
            and (not self.source_aligned or other.source_aligned)
            and (not self.x_mapped or other.x_mapped)
            and (not self.y_mapped or other.y_mapped)
            and (not self.rows_aligned or theirs.size % gcd(ours.size, VECTOR) == 0)
            and theirs.output_size % gcd(ours.output_size, VECTOR) == 0
            and self.height.used_phases == other.height.used_phases
            and ours.used_phases == theirs.used_phases
        )

    def by(self, like: Problem) -> Problem | None:
        """This problem by kernels with the constants of another; None if they cannot serve."""
        if not like.serves(self):
            return None
        # NOTE: not `replace`, which would check all again: each new size comes here for each kernel
        # of its layer. What is remembered of this one does not depend on `like`.
        served = object.__new__(Problem)
        vars(served).update(vars(self), like=like, bytes=self.bytes, _hash=self._hash)
        return served

    def resized(self, batch: int, height: int, width: int) -> Problem:
        """The same layer on dense tensors of another size, as PyTorch allocates them.

        Raises:
            ValueError: there is no output.
        """
        axis = dataclasses.replace(self.width, size=width)
        x = width if self.x_layout == "contiguous" else self.in_channels
        y = axis.output_size if self.y_layout == "contiguous" else self.out_channels
        read = {"forward": (x,), "input_gradient": (y,)}.get(self.direction, ())
        layouts = {"forward": (self.x_layout,), "input_gradient": (self.y_layout,)}
        of_read = layouts.get(self.direction, (self.x_layout, self.y_layout))
        return dataclasses.replace(
            self,
            batch=batch,
            height=dataclasses.replace(self.height, size=height),
            width=axis,
            source_aligned=all(count * ITEM_BYTES[self.dtype] % 16 == 0 for count in read),
            source_dense=ITEM_BYTES[self.dtype] <= 4 and "contiguous" in of_read,
        )

    @property
    def in_channels_per_group(self) -> int:
        """Cin / groups."""
        return self.in_channels // self.groups

    @property
    def out_channels_per_group(self) -> int:
        """Cout / groups."""
        return self.out_channels // self.groups

    @property
    def taps(self) -> int:
        """kH * kW."""
        return self.height.kernel * self.width.kernel

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        """(N, Cin, H, W)."""
        return (self.batch, self.in_channels, self.height.size, self.width.size)

    @property
    def w_shape(self) -> tuple[int, int, int, int]:
        """(Cin, Cout/groups, kH, kW)."""
        kernel = (self.height.kernel, self.width.kernel)
        return (self.in_channels, self.out_channels_per_group, *kernel)

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        """(N, Cout, OH, OW)."""
        return (self.batch, self.out_channels, self.height.output_size, self.width.output_size)

    @cached_property
    def flops(self) -> int:
        """Twice the products of a real input with a kept output; the same in all directions."""
        channels = self.in_channels * self.out_channels_per_group
        return 2 * self.batch * channels * self.height.products * self.width.products

    @cached_property
    def bytes(self) -> int:
        """The least bytes that must move: x, w, y (and the bias) once each."""
        elements = _count(self.x_shape) + _count(self.w_shape) + _count(self.y_shape)
        elements += self.out_channels if self.bias else 0
        return elements * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        """One line: direction, shapes, parameters, dtype."""
        y, x = self.height, self.width
        groups = f" groups={self.groups}" if self.groups > 1 else ""
        options = "".join(
            f" {name}={a}x{b}"
            for name, a, b, default in (
                ("stride", y.stride, x.stride, 1),
                ("padding", y.padding, x.padding, 0),
                ("output_padding", y.output_padding, x.output_padding, 0),
                ("dilation", y.dilation, x.dilation, 1),
            )
            if (a, b) != (default, default)
        )
        layouts = (
            ""
            if self.x_layout == self.y_layout == "contiguous"
            else f" x:{self.x_layout} y:{self.y_layout}"
        )
        return (
            f"{self.direction} {'x'.join(map(str, self.x_shape))} -> "
            f"{'x'.join(map(str, self.y_shape))} kernel={y.kernel}x{x.kernel}{options}{groups} "
            f"{self.dtype}/{self.math}{layouts}{' bias' if self.bias else ''}"
            f"{' wide' if self.wide_offsets else ''}{' aligned' if self.source_aligned else ''}"
            f"{' dense' if self.source_dense and not self.source_aligned else ''}"
            f"{' w:channels_last' if self.weight_mapped else ''}"
            + ("" if self.like is None else f", by a kernel for {self.like}")
        )


@lru_cache(maxsize=64)  # a new size asks twice for each direction; known calls do not ask
def axes(size: Sizes, kernel: Sizes, geometry: Geometry) -> tuple[Axis, Axis]:
    """Height and width of an input and a kernel, (height, width) each."""
    stride, padding, output_padding, dilation, _ = geometry
    height, width = (
        Axis(*map(int, axis))
        for axis in zip(size, kernel, stride, padding, output_padding, dilation, strict=True)
    )
    return height, width


def output_shape(x_shape: Sizes, w_shape: Sizes, geometry: Geometry) -> Sizes:
    """(N, Cout, OH, OW) of a layer."""
    height, width = axes(x_shape[2:], w_shape[2:], geometry)
    return x_shape[0], w_shape[1] * geometry[4], height.output_size, width.output_size


def dense_strides(shape: Sizes, channels_last: bool = False) -> Sizes:
    """What `torch.empty` gives a tensor of that shape, none of whose sizes is 0."""
    _, channels, height, width = shape
    if channels_last:
        return height * width * channels, 1, width * channels, channels
    return channels * height * width, height * width, width, 1


def _layout(strides: Sizes) -> Layout:
    """Which axis is innermost in memory: the order in which a kernel's reads are coalesced."""
    _, channel, _, column = strides
    return "channels_last" if channel == 1 and column > 1 else "contiguous"


def _on_lines(dtype: DType, columns: int) -> bool:
    """Whether rows are whole vectors of 16 bytes; never of float64."""
    return ITEM_BYTES[dtype] <= 4 and columns * ITEM_BYTES[dtype] % 16 == 0


def _on_vectors(strides: Sizes, item_bytes: int) -> bool:
    """Whether a tensor map can describe it, given its address on 16 bytes: adjacent columns or
    channels, all else on 16 bytes.
    """
    inner = 1 if _layout(strides) == "channels_last" else 3
    outer = [stride for axis, stride in enumerate(strides) if axis != inner]
    return strides[inner] == 1 and all(
        stride * item_bytes % 16 == 0 and stride > 0 for stride in outer
    )


def _is_wide(shape: Sizes, strides: Sizes) -> bool:
    """Whether the largest element offset in a tensor, or a stride, needs more than 32 bits.

    NOTE: kernels are given the stride of an axis of size 1 too.
    """
    reach = sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)])
    return max(reach, *strides) > WIDE_OFFSET


def _count(shape: Sizes) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
