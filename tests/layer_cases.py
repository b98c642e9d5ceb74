"""Layers to try the kernels on, and the comparison of our kernels with the float64 reference.

Shared by the emulator's tests and the device's. The reference and the bounds are
`tconv.reference`'s, which `tconv verify` uses as well.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from tconv import reference as package_reference
from tconv import run
from tconv.layers import Layer
from tconv.problem import Geometry, Pair
from tconv.reference import LAYOUTS, Operands, expected, poisoned_memory, round_to_tf32

__all__ = [
    "CORNERS",
    "LAYOUTS",
    "Case",
    "Operands",
    "assert_maps_right",
    "assert_output_right",
    "by_taps",
    "operands",
    "random_cases",
    "reference",
    "round_to_tf32",
    "three_maps",
]


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer and its input; sizes in elements, channels of one group."""

    batch: int = 1
    in_channels: int = 1  # of a group
    out_channels: int = 1  # of a group
    groups: int = 1
    size: Pair = (5, 6)
    kernel: Pair = (3, 3)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    output_padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    bias: bool = True

    @property
    def layer(self) -> Layer:
        return Layer(
            in_channels=self.in_channels * self.groups,
            out_channels=self.out_channels * self.groups,
            kernel_size=self.kernel,
            stride=self.stride,
            padding=self.padding,
            output_padding=self.output_padding,
            groups=self.groups,
            bias=self.bias,
            dilation=self.dilation,
            batch=self.batch,
            height=self.size[0],
            width=self.size[1],
        )

    @property
    def output_size(self) -> Pair:
        return self.layer.output_size

    @property
    def geometry(self) -> Geometry:
        return self.layer.geometry

    def __str__(self) -> str:
        changed = (
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return ",".join(changed).replace(" ", "") or "default"


CORNERS = (
    Case(size=(1, 1), kernel=(1, 1)),
    Case(size=(1, 1), kernel=(4, 4), stride=(2, 2), padding=(1, 1)),
    Case(batch=3, in_channels=5, out_channels=7, size=(1, 9), kernel=(1, 4), stride=(1, 2)),
    # Stride beyond the kernel: most phases have no tap and hold the bias alone.
    Case(2, 3, 2, 1, (3, 4), (2, 2), stride=(5, 4), output_padding=(4, 3)),
    # gcd(stride, dilation) > 1: every other phase is empty.
    Case(2, 8, 16, 4, (5, 7), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1)),
    Case(1, 4, 6, 1, (4, 5), (3, 3), (4, 6), (1, 1), (2, 5), (6, 4)),
    Case(1, 32, 64, 1, (4, 5), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
    # Depthwise, and more channels than one tile holds.
    Case(2, 1, 1, 9, (6, 7), (4, 4), (2, 2), (1, 1)),
    Case(1, 70, 67, 1, (3, 5), (2, 3), (2, 1)),
    # Output padding and padding at their limits; padding larger than the kernel's reach.
    Case(1, 3, 4, 1, (6, 6), (3, 3), (3, 3), (1, 1), (2, 2)),
    Case(1, 3, 4, 1, (9, 8), (2, 2), (1, 1), (3, 2)),
    # One output pixel; a kernel larger than the image; a wide stride and kernel.
    Case(1, 4, 3, 1, (3, 3), (3, 3), (1, 1), (2, 2)),
    Case(1, 2, 3, 1, (2, 2), (9, 11), (1, 1), (4, 5)),
    Case(1, 21, 5, 1, (3, 4), (16, 16), (8, 8), (4, 4)),
    Case(1, 9, 1, 1, (7, 5), (9, 9), (3, 3), (4, 4), (2, 2)),
    # Strides longer than the output: few phases have one, here from the last on to phase 0.
    Case(2, 3, 4, 1, (2, 2), (2, 3), (6, 7), (4, 5), (3, 5)),
    Case(1, 3, 4, 1, (1, 1), (3, 2), (100_000, 99_999), (1, 0), (4, 0)),
)


def random_cases(count: int, seed: int, channels: int = 12, size: int = 9) -> list[Case]:
    """Layers over all combinations that PyTorch accepts, every gcd of stride and dilation."""
    return [
        Case(
            batch=layer.batch,
            in_channels=layer.in_channels // layer.groups,
            out_channels=layer.out_channels // layer.groups,
            groups=layer.groups,
            size=layer.size,
            kernel=layer.kernel_size,
            stride=layer.stride,
            padding=layer.padding,
            output_padding=layer.output_padding,
            dilation=layer.dilation,
            bias=layer.bias,
        )
        for layer in package_reference.random_layers(count, seed, channels, size)
    ]


def operands(case: Case, dtype: torch.dtype, layout: str, device: str, seed: int = 0) -> Operands:
    """Random tensors; "strided" ones are neither contiguous nor channels_last."""
    return package_reference.operands(case.layer, dtype, layout, device, seed)


def off_by(values: Tensor, order: str, offset: int, gap: int) -> Tensor:
    """The values in memory in `order` of n, c, h, w, with poison around and in gaps.

    They start `offset` elements behind 16 bytes. Rows, or pixels where channels are adjacent, are
    `gap` elements apart.
    """
    axes = ["nchw".index(axis) for axis in order]
    sizes = [values.shape[axis] for axis in axes]
    room = torch.full((math.prod(sizes[:3]) * (sizes[3] + gap) + 32,), math.nan, dtype=values.dtype)
    first = -room.data_ptr() % 16 // 2 + offset
    view = room[first:][: math.prod(sizes[:3]) * (sizes[3] + gap)]
    view = view.view(*sizes[:3], sizes[3] + gap)[..., : sizes[3]]
    return view.permute([axes.index(axis) for axis in range(4)]).copy_(values)


def three_maps(case: Case, tensors: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """forward, input_gradient and weight_gradient, by our kernels, their memory poisoned first."""
    t = tensors
    with poisoned_memory():
        return (
            run.forward(t.x, t.w, t.bias, case.geometry),
            run.input_gradient(t.grad_output, t.w, case.size, case.geometry),
            run.weight_gradient(t.x, t.grad_output, case.kernel, case.geometry, False),
        )


def assert_output_right(case: Case, tensors: Operands, *, tf32: bool = False) -> None:
    """`assert_maps_right` of the first map alone: what a tile of a forward kernel decides."""
    t = tensors
    with poisoned_memory():
        out = run.forward(t.x, t.w, t.bias, case.geometry)
    (want,) = expected(case.layer, t, tf32=tf32, output_alone=True)
    wrong = want.why_wrong(out)
    assert wrong is None, f"{case}: {wrong}"


def reference(case: Case, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> list[Tensor]:
    """The three maps in float64, by PyTorch, on the operands' device."""
    return package_reference.maps(case.layer, x, w, bias, y)[:3]


def by_taps(case: Case, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> list[Tensor]:
    """The three maps in float64, of exactly their products.

    NOTE: PyTorch's gradient of the weight multiplies zeros beside the output.
    """
    g = case.groups
    x, w, y = x.double(), w.double(), y.double()
    xs = x.unflatten(1, (g, -1))  # [N, G, Cin, H, W]
    ws = w.unflatten(0, (g, -1))  # [G, Cin, Cout, kH, kW]
    ys = y.unflatten(1, (g, -1))
    out, grad_x, grad_w = torch.zeros_like(ys), torch.zeros_like(xs), torch.zeros_like(ws)
    for ty in range(case.kernel[0]):
        for tx in range(case.kernel[1]):
            at_in, at_out = [], []
            for axis, tap in enumerate((ty, tx)):
                stride, size = case.stride[axis], case.size[axis]
                first = tap * case.dilation[axis] - case.padding[axis]
                reached = [i for i in range(size) if 0 <= first + i * stride < ys.shape[3 + axis]]
                at_in.append(torch.tensor(reached, dtype=torch.long))
                at_out.append(first + at_in[-1] * stride)
            inputs = (..., at_in[0][:, None], at_in[1])
            outputs = (..., at_out[0][:, None], at_out[1])
            tap = ws[..., ty, tx]
            out[outputs] += torch.einsum("ngihw,gio->ngohw", xs[inputs], tap)
            grad_x[inputs] += torch.einsum("ngohw,gio->ngihw", ys[outputs], tap)
            grad_w[..., ty, tx] = torch.einsum("ngihw,ngohw->gio", xs[inputs], ys[outputs])
    out = out.flatten(1, 2)
    if bias is not None:
        out += bias.double()[:, None, None]
    return [out, grad_x.flatten(1, 2), grad_w.flatten(0, 1)]


def assert_maps_right(case: Case, tensors: Operands, *, tf32: bool = False) -> None:
    """Compares the three maps with float64: the error's norm, and every element.

    With `tf32` the reference takes operands rounded to TF32 wherever the contract rounds them,
    so that the bounds stay near those of float32.
    """
    results = three_maps(case, tensors)
    for got, want in zip(results, expected(case.layer, tensors, tf32=tf32), strict=False):
        wrong = want.why_wrong(got)
        assert wrong is None, f"{want.name}: {case}: {wrong}"
