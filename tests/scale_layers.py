"""The layers of the benchmark, shrunk, through the public function: what the device's tests run.

    python tests/scale_layers.py

runs them over all of `SCALES` on the device, or in the emulator where there is none, and prints the
worst ratios, on a device with cuDNN's beside them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import tconv
from emulated_plans import HOPPER
from layer_cases import Case
from scale_cases import SCALES, Ratios, Worst, operands, wanted
from scale_plans import MODES, kind
from tconv import tuning
from tconv.jit.target import Target
from tconv.layers import Layer, read_layers
from tconv.plan import Candidate, candidates, plan
from tconv.problem import Direction, Math

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

LAYERS = Path(__file__).parent.parent / "benchmarks" / "results" / "h200" / "layers.json"

MOST_WEIGHTS = 2_200_000
MOST_PRODUCTS = 100_000_000
MOST_SIZE = (24, 72)


def shrunk(layer: Layer) -> Case:
    """The layer with at most three images, and what else makes it quick: first smaller images,
    whose rows stay multiples of 16 bytes, and for the largest fewer channels.
    """
    groups = layer.groups
    in_channels, out_channels = layer.in_channels // groups, layer.out_channels // groups
    taps = layer.kernel_size[0] * layer.kernel_size[1]
    while groups * in_channels * out_channels * taps > MOST_WEIGHTS:
        if groups > 1:
            groups //= 2
        else:
            in_channels //= 2
    batch = min(layer.batch, 3)
    height, width = (min(size, most) for size, most in zip(layer.size, MOST_SIZE, strict=True))
    per_pixel = batch * groups * in_channels * out_channels * taps
    while height * width * per_pixel > MOST_PRODUCTS and max(height, width) > 4:
        if height >= width:
            height = max(4, height // 2)
        else:
            width = max(4, width // 8 * 4)
    return Case(
        batch,
        in_channels,
        out_channels,
        groups,
        (height, width),
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.output_padding,
        layer.dilation,
        bias=False,
    )


@dataclass(frozen=True)
class Call:
    """A map of a layer as a user calls it.

    Attributes:
        name: the layer's.
        case: the layer, shrunk.
        direction, math: which map, and what it may be computed in.
        candidate: what computes it, which the plan takes for the layer as it was; None: what it
            takes for the shrunk one.
        stem: the kernel.
    """

    name: str
    case: Case
    direction: Direction
    math: Math
    candidate: Candidate | None
    stem: str

    def __str__(self) -> str:
        whole = "-whole" if self.candidate is not None else ""
        return f"{self.name}-{self.direction}-{self.math}-{self.stem}{whole}"

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        """What Hypothesis prints."""
        printer.text(str(self))

    def operands(self, name: str, seed: int) -> tuple[Tensor, Tensor]:
        """`scale_cases.operands` on `DEVICE`."""
        first, second = operands(self.direction, self.case, name, seed)
        return first.to(DEVICE), second.to(DEVICE)

    def run(self, first: Tensor, second: Tensor) -> Tensor:
        """The result on operands as `scale_cases.operands` returns them, on `DEVICE`."""
        choice = (
            contextlib.nullcontext() if self.candidate is None else tuning.using(self.candidate)
        )
        with flags(self.math), choice:
            return self._run(first, second, tconv.conv_transpose2d)

    def run_pytorch(self, first: Tensor, second: Tensor) -> Tensor:
        """PyTorch's result, with the same flags."""
        with flags(self.math):
            return self._run(first, second, F.conv_transpose2d)

    def _run(self, first: Tensor, second: Tensor, function) -> Tensor:
        stride, padding, output_padding, dilation, groups = self.case.geometry

        def forward(x: Tensor, w: Tensor) -> Tensor:
            return function(x, w, None, stride, padding, output_padding, groups, dilation)

        if self.direction == "forward":
            return forward(first, second)
        # The output is that of zeros, for the gradient alone.
        if self.direction == "input_gradient":
            x = first.new_zeros(self.case.layer.x_shape).requires_grad_()
            return torch.autograd.grad(forward(x, second), x, first)[0]
        w = first.new_zeros(self.case.layer.w_shape).requires_grad_()
        return torch.autograd.grad(forward(first, w), w, second)[0]

    def ratios(self, name: str, seed: int, *, of_pytorch: bool = False) -> Ratios:
        """On operands of one of `SCALES`."""
        got = (self.run_pytorch if of_pytorch else self.run)(*self.operands(name, seed))
        held_to = wanted(self.direction, self.case, name, seed, self.math, DEVICE)
        by = () if self.direction == "weight_gradient" else SCALES[name].by
        return held_to.ratios(got, by)


@contextlib.contextmanager
def flags(math: Math) -> Iterator[None]:
    """PyTorch's, of what float32 may be computed in."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = math == "tf32"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@functools.cache
def calls(direction: Direction) -> tuple[Call, ...]:
    """Of every layer and mode; in forward, where the plan takes another kernel or kind of tile for
    the layer as it was, which serves the shrunk one too, also with that.
    """
    target = Target.for_device(0) if DEVICE == "cuda" else HOPPER
    found: dict[tuple[object, ...], Call] = {}  # some layers are the same when they are shrunk
    for layer in read_layers(LAYERS):
        layer = dataclasses.replace(layer, bias=False)
        case = shrunk(layer)
        for math in MODES:
            problem = case.layer.problem(direction, tf32=math == "tf32")
            if problem.math != math:  # too few channels
                continue
            own = plan(problem, target)
            call = Call(layer.name, case, direction, math, None, own.stem)
            found.setdefault((case, math, own.stem, own.tile), call)
            if direction != "forward":
                continue
            whole = plan(layer.problem(direction, tf32=math == "tf32"), target)
            if (whole.stem, kind(whole.stem, whole.tile)) == (own.stem, kind(own.stem, own.tile)):
                continue
            for one in candidates(problem, target):
                if (one.stem, one.tile, one.refusal) == (whole.stem, whole.tile, None):
                    call = Call(layer.name, case, direction, math, one, one.stem)
                    found.setdefault((case, math, one.stem, one.tile), call)
    return tuple(found.values())


@functools.cache
def gradients() -> tuple[Call, ...]:
    """Of some layers: one kernel computes all of each."""
    return (*calls("input_gradient")[::4], *calls("weight_gradient")[::4])


def main() -> None:
    """Prints the worst ratios of all calls."""
    os.environ["TCONV_STRICT"] = "1"
    if DEVICE == "cpu":
        os.environ["TCONV_EMULATE"] = "1"
    worst = Worst()
    for call in (*calls("forward"), *gradients()):
        for name in SCALES:
            worst.note(call.stem, call.math, name, call.ratios(name, 0))
            if DEVICE == "cuda":
                theirs = call.ratios(name, 0, of_pytorch=True)
                worst.note(f"PyTorch, {call.direction}", call.math, name, theirs)
    print(worst)


if __name__ == "__main__":
    main()
