"""Checks timed results: a random part against float64, and the whole against PyTorch's.

In float64, the whole result of a large layer would take longer than all timings together. So a
random part is computed: some images and some channels. Each of its elements has all its terms.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tconv.bench.contestants import Tensors
from tconv.layers import Layer
from tconv.problem import Direction
from tconv.reference import UNIT_ROUNDOFF, Expected, applied, round_to_tf32, with_height

MOST_FLOPS = {"cuda": 2e10, "cpu": 2e9}
"""Most operations of the part. Each is done in float64, at most three times."""

MOST_ELEMENTS = {"cuda": 2**28, "cpu": 2**24}
"""Most elements of the part's operands and result."""

# The largest relative error of a rival's result: of its norm, in float32 that of TF32's rounding.
_RIVAL = 2.0**-10

# How far the whole result may be from PyTorch's, in sums of both errors of the part.
_APART = 4.0


@dataclass(frozen=True)
class Part:
    """Which images and channels are compared; the channels are positions within a group.

    Attributes:
        layer: the layer reduced to the part.
        text: what was checked, for the row.
    """

    layer: Layer
    images: tuple[int, ...]
    groups: tuple[int, ...]
    in_channels: tuple[int, ...]
    out_channels: tuple[int, ...]
    text: str

    def x(self, tensor: Tensor) -> Tensor:
        """The part of [N, Cin, H, W]."""
        return self._of(tensor[list(self.images)], 1, self.in_channels)

    def y(self, tensor: Tensor) -> Tensor:
        """The part of [N, Cout, OH, OW]."""
        return self._of(tensor[list(self.images)], 1, self.out_channels)

    def w(self, tensor: Tensor) -> Tensor:
        """The part of [Cin, Cout/groups, kH, kW]."""
        return self._of(tensor, 0, self.in_channels)[:, list(self.out_channels)]

    def bias(self, tensor: Tensor) -> Tensor:
        """The part of [Cout]."""
        return self._of(tensor, 0, self.out_channels)

    def _of(self, tensor: Tensor, axis: int, channels: tuple[int, ...]) -> Tensor:
        """The channels along an axis that holds all groups' channels."""
        whole = tensor.shape[axis] // self._all_groups
        chosen = [group * whole + channel for group in self.groups for channel in channels]
        if chosen == list(range(tensor.shape[axis])):
            return tensor
        return tensor.index_select(axis, torch.tensor(chosen, device=tensor.device))

    _all_groups: int = 1


