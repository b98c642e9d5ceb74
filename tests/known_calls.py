"""Calls that differ in all that a call may depend on, warm and from a cold start.

A call with the `run.signature` of one before it goes straight to its launches. Its result must be
the bits that it has where nothing is remembered. Shared by the emulator's tests and the
device's.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad

import tconv
from tconv import functional, plan
from tconv.errors import TconvError
from tconv.run import binding
from tconv.run import calls as run_calls

INPUTS = (
    "contiguous", "channels_last", "transposed", "sliced", "expanded", "misaligned", "negative",
    "zero", "leaked",
)  # fmt: skip
WEIGHTS = ("contiguous", "channels_last", "transposed", "negative", "leaked")
BIASES = ("none", "contiguous", "sliced", "negative", "zero")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a small layer; what it changes in PyTorch it puts back."""

    seed: int = 0
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None  # another than the input's, which autocast alone allows
    input: str = "contiguous"
    weight: str = "contiguous"
    bias: str = "none"
    batch: int = 1
    columns: int = 4
    stride: int = 2
    allow_tf32: bool = True
    cudnn: bool = True
    deterministic: bool = False
    autocast: bool = False
    mode: str = "grad"
    other_thread: bool = False
    device: str = "cpu"

    def __call__(self, function: Callable[..., Tensor]) -> list[Tensor] | str:
        """The output, in mode "grad" the gradients of the input and the weight; or the error."""
        results: list[list[Tensor] | str] = []

        def target() -> None:
            try:
                results.append(self._results(function))
            except (RuntimeError, TconvError) as error:
                results.append(f"{type(error).__name__}: {error}")

        if self.other_thread:
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        else:
            target()
        return results[0]

    def _results(self, function: Callable[..., Tensor]) -> list[Tensor]:
        with self._surroundings():
            x, w, bias = self._operands()
            # No gradient leads to a leaked tensor.
            kinds = ((x, self.input), (w, self.weight)) if self.mode == "grad" else ()
            leaves = [t.requires_grad_() for t, how in kinds if how != "leaked"]
            output = function(x, w, bias, self.stride, 0, self.stride - 1)
            results = [output.detach()]
            if leaves:
                results += torch.autograd.grad(output.sum(), leaves)
        return results

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        before = torch.are_deterministic_algorithms_enabled()
        with ExitStack() as stack:
            stack.callback(torch.use_deterministic_algorithms, before)
            torch.use_deterministic_algorithms(self.deterministic)
            flags = torch.backends.cudnn.flags
            stack.enter_context(flags(enabled=self.cudnn, allow_tf32=self.allow_tf32))
            stack.enter_context(torch.autocast(self.device, torch.bfloat16, enabled=self.autocast))
            if self.mode == "inference":
                stack.enter_context(torch.inference_mode())
            elif self.mode == "no grad":
                stack.enter_context(torch.no_grad())
            yield

    def _operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*size: int) -> Tensor:
            values = torch.randn(size, generator=generator, dtype=torch.float64)
            return values.to(self.device, self.dtype)

        x, w, bias = normal(self.batch, 16, 2, self.columns), normal(16, 3, 2, 2), normal(3)
        w = w.to(self.weight_dtype or self.dtype)
        laid_out = None if self.bias == "none" else _laid_out(bias, self.bias)
        return _laid_out(x, self.input), _laid_out(w, self.weight), laid_out


def _laid_out(values: Tensor, how: str) -> Tensor:
    """A tensor of these values, or of as many zeros or repeated ones, in memory as `how` says."""
    if how == "channels_last":
        return values.contiguous(memory_format=torch.channels_last)
    if how == "transposed":
        return values.mT.contiguous().mT
    if how == "sliced":
        return torch.stack([values, values.neg()], -1).flatten(-2)[..., ::2]
    if how == "expanded":
        return values[:, :, :1].clone().expand(values.shape)
    if how == "misaligned":
        return torch.cat([values.new_zeros(1), values.flatten()])[1:].view(values.shape)
    if how == "negative":
        # There are no complex numbers of bfloat16; and a bias is read as it lies where it is dense.
        if values.dtype is torch.bfloat16 or values.dim() == 1:
            return torch._neg_view(values.neg())
        return torch.complex(values, -values).conj().imag
    if how == "zero":
        return torch._efficientzerotensor(values.shape, dtype=values.dtype, device=values.device)
    if how == "leaked":
        found: list[Tensor] = []
        with torch.inference_mode(False), torch.enable_grad():
            grad(lambda t: (found.append(t), t.sum())[1])(values.clone())
        return found[0]
    return values.clone()


def calls(device: str) -> st.SearchStrategy[list[Call]]:
    """Sequences of calls, each much like the others: what one leaves may be taken for another's."""
    fields: dict[str, st.SearchStrategy[Any]] = {
        "dtype": st.sampled_from(DTYPES),
        "weight_dtype": st.sampled_from((None, *DTYPES)),
        "input": st.sampled_from(INPUTS),
        "weight": st.sampled_from(WEIGHTS),
        "bias": st.sampled_from(BIASES),
        "batch": st.sampled_from((1, 2)),
        "columns": st.sampled_from((4, 3)),
        "stride": st.sampled_from((2, 1)),
        "allow_tf32": st.booleans(),
        "cudnn": st.booleans(),
        "deterministic": st.booleans(),
        "autocast": st.booleans(),
        "mode": st.sampled_from(("grad", "no grad", "inference")),
        "other_thread": st.booleans(),
        "device": st.sampled_from(sorted({"cpu", device})),
    }

    @st.composite
    def draw(draw: st.DrawFn) -> list[Call]:
        call = Call(device=device)
        sequence = []
        for seed in range(draw(st.integers(2, 12))):
            for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=2)):
                call = dataclasses.replace(call, **{name: draw(fields[name])})
            sequence.append(dataclasses.replace(call, seed=seed))
        return sequence

    return draw()


def forget() -> None:
    """Clears what calls leave behind for those after them."""
    run_calls._known.clear()
    for module in (functional, run_calls, binding, plan):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def assert_as_from_a_cold_start(sequence: list[Call]) -> None:
    """Runs the calls one after another, then each with nothing remembered, and compares bits.

    And the values, roughly, with PyTorch's: what is wrong with and without a memory is wrong too.
    """
    forget()
    warm = [call(tconv.conv_transpose2d) for call in sequence]
    for call, results in zip(sequence, warm, strict=True):
        forget()
        cold = call(tconv.conv_transpose2d)
        # cuBLAS, which PyTorch takes without cuDNN, refuses to be deterministic by itself.
        pytorchs = dataclasses.replace(call, deterministic=False)(F.conv_transpose2d)
        if isinstance(results, str) or isinstance(cold, str) or isinstance(pytorchs, str):
            assert results == cold == pytorchs, call
            continue
        for got, want, theirs in zip(results, cold, pytorchs, strict=True):
            assert got.is_inference() == want.is_inference() == theirs.is_inference(), call
            assert got.dtype == want.dtype == theirs.dtype, call
            assert got.shape == want.shape and got.stride() == want.stride(), call
            assert torch.equal(got, want), call
            assert (got - theirs).norm() <= 0.02 * theirs.norm(), call
