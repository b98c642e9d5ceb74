"""Measuring one computation against another: errors, bounds, times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

FLOAT32_FLOOR = 1e-6
"""Below this relative error a float32 result counts as right, whatever PyTorch's own error is."""

TF32_FLOOR = 1e-3
"""The same where TF32 is allowed: a few layers, each of which may round its operands to TF32."""


@dataclass(frozen=True)
class Comparison:
    """One tensor computed by PyTorch, by tconv and in float64; all errors are relative norms."""

    name: str
    shape: tuple[int, ...]
    torch_error: float
    """PyTorch's distance from float64."""
    tconv_error: float
    """tconv's distance from float64."""
    difference: float
    """tconv's distance from PyTorch."""
    bound: float
    """What tconv_error may be at most: twice PyTorch's error, and never less than the floor."""

    @property
    def ok(self) -> bool:
        """Whether tconv's error is within the bound (a NaN is not)."""
        return self.tconv_error <= self.bound


def relative_error(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference| in float64, or |value| where the reference is zero."""
    reference = reference.detach().double()
    distance = float((value.detach().double() - reference).norm())
    norm = float(reference.norm())
    return distance / norm if norm > 0 else distance


def compare(name: str, theirs: Tensor, ours: Tensor, exact: Tensor, floor: float) -> Comparison:
    """Compare one tensor; `exact` is the same computed in float64."""
    torch_error = relative_error(theirs, exact)
    return Comparison(
        name,
        tuple(exact.shape),
        torch_error,
        relative_error(ours, exact),
        relative_error(ours, theirs),
        max(2 * torch_error, floor),
    )


def worst(name: str, comparisons: Sequence[Comparison]) -> Comparison:
    """The comparison that failed, else the one nearest to its bound, under a new name."""
    row = max(comparisons, key=lambda c: c.tconv_error / c.bound if c.ok else float("inf"))
    return Comparison(name, (), row.torch_error, row.tconv_error, row.difference, row.bound)


def results(module: nn.Module, inputs: Sequence[Tensor], cotangent: Tensor) -> dict[str, Tensor]:
    """Run forward and backward once: the output, and the gradient of every input and parameter."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    module.zero_grad(set_to_none=True)
    output = module(*leaves)
    output.backward(cotangent)
    named = {"output": output.detach()}
    for number, leaf in enumerate(leaves):
        assert leaf.grad is not None
        named[f"input{number}.grad"] = leaf.grad
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        named[f"{name}.grad"] = parameter.grad
    return named


def median_times(steps: Sequence[Callable[[], object]], repeats: int, cuda: bool) -> list[float]:
    """The median time of each step in milliseconds; the steps take turns, after one warm-up."""
    times: list[list[float]] = [[] for _ in steps]
    for repeat in range(repeats + 1):
        for step, taken in zip(steps, times, strict=True):
            milliseconds = _cuda_milliseconds(step) if cuda else _cpu_milliseconds(step)
            if repeat > 0:
                taken.append(milliseconds)
    return [statistics.median(taken) for taken in times]


def _cpu_milliseconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - start)


def _cuda_milliseconds(step: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