def choose_part(
    layer: Layer, direction: Direction, *, flops: float, elements: float, seed: int = 0
) -> Part:
    """A random part of the direction's result, small enough for float64 within these bounds.

    Images are halved first (the first and the last stay), then channels, then groups, until the
    part fits. The dimension that the direction sums over stays whole.
    """
    sizes = {
        "images": layer.batch,
        "groups": layer.groups,
        "in_channels": layer.in_channels // layer.groups,
        "out_channels": layer.out_channels // layer.groups,
    }
    order = {
        "forward": ("images", "out_channels", "groups"),
        "input_gradient": ("images", "in_channels", "groups"),
        "weight_gradient": ("in_channels", "out_channels", "groups"),
    }[direction]
    whole = dict(sizes)
    # In this order, down to these: two images, so that the last is among them; then anything.
    steps = [(name, 2 if name == "images" else 1) for name in order] + [(order[0], 1)]

    def left() -> Layer:
        return dataclasses.replace(
            layer,
            batch=sizes["images"],
            groups=sizes["groups"],
            in_channels=sizes["in_channels"] * sizes["groups"],
            out_channels=sizes["out_channels"] * sizes["groups"],
        )

    def fits() -> bool:
        problem = left().problem(direction)
        moved = problem.bytes / 4
        return problem.flops <= flops and moved <= elements

    if direction == "weight_gradient":
        # Both in turn, so that neither is gone while the other is whole.
        while not fits() and max(sizes["in_channels"], sizes["out_channels"]) > 1:
            larger = max(order[:2], key=lambda name: sizes[name])
            sizes[larger] = -(-sizes[larger] // 2)
    for name, least in steps:
        while not fits() and sizes[name] > least:
            sizes[name] = max(least, -(-sizes[name] // 2))

    generator = torch.Generator().manual_seed(seed)

    def some(name: str) -> tuple[int, ...]:
        if sizes[name] == whole[name]:
            return tuple(range(whole[name]))
        chosen = torch.randperm(whole[name] - 1, generator=generator)[: sizes[name] - 1].tolist()
        if name == "images" and sizes[name] > 1 and 0 not in chosen:
            chosen[0] = 0
        return (*sorted(chosen), whole[name] - 1)

    images, groups = some("images"), some("groups")
    in_channels, out_channels = some("in_channels"), some("out_channels")
    shown = {"images": "images", "groups": "groups", "in_channels": "input channels of a group"}
    shown["out_channels"] = "output channels of a group"
    said = [
        f"{sizes[name]} of {whole[name]} {shown[name]}"
        for name in sizes
        if sizes[name] != whole[name]
    ]
    return Part(
        layer=left(),
        images=images,
        groups=groups,
        in_channels=in_channels,
        out_channels=out_channels,
        text=", ".join(said) or "all",
        _all_groups=layer.groups,
    )


@dataclass(frozen=True)
class Verdict:
    """What a comparison found.

    Attributes:
        error: relative error of our part's norm, against float64.
        error_pytorch: PyTorch's own error; None if PyTorch was not run.
        apart: |ours - PyTorch's| / |PyTorch's| over the whole result; None if PyTorch was not run.
        checked: the part that the errors belong to.
        wrong: one sentence if ours breaks the numerics contract, else None.
    """

    error: float
    error_pytorch: float | None
    apart: float | None
    checked: str
    wrong: str | None


class Reference:
    """The right result of a part of a map, and the verdict on a computed one.

    Args:
        layer, direction, tensors: the map and its operands, whole.
        tf32: whether the contract rounds the operands to TF32 here.
    """

    def __init__(self, layer: Layer, direction: Direction, tensors: Tensors, tf32: bool) -> None:
        device = tensors.x.device.type
        self.direction = direction
        self.layer = layer
        self.part = choose_part(
            layer, direction, flops=MOST_FLOPS[device], elements=MOST_ELEMENTS[device]
        )
        part = self.part
        x, w = part.x(tensors.x), part.w(tensors.w)
        bias = None if tensors.bias is None else part.bias(tensors.bias)
        y = None if tensors.y is None else part.y(tensors.y)
        exact = _map(part.layer, direction, x, w, bias, y)
        contract = exact
        if tf32:
            rounded = (round_to_tf32(x), round_to_tf32(w))
            contract = _map(
                part.layer, direction, *rounded, bias, None if y is None else round_to_tf32(y)
            )
        magnitude = _map(
            part.layer,
            direction,
            x.abs(),
            w.abs(),
            None if bias is None else bias.abs(),
            None if y is None else y.abs(),
        )
        taps = layer.kernel_size[0] * layer.kernel_size[1]
        terms = {
            "forward": layer.in_channels // layer.groups * taps,
            "input_gradient": layer.out_channels // layer.groups * taps,
            "weight_gradient": layer.batch * layer.height * layer.width,
        }[direction]
        self.expected = Expected(direction, exact, contract, magnitude, terms, tensors.x.dtype)

    def _whole(self, result: Tensor) -> Tensor:
        """The result with its height, which PyTorch's and our function leave out in one dimension.

        Our operators, which the gradients are timed by, do not.
        """
        return with_height(self.layer, result) if result.dim() == 3 else result

    def of(self, result: Tensor) -> Tensor:
        """The part of a whole result."""
        take = {"forward": self.part.y, "input_gradient": self.part.x}
        return take.get(self.direction, self.part.w)(result)

    def error(self, result: Tensor) -> float:
        """The relative error of the part's norm."""
        exact = self.expected.exact
        off = self.of(result).double() - exact
        return float(off.norm() / exact.norm().clamp_min(1e-300))

    def rival(self, result: Tensor) -> tuple[float | None, str | None]:
        """The error of another package's whole result, and one sentence if it is another map.

        It need not keep our contract: TF32 is as good as float32, whatever was allowed.
        """
        shape = {"forward": self.layer.y_shape, "input_gradient": self.layer.x_shape}.get(
            self.direction, self.layer.w_shape
        )
        dtype = self.expected.dtype
        result = self._whole(result)
        if tuple(result.shape) != tuple(shape) or result.dtype != dtype:
            return None, (
                f"the result must be {dtype} of {tuple(shape)}, got {result.dtype} of "
                f"{tuple(result.shape)}"
            )
        if not bool(torch.isfinite(result).all()):
            return None, "the result has elements that were not written or are not finite"
        error, bound = self.error(result), max(_RIVAL, 2 * UNIT_ROUNDOFF[dtype])
        if error > bound:
            return error, f"its relative error is {error:.2e}, the bound is {bound:.2e}"
        return error, None

    def verdict(self, ours: Tensor, theirs: Tensor | None) -> Verdict:
        """Judges a whole result, and compares it with PyTorch's.

        On a CPU, where PyTorch computes ours too, a result is also right if it equals PyTorch's to
        the bit.
        """
        ours = self._whole(ours)
        theirs = None if theirs is None else self._whole(theirs)
        mine = self.of(ours)
        wrong = self.expected.why_wrong(mine)
        error = self.error(ours)
        if theirs is None:
            if wrong is None and not bool(torch.isfinite(ours).all()):
                wrong = "not every element was written: outside the part that was checked, some are"
                wrong += " not finite"
            return Verdict(error, None, None, self.part.text, wrong)
        if wrong is not None and not ours.is_cuda and torch.equal(ours, theirs):
            wrong = None
        other = self.error(theirs)
        apart = _apart(ours, theirs)
        if wrong is None and not apart <= _APART * (error + other) + 1e-6:
            wrong = (
                f"outside the part that was checked it is {apart:.2e} from PyTorch's result, where "
                f"the errors of the part, {error:.2e} and {other:.2e}, do not explain it"
            )
        return Verdict(error, other, apart, self.part.text, wrong)


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """|ours - theirs| / |theirs|; infinite if an element of ours is not finite."""
    if ours.shape != theirs.shape:
        return float("inf")
    norm = torch.linalg.vector_norm
    dtype = torch.float64 if ours.dtype == torch.float64 else torch.float32
    apart = float(norm(ours - theirs, dtype=dtype) / norm(theirs, dtype=dtype).clamp_min(1e-30))
    return apart if apart == apart else float("inf")


def _map(
    layer: Layer,
    direction: Direction,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    y: Tensor | None,
) -> Tensor:
    """One map in float64, by PyTorch, of operands that are given in their own dtype."""
    x, w = x.double(), w.double()
    if direction == "forward":
        bias = None if bias is None else bias.double()
        return with_height(layer, applied(layer, F, x, w, bias)())
    stride, padding, output_padding, dilation, groups = layer.geometry
    assert y is not None
    which = 0 if direction == "input_gradient" else 1
    return torch.ops.aten.convolution_backward.default(
        y.double(),
        x,
        w,
        None,
        stride,
        padding,
        dilation,
        True,
        output_padding,
        groups,
        [which == 0, which == 1, False],
    )[which]
